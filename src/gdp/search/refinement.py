"""Refinement: placements near a good one, in which a part of the units chooses devices again.

    placement --group--> units --a part rolls out again, in several styles--> candidates --screen--> a few

N ops, S placements.
"""

from dataclasses import dataclass, field

import numpy as np

from gdp.arrays import I64
from gdp.policy.construction import Constructor
from gdp.policy.sampling import draw_refinement
from gdp.search.screening import Screen
from gdp.simulator.problem import Placement, Problem

NUM_UNITS = (100, 200, 400, 800)  # in a grouping, in turn
NUM_CANDIDATES = 4  # drawn for each that is simulated, fewer on large graphs
_LARGE = 30_000  # ops; beyond, drawing takes longer than an answer may


def candidates_of(problem: Problem, most: int = NUM_CANDIDATES) -> int:
    """Returns the number of placements to draw for each that is simulated."""
    return max(min(most, most * _LARGE // problem.num_ops), 1)


@dataclass(eq=False)
class Refiner:
    """Refines placements of `problem`; each call regroups it into different units."""

    problem: Problem
    constructor: Constructor
    screen: Screen
    num_candidates: int = NUM_CANDIDATES
    num_units: tuple[int, ...] = NUM_UNITS
    _turn: int = field(default=0, init=False)

    def propose(self, incumbent: Placement, count: int, rng: np.random.Generator) -> I64:
        """Returns 1 to `count` placements [S, N] that differ from `incumbent` [N], if any was found."""
        num_units = self.num_units[self._turn % len(self.num_units)]
        self._turn += 1
        instance = self.constructor.grouped(self.problem, num_units, rng, incumbent=incumbent)
        styles = [draw_refinement(rng) for _ in range(count * candidates_of(self.problem, self.num_candidates))]
        drawn = self.constructor.place(instance, styles, rng)
        changed = drawn[(drawn != incumbent).any(axis=1)]
        placements = changed if len(changed) else drawn[:1]
        return placements[self.screen.most_promising(placements, count)]
