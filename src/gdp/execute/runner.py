"""Runner: runs a training, on this host or together with the processes that torchrun started."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy.typing as npt
from torch import Tensor

from gdp.execute.executor import TrainingExecutor
from gdp.execute.host_executor import HostExecutor, host_executor
from gdp.execute.targets import find_targets
from gdp.execute.worker import ExecutionError
from gdp.models.pytorch import Program


class Runner(Protocol):
    """Makes the executor of a training, and ends it with the script."""

    is_alone: bool  # in one process
    is_first: bool  # the process that writes

    def start(
        self, program: Program, order: Sequence[npt.ArrayLike], start: Mapping[str, Tensor], settings: object
    ) -> TrainingExecutor:
        """Makes an executor; `start` and `settings` are all that the training starts from, alike on all ranks."""

    def write_once(self, write: Callable[[], None]) -> None:
        """Writes in one process; its InputError is raised in all."""

    def error_of_all(self, what: str, note: str) -> ExecutionError:
        """Returns an error for all processes to raise, each by itself; one of them prints it."""

    def leave(self, error: BaseException) -> None:
        """Ends the executor, and all ranks, after an error in the script."""

    def close(self) -> None:
        """Ends the executor."""


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
