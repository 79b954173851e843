"""The ranks of a job as processes, forked from a server that has PyTorch loaded and no threads."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 60
PRELOADED = [
    "torch._dynamo",  # takes time in a capture
    "execute.rank_jobs",
    "execute.placed_jobs",
    "execute.killed_training",
    "execute.left_out_of_garbage",
]


def fork_server() -> ForkServerContext:
    """Returns the context of processes that begin with PyTorch loaded."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or PyTorch adds stack traces to the line of an error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_ranks(target: Callable[..., None], out: Path, count: int, job: str, *args: Any) -> list[BaseProcess]:
    """Starts `target(out, environment, job, *args)` on each rank."""
    context = fork_server()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    ranks = [
        context.Process(target=target, args=(out, {**shared, "RANK": str(rank)}, job, *args)) for rank in range(count)
    ]
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
