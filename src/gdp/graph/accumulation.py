"""Gradient accumulation: the step of M micro-batches with shared parameters and one update.

    parameter ---+-----------------------+---------------------------------------> update
                 v                       |                                           ^
    input -----> forward, backward ------|------- gradient ------> accumulate@1 -----+
    input@1 -------------------------> forward@1, backward@1 ----------^

`accumulated` copies the forward and backward ops of the graph of one micro-batch. Parameters, buffers and updates
occur once. `one_microbatch` is the way back.

N ops, T tensors of one micro-batch; M micro-batches.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.graph.copies import ACCUMULATE, label_end
from gdp.graph.document import Tensor
from gdp.graph.graph import Graph
from gdp.graph.microbatches import SHARED, check_count, count_microbatches, microbatch_of, shared_ops
from gdp.graph.unique_names import UniqueNames

_NO_TIMES: Any = MappingProxyType({})
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of gradients


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A step of M micro-batches, and where the N ops of one are in it."""

    graph: Graph
    number: I64  # [M, N] the copy of each op; -1 for the further ones of an op that all share

    @classmethod
    def of(cls, graph: Graph, num_microbatches: int, *, free_replicas: bool = False) -> "Accumulation":
        """Repeats the step `graph` of one micro-batch; see `accumulated`."""
        check_count(num_microbatches, "microbatches")
        if num_microbatches == 1:
            return cls(graph, np.arange(graph.num_ops)[None, :])
        if (count := count_microbatches(graph)) > 1:
            raise InputError(f"graph {graph.name!r}: has {count} micro-batches already; leave out --microbatches")
        repeated = _Accumulation(graph, num_microbatches, free_replicas)
        return cls(repeated.build(), repeated.number)


def accumulated(graph: Graph, num_microbatches: int, *, free_replicas: bool = False) -> Graph:
    """Returns the step of `num_microbatches` micro-batches, from the step `graph` of one.

    Gradients are added up in the order of micro-batches, on the update's device, by ops called `....accumulate@m`. All
    copies of an op share a device (a group). With `free_replicas`, only copies that read or write memory which outlives
    a micro-batch do. An op that overwrites a buffer (running statistics) waits for its copy of the micro-batch before
    and for the readers of that copy's result. InputError for a number out of range, or a graph that has micro-batches
    already.
    """
    return Accumulation.of(graph, num_microbatches, free_replicas=free_replicas).graph


class _Accumulation:
    """Numbers shared sources, then the ops of each micro-batch and its sums, then updates; and connects them.

    G gradients, in the order in which they are made.
    """

    def __init__(self, graph: Graph, num_microbatches: int, free_replicas: bool) -> None:
        self.graph, self.num_microbatches, self.free_replicas = graph, num_microbatches, free_replicas
        self.is_source, self.is_update = shared_ops(graph)
        self.is_repeated = ~(self.is_source | self.is_update)
        self.writers = _buffer_writers(graph, self.is_repeated)
        by_update = np.zeros(graph.num_tensors, np.bool_)
        by_update[graph.edge_tensors[self.is_update[graph.consumers]]] = True
        added = np.flatnonzero(by_update & self.is_repeated[graph.producers] & (graph.tensor_bytes > 0))
        self.gradients = added[np.argsort(graph.producers[added], kind="stable")]  # [G]
        reads = self.is_update[graph.consumers]  # each gradient's updates
        tensors, updates = graph.edge_tensors[reads], graph.consumers[reads]
        self.first_update = updates[np.searchsorted(tensors, self.gradients)]  # [G]
        sources, repeated, late = map(np.flatnonzero, (self.is_source, self.is_repeated, self.is_update))
        num_sums = len(self.gradients)
        stride = len(repeated) + num_sums
        self.number = np.full((num_microbatches, graph.num_ops), -1)  # by micro-batch and op
        self.number[0, sources] = np.arange(len(sources))
        starts = len(sources) + np.arange(num_microbatches)[:, None] * stride - num_sums
        starts[0] += num_sums  # sums begin with the second micro-batch
        self.number[:, repeated] = starts + np.arange(len(repeated))
        self.adder = starts + len(repeated) + np.arange(num_sums)  # [M, G] the first row is of no use
        self.num_ops = len(sources) + num_microbatches * stride - num_sums + len(late)
        self.number[0, late] = np.arange(self.num_ops - len(late), self.num_ops)
        self.copied, self.repeated, self.late = sources, repeated, late

    def build(self) -> Graph:
        """Returns the graph of all micro-batches."""
        producers, tensor_columns = self._tensors()
        edges = np.concatenate([tensors * self.num_ops + consumers for tensors, consumers in self._edges()])
        edges.sort()
        counts = np.bincount(edges // self.num_ops, minlength=len(producers))
        return Graph(
            name=self.graph.name,
            **self._ops(),
            producers=producers,
            **tensor_columns,
            consumer_offsets=np.concatenate(([0], np.cumsum(counts))),
            consumers=edges % self.num_ops,
        )

    def _ops(self) -> dict[str, Any]:
        """Returns the columns of ops."""
        graph, groups = self.graph, self._groups()
        sizes = graph.tensor_bytes[self.gradients]
        dtypes = [graph.dtypes[op] for op in graph.producers[self.gradients].tolist()]
        element_bytes = np.array([ELEMENT_BYTES.get(dtype, 4) for dtype in dtypes], np.int64)
        sums: dict[str, list[Any]] = {
            "kinds": ["aten.add_"] * len(sizes),
            "dtypes": dtypes,
            "phases": ["backward"] * len(sizes),
            "modules": [graph.modules[update] for update in self.first_update.tolist()],
            "roles": [ACCUMULATE] * len(sizes),
            "times_ns": [_NO_TIMES] * len(sizes),
        }
        later = self.num_microbatches - 1
        columns: dict[str, Any] = {}
        sums["op_names"] = self._sum_names()
        for name, of_sums in sums.items():
            column = getattr(graph, name)
            first, each, last = ([column[op] for op in ops.tolist()] for ops in self._parts())
            each += of_sums
            if name == "op_names":
                ends = map(label_end, range(1, later + 1), [0] * later)
                repeated = [stem + end for end in ends for stem in each]
            else:
                repeated = each * later
            columns[name] = (*first, *repeated, *last)
        before, again, late = self._parts()
        for name, per_sum in (
            ("flops", sizes // element_bytes),
            ("bytes_accessed", 3 * sizes),  # both are read, one is written
        ):
            figures = getattr(graph, name)
            further = np.tile(np.concatenate((figures[again], per_sum)), later)
            columns[name] = np.concatenate((figures[before], further, figures[late]))
        none = np.zeros(len(sizes), np.int64)
        own = self.free_replicas & (groups != groups[0])[:, again]
        resident, of_sums = graph.resident_bytes, groups[0][self.first_update]
        columns["resident_bytes"] = np.concatenate(
            [resident[before], *(part for row in own[1:] for part in (resident[again] * row, none)), resident[late]]
        )
        columns["groups"] = np.concatenate(
            [groups[0][before], *(part for row in groups[1:] for part in (row[again], of_sums)), groups[0][late]]
        )
        columns["replicas"] = np.zeros(self.num_ops, np.int64)
        numbers = np.repeat(np.arange(1, later + 1), len(again) + len(sizes))
        columns["microbatches"] = np.concatenate((0 * before, numbers, 0 * late))
        columns["origins"] = self._origins()
        return columns

    def _origins(self) -> I64:
        """Returns the op that each is a copy of, or made for: the first sum of a gradient is made for an update."""
        graph, again, first_sums = self.graph, self.repeated, self.adder[1]
        own = np.where(graph.origins >= 0, self.number[0][graph.origins], -1)
        origins = np.empty(self.num_ops, np.int64)
        origins[self.number[0]] = own
        origins[self.number[1:, again]] = self.number[0][graph.first_copy[again]]
        origins[self.adder[1:]] = first_sums
        origins[first_sums] = self.number[0][self.first_update]
        return origins

    def _parts(self) -> tuple[I64, I64, I64]:
        """Returns the ops that come first, with those of the first micro-batch; those of each further one; updates."""
        return np.concatenate((self.copied, self.repeated)), self.repeated, self.late

    def _tensors(self) -> tuple[I64, dict[str, Any]]:
        """Returns producers and further columns: those of each micro-batch, then sums, then waits for buffers."""
        graph, later = self.graph, self.num_microbatches - 1
        self.again = np.flatnonzero(self.is_repeated[graph.producers])
        self.position = np.full((self.num_microbatches, graph.num_tensors), -1)  # by micro-batch and tensor
        self.position[0] = np.arange(graph.num_tensors)
        starts = graph.num_tensors + np.arange(later)[:, None] * len(self.again)
        self.position[1:, self.again] = starts + np.arange(len(self.again))
        self.buffer_order = sorted(self._buffer_order().items())
        makers = graph.producers
        producers = [self.number[0][makers], self.number[1:, makers[self.again]].reshape(-1)]
        producers += [self.adder[1:].reshape(-1), np.array([before for before, _ in self.buffer_order], np.int64)]
        num_waits, num_sums = len(self.buffer_order), later * len(self.gradients)
        self.first_sum = graph.num_tensors + later * len(self.again)
        self.first_wait = self.first_sum + num_sums
        sizes = np.tile(graph.tensor_bytes[self.gradients], later)
        columns: dict[str, Any] = {}
        for name in ("tensor_bytes", "is_resident", "is_kept"):
            column = getattr(graph, name)
            new = np.zeros(num_sums + num_waits, column.dtype)
            if name == "tensor_bytes":
                new[:num_sums] = sizes
            columns[name] = np.concatenate((column, np.tile(column[self.again], later), new))
        bases = graph.view_of[self.again]
        views = np.where(bases >= 0, self.position[1:, bases], -1).reshape(-1)
        columns["view_of"] = np.concatenate((graph.view_of, views, np.full(num_sums + num_waits, -1)))
        return np.concatenate(producers), columns

    def _edges(self) -> Iterator[tuple[I64, I64]]:
        """Yields tensors and their consumers; all micro-batches consume a shared tensor."""
        graph, last = self.graph, self.num_microbatches - 1
        tensors, consumers = graph.edge_tensors, graph.consumers
        is_gradient = np.zeros(graph.num_tensors, np.bool_)
        is_gradient[self.gradients] = True
        is_shared = ~self.is_repeated[graph.producers[tensors]]
        by_update = self.is_update[consumers]
        yield tensors[is_shared & by_update], self.number[0][consumers[is_shared & by_update]]
        own, late = ~is_shared & ~by_update, ~is_shared & by_update & ~is_gradient[tensors]
        for microbatch in range(self.num_microbatches):
            number, position = self.number[microbatch], self.position[microbatch]
            yield tensors[is_shared & ~by_update], number[consumers[is_shared & ~by_update]]
            yield position[tensors[own]], number[consumers[own]]
            yield position[tensors[late]], self.number[0][consumers[late]]
            yield position[self.gradients], self.adder[max(microbatch, 1)]
        num_sums = len(self.gradients)
        chained = self.first_sum + np.arange((last - 1) * num_sums)
        yield chained, self.adder[2:].reshape(-1)
        final = np.full(graph.num_tensors, -1)
        final[self.gradients] = self.first_sum + (last - 1) * num_sums + np.arange(num_sums)
        read = by_update & is_gradient[tensors]
        yield final[tensors[read]], self.number[0][consumers[read]]
        for tensor, (_, after) in enumerate(self.buffer_order, self.first_wait):
            yield np.full(len(after), tensor), np.array(sorted(after), np.int64)

    def _groups(self) -> I64:
        """Returns the group of each copy [M, N]."""
        groups = self.graph.groups
        by_copy = np.tile(groups, (self.num_microbatches, 1))
        next_group = int(groups.max()) + 1
        if not self.free_replicas:  # an update needs a group for its sums to join
            ungrouped = np.flatnonzero((groups < 0) & ~self.is_source)
            by_copy[:, ungrouped] = next_group + np.arange(len(ungrouped))
            return by_copy
        ungrouped = np.unique(self.first_update[groups[self.first_update] < 0])
        by_copy[:, ungrouped] = next_group + np.arange(len(ungrouped))
        next_group += len(ungrouped)
        owners = np.flatnonzero((groups < 0) & self.is_repeated & (self.graph.resident_bytes > 0))  # weights, say
        by_copy[:, owners] = next_group + np.arange(len(owners))
        next_group += len(owners)
        fixed = np.unique(groups[~self.is_repeated])
        fixed = np.union1d(fixed, groups[[op for ops in self.writers.values() for op in ops]])
        is_movable = self.is_repeated & (groups >= 0) & ~np.isin(groups, fixed)
        for microbatch in range(1, self.num_microbatches):
            by_copy[microbatch, is_movable] += next_group * microbatch
        return by_copy

    def _sum_names(self) -> list[str]:
        """Names the sums of gradients [G] by the parameter that the update reads: `layers.0.weight.accumulate`."""
        graph = self.graph
        sources = graph.producers[graph.edge_tensors]
        is_own = self.is_source[sources] & self.is_update[graph.consumers]
        is_own &= graph.groups[sources] == graph.groups[graph.consumers]
        reads = np.flatnonzero(is_own)[::-1]
        parameter = dict(zip(graph.consumers[reads].tolist(), sources[reads].tolist(), strict=True))
        names = UniqueNames()
        for name in graph.op_names:
            names.of(name)
        owners = [parameter.get(update, update) for update in self.first_update.tolist()]
        return [names.of(f"{graph.op_names[op]}.{ACCUMULATE}") for op in owners]

    def _buffer_order(self) -> dict[int, set[int]]:
        """Maps each op to the ops that wait for it, so that buffers are overwritten in the order of micro-batches."""
        graph, after = self.graph, defaultdict[int, set[int]](set)
        for group, writers in self.writers.items():
            reads_buffer = (graph.is_resident & (graph.groups[graph.producers] == group))[graph.edge_tensors]
            readers = np.unique(graph.consumers[reads_buffer & self.is_repeated[graph.consumers]]).tolist()
            users = sorted({*writers, *(op for op in readers if not _ignores_buffers(graph.kinds[op]))})
            for microbatch in range(1, self.num_microbatches):
                before, later = self.number[microbatch - 1], self.number[microbatch]
                for user in users:
                    after[int(before[user])].update(later[writers].tolist())
                for writer in writers:
                    after[int(before[writer])].update(later[users].tolist())
        return after


def _ignores_buffers(kind: str) -> bool:
    """Batch normalisation's backward ops are given running statistics, which they do not use in training."""
    return "batch_norm" in kind and "backward" in kind


def _buffer_writers(graph: Graph, is_repeated: Bool) -> dict[int, list[int]]:
    """Maps each group to its ops of a micro-batch that overwrite memory which outlives the micro-batch."""
    writers = defaultdict[int, list[int]](list)
    for op in np.unique(graph.producers[graph.is_resident]).tolist():
        if is_repeated[op] and graph.groups[op] >= 0 and graph.resident_bytes[op] == 0:
            writers[int(graph.groups[op])].append(op)
    return dict(writers)


def one_microbatch(graph: Graph) -> Graph:
    """Returns the step of one micro-batch of `graph`, a step of several.

    InputError where it has none, or where that step in as many micro-batches is another one.
    """
    microbatch = microbatch_of(graph)
    count = int(microbatch.max()) + 1
    if count < 2 or graph.replicas.any():
        raise InputError(
            f"graph {graph.name!r}: has no micro-batches of one copy of the model; if it is the step of one "
            "micro-batch, say how many there are with --microbatches"
        )
    kept = np.flatnonzero((microbatch == SHARED) | (microbatch == 0))
    number = np.full(graph.num_ops, -1)
    number[kept] = np.arange(len(kept))
    readers = _readers_of_sums(graph, count)
    tensors: list[Tensor] = []
    position: dict[int, int] = {}
    for tensor in np.flatnonzero(number[graph.producers] >= 0).tolist():
        row = graph.tensor(tensor)
        consumers = {int(number[op]) for op in row.consumers if number[op] >= 0}
        consumers.update(int(number[op]) for sums in row.consumers for op in readers.get(sums, ()))
        if row.consumers and not consumers and not row.bytes:  # a wait of the next micro-batch
            continue
        position[tensor] = len(tensors)
        tensors.append(replace(row, producer=int(number[row.producer]), consumers=tuple(sorted(consumers))))
    rows = [replace(row, view_of=position[row.view_of]) if row.view_of >= 0 else row for row in tensors]
    one = Graph.build(graph.name, graph.chosen_ops(kept.tolist()), rows)
    again = accumulated(one, count)
    if (again.num_ops, int(again.flops.sum())) != (graph.num_ops, int(graph.flops.sum())):
        raise InputError(f"graph {graph.name!r}: its {count} micro-batches are not alike; name the model itself")
    return one


def _readers_of_sums(graph: Graph, count: int) -> dict[int, tuple[int, ...]]:
    """Maps each first sum of gradients to the ops that read the last one."""
    sums = np.flatnonzero(graph.is_in_role(ACCUMULATE) & (graph.microbatches == count - 1))
    results = dict(zip(graph.producers.tolist(), range(graph.num_tensors), strict=True))
    return {int(graph.first_copy[op]): tuple(graph.consumers_of(results[op]).tolist()) for op in sums.tolist()}
