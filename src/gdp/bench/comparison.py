"""Results side by side: of a workload's classical placers, and of methods that ran with several seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gdp.bench.runs import Run
from gdp.bench.tables import geometric_mean, markdown_table, mean_ratio, milliseconds
from gdp.plan import Baseline

EXPERTS = ("expert", "single")  # a single device where all fits counts as expert too
EXPERT, BEST_CLASSICAL = "expert", "best classical"  # the faster of the experts; the fastest classical placer


@dataclass(frozen=True, kw_only=True)
class WorkloadRow:
    """A workload and its classical placers."""

    workload: str
    cluster: str
    num_ops: int
    lower_bound_ns: int
    baselines: Mapping[str, Baseline]  # each placer's best run over the seeds

    @cached_property
    def best_classical(self) -> str | None:
        """The fastest classical placer whose plan fits; None if there is none."""
        return self._fastest(self.baselines)

    @cached_property
    def best_expert(self) -> str | None:
        """`expert` or `single`, whichever fits and is faster; None if neither fits."""
        return self._fastest(name for name in EXPERTS if name in self.baselines)

    def baseline_ns(self, placer: str | None) -> int | None:
        """Step time of `placer`; None if it has no plan that fits."""
        baseline = self.baselines.get(placer or "")
        return baseline.step_time_ns if baseline is not None and baseline.status == "ok" else None

    def baseline_cell(self, placer: str | None) -> str:
        """The same in ms, for a table."""
        baseline = self.baselines.get(placer or "")
        if baseline is None or baseline.step_time_ns is None:
            return "none"
        return milliseconds(baseline.step_time_ns) if baseline.status == "ok" else "OOM"

    def _fastest(self, names: Iterable[str]) -> str | None:
        times = {name: time_ns for name in names if (time_ns := self.baseline_ns(name)) is not None}
        return min(times, key=times.__getitem__, default=None)


@dataclass(frozen=True, kw_only=True)
class MethodsRow(WorkloadRow):
    """A workload, its classical placers, and the runs of other methods."""

    runs: Mapping[str, tuple[Run, ...]]  # by method, then by seed

    def times_ns(self, name: str) -> tuple[int, ...] | None:
        """Step times, by seed, of a method or, as one time, of a classical placer, `EXPERT` or `BEST_CLASSICAL`.

        None if there is none, or a seed found no plan that fits.
        """
        if name in self.runs:
            times = [run.step_time_ns for run in self.runs[name] if run.status == "ok" and run.step_time_ns is not None]
            return tuple(times) if len(times) == len(self.runs[name]) else None
        placer = {EXPERT: self.best_expert, BEST_CLASSICAL: self.best_classical}.get(name, name)
        time_ns = self.baseline_ns(placer)
        return None if time_ns is None else (time_ns,)

    def ratio(self, name: str, other: str) -> float | None:
        """Geometric mean over seeds of the step time of `name` over that of `other`; None without either."""
        ratios = self.ratios_by_seed(name, other)
        return None if ratios is None else geometric_mean(ratios)

    def ratios_by_seed(self, name: str, other: str) -> tuple[float, ...] | None:
        """The ratio of each seed; what has one time has it for all seeds."""
        mine, others = self.times_ns(name), self.times_ns(other)
        if mine is None or others is None:
            return None
        count = max(len(mine), len(others))
        return tuple((np.resize(mine, count) / np.resize(others, count)).tolist())

    def to_bound(self, name: str) -> float | None:
        """Geometric mean over seeds of the step time over the lower bound."""
        times = self.times_ns(name)
        return None if times is None else geometric_mean(np.array(times) / self.lower_bound_ns)

    def time_cell(self, name: str) -> str:
        """Mean and range over seeds in ms: `170.0 (169.2 to 170.8)`."""
        times = self.times_ns(name)
        if times is None:
            return "OOM"
        mean, low, high = milliseconds(float(np.mean(times))), milliseconds(min(times)), milliseconds(max(times))
        return mean if low == high else f"{mean} ({low} to {high})"

    def ratio_cell(self, name: str, other: str) -> str:
        """The ratio for a table."""
        ratio = self.ratio(name, other)
        return "-" if ratio is None else f"{ratio:.3f}"

    def mean_of(self, name: str, field: str) -> float:
        """Mean over seeds of a field of a method's runs, such as `seconds`."""
        return float(np.mean([getattr(run, field) for run in self.runs[name]]))

    def largest_of(self, name: str, field: str) -> float:
        """The largest value over seeds of a field of a method's runs."""
        return float(max(getattr(run, field) for run in self.runs[name]))

    def to_document(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "cluster": self.cluster,
            "num_ops": self.num_ops,
            "lower_bound_ns": self.lower_bound_ns,
            "baselines": {name: asdict(baseline) for name, baseline in self.baselines.items()},
            "best_classical": self.best_classical,
            "best_expert": self.best_expert,
            "runs": {method: [run.to_document() for run in runs] for method, runs in self.runs.items()},
        }


def best_baselines(runs: Sequence[Mapping[str, Baseline]]) -> dict[str, Baseline]:
    """Each placer's best of several runs."""
    return {placer: min((found[placer] for found in runs), key=_baseline_key) for placer in runs[0]}


def _baseline_key(baseline: Baseline) -> tuple[bool, float]:
    return baseline.status != "ok", math.inf if baseline.step_time_ns is None else baseline.step_time_ns


def compare(rows: Sequence[MethodsRow], name: str, other: str) -> dict[str, Any]:
    """`mean_ratio` of `name` to `other` over workloads, and `by_seed` the same of each seed alone."""
    mean: dict[str, Any] = mean_ratio([row.ratio(name, other) for row in rows])
    of_rows = [ratios for row in rows if (ratios := row.ratios_by_seed(name, other)) is not None]
    mean["by_seed"] = [geometric_mean(ratios) for ratios in zip(*of_rows, strict=True)]
    return mean


def mean_cell(mean: Mapping[str, Any]) -> str:
    """What `compare` gives, for a table: `0.934 (0.930 to 0.939)`, with the range over seeds."""
    if mean["ratio"] is None:
        return "-"
    text, low, high = (f"{value:.3f}" for value in (mean["ratio"], min(mean["by_seed"]), max(mean["by_seed"])))
    return text if low == high else f"{text} ({low} to {high})"


def classical_table(rows: Sequence[WorkloadRow]) -> str:
    """Step times in ms of every classical placer."""
    placers = list(dict.fromkeys(placer for row in rows for placer in row.baselines))
    cells = [(row.workload, *(row.baseline_cell(placer) for placer in placers)) for row in rows]
    return markdown_table(("workload", *placers), cells)
