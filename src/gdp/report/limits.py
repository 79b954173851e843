"""Finds the limit of a step (a device, a channel, the critical path, a host), and explains the start of each event.

    device a   op 1 |--------|op 4 |----|        op 4 starts when op 1 ends: the device was busy
    channel             |======|                 its transfer starts when op 1 ends: the tensor was made
    device b                   |op 7 |---|       op 7 starts when the transfer arrives: an input came

An op starts when its device is free and its last input is there, a transfer when its tensor is made and its channels
are free (docs/machine-model.md, section 3). Each start is the end of another event, back to the start of the step.
N ops, R transfers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import I64
from gdp.simulator.levels import communication_levels, longest_chain
from gdp.simulator.simulate import Simulation

_TOLD = 0.2  # share of the step from which on the wait for a host is told beside another limit
_FULL = 0.7  # share of the step above which a limit is named alone; a choice: all shares are shown anyway


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds shares of the step, each at most 1: no order of the same placement takes less than any but the last."""

    device: str  # that computes longest
    device_share: float
    channel: str  # that is occupied longest; "" if nothing is transferred
    channel_share: float
    path_share: float  # of the longest chain of ops and transfers that must follow one another, nothing queueing
    path_ends: tuple[str, str]  # the first and the last op of that chain that take time
    path_transfers_share: float  # of the transfers in it
    host: str  # the device that waits longest for its host
    host_share: float  # of these waits, 0 where hosts take no time

    @classmethod
    def of(cls, simulation: Simulation) -> "Limits":
        """Returns the limits of a simulated step."""
        cluster, step_ns = simulation.problem.cluster, max(simulation.step_time_ns, 1)
        device, host = (int(np.argmax(f)) for f in (simulation.busy_fraction, simulation.host_wait_fraction))
        occupied_ns = np.zeros(max(len(cluster.channels), 1), np.int64)
        sources = simulation.placement[simulation.problem.graph.producers[simulation.transfer_tensors]]
        lengths_ns = simulation.transfer_end_ns - simulation.transfer_start_ns
        for source, target, length_ns in zip(
            sources.tolist(), simulation.transfer_destinations.tolist(), lengths_ns.tolist(), strict=True
        ):
            for channel in cluster.route_channels[source][target]:
                occupied_ns[channel] += length_ns
        channel = int(np.argmax(occupied_ns))
        path = longest_chain(simulation.problem, simulation.placement)
        path_ns = int(communication_levels(simulation.problem, simulation.placement).max())
        busy_ns = simulation.problem.op_time_ns[path, simulation.placement[path]]
        timed = [op for op, time_ns in zip(path, busy_ns.tolist(), strict=True) if time_ns] or path
        names = simulation.problem.graph.op_names
        return cls(
            device=cluster.devices[device].name,
            device_share=float(simulation.busy_fraction[device]),
            channel=cluster.channels[channel] if occupied_ns[channel] else "",
            channel_share=int(occupied_ns[channel]) / step_ns,
            path_share=path_ns / step_ns,
            path_ends=(names[timed[0]], names[timed[-1]]),
            path_transfers_share=(path_ns - int(busy_ns.sum())) / step_ns,
            host=cluster.devices[host].name,
            host_share=float(simulation.host_wait_fraction[host]),
        )

    def __str__(self) -> str:
        device = f"{self.device} computes for {self.device_share:.0%} of the step"
        channel = f"transfers occupy {self.channel or 'no channel'} for {self.channel_share:.0%} of it"
        path = f"the longest chain of ops and transfers takes {self.path_share:.0%} of it"
        ends = f"it goes from {self.path_ends[0]} to {self.path_ends[1]}, {self.path_transfers_share:.0%} are transfers"
        most = max(self.device_share, self.channel_share, self.path_share)
        if self.host_share > most:
            waits = f"{self.host} waits for it for {self.host_share:.0%} of the step"
            return f"The host limits the step: {waits}, {device}."
        host = f" {self.host} waits for its host for {self.host_share:.0%}." if self.host_share > _TOLD else ""
        if most < _FULL:
            return f"Devices wait for one another, which limits the step: {device}, {channel}, {path}.{host}"
        if most == self.device_share:
            return f"Device {self.device} limits the step: {device}, {path}.{host}"
        if most == self.path_share:
            return f"The critical path limits the step: {path}, {device}; {ends}.{host}"
        return f"The link {self.channel} limits the step: {channel}, {device}.{host}"


AT_ONCE, AFTER_OP, AFTER_TRANSFER, DEVICE_BUSY, CHANNEL_BUSY = range(5)
"""The event before a start: none, the op that makes a tensor, the transfer that brings it, the op before on the device,
the transfer before on the channel."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """Holds one op or one transfer of the critical path, and the event that it follows."""

    number: int  # of the op, or the transfer
    is_transfer: bool
    after: int  # one of the above


@dataclass(frozen=True, eq=False)
class Waits:
    """Holds the last event that each op and each transfer of a simulated step waited for."""

    simulation: Simulation
    ready_ns: I64  # [N] when the last input was there; 0 without inputs
    last_input: I64  # [N] the tensor that came last, -1 without inputs
    last_transfer: I64  # [N] the transfer that brought it, -1 if it was made on the same device
    device_free_ns: I64  # [N] when the op before on the device ended; 0 for the first
    op_before: I64  # [N] that op, -1 for the first

    @classmethod
    def of(cls, simulation: Simulation) -> "Waits":
        """Returns the waits of a simulated step."""
        graph, placement = simulation.problem.graph, simulation.placement
        num_devices = simulation.problem.num_devices
        sent = simulation.transfer_tensors * num_devices + simulation.transfer_destinations
        by_tensor = np.argsort(sent)
        tensors, consumers = graph.edge_tensors, graph.consumers
        producers = graph.producers[tensors]
        moved = placement[producers] != placement[consumers]
        brought_by = np.full(len(tensors), -1, np.int64)
        asked = tensors[moved] * num_devices + placement[consumers[moved]]
        brought_by[moved] = by_tensor[np.searchsorted(sent[by_tensor], asked)]
        there_ns = simulation.op_finish_ns[producers].copy()
        there_ns[moved] = simulation.transfer_arrival_ns[brought_by[moved]]
        # the last edge of each consumer by time; of equal ones the last tensor
        by_time = np.lexsort((tensors, there_ns, consumers))
        last = by_time[np.flatnonzero(np.diff(consumers[by_time], append=-1))]
        ready_ns = np.zeros(graph.num_ops, np.int64)
        last_input, last_transfer = np.full((2, graph.num_ops), -1, np.int64)
        ready_ns[consumers[last]] = there_ns[last]
        last_input[consumers[last]] = tensors[last]
        last_transfer[consumers[last]] = brought_by[last]
        device_free_ns, op_before = np.zeros(graph.num_ops, np.int64), np.full(graph.num_ops, -1, np.int64)
        for ops in simulation.order:
            op_before[ops[1:]] = ops[:-1]
            device_free_ns[ops[1:]] = simulation.op_finish_ns[ops[:-1]]
        return cls(simulation, ready_ns, last_input, last_transfer, device_free_ns, op_before)

    @cached_property
    def after(self) -> I64:
        """Returns [N] the event before the start of each op."""
        by_input = np.where(self.last_transfer >= 0, AFTER_TRANSFER, AFTER_OP)
        waited = (self.last_input >= 0) & (self.ready_ns >= self.device_free_ns)
        return np.where(waited, by_input, np.where(self.op_before >= 0, DEVICE_BUSY, AT_ONCE)).astype(np.int64)

    @cached_property
    def transfer_before(self) -> I64:
        """Returns [R] the transfer that held a channel until this one started; -1 if none did."""
        simulation = self.simulation
        graph, cluster = simulation.problem.graph, simulation.problem.cluster
        producers = graph.producers[simulation.transfer_tensors]
        sources = simulation.placement[producers].tolist()
        made_ns, starts_ns = simulation.op_finish_ns[producers].tolist(), simulation.transfer_start_ns.tolist()
        ends_ns, targets = simulation.transfer_end_ns.tolist(), simulation.transfer_destinations.tolist()
        before = np.full(len(starts_ns), -1, np.int64)
        holder = [-1] * len(cluster.channels)
        # requests come in their order, and so each channel serves them
        for transfer, (source, target) in enumerate(zip(sources, targets, strict=True)):
            channels = cluster.route_channels[source][target]
            if starts_ns[transfer] > made_ns[transfer]:
                holders = (holder[channel] for channel in channels)
                before[transfer] = next(each for each in holders if ends_ns[each] == starts_ns[transfer])
            for channel in channels:
                holder[channel] = transfer
        return before

    @cached_property
    def path(self) -> list[PathStep]:
        """Returns the critical path: each part starts when the one before ends, from 0 to the end of the step."""
        return list(self._backwards())[::-1]

    def _backwards(self) -> Iterator[PathStep]:
        simulation = self.simulation
        producers = simulation.problem.graph.producers
        last_op = int(np.argmax(simulation.op_finish_ns))
        number, is_transfer = last_op, False
        if len(simulation.transfer_arrival_ns):
            last_transfer = int(np.argmax(simulation.transfer_arrival_ns))
            if simulation.transfer_arrival_ns[last_transfer] > simulation.op_finish_ns[last_op]:
                number, is_transfer = last_transfer, True
        while True:
            if is_transfer:
                before = int(self.transfer_before[number])
                yield PathStep(number, True, AFTER_OP if before < 0 else CHANNEL_BUSY)
                is_transfer = before >= 0
                number = before if is_transfer else int(producers[simulation.transfer_tensors[number]])
                continue
            after = int(self.after[number])
            yield PathStep(number, False, after)
            if after == AT_ONCE:
                return
            if after == AFTER_TRANSFER:
                number, is_transfer = int(self.last_transfer[number]), True
            elif after == AFTER_OP:
                number = int(producers[self.last_input[number]])
            else:
                number = int(self.op_before[number])
