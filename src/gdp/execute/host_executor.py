"""The executor of a plan on the devices of this host: forked processes for single cores, threads for others."""

from collections.abc import Callable, Mapping, Sequence

import numpy.typing as npt
from torch import Tensor

from gdp.execute.forked.forked_executor import ForkedExecutor, may_fork
from gdp.execute.plan_executor import HostExecutor
from gdp.execute.targets import Target, find_targets
from gdp.execute.threads import ThreadExecutor
from gdp.execute.worker import ExecutionError
from gdp.models.pytorch import Program


def host_executor(program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> HostExecutor:
    """Makes an executor of the program on `targets` [D]."""
    if may_fork(targets):
        return ForkedExecutor(program, order, targets)
    return ThreadExecutor(program, order, targets)


class HostRunner:
    """Runs a training on the devices of this host; `on` as in `find_targets`."""

    is_alone = is_first = True

    def __init__(self, names: Sequence[str], on: Sequence[str] | None) -> None:
        self._targets = find_targets(names, on)
        self._executor: HostExecutor | None = None

    def start(
        self, program: Program, order: Sequence[npt.ArrayLike], _start: Mapping[str, Tensor], _settings: object
    ) -> HostExecutor:
        """Makes an executor."""
        self._executor = host_executor(program, order, self._targets)
        return self._executor

    def write_once(self, write: Callable[[], None]) -> None:
        """Writes."""
        write()

    def error_of_all(self, what: str, note: str) -> ExecutionError:
        """Returns the error."""
        return ExecutionError("all", what, note=note)

    def leave(self, _error: BaseException) -> None:
        """Ends the executor."""
        self.close()

    def close(self) -> None:
        """Ends the executor."""
        if self._executor is not None:
            self._executor.close()
