"""Fingerprints: the SHA-256 of the columns of a graph. docs/machine-model.md, section 6, is the definition."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from gdp.arrays import I64
from gdp.graph.columns import NUMBERS, OF_TENSORS, OPTIONAL, TEXTS
from gdp.graph.document import FORMAT, VERSION

if TYPE_CHECKING:
    from gdp.graph.graph import Graph


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
