"""START HERE: the main job on one page. A graph and a cluster go in, the best plan found in the budget comes out.

    Problem --reduce, bound--> Question --a solver, within the Clock--> Solution --> Plan

`solvers.py` has the solvers by name, `auto.py` the default one.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from numbers import Integral, Real
from typing import Unpack

import numpy as np

from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.cluster.quantities import parse_fraction
from gdp.errors import InputError
from gdp.graph import GraphSource
from gdp.search.candidate import Candidate
from gdp.search.noise import Noise, step_times_under_noise
from gdp.search.ops.good_order import in_program_order
from gdp.search.question import Question
from gdp.search.settings import DEFAULTS, Settings
from gdp.search.solution import Solution
from gdp.search.solvers import solve, solver_of
from gdp.simulator.constraints import ConstraintKeywords, Constraints
from gdp.simulator.plan import Plan, Search
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation
from gdp.units.reduction import Reduction, reduce

RECORD_S = 0.2  # seconds that the replays under noise of the answer may take after the time


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
    graph: GraphSource | Problem,
    cluster: Cluster | str,
    constraints: Constraints | None = None,
    *,
    placer: str = "auto",
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
    """Returns the best plan of `graph` on `cluster` that `placer` finds within `budget`.

    `graph` may be a `Capture`, or a `Problem` on `cluster`, which has its constraints; `cluster` the text of DEVICES
    such as "2xl4-24g+cpu-16core", and `budget` a number of seconds, "30s", "20000sims" or a clock that has begun.
    `auto` runs the classical placers, slow ones if there is time, asks the policy where the time is short, and
    searches in the time left; it never answers worse than the best of them, and never with a plan that does not fit
    where it found one that does. When nothing fits, the plan has the status "infeasible" and
    `plan.search.missing_bytes` says where and by how much. With a budget in simulations the same seed gives the same
    plan. Constraints are those of `Problem.build`, one value or keywords such as `pins={"encoder": "gpu0"}`, `forbid`,
    `max_memory={"gpu0": "12GiB"}` and `reserve="10%"`. `robust` is the
    relative deviation of op times over which searches average the step time (default: 0.02; 0: not at all), to choose
    among plans that are not slower than a baseline without it. `checkpoint` is the file of a policy for `auto` and the
    learned placers, in place of the one that comes with gdp; `auto` then asks it whatever the budget. Searches begin
    from `starts` too, moved where constraints do not allow them. `stop` ends the search early. `settings`
    are the numbers that tune it.
    Raises InputError for arguments that make no sense.
    """
    settings = settings or DEFAULTS
    noise_share = _check(placer, seed, robust, settings)
    if num_threads is not None and not (isinstance(num_threads, Integral) and num_threads > 0):
        raise InputError(f"num_threads is {num_threads!r}; an integer above 0 is expected")
    solver_of(placer).prepare()
    clock = Clock.of(budget, stop=stop)
    if isinstance(graph, Problem):
        if graph.cluster is not cluster or constraints is not None or keywords:
            raise InputError("place: a problem has its devices and constraints; give no others")
        problem = graph
    else:
        problem = Problem.build(graph, cluster, Constraints.of(constraints, keywords, place))
    _ = problem.graph.fingerprint  # the graph keeps it: for a million ops it takes seconds, which are of the budget
    bound_ns = lower_bound(problem)
    if clock.stop.is_set() and problem.num_ops > settings.large.slow_ops:
        raise InputError("interrupted before there was a placement; place again")
    report = None if on_progress is None else _best_so_far(on_progress, clock, bound_ns)
    nothing = Reduction.nothing(problem)
    question = Question(
        problem, nothing, bound_ns, seed, None, starts, checkpoint, num_threads, report, settings=settings
    )
    if not question.is_large or solver_of(placer).is_learned or question.has_time(clock, settings.ops.searched):
        question = replace(question, reduction=reduce(problem))  # which only a search needs
    if noise_share and (robust is not None or question.has_time(clock, settings.noise.fewest_simulations)):
        question = replace(question, noise=Noise.draw(question.reduction, noise_share, settings.noise.num_tables, seed))
    solution = solve(placer, question, clock)
    if solution.best is None:
        names = f"{problem.graph.name!r} on {problem.cluster.name!r}"
        raise InputError(f"placer {placer!r} found no placement of {names}; use placer auto")
    best = in_program_order(solution.best.replay)
    noise_share = 0.0 if question.noise is None else noise_share
    return plan_of(best, bound_ns, placer, seed, _search_record(solution, best, clock, noise_share, question))


def plan_of(simulation: Simulation, bound_ns: int, placer: str, seed: int, search: Search | None = None) -> Plan:
    """Returns the plan that `simulation` runs."""
    problem = simulation.problem
    return Plan(
        graph=problem.graph.fingerprint,
        cluster=problem.cluster.fingerprint,
        devices=tuple(device.name for device in problem.cluster.devices),
        placement=simulation.placement,
        order=simulation.order,
        step_time_ns=simulation.step_time_ns,
        peak_memory_bytes=simulation.peak_memory_bytes,
        lower_bound_ns=bound_ns,
        placer=placer,
        seed=seed,
        gdp_version=version("gdp-placement"),
        search=search,
        problem=problem,
    )


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
        best = min(best, candidate)
        on_progress(
            Progress(best.step_time_ns, best.fits, bound_ns, clock.simulations, clock.seconds, clock.seconds_left)
        )

    return report


def _search_record(solution: Solution, best: Simulation, clock: Clock, robust: float, question: Question) -> Search:
    """Returns how the plan was found; `best` is the step that it runs."""
    assert solution.best is not None
    noisy = None
    if robust:
        part = clock.at_least(RECORD_S)
        noisy = step_times_under_noise(best, robust, question.seed + 1, part, question.settings.noise)
    return Search(
        seconds=clock.seconds,
        simulations=clock.simulations,
        baselines=solution.baselines,
        busy_fraction=best.busy_fraction,
        missing_bytes=best.missing_bytes,
        interrupted=clock.stop.is_set(),
        under_noise=noisy,
        order=solution.best.order,
    )
