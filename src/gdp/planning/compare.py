"""Comparison of placers on one problem, with several seeds: the table of `gdp compare`."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Unpack

from gdp import notebook
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import GraphSource
from gdp.parallel.layout import Layout
from gdp.placers import CLASSICAL
from gdp.search.question import Question
from gdp.search.rivals.rivals import RivalStep
from gdp.search.solvers import solve, solver_of
from gdp.simulator.constraints import ConstraintKeywords, Constraints
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation
from gdp.units.reduction import reduce

DEFAULT_PLACERS = (*CLASSICAL, "auto")

Rival = Callable[[Problem], Simulation | RivalStep | None]
"""From a problem to the step of another tool's placement, or of its layout of the same batch; None: no answer."""


@dataclass(frozen=True, slots=True)
class PlacerRow:
    """Results of a placer."""

    placer: str
    status: str  # the worst of its seeds': "ok", "infeasible" (does not fit) or "failed" (found no placement)
    step_time_ns_by_seed: tuple[int | None, ...]  # None where it is not "ok"
    seconds: float  # mean over seeds
    simulations: int  # mean over seeds
    layout: Layout | None = None  # of a rival that cuts the batch; None: a placement of the graph as it is
    reason: str = ""  # why a rival that cuts the batch has no step time

    @property
    def step_time_ns(self) -> int | None:
        """The median over the seeds that have an answer, the lower one of two; None if none has."""
        times = sorted(time_ns for time_ns in self.step_time_ns_by_seed if time_ns is not None)
        return times[(len(times) - 1) // 2] if times else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of all placers, as given."""

    rows: tuple[PlacerRow, ...]
    lower_bound_ns: int
    interrupted: bool = False

    def __repr__(self) -> str:
        """Returns `Comparison(auto 13.203 ms, single 26.200 ms; lower bound 12.100 ms)`, the fastest first."""
        rows = sorted(self.rows, key=lambda row: (row.step_time_ns is None, row.step_time_ns or 0))
        parts = [
            f"{row.placer} {row.status if row.step_time_ns is None else notebook.milliseconds(row.step_time_ns)}"
            for row in rows
        ]
        interrupted = "; interrupted" if self.interrupted else ""
        return f"Comparison({', '.join(parts)}; lower bound {notebook.milliseconds(self.lower_bound_ns)}{interrupted})"

    def _repr_html_(self) -> str:
        """Returns the table that Jupyter shows."""
        rows = []
        for row in self.rows:
            times = [time_ns for time_ns in row.step_time_ns_by_seed if time_ns is not None]
            shown = (row.step_time_ns, min(times, default=None), max(times, default=None))
            rows.append([row.placer, row.status, *map(notebook.milliseconds, shown), f"{row.seconds:.2f}"])
        bound = f"Lower bound {notebook.milliseconds(self.lower_bound_ns)}. Step times are medians over seeds."
        return notebook.table(
            "Placers", ["placer", "status", "step time", "best seed", "worst seed", "seconds"], rows, bound
        )


def compare(
    graph: GraphSource,
    cluster: Cluster | str,
    constraints: Constraints | None = None,
    *,
    placers: Sequence[str] | str = DEFAULT_PLACERS,
    budget: Budget | str | float = "30s",
    seeds: int = 3,
    checkpoint: str | None = None,
    rivals: Mapping[str, Rival] = MappingProxyType({}),
    num_threads: int | None = None,
    on_start: Callable[[str, int], None] | None = None,
    stop: threading.Event | None = None,
    **keywords: Unpack[ConstraintKeywords],
) -> Comparison:
    """Runs each of `placers` with seeds 0 to `seeds` - 1, each with the whole `budget`.

    `on_start(placer, seed)` is called before each run. After `stop` only the rows that are complete are returned.
    Constraints are those of `Problem.build`; `checkpoint` is the file of a policy to use instead of the one that comes
    with gdp. `rivals` are what other tools do, by name; they have no seeds and come first. Raises InputError for
    unknown placers and numbers that make no sense.
    """
    if isinstance(placers, str):
        placers = [name.strip() for name in placers.split(",")]
    for name in placers:
        solver_of(name)
    if not (placers or rivals) or len(set(placers)) < len(placers):
        raise InputError(f"placers are {', '.join(placers) or 'none'}; name at least one, each once")
    if type(seeds) is not int or seeds < 1:
        raise InputError(f"seeds is {seeds!r}; a number of at least 1 is expected")
    limit = Budget.of(budget)
    stop = stop or threading.Event()
    problem = Problem.build(graph, cluster, Constraints.of(constraints, keywords, compare))
    bound_ns = lower_bound(problem)
    reduction = reduce(problem)
    rows = [_rival_row(name, rival, problem) for name, rival in rivals.items()]
    for name in placers:
        solver_of(name).prepare()
        times_ns: list[int | None] = []
        statuses, seconds, simulations = set(), 0.0, 0
        for seed in range(seeds):
            if on_start is not None:
                on_start(name, seed)
            clock = Clock(limit, stop=stop)
            question = Question(problem, reduction, seed=seed, checkpoint=checkpoint, num_threads=num_threads)
            best = solve(name, question, clock).best
            if stop.is_set():
                return Comparison(tuple(rows), bound_ns, interrupted=True)
            statuses.add("failed" if best is None else "ok" if best.fits else "infeasible")
            times_ns.append(best.replay.step_time_ns if best is not None and best.fits else None)
            seconds += clock.seconds / seeds
            simulations += clock.simulations
        status = next(status for status in ("failed", "infeasible", "ok") if status in statuses)
        rows.append(PlacerRow(name, status, tuple(times_ns), seconds, simulations // seeds))
    return Comparison(tuple(rows), bound_ns)


def _rival_row(name: str, rival: Rival, problem: Problem) -> PlacerRow:
    began = time.perf_counter()
    found = rival(problem)
    seconds = time.perf_counter() - began
    if isinstance(found, RivalStep):
        status = "ok" if found.fits else "failed" if found.simulation is None else "infeasible"
        return PlacerRow(name, status, (found.step_time_ns,), seconds, found.num_tried, found.layout, found.reason)
    if found is None:
        return PlacerRow(name, "failed", (None,), seconds, 0)
    if not found.feasible:
        return PlacerRow(name, "infeasible", (None,), seconds, 1)
    return PlacerRow(name, "ok", (found.step_time_ns,), seconds, 1)
