"""Weight streaming: a host with room holds the parameters that do not fit, and sends each shortly before its use.

A parameter op is ready at time 0, so the host would send all of them at once and fill the memory of the computing
device. A plan's order prevents it. A few small ops of the step, the gates, run on the host, whose order is: parameters
of the first two windows, gate 1, parameters of the third window, gate 2, and so on.

    gpu   |  window 1  | g1 input |  window 2   | g2 input |  window 3   |     copies of two windows at a time
    host  p1 p2         g1 p3                    g2 p4                         p: sends the parameters of a window

Several computing devices take turns, window by window: while one computes, the link of the next one is in use, and all
their memories hold parameters that are not sent at all.

A gate costs two small transfers. Several numbers of windows are tried and simulated, each with the least share of the
parameters streamed, evenly over the step, that fits. (ZeRO-Inference and FlexGen stream layer by layer.) N ops,
D devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, Bool
from gdp.placers.base import devices_by_speed
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate
from gdp.units.forward_units import forward_units

# numbers of windows (1: all is sent at once), and True to stream the parameters used last instead of an even share; the
# most different ones are tried first
_TRIES = (
    (16, False),
    (1, True),
    (64, False),
    (4, False),
    (1, False),
    (32, False),
    (8, False),
    (128, False),
    (2, False),
    (2, True),
    (4, True),
)
_STEPS = 7  # halvings of the share that is streamed: to within 1 %
_SLOWER = 2  # devices at most this much slower than the fastest take turns with it
_LARGE = 100  # tables of at least 1 / _LARGE of the missing bytes may go to the host
_NEVER = np.iinfo(np.int64).max


def stream_weights(problem: Problem) -> Iterator[Simulation]:
    """Yields candidate steps, feasible or not; the caller keeps the best and may stop at any time.

    There are none if one device holds everything, or if some op may run on neither of the main device and the host.
    """
    pair = _main_and_host(problem)
    if pair is None:
        return
    main, host = pair
    alone = simulate(problem, np.where(problem.allowed[:, main], main, host))
    if alone.feasible:
        return
    bases = [_Layout.of(alone, base, mains, host) for base, mains in _bases(alone, main, host)]
    for num_windows, last in _TRIES:
        for layout in bases:
            if layout is not None and (num_windows > 1 or len(layout.mains) == 1):
                yield from _fewest_streamed(layout, num_windows, last)


def _main_and_host(problem: Problem) -> tuple[int, int] | None:
    """Returns (main device, host): the fastest device for all ops that need not be on the host, the largest other one.

    None if no two devices may run all ops.
    """
    best: tuple[int, int, int] | None = None
    for main in range(problem.num_devices if problem.num_devices > 1 else 0):
        others = [device for device in range(problem.num_devices) if device != main]
        host = max(others, key=lambda device: int(problem.memory_limit_bytes[device]))
        may = problem.allowed[:, main]
        if (may | problem.allowed[:, host]).all():
            work_ns = int(np.where(may, problem.op_time_ns[:, main], problem.op_time_ns[:, host]).sum())
            best = min(best or (work_ns, main, host), (work_ns, main, host))
    return None if best is None else best[1:]


def _bases(alone: Simulation, main: int, host: int) -> Iterator[tuple[Placement, tuple[int, ...]]]:
    """Yields placements [N] without streaming, each with the devices that take turns at the ops placed on `main`.

    First all on `main`; then large tables, of which an op reads a few rows, on the host with their readers; last all
    devices that are nearly as fast take turns.
    """
    problem, graph = alone.problem, alone.problem.graph
    yield alone.placement, (main,)
    placement = alone.placement.copy()
    readers_of = _successors(problem)
    for op in np.flatnonzero(graph.resident_bytes * _LARGE > alone.missing_bytes[main]).tolist():
        moved = [op, *readers_of[op]]
        may = problem.allowed[moved, host].all() and (graph.groups[moved] < 0).all()
        if may and len(moved) > 1 and graph.bytes_accessed[readers_of[op]].sum() < graph.resident_bytes[op]:
            placement[moved] = host
    if (placement != alone.placement).any():
        yield placement, (main,)
    is_main = alone.placement == main
    work_ns = problem.op_time_ns[is_main].sum(axis=0)
    equals = [
        device
        for device in devices_by_speed(problem).tolist()
        if device != host and problem.allowed[is_main, device].all() and work_ns[device] <= _SLOWER * work_ns[main]
    ]
    if len(equals) > 1:
        yield alone.placement, tuple(equals)


def _successors(problem: Problem) -> list[list[int]]:
    graph = problem.graph
    successors: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for producer, consumer in zip(graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True):
        successors[producer].append(consumer)
    return successors


@dataclass(frozen=True, eq=False)
class _Layout:
    """The computing devices' ops in the order of their starts, the parameters to stream, and the ops to be gates.

    Positions are in `order`; an op elsewhere has that of the next op there.
    """

    problem: Problem
    placement: Placement  # [N] nothing streamed, all that is computed on the first of `mains`
    order: I64  # ops of the computing devices
    host: int
    mains: tuple[int, ...]  # the computing devices
    homes: I64  # [N] the position that decides which of them an op goes to
    elsewhere: I64  # ops that are on the host in any case
    reached: I64  # [len(elsewhere)] their positions
    streamable: I64  # sources with content that stays, by the position of their first use
    first_use: I64  # [len(streamable)] positions
    gate_cost_ns: npt.NDArray[np.float64]  # [len(order)] of running that op on the host; infinite if it must not
    passed_ns: I64  # [len(order)] time computed up to each position

    @classmethod
    def of(cls, alone: Simulation, placement: Placement, mains: tuple[int, ...], host: int) -> "_Layout | None":
        """Derives the layout from the step with all ops on the main device; None if no parameter may be streamed."""
        problem, graph = alone.problem, alone.problem.graph
        everything = np.argsort(alone.op_start_ns, kind="stable")
        is_main = placement[everything] == mains[0]
        position = np.empty(graph.num_ops, np.int64)
        position[everything] = np.cumsum(is_main) - is_main
        sources, targets = graph.producers[graph.edge_tensors], graph.consumers
        is_source = np.ones(graph.num_ops, np.bool_)
        is_source[targets] = False
        first = np.full(graph.num_ops, _NEVER, np.int64)
        np.minimum.at(first, sources, position[targets])
        may_move = problem.allowed[:, host] & (graph.groups < 0) & (placement == mains[0])
        streamable = np.flatnonzero(is_source & may_move & (graph.resident_bytes > 0) & (first < _NEVER))
        streamable = streamable[np.argsort(first[streamable], kind="stable")]
        if not len(streamable):
            return None
        unit = forward_units(problem)  # backward ops go where the forward ones are, and their parameters
        homes = np.full(graph.num_ops, _NEVER, np.int64)
        np.minimum.at(homes, unit, np.where(is_source, first, position))
        order, elsewhere = everything[is_main], everything[~is_main]
        cost = _gate_costs(problem, host, may_move & ~is_source)[order]
        passed = np.cumsum(problem.op_time_ns[order, mains[0]])
        return cls(
            problem,
            placement,
            order,
            host,
            mains,
            homes[unit],
            elsewhere,
            position[elsewhere],
            streamable,
            first[streamable],
            cost,
            passed,
        )

    def gates(self, num_windows: int) -> I64:
        """Returns the positions of the gates: the cheapest op around the end of each window of equal time."""
        chosen: list[int] = []
        total = int(self.passed_ns[-1])
        for window in range(1, num_windows):
            low, high = ((2 * window + side) * total // (2 * num_windows) for side in (-1, 1))
            start, end = np.searchsorted(self.passed_ns, [low, high])
            cost = self.gate_cost_ns[start:end]
            if len(cost) and np.isfinite(cost).any():
                chosen.append(int(start) + int(np.argmin(cost)))
        return np.array(sorted(set(chosen)), np.int64)

    def simulate(self, share: float, gates: I64, last: bool) -> Simulation:
        """Simulates the step with a `share` of the streamable parameters on the host."""
        placement = self.placement.copy()
        turns = np.array(self.mains)[np.searchsorted(gates, self.homes) % len(self.mains)]
        placement[self.order] = turns[self.order]
        streamed = self._last(share) if last else self._even(share, placement)
        placement[self.streamable[streamed]] = self.host
        gate_ops = self.order[gates]
        placement[gate_ops] = self.host
        order = [self.order[placement[self.order] == device] for device in range(self.problem.num_devices)]
        # what is first used behind gate number j (from 0 on) is sent after gate j - 1, or, where k devices take turns,
        # j - k, so that each link has k windows' time for one; what the host itself computes there comes after gate j,
        # before what is used behind the next one
        behind = np.searchsorted(gates, self.first_use[streamed]) - len(self.mains)
        between = np.searchsorted(gates, self.reached) - 1
        on_host = np.concatenate((self.streamable[streamed], gate_ops, self.elsewhere))
        turn = np.concatenate((3 * behind, 3 * np.arange(len(gates)) + 1, 3 * between + 2))
        order[self.host] = on_host[np.argsort(turn, kind="stable")]
        return simulate(self.problem, placement, order=order)

    def _last(self, share: float) -> Bool:
        """Selects [len(streamable)] a share of the bytes: the parameters used last."""
        size = self.problem.graph.resident_bytes[self.streamable]
        return np.asarray(np.cumsum(size[::-1])[::-1] - size < share * size.sum(), np.bool_)

    def _even(self, share: float, placement: Placement) -> Bool:
        """Selects [len(streamable)] a share of the bytes, spread evenly: the rest is carried over (error diffusion).

        A device with less memory than another one keeps less, in proportion.
        """
        chosen = np.zeros(len(self.streamable), np.bool_)
        limits = self.problem.memory_limit_bytes.astype(np.float64)
        shares = 1 - (1 - share) * limits / max(limits[list(self.mains)].max(), 1.0)
        due = np.zeros(len(shares))
        sizes = self.problem.graph.resident_bytes[self.streamable].tolist()
        for number, (size, device) in enumerate(zip(sizes, placement[self.streamable].tolist(), strict=True)):
            due[device] += shares[device] * size
            if due[device] > size / 2:
                chosen[number] = True
                due[device] -= size
        return chosen


def _gate_costs(problem: Problem, host: int, may: Bool) -> npt.NDArray[np.float64]:
    """Estimates [N] the wait of the main device for an op on the host: transfers there and back, and the op."""
    graph = problem.graph
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    moved = np.zeros(graph.num_ops)
    np.add.at(moved, targets, graph.tensor_bytes[graph.edge_tensors].astype(np.float64))
    np.add.at(moved, graph.producers, graph.tensor_bytes.astype(np.float64))
    reads_state = np.zeros(graph.num_ops, np.bool_)
    reads_state[targets[graph.resident_bytes[sources] > 0]] = True
    others = [device for device in range(problem.num_devices) if device != host]
    rate = max(problem.cluster.route(device, host).bytes_per_second for device in others)
    cost = moved * 1e9 / rate + problem.op_time_ns[:, host]
    return np.where(may & ~reads_state & (graph.resident_bytes == 0), cost, np.inf)


def _fewest_streamed(layout: _Layout, num_windows: int, last: bool) -> Iterator[Simulation]:
    """Yields steps down to the least share streamed that fits; one alone if not even streaming everything fits."""
    gates = layout.gates(num_windows)
    everything = layout.simulate(1.0, gates, last)
    yield everything
    low, high = 0.0, 1.0
    for _ in range(_STEPS if everything.feasible or last else 0):
        share = (low + high) / 2
        found = layout.simulate(share, gates, last)
        yield found
        low, high = (low, share) if found.feasible else (share, high)
