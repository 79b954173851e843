"""Comparison of placers on one problem, with several seeds: the table of `gdp compare`."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Unpack

from gdp import notebook
from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.costs.ranges import StepRange
from gdp.errors import InputError
from gdp.parallel.layout import AUTO, Layout
from gdp.parallel.step import in_flight
from gdp.placers import CLASSICAL
from gdp.search.batches.place_batches import throughput_bound
from gdp.search.candidate import Candidate
from gdp.search.place import answer
from gdp.search.place_question import Placeable, PlaceQuestion, SearchOptions
from gdp.search.question import Solution
from gdp.search.solvers import solve, solver_of
from gdp.simulator.constraints import ConstraintKeywords, Constraints
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, replay
from gdp.units.reduction import reduce

DEFAULT_PLACERS = (*CLASSICAL, "auto")

Rival = Callable[[Problem], Simulation | Solution | None]
"""From a problem to the step of another tool's placement, or of its layout of the same batch; None: no answer."""


@dataclass(frozen=True, slots=True)
class PlacerRow:
    """Results of a placer."""

    placer: str
    status: str  # the worst of its seeds': "ok", "infeasible" (does not fit) or "failed" (found no placement)
    step_time_ns_by_seed: tuple[int | None, ...]  # None where it is not "ok"
    seconds: float  # mean over seeds
    simulations: int  # mean over seeds
    layout: Layout | None = None  # of the fastest seed, where the batch may be cut; None: of the graph as it is
    step_range: StepRange | None = None  # of that seed
    reason: str = ""  # why a rival that cuts the batch has no step time
    mfu: float | None = None  # of that seed

    @property
    def step_time_ns(self) -> int | None:
        """The median over the seeds that have an answer, the lower one of two; None if none has."""
        times = sorted(time_ns for time_ns in self.step_time_ns_by_seed if time_ns is not None)
        return times[(len(times) - 1) // 2] if times else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of all placers, as given."""

    rows: tuple[PlacerRow, ...]
    lower_bound_ns: int  # of op placement of the whole step
    interrupted: bool = False
    layout_bound_ns: int | None = None  # of any layout of the batch; None: no row has one
    num_batches: int = 0  # in flight, where times are per batch

    def bound_of(self, row: PlacerRow) -> int:
        """Returns the time that no step like that of `row` takes less than; 0: not known."""
        return self.lower_bound_ns if row.layout is None else self.layout_bound_ns or 0

    def bounds(self, text: Callable[[int], str] = notebook.milliseconds) -> str:
        """Returns the bounds of the rows in words, with `text` of a time."""
        if self.layout_bound_ns in (None, self.lower_bound_ns):
            return f"Lower bound {text(self.lower_bound_ns)}"
        return (
            f"Lower bound {text(self.layout_bound_ns)} of any layout of the batch, {text(self.lower_bound_ns)} of "
            "placements of the ops of the whole step"
        )

    def __repr__(self) -> str:
        """Returns `Comparison(auto 13.203 ms, single 26.200 ms; lower bound 12.100 ms)`, the fastest first."""
        rows = sorted(self.rows, key=lambda row: (row.step_time_ns is None, row.step_time_ns or 0))
        times = ("" if x.step_time_ns is None else notebook.milliseconds(x.step_time_ns) for x in rows)
        parts = [f"{row.placer} {time or row.status}" for row, time in zip(rows, times, strict=True)]
        interrupted = "; interrupted" if self.interrupted else ""
        return f"Comparison({', '.join(parts)}; l{self.bounds()[1:]}{interrupted})"

    def _repr_html_(self) -> str:
        """Returns the table that Jupyter shows."""
        rows = []
        for row in self.rows:
            times = [time_ns for time_ns in row.step_time_ns_by_seed if time_ns is not None]
            shown = (row.step_time_ns, min(times, default=None), max(times, default=None))
            rows.append([row.placer, row.status, *map(notebook.milliseconds, shown), f"{row.seconds:.2f}"])
        bound = f"{self.bounds()}. Step times are medians over seeds."
        headings = ["placer", "status", "step time", "best seed", "worst seed", "seconds"]
        return notebook.table("Placers", headings, rows, bound)


def compare(
    model: Placeable,
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
    """Runs each of `placers` on `model` with seeds 0 to `seeds` - 1, each with the whole `budget`.

    `model` is as in `place`, and `auto` does as there: where the batch of a training step can be cut, it chooses a
    layout. Other placers place the ops of the whole step.

    `on_start(placer, seed)` is called before each run. After `stop` only the rows that are complete are returned.
    Constraints are those of `Problem.build`; `checkpoint` is the file of a policy to use instead of the one that comes
    with gdp. `rivals` are what other tools do, by name; they have no seeds and come first. Raises InputError for
    unknown placers and numbers that make no sense."""
    if isinstance(placers, str):
        placers = [name.strip() for name in placers.split(",")]
    for name in placers:
        solver_of(name)
    if not (placers or rivals) or len(set(placers)) < len(placers):
        raise InputError(f"placers are {', '.join(placers) or 'none'}; name at least one, each once")
    if type(seeds) is not int or seeds < 1:
        raise InputError(f"seeds is {seeds!r}; a number of at least 1 is expected")
    limit = Budget.of(budget)
    limits = Constraints.of(constraints, keywords, compare)
    options = SearchOptions(checkpoint=checkpoint, num_threads=num_threads)
    question = PlaceQuestion.of(model, Cluster.of(cluster), limits, None, None, options)
    return compare_answers(question, placers, limit, seeds, rivals=rivals, on_start=on_start, stop=stop)


def compare_answers(
    question: PlaceQuestion,
    placers: Sequence[str],
    limit: Budget,
    seeds: int,
    find: Callable[[PlaceQuestion, Clock], Solution] = answer,
    *,
    rivals: Mapping[str, Rival] = MappingProxyType({}),
    on_start: Callable[[str, int], None] | None = None,
    stop: threading.Event | None = None,
) -> Comparison:
    """Returns the rows of `placers` for an open question, which `auto` answers with `find`, as in `compare`. Of batches
    in flight, which `auto` alone answers, the rows before it are the ways to serve that users run."""
    if question.num_batches and (rivals or list(placers) != [AUTO]):
        raise InputError("--placers: batches in flight are placed by auto, beside what users run; leave the option out")
    stop, problem, options = stop or threading.Event(), question.problem, question.options
    reduction = reduce(problem)
    rows = [_rival_row(name, rival, problem) for name, rival in rivals.items()]
    if AUTO in placers:
        question.prepare()
    for name in placers:
        solver_of(name).prepare()
        answers: list[Candidate | None] = []
        seconds, simulations = 0.0, 0
        for seed in range(seeds):
            if on_start is not None:
                on_start(name, seed)
            clock = Clock(limit, stop=stop)
            asked = replace(question, step=problem, options=replace(options, seed=seed))
            best = None
            if name != AUTO:
                best = solve(name, replace(asked.about_ops(), reduction=reduction), clock).best
            elif not stop.is_set():
                solution = find(asked, clock)
                best = _answered(solution)
                if question.num_batches and not seed:
                    rows += [_row(each.name, [each], 0.0, 1) for each in solution.looked_at if each.name]
            if stop.is_set():
                return _comparison(rows, question, interrupted=True)
            answers.append(best)
            seconds += clock.seconds / seeds
            simulations += clock.simulations
        rows.append(_row(name, answers, seconds, simulations // seeds))
    return _comparison(rows, question)


def _answered(solution: Solution) -> Candidate:
    """Returns the plan of `place`; of batches in flight with the time per batch."""
    best, plan = solution.best, solution.plan
    assert plan is not None
    assert plan.problem is not None
    if plan.layout is not None and in_flight(plan.layout):
        assert best is not None
        return best
    return replace(Candidate.of(replay(plan.problem, plan)), cut=None if best is None else best.cut)


def _comparison(rows: Sequence[PlacerRow], question: PlaceQuestion, *, interrupted: bool = False) -> Comparison:
    if question.num_batches:
        bound_ns = throughput_bound(question.graph, question.cluster, question.num_batches)
        return Comparison(tuple(rows), bound_ns, interrupted, bound_ns, question.num_batches)
    layout_ns = None
    if any(row.layout is not None for row in rows):
        read = {1: question.graph} if question.parts is None else question.parts.read
        layout_ns = layout_bound(read, question.cluster)
    return Comparison(tuple(rows), lower_bound(question.problem), interrupted, layout_ns)


def _row(name: str, answers: Sequence[Candidate | None], seconds: float, simulations: int) -> PlacerRow:
    statuses = {"failed" if best is None else "ok" if best.fits else "infeasible" for best in answers}
    status = next(status for status in ("failed", "infeasible", "ok") if status in statuses)
    times_ns = tuple(best.step_time_ns if best is not None and best.fits else None for best in answers)
    fastest = min((best for best in answers if best is not None), default=None)
    layout = None if fastest is None or fastest.cut is None else fastest.named_layout
    told = _told(None if fastest is None else fastest.simulation)
    return PlacerRow(name, status, times_ns, seconds, simulations, layout, **told)


def _rival_row(name: str, rival: Rival, problem: Problem) -> PlacerRow:
    began = time.perf_counter()
    found = rival(problem)
    seconds = time.perf_counter() - began
    if isinstance(found, Solution):
        return _layout_row(name, found, seconds)
    if found is None:
        return PlacerRow(name, "failed", (None,), seconds, 0)
    if not found.feasible:
        return PlacerRow(name, "infeasible", (None,), seconds, 1)
    return PlacerRow(name, "ok", (found.step_time_ns,), seconds, 1, **_told(found))


def _layout_row(name: str, solution: Solution, seconds: float) -> PlacerRow:
    best = solution.best
    assert best is not None, "it says at least why there is no step"
    status = "ok" if best.fits else "failed" if best.simulation is None else "infeasible"
    time_ns = best.step_time_ns if best.fits else None
    layout = None if best.cut is None else best.named_layout
    told = _told(best.simulation)
    return PlacerRow(name, status, (time_ns,), seconds, len(solution.looked_at), layout, reason=best.obstacle, **told)


def _told(simulation: Simulation | None) -> dict[str, Any]:
    """Returns what a step that was simulated tells of its time."""
    if simulation is None:
        return {}
    return {"step_range": simulation.step_range, "mfu": simulation.mfu and simulation.mfu[0]}
