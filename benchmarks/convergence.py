"""Benchmark `convergence`: the best step time that fits against processor time, learned placers beside searches.

All run on one thread by a clock that counts the processor time of the whole process, so a busy machine changes little,
and all in one process, taking turns seed by seed. A learned placer does the same with any budget, so one run is looked
at on the way. A search plans by its budget: it has a run of its own for each time.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import graphs, methods
from benchmarks.benchmark import Benchmark, Say, require_seconds
from benchmarks.figures import Series, line_plot
from benchmarks.graphs import lstm_training_graph
from benchmarks.held_out import HeldOut, checkpoints_in, choose
from benchmarks.page import geometric_mean, milliseconds, spread
from benchmarks.rows import Rows
from benchmarks.runs import Method
from benchmarks.workloads import workloads
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.policy.pretrained import shipped
from gdp.policy.scheduler import one_thread
from gdp.search.candidate import Candidate
from gdp.search.question import Question
from gdp.simulator.problem import Problem

WORKLOADS = ("rnnlm-4", "gnmt-4", "transformer-xl-4", "inception-v3-b32", "amoebanet", "wavenet-4x9")
TIMES = (1.0, 3.0, 10.0, 30.0, 60.0)  # CPU seconds
_GRACE = 1.1  # an answer counts for a time if it came by this much later: searches look at the clock between moves
_POINTS = 25  # of a plotted line


@dataclass(frozen=True, slots=True)
class TimedMethod:
    """A method that is compared over time."""

    name: str
    make: Callable[[Path, Budget], Method]  # of the trained policy and a budget
    plans: bool = False  # by its budget


PLAIN = "plain search"
METHODS = (
    TimedMethod("gdp", lambda policy, budget: methods.fine_tuned(policy, budget)),
    TimedMethod("gdp-one", lambda _, budget: methods.from_scratch(budget)),
    TimedMethod("hdp", lambda _, budget: methods.hdp(budget)),
    TimedMethod(PLAIN, lambda _, budget: methods.plain_search(budget), plans=True),
)


@dataclass(eq=False)
class Curve:
    """Placements that fit and are faster than all before, and when they were found."""

    clock: Clock
    points: list[tuple[float, int]] = field(default_factory=list)  # (CPU seconds, step time in ns)

    def __call__(self, candidate: Candidate) -> None:
        if candidate.fits:
            self.add(candidate.step_time_ns)

    def add(self, step_time_ns: int) -> None:
        """Adds a placement of that step time, found just now."""
        if not self.points or step_time_ns < self.points[-1][1]:
            self.points.append((self.clock.seconds, step_time_ns))


@dataclass(frozen=True, eq=False)
class Results:
    """All runs: the curve of each (workload, method, seed, budget in seconds)."""

    methods: Sequence[TimedMethod]
    workloads: Sequence[str]
    seeds: int
    times: Sequence[float]
    curves: Mapping[tuple[str, str, int, float], Sequence[Sequence[float]]]

    def best_ns(self, workload: str, method: TimedMethod, seed: int, at: float) -> float | None:
        """Returns the step time that `method` had after `at` CPU seconds; None before its first placement that fits."""
        curve = self.curves[workload, method.name, seed, at if method.plans else self.times[-1]]
        return min((step_ns for seconds, step_ns in curve if seconds <= at * _GRACE), default=None)

    def best_known_ns(self, workload: str) -> float | None:
        """Returns the best of all runs."""
        found = [step_ns for key, curve in self.curves.items() if key[0] == workload for _, step_ns in curve]
        return min(found, default=None)

    def ratios(self, method: TimedMethod, at: float, other: TimedMethod | None = None) -> tuple[list[float], int]:
        """Returns, by seed, the geometric mean over workloads of step times over those of `other` at that time, and the
        number of workloads with an answer for every seed. `other` is by default the best known."""
        logs = []
        for workload in self.workloads:
            best = self.best_known_ns(workload)
            mine = [self.best_ns(workload, method, seed, at) for seed in range(self.seeds)]
            theirs = [best if other is None else self.best_ns(workload, other, seed, at) for seed in range(self.seeds)]
            pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None]
            if len(pairs) == self.seeds:
                logs.append([math.log(a / b) for a, b in pairs])
        return [math.exp(value) for value in np.mean(logs, axis=0)] if logs else [], len(logs)

    def mean_cell(self, method: TimedMethod, at: float) -> str:
        """Returns the ratio to the best known with its range over seeds, for a table."""
        ratios, num_workloads = self.ratios(method, at)
        if not ratios:
            return "-"
        text = f"{geometric_mean(ratios):.3f} ({spread(ratios, '.3f')})"
        count = len(self.workloads)
        return text if num_workloads == count else f"{text}, {num_workloads} of {count}"

    def end_cell(self, workload: str, method: TimedMethod) -> str:
        """Returns the step time in ms at the end, for a table."""
        times = [self.best_ns(workload, method, seed, self.times[-1]) for seed in range(self.seeds)]
        fitting = [step_ns for step_ns in times if step_ns is not None]
        return milliseconds(geometric_mean(fitting)) if len(fitting) == self.seeds else "OOM"


@dataclass(frozen=True, kw_only=True)
class ConvergenceBenchmark(Benchmark):
    """Every method on each workload with each seed, for `budget` of CPU time.

    The trained policy is, of the directory `checkpoints`, one that holds the workload's family out, or the file
    `checkpoint`, or the one that comes with gdp.
    """

    name = "convergence"
    budget: Budget = field(default_factory=lambda: Budget(seconds=60.0))
    seeds: int = 5
    workloads: tuple[str, ...] = WORKLOADS
    checkpoints: Path | None = None
    checkpoint: Path | None = None
    methods: tuple[TimedMethod, ...] = METHODS

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seconds(self.name, self.budget, "60s")
        if self.checkpoints is not None and self.checkpoint is not None:
            raise InputError(f"--checkpoints {self.checkpoints}, --checkpoint {self.checkpoint}: give one of both")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        seconds = self.budget.seconds or 0.0
        times = (*(moment for moment in TIMES if moment < seconds), seconds)
        policies = {name: self.policy_for(name) for name in self.workloads}
        _warm_up(self.methods, policies[self.workloads[0]].path)
        curves: dict[tuple[str, str, int, float], Sequence[Sequence[float]]] = {}
        results = Results(self.methods, self.workloads, self.seeds, times, curves)
        for name in self.workloads:
            inputs = graphs.workload_inputs(name)
            for seed in range(self.seeds):
                for timed in self.methods:
                    for at in times if timed.plans else times[-1:]:
                        method = timed.make(policies[name].path, Budget(seconds=at))
                        settings = {
                            "method": method.name,
                            "graph": inputs[0].fingerprint,
                            "cluster": inputs[1].fingerprint,
                            "seconds": at,
                            **method.settings,
                        }
                        row = rows.row(
                            f"{name}-{timed.name}-{at:g}s-seed{seed}", settings, partial(_follow, method, *inputs, seed)
                        )
                        curves[name, timed.name, seed, at] = row["curve"]
                ends = [(timed.name, results.best_ns(name, timed, seed, times[-1])) for timed in self.methods]
                texts = [f"{timed} {'nothing fits' if ns is None else milliseconds(ns) + ' ms'}" for timed, ns in ends]
                say(f"{name}, seed {seed}: {', '.join(texts)}")
        held_out = {name: workloads.get(name).family in policies[name].families for name in self.workloads}
        return {
            "methods": {method.name: {"plans": method.plans} for method in self.methods},
            "times": times,
            "policies": {
                name: {"file": policies[name].path.name, "is_held_out": held_out[name]} for name in self.workloads
            },
            "best_known_ns": {name: results.best_known_ns(name) for name in self.workloads},
            "curves": [
                {"workload": name, "method": method, "seed": seed, "seconds": at, "curve": curve}
                for (name, method, seed, at), curve in curves.items()
            ],
            "ratios_to_best_known": {
                method.name: {f"{at:g}": results.ratios(method, at)[0] for at in times} for method in self.methods
            },
            "means": {method.name: [results.mean_cell(method, at) for at in times] for method in self.methods},
            "ends": {name: [results.end_cell(name, method) for method in self.methods] for name in self.workloads},
            "columns": [f"{at:g} s" for at in times],
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        """Draws the geometric mean over workloads, where a method has an answer for each; searches at their budgets."""
        curves = {
            (run["workload"], run["method"], run["seed"], run["seconds"]): run["curve"] for run in measured["curves"]
        }
        results = Results(self.methods, self.workloads, self.seeds, measured["times"], curves)
        series = {}
        fine = np.geomspace(results.times[0], results.times[-1], _POINTS).tolist()
        for method in results.methods:
            points, spreads = [], []
            for at in results.times if method.plans else fine:
                ratios, num_workloads = results.ratios(method, at)
                if num_workloads == len(results.workloads):
                    points.append((at, geometric_mean(ratios)))
                    spreads.append((min(ratios), max(ratios)))
            series[method.name] = Series(points, spreads)
        return line_plot("Best step time found", "CPU seconds", "step time over the best known", series, results.times)

    def policy_for(self, workload: str) -> HeldOut:
        """Returns the policy that places `workload`. InputError if no policy there never saw its family."""
        if self.checkpoints is not None:
            return choose(checkpoints_in(self.checkpoints), workload, self.checkpoints)
        return HeldOut.read(self.checkpoint or Path(shipped()))


def _follow(method: Method, graph: Graph, cluster: Cluster, seed: int) -> dict[str, Any]:
    """Returns the row of one run. Graph and problem are there before the clock starts, for each run anew."""
    question = Question.about(Problem.build(graph, cluster), seed=seed, num_threads=1)
    clock = Clock(method.budget, timer=time.process_time)
    curve = Curve(clock)
    with one_thread():
        best = method.run(replace(question, on_progress=curve), clock).best
    if clock.stop.is_set():  # Ctrl-C, which a search takes for the end of its budget
        raise KeyboardInterrupt
    if best is not None and best.fits:
        curve.add(best.replay.step_time_ns)
    return {"curve": curve.points, "cpu_seconds": clock.seconds, "simulations": clock.simulations}


def _warm_up(timed_methods: Sequence[TimedMethod], policy: Path) -> None:
    """Compiles and imports for all methods: the clock is not to count that."""
    graph, cluster = lstm_training_graph(2), Cluster.parse("2xp100-pcie-16g")
    for timed in timed_methods:
        _follow(timed.make(policy, Budget(simulations=100)), graph, cluster, 0)
