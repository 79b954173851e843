"""RankRunner: this process's part in a training that torchrun started, and the messages at its end. An error that ends
the script on one rank ends it on all, and one rank prints it in one line. An error that is none of gdp's has its
traceback before that line."""

import atexit
import contextlib
import hashlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from gdp.errors import InputError
from gdp.execute.plan_executor import ExecutionError
from gdp.execute.ranks.rank_executor import ProcessExecutor
from gdp.execute.ranks.ranks import RankError, join_or_leave
from gdp.models.pytorch import Program
from gdp.models.pytorch.strides import bytes_of

_JOIN_SECONDS = 600.0  # for scripts that load data before they place a model


class RankRunner:
    """Runs a training with a process for each of the devices `names`; `on` as in `find_targets`."""

    is_alone = False

    def __init__(self, names: Sequence[str], on: Sequence[str] | None) -> None:
        self._ranks = join_or_leave(names, on, timeout_seconds=_JOIN_SECONDS, in_script=True)
        self._ranks.__enter__()
        self.is_first = self._ranks.is_first
        self._executor: ProcessExecutor | None = None
        self._has_left = False
        self._previous_hook = sys.excepthook
        sys.excepthook = self._tell
        atexit.register(self._close_at_exit)

    def start(
        self, program: Program, order: Sequence[npt.ArrayLike], start: Mapping[str, Tensor], settings: object
    ) -> ProcessExecutor:
        """Makes an executor. InputError unless all ranks start from the same."""
        digest = hashlib.sha256(repr(settings).encode())
        for name in sorted(start):
            digest.update(name.encode())
            digest.update(bytes_of(start[name].detach().cpu().contiguous()).numpy().data)
        what = (
            "its process has other parameters, options or another batch than others have; call torch.manual_seed alike "
            "on all ranks before the model is made, and give each the whole batch"
        )
        self._ranks.check_alike(digest.hexdigest(), what)
        timeout_seconds = dist.default_pg_timeout.total_seconds()  # a rank may evaluate, or write, for long
        self._executor = ProcessExecutor(program, order, self._ranks, timeout_seconds=timeout_seconds)
        return self._executor

    def write_once(self, write: Callable[[], None]) -> None:
        """Writes on the first rank, while the others wait; an InputError is raised on all."""
        try:
            (self._executor or self._ranks).act_once(write)
        except InputError:
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def error_of_all(self, what: str, note: str) -> RankError:
        """Returns the error that all ranks raise alike, which the first one prints."""
        return RankError("all", what, note=note, is_reporter=self.is_first)

    def leave(self, error: BaseException) -> None:
        """Ends the run on all ranks for `error`, or raises the failure elsewhere that led to an interrupt."""
        if self._has_left:
            return
        try:
            try:
                self._ranks.leave(error)
            except KeyboardInterrupt:  # by torchrun, while it ends
                self._ranks.leave(error)
        finally:
            self._has_left = True
            self._ranks.close()

    def close(self) -> None:
        """Ends the executor, together with all ranks, and leaves the group of processes."""
        if self._has_left:
            return
        self._has_left = True
        try:
            if self._executor is not None:
                self._executor.close()
        finally:
            self._ranks.close()
            atexit.unregister(self._close_at_exit)
            if self._ranks.error is None and sys.excepthook == self._tell:
                sys.excepthook = self._previous_hook

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Prints an error that nobody has caught, on one rank, and ends all."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_told = False
        if isinstance(error, InputError | ExecutionError) and not isinstance(error, RankError):
            with contextlib.suppress(RuntimeError):  # while there is a store: it may end with the first rank
                is_told = not self._ranks.is_first_to_say(str(error))
        try:
            self.leave(error)
        except RankError as failure:
            error = failure
        if isinstance(error, KeyboardInterrupt) and self._ranks.error is not None:
            error = self._ranks.error
        if isinstance(error, RankError):
            _print_line(error)
        elif isinstance(error, InputError | ExecutionError):
            if not is_told:
                print(f"gdp: error: {error}", file=sys.stderr, flush=True)
        else:
            self._previous_hook(kind, error, trace)
            if self._ranks.error is not None:
                _print_line(self._ranks.error)

    def _close_at_exit(self) -> None:
        """Closes it for a script that has not."""
        try:
            self.close()
        except RankError as error:
            _print_line(error)


def _print_line(error: RankError) -> None:
    if error.is_reporter:
        print(f"gdp: error: {error}", file=sys.stderr, flush=True)
