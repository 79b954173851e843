"""Candidates: placements with their figures, ordered. All searches compare placements by them."""

from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64
from gdp.simulator.orders import B_LEVEL
from gdp.simulator.problem import Placement
from gdp.simulator.simulate import NEVER, Simulation


@dataclass(frozen=True, slots=True, order=True)
class Figures:
    """Figures to compare placements by: fit first, then be fast."""

    excess_bytes: int = NEVER  # over the memory limits, summed over devices
    step_time_ns: int = NEVER

    @property
    def fits(self) -> bool:
        """True if no memory limit is passed."""
        return self.excess_bytes == 0


UNKNOWN = Figures()
"""Of a placement that was not simulated: worse than any."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placement, how its ops are started, and its figures; the lesser of two candidates is the better one."""

    placement: Placement  # [N]
    figures: Figures = UNKNOWN
    priority: I64 | None = None  # [N] by which ready ops are started; None: the problem's, in `order`
    order: str = B_LEVEL  # of micro-batches
    simulation: Simulation | None = None  # the step in full, if it was kept

    def __lt__(self, other: "Candidate") -> bool:
        return self.figures < other.figures

    @property
    def fits(self) -> bool:
        """True if no memory limit is passed."""
        return self.figures.fits

    @property
    def step_time_ns(self) -> int:
        return self.figures.step_time_ns

    @property
    def replay(self) -> Simulation:
        """The step in full; ValueError if it was not kept."""
        if self.simulation is None:
            raise ValueError("candidate: its simulation was not kept; make it with `Question.replay`")
        return self.simulation

    @classmethod
    def start(cls, simulation: Simulation) -> "Candidate":
        """Returns the placement of `simulation` to begin a search from, with a priority that runs the step again."""
        position = np.empty(len(simulation.placement), np.int64)
        for ops in simulation.order:
            position[ops] = np.arange(len(ops))
        priority = np.empty(len(position), np.int64)
        priority[np.lexsort((position, simulation.op_start_ns))[::-1]] = np.arange(len(position))
        return cls(simulation.placement, priority=priority)
