"""Columns: a graph under construction, of whole blocks of ops and tensors in place of single ones."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.graph import Graph

_NO_TIMES: Any = MappingProxyType({})


class Columns:
    """Collects ops and tensors block by block; ops are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self.num_ops = self.num_tensors = 0
        self._ops: dict[str, list[Any]] = {name: [] for name in _TEXTS + _FIGURES}
        self._tensors: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _OF_TENSORS}
        self._edges: list[tuple[I64, I64]] = []

    def add_ops(self, names: Sequence[str], kind: str, **figures: Any) -> I64:
        """Adds ops of one kind and returns their numbers; `figures` are fields of `Graph`, one value or one per op."""
        count = len(names)
        block = {"dtypes": "float32", "phases": "", "modules": ""} | figures
        for name in ("dtypes", "phases", "modules"):
            value = block[name]
            self._ops[name] += [value] * count if isinstance(value, str) else value
        self._ops["op_names"] += names
        self._ops["kinds"] += [kind] * count
        self._ops["times_ns"] += [_NO_TIMES] * count
        for name in _FIGURES:
            default = -1 if name == "groups" else 0
            self._ops[name].append(np.broadcast_to(np.asarray(block.get(name, default), np.int64), count))
        return self._numbered(count)

    def copy_ops(self, graph: Graph, ops: I64, names: Sequence[str], groups: I64) -> I64:
        """Adds `ops` of `graph` under other names and groups [len(ops)]; returns their numbers."""
        chosen = ops.tolist()
        for name in _TEXTS[1:]:
            column = getattr(graph, name)
            self._ops[name] += [column[op] for op in chosen]
        self._ops["op_names"] += names
        for name in _FIGURES[:-1]:
            self._ops[name].append(getattr(graph, name)[ops])
        self._ops["groups"].append(groups)
        return self._numbered(len(chosen))

    def add_tensors(self, producers: I64, tensor_bytes: npt.ArrayLike, *, is_resident: bool = False) -> I64:
        """Adds tensors [T] of these ops and returns their numbers."""
        count = len(producers)
        columns = {
            "producers": producers,
            "tensor_bytes": np.broadcast_to(np.asarray(tensor_bytes, np.int64), count),
            "is_resident": np.full(count, is_resident),
            "is_kept": np.zeros(count, np.bool_),
            "view_of": np.full(count, -1),
        }
        return self._add_tensors(columns)

    def copy_tensors(self, graph: Graph, number: I64) -> I64:
        """Adds all tensors of `graph` with their consumers; `number` [N] are its ops'. Returns the tensors' numbers."""
        first = self.num_tensors
        view_of = np.where(graph.view_of >= 0, graph.view_of + first, -1)
        columns = {name: getattr(graph, name) for name in ("tensor_bytes", "is_resident", "is_kept")}
        tensors = self._add_tensors(columns | {"producers": number[graph.producers], "view_of": view_of})
        self.add_edges(tensors[graph.edge_tensors], number[graph.consumers])
        return tensors

    def add_edges(self, tensors: I64, consumers: I64) -> None:
        """Makes op `consumers[i]` a consumer of tensor `tensors[i]`."""
        self._edges.append((tensors, consumers))

    def control(self, producers: I64, consumers: I64) -> None:
        """Makes op `consumers[i]` wait for op `producers[i]`: one tensor of no bytes for each producer."""
        distinct, which = np.unique(producers, return_inverse=True)
        self.add_edges(self.add_tensors(distinct, 0)[which], consumers)

    def build(self, name: str) -> Graph:
        """Returns the graph; InputError where it is none."""
        tensors = np.concatenate([tensors for tensors, _ in self._edges])
        consumers = np.concatenate([consumers for _, consumers in self._edges])
        order = np.lexsort((consumers, tensors))
        counts = np.bincount(tensors, minlength=self.num_tensors)
        columns: dict[str, Any] = {column: tuple(self._ops[column]) for column in _TEXTS}
        columns |= {column: np.concatenate(self._ops[column]) for column in _FIGURES}
        columns |= {column: np.concatenate(self._tensors[column]) for column in _OF_TENSORS}
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return Graph(name=name, **columns, consumer_offsets=offsets, consumers=consumers[order])

    def _numbered(self, count: int) -> I64:
        self.num_ops += count
        return np.arange(self.num_ops - count, self.num_ops)

    def _add_tensors(self, columns: dict[str, Any]) -> I64:
        for name in _OF_TENSORS:
            self._tensors[name].append(columns[name])
        count = len(columns["producers"])
        self.num_tensors += count
        return np.arange(self.num_tensors - count, self.num_tensors)


_TEXTS = ("op_names", "kinds", "dtypes", "phases", "modules", "times_ns")
_FIGURES = ("flops", "bytes_accessed", "resident_bytes", "groups")
_OF_TENSORS = ("producers", "tensor_bytes", "is_resident", "is_kept", "view_of")
