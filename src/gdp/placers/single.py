"""Everything on one device."""

import numpy as np

from gdp.arrays import narrow
from gdp.budget import Clock
from gdp.placers.base import TriedPlacements
from gdp.simulator.problem import Placement, Problem


def single(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Places all ops on the fastest device where they fit; None if no device may run all ops."""
    is_anywhere = narrow(problem.allowed).all(axis=0)
    devices = np.flatnonzero(np.broadcast_to(is_anywhere, problem.num_devices))
    if not len(devices):
        return None
    has_twins = problem.simulator.time_table_ns.shape[1] == 1
    alike: dict[tuple[bytes, int], int] = {}  # the first device of each kind and memory
    for device in devices.tolist():
        times = b"" if has_twins else problem.op_time_ns[:, device].tobytes()
        alike.setdefault((times, int(problem.memory_limit_bytes[device])), device)
    tried = TriedPlacements(problem, clock)
    tried.run(np.full(problem.num_ops, device) for device in alike.values())
    return tried.nearest()
