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

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.graph.graph import Graph, Op, Tensor

MAX_MICROBATCHES = 1024  # far beyond any use; a number with more digits is a typing error
SHARED = -1
"""The micro-batch number of ops that all micro-batches share: parameters, buffers, updates."""

ACCUMULATE = ".accumulate"  # sums begin with the second micro-batch
_SOURCE_KINDS = ("parameter", "buffer", "constant")
_REPEATED = re.compile(r"(.+)@([1-9][0-9]{0,3})", re.DOTALL)
_OF_REPLICA = re.compile(r"(.+?)(@[1-9][0-9]{0,3})?(?:#([1-9][0-9]{0,2}))?", re.DOTALL)
RECOMPUTED = "!"
"""What the name of a copy ends with that computes an op's results once more, for the backward pass."""
COLLECTIVES = ("all_reduce.", "reduce_scatter.", "all_gather.")
"""What the kinds of ops begin with that move data between replicas; not all replicas have the same ones."""
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
    replica = replica_of(graph)
    names = [
        name.removesuffix(f"#{own}") if own else name
        for name, own in zip(graph.op_names, replica.tolist(), strict=True)
    ]
    microbatch = none.copy()
    repeated: set[str] = set()
    for own in range(int(replica.max(initial=0)) + 1):
        bases = _mark_microbatches(graph, names, np.flatnonzero(replica == own), microbatch)
        if bases is None:
            return none
        repeated |= bases
    if replica.any() and repeated:  # a replica with one micro-batch, beside others with several
        for op, name in enumerate(names):
            if microbatch[op] == SHARED and name in repeated:
                microbatch[op] = 0
    return microbatch


def _mark_microbatches(graph: Graph, names: list[str], ops: I64, microbatch: I64) -> set[str] | None:
    """Fills `microbatch` for `ops`, those of a replica of the model; returns what is repeated, None for other names."""
    number = {names[op]: op for op in ops.tolist()}
    bases = defaultdict[int, set[str]](set)
    for name, op in number.items():
        if match := _REPEATED.fullmatch(name):
            microbatch[op] = int(match[2])
            bases[int(match[2])].add(match[1])
    if not bases:
        return set()
    if sorted(bases) != list(range(1, len(bases) + 1)) or any(bases[m] != bases[1] for m in bases):
        return None
    for base in bases[1]:
        first = number.get(base)
        if first is not None:
            microbatch[first] = 0
        copies = [number[f"{base}@{m}"] for m in bases] + ([] if first is None else [first])
        is_alike = len({(graph.kinds[op], graph.phases[op]) for op in copies}) == 1
        if not is_alike or (first is None and ACCUMULATE not in base):
            return None
    return bases[1]


def base_name(name: str) -> str:
    """Returns the name of the op that `name` is a copy of, for a micro-batch, a replica or to recompute it."""
    match = _OF_REPLICA.fullmatch(name)
    assert match is not None, "the expression takes any name"
    return match[1].removesuffix(RECOMPUTED)


def replica_of(graph: Graph) -> I64:
    """[ops] the replica of the model that each op is of; all 0 in a graph without replicas.

    Names count only if each replica has a copy, of its kind and phase, of every op of the first one, collectives and
    sums of gradients apart.
    """
    replica = np.zeros(graph.num_ops, np.int64)
    if not any("#" in name for name in graph.op_names):
        return replica
    alike: list[set[tuple[str, str, str]]] = []
    for op, name in enumerate(graph.op_names):
        match = _OF_REPLICA.fullmatch(name)
        assert match is not None, "the expression takes any name"
        replica[op] = own = int(match[3] or 0)
        while len(alike) <= own:
            alike.append(set())
        if not graph.kinds[op].startswith(COLLECTIVES) and ACCUMULATE not in match[1]:
            alike[own].add((match[1], graph.kinds[op], graph.phases[op]))
    return replica if all(others == alike[0] for others in alike) else np.zeros_like(replica)


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
        """Takes the first `count` micro-batches, at least two; `microbatch` [ops] is the result of `microbatch_of`.

        All replicas of the model have as many.
        """
        last = int(microbatch.max())
        ops = np.flatnonzero(microbatch < count)
        number = np.full(graph.num_ops, -1)
        number[ops] = np.arange(len(ops))
        bases = [
            name if index <= 0 else "".join(name.rpartition(f"@{index}")[::2])
            for name, index in zip(graph.op_names, microbatch.tolist(), strict=True)
        ]
        by_name = {(bases[op], int(microbatch[op])): op for op in range(graph.num_ops)}
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
    last: int,
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
        final = by_name.get((bases[op], last)) if microbatch[op] == count - 1 else None
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
    """Numbers shared sources, then the ops of each micro-batch and its sums, then updates; and connects them."""

    def __init__(self, graph: Graph, num_microbatches: int, free_replicas: bool) -> None:
        self.graph, self.num_microbatches, self.free_replicas = graph, num_microbatches, free_replicas
        self.is_source, self.is_update = shared_ops(graph)
        self.is_replica = ~(self.is_source | self.is_update)
        self.writers = _buffer_writers(graph, self.is_replica)
        by_update = np.zeros(graph.num_tensors, np.bool_)
        by_update[graph.edge_tensors[self.is_update[graph.consumers]]] = True
        added = by_update & self.is_replica[graph.producers] & (graph.tensor_bytes > 0)
        made_first = sorted(np.flatnonzero(added).tolist(), key=graph.producers.tolist().__getitem__)
        self.gradients = {tensor: self._updates_by(tensor)[0] for tensor in made_first}
        self.ops: list[Op] = []
        self.number: dict[tuple[int, int], int] = {}  # by micro-batch and op
        self.adder: dict[tuple[int, int], int] = {}  # by micro-batch and gradient
        self._number_ops()

    def build(self) -> Graph:
        graph = self.graph
        tensors: list[Tensor] = []
        for microbatch in range(self.num_microbatches):
            number: dict[int, int] = {}
            originals = [t for t in range(graph.num_tensors) if not microbatch or self.is_replica[graph.producers[t]]]
            for position, tensor in enumerate(originals, len(tensors)):
                number[tensor] = position
            for tensor in originals:
                row, base = graph.tensor(tensor), int(graph.view_of[tensor])
                tensors.append(
                    replace(
                        row,
                        producer=self.number[microbatch, row.producer],
                        consumers=tuple(sorted(self._consumers(tensor, microbatch))),
                        view_of=number[base] if base >= 0 else -1,
                    )
                )
        last = self.num_microbatches - 1
        for (microbatch, gradient), adder in self.adder.items():
            readers = [self.adder[microbatch + 1, gradient]] if microbatch < last else self._final_readers(gradient)
            tensors.append(Tensor(adder, tuple(readers), int(graph.tensor_bytes[gradient])))
        for before, after in sorted(self._buffer_order().items()):
            tensors.append(Tensor(before, tuple(sorted(after))))
        return Graph.build(graph.name, self.ops, tensors)

    def _number_ops(self) -> None:
        graph, groups = self.graph, self._groups()

        def add(op: int, microbatch: int) -> None:
            self.number[microbatch, op] = len(self.ops)
            row = graph.op(op)
            if microbatch:
                has_own_state = self.free_replicas and groups[microbatch][op] != groups[0][op]
                resident_bytes = row.resident_bytes if has_own_state else 0
                row = replace(row, name=f"{row.name}@{microbatch}", resident_bytes=resident_bytes)
            self.ops.append(replace(row, group=int(groups[microbatch][op])))

        for op in np.flatnonzero(self.is_source).tolist():
            add(op, 0)
        names = self._sum_names()
        for microbatch in range(self.num_microbatches):
            for op in np.flatnonzero(self.is_replica).tolist():
                add(op, microbatch)
            for gradient, update in self.gradients.items() if microbatch else ():
                self.adder[microbatch, gradient] = len(self.ops)
                producer = graph.op(int(graph.producers[gradient]))
                size = int(graph.tensor_bytes[gradient])
                self.ops.append(
                    Op(
                        name=f"{names[gradient]}@{microbatch}",
                        kind="aten.add_",
                        flops=size // ELEMENT_BYTES.get(producer.dtype, 4),
                        bytes_accessed=3 * size,  # both are read, one is written
                        dtype=producer.dtype,
                        phase="backward",
                        module=graph.modules[update],
                        group=int(groups[0][update]),
                    )
                )
        for op in np.flatnonzero(self.is_update).tolist():
            add(op, 0)

    def _groups(self) -> I64:
        """[M, N] the group of each replica."""
        groups = self.graph.groups
        by_replica = np.tile(groups, (self.num_microbatches, 1))
        next_group = int(groups.max()) + 1
        if not self.free_replicas:  # an update needs a group for its sums to join
            ungrouped = np.flatnonzero((groups < 0) & ~self.is_source)
            by_replica[:, ungrouped] = next_group + np.arange(len(ungrouped))
            return by_replica
        ungrouped = np.unique([update for update in self.gradients.values() if groups[update] < 0]).astype(np.int64)
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

    def _sum_names(self) -> dict[int, str]:
        """Names the sums of gradients: `layers.0.weight.accumulate` for the gradient that `layers.0.weight.update`
        reads.
        """
        op_names, names = set(self.graph.op_names), {}
        for gradient, update in self.gradients.items():
            stem = self.graph.op_names[update].removesuffix(".update") + ACCUMULATE
            name, count = stem, 1
            while name in op_names:
                name, count = f"{stem}_{count}", count + 1
            op_names.add(name)
            names[gradient] = name
        return names

    def _updates_by(self, tensor: int) -> list[int]:
        """The updates among the consumers of `tensor`."""
        return [op for op in self.graph.consumers_of(tensor).tolist() if self.is_update[op]]

    def _final_readers(self, gradient: int) -> list[int]:
        return sorted(self.number[0, update] for update in self._updates_by(gradient))

    def _consumers(self, tensor: int, microbatch: int) -> Iterator[int]:
        """Yields the consumers of the tensor that `microbatch` has for `tensor`; all replicas consume a shared one."""
        is_shared = not self.is_replica[self.graph.producers[tensor]]
        for op in self.graph.consumers_of(tensor).tolist():
            if self.is_update[op]:
                if tensor not in self.gradients:
                    yield self.number[0, op]
            elif is_shared:
                yield from (self.number[other, op] for other in range(self.num_microbatches))
            else:
                yield self.number[microbatch, op]
        if tensor in self.gradients:
            yield self.adder[max(microbatch, 1), tensor]

    def _buffer_order(self) -> dict[int, set[int]]:
        """Maps each op to the ops that wait for it, so that buffers are overwritten in the order of micro-batches."""
        graph, after = self.graph, defaultdict[int, set[int]](set)
        for group, writers in self.writers.items():
            reads_buffer = (graph.is_resident & (graph.groups[graph.producers] == group))[graph.edge_tensors]
            readers = np.unique(graph.consumers[reads_buffer & self.is_replica[graph.consumers]]).tolist()
            users = sorted({*writers, *(op for op in readers if not _ignores_buffers(graph.kinds[op]))})
            for microbatch in range(1, self.num_microbatches):
                for user in users:
                    after[self.number[microbatch - 1, user]].update(self.number[microbatch, op] for op in writers)
                for writer in writers:
                    after[self.number[microbatch - 1, writer]].update(self.number[microbatch, op] for op in users)
        return after


def shared_ops(graph: Graph) -> tuple[Bool, Bool]:
    """Returns ([N] parameters and buffers, [N] updates and their successors)."""
    has_inputs = np.zeros(graph.num_ops, np.bool_)
    has_inputs[graph.consumers] = True
    is_kind = np.array([kind in _SOURCE_KINDS for kind in graph.kinds], np.bool_)
    is_idle = (graph.flops == 0) & (graph.bytes_accessed == 0) & np.array([not times for times in graph.times_ns])
    is_source = ~has_inputs & (is_kind | ((graph.resident_bytes > 0) & is_idle))
    is_update = np.array([phase == "update" for phase in graph.phases], np.bool_)
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
