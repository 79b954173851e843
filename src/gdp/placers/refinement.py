"""Placements near a good one: parts of it choose their devices again, all others in place.

    incumbent --group--> units --part of them roll out again, in several styles--> candidates --screen--> a few

N ops, S placements.
"""

from dataclasses import dataclass, field

import numpy as np

from gdp.graph import I64
from gdp.placers.screening import Screen
from gdp.policy.construction import Constructor
from gdp.policy.styles import draw_refinement
from gdp.problem import Placement, Problem

NUM_UNITS = (100, 200, 400, 800)  # that an incumbent is grouped in, in turn
NUM_CANDIDATES = 4  # drawn for each that is simulated, fewer on large graphs
_LARGE = 30_000  # ops; beyond, drawing takes longer than an answer may


def candidates_of(problem: Problem, most: int = NUM_CANDIDATES) -> int:
    """Placements to draw for each that is simulated."""
    return max(min(most, most * _LARGE // problem.num_ops), 1)


@dataclass(eq=False)
class Refiner:
    """Refines placements of `problem`, in ever other units."""

    problem: Problem
    constructor: Constructor
    screen: Screen
    num_candidates: int = NUM_CANDIDATES
    num_units: tuple[int, ...] = NUM_UNITS
    _turn: int = field(default=0, init=False)

    def propose(self, incumbent: Placement, count: int, rng: np.random.Generator) -> I64:
        """[S, N] at most `count` placements, at least one, that differ from `incumbent` [N] if any was found."""
        num_units = self.num_units[self._turn % len(self.num_units)]
        self._turn += 1
        instance = self.constructor.grouped(self.problem, num_units, rng, incumbent=incumbent)
        styles = [draw_refinement(rng) for _ in range(count * candidates_of(self.problem, self.num_candidates))]
        drawn = self.constructor.place(instance, styles, rng)
        changed = drawn[(drawn != incumbent).any(axis=1)]
        placements = changed if len(changed) else drawn[:1]
        return placements[self.screen.most_promising(placements, count)]
