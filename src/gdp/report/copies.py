"""Tells apart the copies of ops in a step: replicas, micro-batches, recomputed ops, exchanges. N ops, D devices."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gdp.arrays import I64
from gdp.graph import copies
from gdp.graph.copies import HOST_RING_COPY, HOST_RING_SUM, exchange_numbers, exchange_of, turn_in_exchange
from gdp.report.tables import writable
from gdp.report.timeline_text import worked_until
from gdp.simulator.simulate import Simulation

EXCHANGE = "exchange"  # the phase that ops between replicas are shown with
_STEPS = {
    copies.EXCHANGE_START: "begins",
    copies.EXCHANGE_END: "ends",
    copies.RING_SUM: "sum at hop",
    copies.RING_COPY: "copy at hop",
    copies.HOST_RING_SUM: "inside hosts, sum at hop",
    copies.HOST_RING_COPY: "inside hosts, copy at hop",
    copies.HOST_RING_END: "chunks of the host joined",
}


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of a simulated step, as a page shows them."""

    simulation: Simulation

    @cached_property
    def replica(self) -> I64:
        """Returns [N] the replica of each op; all 0 where there are none."""
        return self.simulation.problem.graph.replicas

    @property
    def num_replicas(self) -> int:
        """The number of replicas, at least 1."""
        return int(self.replica.max()) + 1

    def names(self) -> tuple[list[str], I64, I64]:
        """Returns names that are shown [B], and of each op the number of its name [N] and its micro-batch [N], or 0.
        Ops that differ by replica and micro-batch alone have one name."""
        graph = self.simulation.problem.graph
        number = graph.first_copy.copy()
        hops, turn = graph.is_in_role(*copies.HOPS, copies.HOST_RING_END), turn_in_exchange(graph)
        exchange, width = exchange_of(graph), int(turn.max()) + 1
        key = ((exchange * len(copies.ROLES) + graph.role_code) * width + turn)[hops]
        number[hops] = graph.num_ops + key
        distinct, number = np.unique(number, return_inverse=True)
        one = np.empty(len(distinct), np.int64)
        one[number] = np.arange(graph.num_ops)
        numbers = exchange_numbers(graph)
        shown = []
        for op in one.tolist():
            role, first = graph.roles[op], int(graph.first_copy[op])
            if role in _STEPS:
                kind, place = numbers[int(exchange[op])]
                hop = f" {turn[op] + 1}" if role in copies.HOPS else ""
                shown.append(f"{kind.replace('_', '-')} {place}, {_STEPS[role]}{hop}")
            elif role == copies.MODEL:
                shown.append(writable(graph.op_names[first]))
            else:
                shown.append(f"{writable(graph.op_names[int(graph.root[op])])}, {role}")
        return shown, number.astype(np.int64), graph.microbatches

    def phases(self) -> list[str]:
        """Returns [N] the phase of each op, recomputed ops and exchanges apart."""
        graph = self.simulation.problem.graph
        phases = list(graph.phases)
        for chosen, phase in ((graph.is_in_role(copies.RECOMPUTED), "recomputed"), (graph.is_collective, EXCHANGE)):
            for op in np.flatnonzero(chosen).tolist():
                phases[op] = phase
        return phases

    def device_replicas(self) -> I64:
        """Returns [D] the replica that each device computes most for, -1 without ops."""
        simulation = self.simulation
        totals = np.zeros((simulation.problem.num_devices, self.num_replicas))
        work = np.maximum(simulation.op_finish_ns - simulation.op_begin_ns, 1e-3)
        np.add.at(totals, (simulation.placement, self.replica), work)
        return np.where(totals.any(axis=1), totals.argmax(axis=1), -1)

    def are_alike(self) -> bool:
        """Returns whether all replicas are placed alike, on devices of the same kinds that each has to itself."""
        simulation, graph = self.simulation, self.simulation.problem.graph
        if self.num_replicas == 1:
            return False
        ops = np.flatnonzero(~graph.is_collective)
        ops = ops[np.lexsort((graph.microbatches[ops], graph.first_copy[ops], self.replica[ops]))]
        if (np.bincount(self.replica[ops]) != len(ops) // self.num_replicas).any():
            return False
        rows = ops.reshape(self.num_replicas, -1)
        keys = np.stack((graph.first_copy[rows], graph.microbatches[rows]))
        if (keys != keys[:, :1]).any():
            return False
        devices = simulation.placement[rows]
        kinds = [device.kind for device in simulation.problem.cluster.devices]
        used = [set(row.tolist()) for row in devices]
        if sum(map(len, used)) != len(set().union(*used)):
            return False
        for row, own in zip(devices, used, strict=True):
            pairs = np.unique(np.stack((devices[0], row)), axis=1).T.tolist()
            if len(pairs) != len(own) or any(kinds[one] != kinds[other] for one, other in pairs):
                return False
        return len({len(own) for own in used}) == 1


_LISTED = 60  # exchanges that are listed one by one


@dataclass(frozen=True, slots=True)
class _BucketExchange:
    """One bucket's way through its rings, in one micro-batch."""

    kind: str  # all_reduce, reduce_scatter or all_gather
    number: int
    phase: str
    microbatch: int
    transfers: I64


def _during(simulation: Simulation, ops: I64, starts: I64, ends: I64) -> tuple[int, int]:
    """Returns the length of intervals, which may overlap, and the time within them without one of `ops`, in ns."""
    if not len(starts):
        return 0, 0
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > reached[:-1])))
    begins, stops = starts[first], reached[np.append(first[1:] - 1, len(starts) - 1)]
    length_ns = int((stops - begins).sum())
    worked_ns = worked_until(simulation, ops, stops) - worked_until(simulation, ops, begins)
    return length_ns, length_ns - round(float(worked_ns.sum()))


class _Exchanges:
    """All chunks that a simulated step sends between replicas: bytes, time, and how much of it nothing hides. chunks to
    or from a device    ====== ======  ==== its ops                     #########      ####  ## not hidden
    =  ===  =="""

    def __init__(self, simulation: Simulation) -> None:
        graph = simulation.problem.graph
        self.simulation = simulation
        self.producers = graph.producers[simulation.transfer_tensors]
        self.sizes_bytes = graph.tensor_bytes[simulation.transfer_tensors]
        self.sources = simulation.placement[self.producers]
        self.transfers = np.flatnonzero(graph.is_collective[self.producers] & (self.sizes_bytes > 0))

    def each(self) -> list[_BucketExchange]:
        """Returns the exchanges one by one."""
        graph = self.simulation.problem.graph
        exchange, numbers = exchange_of(graph), exchange_numbers(graph)
        found = defaultdict[tuple[int, int], list[int]](list)
        ops = self.producers[self.transfers]
        for transfer, start, microbatch in zip(
            self.transfers.tolist(), exchange[ops].tolist(), graph.microbatches[ops].tolist(), strict=True
        ):
            found[start, microbatch].append(transfer)
        return [
            _BucketExchange(*numbers[start], graph.phases[start], microbatch, np.array(transfers, np.int64))
            for (start, microbatch), transfers in found.items()
        ]

    def by_device(self, transfers: I64) -> list[tuple[int, int]]:
        """Returns [D] the time that transfers are under way to or from a device, and that without an op on it."""
        simulation, rows = self.simulation, []
        for device, ops in enumerate(simulation.order):
            where = self.sources[transfers], simulation.transfer_destinations[transfers]
            own = transfers[(where[0] == device) | (where[1] == device)]
            starts, ends = simulation.transfer_start_ns[own], simulation.transfer_arrival_ns[own]
            rows.append(_during(simulation, ops, starts, ends))
        return rows

    def rings(self) -> list[list[int]]:
        """Returns the rings of devices, those inside hosts first."""
        graph = self.simulation.problem.graph
        in_host = graph.is_in_role(HOST_RING_SUM, HOST_RING_COPY)
        hops: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
        for transfer in self.transfers.tolist():
            reader = int(graph.consumers_of(int(self.simulation.transfer_tensors[transfer]))[0])
            pair = int(self.sources[transfer]), int(self.simulation.transfer_destinations[transfer])
            hops[bool(in_host[reader])].add(pair)
        rings = []
        for pairs in hops.values():
            following = dict(pairs)
            left = set(following) if len(following) == len(pairs) else set()  # else devices are in several rings
            while left:
                ring = [min(left)]
                while (device := following.get(ring[-1])) in left and device is not None and device not in ring:
                    ring.append(device)
                left -= set(ring)
                rings.append(ring)
        return rings

    def row(self, exchanges: Sequence[_BucketExchange]) -> dict[str, Any]:
        """Returns the figures of exchanges of one kind and phase."""
        first, transfers = exchanges[0], np.concatenate([each.transfers for each in exchanges])
        sizes_bytes = int(self.sizes_bytes[transfers].sum())
        figures = {"number": len(exchanges), "phase": first.phase, "bytes": sizes_bytes}
        return {"name": first.kind.replace("_", "-"), **figures, "devices": self.by_device(transfers)}

    def listed(self, exchange: _BucketExchange) -> dict[str, Any]:
        """Returns the figures of one exchange; the times are means of the devices that take part in it."""
        row = self.row([exchange])
        times = np.array([pair for pair in row.pop("devices") if pair[0]])
        under_way, bare = times.mean(axis=0).astype(int).tolist() if len(times) else (0, 0)
        simulation = self.simulation
        return row | {
            "name": f"{row['name']} {exchange.number}",
            "microbatch": exchange.microbatch,
            "from": int(simulation.transfer_start_ns[exchange.transfers].min()),
            "until": int(simulation.transfer_arrival_ns[exchange.transfers].max()),
            "under_way": under_way,
            "bare": bare,
        }


def exchanges_document(simulation: Simulation) -> dict[str, Any] | None:
    """Returns the exchanges between replicas for a page; None where there are none. `devices` have for each device [ns
    that chunks are under way to or from it, ns of it that no op hides]."""
    exchanges = _Exchanges(simulation)
    every = exchanges.each()
    if not every:
        return None
    kinds = dict.fromkeys((each.kind, each.phase) for each in every)
    listed = sorted(map(exchanges.listed, every), key=lambda row: (-row["bare"], row["from"]))
    return {
        "devices": exchanges.by_device(exchanges.transfers),
        "kinds": [exchanges.row([each for each in every if (each.kind, each.phase) == kind]) for kind in kinds],
        "rings": exchanges.rings(),
        "listed": listed[:_LISTED],
        "more": max(len(listed) - _LISTED, 0),
    }
