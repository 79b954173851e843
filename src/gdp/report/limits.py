"""Finds the limit of a step: the busiest device, the busiest channel, or the critical path."""

from dataclasses import dataclass

import numpy as np

from gdp.simulator.levels import communication_levels, longest_chain
from gdp.simulator.simulate import Simulation

_FULL = 0.7  # share of the step above which a limit is named alone; a choice: all shares are shown anyway


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds three shares of the step, each at most 1: no order of the same placement takes less than any of them."""

    device: str  # that computes longest
    device_share: float
    channel: str  # that is occupied longest; "" if nothing is transferred
    channel_share: float
    path_share: float  # of the longest chain of ops and transfers that must follow one another, nothing queueing
    path_ends: tuple[str, str]  # the first and the last op of that chain that take time
    path_transfers_share: float  # of the transfers in it

    @classmethod
    def of(cls, simulation: Simulation) -> "Limits":
        """Returns the limits of a simulated step."""
        cluster, step_ns = simulation.problem.cluster, max(simulation.step_time_ns, 1)
        device = int(np.argmax(simulation.busy_fraction))
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
        )

    def __str__(self) -> str:
        device = f"{self.device} computes for {self.device_share:.0%} of the step"
        channel = f"transfers occupy {self.channel or 'no channel'} for {self.channel_share:.0%} of it"
        path = f"the longest chain of ops and transfers takes {self.path_share:.0%} of it"
        ends = f"it goes from {self.path_ends[0]} to {self.path_ends[1]}, {self.path_transfers_share:.0%} are transfers"
        most = max(self.device_share, self.channel_share, self.path_share)
        if most < _FULL:
            return f"Devices wait for one another, which limits the step: {device}, {channel}, {path}."
        if most == self.device_share:
            return f"Device {self.device} limits the step: {device}, {path}."
        if most == self.path_share:
            return f"The critical path limits the step: {path}, {device}; {ends}."
        return f"The link {self.channel} limits the step: {channel}, {device}."
