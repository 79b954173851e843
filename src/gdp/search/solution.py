"""Solution: what a solver answers."""

from collections.abc import Mapping
from typing import NamedTuple

from gdp.search.candidate import Candidate
from gdp.simulator.plan import Baseline


class Solution(NamedTuple):
    """The best candidate, of the problem as given, and what else was run."""

    best: Candidate | None  # None: no placement was found at all
    baselines: Mapping[str, Baseline] = {}
    num_updates: int = 0  # of a policy that was trained
