"""Tells the copies of ops apart that a step is made of: replicas, micro-batches, recomputed ops, exchanges.

N ops, D devices, R replicas.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import I64
from gdp.graph import copies
from gdp.graph.copies import exchange_numbers, exchange_of, turn_in_exchange
from gdp.report.tables import writable
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

    @property
    def has_copies(self) -> bool:
        """True where there are several replicas or micro-batches."""
        return self.num_replicas > 1 or bool((self.simulation.problem.microbatch > 0).any())

    def names(self) -> tuple[list[str], I64, I64]:
        """Returns names that are shown [B], and of each op the number of its name [N] and its micro-batch [N], or 0.

        Ops that differ by replica and micro-batch alone have one name.
        """
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
        work = np.maximum(simulation.op_finish_ns - simulation.op_start_ns, 1e-3)
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
