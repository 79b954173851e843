"""Results side by side: those of a workload's classical placers, and of methods that ran with several seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.page import geometric_mean, milliseconds, number, spread
from benchmarks.runs import Run
from gdp.simulator.plan import Baseline

EXPERTS = ("expert", "single")  # a single device where all fits counts as expert too
EXPERT, BEST_CLASSICAL = "expert", "best classical"  # the faster of the experts; the fastest baseline


@dataclass(frozen=True, kw_only=True)
class WorkloadRow:
    """A workload with its baselines, which are the classical placers in most benchmarks, and the runs of methods."""

    workload: str
    cluster: str
    num_ops: int
    lower_bound_ns: int
    baselines: Mapping[str, Baseline]  # each placer's best run over the seeds
    runs: Mapping[str, tuple[Run, ...]]  # by method, then by seed

    @cached_property
    def best_classical(self) -> str | None:
        """The fastest baseline whose plan fits; None if there is none."""
        return self._fastest(self.baselines)

    @cached_property
    def best_expert(self) -> str | None:
        """`expert` or `single`, whichever fits and is faster; None if neither fits."""
        return self._fastest(name for name in EXPERTS if name in self.baselines)

    @property
    def num_plans(self) -> int:
        """Plans that fit, each of which was saved, read back and replayed."""
        return sum(run.status == "ok" for runs in self.runs.values() for run in runs)

    def times_ns(self, name: str) -> tuple[int, ...] | None:
        """Returns the step times by seed of a method or, as one time, of a baseline, `EXPERT` or `BEST_CLASSICAL`.

        None if there is none, or a seed found no plan that fits.
        """
        if name in self.runs:
            times = [run.step_time_ns for run in self.runs[name] if run.status == "ok" and run.step_time_ns is not None]
            return tuple(times) if len(times) == len(self.runs[name]) else None
        baseline = self.baselines.get(self._placer(name) or "")
        fits = baseline is not None and baseline.status == "ok" and baseline.step_time_ns is not None
        return (baseline.step_time_ns,) if fits else None  # type: ignore[union-attr, return-value]

    def ratios(self, name: str, other: str) -> tuple[float, ...] | None:
        """Returns the step time of `name` over that of `other` for each seed; None without either.

        A baseline has its one time for all seeds.
        """
        mine, others = self.times_ns(name), self.times_ns(other)
        if mine is None or others is None:
            return None
        count = max(len(mine), len(others))
        return tuple((np.resize(mine, count) / np.resize(others, count)).tolist())

    def ratio(self, name: str, other: str) -> float | None:
        """Returns the geometric mean of `ratios`."""
        ratios = self.ratios(name, other)
        return None if ratios is None else geometric_mean(ratios)

    def to_bound(self, name: str) -> float | None:
        """Returns the geometric mean over seeds of the step time over the lower bound."""
        times = self.times_ns(name)
        return None if times is None else geometric_mean(np.array(times) / self.lower_bound_ns)

    def time_cell(self, name: str) -> str:
        """Returns mean and range over seeds in ms: `170.0 (169.2 to 170.8)`."""
        times = self.times_ns(name)
        if times is None:
            return "OOM"
        mean, low, high = milliseconds(float(np.mean(times))), milliseconds(min(times)), milliseconds(max(times))
        return mean if low == high else f"{mean} ({low} to {high})"

    def baseline_cell(self, placer: str) -> str:
        """Returns the time of that very placer in ms, `expert` not being a single device; `none` without a plan."""
        baseline = self.baselines[placer]
        if baseline.step_time_ns is None:
            return "none"
        return milliseconds(baseline.step_time_ns) if baseline.status == "ok" else "OOM"

    def named_cell(self, name: str) -> str:
        """Returns the time of `EXPERT` or `BEST_CLASSICAL`, with the name of the placer that it is."""
        placer = self._placer(name)
        return "OOM" if placer is None else f"{self.baseline_cell(placer)} ({placer})"

    def mean_of(self, name: str, field: str) -> float:
        """Returns the mean over seeds of a field of a method's runs, such as `seconds`."""
        return float(np.mean([getattr(run, field) for run in self.runs[name]]))

    def largest_of(self, name: str, field: str) -> float:
        """Returns the largest value over seeds of a field of a method's runs."""
        return float(max(getattr(run, field) for run in self.runs[name]))

    def ratio_cell(self, name: str) -> str:
        """Returns the ratio to the best classical placer."""
        return number(self.ratio(name, BEST_CLASSICAL), ".3f")

    def bound_cell(self, name: str) -> str:
        """Returns the step time over the lower bound."""
        return number(self.to_bound(name), ".3f")

    def seconds_cell(self, name: str) -> str:
        """Returns the mean seconds of a method, and those of the processor in brackets."""
        return f"{self.mean_of(name, 'seconds'):.1f} ({self.mean_of(name, 'cpu_seconds'):.1f})"

    def updates_cell(self, name: str) -> str:
        """Returns the mean number of updates of a policy that was trained on the workload."""
        return f"{self.mean_of(name, 'updates'):,.0f}"

    def __str__(self) -> str:
        """The row in a line of progress."""
        parts = [f"{name} {self.time_cell(name)} ms" for name in self.runs]
        if self.baselines:
            parts.append(f"best other {self.named_cell(BEST_CLASSICAL)}")
        return f"{self.workload}: {', '.join(parts)}"

    def to_document(self) -> dict[str, Any]:
        """Returns the row with the names of its best baselines."""
        return {**asdict(self), "best_classical": self.best_classical, "best_expert": self.best_expert}

    def _placer(self, name: str) -> str | None:
        return {EXPERT: self.best_expert, BEST_CLASSICAL: self.best_classical}.get(name, name)

    def _fastest(self, names: Iterable[str]) -> str | None:
        fitting = [name for name in names if self.baselines[name].status == "ok"]
        return min(fitting, key=lambda name: _rank(self.baselines[name]), default=None)


@dataclass(frozen=True)
class MeanRatio:
    """The geometric mean of ratios over rows; a row without a ratio is left out."""

    ratio: float | None  # None: no row has one
    num_workloads: int  # rows with a ratio
    num_rows: int
    by_seed: tuple[float, ...]  # the same of each seed alone

    @classmethod
    def of(cls, rows: Sequence[Sequence[float] | None]) -> "MeanRatio":
        """Returns the mean of `rows`, each with its ratios by seed; None is a row without."""
        some = [ratios for ratios in rows if ratios is not None]
        by_seed = tuple(geometric_mean(ratios) for ratios in zip(*some, strict=True))
        return cls(geometric_mean(by_seed) if some else None, len(some), len(rows), by_seed)

    def __str__(self) -> str:
        """The mean in a table: `0.934 (0.930 to 0.939)`, with the range over seeds."""
        if self.ratio is None:
            return "-"
        text, seeds = f"{self.ratio:.3f}", spread(self.by_seed, ".3f")
        return text if text == seeds else f"{text} ({seeds})"


def compare(rows: Sequence[WorkloadRow], name: str, other: str) -> MeanRatio:
    """Returns the mean ratio of the step times of `name` and `other`."""
    return MeanRatio.of([row.ratios(name, other) for row in rows])


def ratio_dots(rows: Sequence[WorkloadRow], name: str, other: str) -> list[float]:
    """Returns the ratios of the step times of `name` and `other` that there are, one a row."""
    return [ratio for row in rows if (ratio := row.ratio(name, other)) is not None]


def best_baselines(runs: Sequence[Mapping[str, Baseline]]) -> dict[str, Baseline]:
    """Returns each placer's best of several runs."""
    return {placer: min((baselines[placer] for baselines in runs), key=_rank) for placer in runs[0]}


def _rank(baseline: Baseline) -> tuple[bool, float]:
    return baseline.status != "ok", math.inf if baseline.step_time_ns is None else baseline.step_time_ns
