"""Benchmark `scale`: what each phase takes as steps grow, and whether the budget is kept.

Two questions: a step that is cut already (op placement of all its ops), and a model whose layout is chosen. Each case
runs in a process of its own, so that its memory is its own.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import model_configs
from benchmarks.benchmark import Benchmark, Say, require_seconds
from benchmarks.rows import Rows
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock, Effort, search_s
from gdp.cluster import Cluster
from gdp.cluster.changes import only
from gdp.graph import Graph
from gdp.models.source import ModelSource
from gdp.parallel.layout import NONE, Layout
from gdp.parallel.step import Step
from gdp.placers import CLASSICAL
from gdp.planning.warm_up import warm_up
from gdp.search.batch_parts import Parts
from gdp.search.layouts.choose import choose_layout
from gdp.search.layouts.dispatch import best_dispatch
from gdp.search.layouts.estimate import staged_places
from gdp.search.place import place
from gdp.search.question import BatchQuestion
from gdp.search.settings import DEFAULTS
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from gdp.units.reduction import reduce
from gdp.units.units import Units

CHOSEN = ""  # the layout of a case whose layout is chosen
DEVICES = ("8xp100-pcie-16g", "8x(8xa100-sxm-80g)@100gbit")
FIXED = ("cut", "read", "problem", "bound", "reduction", "simulation", "write")  # phases that any answer needs
AS_JSON = ("JSON, read", "JSON, written")  # the same graph in the other form of file
LATE_SHARE, LATE_S = 0.1, 2.0  # of a budget, and seconds: what an answer may take longer
FIRST_SHARE = 0.25  # of a budget: when a plan that fits should be there

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ScaleCase:
    """A model, built in or of `model_configs` (with sizes: `NAME?SIZES`), and how its step is cut."""

    model: str
    layout: str
    num_budgets: int = 1  # times the budget that the others have


CASES = (
    ScaleCase("gnmt-8", NONE),
    ScaleCase("gnmt-8", "microbatches=4"),
    ScaleCase("rnnlm-8", "data=8,microbatches=4"),
    ScaleCase("gnmt-8", "data=8,microbatches=2"),
    ScaleCase("gnmt-8", "data=8,microbatches=3", num_budgets=2),
    ScaleCase("smollm3-3b", "microbatches=8"),
    ScaleCase("gpt2?batch=8192", "data=64,microbatches=16", num_budgets=2),
    ScaleCase("gnmt-8", CHOSEN),
    ScaleCase("bert-large", CHOSEN),
)


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """The figures of a case; times in seconds of the processor, on one of them."""

    model: str
    layout: str
    devices: str
    num_ops: int
    phases: Mapping[str, float]
    first_s: float | None  # the first plan that fits, since the search began; None: none fits
    search_s: float  # with its problem, bound and reduction
    total_s: float  # of a command: reading, the search, writing the plan
    budget_s: float
    peak_bytes: int
    step_time_ns: int
    bound_ns: int
    by_hand_ns: int | None = None  # the step of replicas in stages; None: none fits, or the layout is chosen

    @property
    def is_kept(self) -> bool:
        """True if a command ends within its budget."""
        return self.total_s <= self.budget_s * (1 + LATE_SHARE) + LATE_S

    @property
    def is_early(self) -> bool:
        """True if a plan that fits is there in time."""
        return self.first_s is not None and self.first_s <= self.budget_s * FIRST_SHARE

    @property
    def fixed_s(self) -> float:
        """Seconds of the phases that any answer needs."""
        return sum(self.phases.get(name, 0.0) for name in FIXED)


@dataclass(frozen=True, kw_only=True)
class ScaleBenchmark(Benchmark):
    """Each case on each set of devices, with a budget."""

    name = "scale"
    budget: Budget = field(default_factory=lambda: Budget(seconds=30.0))
    devices: tuple[str, ...] = DEVICES
    cases: tuple[ScaleCase, ...] = CASES

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seconds(self.name, self.budget, "60s")
        for text in self.devices:
            Cluster.parse(text)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns the rows of steps and of choices, and how fixed times grow."""
        found = []
        for case in self.cases:
            for devices in self.devices:
                settings = {
                    "model": case.model,
                    "layout": case.layout,
                    "devices": devices,
                    "budget": str(self.budget.part(case.num_budgets)),
                    "gdp_version": version("gdp-placement"),
                }
                name = f"{case.model}-{case.layout or 'chosen'}-on-{devices}"
                row = ScaleRow(**rows.row(name, settings, partial(_in_own_process, settings)))
                found.append(row)
                say(f"{name}: {row.num_ops:,} ops, {row.total_s:.1f} s of {row.budget_s:g}, first plan {row.first_s}")
        cut = [row for row in found if row.layout != CHOSEN]
        return {
            "rows": found,
            "cut": cut,
            "chosen": [row for row in found if row.layout == CHOSEN],
            "phases": (*FIXED, *AS_JSON),
            "num_kept": sum(row.is_kept for row in found),
            "num_early": sum(row.is_early for row in found),
            "slopes": {text: _slope([row for row in cut if row.devices == text]) for text in self.devices},
        }


def _slope(rows: list[ScaleRow]) -> float | None:
    """Returns the slope of fixed seconds over ops, both as logarithms; None for fewer than two sizes."""
    if len({row.num_ops for row in rows}) < 2:
        return None
    ops, seconds = np.log([row.num_ops for row in rows]), np.log([row.fixed_s for row in rows])
    return float(np.polyfit(ops, seconds, 1)[0])


def _in_own_process(case: Mapping[str, str]) -> dict[str, Any]:
    code = (
        "import json, sys; from benchmarks.scale import measured; print(json.dumps(measured(json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(dict(case))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measured(case: Mapping[str, str]) -> dict[str, Any]:
    """Returns a case's figures, of this process, as a row."""
    cluster = Cluster.parse(case["devices"])
    warm_up(num_devices=cluster.num_devices)
    budget_s = require_seconds("scale", Budget.parse(case["budget"]), "60s")
    make = _measured_choice if case["layout"] == CHOSEN else _measured_step
    with tempfile.TemporaryDirectory(prefix="gdp-configs-") as directory:
        figures = make(model_configs.asked_model(case["model"], directory), case["layout"], cluster, budget_s)
    return {
        **{name: case[name] for name in ("model", "layout", "devices")},
        **figures,
        "budget_s": budget_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


class _Phases:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, action: Callable[[], _T]) -> _T:
        """Returns what `action` returns."""
        began = time.process_time()
        result = action()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began
        return result


def _measured_step(model: str, layout: str, cluster: Cluster, budget_s: float) -> dict[str, Any]:
    """Places all ops of a step that is cut already, as `gdp place` does with its graph file in columns."""
    phases, way = _Phases(), Layout() if layout == NONE else Layout.parse(layout)
    part = ModelSource(model).part(way.num_parts).graph
    step = phases.time("cut", lambda: Step.of(part, way))
    cut = step.graph
    with tempfile.TemporaryDirectory(prefix="gdp-scale-") as directory:
        path, other = Path(directory) / "graph.safetensors", Path(directory) / "graph.json.gz"
        phases.time("write", lambda: cut.save(path))
        graph = phases.time("read", lambda: Graph.load(path))
        phases.time(AS_JSON[1], lambda: cut.save(other))
        phases.time(AS_JSON[0], lambda: Graph.load(other))
    problem, bound_ns = _time_fixed(phases, cut, cluster)
    by_hand_ns = _by_hand_ns(step, part, problem)
    search = Budget(seconds=search_s(budget_s, phases.seconds["read"], Effort().written_s(graph.num_ops)))
    plan, first_s, searched_s = _timed_search(
        lambda tell: place(
            graph,
            cluster,
            budget=Clock(search, timer=time.process_time),
            num_threads=1,
            on_progress=lambda progress: tell(progress.feasible),
        )
    )
    total_s = phases.seconds["read"] + searched_s + _write(phases, plan)
    figures = _figures(graph.num_ops, phases, first_s, searched_s, total_s, plan, bound_ns)
    return figures | {"by_hand_ns": by_hand_ns}


def _time_fixed(phases: _Phases, graph: Graph, cluster: Cluster) -> tuple[Problem, int]:
    """Times what comes before a search, and one simulation; returns the problem and its lower bound."""
    problem = phases.time("problem", lambda: Problem.build(graph, cluster))
    bound_ns = phases.time("bound", lambda: lower_bound(problem))
    phases.time("reduction", lambda: reduce(problem))
    placement = CLASSICAL["expert"](problem, 0)
    assert placement is not None, "all ops may go anywhere"
    phases.time("simulation", lambda: simulate(problem, placement))
    return problem, bound_ns


def _by_hand_ns(step: Step, part: Graph, problem: Problem) -> int | None:
    """Returns the step time of the best layout by hand: each replica on devices of its own, in stages of its layers.

    `part` is the graph of one micro-batch. None where devices are too few for that, or nothing fits.
    """
    num_places = problem.num_devices // step.layout.data
    if not num_places:
        return None
    devices = np.arange(step.layout.data * num_places).reshape(step.layout.data, num_places)
    one_replica = Problem.build(part, only(problem.cluster, devices[0].tolist()))
    units = Units.of(problem)  # the parameters of a bucket are one, where they may be in two stages of a replica
    tried = []
    for places in staged_places(one_replica, DEFAULTS.large):
        placement = units.place_allowed(step.placement(places, devices)[units.first_op])
        tried.append(best_dispatch(problem, step, placement))
    return min((each.step_time_ns for each in tried if each.figures.fits), default=None)


def _measured_choice(model: str, layout: str, cluster: Cluster, budget_s: float) -> dict[str, Any]:
    """Chooses the layout of a model and places it."""
    parts = Parts.of(model)
    parts.exact(1)
    parts.read_ahead(cluster.num_devices)
    budget = Budget(seconds=search_s(budget_s, 0.0, Effort().written_s(parts.exact(1).num_ops)))
    solution, first_s, searched_s = _timed_search(
        lambda tell: choose_layout(
            BatchQuestion(parts, cluster, num_threads=1, on_progress=lambda candidate: tell(candidate.fits)),
            Clock(budget, timer=time.process_time),
        )
    )
    plan, best = solution.plan, solution.best
    assert plan is not None, "it is of the best"
    assert best is not None, "it was looked for"
    phases, num_ops = _Phases(), best.problem.num_ops
    total_s = searched_s + _write(phases, plan)
    return _figures(num_ops, phases, first_s, searched_s, total_s, plan, solution.bound_ns)


def _timed_search(search: Callable[[Callable[[bool], None]], _T]) -> tuple[_T, float | None, float]:
    """Returns (the answer of `search`, seconds to the first plan that fits, seconds); it tells of plans if they fit."""
    first: list[float] = []
    began = time.process_time()

    def tell(fits: bool) -> None:
        if fits and not first:
            first.append(time.process_time() - began)

    answer = search(tell)
    return answer, first[0] if first else None, time.process_time() - began


def _write(phases: _Phases, plan: Plan) -> float:
    """Writes the plan; returns the seconds that it takes."""
    began = phases.seconds.get("write", 0.0)
    with tempfile.TemporaryDirectory(prefix="gdp-scale-") as directory:
        phases.time("write", lambda: plan.save(Path(directory) / "plan.json"))
    return phases.seconds["write"] - began


def _figures(
    num_ops: int, phases: _Phases, first_s: float | None, searched_s: float, total_s: float, plan: Plan, bound_ns: int
) -> dict[str, Any]:
    return {
        "num_ops": num_ops,
        "phases": phases.seconds,
        "first_s": first_s,
        "search_s": searched_s,
        "total_s": total_s,
        "step_time_ns": plan.step_time_ns,
        "bound_ns": bound_ns,
    }
