"""Builds a Graph and its Program from records: numbers, names, wholes and parts, groups, write-after-read tensors."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from gdp.costs.collectives import COLLECTIVE
from gdp.graph import Graph, Op, Tensor
from gdp.graph.builder import UniqueNames, find, write_after_read
from gdp.models.pytorch.op_records import OpRecord, ValueRecord
from gdp.models.pytorch.program import Program, StepSource
from gdp.models.pytorch.recorded_calls import Ref
from gdp.models.pytorch.recorder import Recorder
from gdp.models.pytorch.strides import StridedLayout, part_layout


def assemble(
    recorder: Recorder, name: str, outputs: Mapping[str, Ref], loss: Ref | None, gradients: Mapping[str, Ref]
) -> tuple[Graph, Program]:
    """Returns the graph and program of a recording. The loss is kept, or the outputs if there is no loss."""
    kept = [loss] if loss is not None else list(outputs.values())
    records = _live(recorder, {ref.value for ref in (*outputs.values(), *gradients.values(), *kept)})
    numbers = {record: number for number, record in enumerate(records)}
    tensors = _Tensors(recorder, records, numbers)
    for ref in (*outputs.values(), *gradients.values()):
        tensors.need(ref.value)
    for ref in kept:
        tensors.keep(ref)
    rows = tensors.rows()
    written = ((value, writer) for writer in records for value in writer.overwrites)
    pairs = ((reader, writer) for value, writer in written for reader in recorder.memories.values[value].readers)
    overwrites = ((numbers[reader], numbers[writer]) for reader, writer in pairs if reader in numbers)
    turns = ((numbers[before], numbers[op]) for op in records for before in op.after if before in numbers)
    control = write_after_read(len(records), rows, (*overwrites, *turns))
    found = zip(_names(records), records, _groups(records), strict=True)
    ops = [Op(name, *_columns(x), group, role=x.role, shapes=x.shapes) for name, x, group in found]
    graph = Graph.build(name, ops, [*rows, *control])
    keys = tensors.keys()
    base = {value: number for number, (value, layout) in enumerate(keys) if layout is None}
    program = Program(
        graph=graph,
        calls=tuple(tuple(record.calls) for record in records),
        tensor_values=tuple(value for value, _ in keys) + (-1,) * len(control),
        tensor_layouts=tuple(layout for _, layout in keys) + (None,) * len(control),
        layouts={number: value.layout for number, value in enumerate(recorder.memories.values)},
        sources={
            numbers[record]: StepSource(record.source, base[record.outputs[0]], dict(record.views), record.constant)
            for record in records
            if record.source
        },
        private={numbers[record]: tuple(record.private) for record in records if record.private},
        updated={numbers[record]: record.updates for record in records if record.updates},
        outputs=dict(outputs),
        loss=loss,
        gradients=dict(gradients),
        state_keys={value: key for value, (key, _) in recorder.state_parts.items()},
        state_copies={value: weight for value, (_, weight) in recorder.state_parts.items() if weight is not None},
        refusal="; ".join(recorder.refusals),
    )
    return graph, program


def _live(recorder: Recorder, wanted: set[int]) -> list[OpRecord]:
    """Leaves out records that joined others and memory that was reserved but never used."""

    def is_live(record: OpRecord) -> bool:
        if record.source:
            return True
        is_used = any(recorder.memories.values[value].readers or value in wanted for value in record.outputs)
        is_exchange = record.kind.startswith(COLLECTIVE)  # of averaged attention, which nobody reads
        is_work = record.bytes_accessed > 0 or record.flops > 0
        return bool(record.calls) and (is_used or (is_work and not is_exchange))

    return [record for record in recorder.memories.records if is_live(record)]


class _Tensors:
    """The tensors that the graph needs: every value that an op makes, and the parts of it that other ops read."""

    def __init__(self, recorder: Recorder, records: list[OpRecord], numbers: Mapping[OpRecord, int]) -> None:
        self.values, self.records, self.numbers = recorder.memories.values, records, numbers
        self.consumers: dict[int, dict[StridedLayout | None, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.kept: set[tuple[int, StridedLayout | None]] = set()
        for record in records:
            for value, layouts in record.reads.items():
                for layout in self._parts(value, layouts):
                    self.consumers[value][layout].add(numbers[record])

    def need(self, value: int) -> None:
        """Adds a tensor for this value, consumed or not."""
        self.consumers[value][None].update(())

    def keep(self, ref: Ref) -> None:
        """Adds a tensor for this value or part that is never freed."""
        (part,) = self._parts(ref.value, [ref.layout])
        self.consumers[ref.value][part].update(())
        self.kept.add((ref.value, part))

    def keys(self) -> list[tuple[int, StridedLayout | None]]:
        """Returns (value, part) of each tensor: the whole before its parts, in the order of ops."""
        keys: list[tuple[int, StridedLayout | None]] = []
        for record in self.records:
            for value in record.outputs:
                parts = self.consumers.get(value, {})
                if parts or self.values[value].owner is None or record.source:
                    keys.append((value, None))
                keys.extend((value, part) for part in parts if part is not None)
        return keys

    def rows(self) -> list[Tensor]:
        """Returns the graph's tensors, numbered as `keys`."""
        rows: list[Tensor] = []
        base = -1
        for value, part in self.keys():
            record = self.values[value]
            consumers = tuple(sorted(self.consumers.get(value, {}).get(part, ())))
            if part is None:
                base = len(rows)
            rows.append(
                Tensor(
                    producer=self.numbers[record.producer],
                    consumers=consumers,
                    bytes=record.num_bytes if part is None else _part_bytes(part, record),
                    resident=record.owner is not None and part is None,
                    keep=(value, part) in self.kept,
                    view_of=-1 if part is None else base,
                )
            )
        return rows

    def _parts(self, value: int, layouts: Iterable[StridedLayout | None]) -> list[StridedLayout | None]:
        """Returns the tensors that an op needs for these views of a value: the whole, or parts if these are smaller."""
        record = self.values[value]
        parts: dict[StridedLayout | None, int] = {}  # in the order read, so that equal captures number tensors equally
        for layout in layouts:
            part = None if layout is None or layout.dtype != record.layout.dtype else part_layout(layout)
            if part is None:
                return [None]
            parts[part] = _part_bytes(part, record)
        return list(parts) if sum(parts.values()) < record.num_bytes else [None]


def _part_bytes(part: StridedLayout, whole: ValueRecord) -> int:
    """Returns the bytes of a part; of a weight that is stored in fewer bits, its share of them."""
    num_bytes, in_full = (math.prod(layout.size) * layout.dtype.itemsize for layout in (part, whole.layout))
    return num_bytes if in_full <= whole.num_bytes else -(-num_bytes * whole.num_bytes // in_full)


def _columns(op: OpRecord) -> tuple[str, int, int, str, int, str, str]:
    """Returns what follows the name in an `Op`."""
    return op.kind, op.flops, op.bytes_accessed, op.dtype, op.resident_bytes, op.phase, op.module


def _groups(records: list[OpRecord]) -> list[int]:
    """Returns a number for each set of sources and writers of their memory that must share a device; else -1."""
    leader: dict[OpRecord, OpRecord] = {}
    for record in records:
        for owner in record.owners:
            first, second = find(leader, owner), find(leader, record)
            leader.setdefault(first, first)
            leader[second] = first
    numbers: dict[OpRecord, int] = {}
    return [numbers.setdefault(find(leader, record), len(numbers)) if record in leader else -1 for record in records]


def _names(records: list[OpRecord]) -> list[str]:
    """Names ops `encoder.layers.3.mm_0`, `encoder.layers.3.mm_backward_1`, ...; sources and updates have names."""
    names, unique = [], UniqueNames()
    for record in records:
        short = record.kind.rpartition(".")[2].strip("_")
        if record.phase == "backward" and not short.endswith("backward"):
            short += "_backward"
        names.append(unique.of(record.name, f"{record.module}.{short}" if record.module else short))
    return names
