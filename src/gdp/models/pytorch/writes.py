"""Writes that become one more call of the op that made the memory: conv and relu_ are one op."""

from gdp.models.pytorch.records import OpRecord, ValueRecord
from gdp.models.pytorch.traits import BLANKS


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
