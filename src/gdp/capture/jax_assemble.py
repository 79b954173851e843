"""From the records of a JAX function to a Graph: what is needed, phases, names, updates in place, numbers."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdp.capture import jax_costs as costs
from gdp.capture.jax_values import Constant, Equation, Record, Value
from gdp.graph import Graph, Op, Tensor


@dataclass(frozen=True, eq=False)
class JaxProgram:
    """What the ops of a graph compute: values by number, made by equations. N ops."""

    equations: tuple[tuple[Equation, ...], ...]  # [N] in turn; views that an op reads are among its equations
    sources: Mapping[int, tuple[int, int]]  # by op: the number of an array among the arguments' leaves, its part or -1
    constants: Mapping[int, Any]  # by op: arrays that the function's code holds
    source_values: Mapping[int, int]  # by op: the value of a parameter, input or constant
    results: tuple[tuple[tuple[Equation, ...], "int | Constant"], ...]  # of each result: views of it, and its value


def assemble(
    name: str, records: Sequence[Record], results: Sequence[Value], updates: Mapping[Value, Value]
) -> tuple[Graph, JaxProgram, list[Record]]:
    """The graph, what it computes and its records; `updates` has parameters' values by those that replace them."""
    live = _live(records, results)
    _mark_updates(live, {value.source for value in results})
    kept = {value.source for value in results if value.source is not None}
    in_place = _in_place(updates, kept)
    if _without_late_readers(in_place, live) != in_place:
        live = _writers_last(live, {new.op for new in in_place})
        in_place = _without_late_readers(in_place, live)
    numbers = {record: number for number, record in enumerate(live)}
    consumers: dict[Value, set[int]] = defaultdict(set)
    for record in live:
        for value in record.reads:
            consumers[value].add(numbers[record])
    groups = [-1] * len(live)
    for group, (new, old) in enumerate(in_place.items()):
        assert new.op is not None
        assert old.op is not None
        groups[numbers[old.op]] = groups[numbers[new.op]] = group
    rows = [
        Tensor(
            producer=numbers[record],
            consumers=tuple(sorted(consumers.get(value, ()))),
            bytes=costs.num_bytes(value.aval),
            resident=record.source in _HELD or value in in_place,
            keep=value in kept,
        )
        for record in live
        for value in record.outputs
        if value in consumers or value in kept or record.source
    ]
    rows += _write_after_read(in_place, consumers, numbers, rows)
    names = _names(live)
    ops = [
        Op(
            names[number], record.kind, record.flops, record.bytes_accessed, record.dtype,
            sum(costs.num_bytes(value.aval) for value in record.outputs) if record.source in _HELD else 0,
            record.phase, record.module, groups[number],
        )
        for number, record in enumerate(live)
    ]  # fmt: skip
    program = JaxProgram(
        equations=tuple(tuple(record.equations) for record in live),
        sources={numbers[record]: record.origin for record in live if record.source in ("parameter", "input")},
        constants={numbers[record]: record.constant for record in live if record.source == "constant"},
        source_values={numbers[record]: record.outputs[0].number for record in live if record.source},
        results=tuple((value.equations, value.operand) for value in results),
    )
    return Graph.build(name, ops, rows), program, live


_HELD = ("parameter", "constant")


def _live(records: Sequence[Record], results: Sequence[Value]) -> list[Record]:
    """Without what no result needs: XLA drops it, too."""
    needed = {value.source for value in results}
    live: list[Record] = []
    for record in reversed(records):
        if record.source in ("parameter", "input") or any(value in needed for value in record.outputs):
            needed.update(record.reads)
            live.append(record)
    return live[::-1]


def _mark_updates(records: Sequence[Record], results: set[Value | None]) -> None:
    """What follows from backward ops and leads to none is the update, with what only it needs."""
    leads_to_backward: set[Record] = set()
    for record in reversed(records):
        if record.phase == "backward" or record in leads_to_backward:
            leads_to_backward.update(value.op for value in record.reads if value.op is not None)
    follows: set[Record] = set()
    for record in records:
        makers = [value.op for value in record.reads]
        if any(maker in follows or (maker is not None and maker.phase == "backward") for maker in makers):
            follows.add(record)
            if record.phase == "forward" and record not in leads_to_backward:
                record.phase = "update"
    readers: dict[Record, set[str]] = defaultdict(set)
    for record in reversed(records):
        is_result = any(value in results for value in record.outputs)
        if record.phase == "forward" and not record.source and readers[record] == {"update"} and not is_result:
            record.phase = "update"
        for value in record.reads:
            if value.op is not None:
                readers[value.op].add(record.phase)


def _in_place(updates: Mapping[Value, Value], kept: set[Value]) -> dict[Value, Value]:
    """Of new values by what they replace, those that an op of the update makes, each for one parameter."""
    found: dict[Value, Value] = {}
    for new, old in updates.items():
        source = new.source
        is_made = source is not None and source.op is not None and source.op.phase == "update"
        if is_made and source in kept and source not in found and old.op is not None and old not in found.values():
            assert source is not None
            found[source] = old
    return found


def _without_late_readers(in_place: Mapping[Value, Value], records: Sequence[Record]) -> dict[Value, Value]:
    """Those of which nothing reads the old value after the new one is made: of others, both are needed at once."""
    last: dict[Value, Record] = {}
    for record in records:
        last.update(dict.fromkeys(record.reads, record))
    place = {record: number for number, record in enumerate(records)}
    return {
        new: old
        for new, old in in_place.items()
        if new.op is not None and (old not in last or place[last[old]] <= place[new.op])
    }


def _writers_last(records: Sequence[Record], writers: set[Record | None]) -> list[Record]:
    """The records in a topological order in which `writers` come as late as they can."""
    makers = {record: {value.op for value in record.reads} for record in records}
    followers: dict[Record, list[int]] = defaultdict(list)
    for number, record in enumerate(records):
        for maker in makers[record]:
            if maker is not None:
                followers[maker].append(number)
    missing = [len(makers[record]) for record in records]
    ready = [(record in writers, number) for number, record in enumerate(records) if not missing[number]]
    heapq.heapify(ready)
    ordered: list[Record] = []
    while ready:
        record = records[heapq.heappop(ready)[1]]
        ordered.append(record)
        for number in followers[record]:
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(ready, (records[number] in writers, number))
    return ordered


def _write_after_read(
    in_place: Mapping[Value, Value], consumers: Mapping[Value, set[int]], numbers: Mapping[Record, int],
    rows: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Zero-byte tensors from readers of a parameter to the op that overwrites it, where nothing else orders them."""
    bits: dict[int, int] = {}
    for place, new in enumerate(in_place):
        assert new.op is not None
        bits[numbers[new.op]] = bits.get(numbers[new.op], 0) | 1 << place
    targets: list[list[int]] = [[] for _ in numbers]
    for row in rows:
        targets[row.producer].extend(row.consumers)
    later = [0] * len(numbers)
    for op in range(len(numbers) - 1, -1, -1):
        for target in targets[op]:
            later[op] |= later[target] | bits.get(target, 0)
    control: dict[int, set[int]] = defaultdict(set)
    for place, (new, old) in enumerate(in_place.items()):
        assert new.op is not None
        writer = numbers[new.op]
        for reader in consumers.get(old, ()):
            if reader != writer and not later[reader] >> place & 1:
                control[reader].add(writer)
    return [Tensor(reader, tuple(sorted(writers))) for reader, writers in sorted(control.items())]


def _names(records: Sequence[Record]) -> list[str]:
    """`encoder.layer_3.dot_general_0`, `encoder.layer_3.dot_general_backward_1`; sources have names already."""
    counts = Counter[str]()
    names: dict[str, None] = {}
    for record in records:
        name = stem = record.name
        if not stem:
            suffix = "" if record.phase == "forward" else f"_{record.phase}"
            stem = f"{record.module}.{record.kind}{suffix}"
        while not name or name in names:
            name = f"{stem}_{counts[stem]}"
            counts[stem] += 1
        names[name] = None
    return list(names)
