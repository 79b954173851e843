"""`gdp-graph` documents: the fields of their ops and tensors, checked column by column. Columns are checked in whole,
so that a million ops are read in seconds. Where anything is wrong, the records are looked at one by one, to say what
and where. docs/machine-model.md, section 6, is the definition."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Never

from gdp import files
from gdp.graph.checks import PHASES

FORMAT, VERSION, OLDEST = "gdp-graph", 2, 1  # version 1 has no copies
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Op:
    """One operator, with the fields that a `gdp-graph` file and the machine model have."""

    name: str
    kind: str = ""
    flops: int = 0
    bytes_accessed: int = 0
    dtype: str = "float32"
    resident_bytes: int = 0
    phase: str = ""
    module: str = ""
    group: int = -1
    time_ns: Mapping[str, int] = field(default_factory=dict)
    origin: int = -1
    microbatch: int = 0
    replica: int = 0
    role: str = ""
    kernels: int = 1
    host_ns: int = 0
    host_waits: bool = False
    shapes: str = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, with the fields that a `gdp-graph` file has."""

    producer: int
    consumers: tuple[int, ...]
    bytes: int = 0
    resident: bool = False
    keep: bool = False
    view_of: int = -1


Columns = Mapping[str, Sequence[Any]]  # the values of each field of records


def read_document(document: object) -> tuple[str, Columns, Columns]:
    """Returns (name, columns of ops, columns of tensors); InputError for unknown keys, wrong types and versions."""
    content = files.require_header(document, FORMAT, VERSION, OLDEST)
    files.require_keys(content, "graph", _DOCUMENT_FIELDS, {"name", "ops", "tensors"})
    ops = _columns(content["ops"], _OP_CHECKS, OP_DEFAULTS)
    tensors = _columns(content["tensors"], _TENSOR_CHECKS, TENSOR_DEFAULTS)
    if ops is None or tensors is None:
        _explain(content)
    return content["name"], ops, tensors


def _defaults(record: type) -> dict[str, Any]:
    """Returns the values of the fields of a dataclass that may be left out."""
    return {item.name: item.default for item in fields(record) if item.default is not MISSING}


def _columns(
    records: Sequence[object], checks: Mapping[str, Callable[[list[Any]], bool]], defaults: Mapping[str, Any]
) -> dict[str, list[Any]] | None:
    """Returns the columns of `records`, None unless each passes its check. Fields without a default must be in every
    record; no record may have others."""
    if not set(map(type, records)) <= {dict}:
        return None
    mappings: Sequence[dict[str, Any]] = records  # type: ignore[assignment]
    found: dict[str, list[Any]] = {}
    num_values = 0
    for name, is_valid in checks.items():
        values = [record.get(name, _MISSING) for record in mappings]
        num_missing = values.count(_MISSING)
        num_values += len(values) - num_missing
        if num_missing and name not in defaults:
            return None
        if num_missing:
            values = [defaults[name] if value is _MISSING else value for value in values]
        if not is_valid(values):
            return None
        found[name] = values
    return found if num_values == sum(map(len, mappings)) else None


def _explain(content: Mapping[str, Any]) -> Never:
    """Raises the InputError that says which op or tensor is no record of one, and why."""
    for number, op in enumerate(content["ops"]):
        label = f" {op['name']!r}" if isinstance(op, dict) and isinstance(op.get("name"), str) else ""
        files.require_keys(op, f"op {number}{label}", OP_FIELDS, OP_FIELDS.keys() - OP_DEFAULTS.keys())
    for number, tensor in enumerate(content["tensors"]):
        files.require_keys(tensor, f"tensor {number}", TENSOR_FIELDS, TENSOR_FIELDS.keys() - TENSOR_DEFAULTS.keys())
    raise AssertionError("a column fails its check, and each of its records passes")


def _are(kind: type, check: Callable[[Any], bool] | None = None) -> Callable[[list[Any]], bool]:
    """Returns a check that all values are of exactly this type, and pass `check`."""
    return lambda values: set(map(type, values)) <= {kind} and (check is None or all(map(check, values)))


def _are_integers(lowest: int) -> Callable[[list[Any]], bool]:
    """Returns a check that all values are integers from `lowest` to 2^63 - 1."""
    return lambda values: (
        set(map(type, values)) <= {int} and min(values, default=lowest) >= lowest and max(values, default=0) < 2**63
    )


def is_times(value: object) -> bool:
    """a mapping from device names or kinds to integers of at least -1 (nanoseconds; -1: cannot run there)"""
    return type(value) is dict and all(type(key) is str and files.is_index(item) for key, item in value.items())


def _is_phase(value: object) -> bool:
    """one of "forward", "backward", "update" and \"\""""
    return type(value) is str and value in PHASES


_DOCUMENT_FIELDS = {"format": files.is_string, "version": files.is_size, "name": files.is_string}
_DOCUMENT_FIELDS |= {"ops": files.is_list, "tensors": files.is_list}
_CHECK_OF_TYPE: Mapping[Any, Callable[[object], bool]] = {str: files.is_string, int: files.is_size, bool: files.is_flag}
OP_FIELDS = {item.name: _CHECK_OF_TYPE.get(item.type, is_times) for item in fields(Op)}
OP_FIELDS |= {"phase": _is_phase, "group": files.is_index, "origin": files.is_index}
TENSOR_FIELDS = {item.name: _CHECK_OF_TYPE.get(item.type, files.is_number_list) for item in fields(Tensor)}
TENSOR_FIELDS["view_of"] = files.is_index
OP_DEFAULTS = _defaults(Op) | {"time_ns": {}}
TENSOR_DEFAULTS = _defaults(Tensor)
_COLUMN_CHECKS: Mapping[Callable[[object], bool], Callable[[list[Any]], bool]] = {
    files.is_string: _are(str),
    files.is_flag: _are(bool),
    files.is_size: _are_integers(0),
    files.is_index: _are_integers(-1),
    files.is_number_list: _are(list, files.is_number_list),
    _is_phase: _are(str, _is_phase),
    is_times: _are(dict, is_times),
}
_OP_CHECKS = {name: _COLUMN_CHECKS[check] for name, check in OP_FIELDS.items()}
_TENSOR_CHECKS = {name: _COLUMN_CHECKS[check] for name, check in TENSOR_FIELDS.items()}
