"""Dispatch: in which order devices start the ops of a step with replicas.

The b-level of the machine model knows nothing of rings: gradients, which only an update waits for, would be made last,
and the rings after them would run when nothing is left to compute. So sums over replicas go first, and ops run by the
longest path with transfers, or as the program has them, which is how PyTorch overlaps them. The best of all is taken.
"""

from dataclasses import replace

import numpy as np

from gdp.arrays import I64, Bool
from gdp.graph.microbatches import ACCUMULATE, COLLECTIVES, base_name
from gdp.parallel.step import Step
from gdp.search.candidate import Candidate, Figures
from gdp.simulator.longest_paths import communication_levels
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate

_LARGE = 60_000  # ops, of which few orders are tried


def best_dispatch(problem: Problem, step: Step, placement: Placement) -> Simulation:
    """Returns the step in the best of all orders of micro-batches and levels of ops: one that fits, then the fastest.

    `problem` is that of placing the graph of `step` [M ops], and `placement` [M] is of it.
    """
    levels = [problem.b_level_ns]
    if step.layout.data > 1:
        levels += [_sums_first(step, communication_levels(problem, placement)), _program_levels(step)]
    orders = problem.orders
    if problem.num_ops > _LARGE:
        orders, levels = orders[:2], levels[-2:]
    found = (
        simulate(problem, placement, priority=problem.priority(order, level)) for order in orders for level in levels
    )
    return min(found, key=lambda simulation: (int(simulation.missing_bytes.sum()), simulation.step_time_ns))


def as_candidate(simulation: Simulation) -> Candidate:
    """Returns the candidate that `simulation` is, with a priority that runs it again."""
    figures = Figures(int(simulation.missing_bytes.sum()), simulation.step_time_ns)
    return replace(Candidate.start(simulation), figures=figures, simulation=simulation)


def _sums_first(step: Step, level_ns: I64) -> I64:
    """Returns the levels [M] with ops that move data between replicas before all others."""
    return np.where(_is_collective(step), level_ns + level_ns.max() + 1, level_ns)


def _program_levels(step: Step) -> I64:
    """Returns levels [M] by which ops start in the order of the program, and sums over replicas first.

    Sums of gradients over micro-batches follow what they add.
    """
    graph = step.graph
    made_last = int(step.origin.max()) + 1
    is_sum = np.array([ACCUMULATE in name and base_name(name).endswith(ACCUMULATE) for name in graph.op_names])
    position = np.where(is_sum, -1, step.origin).tolist()
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    into = np.flatnonzero(is_sum[targets])
    into = into[np.argsort(targets[into], kind="stable")]
    for source, target in zip(sources[into].tolist(), targets[into].tolist(), strict=True):
        position[target] = max(position[target], position[source])
    return np.where(_is_collective(step), made_last + 1, made_last - np.array(position, np.int64))


def _is_collective(step: Step) -> Bool:
    return np.array([kind.startswith(COLLECTIVES) for kind in step.graph.kinds], np.bool_)
