"""Gradient accumulation: the step of M micro-batches with shared parameters and one update.

    parameter ---+-----------------------+---------------------------------------> update
                 v                       |                                           ^
    input -----> forward, backward ------|------- gradient ------> accumulate@1 -----+
    input@1 -------------------------> forward@1, backward@1 ----------^

`accumulated` copies the forward and backward ops of the graph of one micro-batch. Parameters, buffers, updates
and sums of gradients over ranks of a group occur once. `one_microbatch` is the way back.

N ops, T tensors of one micro-batch; M micro-batches."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdp.arrays import I64, Bool, mask, position_in, scattered, unique
from gdp.errors import InputError
from gdp.graph.builder import GraphBuilder, UniqueNames
from gdp.graph.copies import ACCUMULATE, label_end
from gdp.graph.document import Tensor
from gdp.graph.graph import Graph
from gdp.graph.held_memory import is_cache
from gdp.graph.microbatches import SHARED, check_count, count_microbatches, microbatch_of, shared_ops

RANK_SUM = "collective.all_reduce"
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of gradients


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A step of M micro-batches, and where the N ops of one are in it."""

    graph: Graph
    number: I64  # [M, N] the copy of each op; -1 for the further ones of an op that all share

    @classmethod
    def of(cls, graph: Graph, num_microbatches: int) -> "Accumulation":
        """Repeats the step `graph` of one micro-batch; see `accumulated`."""
        check_count(num_microbatches, "microbatches")
        if num_microbatches == 1:
            return cls(graph, np.arange(graph.num_ops)[None, :])
        if (count := count_microbatches(graph)) > 1:
            raise InputError(f"graph {graph.name!r}: has {count} micro-batches already; leave out --microbatches")
        repeated = _Accumulation(graph, num_microbatches)
        return cls(repeated.build(), repeated.number)


def accumulated(graph: Graph, num_microbatches: int) -> Graph:
    """Returns the step of `num_microbatches` micro-batches, from the step `graph` of one.

    Gradients are added up in the order of micro-batches, on the update's device, by ops called `....accumulate@m`. All
    copies of an op share a device (a group). An op that overwrites a buffer (running statistics) waits for its copy of
    the micro-batch before and for the readers of that copy's result. InputError for a number out of range, or a graph
    that has micro-batches already."""
    return Accumulation.of(graph, num_microbatches).graph


class _Accumulation:
    """Numbers shared sources, then the ops of each micro-batch and its sums, then updates; and connects them. G
    gradients, in the order in which they are made."""

    def __init__(self, graph: Graph, num_microbatches: int) -> None:
        self.graph, self.num_microbatches = graph, num_microbatches
        self.is_source, self.is_update = once_ops(graph)
        self.is_repeated = ~(self.is_source | self.is_update)
        self.writers = _buffer_writers(graph, self.is_repeated)
        self.by_update = self.is_update[graph.consumers]  # [E]
        is_read = mask(graph.edge_tensors[self.by_update], graph.num_tensors)
        added = np.flatnonzero(is_read & self.is_repeated[graph.producers] & (graph.tensor_bytes > 0))
        self.gradients = added[np.argsort(graph.producers[added], kind="stable")]  # [G]
        tensors, updates = graph.edge_tensors[self.by_update], graph.consumers[self.by_update]
        self.first_update = updates[np.searchsorted(tensors, self.gradients)]  # [G]
        self.number = np.full((num_microbatches, graph.num_ops), -1)  # by micro-batch and op
        self.adder = np.full((num_microbatches, len(self.gradients)), -1)  # [M, G] the first row is of no use
        self.builder = GraphBuilder()

    def build(self) -> Graph:
        """Returns the graph of all micro-batches."""
        self._add_ops()
        self._add_origins()
        self._add_tensors()
        waits = [(before, later) for before, ops in self._buffer_order().items() for later in ops]
        self.builder.control(*np.array(waits, np.int64).reshape(-1, 2).T)
        return self.builder.build(self.graph.name)

    def _add_ops(self) -> None:
        graph, groups, sum_names = self.graph, self._groups(), self._sum_names()
        repeated, late = np.flatnonzero(self.is_repeated), np.flatnonzero(self.is_update)
        names = [graph.op_names[op] for op in repeated.tolist()]
        dtypes = [graph.dtypes[op] for op in graph.producers[self.gradients].tolist()]
        sizes = graph.tensor_bytes[self.gradients]
        of_sums = {
            "flops": sizes // np.array([ELEMENT_BYTES.get(dtype, 4) for dtype in dtypes], np.int64),
            "bytes_accessed": 3 * sizes,  # both are read, one is written
            "dtypes": dtypes,
            "phases": "backward",
            "modules": [graph.modules[update] for update in self.first_update.tolist()],
            "roles": ACCUMULATE,
            "groups": groups[self.first_update],
        }
        self._copy(0, np.flatnonzero(self.is_source), groups)
        self._copy(0, repeated, groups)
        for microbatch in range(1, self.num_microbatches):
            end = label_end(microbatch, 0)
            changed = {
                "op_names": [name + end for name in names],
                "microbatches": np.full(len(repeated), microbatch),
                "resident_bytes": np.zeros(len(repeated), np.int64),  # the first copy holds it
            }
            self._copy(microbatch, repeated, groups, **changed)
            sums = [name + end for name in sum_names]
            self.adder[microbatch] = self.builder.add_ops(sums, "aten.add_", microbatches=microbatch, **of_sums)
        self._copy(0, late, groups)

    def _copy(self, microbatch: int, ops: I64, groups: I64, **changed: Any) -> None:
        self.number[microbatch, ops] = self.builder.copy_ops(self.graph, ops, groups=groups[ops], **changed)

    def _add_origins(self) -> None:
        """Sets the op that each is a copy of, or made for: the first sum of a gradient is made for an update."""
        first, again = self.number[0], np.flatnonzero(self.is_repeated)
        self.builder.copy_origins(self.graph, first)
        for number, sums in zip(self.number[1:], self.adder[1:], strict=True):
            self.builder.set_origins(number[again], first[self.graph.first_copy[again]])
            self.builder.set_origins(sums, self.adder[1])
        self.builder.set_origins(self.adder[1], first[self.first_update])

    def _add_tensors(self) -> None:
        """Adds the tensors of each micro-batch, then the sums; all micro-batches consume a shared tensor."""
        graph, builder, first = self.graph, self.builder, self.number[0]
        tensors, consumers = graph.edge_tensors, graph.consumers
        is_gradient = mask(self.gradients, graph.num_tensors)
        is_summed = self.by_update & is_gradient[tensors]
        is_shared = ~self.is_repeated[graph.producers[tensors]] & ~self.by_update
        is_late = self.by_update & ~is_summed & self.is_repeated[graph.producers[tensors]]
        gradients = [builder.copy_tensors(graph, first, is_edge=~is_summed)[self.gradients]]
        for number in self.number[1:]:
            position = builder.copy_tensors(graph, number)
            builder.add_edges(tensors[is_shared], number[consumers[is_shared]])
            builder.add_edges(position[tensors[is_late]], first[consumers[is_late]])
            gradients.append(position[self.gradients])
        sums = gradients[0]
        for made, adder in zip(gradients[1:], self.adder[1:], strict=True):
            builder.add_edges(sums, adder)
            builder.add_edges(made, adder)
            sums = builder.add_tensors(adder, graph.tensor_bytes[self.gradients])
        total = scattered(self.gradients, sums, graph.num_tensors)
        builder.add_edges(total[tensors[is_summed]], first[consumers[is_summed]])

    def _groups(self) -> I64:
        """Returns the group [N] of all copies of each op; an update needs one for its sums to join."""
        groups = self.graph.groups.copy()
        ungrouped = np.flatnonzero((groups < 0) & ~self.is_source)
        groups[ungrouped] = int(groups.max()) + 1 + np.arange(len(ungrouped))
        return groups

    def _sum_names(self) -> list[str]:
        """Names the sums of gradients [G] by the parameter that the update reads: `layers.0.weight.accumulate`."""
        graph = self.graph
        sources = graph.producers[graph.edge_tensors]
        is_own = self.is_source[sources] & self.is_update[graph.consumers]
        is_own &= graph.groups[sources] == graph.groups[graph.consumers]
        reads = np.flatnonzero(is_own)[::-1]
        parameter = dict(zip(graph.consumers[reads].tolist(), sources[reads].tolist(), strict=True))
        names = UniqueNames(graph.op_names)
        owners = [parameter.get(update, update) for update in self.first_update.tolist()]
        return [names.of(f"{graph.op_names[op]}.{ACCUMULATE}") for op in owners]

    def _buffer_order(self) -> dict[int, set[int]]:
        """Maps each op to the ops that wait for it, so that buffers are overwritten in the order of micro-batches."""
        graph, after = self.graph, defaultdict[int, set[int]](set)
        for group, writers in self.writers.items():
            reads_buffer = (graph.is_resident & (graph.groups[graph.producers] == group))[graph.edge_tensors]
            readers = unique(graph.consumers[reads_buffer & self.is_repeated[graph.consumers]]).tolist()
            users = sorted({*writers, *(op for op in readers if not _ignores_buffers(graph.kinds[op]))})
            for microbatch in range(1, self.num_microbatches):
                before, later = self.number[microbatch - 1], self.number[microbatch]
                for user in users:
                    after[int(before[user])].update(later[writers].tolist())
                for writer in writers:
                    after[int(before[writer])].update(later[users].tolist())
        return after


def once_ops(graph: Graph) -> tuple[Bool, Bool]:
    """Returns [N] the sources that all micro-batches share, and what comes once after them: updates, and the sums over
    ranks of gradients."""
    is_source, is_update = shared_ops(graph)
    return is_source, is_update | _sums_for_updates(graph, is_update)


def _sums_for_updates(graph: Graph, is_update: Bool) -> Bool:
    """Returns the sums [N] over ranks of a group that updates alone read: of gradients, which are added up before."""
    sources = graph.producers[graph.edge_tensors]
    is_other = mask(sources[~is_update[graph.consumers]], graph.num_ops)
    is_read = mask(sources[is_update[graph.consumers]], graph.num_ops)
    return graph.is_of_kind(RANK_SUM) & is_read & ~is_other


def _ignores_buffers(kind: str) -> bool:
    """Batch normalisation's backward ops are given running statistics, which they do not use in training."""
    return "batch_norm" in kind and "backward" in kind


def _buffer_writers(graph: Graph, is_repeated: Bool) -> dict[int, list[int]]:
    """Maps each group to its ops of a micro-batch that overwrite memory which outlives the micro-batch. A cache is not
    among that: each batch in flight has its own."""
    writers = defaultdict[int, list[int]](list)
    own = set(graph.groups[is_cache(graph)].tolist())
    for op in unique(graph.producers[graph.is_resident]).tolist():
        if is_repeated[op] and graph.groups[op] >= 0 and graph.resident_bytes[op] == 0 and graph.groups[op] not in own:
            writers[int(graph.groups[op])].append(op)
    return dict(writers)


def one_microbatch(graph: Graph) -> Graph:
    """Returns the step of one micro-batch of `graph`, a step of several. InputError where it has none, or where that
    step in as many micro-batches is another one."""
    microbatch = microbatch_of(graph)
    count = int(microbatch.max()) + 1
    if count < 2 or graph.replicas.any():
        raise InputError(
            f"graph {graph.name!r}: has no micro-batches of one copy of the model; if it is the step of one "
            "micro-batch, say how many there are with --microbatches"
        )
    kept = np.flatnonzero((microbatch == SHARED) | (microbatch == 0))
    number = position_in(kept, graph.num_ops)
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
