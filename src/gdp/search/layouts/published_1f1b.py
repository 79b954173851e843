"""The published 1F1B schedule: stage p of P has at most P - p micro-batches in flight.

    stage 0 of 2   F0 F1 B0 F2 B1 F3 B2 B3
    stage 1 of 2      F0 B0 F1 B1 F2 B2 F3 B3

By priorities alone a stage would start a further forward pass whenever it waits. So the order of ops is found on the
graph with a control edge from the backward pass of each micro-batch to the forward pass that takes its place.
D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
M ops of a step, P stages.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gdp.arrays import I64
from gdp.graph import Graph
from gdp.graph.copies import ACCUMULATE
from gdp.parallel.graph_builder import with_controls
from gdp.search.candidate import Figures
from gdp.simulator.orders import ONE_F_ONE_B
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate


def simulate_1f1b(
    problem: Problem, placement: Placement, stage: I64, replica: I64, levels: Sequence[I64]
) -> Simulation:
    """Returns the step of `placement` [M] in the published schedule, in the best of `levels` [M] of ops.

    `stage` and `replica` [M] are those of the ops. Without micro-batches ops start by the levels alone.
    """
    if problem.microbatch.max() < 1:
        return min((simulate(problem, placement, priority=level) for level in levels), key=Figures.of)
    limited = replace(problem, graph=_limited(problem, stage, replica))
    orders = (simulate(limited, placement, priority=problem.priority(ONE_F_ONE_B, level)).order for level in levels)
    return min((simulate(problem, placement, order=order) for order in orders), key=Figures.of)


def _limited(problem: Problem, stage: I64, replica: I64) -> Graph:
    """Returns the graph with the control edges that limit the micro-batches in flight."""
    graph, microbatch = problem.graph, problem.microbatch
    count, num_stages = int(microbatch.max()) + 1, int(stage.max()) + 1
    phases, is_sum = np.array(graph.phases), graph.is_in_role(ACCUMULATE)
    turn = (replica * num_stages + stage) * count + microbatch
    is_own = microbatch >= 0
    is_backward = is_own & (phases == "backward") & ~is_sum
    last_backward = np.full(int(turn.max()) + 1, -1)
    np.maximum.at(last_backward, turn[is_backward], np.flatnonzero(is_backward))

    sources = graph.producers[graph.edge_tensors]
    is_inside = is_own[sources] & is_own[graph.consumers] & (turn[sources] == turn[graph.consumers])
    is_entry = is_own & (phases != "backward") & (phases != "update")
    is_entry[graph.consumers[is_inside]] = False
    in_flight = num_stages - stage
    entries = np.flatnonzero(is_entry & (microbatch >= in_flight))
    frees = last_backward[turn[entries] - in_flight[entries]]
    return with_controls(graph, frees[frees >= 0], entries[frees >= 0])
