"""StridedLayout: the place of a tensor in its memory, and the views and copies made from it."""

from typing import NamedTuple

import torch
from torch import Tensor

from gdp.graph.shapes import contiguous_strides


class StridedLayout(NamedTuple):
    """The place of a tensor in its memory, in elements of `dtype`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def contiguous(size: tuple[int, ...], dtype: torch.dtype) -> StridedLayout:
    """Returns the layout of a contiguous tensor."""
    return StridedLayout(size, contiguous_strides(size), 0, dtype)


def empty(layout: StridedLayout, device: torch.device | None = None, *, is_pinned: bool = False) -> Tensor:
    """Returns uninitialised memory of this layout; if pinned, a GPU copies from and to it while the host goes on."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
    num_elements = layout.offset + (span if 0 not in layout.size else 0)
    memory = torch.empty(num_elements, dtype=layout.dtype, device=device, pin_memory=is_pinned)
    return memory.as_strided(layout.size, layout.stride, layout.offset)


def fill(memory: Tensor, content: Tensor, *, non_blocking: bool = False) -> Tensor:
    """Copies `content` into `memory`, which is returned. Bytes of another size than at capture are an LSTM's workspace,
    which only the device that made it can read: it becomes zeros (`replacements.py`). Tensors that CPUs leave empty
    (sums of embedding bags have no offsets) stay empty."""
    if content.shape != memory.shape and (content.dtype == torch.uint8 or not memory.numel()):
        return memory.zero_()
    return memory.copy_(content, non_blocking=non_blocking)


def bytes_of(memory: Tensor) -> Tensor:
    """Returns the bytes that a tensor spans, gaps included; one byte for an empty tensor."""
    if memory.numel() == 0:
        return torch.zeros(1, dtype=torch.uint8, device=memory.device)
    size, dims = memory.element_size(), zip(memory.shape, memory.stride(), strict=True)
    num_bytes = size * (1 + sum((length - 1) * stride for length, stride in dims))
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return whole.set_(memory.untyped_storage(), size * memory.storage_offset(), (num_bytes,), (1,))


def view_of(whole: Tensor, layout: StridedLayout, view: StridedLayout | None) -> Tensor:
    """Returns the part `view` of the memory of `whole`, which was made with `layout`; None is all of it."""
    if view is None or view == layout:
        return whole
    if view.dtype == whole.dtype:
        return whole.as_strided(view.size, view.stride, view.offset + whole.storage_offset() - layout.offset)
    empty_view = torch.empty(0, dtype=view.dtype, device=whole.device)
    return empty_view.set_(whole.untyped_storage(), view.offset, view.size, view.stride)


def part_view(content: Tensor, part: StridedLayout, view: StridedLayout) -> Tensor:
    """Returns the view `view` of a memory from `content`, the part of it that the view covers, or a compact copy."""
    stride = view.stride if content.stride() == part.stride else compact_strides(view, part)
    return content.as_strided(view.size, stride, content.storage_offset())


def is_dense(layout: StridedLayout) -> bool:
    """Returns whether the elements lie one after the other, each once, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(layout.stride, layout.size, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def memory_order(content: Tensor, layout: StridedLayout) -> Tensor:
    """Returns the elements of `content` in the order in which `layout`, of the same sizes, has them in memory."""
    order = sorted(range(len(layout.size)), key=lambda dim: -layout.stride[dim])
    return content.permute(order).reshape(-1)


def part_layout(view: StridedLayout) -> StridedLayout | None:
    """Returns the memory that `view` covers, in the fewest dimensions, outermost first; None if it overlaps itself.
    Views of one part with different shapes (a chunk, the chunk split into heads) have the same `part_layout`."""
    strides = zip(view.stride, view.size, strict=True)
    dims = sorted(((stride, size) for stride, size in strides if size != 1 and stride != 0), reverse=True)
    merged: list[tuple[int, int]] = []
    for stride, size in dims:
        if merged and merged[-1][0] < stride * size:
            return None
        if merged and merged[-1][0] == stride * size:
            merged[-1] = (stride, merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return StridedLayout(
        tuple(size for _, size in merged), tuple(stride for stride, _ in merged), view.offset, view.dtype
    )


def compact_strides(view: StridedLayout, part: StridedLayout) -> tuple[int, ...]:
    """Returns the strides of `view` in a contiguous copy of the `part` that it covers."""
    compact, step = {}, 1
    for size, stride in zip(reversed(part.size), reversed(part.stride), strict=True):
        compact[stride] = step
        step *= size

    def stride_in_copy(size: int, stride: int) -> int:
        if size == 1 or stride == 0:
            return 0 if stride == 0 else 1
        unit = max(candidate for candidate in compact if candidate <= stride)
        return stride // unit * compact[unit]

    return tuple(stride_in_copy(size, stride) for size, stride in zip(view.size, view.stride, strict=True))


def as_recorded(tensor: Tensor, layout: StridedLayout) -> Tensor:
    """Returns `tensor` in the layout of the capture, from which views are made; other kernels may differ."""
    if tensor.stride() == layout.stride or tuple(tensor.shape) != layout.size:
        return tensor
    return empty(layout, tensor.device).copy_(tensor)
