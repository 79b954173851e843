"""OpCosts: costs of ops from the user, in a `gdp-op-costs` file: FLOPs or times by kind of op or by name.

    format: gdp-op-costs
    version: 1
    ops:
      - {kind: mylib.attention, flops: 4.3e9}                 # of each op of this kind
      - {kind: mylib.activation, flops_per_output_element: 12}
      - {match: 'decoder\\..*mlp', time: {p100-pcie-16g: 120us, gpu0: 95us}}

Entries apply in their order, so a later one overrides an earlier one. Times are by name or kind of device and take
precedence over the cost model, as measured ones do."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gdp import files
from gdp.arrays import I64, combined
from gdp.cluster.cluster_file import read_document
from gdp.cluster.quantities import parse_number, parse_time
from gdp.errors import InputError, prefixed, suggest
from gdp.graph import Graph
from gdp.models.names import element_bits

FORMAT, VERSION = "gdp-op-costs", 1


@dataclass(frozen=True, slots=True)
class OpCost:
    """The costs of the ops of `kind`, or of the ops with a name or module path that the regex `match` finds."""

    kind: str = ""
    match: str = ""
    flops: int | None = None  # of an op
    flops_per_output_element: Fraction | None = None
    time_ns: Mapping[str, int] = field(default_factory=dict)  # by name or kind of device

    def __post_init__(self) -> None:
        if not self.kind and not self.match:
            raise InputError("names no ops; give kind, a type of ops, or match, a regular expression for names")
        if self.kind and self.match:
            raise InputError(f"kind {self.kind!r}: has match {self.match!r} too; give one of them")
        if self.flops is None and self.flops_per_output_element is None and not self.time_ns:
            raise InputError(f"{self.label}: says nothing; give flops, flops_per_output_element or time")
        if self.flops is not None and self.flops_per_output_element is not None:
            raise InputError(f"{self.label}: has both flops and flops_per_output_element; give one of them")
        try:
            re.compile(self.match)
        except re.error as error:
            raise InputError(f"{self.label}: match is no regular expression ({error}); mend it") from None

    @property
    def label(self) -> str:
        """The entry in messages."""
        return f"match {self.match!r}" if self.match else f"kind {self.kind!r}"

    def ops(self, graph: Graph) -> list[int]:
        """Returns the ops that the entry covers. InputError if there are none."""
        if self.kind:
            ops = [op for op, kind in enumerate(graph.kinds) if kind == self.kind]
            if not ops:
                kinds = sorted(set(graph.kinds) - {""})
                remedy = suggest(self.kind, kinds) if kinds else "ops have no kinds"
                raise InputError(f"{self.label}: no op of {graph.name!r} is of this kind; {remedy}")
            return ops
        search = re.compile(self.match).search
        active = np.flatnonzero((graph.flops > 0) | (graph.bytes_accessed > 0))  # no parameters and inputs
        ops = [op for op in active.tolist() if search(graph.modules[op]) or search(graph.op_names[op])]
        if not ops:
            raise InputError(f"{self.label}: finds no op of {graph.name!r} that does anything; see the graph's names")
        return ops


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Costs of ops that a user gives; `source` is the file that they are from."""

    entries: tuple[OpCost, ...]
    source: str = "op costs"

    @classmethod
    def load(cls, path: str | Path) -> "OpCosts":
        """Reads a `gdp-op-costs` file: JSON if its name ends in .json, else YAML. InputError names file and place."""
        document = read_document(path, FORMAT)
        with prefixed(path):
            return cls.from_document(document, str(path))

    @classmethod
    def from_document(cls, document: object, source: str = "op costs") -> "OpCosts":
        """Reads a `gdp-op-costs` document; unknown keys, wrong types and versions are errors."""
        content = files.require_header(document, FORMAT, VERSION)
        files.require_keys(content, "document", _DOCUMENT_FIELDS, {"ops"})
        return cls(tuple(_read_entry(record, number) for number, record in enumerate(content["ops"])), source)

    def apply(self, graph: Graph) -> Graph:
        """Returns `graph` with these costs. InputError for an entry that covers no op of the graph."""
        flops, times = graph.flops.copy(), [dict(table) for table in graph.times_ns]
        for number, entry in enumerate(self.entries):
            with prefixed(f"{self.source}: entry {number}"):
                ops = entry.ops(graph)
                if entry.flops is not None:
                    flops[ops] = entry.flops
                if entry.flops_per_output_element is not None:
                    flops[ops] = _scaled(_output_elements(graph, ops), entry.flops_per_output_element)
            for op in ops if entry.time_ns else ():
                times[op] |= entry.time_ns
        return replace(graph, flops=flops, times_ns=tuple(MappingProxyType(table) for table in times))

    def covers(self, kind: str) -> bool:
        """Returns whether an entry covers all ops of this kind."""
        return any(entry.kind == kind for entry in self.entries)

    def still_unknown(self, graph: Graph, unknown: Mapping[str, int]) -> dict[str, int]:
        """Returns the part of `unknown`, estimated ops by kind, that the entries do not cover completely."""
        matched = {op for entry in self.entries if entry.match for op in entry.ops(graph)}
        open_kinds = {kind for op, kind in enumerate(graph.kinds) if op not in matched}
        kinds = set(graph.kinds)
        missing = {kind: count for kind, count in unknown.items() if not self.covers(kind)}
        return {kind: count for kind, count in missing.items() if kind in open_kinds or kind not in kinds}


def without_costs(graph: Graph) -> Graph:
    """Returns `graph` without measured costs and costs from users: no times, no FLOPs."""
    return replace(graph, flops=np.zeros_like(graph.flops), times_ns=tuple({} for _ in graph.times_ns))


def _output_elements(graph: Graph, ops: list[int]) -> list[int]:
    """Returns the number of elements of the tensors that each op makes, views left out."""
    is_whole = graph.view_of < 0
    num_bytes = combined(np.add, graph.producers[is_whole], graph.tensor_bytes[is_whole], graph.num_ops)
    for op in ops:
        if element_bits(graph.dtypes[op]) is None:
            raise InputError(
                f"op {graph.op_names[op]!r} computes in {graph.dtypes[op]!r}, of which the size is not known; "
                "give flops instead of flops_per_output_element"
            )
    return [int(num_bytes[op]) * 8 // (element_bits(graph.dtypes[op]) or 1) for op in ops]


def _scaled(counts: list[int], factor: Fraction) -> I64:
    amounts = [math.ceil(count * factor) for count in counts]
    if max(amounts, default=0) >= 2**63:
        raise InputError(f"flops_per_output_element is {float(factor):g}; less than 2^63 FLOPs an op are expected")
    return np.array(amounts, np.int64)


# Files


def _is_text(value: object) -> bool:
    """text that is not empty (quote it if it looks like a number)"""
    return type(value) is str and value != ""


def _is_quantity(value: object) -> bool:
    """a number"""
    return type(value) in (int, float, str)


def _is_times(value: object) -> bool:
    """a mapping from names or kinds of devices to times, such as {p100-pcie-16g: 12us},"""
    return type(value) is dict and len(value) > 0 and all(type(key) is str for key in value)


_DOCUMENT_FIELDS = {"format": files.is_string, "version": files.is_size, "ops": files.is_list}
_FIELDS = {"kind": _is_text, "match": _is_text, "flops": _is_quantity}
_FIELDS |= {"flops_per_output_element": _is_quantity, "time": _is_times}


def _read_entry(record: Any, number: int) -> OpCost:
    where = f"entry {number}"
    files.require_keys(record, where, _FIELDS, set())
    flops, each, times = (record.get(key) for key in ("flops", "flops_per_output_element", "time"))
    time_ns = {device: parse_time(time, f"{where}: time on {device}") for device, time in (times or {}).items()}
    per_element = None
    if each is not None:
        parse_number(each, f"{where}: flops_per_output_element")  # raises an InputError that names the place
        per_element = Fraction(str(each).strip())
    per_op = None if flops is None else parse_number(flops, f"{where}: flops")
    with prefixed(where):
        return OpCost(record.get("kind", ""), record.get("match", ""), per_op, per_element, MappingProxyType(time_ns))
