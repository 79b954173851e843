"""Memory repair: the groups that free most memory per added time move to devices with room. Units join into groups
within each device (`units/units.py`), so that connected ops move together; when groups are too coarse, smaller ones are
tried. N ops, T tensors, G groups, D devices."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gdp.arrays import F64, I64, Bool
from gdp.budget import Clock, has_time
from gdp.placers.settings import REPAIR
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Allocations, Simulation, evaluate, simulate
from gdp.units.units import Pairs, Units, group_units


def excess_bytes(problem: Problem, peak_memory_bytes: I64) -> I64:
    """Returns [...] the bytes over the limits, summed over devices, of peaks [..., D]."""
    return np.asarray(np.maximum(peak_memory_bytes - problem.memory_limit_bytes, 0).sum(axis=-1), np.int64)


def fit_memory(problem: Problem, placement: Placement, clock: Clock | None = None) -> Placement:
    """Changes `placement` [N] until it fits in memory, within a bounded number of simulations; returns the nearest.
    Once the clock is up, the nearest so far. Groups and allowed devices are obeyed."""
    best = np.asarray(placement, np.int64)
    step_time_ns, peaks = evaluate(problem, best)
    best_key = int(excess_bytes(problem, peaks)), step_time_ns
    is_too_wide = problem.num_ops * problem.num_devices > REPAIR.most_held
    if best_key[0] == 0 or problem.num_devices == 1 or is_too_wide or not has_time(clock):
        return best
    units = Units.of(problem)
    pairs = units.pairs()
    for num_groups in REPAIR.levels:
        if not has_time(clock):
            return best
        groups = group_units(units, pairs, [best], num_groups, pairs.transfer_ns.astype(np.float64), slack=3.0)
        for candidate in _moves(groups, units, pairs, best):
            step_time_ns, peaks = evaluate(problem, candidate)
            key = int(excess_bytes(problem, peaks)), step_time_ns
            if key < best_key:
                best, best_key = candidate, key
            if best_key[0] == 0 or not has_time(clock):
                return best
        if groups.num_units < num_groups:
            break
    return best


@dataclass(eq=False)
class _Groups:
    """Groups and their devices, for a series of moves."""

    time_ns: I64  # [G, D]
    allowed: Bool  # [G, D] and not left before
    device: I64  # [G]
    link_ns: F64  # [G, D] what is transferred between a group and others, by their device
    offsets: I64  # [G + 1] neighbours of group g are neighbours[offsets[g]:offsets[g + 1]]
    neighbours: I64
    weights: F64  # like `neighbours`, the transfers

    def move(self, group: int, target: int) -> None:
        here = slice(self.offsets[group], self.offsets[group + 1])
        neighbours, weights = self.neighbours[here], self.weights[here]  # each neighbour is listed once or more
        np.add.at(self.link_ns[:, self.device[group]], neighbours, -weights)
        np.add.at(self.link_ns[:, target], neighbours, weights)
        self.allowed[group, self.device[group]] = False
        self.device[group] = target


def _moves(groups: Units, units: Units, pairs: Pairs, start: Placement) -> Iterator[Placement]:
    """Yields placements that free memory: at each step the device that lacks most memory gives groups away."""
    problem, state = groups.problem, _state(groups, units, pairs, start)
    for _ in range(REPAIR.rounds * problem.num_devices):
        simulation = simulate(problem, groups.place(state.device))
        missing = simulation.missing_bytes
        device = int(np.argmax(missing))
        if missing[device] == 0:
            return
        held = groups.sum(held_bytes(simulation, device))
        room = problem.memory_limit_bytes - simulation.peak_memory_bytes
        if not _give_away(state, device, int(missing[device]), held, room):
            return
        yield groups.place(state.device)


def _give_away(groups: _Groups, device: int, missing: int, held: I64, room: I64) -> bool:
    """Moves groups off `device` until `missing` bytes are free; False if none could. `held` [G, D]: `held_bytes`."""
    here = np.flatnonzero((groups.device == device) & held.any(axis=1))
    room = np.maximum(room, 0)
    has_moved = False
    while missing > 0 and len(here):
        freed = held[here].sum(axis=1)
        taken = freed[:, None] - held[here]  # copies need no room where their originals are
        added_ns = np.maximum(groups.link_ns[here, device][:, None] - groups.link_ns[here], 0.0)
        cost_ns = added_ns + groups.time_ns[here] + 1.0
        ratio = np.minimum(freed, missing)[:, None] / cost_ns
        ratio[~groups.allowed[here] | (taken > room)] = -1.0
        ratio[:, device] = -1.0
        pick, target = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        if ratio[pick, target] <= 0:
            break
        groups.move(int(here[pick]), int(target))
        missing -= int(freed[pick])
        room[target] -= taken[pick, target]
        here = np.delete(here, pick)
        has_moved = True
    return has_moved


def _state(groups: Units, units: Units, pairs: Pairs, placement: Placement) -> _Groups:
    num_groups, num_devices = groups.num_units, groups.problem.num_devices
    group_of_unit, device = groups.index[units.first_op], placement[groups.first_op]
    first, second = group_of_unit[pairs.first], group_of_unit[pairs.second]
    apart = first != second
    sources = np.concatenate((first[apart], second[apart]))
    targets = np.concatenate((second[apart], first[apart]))
    weights = np.tile(pairs.transfer_ns[apart].astype(np.float64), 2)
    order = np.argsort(sources, kind="stable")
    link_ns = np.zeros((num_groups, num_devices))
    np.add.at(link_ns, (sources, device[targets]), weights)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(sources, minlength=num_groups))))
    return _Groups(groups.time_ns, groups.allowed.copy(), device, link_ns, offsets, targets[order], weights[order])


def held_bytes(simulation: Simulation, device: int) -> I64:
    """Returns [N, D] the bytes that each op holds of `device` when its use is highest; they sum to the peak. Its
    resident bytes, its tensors, and copies that it is the last to consume: these under the device of the original if
    that still has it too, all else under `device` itself."""
    problem, placement, every = simulation.problem, simulation.placement, Allocations.of(simulation)
    graph, here = problem.graph, np.flatnonzero(every.devices == device)
    tensors, size = every.tensors[here], every.sizes_bytes[here]
    start_ns, end_ns = every.from_ns[here], every.until_ns[here]
    last = np.full(graph.num_tensors, -1, np.int64)  # consumer on this device
    edges = np.flatnonzero(placement[graph.consumers] == device)
    edges = edges[np.argsort(simulation.op_finish_ns[graph.consumers[edges]], kind="stable")]
    last[graph.edge_tensors[edges]] = graph.consumers[edges]
    holder = np.where(every.is_copy[here], last[tensors], graph.producers[tensors])
    moments = np.concatenate((end_ns, start_ns))  # frees first
    change = np.concatenate((-size, size))
    change[np.tile(start_ns == end_ns, 2)] = 0
    order = np.argsort(moments, kind="stable")
    held = np.zeros((problem.num_ops, problem.num_devices), np.int64)
    held[:, device] = np.where(placement == device, graph.resident_bytes, 0)
    if len(order):
        peak_ns = moments[order][np.argmax(np.cumsum(change[order]))]
        alive = (start_ns <= peak_ns) & (peak_ns < end_ns)
        is_kept_there = graph.is_resident.copy()
        is_kept_there[every.tensors[~every.is_copy & (every.until_ns > peak_ns)]] = True
        place = np.where(is_kept_there[graph.base[tensors]], placement[graph.producers[tensors]], device)
        np.add.at(held, (holder[alive], place[alive]), size[alive])
    return held
