"""Everything on one device."""

import numpy as np

from gdp.placers.memory_repair import excess_bytes
from gdp.problem import Placement, Problem
from gdp.simulate import evaluate_many


def single(problem: Problem, seed: int = 0) -> Placement | None:
    """All ops on the device where the step is shortest among those where it fits; None if no device may run all ops."""
    devices = np.flatnonzero(problem.allowed.all(axis=0))
    if not len(devices):
        return None
    candidates = np.repeat(devices[:, None], problem.num_ops, axis=1)
    times, peaks = evaluate_many(problem, candidates)
    best: Placement = candidates[np.lexsort((times, excess_bytes(problem, peaks)))[0]]
    return best
