"""The ranks of a job as processes, forked from a server that has PyTorch loaded and no threads."""

import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from gdp.cli import main

PATIENCE_SECONDS = 60
PRELOADED = [
    "execute.rank_jobs",
    "execute.placed_jobs",
    "execute.killed_training",
    "execute.first_step",
    "execute.left_out_of_garbage",
]


def fork_server() -> ForkServerContext | SpawnContext:
    """Returns the context of processes that begin with PyTorch loaded."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or PyTorch adds stack traces to the line of an error
    if torch.version.cuda is not None:  # after a capture its forked processes compute no gradients
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(sys.path)
        )  # Python 3.11 does not pass it on, and leaves out what is not found
        forkserver.ensure_running()
    return context


def environments(count: int) -> list[dict[str, str]]:
    """Returns the variables that torchrun gives each rank, with a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "job", **sizes}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def start_ranks(target: Callable[..., None], out: Path, count: int, job: str, *args: Any) -> list[BaseProcess]:
    """Starts `target(out, environment, job, *args)` on each rank."""
    context = fork_server()
    ranks = [context.Process(target=target, args=(out, environment, job, *args)) for environment in environments(count)]
    for rank in ranks:
        rank.start()
    return ranks


def statuses_of(ranks: list[BaseProcess], patience_seconds: float = PATIENCE_SECONDS) -> list[int | None]:
    """Waits for all ranks, kills those that take too long, and returns the exit status of each."""
    until = time.monotonic() + patience_seconds
    for rank in ranks:
        rank.join(until - time.monotonic())
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
            rank.join()
    return [rank.exitcode for rank in ranks]


def run_command(out: Path, environment: dict[str, str], *words: str) -> None:
    """Runs `gdp` as a rank, and writes what it prints to a file in `out`."""
    os.environ.update(environment)
    os.chdir(out)
    with open(f"{environment['RANK']}.out", "w") as printed, contextlib.redirect_stdout(printed):
        status = main(words)
    sys.exit(status)
