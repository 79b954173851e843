"""Pipeline stages by exact dynamic programming over the linearised graph: compute, transfers and memory at once.

For a chain of units and devices in a given order, the stages whose bottleneck is least:

    bottleneck = max over stages of (time of its units there, transfers over its cuts, each direction by itself)

D. Narayanan et al., "PipeDream", SOSP 2019, section 3.1, without replicated stages. Under a bottleneck T the rest of
the chain can follow a cut if stage k + 1 can end at a later cut from which the rest can follow, near enough to take at
most T and fit; the first such cut is as good as any, so a table over stages and cuts is filled in one pass. T is found
by bisection.

Chains, numbers of devices and estimates of memory are tried, and the best placement by simulation kept. U units, D
devices, U + 1 cuts: cut c is before unit c of the chain."""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from gdp.arrays import F64, I64, position_in, running_sums, scattered
from gdp.budget import Clock, has_time
from gdp.compiled import kernel
from gdp.placers.base import best_of, columns_of, device_subsets
from gdp.placers.contiguous import Chain, each_chain
from gdp.placers.settings import STAGES
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units


def dp_stages(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """The best such stages on 1 to D devices along several chains, backward ops alone or with forward ops."""
    chains: list[tuple[Units, Chain]] = []
    subsets = device_subsets(problem, smallest=1)

    def candidates(alive: float) -> Iterator[Placement]:
        for units, order in chains if alive else each_chain(problem):
            if not alive:
                chains.append((units, order))
            for devices in subsets:
                yield units.place_allowed(least_bottleneck(problem, units, order, devices, alive, clock))

    return best_of(problem, candidates(0.0), lambda: chain.from_iterable(map(candidates, STAGES.alive)), clock)


def least_bottleneck(
    problem: Problem, units: Units, chain: Chain, devices: I64, alive: float = 0.0, clock: Clock | None = None
) -> I64:
    """[U] devices: `chain` in stages on `devices`, in that order, with the least bottleneck of all whose memory fits if
    a share `alive` of what their units allocate is held at once; of all, if none does so. Of several such, stages of
    about equal time. Once the clock is up, the bottleneck is the least known."""
    order = chain.order
    columns, column_of = columns_of(problem, devices)
    time_ns = units.time_ns[:, columns][order].astype(np.float64)
    held = (units.resident_bytes + alive * units.tensor_bytes)[order]
    work_ns, held_bytes = _sums(time_ns.T), _sums(held[None])[0]
    cut_ns = _cut_times(problem, units, order, devices)
    if chain.block is not None:
        blocks = chain.block[order]
        cut_ns[:, 1:-1][:, blocks[1:] == blocks[:-1]] = np.inf
    room = problem.memory_limit_bytes[devices].astype(np.float64)
    may_end = np.empty(cut_ns.shape, np.bool_)

    def ends_under(bottleneck: float) -> I64:
        ends = np.empty(len(devices), np.int64)
        _find_ends(work_ns, column_of, held_bytes, cut_ns, room, bottleneck, may_end, ends)
        return ends

    high = float(max(work_ns[:, -1].max(), cut_ns[np.isfinite(cut_ns)].max(initial=0.0)))
    ends = ends_under(high)
    if ends[-1] < 0:
        room = np.full(len(devices), np.inf)
        ends = ends_under(high)
    low = 0.0
    for _ in range(STAGES.num_halvings):
        if not has_time(clock):
            break
        middle = (low + high) / 2
        candidate = ends_under(middle)
        if candidate[-1] < 0:
            low = middle
        else:
            high, ends = middle, candidate
    return scattered(order, devices[np.searchsorted(ends, np.arange(len(order)), side="right")], len(order))


def _sums(values: F64) -> F64:
    return np.ascontiguousarray(np.concatenate((np.zeros((len(values), 1)), np.cumsum(values, axis=1)), axis=1))


def _cut_times(problem: Problem, units: Units, order: I64, devices: I64) -> F64:
    """[stages, U + 1] what the transfers over a cut that ends a stage occupy, in the direction that has more."""
    graph, cluster, num_units = problem.graph, problem.cluster, len(order)
    position = position_in(order, num_units)
    op_position = position[units.index]
    start = op_position[graph.producers]
    last, first = start.copy(), start.copy()
    np.maximum.at(last, graph.edge_tensors, op_position[graph.consumers])
    np.minimum.at(first, graph.edge_tensors, op_position[graph.consumers])
    size = graph.tensor_bytes.astype(np.float64)
    # a tensor crosses the cuts after its producer, up to its last consumer
    onwards = running_sums(start + 1, last + 1, size, num_units + 1)
    backwards = running_sums(first + 1, start + 1, size, num_units + 1)
    found = np.zeros((len(devices), num_units + 1))
    for stage in range(len(devices) - 1):
        here, there = int(devices[stage]), int(devices[stage + 1])
        rates = cluster.bytes_per_second[here, there], cluster.bytes_per_second[there, here]
        found[stage] = np.maximum(onwards / float(rates[0]), backwards / float(rates[1])) * 1e9
    return np.maximum(found, 0.0)


@kernel
def _find_ends(work_ns, column_of, held_bytes, cut_ns, room, bottleneck, may_end, ends):
    """Fills `ends` [D] with the cut that ends each stage under the bottleneck; the last is -1 if there are none.
    `may_end` [D, U + 1] is working memory: whether the rest of the chain can follow if a stage ends at a cut."""
    num_stages, last = len(column_of), len(held_bytes) - 1
    limit = bottleneck * (1 + 1e-12)
    ends[:] = -1
    may_end[:] = False
    may_end[num_stages - 1, last] = True
    for stage in range(num_stages - 1, 0, -1):
        column = column_of[stage]
        end = -1  # the first cut from this one on where the stage may end
        for cut in range(last, -1, -1):
            if may_end[stage, cut]:
                end = cut
            is_cut = cut_ns[stage - 1, cut] <= limit or cut == 0 or cut == last
            work = work_ns[column, end] - work_ns[column, cut]
            if end >= 0 and is_cut and work <= limit and held_bytes[end] - held_bytes[cut] <= room[stage]:
                may_end[stage - 1, cut] = True
    begin = 0
    for stage in range(num_stages):
        column = column_of[stage]
        share = (work_ns[column, last] - work_ns[column, begin]) / (num_stages - stage)
        chosen, distance = -1, np.inf
        for cut in range(begin, last + 1):
            work = work_ns[column, cut] - work_ns[column, begin]
            if work > limit or held_bytes[cut] - held_bytes[begin] > room[stage]:
                break
            if may_end[stage, cut] and abs(work - share) < distance:
                chosen, distance = cut, abs(work - share)
        if chosen < 0:
            return
        ends[stage] = begin = chosen
