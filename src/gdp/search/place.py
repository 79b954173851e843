"""START HERE: the main job on one page. A model and a cluster go in, the best plan found in the budget comes out.

    model, cluster --PlaceQuestion.of--> PlaceQuestion --answer, within the Clock--> Solution --> Plan

    ops of one step: Problem --reduce, bound--> Question --a solver-->  Solution
    batch:           BatchQuestion --layouts/choose.py or batches/-->   Solution

`solvers.py` has the solvers of one step by name, `ops/auto.py` the default one."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np

from gdp.budget import REPLAYS_LATE_S, Budget, Clock
from gdp.cluster import Cluster
from gdp.cluster.quantities import parse_fraction
from gdp.errors import InputError
from gdp.models.lora import Lora
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.search.batches.place_batches import place_batches
from gdp.search.candidate import UNKNOWN, Candidate, simplest
from gdp.search.layouts.choose import choose_layout, search_further
from gdp.search.ops.classical import ClassicalRuns, on_one_device
from gdp.search.ops.good_order import in_program_order
from gdp.search.place_question import Placeable, PlaceQuestion, SearchOptions
from gdp.search.question import (
    BatchQuestion,
    Noise,
    OnProgress,
    Solution,
    plan_of,
    search_record,
    step_times_under_noise,
)
from gdp.search.settings import DEFAULTS, Settings
from gdp.search.shards import over_degrees
from gdp.search.solvers import solve, solver_of
from gdp.simulator.constraints import ConstraintKeywords, Constraints
from gdp.simulator.plan import Baseline, NoisyTimes, Plan
from gdp.simulator.simulate import Simulation, replay
from gdp.units.reduction import reduce

_OTHERS = ("single", "expert")  # that learned placers are compared with, which run no other one


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
    parallel: Layout | str | None = None,
    batches: int | None = None,
    batch: int | None = None,
    batch_dim: int | None = None,
    precision: str = "",
    lora: str = "",
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

    `parallel` is how the batch of a training step is cut: None chooses where it can be cut, "auto" insists on that,
    "none" places the ops of the whole step, and "data=4,zero=1" is one layout. `batches` is the number of batches of a
    forward pass in flight: the plan has the layout that serves them fastest. `batch` is the number of samples in place
    of the model's, and `batch_dim` the dimension of the inputs that is the batch; None: the first, unless two sizes of
    it say otherwise. `precision` and `lora` are those of `gdp.capture`.

    `auto` runs the classical placers, slow ones if there is time, and searches in the time left; it never answers worse
    than the best of them, and never with a plan that does not fit where it found one that does. Another `placer` places
    the ops of the whole step. When nothing fits, the plan has the status "infeasible" and `plan.search.missing_bytes`
    says where and by how much. With a budget in simulations the same seed gives the same plan. Constraints are those of
    `Problem.build`, one value or keywords such as `pins={"encoder": "gpu0"}`, `forbid`, `max_memory={"gpu0": "12GiB"}`
    and `reserve="10%"`. `robust` is the relative deviation of op times over which searches of one step average the step
    time (default: 0.02; 0: not at all), to choose among plans that are not slower than a baseline without it.
    `checkpoint` is the file of a policy for the learned placers, in place of the one that comes with gdp, and for
    `auto`, which asks no other. Searches of one step begin from `starts` too, moved where constraints do not allow
    them. `stop` ends the search early. `settings` are the numbers that tune it. Raises InputError for arguments that
    make no sense."""
    options = SearchOptions(
        placer=placer,
        seed=seed,
        robust=parse_fraction(robust, "robust", below=0.5) if isinstance(robust, str) else robust,
        checkpoint=checkpoint,
        starts=starts,
        num_threads=num_threads,
        settings=settings or DEFAULTS,
    )
    if not isinstance(parallel, str | Layout | None):
        raise InputError(f"parallel is {parallel!r}; 'auto', 'none', or a layout such as 'data=4,zero=1' is expected")
    if on_progress is not None and not callable(on_progress):
        raise InputError(f"on_progress is {on_progress!r}; a function of a gdp.Progress is expected")
    if stop is not None and not isinstance(stop, threading.Event):
        raise InputError(f"stop is {stop!r}; a threading.Event is expected")
    cluster, limits = Cluster.of(cluster), Constraints.of(constraints, keywords, place)
    layout = Layout.parse(parallel) if isinstance(parallel, str) and parallel not in (AUTO, NONE) else parallel
    own = {"batch": batch, "batch_dim": batch_dim, "precision": precision or None, "lora": Lora.parse(lora)}
    own = {name: value for name, value in own.items() if value is not None}
    if own:
        if not isinstance(model, str | tuple):
            raise InputError(f"{next(iter(own))}: it is that of a MODEL or of (module, inputs); leave it out")
        reading = Reading(**own)  # type: ignore[arg-type]
        model = ModelSource(model, reading) if isinstance(model, str) else ModelSource.of_example(model, reading)
    question = PlaceQuestion.of(model, cluster, limits, layout, batches, options)
    if not isinstance(budget, Clock):
        question.prepare()
    clock = Clock.of(budget, stop=stop)
    plan = answer(question, clock, None if on_progress is None else best_so_far(on_progress, question, clock)).plan
    assert plan is not None
    return plan


def answer(question: PlaceQuestion, clock: Clock, on_progress: OnProgress | None = None) -> Solution:
    """Returns the best candidate that is found until `clock` ends, with its plan and what else was looked at."""

    def solve(asked: PlaceQuestion, part: Clock, known: Solution | None = None) -> Solution:
        return _answer(asked, part, on_progress, known)

    return over_degrees(question, clock, solve)


def _answer(
    question: PlaceQuestion, clock: Clock, on_progress: OnProgress | None, known: Solution | None = None
) -> Solution:
    """Returns the answer on the devices of the question, as they are. Layouts that are `known` take part, and op
    placement that is known to be the best is searched further."""
    if question.parts is None:
        return _ops_placed(question, clock, on_progress)
    batch = question.about_batch(on_progress)
    return place_batches(batch, clock) if question.num_batches else _layout_chosen(question, batch, clock, known)


def best_so_far(
    on_progress: Callable[[Progress], None], question: PlaceQuestion, clock: Clock
) -> Callable[[Candidate], None]:
    """Returns a listener for candidates that passes the best one on, with what `clock` has spent."""
    best, bound_ns = Candidate(np.zeros(0, np.int64)), question.bound_ns

    def report(candidate: Candidate) -> None:
        nonlocal best
        if candidate.simulation is None and candidate.figures == UNKNOWN:  # it is not allowed
            return
        best = min(best, candidate)
        on_progress(
            Progress(best.step_time_ns, best.fits, bound_ns, clock.simulations, clock.seconds, clock.seconds_left)
        )

    return report


def _ops_placed(question: PlaceQuestion, clock: Clock, on_progress: OnProgress | None) -> Solution:
    """Returns the answer of the placer to how the ops of the whole step are placed."""
    options, problem = question.options, question.problem
    placer, settings, solver = options.placer, options.settings, solver_of(options.placer)
    _ = problem.graph.fingerprint  # the graph keeps it: for a million ops it takes seconds, which are of the budget
    asked = replace(question.about_ops(on_progress), bound_ns=question.bound_ns)
    if clock.stop.is_set() and asked.is_large:
        raise InputError("interrupted before there was a placement; place again")
    if not asked.is_large or solver.is_learned or asked.has_time(clock, settings.ops.searched):
        asked = replace(asked, reduction=reduce(problem))  # which only a search needs
    noise_share = options.noise_share
    if noise_share and (options.robust is not None or asked.has_time(clock, settings.noise.fewest_simulations)):
        asked = replace(asked, noise=Noise.draw(asked.reduction, noise_share, settings.noise.num_tables, options.seed))
    solution = solve(placer, asked, clock)
    if solution.best is None:
        names = f"{problem.graph.name!r} on {problem.cluster.name!r}"
        raise InputError(f"placer {placer!r} found no placement of {names}; use placer auto")
    chosen = solution.best
    if placer == AUTO and chosen.error:
        chosen = simplest([chosen, *on_one_device(asked)])
    best = in_program_order(chosen.replay)
    record = search_record(best, clock, chosen.order, solution.baselines)
    if asked.noise is not None:
        record = replace(record, under_noise=_under_noise(options, best, clock))
    if solver.is_learned and not solution.baselines:
        record = replace(record, baselines=_baselines(question, _OTHERS))
    return solution._replace(best=chosen, plan=plan_of(best, asked.bound_ns, placer, options.seed, record))


def _layout_chosen(
    question: PlaceQuestion, batch: BatchQuestion, clock: Clock, known: Solution | None = None
) -> Solution:
    """Returns the best layout, with its step times when op times vary, and beside the best single device."""
    if known is not None and known.best is not None and known.best.is_whole:
        solution = search_further(batch, known, clock)
    else:
        solution = choose_layout(batch, clock, known)
    plan = solution.plan
    assert plan is not None
    assert plan.search is not None
    assert plan.problem is not None
    search = plan.search
    if search.interrupted:
        return solution
    if question.options.noise_share:
        noisy = _under_noise(question.options, replay(plan.problem, plan), clock)
        search = replace(search, under_noise=noisy)
    single = {} if "single" in search.baselines else _baselines(question, ("single",))
    if all(baseline.status != "failed" for baseline in single.values()):  # constraints allow it
        search = replace(search, baselines={**single, **search.baselines})
    return solution._replace(plan=replace(plan, search=search))


def _under_noise(options: SearchOptions, step: Simulation, clock: Clock) -> NoisyTimes | None:
    """Returns the times of `step` when op times vary; None where there is no time to replay it."""
    part = clock.at_least(REPLAYS_LATE_S)
    return step_times_under_noise(step, options.noise_share, options.seed + 1, part)


def _baselines(question: PlaceQuestion, placers: Sequence[str]) -> Mapping[str, Baseline]:
    """Returns what classical `placers` make of the ops of the whole step."""
    runs = ClassicalRuns(question.about_ops())
    runs.run(placers, Clock.of("1sims"))
    return runs.baselines
