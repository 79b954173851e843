"""Signature: the work of an op as text, so that equal work has one measured time in all models.

    aten.mm.default(float32[64, 512], float32[512, 2048] strides 1, 512)

It has shapes, strides, types and other arguments of each call; no content of tensors, names or seeds."""

from typing import Any

import torch
from torch import Tensor

from gdp.models.pytorch.program import Program
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.strides import StridedLayout, contiguous

LIBRARY = f"torch {torch.__version__}"  # the library whose kernels a time was measured with


def signatures(program: Program) -> tuple[str, ...]:
    """[N] the signature of each op."""
    return tuple(_signature(program, op) for op in range(program.graph.num_ops))


def _signature(program: Program, op: int) -> str:
    source = program.sources.get(op)
    if source is not None:
        return f"{source.kind} {_layout(program.layouts[program.tensor_values[source.tensor]])}"
    return "; ".join(_call(program, call) for call in program.calls[op])


def _call(program: Program, call: Call) -> str:
    words = [_argument(program, item) for item in call.args]
    words += [f"{key}={_argument(program, item)}" for key, item in call.kwargs.items()]
    return f"{call.func}({', '.join(words)})"


def _argument(program: Program, item: Any) -> str:
    if isinstance(item, Ref):
        return _layout(item.layout or program.layouts[item.value])
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(_argument(program, part) for part in item)}]"
    if isinstance(item, Tensor):
        return _layout(StridedLayout(tuple(item.shape), item.stride(), 0, item.dtype))
    return str(item)


def _layout(layout: StridedLayout) -> str:
    text = f"{str(layout.dtype).removeprefix('torch.')}{list(layout.size)}"
    dense = zip(layout.size, layout.stride, contiguous(layout.size, layout.dtype).stride, strict=True)
    is_dense = all(size == 1 or stride == expected for size, stride, expected in dense)
    return text if is_dense else f"{text} strides {list(layout.stride)}"
