"""What measured choices of other machines teach: the residual's mean and widths, and the shares of proposers.

The residual of `gdp.tune` has errors with mean 0, and widths that are set. Here the mean is a ridge regression of
log(measured / predicted) on traits, relative to the choice, and the widths are the likeliest of a few.

A bandit chooses among three that propose the next candidate: the policy, the order of costs, the residual. One has won
when the candidate that it proposed is at least as fast as all before; only the first few measurements are counted. The
bandit draws from what it believes of each (W. Thompson, 1933; Beta distributions), which begins with the wins on other
machines, at most so many that a run can change it. All who proposed the candidate are credited.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

import numpy as np
from scipy.stats import multivariate_normal

from benchmarks.few_measurements.scorer import features_of, order_of
from benchmarks.few_measurements.trial import Arm, ArmRun, Lessons, Trial, one_by_one, play
from benchmarks.measured_sources.choices import Choice
from gdp.arrays import F64
from gdp.tune.residual import Residual

PROPOSERS = "policy", "costs", "residual"
_SHARED = 0.5  # deviation of the error that all candidates share, as the residual has it
_WIDTHS, _OF_TRAITS = (0.4, 0.7, 1.0, 1.5), (0.0, 0.2, 0.5, 0.8)  # of the spread; of the variance
_RIDGES = (3.0, 30.0, 300.0, np.inf)
_EARLY = 5  # measurements that are counted
_MOST_BELIEVED, _NOISE = 10.0, 0.02  # measurements that wins elsewhere count as; of a measurement there


def _errors(choice: Choice) -> F64:
    return np.log(choice.measured / choice.predicted)


def _relative(choice: Choice) -> F64:
    """Returns known traits less those of the candidate that is predicted to be the fastest [N, F]."""
    return features_of(choice.predicted, choice.spreads, choice.traits, choice.names)[:, 3:]


def _alike(choice: Choice) -> F64:
    """Returns how alike candidates are [N, N], as the residual of `gdp.tune` has it."""
    deviation = choice.traits.std(axis=0)
    values = choice.traits[:, deviation > 0] / deviation[deviation > 0]
    distance = ((values[:, None] - values) ** 2).sum(axis=2) / max(values.shape[1], 1)
    return np.asarray(np.exp(-distance / 2))


def _covariance(choice: Choice, width: float, of_traits: float) -> F64:
    own = of_traits * _alike(choice) + (1 - of_traits) * np.eye(len(choice.measured))
    return _SHARED**2 + (width * choice.spread) ** 2 * own


def _ridge(choices: Sequence[Choice], penalty: float) -> F64:
    """Returns a weight for each known trait; a choice counts as one, however many candidates it has."""
    size = _relative(choices[0]).shape[1]
    if penalty == np.inf:
        return np.zeros(size)
    squares, sums = np.eye(size) * penalty, np.zeros(size)
    for choice in choices:
        traits, errors = _relative(choice), _errors(choice)
        traits, errors = traits - traits.mean(axis=0), errors - errors.mean()
        squares += traits.T @ traits
        sums += traits.T @ errors
    return np.asarray(np.linalg.solve(squares, sums), np.float64)


@cache
def learned(choices: tuple[Choice, ...]) -> tuple[F64, float, float]:
    """Returns the weights of traits, the width and the share of traits that make the errors of choices the likeliest.
    The penalty is the one whose weights predict errors on machines that they are not fitted to."""
    machines = sorted({choice.machine for choice in choices})

    def missed(penalty: float) -> float:
        total = 0.0
        for machine in machines:
            others = [choice for choice in choices if choice.machine != machine]
            weights = _ridge(others or choices, penalty)
            for choice in choices:
                if choice.machine == machine:
                    total += float(np.var(_errors(choice) - _relative(choice) @ weights))
        return total

    weights = _ridge(choices, min(_RIDGES, key=missed) if len(machines) > 1 else np.inf)

    def likelihood(widths: tuple[float, float]) -> float:
        return sum(
            float(multivariate_normal.logpdf(_errors(each) - _relative(each) @ weights, cov=_covariance(each, *widths)))
            for each in choices
        )

    return weights, *max(product(_WIDTHS, _OF_TRAITS), key=likelihood)


def _residual_of(choice: Choice, noise: float, lessons: tuple[Choice, ...]) -> Residual:
    weights, *widths = learned(lessons)
    return Residual(np.log(choice.predicted) + _relative(choice) @ weights, _covariance(choice, *widths), noise)


def propose(residual: Residual, measured: Mapping[int, float]) -> int:
    """Returns the candidate from which most improvement is expected; one is left."""
    proposal = residual.proposal(measured)
    assert proposal is not None
    return proposal.candidate


def _learned_residual(of: str) -> Arm:
    def player(trial: Trial, lessons: Lessons) -> ArmRun:
        residual = _residual_of(trial.choice, trial.noise, getattr(lessons, of))
        return ArmRun(lambda measured: propose(residual, measured), residual.answer)

    return Arm(one_by_one(player), of)


class _Bandit:
    """A run of the bandit on a trial; wins and losses [P] begin as they are given, and are counted on."""

    def __init__(self, trial: Trial, lessons: Lessons, counts: F64) -> None:
        choice = trial.choice
        self.orders = order_of(choice, lessons), np.argsort(choice.predicted, kind="stable").tolist()
        self.residual = Residual.of(choice.predicted, choice.traits, choice.spread, trial.noise)
        self.counts, self.generator = counts, trial.generator
        self.proposed: tuple[int, ...] = ()

    def propose(self, measured: Mapping[int, float]) -> int:
        self.credit(measured)
        first = (next(number for number in order if number not in measured) for order in self.orders)
        self.proposed = *first, propose(self.residual, measured)
        return self.proposed[int(np.argmax(self.generator.beta(*self.counts)))]

    def credit(self, measured: Mapping[int, float]) -> None:
        """Counts what the last measurement says; the first has none before it."""
        if 1 < len(measured) <= _EARLY:
            last = list(measured)[-1]
            won = measured[last] == min(measured.values())
            self.counts[0 if won else 1] += [each == last for each in self.proposed]


def _player(trial: Trial, lessons: Lessons) -> ArmRun:
    bandit = _Bandit(trial, lessons, beliefs(lessons).copy())
    return ArmRun(bandit.propose, bandit.residual.answer)


def shares(lessons: Lessons) -> F64:
    """Returns how often each proposer is heard [P] as the bandit begins."""
    wins, losses = beliefs(lessons)
    drawn = np.random.default_rng(0).beta(wins, losses, size=(2000, len(PROPOSERS)))
    return np.bincount(drawn.argmax(axis=1), minlength=len(PROPOSERS)) / len(drawn)


@cache
def beliefs(lessons: Lessons) -> F64:
    """Returns wins and losses [2, P] of proposers on other machines, less where there are many; without any 1 each."""
    counts = np.ones((2, len(PROPOSERS)))
    for number, choice in enumerate(lessons.other_machines):
        trial = Trial(choice, _NOISE, number)
        bandit = _Bandit(trial, lessons, counts)
        play(trial, ArmRun(bandit.propose, bandit.residual.answer))
    return np.asarray(counts * np.minimum(1, _MOST_BELIEVED / counts.sum(axis=0)))


ELSEWHERE = {
    "residual of other machines": _learned_residual("other_machines"),
    "residual of other tables": _learned_residual("other_tables"),
    "bandit over proposers": Arm(one_by_one(_player), "drawn"),
}
