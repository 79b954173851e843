"""The ops and values that are recorded of a step."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gdp.graph.shapes import Argument, Array, call_text
from gdp.models.pytorch.recorded_calls import Call
from gdp.models.pytorch.strides import StridedLayout


@dataclass(eq=False, slots=True)
class OpRecord:
    """An op being recorded. `reads`: by value, the layouts read, in order; None among them is the value as made."""

    position: int
    kind: str
    module: str
    phase: str
    name: str = ""  # "": to be made from module and kind
    calls: list[Call] = field(default_factory=list)
    reads: dict[int, dict[StridedLayout | None, None]] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    overwrites: list[int] = field(default_factory=list)  # values whose earlier readers come first
    owners: list["OpRecord"] = field(default_factory=list)  # sources with memory on the same device
    private: list[int] = field(default_factory=list)
    updates: str = ""  # the parameter that it updates by an optimizer's rule
    flops: int = 0
    bytes_accessed: int = 0
    resident_bytes: int = 0
    dtype: str = "float32"
    source: str = ""  # parameter, buffer, input or ""
    views: dict[str, StridedLayout] = field(default_factory=dict)
    constant: Tensor | None = None
    role: str = ""
    shapes: str = ""  # of its calls, as `gdp.graph.shapes` writes them
    after: list["OpRecord"] = field(default_factory=list)  # ops that end before it starts, beside those that it reads


@dataclass(eq=False, slots=True)
class ValueRecord:
    """The content of a memory between two writes."""

    producer: OpRecord
    layout: StridedLayout
    num_bytes: int
    owner: OpRecord | None  # the source whose resident memory it is in
    readers: list[OpRecord] = field(default_factory=list)


TF32 = "tf32"
PENDING = OpRecord(-1, "", "", "")  # stands for the op of a value until that is recorded


def layout_of(tensor: Tensor) -> StridedLayout:
    """Returns sizes, strides, offset and type of a tensor in its memory."""
    return StridedLayout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def shapes_of(kind: str, args: Any, kwargs: Mapping[str, Any], results: Iterable[Tensor]) -> str:
    """Returns the shapes of a call, as graphs carry them; lists of tensors stand for their tensors."""
    return call_text(kind, chain.from_iterable(map(_shaped, (*args, *kwargs.values()))), map(_array, results))


def _shaped(value: Any) -> list[Argument | str]:
    if isinstance(value, Tensor):
        return [_array(value)]
    if isinstance(value, (list, tuple)):
        is_plain = all(isinstance(item, (int, bool)) for item in value)
        return [tuple(map(int, value))] if is_plain else [shape for item in value for shape in _shaped(item)]
    return [int(value) if isinstance(value, (int, bool)) else None if value is None else "~"]


def _array(tensor: Tensor) -> Array:
    is_strided = tensor.layout is torch.strided
    return Array(
        str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()) if is_strided else ()
    )


def dtype_name(tensors: Iterable[Tensor]) -> str:
    """Returns the type of an op's arithmetic: of the first float tensor that it makes, writes or reads, or the first.
    There may be no tensor; then it is int64."""
    dtypes = [tensor.dtype for tensor in tensors]
    floats = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return str(next(floats, dtypes[0] if dtypes else torch.int64)).removeprefix("torch.")


def product_dtype(operand: Tensor) -> str:
    """Returns the type of products with this operand: of complex ones their parts', int8 for both 8 bit integers."""
    dtype = operand.dtype.to_real() if operand.is_complex() else operand.dtype
    return "int8" if dtype is torch.uint8 else str(dtype).removeprefix("torch.")


def rounded(dtype: str, name: str, *, is_product: bool) -> str:
    """Returns `tf32` for arithmetic in float32 that cards may round by PyTorch's settings: by default in convolutions
    and recurrent layers of cuDNN, and not in products. Attention has no kernel that rounds float32: the one that
    PyTorch takes ran at 20 TFLOP/s on an H200 beside products in TF32 (benchmarks/data/h200/step-ops.csv)."""
    if dtype != "float32":
        return dtype
    settings: Any = None
    backends: Any = torch.backends
    if is_product:
        settings = backends.cuda.matmul
    elif name.startswith(("convolution", "mkldnn_rnn_layer")):
        settings = backends.cudnn.rnn if "rnn" in name else backends.cudnn.conv
    return TF32 if settings is not None and settings.fp32_precision == TF32 else dtype


def experts_per_token(values: list[ValueRecord], record: OpRecord, num_experts: int) -> int | None:
    """Returns the number of experts that a token of a grouped product is sent to. It is the `k` of the nearest `topk`
    that the groups' sizes are computed from; None if there is none, if rows have come from other ranks, or if some of
    the experts are theirs: rows of a token are then anywhere."""
    waiting, seen = deque([record]), {record}
    while waiting:
        one = waiting.popleft()
        for call in one.calls:
            if call.func.namespace == "collective":  # rows of several ranks, each of them on its own
                return None
            if call.func is torch.ops.aten.topk.default:
                scores, count, *dim = call.args
                size = (scores.layout or values[scores.value].layout).size
                return int(count) if size[dim[0] if dim else -1] == num_experts else None
        for value in one.reads:
            producer = values[value].producer
            is_weight = values[value].owner is not None
            if producer not in seen and producer is not PENDING and not is_weight:
                seen.add(producer)
                waiting.append(producer)
    return None
