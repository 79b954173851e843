"""Residual: what measured steps say about predictions of steps that are not measured yet. N candidates, T traits, P
numbers of the machine.

log(measured / predicted) is a Gaussian process, the sum of four errors: one that all candidates share, those of the few
numbers of the machine, by how the times of candidates follow them, one that those with like traits share (such as the
logarithm of the number of stages), and each candidate's own, of which one placement's orders of ops share most. So a
step that takes longer than predicted makes others longer as far as they are like it, and the order of the predictions
stands where nothing speaks against it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

_F64 = npt.NDArray[np.float64]
_SHARED = 0.5  # deviation of the error that all share: it may be large, and changes no order
# of the variance of errors; on choices with set rows as good as 0 and 0.5, and better than 0.8
# (`python -m benchmarks few-measurements`)
_OF_TRAITS = 0.2
_OF_PLACEMENT = 0.9  # of what is left: errors of one placement in all its orders. Untuned
_LIKELY = 0.05  # chance of a faster candidate below which there is nothing to look for. Untuned


@dataclass(frozen=True, slots=True)
class Proposal:
    """The candidate to measure next."""

    candidate: int
    predicted_ns: float  # with the residual
    chance: float  # of being faster than the fastest measured one by more than the noise

    @property
    def is_likely(self) -> bool:
        """Returns whether it is worth a measurement."""
        return self.chance >= _LIKELY


@dataclass(frozen=True, eq=False)
class Residual:
    """Predicted times of candidates, and how their errors go together."""

    log_predicted: _F64  # [N] of ns
    covariance: _F64  # [N, N] of errors
    noise: float  # relative deviation of a measurement

    @classmethod
    def of(
        cls,
        predicted_ns: npt.ArrayLike,
        traits: npt.ArrayLike,
        spread: float,
        noise: float,
        moves: npt.ArrayLike = (),
        placed: Sequence[str] = (),
    ) -> "Residual":
        """Returns the residual before anything is measured. `traits` [N, T] may be in any unit; `spread` is the
        relative deviation of predictions, and `moves` [N, P] are those by each number of the machine. `placed` [N] is
        equal for candidates that differ in order alone, and "" for others."""
        predicted, values = np.log(np.asarray(predicted_ns, float)), np.asarray(traits, float)
        values = values.reshape(len(predicted), -1)
        deviation = values.std(axis=0)
        values = values[:, deviation > 0] / deviation[deviation > 0]
        distance = ((values[:, None] - values) ** 2).sum(axis=2) / max(values.shape[1], 1)
        labels = np.array([label or number for number, label in enumerate(placed or [""] * len(predicted))], object)
        own = _OF_PLACEMENT * (labels[:, None] == labels) + (1 - _OF_PLACEMENT) * np.eye(len(predicted))
        shares = _OF_TRAITS * np.exp(-distance / 2) + (1 - _OF_TRAITS) * own
        by_machine = np.asarray(moves, float).reshape(len(predicted), -1)
        return cls(predicted, _SHARED**2 + by_machine @ by_machine.T + spread**2 * shares, noise)

    def after(self, measured_ns: Mapping[int, float]) -> tuple[_F64, _F64]:
        """Returns the mean [N] and the deviation [N] of log(ns) of each candidate. Failed ones, which are measured as
        infinitely long, say nothing about others."""
        known = [number for number, time_ns in measured_ns.items() if time_ns < inf]
        if not known:
            return self.log_predicted, np.sqrt(self.covariance.diagonal())
        errors = np.log([measured_ns[number] for number in known]) - self.log_predicted[known]
        beside = self.covariance[:, known]
        among = beside[known] + self.noise**2 * np.eye(len(known))
        weights = np.linalg.solve(among, np.column_stack([errors, beside.T]))
        variance = self.covariance.diagonal() - np.einsum("nk,kn->n", beside, weights[:, 1:])
        return self.log_predicted + beside @ weights[:, 0], np.sqrt(variance.clip(1e-12))

    def answer(self, measured_ns: Mapping[int, float]) -> int:
        """Returns the fastest of the candidates that were measured; the prediction decides where noise hides which."""
        means, _ = self.after(measured_ns)
        return min(measured_ns, key=lambda number: (measured_ns[number] == inf, means[number]))

    def proposal(self, measured_ns: Mapping[int, float]) -> Proposal | None:
        """Returns the candidate from which most improvement is expected (J. Mockus, 1975); None where all are measured.
        Before the first measurement it is the one that is predicted to be the fastest."""
        left = np.array([number for number in range(len(self.log_predicted)) if number not in measured_ns], int)
        if not left.size:
            return None
        means, deviations = (values[left] for values in self.after(measured_ns))
        best = log(fastest) if (fastest := min(measured_ns.values(), default=inf)) < inf else inf
        if best == inf:
            chosen, chance = int(np.argmin(means)), 1.0
        else:
            chosen = int(np.argmax(expected_gain(best, means, deviations)))
            chance = float(norm.cdf((best - self.noise - means) / deviations).max())
        return Proposal(int(left[chosen]), float(np.exp(means[chosen])), chance)


def expected_gain(best: float, means: _F64, deviations: _F64) -> _F64:
    """Returns by how much candidates of normal distributions are expected to be below `best`, which stays if they are
    not."""
    ratio = (best - means) / deviations
    gain: _F64 = deviations * (ratio * norm.cdf(ratio) + norm.pdf(ratio))
    return gain
