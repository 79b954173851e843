"""SharedMemory: tensors that forked processes share; it has no name, so it ends with the last of them."""

import mmap

import torch
from torch import Tensor

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
