"""Everything on one device, but for copies that wait on the host."""

import numpy as np

from gdp.arrays import narrow
from gdp.budget import Clock
from gdp.graph.copies import HOST_COPY
from gdp.placers.base import TriedPlacements
from gdp.simulator.problem import Placement, Problem


def single(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Places all ops on the fastest device where they fit; None if no device may run all ops."""
    is_host_copy = problem.graph.is_in_role(HOST_COPY)
    is_anywhere = narrow(problem.allowed)[~is_host_copy].all(axis=0)
    devices = np.flatnonzero(np.broadcast_to(is_anywhere, problem.num_devices))
    if not len(devices):
        return None
    has_twins = problem.simulator.time_table_ns.shape[1] == 1
    alike: dict[tuple[bytes, int], int] = {}  # the first device of each kind and memory
    for device in devices.tolist():
        times = b"" if has_twins else problem.op_time_ns[:, device].tobytes()
        alike.setdefault((times, int(problem.memory_limit_bytes[device])), device)
    tried = TriedPlacements(problem, clock)
    elsewhere = np.argmax(problem.allowed, axis=1)  # of copies on the host
    tried.run(np.where(is_host_copy & ~problem.allowed[:, one], elsewhere, one) for one in alike.values())
    return tried.nearest()
