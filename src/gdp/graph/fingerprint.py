"""Fingerprints: the SHA-256 of the columns of a graph. docs/machine-model.md, section 6, is the definition. Where two
differ, the first difference between the graphs in words."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from gdp.arrays import I64
from gdp.graph.columns import NUMBERS, OF_TENSORS, OP_COLUMNS, OPTIONAL, TENSOR_COLUMNS, TEXTS
from gdp.graph.document import FORMAT, VERSION

if TYPE_CHECKING:
    from gdp.graph.graph import Graph

_OF_OPS = {column: field for field, column in OP_COLUMNS.items()}
_OF_TENSORS = {column: field for field, column in TENSOR_COLUMNS.items() if field not in ("producer", "consumers")}


def numbered(texts: Sequence[str]) -> tuple[list[str], I64]:
    """Returns the distinct `texts` in the order in which they first come, and the number [N] of each in them."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return list(numbers), np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))


def times_as_text(graph: "Graph") -> list[str]:
    """Returns the times [N] of each op as JSON with sorted keys."""
    if not any(graph.times_ns):
        return ["{}"] * graph.num_ops
    return [orjson.dumps(dict(times), option=orjson.OPT_SORT_KEYS).decode() for times in graph.times_ns]


def graph_fingerprint(graph: "Graph") -> str:
    """Returns the fingerprint of `graph` in hexadecimal digits; its name is left out."""
    digest = hashlib.sha256(f"{FORMAT} {VERSION}\n".encode())
    names, *texts = (name for name in TEXTS if name not in OPTIONAL)
    _add_texts(digest, list(getattr(graph, names)))
    for name in texts:
        _add_numbered(digest, getattr(graph, name))
    _add_numbered(digest, times_as_text(graph))
    for name in (*NUMBERS, *OF_TENSORS, "consumer_offsets", "consumers"):
        _add_numbers(digest, getattr(graph, name))
    for name in graph.told_columns:
        _add_texts(digest, [name])
        (_add_numbered if name in TEXTS else _add_numbers)(digest, getattr(graph, name))
    return digest.hexdigest()


def _add_numbered(digest: Any, texts: Sequence[str]) -> None:
    values, numbers = numbered(texts)
    _add_texts(digest, values)
    _add_numbers(digest, numbers)


def _add_texts(digest: Any, texts: Iterable[str]) -> None:
    digest.update(orjson.dumps(texts))
    digest.update(b"\n")


def _add_numbers(digest: Any, values: npt.NDArray[Any]) -> None:
    digest.update(f"{len(values)}\n".encode())
    digest.update(np.ascontiguousarray(values, "<i8").data)


def difference(now: "Graph", before: "Graph") -> str:
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
