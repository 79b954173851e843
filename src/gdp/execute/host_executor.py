"""The executor of a plan on the devices of this host: forked processes for single cores, threads for others."""

from collections.abc import Sequence

import numpy.typing as npt

from gdp.execute.forked.executor import ForkedExecutor, may_fork
from gdp.execute.targets import Target
from gdp.execute.threads import ThreadExecutor
from gdp.models.pytorch import Program

HostExecutor = ThreadExecutor | ForkedExecutor


def host_executor(program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> HostExecutor:
    """Makes an executor of the program on `targets` [D]."""
    if may_fork(targets):
        return ForkedExecutor(program, order, targets)
    return ThreadExecutor(program, order, targets)
