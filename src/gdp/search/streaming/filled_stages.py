"""Stages that fill memories: for steps that are one chain of ops, where a device that is not full only costs time.

    gpu1 full | gpu0 full | cpu: what is left | gpu2 full

Such a step takes the sum of its stages' times: nothing runs at once, so balanced stages (`placers/contiguous.py`) gain
nothing. Each device holds as much as fits, all but the slowest one of a sequence, which takes what is left. Sums of
times along the chain rank all sequences of all sets of devices; only the best of them are simulated, and their cuts
moved until memories are full.

N ops, D devices, C cuts: a cut follows a weight, where least is transferred."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, permutations, product

import numpy as np

from gdp.arrays import F64, I64, running_sums
from gdp.search.settings import StreamingSettings
from gdp.search.streaming.stream_layout import StreamLayout
from gdp.simulator.problem import Placement
from gdp.simulator.simulate import Simulation, simulate


@dataclass(frozen=True, eq=False)
class _Chain:
    """Sums along the order of ops, at each cut."""

    positions: I64  # [C] of the last op before the cut, -1 for the first
    held_bytes: I64  # [C] resident before the cut
    spent_ns: I64  # [D, C] of all ops before the cut, on one device
    moved_bytes: I64  # [C] over the cut

    @classmethod
    def of(cls, layout: StreamLayout) -> "_Chain":
        problem, graph = layout.problem, layout.problem.graph
        num_ops = graph.num_ops
        is_free = layout.may.any(axis=1)
        held = np.zeros(num_ops + 1, np.int64)
        np.add.at(held, layout.homes + 1, np.where(is_free, graph.resident_bytes, 0))
        times = np.zeros((num_ops + 1, problem.num_devices), np.int64)
        np.add.at(times, layout.homes + 1, layout.time_ns)
        moved = _crossing(layout)
        held = np.cumsum(held)
        starts = np.flatnonzero(np.diff(held, prepend=-1))
        ends = np.append(starts[1:], num_ops + 1)
        cuts = np.array([first + int(np.argmin(moved[first:last])) for first, last in zip(starts, ends, strict=True)])
        cuts[0], cuts[-1] = 0, num_ops
        return cls(cuts - 1, held[cuts], np.cumsum(times, axis=0)[cuts].T, moved[cuts])

    def ends(self, sequence: tuple[int, ...], rest: int, room_bytes: F64) -> list[int]:
        """Returns the cut at which each stage of `sequence` ends; `rest` is the number of the stage between the full
        ones."""
        last = len(self.positions) - 1
        ends = [last] * len(sequence)
        begin = 0
        for number in range(rest):
            most = self.held_bytes[begin] + room_bytes[sequence[number]]
            begin = ends[number] = max(int(np.searchsorted(self.held_bytes, most, side="right")) - 1, begin)
        end = last
        for number in range(len(sequence) - 1, rest, -1):
            least = self.held_bytes[end] - room_bytes[sequence[number]]
            end = max(min(int(np.searchsorted(self.held_bytes, least)), end), begin)
            ends[number - 1] = end
        return ends


@dataclass(frozen=True, eq=False)
class Fill:
    """A sequence of devices whose memories stages fill; the stage number `rest` takes what is left."""

    layout: StreamLayout
    chain: _Chain
    expected_ns: float
    sequence: tuple[int, ...]
    rest: int


def best_fills(layouts: Sequence[StreamLayout], settings: StreamingSettings) -> list[Fill]:
    """Returns the most promising sequences of devices, the best one first; none where nothing fits."""
    fills = []
    for layout in layouts:
        chain = _Chain.of(layout)
        fills += [Fill(layout, chain, *sequence) for sequence in _sequences(layout, chain)]
    fills.sort(key=lambda fill: fill.expected_ns)
    return [
        fill
        for fill in fills[: settings.num_sequences]
        if fill.expected_ns <= settings.far_sequence * fills[0].expected_ns
    ]


def fill_stages(fills: Sequence[Fill]) -> Iterator[Simulation]:
    """Yields steps of `fills`, and of the first one with a device that computes beside the stage of what is left."""
    for fill in fills:
        yield from _filled(fill)
    for fill in fills[:1]:
        others = fill.sequence[: fill.rest] + fill.sequence[fill.rest + 1 :]
        slow_first = sorted(others, key=lambda device: -int(fill.chain.spent_ns[device, -1]))
        for device, share in product(
            slow_first[: fill.layout.settings.num_helpers], fill.layout.settings.helper_shares
        ):
            yield from _filled(fill, device, share)


def _sequences(layout: StreamLayout, chain: _Chain) -> list[tuple[float, tuple[int, ...], int]]:
    """Returns the expected time of sequences of devices that hold everything, and which stage takes what is left."""
    cluster, room_bytes = layout.problem.cluster, layout.room_bytes
    total_ns = chain.spent_ns[:, -1]
    has_room = layout.may.any(axis=0) & (room_bytes > 0)
    able = [device for device in np.argsort(total_ns, kind="stable").tolist() if has_room[device]]
    alike = {device: (cluster.devices[device].kind, int(room_bytes[device])) for device in able}
    found: list[tuple[float, tuple[int, ...], int]] = []
    seen: set[tuple[object, ...]] = set()
    every = (each for size in range(1, len(able) + 1) for each in permutations(able, size))
    for sequence in islice(every, layout.settings.most_sequences):
        rates = tuple(cluster.route(*pair).bytes_per_second for pair in pairwise(sequence))
        if (key := (rates, *(alike[device] for device in sequence))) in seen:
            continue
        seen.add(key)
        rest = max(range(len(sequence)), key=lambda number: int(total_ns[sequence[number]]))
        ends = chain.ends(sequence, rest, room_bytes.astype(np.float64))
        begin, spent = 0, 0.0
        for number, (device, end) in enumerate(zip(sequence, ends, strict=True)):
            if chain.held_bytes[end] - chain.held_bytes[begin] > room_bytes[device]:
                break
            spent += float(chain.spent_ns[device, end] - chain.spent_ns[device, begin])
            if number and end > begin:
                route = cluster.route(sequence[number - 1], device)
                spent += route.latency_ns + float(chain.moved_bytes[begin]) * 1e9 / route.bytes_per_second
            begin = end
        else:
            found.append((spent, sequence, rest))
    return found


def _filled(fill: Fill, helper: int = -1, share: float = 0.0) -> Iterator[Simulation]:
    """Yields steps of one sequence, with room corrected by what its devices lack or have left. A `share` of the room of
    `helper` is for ops of the stage that takes what is left, which run beside others of it."""
    layout, chain, sequence, rest = fill.layout, fill.chain, fill.sequence, fill.rest
    problem = layout.problem
    limits = problem.memory_limit_bytes
    room = layout.room_bytes.astype(np.float64)
    low, high = np.zeros(len(room)), np.full(len(room), np.inf)
    tried: set[bytes] = set()
    for _ in range(layout.settings.most_moves):
        kept = room.copy()
        kept[helper] *= 1 - share
        ends = chain.ends(sequence, rest, kept)
        wanted = np.array(sequence)[np.searchsorted(chain.positions[ends[:-1]], layout.homes)]
        if share:
            wanted = _with_help(layout, wanted, sequence[rest], helper, share * room[helper])
        placement = layout.placed(wanted)
        if placement.tobytes() in tried:
            return
        tried.add(placement.tobytes())
        order = [layout.order[placement[layout.order] == device] for device in range(problem.num_devices)]
        found = simulate(problem, placement, order=order)
        yield found
        left = limits - found.peak_memory_bytes
        low = np.where(left >= 0, np.maximum(low, room), low)
        high = np.where(left < 0, np.minimum(high, room), high)
        aimed = room + left
        room = np.where((aimed > low) & (aimed < high), aimed, np.where(left < 0, (low + high) / 2, room))


def _with_help(layout: StreamLayout, wanted: Placement, busy: int, helper: int, room_bytes: float) -> Placement:
    """Returns `wanted` [N] with ops of `busy` on `helper` that end there while `busy` runs others in the meantime. Such
    as one of two products of the same input, whose results are then multiplied."""
    problem, graph, cluster = layout.problem, layout.problem.graph, layout.problem.cluster
    sources, targets, position = graph.producers[graph.edge_tensors], graph.consumers, layout.position
    is_made = ~layout.is_source[sources]
    begin, end = np.full(graph.num_ops, -1), np.full(graph.num_ops, graph.num_ops)
    np.maximum.at(begin, targets[is_made], position[sources[is_made]])
    np.minimum.at(end, sources, position[targets])
    held = np.zeros(graph.num_ops, np.int64)
    np.add.at(held, layout.homes, graph.resident_bytes)
    rate = min(cluster.route(busy, helper).bytes_per_second, cluster.route(helper, busy).bytes_per_second)
    latency_ns = cluster.route(busy, helper).latency_ns + cluster.route(helper, busy).latency_ns
    moved = problem.simulator.arrays.memory.alloc_bytes.copy()
    np.add.at(moved, targets[is_made], graph.tensor_bytes[graph.edge_tensors][is_made])
    needed_ns = problem.op_time_ns[:, helper] + latency_ns + moved * 1e9 / rate
    busy_ns = np.where((wanted == busy) & ~layout.is_source, problem.op_time_ns[:, busy], 0)[layout.order]
    can = (wanted == busy) & layout.may[:, helper] & layout.may[:, busy] & ~layout.is_source
    helped = np.zeros(graph.num_ops, np.bool_)
    for op in layout.order[can[layout.order] & (held[position[layout.order]] > 0)].tolist():
        here = position[op]
        if held[here] > room_bytes or layout.homes[op] != here:
            continue
        meanwhile_ns = busy_ns[begin[op] + 1 : end[op]].sum() - busy_ns[here]
        if needed_ns[op] <= meanwhile_ns:
            helped[here] = True
            busy_ns[here] = 0
            room_bytes -= held[here]
    return np.where(helped[layout.homes] & (wanted == busy), helper, wanted)


def _crossing(layout: StreamLayout) -> I64:
    """Returns [N + 1] the bytes of results that are used behind a cut before each position."""
    graph = layout.problem.graph
    first = layout.homes[graph.producers]
    last = first.copy()
    np.maximum.at(last, graph.edge_tensors, layout.homes[graph.consumers])
    size = np.where(graph.is_resident, 0, graph.tensor_bytes)
    return running_sums(first + 1, last + 1, size, graph.num_ops + 1)
