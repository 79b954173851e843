"""`gdp-graph` files in columns: safetensors in place of JSON, for steps of a million ops.

    op/flops [N], tensor/bytes [T], ...    the fields of JSON files, a column each
    op/kind [N]                            of texts, numbers in `op/kind.values`, a JSON list of distinct ones
    op/name [N]                            the same of names; -1 for that of the op's first copy, with `@1#2` behind it
    tensor/consumers [E]                   those of all tensors, which begin at `.offsets` [T + 1]

docs/machine-model.md, section 6, is the definition. N ops, T tensors, E consumers of all tensors together."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from operator import add, eq
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
from safetensors.numpy import save

from gdp import files
from gdp.arrays import I64, Bool, unique
from gdp.errors import InputError
from gdp.graph.columns import NUMBERS, OF_HOSTS, OP_COLUMNS, OPTIONAL, TEXTS
from gdp.graph.copies import first_copies, label_end, role_codes
from gdp.graph.document import FORMAT, VERSION, is_times
from gdp.graph.fingerprint import numbered, times_as_text
from gdp.tensor_file import TensorFormat

if TYPE_CHECKING:
    from gdp.graph.graph import Graph

SUFFIX = ".safetensors"
_HEADER = MappingProxyType({"name": files.is_string})
COLUMNS = TensorFormat(FORMAT, VERSION, _HEADER, "`gdp capture`", "write or copy the file again")
_OP, _TENSOR, _CONSUMER, _OFFSET = "op", "tensor", "consumer", "offset"  # what a column has an entry for
_OFFSETS = "tensor/consumers.offsets"
_NUMBERS = {
    **{f"op/{field}": (column, _OP) for field, column in OP_COLUMNS.items() if column in NUMBERS},
    "op/kernels": ("kernels", _OP),
    "op/host_ns": ("host_ns", _OP),
    "tensor/producer": ("producers", _TENSOR),
    "tensor/bytes": ("tensor_bytes", _TENSOR),
    "tensor/view_of": ("view_of", _TENSOR),
    "tensor/consumers": ("consumers", _CONSUMER),
    _OFFSETS: ("consumer_offsets", _OFFSET),
}
_FLAGS = {
    "tensor/resident": ("is_resident", _TENSOR),
    "tensor/keep": ("is_kept", _TENSOR),
    "op/host_waits": ("host_waits", _OP),
}
_TEXTS = {f"op/{field}": column for field, column in OP_COLUMNS.items() if column in TEXTS and field != "name"}
_NAME, _TIMES = "op/name", "op/time_ns"
_NO_TIMES: Mapping[str, int] = MappingProxyType({})


def is_in_columns(path: str | Path) -> bool:
    """Returns whether the file has columns, by its name."""
    return str(path).endswith(SUFFIX)


def write_columns(graph: "Graph", path: str | Path) -> None:
    """Writes `graph`, atomically."""
    names = np.array(graph.op_names, np.object_)
    is_listed = ~_is_named_as_copy(graph)
    numbers = np.where(is_listed, np.cumsum(is_listed) - 1, -1)
    columns: dict[str, npt.NDArray[Any]] = {
        **{name: _small(getattr(graph, field)) for name, (field, _) in _NUMBERS.items()},
        **{name: getattr(graph, field) for name, (field, _) in _FLAGS.items()},
        _NAME: _small(numbers),
        f"{_NAME}.values": _json(names[is_listed].tolist()),
    }
    for name, field in _TEXTS.items():
        columns |= _numbered(name, getattr(graph, field))
    for field in OPTIONAL.keys() - set(graph.told_columns):
        columns = {name: column for name, column in columns.items() if name.removesuffix(".values") != f"op/{field}"}
    columns |= _numbered(_TIMES, times_as_text(graph))
    files.write_bytes(path, save(columns, COLUMNS.header(name=graph.name)))


def _is_named_as_copy(graph: "Graph") -> Bool:
    """Returns [N] the ops that are called as their first copies, with `@1#2` behind it."""
    is_copy: Bool = graph.first_copy != np.arange(graph.num_ops)
    if not is_copy.any():
        return is_copy
    labels = _copy_labels(graph.op_names, graph.first_copy, graph.microbatches, graph.replicas)
    is_copy &= np.fromiter(map(eq, labels, graph.op_names), np.bool_, graph.num_ops)
    return is_copy


def _copy_labels(names: Sequence[str], first: I64, microbatches: I64, replicas: I64) -> Iterable[str]:
    """Returns the names [N] of copies: those of their `first` copies, which are among `names` [N], with their ends."""
    width = int(replicas.max()) + 1
    key = microbatches * width + replicas
    ends = {number: label_end(*divmod(number, width)) for number in unique(key).tolist()}
    return map(add, map(names.__getitem__, first.tolist()), map(ends.__getitem__, key.tolist()))


def read_columns(path: str | Path) -> dict[str, Any]:
    """Returns the fields of the graph in `path`; InputError for a bad file."""
    with COLUMNS.opened(path, "numpy") as (header, file):
        reader = _Reader(file)
        fields: dict[str, Any] = {"name": header["name"]}
        for name, (field, of) in (_NUMBERS | _FLAGS).items():
            if name in reader.absent:
                fields[field] = np.full(len(fields["flops"]), OF_HOSTS[field])
            else:
                fields[field] = reader.column(name, of, ("BOOL",)) if name in _FLAGS else reader.numbers(name, of)
        for name, field in _TEXTS.items():
            fields[field] = ("",) * len(fields["flops"]) if name in reader.absent else tuple(reader.texts(name))
        fields["times_ns"] = tuple(_times(reader.texts(_TIMES)))
        offsets, num_consumers = fields["consumer_offsets"], len(fields["consumers"])
        is_rising = len(offsets) == len(fields["producers"]) + 1 and not (np.diff(offsets) < 0).any()
        if not is_rising or offsets[0] != 0 or offsets[-1] != num_consumers:
            raise InputError(f"column {_OFFSETS!r} does not rise from 0 to {num_consumers}; {COLUMNS.remedy}")
        return fields | {"op_names": tuple(reader.names(fields))}


class _Reader:
    """Reads the columns of an open file, and checks that there are no others."""

    def __init__(self, file: Any) -> None:
        self._file, self._counts = file, dict[str, int]()
        values = (f"{name}.values" for name in (*_TEXTS, _NAME, _TIMES))
        known = {*_NUMBERS, *_FLAGS, *_TEXTS, _NAME, _TIMES, *values}
        self.absent = {f"op/{field}" for field in OPTIONAL} - set(file.keys())
        lacking = self.absent | {f"{name}.values" for name in self.absent & _TEXTS.keys()}
        for name in sorted(set(file.keys()) ^ known - lacking):
            raise InputError(f"column {name!r} is {'missing' if name in known else 'unknown'}; {COLUMNS.remedy}")

    def column(self, name: str, of: str, dtypes: Sequence[str]) -> npt.NDArray[Any]:
        """Returns a column of one of `dtypes`, which has as many entries as the others `of` ops, say."""
        piece = self._file.get_slice(name)
        shape, dtype = piece.get_shape(), piece.get_dtype()
        count = self._counts.setdefault(of, shape[0] if len(shape) == 1 else 0)
        if shape != [count] or dtype not in dtypes:
            raise InputError(
                f"column {name!r} is {dtype} {shape}; {' or '.join(dtypes)} [{count}] is expected; {COLUMNS.remedy}"
            )
        values: npt.NDArray[Any] = self._file.get_tensor(name)
        return values

    def numbers(self, name: str, of: str = _OP) -> I64:
        """Returns a column of integers."""
        return self.column(name, of, ("I32", "I64")).astype(np.int64)

    def texts(self, name: str) -> list[str]:
        """Returns the text of each op."""
        values = self.values(name)
        return list(map(values.__getitem__, self._within(0, len(values), name).tolist()))

    def values(self, name: str) -> list[str]:
        """Returns the distinct values of a column of texts."""
        name = f"{name}.values"
        values = None
        with contextlib.suppress(orjson.JSONDecodeError):
            values = orjson.loads(self.column(name, name, ("U8",)).tobytes())
        if type(values) is not list or not set(map(type, values)) <= {str} or len(set(values)) < len(values):
            raise InputError(f"column {name!r} is no JSON list of distinct strings; {COLUMNS.remedy}")
        return values

    def names(self, fields: Mapping[str, Any]) -> Iterable[str]:
        """Returns the names of ops, whose other `fields` tell of which op each is a copy."""
        listed = self.values(_NAME)
        numbers = self._within(-1, len(listed), _NAME)
        if (numbers >= 0).all():
            return map(listed.__getitem__, numbers.tolist())
        origins = self._within(-1, len(numbers), "op/origin")
        microbatches, replicas = (self._within(0, 2**31, name) for name in ("op/microbatch", "op/replica"))
        first = first_copies(origins, role_codes(fields["roles"]))
        if (numbers[first] < 0).any():
            raise InputError(f"column {_NAME!r} has -1 for an op that is no copy; {COLUMNS.remedy}")
        own = list(map([*listed, ""].__getitem__, numbers.tolist()))
        labels = _copy_labels(own, first, microbatches, replicas)
        return [name or label for name, label in zip(own, labels, strict=True)]

    def _within(self, least: int, end: int, name: str) -> I64:
        values = self.numbers(name)
        if len(values) and not (values.min() >= least and values.max() < end):
            raise InputError(f"column {name!r} has numbers beyond {least} to {end - 1}; {COLUMNS.remedy}")
        return values


def _numbered(name: str, texts: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of the numbers of `texts`, and of their distinct values."""
    values, numbers = numbered(texts)
    return {name: _small(numbers), f"{name}.values": _json(values)}


def _json(values: Iterable[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(orjson.dumps(list(values)), np.uint8)


def _times(texts: list[str]) -> Iterable[Mapping[str, int]]:
    """Returns the times of each op; those of ops with the same ones are one mapping."""
    known: dict[str, Mapping[str, int]] = {"{}": _NO_TIMES}
    for text in set(texts) - known.keys():
        try:
            times = orjson.loads(text)
        except orjson.JSONDecodeError:
            times = None
        if not is_times(times):
            raise InputError(f"column {_TIMES!r} has {text[:60]!r}; {is_times.__doc__} is expected")
        known[text] = MappingProxyType(times)
    return map(known.__getitem__, texts)


def _small(values: I64) -> npt.NDArray[Any]:
    """Returns `values` in 32 bits where that is enough."""
    is_small = not len(values) or (values.min() >= -(2**31) and values.max() < 2**31)
    return values.astype(np.int32) if is_small else values
