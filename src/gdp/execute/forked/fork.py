"""Forking beside other threads: a child has their locks as they are at that moment, and nobody who gives them back."""

import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LONGEST_S = 1.0  # until a process is forked although others run; a thread holds such a lock for a microsecond
_LOOK_S = 0.0005


def start(child: BaseProcess) -> None:
    """Forks a process while no other thread runs; Ctrl-C waits, or the child would tell of it before it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        await_other_threads()
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_other_threads() -> None:
    """Waits until no other thread of this process runs, those too that Python takes for ended.

    MKL frees a thread's memory as the thread ends, under a lock without an owner: a child forked just then would wait
    for it for ever.
    """
    until = time.monotonic() + _LONGEST_S
    while _others_run() and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _others_run() -> bool:
    own = str(threading.get_native_id())
    return any(_state(task) in "RD" for task in os.listdir(_TASKS) if task != own)


def _state(task: str) -> str:
    """Returns the letter of a thread's state in the kernel; X if it has ended."""
    try:
        return (_TASKS / task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
