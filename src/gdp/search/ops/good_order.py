"""The order in which a question's placements start their ops: of micro-batches, or of calls, where that is better."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gdp.budget import Clock
from gdp.placers.base import devices_by_speed
from gdp.placers.contiguous import folded_chain, stages
from gdp.placers.starts import call_grids, replicated_stages
from gdp.search.candidate import Figures
from gdp.search.ops.local_search import diverse_starts
from gdp.search.question import Question
from gdp.simulator.orders import B_LEVEL, BY_CALL
from gdp.simulator.problem import Placement
from gdp.simulator.simulate import Simulation, simulate
from gdp.units.units import Units, forward_units


def in_good_order(question: Question, clock: Clock) -> Question:
    """Returns the question in the order in which stages do best, if there is time. Those are stages of each replica,
    where they fit. Without micro-batches and replicas it stays in the b-level's order, unless stages, grids and
    partitions are much faster by call. On average, that is: that the best of a few is by call says little about what a
    search finds, but that it is not says more."""
    if clock.stop.is_set():
        return question
    problem, judge = question.problem, replace(question, noise=None)
    part = clock.until(question.settings.ops.order_share)
    of_replicas = next(replicated_stages(problem), None)
    if of_replicas is not None and (best := judge.try_orders(of_replicas[0].place(of_replicas[1]), clock=part)).fits:
        ordered = question.in_order(best.order)
        if question.noise is not None:
            return ordered
        question.tell(best)
        return replace(ordered, known=[best])
    if problem.microbatch.max() >= 1:
        return question.in_order(judge.try_orders(next(_tried(question, clock)), clock=part).order)
    return question.in_order(BY_CALL) if _is_better_by_call(question, clock) else question


def _is_better_by_call(question: Question, clock: Clock) -> bool:
    problem, settings, left = question.problem, question.settings.ops, clock.simulations_left
    needed = settings.order_simulations
    is_short = left < needed if left is not None else not question.has_time(clock, needed)
    if problem.num_devices < 2 or question.is_large or is_short:
        return False
    if any(each.simulator.order_traits.call is None for each in (problem, question.reduction.problem)):
        return False
    judge, part = replace(question, noise=None), clock.until(settings.order_share)
    tried = [
        [judge.try_orders(placement, (order,), part).step_time_ns + 1 for order in (B_LEVEL, BY_CALL)]
        for placement in _tried(question, part)
    ]
    clock.spend(2 * len(tried))
    by_level, by_call = np.array(tried, np.float64).T
    gain = np.log(by_call / by_level).mean()
    return bool(gain < np.log(settings.order_gain) and by_call.min() <= by_level.min())


def _tried(question: Question, clock: Clock) -> Iterator[Placement]:
    """Yields placements [N] that orders are compared on: contiguous stages first."""
    problem, settings = question.problem, question.settings
    followers = forward_units(problem)
    units = Units.of(problem, followers)
    by_module = folded_chain(problem, units)
    yield units.place_allowed(stages(problem, units, by_module, np.sort(devices_by_speed(problem))))
    yield from call_grids(problem)
    yield from diverse_starts(
        problem, followers, settings.ops.order_partitions, question.seed, clock, settings.local_search
    )


def in_program_order(simulation: Simulation) -> Simulation:
    """Returns the step with ready ops started in the order of the graph, if it is as fast, or lacks less memory. The
    machine model knows no caches, and a device that waits for no other is as fast in any order. On real devices the
    result of the op before is still in the cache for the next op of the program; by the b-level, gradients of weights
    that an unrolled net shares come late. Steps with micro-batches or replicas stay as they are: `best_dispatch` has
    tried their program's order."""
    problem = simulation.problem
    if problem.microbatch.max() >= 1 or problem.graph.is_collective.any():
        return simulation
    other = simulate(problem, simulation.placement, priority=np.arange(problem.num_ops)[::-1])
    return min(other, simulation, key=Figures.of)
