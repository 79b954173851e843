"""Benchmark `published`: GDP as published and HDP, each until it is flat, beside gdp's own policy and search.

The network, reward and training of the paper (arXiv 1910.01578) start from scratch on one workload. A run ends after a
number of evaluations, which are placements that are simulated, or when many in a row bring nothing. The paper's parts
are taken away one at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import process_time
from typing import Any

import numpy as np

from benchmarks import graphs, methods
from benchmarks.benchmark import Benchmark, Say
from benchmarks.comparison import EXPERTS
from benchmarks.figures import Series, line_plot
from benchmarks.gdp_policy.placement_network import SegmentTransformerConfig
from benchmarks.page import geometric_mean, milliseconds
from benchmarks.rows import Rows
from benchmarks.runs import Method
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.placers import CLASSICAL
from gdp.policy.scheduler import one_thread
from gdp.search.candidate import Candidate
from gdp.search.question import Question
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

WORKLOADS = ("rnnlm-2", "gnmt-2", "transformer-xl-2", "inception-v3-b32", "amoebanet", "wavenet-2x9")
PUBLISHED, HDP, OWN, SEARCH = "published", "hdp", "gdp-one", "search"
METHODS: Mapping[str, Callable[[Budget], Method]] = {
    PUBLISHED: methods.published,
    "without attention": partial(methods.published, placer=SegmentTransformerConfig(attention=False)),
    "without superposition": partial(methods.published, superposition=False),
    "with gdp's reward": partial(methods.published, has_own_reward=False),
    "a choice for each module": methods.published_by_module,
    HDP: methods.hdp,
    OWN: methods.from_scratch,
    SEARCH: methods.plain_search,
}
_POINTS = 30  # of a plotted line


@dataclass(eq=False)
class Improvements:
    """Placements that fit and are faster than all before: after how many evaluations and processor seconds."""

    points: list[tuple[int, float, int]] = field(default_factory=list)  # (evaluations, CPU seconds, step time in ns)

    @property
    def latest(self) -> int:
        """Evaluations until the last improvement."""
        return self.points[-1][0] if self.points else 0


class PatientClock(Clock):
    """A clock that is up, too, when `patience` evaluations in a row have brought nothing."""

    def __init__(self, budget: Budget, patience: int) -> None:
        super().__init__(budget, timer=process_time)
        self.improvements, self.patience = Improvements(), patience

    @property
    def is_up(self) -> bool:
        return super().is_up or self.simulations - self.improvements.latest >= self.patience

    def note(self, candidate: Candidate) -> None:
        """Keeps `candidate` where it fits and is the fastest so far."""
        points, step_time_ns = self.improvements.points, candidate.step_time_ns
        if candidate.fits and (not points or step_time_ns < points[-1][2]):
            points.append((self.simulations, self.seconds, step_time_ns))


@dataclass(frozen=True, kw_only=True)
class PublishedBenchmark(Benchmark):
    """Each method on each workload with each seed."""

    name = "published"
    evaluations: int = 20_000
    patience: int = 3_000
    seeds: int = 2
    workloads: tuple[str, ...] = WORKLOADS
    methods: tuple[str, ...] = tuple(METHODS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise InputError(f"{self.name}: method {unknown[0]!r}; one of {', '.join(METHODS)} is expected")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns the curve of each run, and the mean step times of each workload with each method."""
        methods.warm_up()
        curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
        experts = {}
        for name in self.workloads:
            inputs = graphs.workload_inputs(name)
            experts[name] = expert_ns(Problem.build(*inputs))
            for seed in range(self.seeds):
                for label in self.methods:
                    method = METHODS[label](Budget(simulations=self.evaluations))
                    settings = {
                        "method": label,
                        "graph": inputs[0].fingerprint,
                        "cluster": inputs[1].fingerprint,
                        "evaluations": self.evaluations,
                        "patience": self.patience,
                    }
                    key = f"{name}-{label.replace(' ', '-')}-seed{seed}"
                    row = rows.row(key, settings, partial(self._follow, method, *inputs, seed))
                    curves.setdefault((name, label), []).append(row)
                    say(f"{name}, seed {seed}, {label}: {_end_text(row)}")
        return {
            "experts_ns": experts,
            "runs": [
                {"workload": name, "method": label, "seed": seed, **row}
                for (name, label), some in curves.items()
                for seed, row in enumerate(some)
            ],
            "table": {
                name: {label: _mean_end(curves[name, label]) for label in self.methods} for name in self.workloads
            },
            "means": [self._mean(label, curves, experts) for label in self.methods],
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        """Draws step times over the expert's against evaluations: geometric means where each run has a plan."""
        series = {}
        grid = np.unique(np.geomspace(100, self.evaluations, _POINTS).astype(int)).tolist()
        for label in self.methods:
            points, spreads = [], []
            for at in grid:
                by_seed = self._ratios_at(measured, label, at)
                if by_seed is not None:
                    points.append((float(at), geometric_mean(by_seed)))
                    spreads.append((min(by_seed), max(by_seed)))
            series[label] = Series(points, spreads)
        ticks = [tick for tick in (100, 300, 1000, 3000, 10_000) if tick < self.evaluations]
        title, axis = "Best step time found", "placements simulated"
        return line_plot(title, axis, "step time over the expert's", series, [*ticks, self.evaluations])

    def _ratios_at(self, measured: Mapping[str, Any], label: str, at: int) -> list[float] | None:
        """Returns the mean ratio to the expert of each seed after `at` evaluations; None while a run has no plan."""
        by_seed: dict[int, list[float]] = {}
        for run in measured["runs"]:
            if run["method"] == label:
                best = min((ns for count, _, ns in run["curve"] if count <= at), default=None)
                if best is None:
                    return None
                by_seed.setdefault(run["seed"], []).append(best / measured["experts_ns"][run["workload"]])
        return [geometric_mean(ratios) for ratios in by_seed.values()]

    def _follow(self, method: Method, graph: Graph, cluster: Cluster, seed: int) -> dict[str, Any]:
        """Returns the row of one run."""
        question = Question.about(Problem.build(graph, cluster), seed=seed, num_threads=1)
        clock = PatientClock(method.budget, self.patience)
        with one_thread():
            best = method.run(replace(question, on_progress=clock.note), clock).best
        if clock.stop.is_set():  # Ctrl-C, which a search takes for the end of its budget
            raise KeyboardInterrupt
        if best is not None:
            clock.note(best)
        return {"curve": clock.improvements.points, "cpu_seconds": clock.seconds, "evaluations": clock.simulations}

    def _mean(
        self, label: str, curves: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], experts: Mapping[str, int]
    ) -> dict[str, Any]:
        """Returns the method's step times over the expert's and over HDP's, and what its runs took."""
        runs = {name: curves[name, label] for name in self.workloads}
        ends = {name: _mean_end(some) for name, some in runs.items()}
        over_hdp = []
        for name, own in ends.items():
            other = _mean_end(curves[name, HDP]) if (name, HDP) in curves else None
            if own is not None and other is not None:
                over_hdp.append(own / other)
        fitting = {name: own for name, own in ends.items() if own is not None}
        every = [run for some in runs.values() for run in some]
        return {
            "method": label,
            "to_expert": geometric_mean([own / experts[name] for name, own in fitting.items()]) if fitting else None,
            "num_workloads": len(fitting),
            "to_hdp": geometric_mean(over_hdp) if over_hdp else None,
            "evaluations": float(np.mean([run["evaluations"] for run in every])),
            "cpu_seconds": float(np.mean([run["cpu_seconds"] for run in every])),
        }


def expert_ns(problem: Problem) -> int:
    """Returns the step time of the expert placement or of one device, whichever fits and is faster."""
    placements = [CLASSICAL[name](problem, 0) for name in EXPERTS]
    simulations = [simulate(problem, placement) for placement in placements if placement is not None]
    return min(simulation.step_time_ns for simulation in simulations if simulation.feasible)


def _mean_end(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the geometric mean over seeds of the last step times; None where a run found nothing that fits."""
    ends = [run["curve"][-1][2] for run in runs if run["curve"]]
    return geometric_mean(ends) if len(ends) == len(runs) else None


def _end_text(row: Mapping[str, Any]) -> str:
    found = f"{milliseconds(row['curve'][-1][2])} ms" if row["curve"] else "nothing fits"
    return f"{found} after {row['evaluations']:,} evaluations in {row['cpu_seconds']:.0f} s"
