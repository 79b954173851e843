"""List scheduling: ops choose devices one after the other, by estimates of when they could start there and what still
fits.

m-TOPO, m-ETF and m-SCT: B. Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020, which
adds memory limits to known schedulers. HEFT: H. Topcuoglu, S. Hariri, M.-Y. Wu, IEEE TPDS 13(3), 2002. Each is tried on
all devices and on fewer, with backward ops free or following their forward ops (as in Baechi), with estimates as
published (no contention, no foresight) and better ones; the best by simulation is kept. N ops, P pairs of ops."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from gdp.arrays import F64, I64, Bool, combined, filled, scattered, zeros
from gdp.budget import Clock, has_time
from gdp.placers.base import NoTimeError, TriedPlacements, best_of, device_subsets, unit_choices
from gdp.placers.contiguous import topological_chain
from gdp.placers.list_kernels import NUM_STATE, Gaps, Queues, earliest_first, in_order
from gdp.placers.schedule import PartialSchedule
from gdp.placers.settings import LISTS
from gdp.simulator.longest_paths import longest_from, ranks_of
from gdp.simulator.orders import B_LEVEL, GPIPE
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units

Slice = Callable[[I64, int], bool]
"""Places so many further ops, from the state in an array; returns True once all are placed."""


def m_topo(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Devices filled in turn along the topological order, to an equal share of their memory plus the largest unit."""
    return best_of(problem, _filled_in_turn(problem), clock=clock)


def _filled_in_turn(problem: Problem) -> Iterator[Placement]:
    for units in unit_choices(problem):
        order = topological_chain(problem, units).order
        held = (units.resident_bytes + units.tensor_bytes)[order]
        sums = np.concatenate(([0], np.cumsum(held, dtype=np.float64)))
        for devices in device_subsets(problem, smallest=min(2, problem.num_devices)):
            limits = np.maximum(problem.memory_limit_bytes[devices], 1).astype(np.float64)
            caps = sums[-1] * limits / limits.sum() + held.max()
            ends = np.empty(len(devices), np.int64)
            start = 0
            for position, cap in enumerate(caps):
                start = max(int(np.searchsorted(sums, sums[start] + cap, side="right")) - 1, start)
                ends[position] = start
            ends[-1] = units.num_units
            chosen = devices[np.searchsorted(ends, np.arange(units.num_units), side="right")]
            yield units.place_allowed(scattered(order, chosen, units.num_units))


def m_etf(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Earliest time first: of all ready ops and devices with room, the pair that can start first."""
    return _earliest_first(problem, np.full(problem.num_ops, -1), clock)


def m_sct(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Small communication times: as m-ETF, but a device waits for the favourite child of the op that it ran last,
    unless there is something urgent to do (an op that could start at once on any device)."""
    _check_time(problem, clock)
    return _earliest_first(problem, favourite_children(problem), clock)


def heft(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Heterogeneous earliest finish time: ops by upward rank with mean transfer times, each where it ends first."""
    _check_time(problem, clock)
    sources, targets, transfer_ns = _transfers(problem)
    ranked_ns = longest_from(problem.mean_op_time_ns, sources, targets, transfer_ns)  # HEFT's upward rank
    _, op_of_rank = ranks_of(problem.priority(GPIPE if GPIPE in problem.orders else B_LEVEL, ranked_ns))

    def begin(schedule: PartialSchedule) -> Slice:
        gaps = zeros(Gaps, D=problem.num_devices, N=problem.num_ops)
        return partial(in_order, problem.simulator.arrays, schedule, op_of_rank, gaps)

    return _best_schedule(problem, begin, clock)


def favourite_children(problem: Problem) -> I64:
    """[N] the child of each op that gains most from running on the op's device right after it, -1 if none. An op is the
    favourite of at most one parent. Up to a few thousand edges they come from the linear relaxation of Hanen and
    Munier, as in Baechi; in larger graphs, where that takes too long, the heaviest path decides."""
    sources, targets, transfer_ns = _transfers(problem)
    real = ~_floating(problem)[sources]
    sources, targets, transfer_ns = sources[real], targets[real], transfer_ns[real]
    apart = _relaxation(problem, sources, targets, transfer_ns) if 0 < len(sources) <= LISTS.max_lp_edges else None
    if apart is None:
        weight = transfer_ns + problem.b_level_ns[targets]
        order = np.lexsort((targets, -transfer_ns, -weight))
    else:
        order = np.lexsort((targets, -transfer_ns, apart))
        order = order[apart[order] < LISTS.favourite]
    child, parent = np.full((2, problem.num_ops), -1)
    for source, target in zip(sources[order].tolist(), targets[order].tolist(), strict=True):
        if child[source] < 0 and parent[target] < 0:
            child[source], parent[target] = target, source
    return np.asarray(child, np.int64)


def _relaxation(problem: Problem, sources: I64, targets: I64, transfer_ns: I64) -> F64 | None:
    """[P] how much each pair is apart, 0 to 1, in a shortest schedule on unlimited devices; None if it was not found.
    Variables: x[P] (1: a transfer is made), start[N], end of the step. Ops keep at most one child and parent."""
    from scipy.optimize import linprog  # half a second
    from scipy.sparse import block_array, coo_array, diags_array, eye_array

    num_pairs, num_ops, time_ns = len(sources), problem.num_ops, problem.mean_op_time_ns
    pairs, ones = np.arange(num_pairs), np.ones(num_pairs)
    scale = max(float(time_ns.max()), float(transfer_ns.max()), 1.0)
    first, second = (coo_array((ones, (pairs, ends)), shape=(num_pairs, num_ops)) for ends in (sources, targets))
    siblings = [np.unique(ends, return_inverse=True, return_counts=True)[1:] for ends in (sources, targets)]
    sums = [coo_array((-ones, (row, pairs)), shape=(len(number), num_pairs)) for row, number in siblings]
    blocks = [
        [diags_array(transfer_ns / scale), first - second, None],  # start[i] + time[i] + transfer * x <= start[j]
        *([of_one, None, None] for of_one in sums),  # of n pairs at least n - 1 are apart
        [None, eye_array(num_ops), coo_array(np.full((num_ops, 1), -1.0))],
    ]
    bounds = [-time_ns[sources] / scale, *(1 - number for _, number in siblings), -time_ns / scale]
    limits = np.tile([0.0, np.inf], (num_pairs + num_ops + 1, 1))
    limits[:num_pairs, 1] = 1
    cost = np.zeros(len(limits))
    cost[-1] = 1
    matrix = block_array(blocks).tocsr()
    found = linprog(cost, A_ub=matrix, b_ub=np.concatenate(bounds), bounds=limits, method="highs-ds")
    return np.asarray(found.x[:num_pairs], np.float64).round(9) if found.status == 0 else None


def _earliest_first(problem: Problem, favourites: I64, clock: Clock | None) -> Placement | None:
    def begin(schedule: PartialSchedule) -> Slice:
        return partial(earliest_first, problem.simulator.arrays, schedule, Queues.of(problem, favourites, schedule))

    return _best_schedule(problem, begin, clock)


def _best_schedule(
    problem: Problem, begin: Callable[[PartialSchedule], Slice], clock: Clock | None
) -> Placement | None:
    _check_time(problem, clock)
    floating = _floating(problem)

    def run(devices: I64, units: Units, refined: bool, memory_share: float) -> Placement | None:
        allowed = np.zeros_like(units.allowed)
        allowed[:, devices] = units.allowed[:, devices]
        nowhere = ~allowed.any(axis=1)
        allowed[nowhere] = units.allowed[nowhere]
        schedule = _empty_schedule(problem, units, floating, allowed, memory_share, refined)
        if not _is_completed(begin(schedule), problem, clock):
            return None
        return np.asarray(schedule.unit_device[units.index], np.int64)

    def made(settings: Sequence[tuple[I64, Units, bool]], shares: Sequence[float]) -> Iterator[Placement]:
        for setting in settings:
            for share in shares:
                placement = run(*setting, share)
                if placement is None:
                    return
                yield placement

    subsets = device_subsets(problem, smallest=min(2, problem.num_devices))
    most = max(LISTS.work // (problem.num_ops * problem.num_devices), 3)
    settings = list(product(subsets, unit_choices(problem), (True, False)))[:most]
    tried = TriedPlacements(problem, clock)
    if not tried.run(made(settings, (1.0,))):
        raise NoTimeError
    if not tried.fits:
        tried.run(made(settings[:4], LISTS.limits))
    return tried.best()


def _check_time(problem: Problem, clock: Clock | None) -> None:
    """Raises NoTimeError unless there is time for one schedule, by what it takes at least."""
    if not has_time(clock, 1e-9 * LISTS.least_ns * problem.num_ops * problem.num_devices):
        raise NoTimeError


def _is_completed(place_some: Slice, problem: Problem, clock: Clock | None) -> bool:
    """Places all ops, a slice at a time; returns False as soon as there is no time for the rest."""
    state, done = np.zeros(NUM_STATE, np.int64), 0
    num_slices = -(-problem.num_ops * problem.num_devices // LISTS.slice)
    size = -(-problem.num_ops // num_slices)
    began = time.perf_counter()
    while not place_some(state, size):
        done += size
        passed_s = time.perf_counter() - began
        if not has_time(clock, passed_s * max(problem.num_ops - done, 0) / done):
            return False
    return True


def _empty_schedule(
    problem: Problem, units: Units, floating: Bool, allowed: Bool, memory_share: float, refined: bool
) -> PartialSchedule:
    arrays = problem.simulator.arrays
    num_tensors, num_devices = problem.graph.num_tensors, problem.num_devices
    uses = np.diff(arrays.consumer_offsets.astype(np.int64))
    owner_uses = combined(np.add, arrays.memory.owner, uses, num_tensors)
    only = allowed.sum(axis=1) == 1
    unit_device = np.where(only, np.argmax(allowed, axis=1), -1)
    used_bytes = combined(np.add, unit_device[only], units.resident_bytes[only], num_devices)
    return PartialSchedule(
        op_time_ns=filled(problem.op_time_ns),
        unit=units.index,
        allowed=np.ascontiguousarray(allowed),
        resident_bytes=units.resident_bytes,
        limit_bytes=(problem.memory_limit_bytes * memory_share).astype(np.int64),
        floating=floating,
        unit_device=unit_device,
        finish_ns=np.zeros(problem.num_ops, np.int64),
        free_ns=np.zeros(num_devices, np.int64),
        channel_free_ns=np.zeros(len(problem.cluster.channels), np.int64),
        copy_ns=np.full((num_tensors, num_devices), -1, np.int64),
        uses=uses,
        owner_uses=owner_uses,
        used_bytes=used_bytes,
        ready_ns=np.zeros(num_devices, np.int64),
        contention=refined,
        foresight=refined,
    )


def _floating(problem: Problem) -> Bool:
    """[N] sources that take no time wherever they may go."""
    is_source = problem.simulator.arrays.num_inputs == 0
    return np.asarray(is_source & (np.where(problem.allowed, problem.op_time_ns, 0).max(axis=1) == 0), np.bool_)


def _transfers(problem: Problem) -> tuple[I64, I64, I64]:
    """Producers, consumers and mean transfer time over pairs of devices [P] of each pair of ops that share tensors."""
    arrays, num_devices = problem.simulator.arrays, problem.num_devices
    counts = np.diff(arrays.consumer_offsets.astype(np.int64))
    tensors = np.repeat(np.arange(problem.graph.num_tensors), counts)
    keys = arrays.memory.producers[tensors].astype(np.int64) * problem.num_ops + arrays.consumers
    pairs, inverse = np.unique(keys, return_inverse=True)
    cost_ns = np.zeros(len(pairs))
    if num_devices > 1:
        apart = ~np.eye(num_devices, dtype=np.bool_)
        share = np.bincount(arrays.route_rate[apart], minlength=arrays.occupancy_ns.shape[1]) / apart.sum()
        np.add.at(cost_ns, inverse, (arrays.occupancy_ns @ share)[tensors])
        cost_ns += arrays.latency_ns[apart].mean()
    return pairs // problem.num_ops, pairs % problem.num_ops, cost_ns.astype(np.int64)
