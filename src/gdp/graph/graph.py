"""Graph: the ops and tensors of one step of a neural network, as read-only arrays; checks; `gdp-graph` files.
docs/machine-model.md, sections 1 and 6, is the definition. N ops, T tensors, E (tensor, consumer) pairs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Union, overload

import numpy as np

from gdp import files, notebook
from gdp.arrays import I64, Bool, by_first
from gdp.errors import InputError, prefixed, suggest
from gdp.graph.checks import PHASES, check
from gdp.graph.column_file import is_in_columns, read_columns, write_columns
from gdp.graph.columns import NUMBERS, OF_HOSTS, OF_TENSORS, OP_COLUMNS, OPTIONAL, TENSOR_COLUMNS, TEXTS
from gdp.graph.copies import EXCHANGE, first_copies, have_role, role_codes, roots
from gdp.graph.document import FORMAT, VERSION, Op, Tensor, read_document
from gdp.graph.fingerprint import graph_fingerprint, numbered


class HasGraph(Protocol):
    """Something that has the graph of a step: a `Capture`."""

    @property
    def graph(self) -> "Graph": ...


GraphSource = Union["Graph", HasGraph]


@dataclass(frozen=True, eq=False)
class Graph:
    """A step as a directed acyclic graph of ops and tensors. Arrays are read-only; make one with `Graph.build`.

    Shapes: N ops, T tensors, E consumers of all tensors together. Sizes in bytes, times in ns.
    Raises InputError (a ValueError) naming the op or tensor, its value and the remedy."""

    name: str
    op_names: tuple[str, ...]  # [N] unique
    kinds: tuple[str, ...]  # [N]
    flops: I64  # [N]
    bytes_accessed: I64  # [N]
    dtypes: tuple[str, ...]  # [N]
    resident_bytes: I64  # [N]
    phases: tuple[str, ...]  # [N]
    modules: tuple[str, ...]  # [N]
    groups: I64  # [N] -1 or a number >= 0
    origins: I64  # [N] -1 or the op that each is a copy of, or made for
    microbatches: I64  # [N]
    replicas: I64  # [N]
    roles: tuple[str, ...]  # [N] of `gdp.graph.copies.ROLES`
    kernels: I64  # [N]
    host_ns: I64  # [N] on the host, beside the issue of kernels
    host_waits: Bool  # [N] the host goes on when the op has ended
    shapes: tuple[str, ...]  # [N] of what each reads and makes, as `gdp.graph.shapes` writes them; "": not known
    times_ns: tuple[Mapping[str, int], ...]  # [N] by device name or kind; -1 cannot run
    producers: I64  # [T]
    tensor_bytes: I64  # [T]
    is_resident: Bool  # [T]
    is_kept: Bool  # [T]
    view_of: I64  # [T] -1 or the base tensor
    consumer_offsets: I64  # [T + 1] tensor k is consumed by consumers[consumer_offsets[k]:consumer_offsets[k + 1]]
    consumers: I64  # [E]

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
        check(self)

    def __repr__(self) -> str:
        """Returns `Graph('gnmt-2': 8,000 ops, 9,000 tensors, 1.2 TFLOP, 2.3 GiB resident)`."""
        parts = (notebook.count(self.num_ops, "op"), notebook.count(self.num_tensors, "tensor"))
        flops, resident = sum(self.flops.tolist()), notebook.size(sum(self.resident_bytes.tolist()))
        return f"Graph({self.name!r}: {', '.join(parts)}, {flops / 1e9:,.4g} GFLOP, {resident} resident)"

    def _repr_html_(self) -> str:
        """The kinds of ops with the most FLOPs, as Jupyter shows them."""
        kinds, code = numbered(self.kinds)
        columns = [np.bincount(code, weights, len(kinds)) for weights in (None, self.flops, self.bytes_accessed)]
        most = np.argsort(-columns[1], kind="stable")[: notebook.MOST_ROWS].tolist()
        rows = [[kinds[x], f"{columns[0][x]:,.0f}", *(f"{each[x] / 1e9:,.3f}" for each in columns[1:])] for x in most]
        more = len(kinds) - len(rows)
        headings = ["kind", "ops", "GFLOP", "GB read and written"]
        return notebook.table(repr(self), headings, rows, f"and {more} more kinds" if more else "")

    def __len__(self) -> int:
        """Returns the number of ops."""
        return self.num_ops

    @classmethod
    def of(cls, value: GraphSource) -> "Graph":
        """Returns `value`, or the graph of a `Capture`. InputError, with the remedy, for anything else."""
        graph = value if isinstance(value, Graph) else getattr(value, "graph", None)
        if isinstance(graph, Graph):
            return graph
        if isinstance(value, str | Path):
            raise InputError(f"graph is the text {str(value)!r}; gdp.load({str(value)!r}) reads the graph")
        kind, torch = type(value).__name__, sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.nn.Module):
            raise InputError(f"graph is a PyTorch module, {kind}; give gdp.capture(module, inputs) instead")
        if isinstance(value, tuple):
            raise InputError("graph is a tuple; give gdp.capture(module, inputs) instead")
        if callable(value):
            raise InputError(
                f"graph is the function {getattr(value, '__name__', kind)!r}; give gdp.capture_fn(function) if it "
                "builds a PyTorch model, gdp.capture_jax(function, ...) if it is of JAX"
            )
        raise InputError(f"graph is a {kind}; a Graph is expected, as gdp.load and gdp.capture make")

    def to_columns(self) -> dict[str, Any]:
        """Returns every field as plain values, for a file that only gdp reads: small and quick to read."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        columns["times_ns"] = [dict(times) for times in self.times_ns] if any(self.times_ns) else []
        return columns

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> "Graph":
        """Builds the graph of `to_columns` and checks it; KeyError, TypeError or InputError for anything else."""
        values: dict[str, Any] = {"name": str(columns["name"])}
        for item in fields(cls)[1:]:
            column = columns[item.name]
            dtype = np.int64 if item.type == I64 else np.bool_
            values[item.name] = np.array(column, dtype) if item.type in (I64, Bool) else tuple(column)
        times = columns["times_ns"] or [{}] * len(columns["op_names"])
        values["times_ns"] = tuple(map(_read_only, times))
        return cls(**values)

    @property
    def num_ops(self) -> int:
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        return len(self.producers)

    @classmethod
    def build(cls, name: str, ops: Sequence[Op], tensors: Sequence[Tensor]) -> "Graph":
        """Builds the graph of these ops and tensors; ops are numbered as given, in a topological order."""
        of_ops = {name: [getattr(op, name) for op in ops] for name in OP_COLUMNS if name != "time_ns"}
        of_tensors = {name: [getattr(tensor, name) for tensor in tensors] for name in TENSOR_COLUMNS}
        return cls._of_values(name, of_ops | {"time_ns": [dict(op.time_ns) for op in ops]}, of_tensors)

    @classmethod
    def _of_values(cls, name: str, ops: Mapping[str, Sequence[Any]], tensors: Mapping[str, Sequence[Any]]) -> "Graph":
        """Builds the graph of columns that are named as the fields of `gdp-graph` files."""
        columns: dict[str, Any] = {"times_ns": tuple(map(_read_only, ops["time_ns"]))}
        for field, column in OP_COLUMNS.items():
            if column in TEXTS:
                columns[column] = tuple(ops[field])
            elif column in NUMBERS or column in OF_HOSTS:
                columns[column] = _int64(ops[field], "op", field)
        columns["host_waits"] = columns["host_waits"].astype(np.bool_)
        for field, column in TENSOR_COLUMNS.items():
            if field in ("resident", "keep"):
                columns[column] = np.array(tensors[field], np.bool_)
            elif column in OF_TENSORS:
                columns[column] = _int64(tensors[field], "tensor", field)
        offsets = np.zeros(len(tensors["consumers"]) + 1, np.int64)
        np.cumsum([len(consumers) for consumers in tensors["consumers"]], out=offsets[1:])
        consumers = _int64(list(chain.from_iterable(tensors["consumers"])), "tensor", "consumers")
        return cls(name=name, **columns, consumer_offsets=offsets, consumers=consumers)

    @property
    def ops(self) -> "OpView":
        """[N] the ops as records, made when they are asked for; also by name: `graph.ops["encoder.0.matmul"]`."""
        return OpView(self)

    def op(self, number: int) -> Op:
        """Returns op `number` as a record."""
        return Op(*(column[number] for column in self._op_columns))

    def chosen_ops(self, numbers: Sequence[int]) -> list[Op]:
        """Returns ops as records of a graph of them alone: origins are numbered by their places in `numbers`."""
        place = {number: place for place, number in enumerate(numbers)}
        ops = [self.op(number) for number in numbers]
        return [replace(op, origin=place.get(op.origin, -1)) if op.origin >= 0 else op for op in ops]

    def tensor(self, number: int) -> Tensor:
        """Returns tensor `number` as a record."""
        producer, consumers, *rest = (column[number] for column in self._tensor_columns)
        return Tensor(producer, tuple(consumers), *rest)

    @cached_property
    def op_numbers(self) -> Mapping[str, int]:
        """The number of each op by its name."""
        return {name: number for number, name in enumerate(self.op_names)}

    @cached_property
    def role_code(self) -> I64:
        """[N] the place of each op's role in `gdp.graph.copies.ROLES`."""
        return role_codes(self.roles)

    def is_in_role(self, *names: str) -> Bool:
        """Returns [N] the ops with one of these roles."""
        return have_role(self.role_code, names)

    @cached_property
    def is_collective(self) -> Bool:
        """[N] the ops that move data between replicas."""
        return self.is_in_role(*EXCHANGE)

    @cached_property
    def first_copy(self) -> I64:
        """[N] the first of the copies that each op is one of: an op of its role."""
        return first_copies(self.origins, self.role_code)

    @cached_property
    def root(self) -> I64:
        """[N] the op of the model that each op is a copy of, or made for."""
        return roots(self.origins)

    def is_in_phase(self, name: str) -> Bool:
        """Returns [N] the ops of the phase "forward", "backward" or "update"."""
        return np.asarray(self._phase_code == PHASES.index(name), np.bool_)

    @cached_property
    def _phase_code(self) -> I64:
        """[N] the place of each op's phase in PHASES."""
        return np.fromiter(map(PHASES.index, self.phases), np.int64, self.num_ops)

    def is_of_kind(self, *names: str) -> Bool:
        """Returns [N] the ops of one of these kinds."""
        return np.fromiter(map(frozenset(names).__contains__, self.kinds), np.bool_, self.num_ops)

    def columns_of(self, ops: I64) -> dict[str, Any]:
        """Returns the columns of `ops`, in this order, for another graph; their origins are numbered as here."""
        if len(ops) == self.num_ops and (np.diff(ops, prepend=-1) == 1).all():
            texts = {name: getattr(self, name) for name in (*TEXTS, "times_ns")}
        else:
            chosen = ops.tolist()
            texts = {name: tuple(map(getattr(self, name).__getitem__, chosen)) for name in (*TEXTS, "times_ns")}
        return texts | {name: getattr(self, name)[ops] for name in (*NUMBERS, *OF_HOSTS)}

    @cached_property
    def _op_columns(self) -> tuple[Sequence[Any], ...]:
        """The values of all ops, field by field of `Op`."""
        columns = {name: getattr(self, column) for name, column in OP_COLUMNS.items()}
        return tuple(map(_listed, (columns | {"time_ns": [dict(times) for times in self.times_ns]}).values()))

    @cached_property
    def _tensor_columns(self) -> tuple[Sequence[Any], ...]:
        """The values of all tensors, field by field of `Tensor`."""
        columns = {name: getattr(self, column) for name, column in TENSOR_COLUMNS.items()}
        offsets, consumers = self.consumer_offsets.tolist(), self.consumers.tolist()
        of_tensors = [consumers[start:end] for start, end in pairwise(offsets)]
        return tuple(map(_listed, (columns | {"consumers": of_tensors}).values()))

    def consumers_of(self, tensor: int) -> I64:
        """[num_consumers] the ops that consume `tensor`."""
        return self.consumers[self.consumer_offsets[tensor] : self.consumer_offsets[tensor + 1]]

    @cached_property
    def edge_tensors(self) -> I64:
        """[E] the tensor of each entry of `consumers`."""
        return np.repeat(np.arange(self.num_tensors, dtype=np.int64), np.diff(self.consumer_offsets))

    @cached_property
    def base(self) -> I64:
        """[T] the tensor whose memory each is in: itself, or what it is a view of."""
        return np.where(self.view_of >= 0, self.view_of, np.arange(self.num_tensors))

    @cached_property
    def group_index(self) -> I64:
        """[N] units that move as one, numbered from 0 in the order of first ops: groups, and other ops each alone."""
        return by_first(np.where(self.groups >= 0, self.groups, -1 - np.arange(self.num_ops)))

    @cached_property
    def told_columns(self) -> tuple[str, ...]:
        """The columns of `OPTIONAL` that files and fingerprints have: where an op differs from the default."""
        told = {name: (getattr(self, name) != default).any() for name, default in OF_HOSTS.items()}
        return tuple(name for name in OPTIONAL if (told[name] if name in told else any(getattr(self, name))))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all columns; see `gdp.graph.fingerprint`. The graph's name is left out."""
        return graph_fingerprint(self)

    def to_document(self) -> dict[str, Any]:
        """Returns the `gdp-graph` document with every field explicit, but for those that no op tells."""
        columns = dict(zip(OP_COLUMNS, self._op_columns, strict=True))
        fields = [name for name in columns if name not in OPTIONAL or name in self.told_columns]
        ops, tensors = zip(*map(columns.__getitem__, fields), strict=True), zip(*self._tensor_columns, strict=True)
        listed = [dict(zip(fields, values, strict=True)) for values in ops]
        others = [dict(zip(TENSOR_COLUMNS, values, strict=True)) for values in tensors]
        return {"format": FORMAT, "version": VERSION, "name": self.name, "ops": listed, "tensors": others}

    def save(self, path: str | Path) -> None:
        """Writes a `gdp-graph` file, atomically: columns for `.safetensors`, else JSON, gzip for `.gz`."""
        with files.without_collection():
            if is_in_columns(path):
                write_columns(self, path)
            else:
                files.write_json(path, self.to_document())

    @classmethod
    def load(cls, path: str | Path) -> "Graph":
        """Reads a `gdp-graph` file. InputError names the file, the place and the remedy."""
        if not is_in_columns(path):
            document = files.read_json(path)
            with prefixed(path), files.without_collection():
                return cls.from_document(document)
        with files.without_collection():
            fields = read_columns(path)
            with prefixed(path):
                return cls(**fields)

    @classmethod
    def from_document(cls, document: object) -> "Graph":
        """Builds the graph of a `gdp-graph` document; unknown keys, wrong types and versions are errors."""
        return cls._of_values(*read_document(document))


_NO_TIMES: Mapping[str, int] = MappingProxyType({})


def _read_only(times: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(times) if times else _NO_TIMES


def _listed(column: Sequence[Any]) -> Sequence[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else column


def _int64(values: Sequence[int], record: str, name: str) -> I64:
    try:
        return np.array(values, np.int64) if values else np.zeros(0, np.int64)
    except (OverflowError, TypeError, ValueError):
        bad = next(i for i, value in enumerate(values) if type(value) is not int or not -(2**63) <= value < 2**63)
        raise InputError(
            f"{record} {bad}: {name} is {files.brief(values[bad])}; an integer below 2^63 is expected"
        ) from None


class OpView(Sequence[Op]):
    """The ops of a graph, one record each."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __len__(self) -> int:
        return self._graph.num_ops

    @overload
    def __getitem__(self, key: int | str) -> Op: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Op, ...]: ...
    def __getitem__(self, key: int | str | slice) -> Op | tuple[Op, ...]:
        if isinstance(key, slice):
            return tuple(self._graph.op(number) for number in range(len(self))[key])
        if not isinstance(key, str):
            return self._graph.op(range(len(self))[key])
        if key not in self._graph.op_numbers:
            raise InputError(
                f"graph {self._graph.name!r} has no op {key!r}; {suggest(key, self._graph.op_names, most=8)}"
            )
        return self._graph.op(self._graph.op_numbers[key])

    def __repr__(self) -> str:
        """Returns `<25 ops: 'left.0', 'right.0', 'left.1', ...>`."""
        names = ", ".join(map(repr, self._graph.op_names[:3]))
        return f"<{notebook.count(len(self), 'op')}: {names}{', ...' if len(self) > 3 else ''}>"
