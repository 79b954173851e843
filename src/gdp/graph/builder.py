"""Graphs under construction: blocks of ops and tensors, names, topological orders, waits before memory is reused."""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, Bool, position_in, scattered, unique
from gdp.graph.columns import NUMBERS, OF_HOSTS, OF_TENSORS, TEXTS
from gdp.graph.document import Tensor
from gdp.graph.graph import Graph

_Item = TypeVar("_Item")


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
        block = {"dtypes": "float32", "phases": "", "modules": "", "roles": "", "shapes": ""} | figures
        for name in ("dtypes", "phases", "modules", "roles", "shapes"):
            value = block[name]
            self._ops[name] += [value] * count if isinstance(value, str) else value
        self._ops["op_names"] += names
        self._ops["kinds"] += [kind] * count
        self._ops["times_ns"] += [MappingProxyType(dict(figures.get("times_ns", {})))] * count
        for name in _FIGURES:
            default = ({"groups": -1} | OF_HOSTS).get(name, 0)
            self._ops[name].append(np.broadcast_to(np.asarray(block.get(name, default), type(default)), count))
        return self._numbered(count)

    def copy_ops(self, graph: Graph, ops: I64, **changed: Any) -> I64:
        """Adds `ops` of `graph`; returns their numbers. `changed` are columns of the copies [len(ops)] that differ from
        those of `graph`; they have no origins."""
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
        """Adds the tensors of `graph` with their consumers; returns their numbers [T], -1 for those left out. `number`
        [N] are the ops' numbers, -1 for those that are not copied: their results and reads are left out. `tensor_bytes`
        [T] are other sizes; `is_edge` [E] tells the consumers that are copied, by default all."""
        chosen = np.flatnonzero(number[graph.producers] >= 0)
        tensors = scattered(chosen, self.num_tensors + np.arange(len(chosen)), graph.num_tensors)
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
        """Returns the graph; InputError where it is none. `position` [M] orders the ops anew; those of one position
        keep the order in which they were added."""
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
            number = position_in(order, self.num_ops)
            texts = {column: tuple(map(columns[column].__getitem__, order.tolist())) for column in _TEXTS}
            columns |= texts | {column: columns[column][order] for column in _FIGURES}
            origins = columns["origins"][order]
            columns["origins"] = np.where(origins >= 0, number[origins], -1)
            columns["producers"], consumers = number[columns["producers"]], number[consumers]
        offsets, consumers = _edges(tensors, consumers, self.num_tensors, self.num_ops)
        return Graph(name=name, **columns, consumer_offsets=offsets, consumers=consumers)

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
    """Returns `graph` in which op `consumers[i]` waits for op `producers[i]`. Each producer makes one more tensor, of
    no bytes."""
    makers, which = np.unique(producers, return_inverse=True)
    tensors = np.concatenate((graph.edge_tensors, graph.num_tensors + which))
    readers = np.concatenate((graph.consumers, consumers))
    offsets, readers = _edges(tensors, readers, graph.num_tensors + len(makers), graph.num_ops)
    none = np.zeros(len(makers), np.bool_)
    return replace(
        graph,
        producers=np.concatenate((graph.producers, makers)),
        tensor_bytes=np.concatenate((graph.tensor_bytes, np.zeros(len(makers), np.int64))),
        is_resident=np.concatenate((graph.is_resident, none)),
        is_kept=np.concatenate((graph.is_kept, none)),
        view_of=np.concatenate((graph.view_of, np.full(len(makers), -1))),
        consumer_offsets=offsets,
        consumers=readers,
    )


def _edges(tensors: I64, consumers: I64, num_tensors: int, num_ops: int) -> tuple[I64, I64]:
    """Returns the offsets [T + 1] and consumers [E] of (tensor, consumer) pairs, each pair once."""
    edges = unique(tensors * num_ops + consumers)
    counts = np.bincount(edges // num_ops, minlength=num_tensors)
    return np.concatenate(([0], np.cumsum(counts))), edges % num_ops


_TEXTS = (*TEXTS, "times_ns")
_FIGURES = tuple(name for name in (*NUMBERS, *OF_HOSTS) if name != "origins")


class UniqueNames:
    """Gives each op a name of its own."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._counts = Counter[str]()
        self._taken = set(taken)

    def of(self, name: str, stem: str = "") -> str:
        """Returns `name`, numbered (`name_0`, `name_1`, ...) if it is taken; `stem`, numbered, if `name` is empty."""
        stem = name or stem
        while not name or name in self._taken:
            name = f"{stem}_{self._counts[stem]}"
            self._counts[stem] += 1
        self._taken.add(name)
        return name


def topological_order(
    makers: Sequence[Collection[int]], is_late: Callable[[int], bool] = lambda number: False
) -> list[int]:
    """Returns the numbers 0 to N - 1 in an order in which each comes behind its `makers` [N], distinct numbers. The
    least that may come next does; ones that are `is_late` wait. Numbers on or behind a cycle are left out."""
    followers: list[list[int]] = [[] for _ in makers]
    for number, sources in enumerate(makers):
        for source in sources:
            followers[source].append(number)
    missing = list(map(len, makers))
    ready = [(is_late(number), number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for number in followers[order[-1]]:
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(ready, (is_late(number), number))
    return order


def write_after_read(num_ops: int, tensors: Sequence[Tensor], pairs: Iterable[tuple[int, int]]) -> list[Tensor]:
    """Returns a tensor of 0 bytes from each reader to its writers, for the `pairs` (reader, writer) of ops. Pairs that
    a path of `tensors` orders anyway are left out. Ops are numbered in a topological order."""
    counts = [len(tensor.consumers) for tensor in tensors]
    sources = np.repeat(np.array([tensor.producer for tensor in tensors], np.int64), counts)
    targets = np.array([op for tensor in tensors for op in tensor.consumers], np.int64)
    waiting = unordered(num_ops, sources, targets, pairs)
    return [
        Tensor(reader, tuple(writer for _, writer in own)) for reader, own in groupby(waiting, key=lambda pair: pair[0])
    ]


def find(leader: dict[_Item, _Item], item: _Item) -> _Item:
    """Returns the item that leads the set of `item`; `leader` has, for each item but leaders, one nearer to its own."""
    while (above := leader.get(item, item)) != item:
        leader[item] = item = leader.get(above, above)
    return item


def unordered(num_ops: int, sources: I64, targets: I64, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the `pairs` (reader, writer) of ops that no path orders anyway, distinct and sorted. Op `sources[i]`
    comes before op `targets[i]` [E]. Ops are numbered in a topological order."""
    pairs = list(pairs)
    bits = {writer: 1 << place for place, writer in enumerate(dict.fromkeys(writer for _, writer in pairs))}
    later = [0] * num_ops  # the writers that come after each op anyway, as bits
    order = np.argsort(-sources, kind="stable")
    for source, target in zip(sources[order].tolist(), targets[order].tolist(), strict=True):
        later[source] |= later[target] | bits.get(target, 0)
    return sorted({pair for pair in pairs if pair[0] != pair[1] and not later[pair[0]] & bits[pair[1]]})
