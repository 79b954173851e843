"""Checks: what arrays must be to make a graph. The rules are in docs/machine-model.md, sections 1 and 6."""

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.arrays import I64, Bool
from gdp.errors import InputError, suggest
from gdp.graph.columns import OP_COLUMNS
from gdp.graph.copies import LONGEST_CHAIN, ROLES, roots
from gdp.graph.shapes import check_calls

if TYPE_CHECKING:
    from gdp.graph.graph import Graph

PHASES = ("forward", "backward", "update", "")


def check(graph: "Graph") -> None:
    """Raises InputError, naming the op or tensor, its value and the remedy, unless `graph` is a step."""
    num_ops, num_tensors = graph.num_ops, graph.num_tensors
    if num_ops == 0:
        raise InputError(f"graph {graph.name!r}: has no ops; a step needs at least one")

    def op_label(number: int) -> str:
        return f"op {number} {graph.op_names[number]!r}"

    if len(set(graph.op_names)) < num_ops or "" in graph.op_names:
        numbers: dict[str, int] = {}
        for number, name in enumerate(graph.op_names):
            if not name:
                raise InputError(f"op {number}: name is empty; give every op a unique name")
            if name in numbers:
                raise InputError(f"op {number}: name {name!r} is also that of op {numbers[name]}; names must be unique")
            numbers[name] = number
    for name in ("flops", "bytes_accessed", "resident_bytes", "microbatch", "replica", "kernels", "host_ns"):
        values = getattr(graph, OP_COLUMNS[name])
        lowest = int(np.argmin(values))
        if values[lowest] < 0:
            raise InputError(f"{op_label(lowest)}: {name} is {values[lowest]}; an integer of at least 0 is expected")
    if (graph.groups < -1).any():
        lowest = int(np.argmin(graph.groups))
        raise InputError(f"{op_label(lowest)}: group is {graph.groups[lowest]}; -1 (none) or a number >= 0 is expected")
    _check_copies(graph, op_label)
    for number, phase in enumerate(graph.phases if set(graph.phases) - set(PHASES) else ()):
        if phase not in PHASES:
            raise InputError(
                f"{op_label(number)}: phase is {phase!r}; one of {', '.join(map(repr, PHASES))} is expected"
            )
    for text in filter(None, dict.fromkeys(graph.shapes)):
        try:
            check_calls(text)
        except InputError as error:
            raise InputError(f"{op_label(graph.shapes.index(text))}: shapes {error}") from None
    for number, times in enumerate(graph.times_ns if any(graph.times_ns) else ()):
        for where, time_ns in times.items():
            if time_ns < -1:
                raise InputError(
                    f"{op_label(number)}: time_ns[{where!r}] is {time_ns}; at least -1 (cannot run) is expected"
                )
    if num_tensors == 0:
        return
    if (bad := _first((graph.producers < 0) | (graph.producers >= num_ops))) is not None:
        raise InputError(f"tensor {bad}: producer {graph.producers[bad]} is no op; ops are 0 to {num_ops - 1}")
    if (bad := _first(graph.tensor_bytes < 0)) is not None:
        raise InputError(f"tensor {bad}: bytes is {graph.tensor_bytes[bad]}; an integer of at least 0 is expected")
    _check_views(graph)
    _check_consumers(graph, op_label)


def _check_copies(graph: "Graph", op_label: Any) -> None:
    for number, role in enumerate(graph.roles if set(graph.roles) - ROLES.keys() else ()):
        if role not in ROLES:
            raise InputError(f"{op_label(number)}: role is {role!r}; {suggest(role, [*ROLES])}")
    origins, numbers = graph.origins, np.arange(graph.num_ops)
    if (bad := _first((origins < -1) | (origins >= graph.num_ops) | (origins == numbers))) is not None:
        raise InputError(f"{op_label(bad)}: origin {origins[bad]} is no other op; ops are 0 to {graph.num_ops - 1}")
    if (bad := _first(origins[roots(origins)] >= 0)) is not None:
        raise InputError(f"{op_label(bad)}: has more than {LONGEST_CHAIN} origins in a row; name the first copy")
    first = graph.first_copy
    if not (first != numbers).any():
        return
    if (bad := _first(first[first] != first)) is not None:
        raise InputError(f"{op_label(bad)}: origin {origins[bad]} is a copy itself; name the first one")
    kinds = np.array(graph.kinds, np.object_)
    if (bad := _first(kinds[first] != kinds)) is not None:
        raise InputError(
            f"{op_label(bad)}: is {kinds[bad]!r}, and the op {first[bad]} that it is a copy of {kinds[first[bad]]!r}; "
            "give it the same kind, or no origin"
        )


def _check_views(graph: "Graph") -> None:
    views = np.flatnonzero(graph.view_of != -1)
    for view in views.tolist():
        base = int(graph.view_of[view])
        if not 0 <= base < graph.num_tensors or base == view:
            raise InputError(
                f"tensor {view}: view_of {base} is no other tensor; tensors are 0 to {graph.num_tensors - 1}"
            )
        if graph.producers[base] != graph.producers[view]:
            raise InputError(f"tensor {view}: view_of {base} has another producer; a view and its base share theirs")
        if graph.view_of[base] != -1:
            raise InputError(f"tensor {view}: view_of {base} is itself a view; name the tensor that owns the memory")
        if graph.is_resident[view]:
            raise InputError(f"tensor {view}: is a view and resident; set resident on its base {base} only")


def _check_consumers(graph: "Graph", op_label: Any) -> None:
    tensors = graph.edge_tensors
    if (bad := _first((graph.consumers < 0) | (graph.consumers >= graph.num_ops))) is not None:
        raise InputError(
            f"tensor {tensors[bad]}: consumer {graph.consumers[bad]} is no op; ops are 0 to {graph.num_ops - 1}"
        )
    is_rising = np.logical_or(np.diff(tensors) > 0, np.diff(graph.consumers) > 0)
    if not is_rising.all():
        by_pair = np.lexsort((graph.consumers, tensors))
        same = (np.diff(tensors[by_pair]) == 0) & (np.diff(graph.consumers[by_pair]) == 0)
        if (bad := _first(same)) is not None:
            edge = by_pair[bad]
            raise InputError(f"tensor {tensors[edge]}: consumer {graph.consumers[edge]} is listed twice; list it once")
    if (bad := _first(graph.consumers <= graph.producers[tensors])) is None:
        return
    if cycle := _find_cycle(graph.producers[tensors], graph.consumers):
        path = " -> ".join(repr(graph.op_names[op]) for op in cycle[:8]) + (" -> ..." if len(cycle) > 8 else "")
        raise InputError(f"ops form a cycle: {path}; a step is acyclic, unroll loops")
    producer, consumer = int(graph.producers[tensors[bad]]), int(graph.consumers[bad])
    raise InputError(
        f"tensor {tensors[bad]}: {op_label(producer)} feeds the earlier {op_label(consumer)}; "
        "number ops in topological order"
    )


def _find_cycle(sources: I64, targets: I64) -> list[int]:
    """Returns the ops of one cycle of the edges `sources[i] -> targets[i]`, the first op at both ends; [] if none."""
    order = TopologicalSorter[int]()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        order.add(target, source)
    try:
        order.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _first(mask: Bool) -> int | None:
    index = int(np.argmax(mask)) if len(mask) else 0
    return index if len(mask) and mask[index] else None
