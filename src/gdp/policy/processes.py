"""The processes that train together: this one alone, or those that torchrun started.

Each takes a share of an update's problems; what they compute is added up, so that all go the same way.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gdp.simulate import default_threads

T = TypeVar("T")


class Processes:
    """This process alone, or, from `join`, with others. Close those, or use them in a `with` statement."""

    def __init__(self, rank: int = 0, count: int = 1, local_rank: int = 0, num_local: int = 1) -> None:
        self.rank, self.count, self.num_local = rank, count, num_local
        self.device = torch.device("cpu")  # where the policy should be
        if torch.cuda.is_available() and torch.cuda.device_count() >= num_local:
            self.device = torch.device("cuda", local_rank)
        if count > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @classmethod
    def join(cls) -> "Processes":
        """torchrun's processes if it started this one, else this one alone.

        They talk through NCCL where each process of a host has a GPU of its own, else through gloo.
        """
        rank, count, local_rank, num_local = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        )
        return cls(rank, count, local_rank, num_local)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Part from the others."""
        if self.count > 1:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is the one that reads, writes and reports."""
        return self.rank == 0

    @property
    def num_threads(self) -> int:
        """This process's share of the host's processors."""
        return max(1, default_threads() // self.num_local)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Those of `items` that are this process's: every count-th, from its rank on."""
        return items[self.rank :: self.count]

    def sum(self, tensor: Tensor) -> None:
        """Add up `tensor` over the processes, in place."""
        if self.count > 1:
            self._exchange(tensor, lambda moved: dist.all_reduce(moved))

    def any(self, flag: bool) -> bool:
        """Whether one of the processes says so."""
        total = torch.tensor(float(flag))
        self.sum(total)
        return bool(total)

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Give each of `tensors` the first process's values, in place."""
        if self.count > 1:
            for tensor in tensors:
                self._exchange(tensor, lambda moved: dist.broadcast(moved, 0))

    def _exchange(self, tensor: Tensor, exchange: Callable[[Tensor], object]) -> None:
        moved = tensor.detach().to(self.device).contiguous()
        exchange(moved)
        with torch.no_grad():
            tensor.copy_(moved)


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operators take one thread meanwhile, simulations take all.

    They are small: two threads gain little, and wait for each other for most of the time where others use the machine
    (an update of the default policy took 0.2 s with one thread, 20 s with two, on two busy cores). Processes share the
    work better, and what is learnt does not depend on the number of processors.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
