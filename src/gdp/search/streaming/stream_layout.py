"""Layouts with streamed weights: which device computes and keeps what, and what the host sends when.

The step is cut into windows, which devices compute in turns; `Turns` says how. A host holds the weights that are not
kept where they are used, and its order says when it sends them: those of a window when the window `lag` before it
begins. A gate is a small op at the end of a window that runs on the host, so that the host knows.

    gpu0  |  window 0  | g0 |                |  window 2  | g2 |
    gpu1                    |  window 1  | g1 |                 |  window 3  | ...
    host  p0 p1          g0 p2            g1 p3            g2 p4     p: sends the weights of a window

N ops, D devices, W windows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from gdp.arrays import F64, I64, Bool, combined, connected, mask, position_in, running_sums
from gdp.search.settings import StreamingSettings
from gdp.simulator.constraints import intersect_groups
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate
from gdp.units.units import forward_units


def roomy(problem: Problem, most: float = 1.0) -> Bool:
    """Returns [N, D] the allowed devices whose memory holds an op's inputs and results at once. Inputs and results that
    are no weights take at most a share `most` of the memory, to leave room for weights. A parameter goes where its
    first consumer may go, and a group where all of it may; what has no room anywhere may go wherever it is allowed."""
    graph = problem.graph
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    size, is_weight = graph.tensor_bytes[graph.edge_tensors], graph.is_resident[graph.edge_tensors]
    passing = problem.simulator.arrays.memory.alloc_bytes.copy()
    np.add.at(passing, targets, np.where(is_weight, 0, size))
    weights = graph.resident_bytes.copy()
    np.add.at(weights, targets, np.where(is_weight, size, 0))
    limits = problem.memory_limit_bytes
    has_room = ((passing + weights)[:, None] <= limits) & (passing[:, None] <= most * limits)
    may = problem.allowed & has_room
    is_source = problem.simulator.arrays.num_inputs == 0
    first = combined(np.minimum, sources, targets, graph.num_ops, graph.num_ops)
    held = np.flatnonzero(is_source & (first < graph.num_ops) & (graph.resident_bytes > 0))
    may[held] &= may[first[held]]
    intersect_groups(graph, may)
    return np.where(may.any(axis=1, keepdims=True), may, problem.allowed)


def fallbacks(problem: Problem, host: int, may: Bool) -> Placement:
    """Returns [N] where an op goes that has no room where it is wanted, of the devices that may run anything. Such ops
    that follow each other go to one device, that with the least sum of op times and of transfers among them; where an
    op has no room there, its fastest device has it. What is not allowed everywhere goes to `host`, if it may."""
    graph, rates = problem.graph, problem.cluster.bytes_per_second
    is_anywhere, every = problem.allowed.all(axis=1), np.arange(graph.num_ops)
    fastest = np.argmin(np.where(may, problem.op_time_ns, np.iinfo(np.int64).max), axis=1)
    fastest = np.where(is_anywhere, fastest, np.argmax(problem.allowed, axis=1))
    used = np.flatnonzero(may.any(axis=0))
    is_displaced = np.asarray(is_anywhere & ~may[:, used].all(axis=1), np.bool_)
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    is_inner = is_displaced[sources] & is_displaced[targets]
    sources, targets = sources[is_inner], targets[is_inner]
    size = graph.tensor_bytes[graph.edge_tensors][is_inner].astype(np.float64)
    chain = connected(sources, targets, graph.num_ops)
    choices = np.where(may & is_displaced[:, None], np.arange(problem.num_devices), fastest[:, None])  # [N, D]
    spent_ns = np.empty((len(used), int(chain.max()) + 1))
    for number, placement in enumerate(choices.T[used]):
        here, there = placement[sources], placement[targets]
        moved_ns = np.where(here != there, size * 1e9 / np.maximum(rates[here, there], 1), 0.0)
        spent_ns[number] = np.bincount(chain, problem.op_time_ns[every, placement])
        spent_ns[number] += np.bincount(chain[sources], moved_ns, spent_ns.shape[1])
    best = choices[every, used[np.argmin(spent_ns, axis=0)[chain]]]
    best = np.where(~is_anywhere & problem.allowed[:, host], host, best)
    _, first = np.unique(graph.group_index, return_index=True)
    return np.asarray(best[first[graph.group_index]], np.int64)  # a group stays together


def working_bytes(problem: Problem, position: I64, may: Bool) -> I64:
    """Returns [D] the most that results take at once on a device that runs all that it may, by `position` [N]."""
    graph = problem.graph
    last = position[graph.producers]
    np.maximum.at(last, graph.edge_tensors, position[graph.consumers])
    is_view = graph.view_of >= 0
    np.maximum.at(last, graph.view_of[is_view], last[is_view])
    last[graph.is_kept] = graph.num_ops - 1
    size = np.where(is_view | graph.is_resident, 0, graph.tensor_bytes)
    most = np.zeros(problem.num_devices, np.int64)
    for device in range(problem.num_devices):
        is_there = may[graph.producers, device]
        np.logical_or.at(is_there, graph.edge_tensors, may[graph.consumers, device])
        begins, ends = position[graph.producers[is_there]], last[is_there] + 1
        live = running_sums(begins, ends, size[is_there], graph.num_ops)[position]
        most[device] = live[may[:, device]].max(initial=0)
    return most


_NEVER = np.iinfo(np.int64).max
_FIRST, _RELEASE, _COMPUTE, _GATE = -(2**40), 0, 1, 3  # places in the host's order within a window
_PLACES = 4


@dataclass(frozen=True, slots=True)
class Turns:
    """Who computes when: `rounds` times each of `devices` in turn, each its share of the work."""

    devices: tuple[int, ...]
    parts: tuple[float, ...]  # of the work, by device; they sum to 1
    rounds: int
    is_gated: bool = True  # false: all is sent from the start, as fast as the links allow
    keeps_first: bool = False  # the first window of each device needs no transfer
    last: bool = False  # the weights that are used last are streamed, instead of an even share


@dataclass(frozen=True, eq=False)
class StreamLayout:
    """The ops in the order of a step on one device, and what may be where."""

    problem: Problem
    settings: StreamingSettings
    host: int
    fallback: Placement  # [N] where an op goes that may not run on the device whose turn it is
    may: Bool  # [N, D] devices that an op may run on in its turn: allowed, large enough, and the op is not fixed
    order: I64  # [N] all ops, one after the other
    position: I64  # [N] in `order`
    homes: I64  # [N] the position that decides in which window an op is
    is_source: Bool  # [N]
    streamable: I64  # [P] sources that hold weights, in the order of their first use
    first_use: I64  # [P] positions
    gate_cost_ns: F64  # [N] of running an op on the host, by position; infinite if it must not
    passed_bytes: I64  # [N] of streamable weights first used up to each position

    @classmethod
    def of(
        cls, alone: Simulation, host: int, may: Bool, fixed: Bool, settings: StreamingSettings
    ) -> "StreamLayout | None":
        """Derives the layout from a step with all on one device where it may be; None if nothing may be streamed. `may`
        [N, D] is that of `roomy`; the ops `fixed` [N] stay on their fallback, the host if it may run them."""
        problem, graph = alone.problem, alone.problem.graph
        fallback = fallbacks(problem, host, may)
        fallback[fixed & problem.allowed[:, host]] = host
        order, position = _least_working(problem, np.argsort(alone.op_start_ns, kind="stable"), may)
        sources, targets = graph.producers[graph.edge_tensors], graph.consumers
        is_source = problem.simulator.arrays.num_inputs == 0
        first = combined(np.minimum, sources, position[targets], graph.num_ops, _NEVER)
        may_move = may[:, host] & (graph.groups < 0) & (may.sum(axis=1) > 1) & ~fixed
        streamable = np.flatnonzero(is_source & may_move & (graph.resident_bytes > 0) & (first < _NEVER))
        streamable = streamable[np.argsort(first[streamable], kind="stable")]
        if not len(streamable):
            return None
        unit = forward_units(problem)  # backward ops go where the forward ones are, and their weights
        homes = combined(np.minimum, unit, np.where(is_source, first, position), graph.num_ops, _NEVER)
        cost = _gate_costs(problem, host, may_move & ~is_source)[order]
        held = combined(np.add, first[streamable], graph.resident_bytes[streamable], graph.num_ops)
        passed = np.cumsum(held)
        figures = order, position, np.minimum(homes[unit], graph.num_ops - 1), is_source, streamable, first[streamable]
        return cls(problem, settings, host, fallback, may & ~fixed[:, None], *figures, cost, passed)

    def arranged(self, turns: Turns, streamed: F64) -> tuple[Placement, list[I64]]:
        """Returns placement and order with the shares `streamed` [D] of each device's weights on the host."""
        ends, is_gate = self._windows(turns)
        cycle = np.array(turns.devices)
        placement = self.placed(cycle[np.searchsorted(ends, self.homes) % len(cycle)])
        first_window = np.searchsorted(ends, self.first_use)
        chosen = self._chosen(turns, streamed, placement, first_window)
        sent = self.streamable[chosen]
        placement[sent] = self.host
        gates = self.order[ends[is_gate]]
        placement[gates] = self.host
        return placement, self._orders(turns, placement, ends, sent, first_window[chosen])

    @cached_property
    def time_ns(self) -> I64:
        """[N, D] the time of each op in the turn of a device: there, or on its fallback."""
        fallback_ns = self.problem.op_time_ns[np.arange(len(self.fallback)), self.fallback]
        return np.maximum(np.where(self.may, self.problem.op_time_ns, fallback_ns[:, None]), 0)

    @cached_property
    def room_bytes(self) -> I64:
        """[D] the room for weights beside all else."""
        problem, is_fixed = self.problem, ~self.may.any(axis=1)
        others = np.bincount(
            self.fallback[is_fixed], problem.graph.resident_bytes[is_fixed], minlength=problem.num_devices
        )
        working = working_bytes(problem, self.position, self.may)
        return problem.memory_limit_bytes - others.astype(np.int64) - working

    def placed(self, wanted: Placement) -> Placement:
        """Returns `wanted` [N], with the fallback of each op that may not be there."""
        return np.where(self.may[np.arange(len(wanted)), wanted], wanted, self.fallback)

    def fit(
        self, turns: Turns, known: dict[bytes, I64], guess: F64 | None = None
    ) -> "Iterator[tuple[Simulation, F64]]":
        """Yields steps, with their shares streamed [D], towards the least shares that fit; begins at `guess` [D]. Each
        share is corrected by what its device lacks or has left. Steps that are `known`, by digests of placement and
        order, with the memory [D] that they take, are not simulated again; one at the beginning ends the search."""
        limits = self.problem.memory_limit_bytes
        held = np.maximum(self._held(turns), 1)
        shares = np.ones(len(limits)) if guess is None else guess.copy()
        low, high, close = np.zeros(len(limits)), np.ones(len(limits)), self.settings.close_fit
        mains = [device for device in turns.devices if device != self.host]
        for number in range(self.settings.num_fits):
            placement, order = self.arranged(turns, shares)
            key = _digest(placement, *order)
            moves = key not in known  # else the last correction was too small
            if moves:
                found = simulate(self.problem, placement, order=order)
                known[key] = found.peak_memory_bytes
                yield found, shares
            elif number == 0:
                return
            left = limits - known[key]
            lacks = left < 0
            high = np.where(lacks, high, np.minimum(high, shares))
            low = np.where(lacks, np.maximum(low, shares), low)
            if all(lacks[device] and shares[device] >= 1 for device in mains):
                return
            is_close = ~lacks & ((left < close * limits) | (shares <= 0))
            if all(is_close[device] for device in mains):
                return
            aimed = shares - (left - close / 2 * limits) / held
            between = (aimed > low) & (aimed < high)
            aimed = np.where(between & moves, aimed, np.where(aimed <= low, low, (low + high) / 2))
            aimed = np.where((aimed <= low) & (low > 0), (low + high) / 2, aimed)
            aimed = np.clip(np.where(is_close, shares, aimed), 0.0, 1.0)
            if np.array_equal(aimed[mains], shares[mains]):
                return
            shares = aimed

    def _held(self, turns: Turns) -> I64:
        """[D] bytes of the streamable weights by the device that computes with them."""
        ends, _ = self._windows(turns)
        users = np.array(turns.devices)[np.searchsorted(ends, self.first_use) % len(turns.devices)]
        size = self.problem.graph.resident_bytes[self.streamable]
        return np.bincount(users, size, self.problem.num_devices).astype(np.int64)

    def _windows(self, turns: Turns) -> tuple[I64, Bool]:
        """Returns the positions [W - 1] at which windows end, and whether the op there is a gate. A window ends at the
        op that costs least as a gate, of those within half a window."""
        lengths = np.tile(turns.parts, turns.rounds) / turns.rounds * float(self.passed_bytes[-1])
        borders = np.cumsum(lengths)
        ends: list[int] = []
        is_gate: list[bool] = []
        for number, border in enumerate(borders[:-1].tolist()):
            reach = min(lengths[number], lengths[number + 1]) / 2
            start, end = np.searchsorted(self.passed_bytes, [border - reach, border + reach])
            start = max(int(start), ends[-1] + 1 if ends else 0)
            cost = self.gate_cost_ns[start:end]
            if len(cost) and np.isfinite(cost).any():
                ends.append(start + int(np.argmin(cost)))
                is_gate.append(turns.is_gated)
            else:  # no gate: what it would release is sent earlier
                ends.append(max(int(np.searchsorted(self.passed_bytes, border)), ends[-1] if ends else 0))
                is_gate.append(False)
        return np.array(ends, np.int64), np.array(is_gate, np.bool_)

    def _chosen(self, turns: Turns, streamed: F64, placement: Placement, window: I64) -> Bool:
        """Selects [P] weights to stream, spread evenly by bytes: the rest is carried over (error diffusion)."""
        size = self.problem.graph.resident_bytes[self.streamable]
        device = placement[self.streamable]
        if turns.last:
            behind = np.cumsum(size[::-1])[::-1] - size
            return np.asarray((behind < streamed[turns.devices[0]] * size.sum()) & (device != self.host), np.bool_)
        chosen = np.zeros(len(size), np.bool_)
        due = np.zeros(len(streamed))
        is_first = window < len(turns.devices) if turns.keeps_first else np.zeros(len(size), np.bool_)
        for number, (count, user) in enumerate(zip(size.tolist(), device.tolist(), strict=True)):
            if user == self.host or (is_first[number] and streamed[user] < 1):
                continue
            due[user] += streamed[user] * count
            if due[user] > count / 2:
                chosen[number] = True
                due[user] -= count
        return chosen

    def _orders(self, turns: Turns, placement: Placement, ends: I64, sent: I64, sent_for: I64) -> list[I64]:
        """Returns the order of each device: that of positions, and on the host the releases and gates among it."""
        window = np.searchsorted(ends, self.position)
        place = window * _PLACES + _COMPUTE
        is_end = mask(self.order[ends], len(place))
        place[is_end] += _GATE - _COMPUTE
        place[self.is_source] = _FIRST
        place[sent] = (sent_for - len(turns.devices)) * _PLACES + _RELEASE
        rank = self.position.copy()
        rank[sent] = np.arange(len(sent))
        on_host = np.flatnonzero(placement == self.host)
        orders = [self.order[placement[self.order] == device] for device in range(self.problem.num_devices)]
        orders[self.host] = on_host[np.lexsort((rank[on_host], place[on_host]))]
        return orders


def _digest(*arrays: I64) -> bytes:
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.tobytes() + b"|")
    return digest.digest()


def _least_working(problem: Problem, started: I64, may: Bool) -> tuple[I64, I64]:
    """Returns `started` [N], or the graph's own order where that needs less memory, and the position [N] of each op.
    Priorities start branches side by side, whose results then are all in memory; programs run one after the other."""
    own = np.arange(len(started))
    position = position_in(started, len(started))
    if working_bytes(problem, own, may).sum() < working_bytes(problem, position, may).sum():
        return own, own
    return started, position


def _gate_costs(problem: Problem, host: int, may: Bool) -> F64:
    """Estimates [N] the wait of the computing devices for an op on the host: transfers there and back, and the op."""
    graph = problem.graph
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    moved = combined(np.add, targets, graph.tensor_bytes[graph.edge_tensors].astype(np.float64), graph.num_ops)
    np.add.at(moved, graph.producers, graph.tensor_bytes.astype(np.float64))
    reads_state = mask(targets[graph.resident_bytes[sources] > 0], graph.num_ops)
    others = [device for device in range(problem.num_devices) if device != host]
    rate = max(problem.cluster.route(device, host).bytes_per_second for device in others)
    cost = moved * 1e9 / rate + problem.op_time_ns[:, host]
    return np.where(may & ~reads_state & (graph.resident_bytes == 0), cost, np.inf)
