"""ExchangedRows: elements that replicas exchange, where they lie in memory.

Devices that are threads read them there. Shared memory, gloo and GPUs get one tensor of them:

    chunk 0   | a a a a | b |       chunk 1   | b b | c c |
    joined    | a a a a   b   b b   c c . |                     chunks are filled up to the same length
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Chunk = tuple[Tensor, ...]
"""ExchangedRows of elements that go round together."""


@dataclass(frozen=True, slots=True, eq=False)
class ExchangedRows:
    """Chunks of `chunk_elements`, or of fewer."""

    chunks: tuple[Chunk, ...]
    chunk_elements: int
    dtype: torch.dtype
    device: torch.device | None = None  # None: the CPU

    def joined(self) -> Tensor:
        """Returns one tensor of all chunks; a view where they are one row."""
        parts: list[Tensor] = []
        for chunk in self.chunks:
            parts += chunk
            missing = self.chunk_elements - sum(len(row) for row in chunk)
            if missing:
                parts.append(torch.zeros(missing, dtype=self.dtype, device=self.device))
        return parts[0] if len(parts) == 1 else torch.cat(parts or [torch.empty(0, dtype=self.dtype)])

    def copy_to(self, memory: Tensor) -> None:
        """Copies the chunks into `memory`, which is as long as all of them together."""
        targets: list[Tensor] = []
        rows: list[Tensor] = []
        for number, chunk in enumerate(self.chunks):
            first = number * self.chunk_elements
            for row in chunk:
                targets.append(memory[first : first + len(row)])
                rows.append(row)
                first += len(row)
        if rows:
            torch._foreach_copy_(targets, rows)


Content = Tensor | ExchangedRows | None
"""The content of a tensor on its way to another device; None for a control tensor."""


def as_tensor(content: Content) -> Tensor | None:
    """Returns the content as one tensor."""
    return content.joined() if isinstance(content, ExchangedRows) else content
