"""The ops and values that are recorded of a step.

A write can become one more call of the op that made the memory: conv and relu_ are one op.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gdp.models.pytorch.recorded_calls import Call
from gdp.models.pytorch.strides import StridedLayout
from gdp.models.pytorch.traits import BLANKS


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


@dataclass(eq=False, slots=True)
class ValueRecord:
    """The content of a memory between two writes."""

    producer: OpRecord
    layout: StridedLayout
    num_bytes: int
    owner: OpRecord | None  # the source whose resident memory it is in
    readers: list[OpRecord] = field(default_factory=list)


PENDING = OpRecord(-1, "", "", "")
"""Stands for the op of a value until that is recorded."""


def layout_of(tensor: Tensor) -> StridedLayout:
    """Returns sizes, strides, offset and type of a tensor in its memory."""
    return StridedLayout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def dtype_name(tensors: Iterable[Tensor]) -> str:
    """Returns the type of an op's arithmetic: of the first float tensor that it makes, writes or reads; else int64."""
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return str(tensor.dtype).removeprefix("torch.")
    return "int64"


def maker_to_join(values: list[ValueRecord], record: OpRecord, overwritten: list[int]) -> OpRecord | None:
    """Returns the op that `record`, which overwrites these values, becomes a call of; None: it is an op of its own."""
    if len(overwritten) != 1 or record.outputs or record.phase == "update":
        return None
    (value,) = overwritten
    old = values[value]
    maker = old.producer
    if old.owner is not None or maker.source or old.readers or maker.phase != record.phase:
        return None
    can_wait = not maker.reads and maker.outputs == [value]
    return maker if can_wait or _is_available(values, record, maker) else None


def _is_available(values: list[ValueRecord], record: OpRecord, maker: OpRecord) -> bool:
    """Returns whether `record` could run at the place of `maker`: all that it reads is made there or before."""
    return all(values[value].producer.position <= maker.position for value in record.reads)


def joined(values: list[ValueRecord], records: list[OpRecord], maker: OpRecord, writer: OpRecord) -> OpRecord:
    """Joins two ops into one, at the maker's place, or at the writer's if that reads values made in between."""
    whole = maker
    old = writer.calls[-1].writes[0][0]
    if not _is_available(values, writer, maker):
        whole = OpRecord(writer.position, maker.kind, maker.module, maker.phase, dtype=maker.dtype)
        whole.outputs, maker.outputs = maker.outputs, []
        whole.flops, whole.bytes_accessed = maker.flops, maker.bytes_accessed
        whole.calls, maker.calls = maker.calls, []
        records.append(whole)
    if maker.kind in BLANKS:
        whole.kind, whole.module, whole.dtype = writer.kind, writer.module, writer.dtype
    whole.calls += writer.calls
    whole.outputs = [value for value in whole.outputs if value != old] + writer.outputs
    whole.flops += writer.flops
    whole.bytes_accessed += writer.bytes_accessed
    for value, layouts in writer.reads.items():
        if values[value].producer is not maker:
            whole.reads.setdefault(value, {}).update(layouts)
    return whole


def experts_per_token(values: list[ValueRecord], record: OpRecord) -> int | None:
    """Returns the number of experts that a token of a grouped product is sent to.

    It is the `k` of the nearest `topk` that the groups' sizes are computed from; None if there is none.
    """
    waiting, seen = deque([record]), {record}
    while waiting:
        one = waiting.popleft()
        for call in one.calls:
            if call.func is torch.ops.aten.topk.default:
                return int(call.args[1])
        for value in one.reads:
            producer = values[value].producer
            is_weight = values[value].owner is not None
            if producer not in seen and producer is not PENDING and not is_weight:
                seen.add(producer)
                waiting.append(producer)
    return None
