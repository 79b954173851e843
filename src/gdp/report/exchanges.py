"""Measures the exchanges between replicas of a simulated step: bytes, time, and how much of it nothing hides.

    chunks to or from a device    ====== ======  ====
    its ops                     #########      ####  ##
    not hidden                           =  ===  ==

D devices.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdp.arrays import I64
from gdp.graph.copies import HOST_RING_COPY, HOST_RING_SUM, exchange_numbers, exchange_of
from gdp.report.timeline_text import worked_until
from gdp.simulator.simulate import Simulation

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
    """All chunks that a simulated step sends between replicas."""

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
            own = transfers[
                (self.sources[transfers] == device) | (simulation.transfer_destinations[transfers] == device)
            ]
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
        return {
            "name": first.kind.replace("_", "-"),
            "number": len(exchanges),
            "phase": first.phase,
            "bytes": int(self.sizes_bytes[transfers].sum()),
            "devices": self.by_device(transfers),
        }

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
    """Returns the exchanges between replicas for a page; None where there are none.

    `devices` have for each device [ns that chunks are under way to or from it, ns of it that no op hides].
    """
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
