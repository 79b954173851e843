"""The common part of all policies' views of a problem."""

from dataclasses import dataclass

from gdp.simulator.problem import Problem


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem with a policy's features of it, computed once; each policy has its own subclass."""

    problem: Problem
