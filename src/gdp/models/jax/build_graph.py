"""Builds a Graph from the recorded ops of a JAX function: liveness, phases, names, updates in place, numbers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdp.graph import Graph, Op, Tensor
from gdp.graph.builder import UniqueNames, topological_order, write_after_read
from gdp.models.jax import primitive_costs as costs
from gdp.models.jax.equations import Constant, Equation, JaxOp, JaxValue


@dataclass(frozen=True, eq=False)
class JaxProgram:
    """The computation of each op of a graph: equations that make values, which have numbers. N ops."""

    equations: tuple[tuple[Equation, ...], ...]  # [N] in turn; views that an op reads are among its equations
    sources: Mapping[int, tuple[int, int]]  # by op: the number of an array among the arguments' leaves, its part or -1
    constants: Mapping[int, Any]  # by op: arrays that the function's code holds
    source_values: Mapping[int, int]  # by op: the value of a parameter, input or constant
    results: tuple[tuple[tuple[Equation, ...], "int | Constant"], ...]  # of each result: views of it, and its value


def assemble(
    name: str, records: Sequence[JaxOp], results: Sequence[JaxValue], updates: Mapping[JaxValue, JaxValue]
) -> tuple[Graph, JaxProgram, list[JaxOp]]:
    """Returns the graph, its program and its ops as recorded. `updates` maps the new value of a parameter to the one
    that it replaces."""
    live = _live(records, results)
    _mark_updates(live, {value.source for value in results})
    kept = {value.source for value in results if value.source is not None}
    in_place = _in_place(updates, kept)
    if _without_late_readers(in_place, live) != in_place:
        live = _writers_last(live, {new.op for new in in_place})
        in_place = _without_late_readers(in_place, live)
    numbers = {record: number for number, record in enumerate(live)}
    consumers: dict[JaxValue, set[int]] = defaultdict(set)
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
    made = ((new.op, old) for new, old in in_place.items() if new.op is not None)
    overwrites = ((reader, numbers[op]) for op, old in made for reader in consumers.get(old, ()))
    rows += write_after_read(len(live), rows, overwrites)
    names = _names(live)
    ops = [
        Op(
            names[number],
            record.kind,
            record.flops,
            record.bytes_accessed,
            record.dtype,
            sum(costs.num_bytes(value.aval) for value in record.outputs) if record.source in _HELD else 0,
            record.phase,
            record.module,
            groups[number],
            shapes=record.shapes,
        )
        for number, record in enumerate(live)
    ]
    program = JaxProgram(
        equations=tuple(tuple(record.equations) for record in live),
        sources={numbers[record]: record.origin for record in live if record.source in ("parameter", "input")},
        constants={numbers[record]: record.constant for record in live if record.source == "constant"},
        source_values={numbers[record]: record.outputs[0].number for record in live if record.source},
        results=tuple((value.equations, value.operand) for value in results),
    )
    return Graph.build(name, ops, rows), program, live


_HELD = ("parameter", "constant")


def _live(records: Sequence[JaxOp], results: Sequence[JaxValue]) -> list[JaxOp]:
    """Leaves out ops that no result needs: XLA drops them, too."""
    needed = {value.source for value in results}
    live: list[JaxOp] = []
    for record in reversed(records):
        if record.source in ("parameter", "input") or any(value in needed for value in record.outputs):
            needed.update(record.reads)
            live.append(record)
    return live[::-1]


def _mark_updates(records: Sequence[JaxOp], results: set[JaxValue | None]) -> None:
    """Marks as update the ops that follow from backward ops and lead to none, and the ops that only these need."""
    leads_to_backward: set[JaxOp] = set()
    for record in reversed(records):
        if record.phase == "backward" or record in leads_to_backward:
            leads_to_backward.update(value.op for value in record.reads if value.op is not None)
    follows: set[JaxOp] = set()
    for record in records:
        makers = [value.op for value in record.reads]
        if any(maker in follows or (maker is not None and maker.phase == "backward") for maker in makers):
            follows.add(record)
            if record.phase == "forward" and record not in leads_to_backward:
                record.phase = "update"
    readers: dict[JaxOp, set[str]] = defaultdict(set)
    for record in reversed(records):
        is_result = any(value in results for value in record.outputs)
        if record.phase == "forward" and not record.source and readers[record] == {"update"} and not is_result:
            record.phase = "update"
        for value in record.reads:
            if value.op is not None:
                readers[value.op].add(record.phase)


def _in_place(updates: Mapping[JaxValue, JaxValue], kept: set[JaxValue]) -> dict[JaxValue, JaxValue]:
    """Maps new values to the parameters that they replace, one for each, if an op of the update makes them."""
    replacements: dict[JaxValue, JaxValue] = {}
    for new, old in updates.items():
        source = new.source
        is_made = source is not None and source.op is not None and source.op.phase == "update"
        is_free = source not in replacements and old.op is not None and old not in replacements.values()
        if is_made and is_free and source in kept:
            assert source is not None
            replacements[source] = old
    return replacements


def _without_late_readers(in_place: Mapping[JaxValue, JaxValue], records: Sequence[JaxOp]) -> dict[JaxValue, JaxValue]:
    """Drops updates in place of values that an op reads after the new value is made: both are needed at once."""
    last: dict[JaxValue, JaxOp] = {}
    for record in records:
        last.update(dict.fromkeys(record.reads, record))
    place = {record: number for number, record in enumerate(records)}
    return {
        new: old
        for new, old in in_place.items()
        if new.op is not None and (old not in last or place[last[old]] <= place[new.op])
    }


def _writers_last(records: Sequence[JaxOp], writers: set[JaxOp | None]) -> list[JaxOp]:
    """Returns the ops in a topological order in which `writers` come as late as they can."""
    numbers = {record: number for number, record in enumerate(records)}
    makers = [{numbers[value.op] for value in record.reads if value.op is not None} for record in records]
    return [records[number] for number in topological_order(makers, lambda number: records[number] in writers)]


def _names(records: Sequence[JaxOp]) -> list[str]:
    """Names ops `encoder.layer_3.dot_general_0`, `encoder.layer_3.dot_general_backward_1`, ...; sources have names."""
    names, unique = [], UniqueNames()
    for record in records:
        suffix = "" if record.phase == "forward" else f"_{record.phase}"
        names.append(unique.of(record.name, f"{record.module}.{record.kind}{suffix}"))
    return names
