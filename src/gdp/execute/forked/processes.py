"""Forking beside other threads: a child has their locks as they are at that moment, and nobody who gives them back."""

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Hashable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gdp.execute.ranks.connections import bytes_of

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
    """Waits until no other thread of this process runs, including threads that Python takes for ended.

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


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc's malloc.h
_MAX_BYTES = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Keeps glibc from giving memory back to the system, which would map it anew, page by page, in each step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries have none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _MAX_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAX_BYTES)


_BLOCK_BYTES = 64 << 20  # of addresses; the memory is there when it is first written
_ALIGNMENT = 64  # of the processor's cache lines


class SharedMemory:
    """Makes tensors before processes are forked."""

    def __init__(self) -> None:
        self._block = mmap.mmap(-1, _BLOCK_BYTES)
        self._next = 0

    def like(self, template: Tensor) -> Tensor:
        """Returns zeros with the layout of `template`, in storage of their own."""
        num_bytes = template.untyped_storage().nbytes()
        if not num_bytes:
            return torch.zeros_like(template)
        if self._next + num_bytes > len(self._block):
            self._block, self._next = mmap.mmap(-1, max(num_bytes, _BLOCK_BYTES)), 0
        count = num_bytes // template.element_size()
        memory = torch.frombuffer(self._block, dtype=template.dtype, count=count, offset=self._next)
        self._next += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return memory.as_strided(template.shape, template.stride(), template.storage_offset())


def send_tensors(connection: Connection, tensors: Mapping[Any, Tensor]) -> None:
    """Sends tensors of the CPU by key."""
    connection.send([(key, item.dtype, tuple(item.shape), item.stride()) for key, item in tensors.items()])
    for item in tensors.values():
        if item.numel():
            connection.send_bytes(bytes_of(item.detach()).numpy().data)


def receive_tensors(connection: Connection) -> dict[Any, Tensor]:
    """Receives the tensors of `send_tensors`, in memory of their own."""
    tensors: dict[Hashable, Tensor] = {}
    for key, dtype, size, stride in connection.recv():
        tensors[key] = memory = torch.empty_strided(size, stride, dtype=dtype)
        if memory.numel():
            connection.recv_bytes_into(bytes_of(memory).numpy().data)
    return tensors
