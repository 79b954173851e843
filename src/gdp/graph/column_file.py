"""`gdp-graph` files in columns: safetensors in place of JSON, for steps of a million ops.

    op/flops [N], tensor/bytes [T], ...    the fields of JSON files, a column each
    op/kind [N]                            of texts, numbers in `op/kind.values`, a JSON list of distinct ones
    op/name [N]                            the same of names without ends, `@m` in `.microbatch` and `#d` in `.replica`
    tensor/consumers [E]                   those of all tensors, which begin at `.offsets` [T + 1]

docs/machine-model.md, section 6, is the definition. N ops, T tensors, E consumers of all tensors together.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
from safetensors.numpy import save

from gdp import files
from gdp.arrays import I64
from gdp.errors import InputError
from gdp.graph.copy_names import NUM_MICROBATCHES, NUM_REPLICAS, CopyNames, split_name
from gdp.graph.document import FORMAT, VERSION, is_times
from gdp.tensor_file import TensorFormat

if TYPE_CHECKING:
    from gdp.graph.graph import Graph

SUFFIX = ".safetensors"
COLUMNS = TensorFormat(
    name=FORMAT,
    version=VERSION,
    fields=MappingProxyType({"name": files.is_string}),
    writer="`gdp capture`",
    remedy="write or copy the file again",
)
_OP, _TENSOR, _CONSUMER, _OFFSET = "op", "tensor", "consumer", "offset"  # what a column has an entry for
_OFFSETS = "tensor/consumers.offsets"
_NUMBERS = {
    "op/flops": ("flops", _OP),
    "op/bytes_accessed": ("bytes_accessed", _OP),
    "op/resident_bytes": ("resident_bytes", _OP),
    "op/group": ("groups", _OP),
    "tensor/producer": ("producers", _TENSOR),
    "tensor/bytes": ("tensor_bytes", _TENSOR),
    "tensor/view_of": ("view_of", _TENSOR),
    "tensor/consumers": ("consumers", _CONSUMER),
    _OFFSETS: ("consumer_offsets", _OFFSET),
}
_FLAGS = {"tensor/resident": "is_resident", "tensor/keep": "is_kept"}
_TEXTS = {"op/kind": "kinds", "op/dtype": "dtypes", "op/phase": "phases", "op/module": "modules"}
_NAME, _TIMES = "op/name", "op/time_ns"
_NO_TIMES: Mapping[str, int] = MappingProxyType({})


def is_in_columns(path: str | Path) -> bool:
    """Returns whether the file has columns, by its name."""
    return str(path).endswith(SUFFIX)


def write_columns(graph: "Graph", path: str | Path) -> None:
    """Writes `graph`, atomically."""
    names = graph.copy_names
    columns: dict[str, npt.NDArray[Any]] = {
        **{name: _small(getattr(graph, field)) for name, (field, _) in _NUMBERS.items()},
        **{name: getattr(graph, field) for name, field in _FLAGS.items()},
        _NAME: _small(names.base),
        f"{_NAME}.values": _json(names.bases),
        f"{_NAME}.microbatch": _small(names.microbatch),
        f"{_NAME}.replica": _small(names.replica),
    }
    for name, field in _TEXTS.items():
        columns |= _numbered(name, getattr(graph, field))
    texts = ["{}"] * graph.num_ops
    if any(graph.times_ns):
        texts = [orjson.dumps(dict(times)).decode() for times in graph.times_ns]
    columns |= _numbered(_TIMES, texts)
    files.write_bytes(path, save(columns, COLUMNS.header(name=graph.name)))


def read_columns(path: str | Path) -> tuple[dict[str, Any], CopyNames]:
    """Returns the fields of the graph in `path`, and the parts of its names; InputError for a bad file."""
    with COLUMNS.opened(path, "numpy") as (header, file):
        reader = _Reader(file)
        fields: dict[str, Any] = {"name": header["name"]}
        fields |= {field: reader.numbers(name, of) for name, (field, of) in _NUMBERS.items()}
        fields |= {field: reader.column(name, _TENSOR, ("BOOL",)) for name, field in _FLAGS.items()}
        fields |= {field: tuple(reader.texts(name)) for name, field in _TEXTS.items()}
        fields["times_ns"] = tuple(_times(reader.texts(_TIMES)))
        offsets, num_consumers = fields["consumer_offsets"], len(fields["consumers"])
        is_rising = len(offsets) == len(fields["producers"]) + 1 and not (np.diff(offsets) < 0).any()
        if not is_rising or offsets[0] != 0 or offsets[-1] != num_consumers:
            raise InputError(f"column {_OFFSETS!r} does not rise from 0 to {num_consumers}; {COLUMNS.remedy}")
        names = reader.names()
        fields["op_names"] = _joined(names)
    return fields, names


class _Reader:
    """Reads the columns of an open file, and checks that there are no others."""

    def __init__(self, file: Any) -> None:
        self._file, self._counts = file, dict[str, int]()
        ends = (f"{_NAME}.microbatch", f"{_NAME}.replica")
        values = (f"{name}.values" for name in (*_TEXTS, _NAME, _TIMES))
        expected = {*_NUMBERS, *_FLAGS, *_TEXTS, _NAME, _TIMES, *ends, *values}
        for name in sorted(set(file.keys()) ^ expected):
            raise InputError(f"column {name!r} is {'missing' if name in expected else 'unknown'}; {COLUMNS.remedy}")

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
        return list(map(values.__getitem__, self._below(len(values), name).tolist()))

    def values(self, name: str) -> list[str]:
        """Returns the distinct values of a column of texts."""
        name = f"{name}.values"
        values = None
        with contextlib.suppress(orjson.JSONDecodeError):
            values = orjson.loads(self.column(name, name, ("U8",)).tobytes())
        if type(values) is not list or not set(map(type, values)) <= {str} or len(set(values)) < len(values):
            raise InputError(f"column {name!r} is no JSON list of distinct strings; {COLUMNS.remedy}")
        return values

    def names(self) -> CopyNames:
        """Returns the names of ops in parts."""
        bases = self.values(_NAME)
        base = self._below(len(bases), _NAME)
        microbatch = self._below(NUM_MICROBATCHES, f"{_NAME}.microbatch")
        return CopyNames(tuple(bases), base, microbatch, self._below(NUM_REPLICAS, f"{_NAME}.replica"))

    def _below(self, count: int, name: str) -> I64:
        values = self.numbers(name)
        if len(values) and not (values.min() >= 0 and values.max() < count):
            raise InputError(f"column {name!r} has numbers beyond 0 to {count - 1}; {COLUMNS.remedy}")
        values.setflags(write=False)
        return values


def _joined(names: CopyNames) -> tuple[str, ...]:
    """Returns the names of all ops; InputError where their parts are others than those in `names`."""
    key = names.microbatch * NUM_REPLICAS + names.replica
    ends = {number: _end(*divmod(number, NUM_REPLICAS)) for number in np.unique(key).tolist()}
    bases = map(names.bases.__getitem__, names.base.tolist())
    joined = tuple(map(add, bases, map(ends.__getitem__, key.tolist())))
    is_doubtful = np.array([not base or "@" in base or "#" in base for base in names.bases], np.bool_)
    for op in np.flatnonzero(is_doubtful[names.base]).tolist():
        if split_name(joined[op])[1:] != (int(names.microbatch[op]), int(names.replica[op])):
            raise InputError(f"op {op} {joined[op]!r}: its name has other ends than its columns; {COLUMNS.remedy}")
    return joined


def _end(microbatch: int, replica: int) -> str:
    return (f"@{microbatch}" if microbatch else "") + (f"#{replica}" if replica else "")


def _numbered(name: str, texts: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of the numbers of `texts`, and of their distinct values."""
    column = tuple(texts)
    numbers = {text: number for number, text in enumerate(dict.fromkeys(column))}
    codes = np.fromiter(map(numbers.__getitem__, column), np.int64, len(column))
    return {name: _small(codes), f"{name}.values": _json(tuple(numbers))}


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
