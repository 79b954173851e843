"""Everything on one device."""

import numpy as np

from gdp.placers.memory_repair import excess_bytes
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import evaluate_many


def single(problem: Problem, seed: int = 0) -> Placement | None:
    """Places all ops on the fastest device where they fit; None if no device may run all ops."""
    devices = np.flatnonzero(problem.allowed.all(axis=0))
    if not len(devices):
        return None
    alike: dict[tuple[bytes, int], int] = {}  # the first device of each kind and memory
    for device in devices.tolist():
        alike.setdefault((problem.op_time_ns[:, device].tobytes(), int(problem.memory_limit_bytes[device])), device)
    candidates = np.repeat(np.array(list(alike.values()))[:, None], problem.num_ops, axis=1)
    times, peaks = evaluate_many(problem, candidates)
    best: Placement = candidates[np.lexsort((times, excess_bytes(problem, peaks)))[0]]
    return best
