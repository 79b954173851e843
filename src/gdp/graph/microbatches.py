"""Micro-batches: a step as gradient accumulation over M of them, with shared parameters and one update.

    parameter ---+-----------------------+---------------------------------------> update
                 v                       |                                           ^
    input -----> forward, backward ------|------- gradient ------> accumulate@1 -----+
    input@1 -------------------------> forward@1, backward@1 ----------^

`accumulated` repeats the forward and backward ops of the graph of one micro-batch. Parameters, buffers and updates
occur once. The replica of op `x` for micro-batch m is called `x@m`, the one for micro-batch 0 `x`; these names show
whether a graph from a file has micro-batches. The graph determines the samples of a micro-batch: models are captured
with an even part of their batch.

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
from gdp.graph.copy_names import split_name
from gdp.graph.graph import Graph, Tensor

MAX_MICROBATCHES = 1024  # far beyond any use; a number with more digits is a typing error
SHARED = -1
"""The micro-batch number of ops that all micro-batches share: parameters, buffers, updates."""

ACCUMULATE = ".accumulate"  # sums begin with the second micro-batch
_NO_TIMES: Any = MappingProxyType({})
_SOURCE_KINDS = ("parameter", "buffer", "constant")
RECOMPUTED = "!"
"""What the name of a copy ends with that computes an op's results once more, for the backward pass."""
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of gradients


def accumulated(graph: Graph, num_microbatches: int, *, free_replicas: bool = False) -> Graph:
    """Returns the step of `num_microbatches` micro-batches, from the step `graph` of one.

    Gradients are added up in the order of micro-batches, on the update's device, by ops called `....accumulate@m`. All
    replicas of an op share a device (a group). With `free_replicas`, only replicas that read or write memory which
    outlives a micro-batch do. An op that overwrites a buffer (running statistics) waits for its replica of the
    micro-batch before and for the readers of that replica's result. InputError for a number out of range, or a graph
    that has micro-batches already.
    """
    check_count(num_microbatches, "microbatches")
    if num_microbatches == 1:
        return graph
    if (count := count_microbatches(graph)) > 1:
        raise InputError(f"graph {graph.name!r}: has {count} micro-batches already; leave out --microbatches")
    return _Accumulation(graph, num_microbatches, free_replicas).build()


def check_count(num_microbatches: int, where: str) -> None:
    """Raises InputError for a number of micro-batches out of range."""
    if not 1 <= num_microbatches <= MAX_MICROBATCHES:
        raise InputError(f"{where} is {num_microbatches}; an integer from 1 to {MAX_MICROBATCHES} is expected")


def microbatch_of(graph: Graph) -> I64:
    """[ops] the micro-batch of each op, SHARED for ops that all share; all SHARED in a graph without micro-batches.

    Names count only if, in each replica of the model, every op has a copy of its kind and phase for each micro-batch.
    """
    none = np.full(graph.num_ops, SHARED)
    names, replica = graph.copy_names, replica_of(graph)
    microbatch = np.where(names.replica == replica, names.microbatch, 0)
    if not microbatch.any():
        return none
    num_bases = len(names.bases)
    key = replica * num_bases + names.base  # of copies of an op in one replica of the model
    is_later = microbatch > 0
    num_keys = (int(replica.max()) + 1) * num_bases
    copies = np.bincount(key[is_later], minlength=num_keys)
    last = np.zeros(int(replica.max()) + 1, np.int64)
    np.maximum.at(last, replica, microbatch)
    is_repeated = np.asarray(copies > 0, np.bool_)
    is_sum = np.tile(np.array([ACCUMULATE in base for base in names.bases], np.bool_), len(last))
    has_first = np.zeros(num_keys, np.bool_)
    has_first[key[~is_later]] = True
    is_odd = np.logical_or(copies != np.repeat(last, num_bases), ~(has_first | is_sum))
    if np.logical_and(is_odd, is_repeated).any() or not _are_alike(graph, key, is_repeated):
        return none
    # a replica with one micro-batch, beside others with several, has the first one of what they repeat
    of_any = np.asarray(is_repeated.reshape(len(last), num_bases).any(axis=0), np.bool_)
    is_part = np.where(last[replica] > 0, is_repeated[key], of_any[names.base])
    return np.where(is_part, microbatch, SHARED)


def _are_alike(graph: Graph, key: I64, is_chosen: Bool) -> bool:
    """Tells if ops of one `key` [N] have one kind and phase, for the keys that are chosen."""
    sort = _sorts(graph)
    ops = np.flatnonzero(is_chosen[key])
    some = np.zeros(len(is_chosen), np.int64)
    some[key[ops]] = sort[ops]
    return bool((some[key[ops]] == sort[ops]).all())


def _sorts(graph: Graph) -> I64:
    """[ops] a number for each pair of a kind and a phase."""
    numbers: dict[tuple[str, str], int] = {}
    pairs = zip(graph.kinds, graph.phases, strict=True)
    return np.fromiter((numbers.setdefault(pair, len(numbers)) for pair in pairs), np.int64, graph.num_ops)


def base_name(name: str) -> str:
    """Returns the name of the op that `name` is a copy of, for a micro-batch, a replica or to recompute it."""
    return split_name(name)[0].removesuffix(RECOMPUTED)


def replica_of(graph: Graph) -> I64:
    """[ops] the replica of the model that each op is of; all 0 in a graph without replicas.

    Names count only if each replica has a copy, of its kind and phase, of every op of the first one, collectives and
    sums of gradients apart.
    """
    names = graph.copy_names
    replica = names.replica
    if not replica.any():
        return replica
    is_sum = np.array([ACCUMULATE in base for base in names.bases])
    is_collective = graph.is_collective
    counts = ~(is_sum[names.base] | is_collective)
    sort = _sorts(graph)
    code = sort * len(names.bases) + names.base
    copies = [np.unique(code[counts & (replica == own)]) for own in range(int(replica.max()) + 1)]
    is_alike = all(np.array_equal(own, copies[0]) for own in copies)
    return replica if is_alike else np.zeros_like(replica)


def count_microbatches(graph: Graph) -> int:
    """Returns the number of micro-batches in the step `graph`: 1 if it has no replicas."""
    return max(int(microbatch_of(graph).max()) + 1, 1)


@dataclass(frozen=True, eq=False)
class Excerpt:
    """The first few micro-batches of a step: a smaller graph whose placements carry over to the whole."""

    graph: Graph
    ops: I64  # [ops of the excerpt] their numbers in the whole
    twin: I64  # [ops of the whole] the op of the excerpt that each is, or is a replica of

    @classmethod
    def of(cls, graph: Graph, microbatch: I64, count: int) -> "Excerpt":
        """Takes the first `count` micro-batches, at least two; `microbatch` [ops] is the result of `microbatch_of`."""
        ops = np.flatnonzero(microbatch < count)
        number = np.full(graph.num_ops, -1)
        number[ops] = np.arange(len(ops))
        bases = [
            name if index <= 0 else "".join(name.rpartition(f"@{index}")[::2])
            for name, index in zip(graph.op_names, microbatch.tolist(), strict=True)
        ]
        by_name = {(bases[op], int(microbatch[op])): op for op in range(graph.num_ops)}
        last: dict[str, int] = {}  # replicas of the model may have fewer than others
        for base, index in by_name:
            last[base] = max(index, last.get(base, index))
        twin = number.copy()
        for op in np.flatnonzero(number < 0).tolist():
            nearest = by_name.get((bases[op], int(microbatch[op]) % count), by_name.get((bases[op], 1)))
            assert nearest is not None, "each replica has one for another micro-batch"
            twin[op] = number[nearest]
        return cls(_excerpt(graph, microbatch, number, count, last, bases, by_name), ops, twin)


def _excerpt(
    graph: Graph,
    microbatch: I64,
    number: I64,
    count: int,
    last: dict[str, int],
    bases: list[str],
    by_name: dict[tuple[str, int], int],
) -> Graph:
    """Builds the graph of the ops that have a `number`.

    Its last micro-batch feeds the shared ops that the last of all micro-batches feeds.
    """
    tensors_of = defaultdict[int, list[int]](list)
    for tensor, producer in enumerate(graph.producers.tolist()):
        tensors_of[producer].append(tensor)
    rows: list[Tensor] = []
    position: dict[int, int] = {}
    for op in np.flatnonzero(number >= 0).tolist():
        final = by_name[bases[op], last[bases[op]]] if microbatch[op] == count - 1 else None
        for place, tensor in enumerate(tensors_of[op]):
            row = graph.tensor(tensor)
            consumers = {int(number[consumer]) for consumer in row.consumers if number[consumer] >= 0}
            if final is not None and place < len(tensors_of[final]):
                readers = graph.consumers_of(tensors_of[final][place])
                consumers.update(number[readers[microbatch[readers] < 0]].tolist())
            position[tensor] = len(rows)
            rows.append(replace(row, producer=int(number[op]), consumers=tuple(sorted(consumers))))
    rows = [replace(row, view_of=position[row.view_of]) if row.view_of >= 0 else row for row in rows]
    return Graph.build(graph.name, [graph.op(op) for op in np.flatnonzero(number >= 0).tolist()], rows)


class _Accumulation:
    """Numbers shared sources, then the ops of each micro-batch and its sums, then updates; and connects them.

    G gradients, in the order in which they are made.
    """

    def __init__(self, graph: Graph, num_microbatches: int, free_replicas: bool) -> None:
        self.graph, self.num_microbatches, self.free_replicas = graph, num_microbatches, free_replicas
        self.is_source, self.is_update = shared_ops(graph)
        self.is_replica = ~(self.is_source | self.is_update)
        self.writers = _buffer_writers(graph, self.is_replica)
        by_update = np.zeros(graph.num_tensors, np.bool_)
        by_update[graph.edge_tensors[self.is_update[graph.consumers]]] = True
        added = np.flatnonzero(by_update & self.is_replica[graph.producers] & (graph.tensor_bytes > 0))
        self.gradients = added[np.argsort(graph.producers[added], kind="stable")]  # [G]
        reads = self.is_update[graph.consumers]  # each gradient's updates
        tensors, updates = graph.edge_tensors[reads], graph.consumers[reads]
        self.first_update = updates[np.searchsorted(tensors, self.gradients)]  # [G]
        sources, replicas, late = map(np.flatnonzero, (self.is_source, self.is_replica, self.is_update))
        num_sums = len(self.gradients)
        stride = len(replicas) + num_sums
        self.number = np.full((num_microbatches, graph.num_ops), -1)  # by micro-batch and op
        self.number[0, sources] = np.arange(len(sources))
        starts = len(sources) + np.arange(num_microbatches)[:, None] * stride - num_sums
        starts[0] += num_sums  # sums begin with the second micro-batch
        self.number[:, replicas] = starts + np.arange(len(replicas))
        self.adder = starts + len(replicas) + np.arange(num_sums)  # [M, G] the first row is of no use
        self.num_ops = len(sources) + num_microbatches * stride - num_sums + len(late)
        self.number[0, late] = np.arange(self.num_ops - len(late), self.num_ops)
        self.copied, self.repeated, self.late = sources, replicas, late

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
                repeated = [f"{stem}@{microbatch}" for microbatch in range(1, later + 1) for stem in each]
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
        return columns

    def _parts(self) -> tuple[I64, I64, I64]:
        """Returns the ops that come first, with those of the first micro-batch; those of each further one; updates."""
        return np.concatenate((self.copied, self.repeated)), self.repeated, self.late

    def _tensors(self) -> tuple[I64, dict[str, Any]]:
        """Returns producers and further columns: those of each micro-batch, then sums, then waits for buffers."""
        graph, later = self.graph, self.num_microbatches - 1
        self.again = np.flatnonzero(self.is_replica[graph.producers])
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
        is_shared = ~self.is_replica[graph.producers[tensors]]
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
        """[M, N] the group of each replica."""
        groups = self.graph.groups
        by_replica = np.tile(groups, (self.num_microbatches, 1))
        next_group = int(groups.max()) + 1
        if not self.free_replicas:  # an update needs a group for its sums to join
            ungrouped = np.flatnonzero((groups < 0) & ~self.is_source)
            by_replica[:, ungrouped] = next_group + np.arange(len(ungrouped))
            return by_replica
        ungrouped = np.unique(self.first_update[groups[self.first_update] < 0])
        by_replica[:, ungrouped] = next_group + np.arange(len(ungrouped))
        next_group += len(ungrouped)
        owners = np.flatnonzero((groups < 0) & self.is_replica & (self.graph.resident_bytes > 0))  # weights, say
        by_replica[:, owners] = next_group + np.arange(len(owners))
        next_group += len(owners)
        fixed = np.unique(groups[~self.is_replica])
        fixed = np.union1d(fixed, groups[[op for ops in self.writers.values() for op in ops]])
        is_movable = self.is_replica & (groups >= 0) & ~np.isin(groups, fixed)
        for microbatch in range(1, self.num_microbatches):
            by_replica[microbatch, is_movable] += next_group * microbatch
        return by_replica

    def _sum_names(self) -> list[str]:
        """Names the sums of gradients [G]: `layers.0.weight.accumulate` for the gradient that `layers.0.weight.update`
        reads.
        """
        op_names, names = set(self.graph.op_names), []
        for update in self.first_update.tolist():
            stem = self.graph.op_names[update].removesuffix(".update") + ACCUMULATE
            name, count = stem, 1
            while name in op_names:
                name, count = f"{stem}_{count}", count + 1
            op_names.add(name)
            names.append(name)
        return names

    def _buffer_order(self) -> dict[int, set[int]]:
        """Maps each op to the ops that wait for it, so that buffers are overwritten in the order of micro-batches."""
        graph, after = self.graph, defaultdict[int, set[int]](set)
        for group, writers in self.writers.items():
            reads_buffer = (graph.is_resident & (graph.groups[graph.producers] == group))[graph.edge_tensors]
            readers = np.unique(graph.consumers[reads_buffer & self.is_replica[graph.consumers]]).tolist()
            users = sorted({*writers, *(op for op in readers if not _ignores_buffers(graph.kinds[op]))})
            for microbatch in range(1, self.num_microbatches):
                before, later = self.number[microbatch - 1], self.number[microbatch]
                for user in users:
                    after[int(before[user])].update(later[writers].tolist())
                for writer in writers:
                    after[int(before[writer])].update(later[users].tolist())
        return after


def shared_ops(graph: Graph) -> tuple[Bool, Bool]:
    """Returns ([N] parameters and buffers, [N] updates and their successors)."""
    has_inputs = np.zeros(graph.num_ops, np.bool_)
    has_inputs[graph.consumers] = True
    is_kind = np.array([kind in _SOURCE_KINDS for kind in graph.kinds], np.bool_)
    is_idle = (graph.flops == 0) & (graph.bytes_accessed == 0) & np.array([not times for times in graph.times_ns])
    is_source = ~has_inputs & (is_kind | ((graph.resident_bytes > 0) & is_idle))
    is_update = graph.is_in_phase("update")
    sources = graph.producers[graph.edge_tensors]
    while True:
        more = is_update.copy()
        more[graph.consumers[is_update[sources]]] = True
        if (more == is_update).all():
            return is_source & ~is_update, is_update
        is_update = more


def _ignores_buffers(kind: str) -> bool:
    """Batch normalisation's backward ops are given running statistics, which they do not use in training."""
    return "batch_norm" in kind and "backward" in kind


def _buffer_writers(graph: Graph, is_replica: Bool) -> dict[int, list[int]]:
    """Maps each group to its ops of a micro-batch that overwrite memory which outlives the micro-batch."""
    writers = defaultdict[int, list[int]](list)
    for op in np.unique(graph.producers[graph.is_resident]).tolist():
        if is_replica[op] and graph.groups[op] >= 0 and graph.resident_bytes[op] == 0:
            writers[int(graph.groups[op])].append(op)
    return dict(writers)
