"""Refinement: placements near a good one, in which a part of the units chooses devices again.

    placement --group--> units --a part rolls out again, in several styles--> placements

N ops, S placements.
"""

from dataclasses import dataclass, field

import numpy as np

from gdp.arrays import I64
from gdp.policy.construction import Constructor
from gdp.policy.sampling import draw_refinement
from gdp.simulator.problem import Placement, Problem

NUM_UNITS = (25, 50, 100, 200, 400, 800)  # in a grouping, in turn


@dataclass(eq=False)
class Refiner:
    """Refines placements of `problem`; each call regroups it into different units."""

    problem: Problem
    constructor: Constructor
    num_units: tuple[int, ...] = NUM_UNITS
    _turn: int = field(default=0, init=False)

    def propose(self, incumbent: Placement, count: int, rng: np.random.Generator) -> I64:
        """Returns 1 to `count` placements [S, N] that differ from `incumbent` [N], if any was found."""
        num_units = self.num_units[self._turn % len(self.num_units)]
        self._turn += 1
        instance = self.constructor.grouped(self.problem, num_units, rng, incumbent=incumbent)
        drawn = self.constructor.place(instance, [draw_refinement(rng) for _ in range(count)], rng)
        changed = drawn[(drawn != incumbent).any(axis=1)]
        return changed[distinct(changed)] if len(changed) else drawn[:1]


def distinct(placements: I64) -> I64:
    """Returns the numbers of the `placements` [S, N] that are not like an earlier one."""
    first = {placement.tobytes(): number for number, placement in reversed(list(enumerate(placements)))}
    return np.sort(np.fromiter(first.values(), np.int64, len(first)))
