"""The order of the program, for plans that lose nothing by it.

The machine model knows no caches, and a device that waits for no other is as fast in any order. Real ones are not: what
an op has just made is still in the cache for the next op of the program. By the b-level, gradients of weights that an
unrolled net shares come late, when what they are made of has left the cache.
"""

import numpy as np

from gdp.simulator.simulate import Simulation, simulate


def in_program_order(simulation: Simulation) -> Simulation:
    """Returns the step with ready ops started in the order of the graph, if it is as fast, or lacks less memory.

    Steps with micro-batches or replicas stay as they are: `best_dispatch` has tried their program's order.
    """
    problem = simulation.problem
    if problem.microbatch.max() >= 1 or problem.graph.is_collective.any():
        return simulation
    other = simulate(problem, simulation.placement, priority=np.arange(problem.num_ops)[::-1])
    return min(other, simulation, key=lambda each: (int(each.missing_bytes.sum()), each.step_time_ns))
