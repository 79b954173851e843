"""Screening: selects, of many placements, those to simulate. They should fit in memory and have low bounds.

A bound costs a tenth of a simulation. N ops, S placements, D devices.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gdp.arrays import F64, I64
from gdp.bounds.placement_bound import placement_bounds
from gdp.simulator.problem import Problem

_BOLD = 4  # one in four is selected by its bound alone: the estimate of memory can be wrong where memory is tight


@dataclass(eq=False)
class Screen:
    """Ranks placements of `problem`; it learns from simulated ones which share of all allocations is alive at once."""

    problem: Problem
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=256))  # peaks over what would be filled

    def most_promising(self, placements: I64, count: int) -> I64:
        """Returns the numbers [at most count] of the most promising of `placements` [S, N], each placement once."""
        first = {placement.tobytes(): number for number, placement in reversed(list(enumerate(placements)))}
        once = np.sort(np.fromiter(first.values(), np.int64, len(first)))
        if len(once) > count:
            peak_per_filled = float(np.median(self._seen)) if self._seen else 0.0
            is_full = self._filled(placements[once]) * peak_per_filled > 1.0
            bounds = placement_bounds(self.problem, placements[once])
            fitting = once[np.lexsort((bounds, is_full))]
            bold = once[np.argsort(bounds, kind="stable")][: count // _BOLD]
            careful = fitting[~np.isin(fitting, bold)][: count - len(bold)]
            once = fitting[np.isin(fitting, bold) | np.isin(fitting, careful)]
        return once[:count]

    def learn(self, placements: I64, peak_memory_bytes: I64) -> None:
        """Learns from `placements` [S, N] that were simulated and their peaks [S, D]."""
        full = (peak_memory_bytes / np.maximum(self.problem.memory_limit_bytes, 1)).max(axis=1)
        self._seen.extend((full / np.maximum(self._filled(placements), 1e-9)).tolist())

    def _filled(self, placements: I64 | Sequence[I64]) -> F64:
        """Returns [S] the filled share of the fullest device if all that is ever allocated there were alive at once."""
        held = self.problem.graph.resident_bytes + self.problem.simulator.arrays.memory.alloc_bytes
        devices = self.problem.num_devices
        filled = np.stack([np.bincount(placement, held, devices) for placement in placements])
        return np.asarray((filled / np.maximum(self.problem.memory_limit_bytes, 1)).max(axis=1), np.float64)
