"""GraphBuilder: a graph under construction, of whole blocks of ops and tensors in place of single ones."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, Bool
from gdp.graph.columns import NUMBERS, OF_TENSORS, TEXTS
from gdp.graph.graph import Graph


class GraphBuilder:
    """Collects ops and tensors block by block; ops are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self.num_ops = self.num_tensors = 0
        self._ops: dict[str, list[Any]] = {name: [] for name in _TEXTS + _FIGURES}
        self._tensors: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in OF_TENSORS}
        self._edges: list[tuple[I64, I64]] = []
        self._origins: list[tuple[I64, I64]] = []

    @classmethod
    def of(cls, graph: Graph) -> "GraphBuilder":
        """Returns a builder that has all of `graph`, under the same numbers."""
        builder = cls()
        number = builder.copy_ops(graph, np.arange(graph.num_ops))
        builder.copy_origins(graph, number)
        builder.copy_tensors(graph, number)
        return builder

    def add_ops(self, names: Sequence[str], kind: str, **figures: Any) -> I64:
        """Adds ops of one kind and returns their numbers; `figures` are fields of `Graph`, one value or one per op."""
        count = len(names)
        block = {"dtypes": "float32", "phases": "", "modules": "", "roles": ""} | figures
        for name in ("dtypes", "phases", "modules", "roles"):
            value = block[name]
            self._ops[name] += [value] * count if isinstance(value, str) else value
        self._ops["op_names"] += names
        self._ops["kinds"] += [kind] * count
        self._ops["times_ns"] += [MappingProxyType(dict(figures.get("times_ns", {})))] * count
        for name in _FIGURES:
            default = -1 if name == "groups" else 0
            self._ops[name].append(np.broadcast_to(np.asarray(block.get(name, default), np.int64), count))
        return self._numbered(count)

    def copy_ops(self, graph: Graph, ops: I64, **changed: Any) -> I64:
        """Adds `ops` of `graph`; returns their numbers.

        `changed` are columns of the copies [len(ops)] that differ from those of `graph`; they have no origins.
        """
        columns = graph.columns_of(ops) | changed
        for name in _TEXTS:
            self._ops[name] += columns[name]
        for name in _FIGURES:
            self._ops[name].append(columns[name])
        return self._numbered(len(ops))

    def set_origins(self, ops: I64, origins: I64) -> None:
        """Makes `ops` copies of `origins`, or made for them; others keep none."""
        self._origins.append((ops, origins))

    def copy_origins(self, graph: Graph, number: I64) -> None:
        """Gives the ops of `graph`, which are `number` [N] here (-1: left out), the origins that they have there."""
        ops = np.flatnonzero((graph.origins >= 0) & (number >= 0))
        self.set_origins(number[ops], number[graph.origins[ops]])

    def add_tensors(
        self, producers: I64, tensor_bytes: npt.ArrayLike, *, is_resident: bool = False, view_of: I64 | None = None
    ) -> I64:
        """Adds tensors [T] of these ops and returns their numbers; `view_of` [T] is -1 or the number of the base."""
        count = len(producers)
        columns = {
            "producers": producers,
            "tensor_bytes": np.broadcast_to(np.asarray(tensor_bytes, np.int64), count),
            "is_resident": np.full(count, is_resident),
            "is_kept": np.zeros(count, np.bool_),
            "view_of": np.full(count, -1) if view_of is None else view_of,
        }
        return self._add_tensors(columns)

    def copy_tensors(
        self, graph: Graph, number: I64, *, tensor_bytes: I64 | None = None, is_edge: Bool | None = None
    ) -> I64:
        """Adds the tensors of `graph` with their consumers; returns their numbers [T], -1 for those left out.

        `number` [N] are the ops' numbers, -1 for those that are not copied: their results and reads are left out.
        `tensor_bytes` [T] are other sizes; `is_edge` [E] tells the consumers that are copied, by default all.
        """
        chosen = np.flatnonzero(number[graph.producers] >= 0)
        tensors = np.full(graph.num_tensors, -1)
        tensors[chosen] = self.num_tensors + np.arange(len(chosen))
        bases = graph.view_of[chosen]
        columns = {name: getattr(graph, name)[chosen] for name in ("is_resident", "is_kept")}
        columns["producers"] = number[graph.producers[chosen]]
        columns["tensor_bytes"] = (graph.tensor_bytes if tensor_bytes is None else tensor_bytes)[chosen]
        columns["view_of"] = np.where(bases >= 0, tensors[bases], -1)
        self._add_tensors(columns)
        copied = (tensors[graph.edge_tensors] >= 0) & (number[graph.consumers] >= 0)
        copied &= True if is_edge is None else is_edge
        self.add_edges(tensors[graph.edge_tensors[copied]], number[graph.consumers[copied]])
        return tensors

    def add_edges(self, tensors: I64, consumers: I64) -> None:
        """Makes op `consumers[i]` a consumer of tensor `tensors[i]`."""
        self._edges.append((tensors, consumers))

    def control(self, producers: I64, consumers: I64) -> None:
        """Makes op `consumers[i]` wait for op `producers[i]`: one tensor of no bytes for each producer."""
        distinct, which = np.unique(producers, return_inverse=True)
        self.add_edges(self.add_tensors(distinct, 0)[which], consumers)

    def build(self, name: str, position: I64 | None = None) -> Graph:
        """Returns the graph; InputError where it is none.

        `position` [M] orders the ops anew; those of one position keep the order in which they were added.
        """
        columns: dict[str, Any] = {column: tuple(self._ops[column]) for column in _TEXTS}
        columns |= {column: np.concatenate(self._ops[column]) for column in _FIGURES}
        columns |= {column: np.concatenate(self._tensors[column]) for column in OF_TENSORS}
        columns["origins"] = np.full(self.num_ops, -1)
        for ops, origins in self._origins:
            columns["origins"][ops] = origins
        tensors = np.concatenate([tensors for tensors, _ in self._edges])
        consumers = np.concatenate([consumers for _, consumers in self._edges])
        if position is not None:
            order = np.argsort(position, kind="stable")
            number = np.empty(self.num_ops, np.int64)
            number[order] = np.arange(self.num_ops)
            texts = {column: tuple(map(columns[column].__getitem__, order.tolist())) for column in _TEXTS}
            columns |= texts | {column: columns[column][order] for column in _FIGURES}
            origins = columns["origins"][order]
            columns["origins"] = np.where(origins >= 0, number[origins], -1)
            columns["producers"], consumers = number[columns["producers"]], number[consumers]
        edges = np.sort(tensors * self.num_ops + consumers)
        counts = np.bincount(tensors, minlength=self.num_tensors)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return Graph(name=name, **columns, consumer_offsets=offsets, consumers=edges % self.num_ops)

    def _numbered(self, count: int) -> I64:
        self.num_ops += count
        return np.arange(self.num_ops - count, self.num_ops)

    def _add_tensors(self, columns: dict[str, Any]) -> I64:
        for name in OF_TENSORS:
            self._tensors[name].append(columns[name])
        count = len(columns["producers"])
        self.num_tensors += count
        return np.arange(self.num_tensors - count, self.num_tensors)


def with_controls(graph: Graph, producers: I64, consumers: I64) -> Graph:
    """Returns `graph` in which op `consumers[i]` waits for op `producers[i]`."""
    builder = GraphBuilder.of(graph)
    builder.control(producers, consumers)
    return builder.build(graph.name)


_TEXTS = (*TEXTS, "times_ns")
_FIGURES = tuple(name for name in NUMBERS if name != "origins")
