"""The first difference between two graphs, in words: for the error that a plan is of another one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gdp.graph.columns import OP_COLUMNS, TENSOR_COLUMNS
from gdp.graph.graph import Graph

_OF_OPS = {column: field for field, column in OP_COLUMNS.items()}
_OF_TENSORS = {column: field for field, column in TENSOR_COLUMNS.items() if field not in ("producer", "consumers")}


def difference(now: Graph, before: Graph) -> str:
    """Returns what `now` has otherwise than `before`: numbers of ops, or the first op and the field; "" for nothing."""
    if now.num_ops != before.num_ops:
        return f"it has {now.num_ops:,} ops, not {before.num_ops:,}"
    found = [(op, name) for name in _OF_OPS if (op := _first(getattr(now, name), getattr(before, name))) is not None]
    if found:
        op, name = min(found)
        values = (_shown(getattr(graph, name)[op]) for graph in (now, before))
        return f"op {before.op_names[op]!r} has {_OF_OPS[name]} {' instead of '.join(values)}"
    if not np.array_equal(now.producers, before.producers):
        return "ops have other results"
    for name, field in _OF_TENSORS.items():
        tensor = _first(getattr(now, name), getattr(before, name))
        if tensor is not None:
            values = (_shown(getattr(graph, name)[tensor]) for graph in (now, before))
            op = int(before.producers[tensor])
            return f"a result of op {before.op_names[op]!r} has {field} {' instead of '.join(values)}"
    edges = ((graph.consumers, graph.consumer_offsets) for graph in (now, before))
    has_same_edges = all(map(np.array_equal, *edges))
    return "" if has_same_edges else "results have other consumers"


def _first(now: Sequence[Any], before: Sequence[Any]) -> int | None:
    """Returns the first position where two columns differ; None where they are alike."""
    if isinstance(now, np.ndarray):
        differs = np.flatnonzero(now != before)
        return int(differs[0]) if len(differs) else None
    return next((number for number, pair in enumerate(zip(now, before, strict=True)) if pair[0] != pair[1]), None)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(dict(value) if hasattr(value, "keys") else value)
