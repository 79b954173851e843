"""Stages of each replica on devices of its own: what users run, where a step has several replicas of a model.

    2 replicas, 4 devices    gpu0, gpu1 | replica 0 in two stages
                             gpu2, gpu3 | replica 1 in two stages

They are starts for a search over steps with replicas. U units.
"""

from collections.abc import Iterator

import numpy as np

from gdp.arrays import F64, I64
from gdp.graph.microbatches import replica_of
from gdp.placers.contiguous import Chain, folded_chain, module_chain
from gdp.simulator.problem import Placement, Problem
from gdp.units.forward_units import forward_units
from gdp.units.units import Units


def replicated_stages(problem: Problem) -> Iterator[Placement]:
    """Yields placements [N] with each replica in contiguous stages on as many devices; none without replicas."""
    replica = replica_of(problem.graph)
    num_replicas = int(replica.max()) + 1
    size = problem.num_devices // num_replicas  # devices of a replica
    if num_replicas < 2 or size < 1:
        return
    units = Units.of(problem, forward_units(problem))
    replica_of_unit, work_ns = replica[units.first_op], units.work_ns.astype(np.float64)
    for chain in _chains(problem, units, size):
        yield units.place_allowed(_in_stages(chain.order, replica_of_unit, work_ns, size))


def _chains(problem: Problem, units: Units, size: int) -> Iterator[Chain]:
    """Yields the chains of units that stages are cut along; a replica on one device needs no choice."""
    yield folded_chain(problem, units)
    if size > 1:
        yield from (module_chain(problem, units, whole_layers=whole) for whole in (False, True))


def _in_stages(order: I64, replica: I64, work_ns: F64, size: int) -> I64:
    """Returns devices [U] by `replica` [U], with about equal work [U] in each stage along `order` [U]."""
    chosen = np.empty(len(order), np.int64)
    for number in range(int(replica.max()) + 1):
        own = order[replica[order] == number]
        middle = np.cumsum(work_ns[own]) - work_ns[own] / 2
        stage = (middle / max(float(work_ns[own].sum()), 1.0) * size).astype(np.int64)
        chosen[own] = number * size + np.minimum(stage, size - 1)
    return chosen
