"""RivalProcesses: the processes of an arm, which stay alive and train a step when they are told to.

    this process --"step GPipe"--> rank 0, rank 1 --barrier, step--> (start, finish, loss) of each

A step lasts from the first start to the last finish. Between steps the processes wait and use no processor, so that
arms can take turns.
"""

import contextlib
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from benchmarks.rival_stages import CutError
from benchmarks.rival_steps import ARMS, RivalSetting, TakeStep
from gdp.errors import first_line

_STOP_SECONDS = 5.0  # for a process that was told to end, and for the failure of the others after one


Answer = tuple[int, int, float | None]
"""When a step began and ended, and the loss; a process that fails answers with the reason."""


class RivalError(Exception):
    """An arm that cannot train the model; the text says why."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """The time of a step, and the mean loss before it."""

    time_ns: int
    loss: float


class RivalProcesses:
    """The processes of the arm `arm`; rank r is pinned to `cores[r]` and has as many threads. A context manager.

    They import the main module again: a script that makes them does so under `if __name__ == "__main__"`.
    """

    def __init__(self, arm: str, setting: RivalSetting, cores: Sequence[Sequence[int]]) -> None:
        self.arm = arm
        self._stack = contextlib.ExitStack()
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gdp-bench-"))
        context = multiprocessing.get_context("forkserver")  # which imports PyTorch once for all
        context.set_forkserver_preload([__name__])
        self._ranks: list[tuple[Any, Connection]] = []
        for rank in range(ARMS[arm].num_processes):
            here, there = context.Pipe()
            settings = (arm, setting, rank, tuple(cores[rank]), str(Path(scratch) / "store"), there)
            process = context.Process(target=_serve, args=settings, name=f"gdp-{arm}-{rank}", daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def step(self, variant: str) -> TrainedStep:
        """Trains a step; the first one of a variant makes it.

        RivalError if it fails. Other variants may go on if it failed in all processes; else they are ended.
        """
        if not self._ranks:
            raise RivalError(f"{self.arm}: its processes have ended")
        try:
            for _, connection in self._ranks:
                connection.send(variant)
            answers = self._answers()
        except OSError:
            self._end()
            raise RivalError(f"{self.arm}: a process has ended") from None
        except BaseException:  # an interrupt, or a failure
            self._end()
            raise
        if isinstance(answers, str):
            raise RivalError(answers)
        starts, finishes, losses = zip(*answers, strict=True)
        known = [loss for loss in losses if loss is not None]
        return TrainedStep(max(finishes) - min(starts), sum(known) / len(known))

    def close(self) -> None:
        """Ends the processes, which wait for a step."""
        for process, connection in self._ranks:
            connection.close()
            process.join(_STOP_SECONDS)
        self._end()

    def _end(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            if process.exitcode is None:
                process.kill()
            process.join()
        self._ranks = []
        self._stack.close()

    def _answers(self) -> list[Answer] | str:
        """Returns the answer of each rank, or the failure of all; RivalError if only some have failed."""
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        found: dict[int, Answer | str] = {}
        failure, until = "", None
        while waiting:
            ready_ones = wait(list(waiting), None if until is None else max(until - time.monotonic(), 0.0))
            if not ready_ones:  # others wait for the one that failed
                raise RivalError(failure)
            for ready in ready_ones:
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    found[rank] = answer = ready.recv()
                except (EOFError, OSError):
                    raise RivalError(failure or f"{self.arm}: process {rank} has ended") from None
                if isinstance(answer, str) and not failure:
                    failure, until = answer, time.monotonic() + _STOP_SECONDS
        answers = [answer for _, answer in sorted(found.items()) if not isinstance(answer, str)]
        if failure and answers:
            raise RivalError(failure)
        return failure or answers


def _serve(
    arm: str, setting: RivalSetting, rank: int, cores: tuple[int, ...], store: str, connection: Connection
) -> None:
    """Trains steps until the connection is closed: the main function of a process."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(len(cores), 1))
    num_processes = ARMS[arm].num_processes
    made: dict[str, TakeStep] = {}
    gc.disable()
    if num_processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    while True:
        try:
            variant = connection.recv()
        except (EOFError, OSError):
            break
        try:
            if variant not in made:
                made[variant] = ARMS[arm].make(setting, rank, variant)
            if num_processes > 1:
                dist.barrier()
            start_ns = time.perf_counter_ns()
            loss = made[variant]()
            answer: Answer | str = (start_ns, time.perf_counter_ns(), loss)
        except CutError as error:
            answer = str(error)
        except Exception as error:  # whatever PyTorch raises is the reason
            answer = f"{type(error).__name__}: {first_line(error)}"
        with contextlib.suppress(OSError):
            connection.send(answer)
        gc.collect(0)
    os._exit(0)  # without waiting for others, which may be gone
