"""Benchmark `few-measurements`: the fastest of some ways to run a step, found with few measurements.

Tables of times that others measured stand for the hardware: a choice is a group of their rows, and a measurement looks
one of them up, with noise. An arm says which candidate is measured next; its answer is the fastest measured one, and
its regret how much slower that one is than the fastest of all, as the table has them.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.figures import Series, line_plot
from benchmarks.measured_sources.choices import TABLES, Choice
from benchmarks.measured_sources.source import CapturedGraphs
from benchmarks.rows import Rows
from gdp.tune.residual import Residual, expected_gain

COUNTS = 1, 2, 3, 5, 10, 25, 50
_WIDE = 0.5  # relative deviation of naive times: they are off by a factor, which depends on the layout

Pick = Callable[[Mapping[int, float]], int]
"""From measured times by candidate to a candidate."""


def fastest(measured: Mapping[int, float]) -> int:
    """Returns the candidate with the shortest measured time."""
    return min(measured, key=measured.__getitem__)


class ArmRun(NamedTuple):
    """A run of an arm."""

    propose: Pick  # what is measured next
    answer: Pick = fastest  # of the measured ones


Arm = Callable[[Choice, float, np.random.Generator], ArmRun]
"""From a choice, the relative noise of measurements and a generator to an arm's run."""


@dataclass(frozen=True, kw_only=True)
class FewMeasurementsBenchmark(Benchmark):
    """All arms on each choice of `sources`, with measurements to within each of `noises`."""

    name = "few-measurements"
    sources: tuple[str, ...] = tuple(table.name for table in TABLES)
    noises: tuple[float, ...] = (0.01, 0.05)
    seeds: int = 20

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        chosen = pick(self.name, "source", self.sources, tuple(table.name for table in TABLES))
        graphs, parts = CapturedGraphs(rows), []
        for table in (each for each in TABLES if each.name in chosen):
            choices = table.choices(rows, graphs, say)
            for is_set in (False, True):
                own = [choice for choice in choices if choice.is_set == is_set]
                if own:
                    parts.append(self._part(table.name, table.about, own, rows, say))
        return {"tables": parts, "counts": COUNTS, "arms": list(ARMS)}

    def _part(self, name: str, about: str, choices: Sequence[Choice], rows: Rows, say: Say) -> dict[str, Any]:
        is_set, results = choices[0].is_set, list[dict[str, Any]]()
        sizes = [len(choice.measured) for choice in choices]
        for noise in self.noises:
            for arm in ARMS:
                settings = {"seeds": self.seeds, "num_choices": len(choices)}
                key = f"{name}-{'set' if is_set else 'judged'}-{arm}-{noise}"
                row = rows.row(key, settings, lambda arm=arm, noise=noise: self._arm(arm, choices, noise))  # type: ignore[misc]
                say(f"{key}: {', '.join(f'{mean:.2%}' for mean in row['mean'])}")
                results.append({"arm": arm, "noise": noise, **row})
        facts = {"num_choices": len(choices), "fewest": min(sizes), "most": max(sizes)}
        return {"source": name, "about": about, "is_set": is_set, **facts, "results": results}

    def _arm(self, arm: str, choices: Sequence[Choice], noise: float) -> dict[str, Any]:
        """Returns the mean regret after each number of measurements, its deviation over seeds, and what is needed for a
        regret of at most 1 %."""
        regrets = np.array(
            [[regrets_of(ARMS[arm], choice, noise, seed) for choice in choices] for seed in range(self.seeds)]
        )  # [seeds, choices, most measurements]
        by_seed = regrets.mean(axis=1)
        at = [count - 1 for count in COUNTS]
        means = by_seed.mean(axis=0)
        return {
            "mean": means[at].tolist(),
            "deviation": by_seed.std(axis=0)[at].tolist(),
            "worst": regrets.mean(axis=0).max(axis=0)[at].tolist(),
            "num_to_percent": int(np.argmax(means <= 0.01)) + 1 if (means <= 0.01).any() else None,
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes | None:
        part, noise = next(iter(measured["tables"])), self.noises[0]
        lines = {}
        for row in part["results"]:
            if row["noise"] == noise:
                spread = zip(row["mean"], row["deviation"], strict=True)
                points = [(count, 100 * mean) for count, mean in zip(COUNTS, row["mean"], strict=True)]
                lines[row["arm"]] = Series(points[:5], [(100 * (m - d), 100 * (m + d)) for m, d in spread][:5])
        title = f"{part['about']}: regret"
        return line_plot(title, "measurements", "% slower than the fastest", lines, COUNTS[:5])


def regrets_of(arm: Arm, choice: Choice, noise: float, seed: int) -> npt.NDArray[np.float64]:
    """Returns the regret after 1, 2, ... measurements: what the arm
    answers with. All arms see the same noise of a seed."""
    count, true = len(choice.measured), choice.measured
    seen = true * np.exp(noise * np.random.default_rng(seed).standard_normal(count))
    run = arm(choice, noise, np.random.default_rng((seed, 1)))
    measured, regrets = dict[int, float](), []
    while len(measured) < min(count, COUNTS[-1]):
        candidate = run.propose(measured)
        measured[candidate] = float(seen[candidate])
        regrets.append(true[run.answer(measured)] / true.min() - 1)
    return np.array(regrets + regrets[-1:] * (COUNTS[-1] - len(regrets)))


def _in_order(keys_of: Callable[[Choice], Any]) -> Arm:
    """Returns an arm that measures by the least key, ties in random order."""

    def arm(choice: Choice, _noise: float, generator: np.random.Generator) -> ArmRun:
        ties = generator.permutation(len(choice.measured))
        keys = keys_of(choice)
        order = sorted(range(len(ties)), key=lambda number: (keys[number], ties[number]))
        return ArmRun(lambda measured: next(number for number in order if number not in measured))

    return arm


def _with_residual(times_of: Callable[[Choice], npt.ArrayLike], spread_of: Callable[[Choice], float]) -> Arm:
    """Returns an arm whose residual is refitted after each measurement."""

    def arm(choice: Choice, noise: float, _generator: np.random.Generator) -> ArmRun:
        residual = Residual.of(times_of(choice), choice.traits, spread_of(choice), noise)

        def propose(measured: Mapping[int, float]) -> int:
            proposal = residual.proposal(measured)
            assert proposal is not None, "one is left"
            return proposal.candidate

        return ArmRun(propose, residual.answer)

    return arm


def _gaussian_process(choice: Choice, noise: float, generator: np.random.Generator) -> ArmRun:
    """Returns the run of Bayesian optimisation over traits, without costs: the first two candidates are drawn."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    deviation = choice.traits.std(axis=0)
    traits = (choice.traits / np.where(deviation > 0, deviation, 1))[:, deviation > 0]
    kernel = ConstantKernel(1.0, (0.05, 20)) * Matern(1.0, (0.2, 20), nu=2.5) + WhiteKernel(noise**2, (1e-6, 0.1))

    def propose(measured: Mapping[int, float]) -> int:
        left = [number for number in range(len(traits)) if number not in measured]
        if len(measured) < 2:
            return int(generator.choice(left))
        known = list(measured)
        logs = np.log([measured[number] for number in known])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length is at a bound: few points say little
            process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0).fit(traits[known], logs)
        means, deviations = process.predict(traits[left], return_std=True)
        gains = expected_gain(logs.min(), means, deviations.clip(1e-9))
        return left[int(np.argmax(gains))]

    return ArmRun(propose)


ARMS: Mapping[str, Arm] = {
    "random": _in_order(lambda choice: np.zeros(len(choice.measured))),
    "expert's rule": _in_order(lambda choice: choice.preference),
    "naive costs": _in_order(lambda choice: choice.naive),
    "naive costs, residual": _with_residual(lambda choice: choice.naive, lambda _: _WIDE),
    "Gaussian process": _gaussian_process,
    "gdp's costs": _in_order(lambda choice: choice.predicted),
    "gdp's costs, residual": _with_residual(lambda choice: choice.predicted, lambda choice: choice.spread),
}
