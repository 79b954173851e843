"""The canonical content of a graph, of which its fingerprint is the SHA-256: compact JSON, sorted keys, no graph name.

It is written column by column, some records at once: a second for a million ops.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from gdp.arrays import I64, Bool
from gdp.graph.document import FORMAT, VERSION
from gdp.graph.record_text import NAME, NUMBER, NUMBERS, TEXT, Bytes, most_bytes, write_records

if TYPE_CHECKING:
    from gdp.graph.graph import Graph

_AT_ONCE = 50_000  # records
_FLAGS = "false", "true"
_NONE: I64 = np.zeros(0, np.int64)
_NONE.setflags(write=False)  # as graphs have them: kernels are compiled for either


class Column(NamedTuple):
    """A field of all records; names, and lists of numbers, are given apart."""

    kind: int
    numbers: I64 | Bool | None = None  # those, or the places of texts
    texts: Sequence[str] = ()  # as JSON


def canonical_digest(graph: "Graph") -> str:
    """Returns the SHA-256 of the canonical content of `graph`, in hexadecimal digits."""
    digest = hashlib.sha256()
    digest.update(f'{{"format":"{FORMAT}","ops":['.encode())
    _add(digest, _op_columns(graph), graph.num_ops, graph.op_names)
    digest.update(b'],"tensors":[')
    _add(digest, _tensor_columns(graph), graph.num_tensors, (), graph.consumer_offsets, graph.consumers)
    digest.update(f'],"version":{VERSION}}}'.encode())
    return digest.hexdigest()


def _op_columns(graph: "Graph") -> dict[str, Column]:
    return {
        "bytes_accessed": Column(NUMBER, graph.bytes_accessed),
        "dtype": _text_column(graph.dtypes),
        "flops": Column(NUMBER, graph.flops),
        "group": Column(NUMBER, graph.groups),
        "kind": _text_column(graph.kinds),
        "module": _text_column(graph.modules),
        "name": Column(NAME),
        "phase": _text_column(graph.phases),
        "resident_bytes": Column(NUMBER, graph.resident_bytes),
        "time_ns": _times_column(graph.times_ns),
    }


def _tensor_columns(graph: "Graph") -> dict[str, Column]:
    return {
        "bytes": Column(NUMBER, graph.tensor_bytes),
        "consumers": Column(NUMBERS),
        "keep": Column(TEXT, graph.is_kept, _FLAGS),
        "producer": Column(NUMBER, graph.producers),
        "resident": Column(TEXT, graph.is_resident, _FLAGS),
        "view_of": Column(NUMBER, graph.view_of),
    }


def _text_column(values: Sequence[str]) -> Column:
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    numbers = np.fromiter(map(places.__getitem__, values), np.int64, len(values))
    return Column(TEXT, numbers, [orjson.dumps(value).decode() for value in places])


def _times_column(times_ns: Sequence[Mapping[str, int]]) -> Column:
    if not any(times_ns):
        return Column(TEXT, np.zeros(len(times_ns), np.int64), ["{}"])
    texts = [orjson.dumps(dict(sorted(times.items()))).decode() for times in times_ns]
    return Column(TEXT, np.arange(len(texts)), texts)


def _add(
    digest: Any,
    columns: Mapping[str, Column],
    count: int,
    names: Sequence[str],
    list_offsets: I64 | None = None,
    listed: I64 | None = None,
) -> None:
    """Adds `count` records with these fields to `digest`."""
    kinds = np.array([column.kind for column in columns.values()], np.int64)
    literals, literal_offsets = _joined(_literals(columns))
    values, table = np.zeros((len(columns), count), np.int64), list[str]()
    for row, column in zip(values, columns.values(), strict=True):
        if column.numbers is not None:
            row[:] = column.numbers
            row += len(table) if column.kind == TEXT else 0
        table += column.texts
    texts, text_offsets = _joined(table)
    offsets = np.zeros(count + 1, np.int64) if list_offsets is None else list_offsets
    numbers = _NONE if listed is None else listed
    for first in range(0, count, _AT_ONCE):
        last = min(first + _AT_ONCE, count)
        name_text = np.frombuffer(orjson.dumps(names[first:last])[1:], np.uint8)
        num_listed = int(offsets[last] - offsets[first])
        out = np.empty(most_bytes(last - first, kinds, literals, text_offsets, len(name_text), num_listed), np.uint8)
        size = write_records(
            out,
            last - first,
            kinds,
            np.ascontiguousarray(values[:, first:last]),
            (literals, literal_offsets),
            (texts, text_offsets),
            name_text,
            (offsets[first : last + 1].copy(), numbers),
        )
        digest.update(b"," * (first > 0))
        digest.update(out[:size].data)


def _literals(fields: Mapping[str, Column]) -> list[str]:
    """Returns the text before each field, and that after the last one."""
    texts, after = [], "{"
    for name, column in fields.items():
        texts.append(f'{after}"{name}":{"[" * (column.kind == NUMBERS)}')
        after = "]," if column.kind == NUMBERS else ","
    return [*texts, after[:-1] + "}"]


def _joined(texts: Sequence[str]) -> tuple[Bytes, I64]:
    """Returns the bytes of `texts`, and the offsets of each."""
    encoded = [text.encode() for text in texts]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in encoded], dtype=np.int64)]).astype(np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), offsets
