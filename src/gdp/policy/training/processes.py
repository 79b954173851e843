"""The processes that train together: this one alone, or the processes that torchrun started.

Each takes a share of an update's problems; their gradients are added up, so that all take the same steps.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gdp.simulator.simulate import default_threads

T = TypeVar("T")


class Processes:
    """This process alone, or, from `join`, with others. Close a group of several, or use it in a `with` statement."""

    def __init__(self, rank: int = 0, count: int = 1, local_rank: int = 0, num_local: int = 1) -> None:
        self.rank, self.count, self.num_local = rank, count, num_local
        self.device = torch.device("cpu")  # where the policy should be
        if torch.cuda.is_available() and torch.cuda.device_count() >= num_local:
            self.device = torch.device("cuda", local_rank)
        if count > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @classmethod
    def join(cls) -> "Processes":
        """Joins torchrun's processes if it started this one; else this one is alone.

        They exchange through NCCL if each process of a host has a GPU of its own, else through gloo.
        """
        defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        return cls(*(int(os.environ.get(name, default)) for name, default in defaults.items()))

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the others."""
        if self.count > 1:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """True for the process that reads, writes and reports."""
        return self.rank == 0

    @property
    def num_threads(self) -> int:
        """This process's share of the host's processors."""
        return max(1, default_threads() // self.num_local)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Returns this process's part of `items`: every count-th, from its rank on."""
        return items[self.rank :: self.count]

    def sum(self, tensor: Tensor) -> None:
        """Adds up `tensor` over the processes, in place."""
        if self.count > 1:
            self._exchange(tensor, lambda moved: dist.all_reduce(moved))

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is true in one of the processes."""
        total = torch.tensor(float(flag))
        self.sum(total)
        return bool(total)

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Gives each of `tensors` the first process's values, in place."""
        if self.count > 1:
            for tensor in tensors:
                self._exchange(tensor, lambda moved: dist.broadcast(moved, 0))

    def _exchange(self, tensor: Tensor, exchange: Callable[[Tensor], object]) -> None:
        moved = tensor.detach().to(self.device).contiguous()
        exchange(moved)
        with torch.no_grad():
            tensor.copy_(moved)
