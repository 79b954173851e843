"""START HERE: the main job on one page. A model and a cluster go in, the best plan found in the budget comes out.

    batch that may be cut --> BatchQuestion --layouts/choose.py or batches/, within the Clock--> Solution --> Plan
    one step --> Problem --reduce, bound--> Question --a solver, within the Clock--> Solution --> Plan

`solvers.py` has the solvers of one step by name, `ops/auto.py` the default one.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Unpack

import numpy as np

from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import REPLAYS_LATE_S, Budget, Clock
from gdp.cluster import Cluster
from gdp.cluster.quantities import parse_fraction
from gdp.errors import InputError
from gdp.graph import Graph, GraphSource
from gdp.models.model import Model
from gdp.models.source import ModelSource
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.search.batch_parts import Parts
from gdp.search.batches.place_batches import place_batches
from gdp.search.candidate import UNKNOWN, Candidate
from gdp.search.layouts.choose import choose_layout
from gdp.search.noise import Noise, step_times_under_noise
from gdp.search.ops.classical import ClassicalRuns
from gdp.search.ops.good_order import in_program_order
from gdp.search.question import BatchQuestion, Question
from gdp.search.settings import DEFAULTS, Settings
from gdp.search.solution import Solution, plan_of, search_record
from gdp.search.solvers import solve, solver_of
from gdp.simulator.constraints import ConstraintKeywords, Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import replay, simulate
from gdp.units.reduction import Reduction, reduce

Placeable = str | ModelSource | Parts | GraphSource | Problem | tuple[Any, ...]
"""A MODEL, the parts of a batch, a step, or (module, args) and (module, args, kwargs)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a search that runs."""

    step_time_ns: int  # of the best placement so far
    feasible: bool
    lower_bound_ns: int
    simulations: int
    seconds: float
    seconds_left: float | None  # None with a budget in simulations


def place(
    model: Placeable,
    cluster: Cluster | str,
    constraints: Constraints | None = None,
    *,
    parallel: Layout | str = AUTO,
    batches: int | None = None,
    placer: str = AUTO,
    budget: Clock | Budget | str | float = "30s",
    seed: int = 0,
    robust: float | str | None = None,
    checkpoint: str | None = None,
    starts: Sequence[Candidate] = (),
    num_threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    settings: Settings | None = None,
    **keywords: Unpack[ConstraintKeywords],
) -> Plan:
    """Returns the best plan of `model` on `cluster` that is found within `budget`, as `gdp place` does.

    `model` is a MODEL as the command takes it, (module, inputs), `Parts` of a batch, a graph, or a `Capture`. A graph
    and a capture are one step, and their ops are placed; give the module itself, and its batch is cut where that is
    faster. It may also be a `Problem` on `cluster`, which has its constraints. `cluster` may be the text of DEVICES
    such as "2xl4-24g+cpu-16core", and `budget` a number of seconds, "30s", "20000sims" or a clock that has begun.

    `parallel` is how the batch of a training step is cut: "auto" chooses, "none" places the ops of the whole step, and
    "data=4,zero=1" is one layout. `batches` is the number of batches of a forward pass in flight: the plan has the
    layout that serves them fastest.

    `auto` runs the classical placers, slow ones if there is time, asks the policy where the time is short, and
    searches in the time left; it never answers worse than the best of them, and never with a plan that does not fit
    where it found one that does. Another `placer` places the ops of the whole step. When nothing fits, the plan has the
    status "infeasible" and `plan.search.missing_bytes` says where and by how much. With a budget in simulations the
    same seed gives the same plan. Constraints are those of `Problem.build`, one value or keywords such as
    `pins={"encoder": "gpu0"}`, `forbid`, `max_memory={"gpu0": "12GiB"}` and `reserve="10%"`. `robust` is the relative
    deviation of op times over which searches of one step average the step time (default: 0.02; 0: not at all), to
    choose among plans that are not slower than a baseline without it. `checkpoint` is the file of a policy for `auto`
    and the learned placers, in place of the one that comes with gdp; `auto` then asks it whatever the budget. Searches
    of one step begin from `starts` too, moved where constraints do not allow them. `stop` ends the search early.
    `settings` are the numbers that tune it. Raises InputError for arguments that make no sense.
    """
    settings = settings or DEFAULTS
    noise_share = _check(placer, seed, robust, settings)
    if num_threads is not None and not (isinstance(num_threads, Integral) and num_threads > 0):
        raise InputError(f"num_threads is {num_threads!r}; an integer above 0 is expected")
    if not isinstance(parallel, str | Layout):
        raise InputError(f"parallel is {parallel!r}; 'auto', 'none', or a layout such as 'data=4,zero=1' is expected")
    if isinstance(model, Problem) and (model.cluster is not cluster or constraints is not None or keywords):
        raise InputError("place: a problem has its devices and constraints; give no others")
    cluster, limits = Cluster.of(cluster), Constraints.of(constraints, keywords, place)
    layout = Layout.parse(parallel) if isinstance(parallel, str) and parallel not in (AUTO, NONE) else parallel
    is_for_ops = placer != AUTO or len(starts) > 0 or isinstance(model, Problem)
    whole, parts = opened(model, layout, batches, is_for_ops=is_for_ops)
    if parts is not None and layout == AUTO and batches is None and cluster.num_devices == 1:
        parts = None if fits_alone(Problem.build(whole, cluster, limits)) else parts
    if parts is None:
        solver_of(placer).prepare()
        clock = Clock.of(budget, stop=stop)
        problem = model if isinstance(model, Problem) else Problem.build(whole, cluster, limits)
        question = Question(problem, Reduction.nothing(problem), seed=seed, starts=starts, settings=settings)
        question = replace(question, checkpoint=checkpoint, num_threads=num_threads)
        return _ops_placed(question, placer, clock, robust, on_progress)
    asked = BatchQuestion(parts, cluster, limits, seed=seed, checkpoint=checkpoint, num_threads=num_threads)
    asked = replace(asked, layout=layout if isinstance(layout, Layout) else None, settings=settings)
    if batches is None and asked.layout is None and not isinstance(budget, Clock):
        parts.read_ahead(cluster.num_devices, settings.large)
    clock = Clock.of(budget, stop=stop)
    if on_progress is not None:
        asked = replace(asked, on_progress=_best_so_far(on_progress, clock, layout_bound(parts.read, cluster)))
    if batches is not None:
        solution = place_batches(replace(asked, num_batches=batches), clock)
        assert solution.plan is not None
        return solution.plan
    return completed(asked, choose_layout(asked, clock), clock, noise_share)


def opened(
    model: Placeable, layout: Layout | str, batches: int | None, *, is_for_ops: bool
) -> tuple[Graph, Parts | None]:
    """Returns the whole step of `model`, and the parts of its batch; None where its ops are to be placed as they are.

    `auto` cuts the batch of a training step that can be read anew with fewer samples.
    """
    source = None
    if isinstance(model, tuple):
        source = ModelSource.of_example(model)
    elif isinstance(model, str | ModelSource):
        source = ModelSource(model) if isinstance(model, str) else model
    read = None if source is None else source.whole()
    if isinstance(model, Parts):
        whole = model.exact(1)
    else:
        whole = Graph.of(model) if read is None else read.graph  # type: ignore[arg-type]
    if batches is not None:
        return whole, Parts(lambda num_parts: whole, 1, whole)
    if isinstance(layout, Layout):
        if is_for_ops:
            raise InputError("parallel: a layout is placed by auto, without starts; leave placer and starts out")
        if source is not None and read is not None:
            return whole, Parts.of_source(source, whole, read.captured_s)
        return whole, Parts.of(model)  # type: ignore[arg-type]
    if is_for_ops or layout == NONE:
        return whole, None
    if isinstance(model, Parts):
        return whole, model
    return whole, None if source is None or read is None else parts_to_cut(source, read)


def parts_to_cut(source: ModelSource, whole: Model) -> Parts | None:
    """Returns the parts of the batch of MODEL, of which `auto` looks at layouts; None where it places ops alone."""
    if not may_be_cut(source) or any(whole.graph.times_ns):  # measured times say nothing about parts of ops
        return None
    with contextlib.suppress(InputError):  # the batch cannot be split
        return Parts.of_source(source, whole.graph, whole.captured_s)
    return None


def may_be_cut(source: ModelSource) -> bool:
    """Returns whether `auto` looks at layouts: MODEL is a training step that can be read anew with fewer samples."""
    reading = source.reading
    is_whole = reading.microbatching.count == 1 and not reading.microbatching.free_replicas
    return is_whole and reading.training and not reading.serving.has_cache and not source.is_file


def fits_alone(problem: Problem) -> bool:
    """Returns whether all of the step fits on the first device: then one device has no use for layouts."""
    return in_program_order(simulate(problem, np.zeros(problem.num_ops, np.int64))).feasible


def completed(question: BatchQuestion, solution: Solution, clock: Clock, noise_share: float) -> Plan:
    """Returns the plan of a layout with its step times when op times vary, and beside the best single device."""
    plan = solution.plan
    assert plan is not None
    assert plan.search is not None
    assert plan.problem is not None
    if plan.search.interrupted:
        return plan
    search = plan.search
    if noise_share:
        part, settings = clock.at_least(REPLAYS_LATE_S), question.settings.noise
        noisy = step_times_under_noise(replay(plan.problem, plan), noise_share, question.seed + 1, part, settings)
        search = replace(search, under_noise=noisy)
    if "single" not in search.baselines:
        with contextlib.suppress(InputError):  # constraints allow none
            problem = Problem.build(question.parts.exact(1), question.cluster, question.constraints)
            runs = ClassicalRuns(Question(problem, Reduction.nothing(problem)))
            runs.run(("single",), Clock.of("1sims"))
            if runs.best is not None:
                search = replace(search, baselines={**runs.baselines, **search.baselines})
    return replace(plan, search=search)


def _ops_placed(
    question: Question,
    placer: str,
    clock: Clock,
    robust: float | str | None,
    on_progress: Callable[[Progress], None] | None,
) -> Plan:
    """Returns the plan that `placer` finds for the ops of the problem, which is not reduced yet."""
    problem, settings = question.problem, question.settings
    noise_share = _check(placer, question.seed, robust, settings)
    _ = problem.graph.fingerprint  # the graph keeps it: for a million ops it takes seconds, which are of the budget
    bound_ns = lower_bound(problem)
    if clock.stop.is_set() and question.is_large:
        raise InputError("interrupted before there was a placement; place again")
    report = None if on_progress is None else _best_so_far(on_progress, clock, bound_ns)
    question = replace(question, bound_ns=bound_ns, on_progress=report)
    if not question.is_large or solver_of(placer).is_learned or question.has_time(clock, settings.ops.searched):
        question = replace(question, reduction=reduce(problem))  # which only a search needs
    if noise_share and (robust is not None or question.has_time(clock, settings.noise.fewest_simulations)):
        noise = Noise.draw(question.reduction, noise_share, settings.noise.num_tables, question.seed)
        question = replace(question, noise=noise)
    solution = solve(placer, question, clock)
    if solution.best is None:
        names = f"{problem.graph.name!r} on {problem.cluster.name!r}"
        raise InputError(f"placer {placer!r} found no placement of {names}; use placer auto")
    best = in_program_order(solution.best.replay)
    record = search_record(best, clock, solution.best.order, solution.baselines)
    if question.noise is not None:
        part = clock.at_least(REPLAYS_LATE_S)
        noisy = step_times_under_noise(best, noise_share, question.seed + 1, part, settings.noise)
        record = replace(record, under_noise=noisy)
    return plan_of(best, bound_ns, placer, question.seed, record)


def _check(placer: str, seed: int, robust: float | str | None, settings: Settings) -> float:
    """Returns the noise to search under, by default that of `placer`; InputError for values out of range."""
    if isinstance(robust, str):
        robust = parse_fraction(robust, "robust", below=0.5)
    if robust is not None and not (isinstance(robust, Real) and 0 <= robust < 0.5):
        raise InputError(f"robust is {robust!r}; at least 0 and below 0.5 is expected, such as 0.02 or 2%")
    if not isinstance(seed, Integral) or not 0 <= seed < 2**63:
        raise InputError(f"seed is {seed!r}; an integer from 0 to 2^63 - 1 is expected")
    return (settings.noise.spread if solver_of(placer).searches else 0.0) if robust is None else robust


def _best_so_far(on_progress: Callable[[Progress], None], clock: Clock, bound_ns: int) -> Callable[[Candidate], None]:
    """Returns a listener for candidates that passes the best one on, with what was spent."""
    best = Candidate(np.zeros(0, np.int64))

    def report(candidate: Candidate) -> None:
        nonlocal best
        if candidate.simulation is None and candidate.figures == UNKNOWN:  # it is not allowed
            return
        best = min(best, candidate)
        on_progress(
            Progress(best.step_time_ns, best.fits, bound_ns, clock.simulations, clock.seconds, clock.seconds_left)
        )

    return report
