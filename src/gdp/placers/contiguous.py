"""Contiguous stages of about equal time, one a device, along an order of the units.

Cutting a chain for a bottleneck by binary search, each device taking as much as fits in turn: A. Pinar, C. Aykanat, "Fast
optimal load balancing algorithms for 1D partitioning", Journal of Parallel and Distributed Computing 64 (2004), for devices
of unequal speed in a given order.
"""

import numpy as np
import numpy.typing as npt

from gdp.graph import I64
from gdp.levels import longest_paths
from gdp.placers.base import UnitArrays, any_fits, best_of, device_subsets, inherit, mean_op_time_ns
from gdp.problem import Placement, Problem

_MEMORY_SHARES = (0.5, 0.9)  # weight of memory in the balance, tried where balanced times alone do not fit


def contiguous(problem: Problem, seed: int = 0) -> Placement | None:
    """The best of stages over 1 to D devices along three orders of the ops (topological, by module, folded)."""
    units = UnitArrays.of(problem)
    orders = (np.arange(units.num_units), module_order(problem, units), folded_order(problem, units))
    subsets = device_subsets(problem, smallest=1)
    candidates = [units.place(stages(problem, units, order, devices)) for order in orders for devices in subsets]
    if not any_fits(problem, candidates):
        candidates += [
            units.place(stages(problem, units, order, devices, share))
            for order in orders
            for devices in subsets
            for share in _MEMORY_SHARES
        ]
    return best_of(problem, candidates)


def stages(problem: Problem, units: UnitArrays, order: I64, devices: I64, memory_share: float = 0.0) -> I64:
    """[U] devices: `order` [U] cut into one stage for each of `devices`, so that the largest load of a stage is least.

    A unit's load on a device is its share of all time there, or with `memory_share` a mix with its share of the device's memory.
    """
    total_ns = max(int(units.mean_time_ns().sum()), 1)
    load = units.time_ns[order][:, devices] / total_ns
    if memory_share > 0:
        held = (units.resident_bytes + units.tensor_bytes)[order].astype(np.float64)
        limits = np.maximum(problem.memory_limit_bytes[devices], 1).astype(np.float64)
        held_share = held[:, None] / max(held.sum(), 1.0) * (limits.mean() / limits)
        load = (1 - memory_share) * load + memory_share * held_share
    sums = np.concatenate((np.zeros((1, len(devices))), np.cumsum(load, axis=0)))
    low, high = 0.0, float(sums[-1].max())
    ends = _cut(sums, high)
    for _ in range(50):  # halvings: the bottleneck to 15 digits
        middle = (low + high) / 2
        cut = _cut(sums, middle)
        if cut[-1] == len(order):
            high, ends = middle, cut
        else:
            low = middle
    chosen = np.empty(len(order), np.int64)
    chosen[order] = devices[np.searchsorted(ends, np.arange(len(order)), side="right")]
    return chosen


def _cut(sums: npt.NDArray[np.float64], bottleneck: float) -> I64:
    """[stages] where each stage ends if it takes all that fits; the last entry is the number of units if all are taken."""
    ends = np.empty(sums.shape[1], np.int64)
    start = 0
    for stage, column in enumerate(sums.T):
        start = max(start, int(np.searchsorted(column, column[start] + bottleneck * (1 + 1e-12), side="right")) - 1)
        ends[stage] = start
    return ends


def module_order(problem: Problem, units: UnitArrays) -> I64:
    """[U] units by where the forward pass first enters their module, then folded: a layer's backward ops join its forward
    ops. The folded order if the graph has no module paths."""
    graph = problem.graph
    if not any(graph.modules):
        return folded_order(problem, units)
    has_inputs = np.diff(problem.arrays.memory.input_offsets.astype(np.int64)) > 0
    entered: dict[str, int] = {}
    for is_first_choice in (True, False):
        for op, (module, phase) in enumerate(zip(graph.modules, graph.phases, strict=True)):
            if module and (not is_first_choice or (phase in ("forward", "") and has_inputs[op])):
                entered.setdefault(module, op)
    position = inherit(problem, [entered.get(module, -1) for module in graph.modules])[units.first_op]
    return np.lexsort((_fold_ns(problem)[units.first_op], position))


def folded_order(problem: Problem, units: UnitArrays) -> I64:
    """[U] units by their distance in time from the nearer end of the step, which pairs forward ops with their backward ops."""
    return np.argsort(_fold_ns(problem)[units.first_op], kind="stable")


def _fold_ns(problem: Problem) -> I64:
    head_ns = longest_paths(problem.graph, mean_op_time_ns(problem), from_sources=True)
    distance = np.minimum(head_ns, problem.b_level_ns)
    # a source has no place of its own: it joins its earliest consumer
    distance[np.diff(problem.arrays.memory.input_offsets.astype(np.int64)) == 0] = -1
    return inherit(problem, distance)
