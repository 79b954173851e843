"""Dispatch: in which order devices start the ops of a step with replicas.

The b-level of the machine model knows nothing of rings: gradients, which only an update waits for, would be made last,
and the rings after them would run when nothing is left to compute. So ops also run by the longest path with transfers,
and as the program has them, which is how PyTorch overlaps sums with the backward pass. The best of all is taken, and
the program's order where it is as fast, since caches like it (`search/ops/good_order.py`).

In the published 1F1B schedule stage p of P has at most P - p micro-batches in flight:

    stage 0 of 2   F0 F1 B0 F2 B1 F3 B2 B3
    stage 1 of 2      F0 B0 F1 B1 F2 B2 F3 B3

By priorities alone a stage would start a further forward pass whenever it waits. So the order of ops is found on the
graph with a control edge from the backward pass of each micro-batch to the forward pass that takes its place.
D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
M ops of a step, P stages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gdp.arrays import I64, combined, unique
from gdp.budget import Clock, has_time
from gdp.graph import Graph
from gdp.graph.builder import with_controls
from gdp.graph.copies import ACCUMULATE
from gdp.parallel.layout import BLOCKS
from gdp.parallel.step import Step
from gdp.search.candidate import Candidate, Figures
from gdp.search.settings import DEFAULTS, LargeSteps
from gdp.simulator.levels import communication_levels
from gdp.simulator.orders import B_LEVEL, ONE_F_ONE_B, PROGRAM, ZERO_BUBBLE_PROGRAM
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate

_AS_FAST = 1e-3  # of a step: by how much the order of the program may be slower


def best_dispatch(
    problem: Problem, step: Step, placement: Placement, clock: Clock | None = None, large: LargeSteps = DEFAULTS.large
) -> Candidate:
    """Returns the step in the best of all orders of micro-batches and levels of ops: one that fits, then the fastest.
    `problem` is that of placing the graph of `step` [M ops], and `placement` [M] is of it. The first way is always
    tried, others of a large step while there is time. The published schedule is the first of a large step in stages,
    unless it recomputes all blocks: then few activations need its limit, and unlike stages wait for it. It is tried at
    any time where no other fits."""
    levels = levels_of(problem, step, placement)
    orders = [order for order in problem.orders if order not in (B_LEVEL, PROGRAM, ZERO_BUBBLE_PROGRAM)]  # see levels
    few_levels = levels
    is_slow = problem.num_ops > large.slow_ops
    if is_slow:
        orders, few_levels = orders[:2], levels[:2]
    ways = [(order, level) for order in orders for level in few_levels] + [(B_LEVEL, level) for level in levels]

    def published() -> Simulation:
        return simulate_1f1b(problem, placement, stages_of(step, placement), step.replica, levels[:1])

    def by_level(order: str, level: I64) -> Simulation:
        return simulate(problem, placement, priority=problem.priority(order, level))

    makers: list[tuple[str, Callable[[], Simulation]]]
    makers = [(order, partial(by_level, order, level)) for order, level in ways]
    if problem.microbatch.max() > 0 and len(unique(placement[problem.microbatch >= 0])) > step.layout.data:
        is_first = is_slow and step.layout.stages is not None and step.layout.recompute != BLOCKS
        makers.insert(0 if is_first else len(makers), (ONE_F_ONE_B, published))
    found: list[Candidate] = []
    is_stopped = clock is not None and clock.stop.is_set()
    for order, make in makers:
        is_late = found and is_slow and not has_time(clock, 2 * problem.simulator.fastest_s)
        is_needed = make is published and not is_stopped and not any(each.fits for each in found)
        if not is_late or is_needed:
            found.append(Candidate.of(make(), order))
    return preferred(found)


def preferred(found: Sequence[Candidate]) -> Candidate:
    """Returns the first candidate that is as good as the best, but for what real devices do not show."""
    best = min(found)
    longest_ns = best.step_time_ns * (1 + _AS_FAST)
    alike = (each for each in found if each.figures.excess_bytes == best.figures.excess_bytes)
    return next(each for each in alike if each.step_time_ns <= longest_ns)


def levels_of(problem: Problem, step: Step, placement: Placement) -> list[I64]:
    """Returns the levels of ops [M] that are worth trying: of equal ones the first is the best on real devices."""
    if len(unique(placement)) == 1:
        return [problem.program_level, problem.b_level_ns]
    others = [communication_levels(problem, placement), problem.b_level_ns]
    return [problem.program_level, *others] if step.layout.data > 1 else others


def simulate_1f1b(
    problem: Problem, placement: Placement, stage: I64, replica: I64, levels: Sequence[I64]
) -> Simulation:
    """Returns the step of `placement` [M] in the published schedule, in the best of `levels` [M] of ops. `stage` and
    `replica` [M] are those of the ops. Without micro-batches ops start by the levels alone."""
    if problem.microbatch.max() < 1:
        return min((simulate(problem, placement, priority=level) for level in levels), key=Figures.of)
    limited = replace(problem, graph=_limited(problem, stage, replica))
    orders = (simulate(limited, placement, priority=problem.priority(ONE_F_ONE_B, level)).order for level in levels)
    return min((simulate(problem, placement, order=order) for order in orders), key=Figures.of)


def _limited(problem: Problem, stage: I64, replica: I64) -> Graph:
    """Returns the graph with the control edges that limit the micro-batches in flight."""
    graph, microbatch = problem.graph, problem.microbatch
    count, num_stages = int(microbatch.max()) + 1, int(stage.max()) + 1
    is_backward, is_update, is_sum = *map(graph.is_in_phase, ("backward", "update")), graph.is_in_role(ACCUMULATE)
    turn = (replica * num_stages + stage) * count + microbatch
    is_own = microbatch >= 0
    ends = np.flatnonzero(is_own & is_backward & ~is_sum)
    last_backward = combined(np.maximum, turn[ends], ends, int(turn.max()) + 1, -1)

    sources = graph.producers[graph.edge_tensors]
    is_inside = is_own[sources] & is_own[graph.consumers] & (turn[sources] == turn[graph.consumers])
    is_entry = is_own & ~is_backward & ~is_update
    is_entry[graph.consumers[is_inside]] = False
    in_flight = num_stages - stage
    entries = np.flatnonzero(is_entry & (microbatch >= in_flight))
    frees = last_backward[turn[entries] - in_flight[entries]]
    return with_controls(graph, frees[frees >= 0], entries[frees >= 0])


def stages_of(step: Step, placement: Placement) -> I64:
    """Returns the stage [M] of each op: the place of its device among those of its replica, by their first ops."""
    stages, is_forward = np.zeros(len(placement), np.int64), step.graph.is_in_phase("forward")
    for replica in range(step.layout.data):
        ops = np.flatnonzero(step.replica == replica)
        own = ops[is_forward[ops]]
        used, first = np.unique(placement[own], return_index=True)
        turn = np.zeros(int(placement.max()) + 1, np.int64)
        turn[used[np.argsort(own[first])]] = np.arange(len(used))
        stages[ops] = turn[placement[ops]]
    return stages
