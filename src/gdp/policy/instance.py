"""What all policies call a problem that they have looked at."""

from dataclasses import dataclass

from gdp.problem import Problem


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem as a policy sees it: its features, computed once. Policies extend it."""

    problem: Problem
