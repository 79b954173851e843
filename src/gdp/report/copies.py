"""Tells the copies of ops apart that a step is made of: replicas, micro-batches, recomputed ops, exchanges.

N ops, D devices, R replicas.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import I64
from gdp.graph.microbatches import RECOMPUTED, replica_of
from gdp.graph.recomputed import is_recomputed
from gdp.report.tables import writable
from gdp.simulator.simulate import Simulation

EXCHANGE = "exchange"  # the phase that ops between replicas are shown with
_HOP = re.compile(r"(all_reduce|reduce_scatter|all_gather)\.(\d+)\.(host\.)?(ready|done|add|copy|joined)(?:\.(\d+))?")
_STEPS = {"ready": "begins", "done": "ends", "add": "sum", "copy": "copy", "joined": "chunks of the host joined"}


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of a simulated step, as a page shows them."""

    simulation: Simulation

    @cached_property
    def replica(self) -> I64:
        """Returns [N] the replica of each op; all 0 where there are none."""
        return replica_of(self.simulation.problem.graph)

    @property
    def num_replicas(self) -> int:
        """The number of replicas, at least 1."""
        return int(self.replica.max()) + 1

    @property
    def has_copies(self) -> bool:
        """True where names tell replicas or micro-batches."""
        return self.num_replicas > 1 or bool((self.simulation.problem.microbatch > 0).any())

    def names(self) -> tuple[list[str], I64, I64]:
        """Returns names that are shown [B], and of each op the number of its name [N] and its micro-batch [N], or 0.

        Ops that differ by replica and micro-batch alone have one name.
        """
        graph = self.simulation.problem.graph
        if not self.has_copies:
            names: Sequence[str] = graph.op_names
            number, microbatch = np.arange(graph.num_ops), np.zeros(graph.num_ops, np.int64)
        else:
            names, number, microbatch = graph.copy_names.bases, graph.copy_names.base, graph.copy_names.microbatch
        shown = [writable(name) for name in names]
        for base in np.unique(number[is_recomputed(graph)]).tolist():
            shown[base] = f"{shown[base].removesuffix(RECOMPUTED)}, recomputed"
        for base in np.unique(number[graph.is_collective]).tolist():
            shown[base] = _hop_name(shown[base])
        return shown, number, microbatch

    def phases(self) -> list[str]:
        """Returns [N] the phase of each op, recomputed ops and exchanges apart."""
        graph = self.simulation.problem.graph
        phases = list(graph.phases)
        for chosen, phase in ((is_recomputed(graph), "recomputed"), (graph.is_collective, EXCHANGE)):
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
        simulation, names = self.simulation, self.simulation.problem.graph.copy_names
        if self.num_replicas == 1:
            return False
        ops = np.flatnonzero(~simulation.problem.graph.is_collective)
        ops = ops[np.lexsort((names.microbatch[ops], names.base[ops], self.replica[ops]))]
        if (np.bincount(self.replica[ops]) != len(ops) // self.num_replicas).any():
            return False
        rows = ops.reshape(self.num_replicas, -1)
        keys = np.stack((names.base[rows], names.microbatch[rows]))
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


def _hop_name(name: str) -> str:
    """Returns `all-reduce 3, sum of chunk 2` for `all_reduce.3.add.2`; any other name as it is."""
    match = _HOP.fullmatch(name)
    if match is None:
        return name
    exchange, number, host, step, chunk = match.groups()
    of_chunk = "" if chunk is None else f" of chunk {chunk}"
    return f"{exchange.replace('_', '-')} {number}{', inside hosts' if host else ''}, {_STEPS[step]}{of_chunk}"
