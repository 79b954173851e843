"""Recomputation: forward ops of blocks run again in the backward pass, so that their results need not be held.

    input ----> block -------------------> loss ----> backward of what follows --.
      |                                                    .                     | gradient
      |                                                    v released            v
      '--------------------------------------------> block! ---------> backward of the block

The copy of op `x` has the cost, the kind, the module and the device of `x`, and is a backward op; it is called `x!`.
Copies begin once the first backward op that reads one has its gradients, and the backward ops of the block that these
come from are done; else they would run with the forward pass, since devices are never idle. They read parameters,
buffers and inputs of the block, and copies of all else that they depend on. T. Chen et al., "Training deep nets with
sublinear memory cost", arXiv 1604.06174.

N ops, T tensors, E (tensor, consumer) pairs of the graph; C copies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdp.arrays import I64, Bool, mask, position_in, scattered, unique
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.builder import unordered
from gdp.graph.copies import RECOMPUTED
from gdp.graph.microbatches import count_microbatches
from gdp.parallel.blocks import Blocks
from gdp.parallel.layout import AUTO, NONE

_NEW = -1


@dataclass(frozen=True, eq=False)
class Recomputation:
    """A step with copies of forward ops, and where its ops and tensors come from. M ops and S tensors of the step."""

    graph: Graph
    op_origin: I64  # [M] the op of the given graph that each is, or is a copy of
    tensor_origin: I64  # [S] the tensor of the given graph; -1: one that makes ops wait

    @classmethod
    def of(cls, blocks: Blocks, places: I64 | None = None) -> "Recomputation":
        """Returns the step in which all `blocks` are recomputed; the same graph if that saves nothing. `places` [N] are
        equal for ops that are sure to share a device, by default for all: copies await no gradients of others."""
        copies = np.flatnonzero(blocks.is_repeated)
        if not len(copies):
            graph = blocks.graph
            return cls(graph, np.arange(graph.num_ops), np.arange(graph.num_tensors))
        return _Rewrite(blocks, copies, places).build()

    def of_other_sizes(self, graph: Graph) -> Graph:
        """Returns `graph` with the same blocks recomputed; it has the ops and tensors of the given one."""
        moved = self.tensor_origin
        return replace(
            self.graph,
            flops=graph.flops[self.op_origin],
            bytes_accessed=graph.bytes_accessed[self.op_origin],
            resident_bytes=graph.resident_bytes[self.op_origin],
            shapes=tuple(map(graph.shapes.__getitem__, self.op_origin.tolist())),
            tensor_bytes=np.where(moved >= 0, graph.tensor_bytes[moved], 0),
        )


def recomputed(graph: Graph, modules: str | Sequence[str], *, places: I64 | None = None) -> Graph:
    """Returns the training step `graph` with blocks recomputed: NONE, BLOCKS, SELECTIVE or paths of modules. Ops are
    renumbered, tensors of `graph` keep their numbers. What no backward op reads is not copied. Ops that write buffers
    are not run again (batch normalisation is, and writes nothing). `places` [N] as in `Recomputation.of`. InputError
    for a path that is no module's, and for a graph without a backward pass, with micro-batches, or with copies."""
    if modules == NONE or not len(modules):
        return graph
    return Recomputation.of(blocks_to_recompute(graph, modules), places).graph


def blocks_to_recompute(graph: Graph, modules: str | Sequence[str]) -> Blocks:
    """Returns the blocks that `modules` names: BLOCKS, SELECTIVE or paths; InputErrors as `recomputed` has them."""
    if modules == AUTO:
        raise InputError("recompute=auto depends on devices, as a search knows them; name modules, or take blocks")
    if graph.is_in_role(RECOMPUTED).any():
        raise InputError(f"graph {graph.name!r}: recomputes already; leave recompute out")
    if (count := count_microbatches(graph)) > 1:
        raise InputError(f"graph {graph.name!r}: has {count} micro-batches; recompute is for the graph of one")
    blocks = Blocks.of(graph, modules)
    if not blocks.is_backward.any():
        raise InputError(f"graph {graph.name!r}: has no backward pass to recompute for; leave recompute out")
    return blocks


class _Rewrite:
    """Numbers the copies, connects them, and makes them wait for gradients."""

    def __init__(self, blocks: Blocks, copies: I64, places: I64 | None) -> None:
        self.blocks, self.graph, self.copies = blocks, blocks.graph, copies
        graph = self.graph
        self.places = np.zeros(graph.num_ops, np.int64) if places is None else places
        num_ops = graph.num_ops
        reader = blocks.first_reader[blocks.of_op[copies]]
        # in front of the first reader, and behind what they are copies of; both copies and readers keep their order
        place = np.concatenate((2 * np.arange(num_ops) + 1, np.maximum(2 * reader, 2 * copies + 2)))
        self.op_order = np.lexsort((np.concatenate((np.arange(num_ops), copies)), place))
        number = position_in(self.op_order, len(self.op_order))
        self.number = number[:num_ops]  # [N] in the new graph
        self.copy_number = np.full(num_ops, _NEW)  # [N] of each op's copy
        self.copy_number[copies] = number[num_ops:]
        self.makers, self.readers = graph.producers[graph.edge_tensors], graph.consumers
        same = blocks.of_op[self.makers] == blocks.of_op[self.readers]
        both = blocks.is_repeated[self.makers] & blocks.is_repeated[self.readers] & same
        is_copied = blocks.is_activation & blocks.is_repeated[graph.producers]
        is_control = (graph.tensor_bytes == 0) & ~graph.is_resident[blocks.graph.base] & ~graph.is_kept
        is_copied[graph.edge_tensors[both & is_control[graph.edge_tensors]]] = True
        is_copied |= np.isin(np.arange(graph.num_tensors), blocks.graph.base[is_copied])
        self.copied = np.flatnonzero(is_copied)
        self.tensor_copy = np.full(graph.num_tensors, _NEW)  # [T] the number of each tensor's copy
        self.tensor_copy[self.copied] = graph.num_tensors + np.arange(len(self.copied))
        self.between_copies = both & is_copied[graph.edge_tensors]  # [E]
        self.redirected = blocks.is_read & blocks.is_repeated[self.makers]  # [E]

    def build(self) -> Recomputation:
        graph, copied = self.graph, self.copied
        origin = np.concatenate((np.arange(graph.num_ops), self.copies))[self.op_order]
        producers = np.concatenate((self.number[graph.producers], self.copy_number[graph.producers[copied]]))
        tensors, consumers = self._edges()
        makers, waiting = self._releases(tensors, consumers)
        before, after = np.concatenate((producers[tensors], makers)), np.concatenate((consumers, waiting))
        late = unordered(len(origin), before, after, self._overwrites() + self._late_gradients(waiting))
        readers, writers = [op for op, _ in late], [op for _, op in late]
        longer = (makers, readers), (waiting, writers)
        makers, waiting = (np.concatenate((ops, np.array(more, np.int64))) for ops, more in longer)
        distinct, which = np.unique(makers, return_inverse=True)
        pairs = np.unique(np.stack((len(producers) + which, waiting)), axis=1)
        tensors, consumers = np.concatenate((tensors, pairs[0])), np.concatenate((consumers, pairs[1]))
        order = np.lexsort((consumers, tensors))
        tensor_origin = np.concatenate((np.arange(graph.num_tensors), copied, np.full(len(distinct), _NEW)))
        is_old = np.arange(len(tensor_origin)) < graph.num_tensors
        bases = np.where(tensor_origin >= 0, graph.view_of[tensor_origin], -1)
        step = Graph(
            name=graph.name,
            **self._op_columns(origin),
            producers=np.concatenate((producers, distinct)),
            tensor_bytes=np.where(tensor_origin >= 0, graph.tensor_bytes[tensor_origin], 0),
            is_resident=graph.is_resident[tensor_origin] & is_old,
            is_kept=graph.is_kept[tensor_origin] & is_old,
            view_of=np.where((bases >= 0) & ~is_old, self.tensor_copy[bases], bases),
            consumer_offsets=np.concatenate(([0], np.cumsum(np.bincount(tensors, minlength=len(tensor_origin))))),
            consumers=consumers[order],
        )
        return Recomputation(step, origin, tensor_origin)

    def _op_columns(self, origin: I64) -> dict[str, Any]:
        """Returns the columns of all ops; an op that has a copy and no group gets one to share with it."""
        graph, is_copy = self.graph, self.op_order >= self.graph.num_ops
        groups = graph.groups.copy()
        alone = self.copies[groups[self.copies] < 0]
        groups[alone] = int(groups.max()) + 1 + np.arange(len(alone))
        columns = graph.columns_of(origin)
        origins = np.where(columns["origins"] >= 0, self.number[columns["origins"]], -1)
        columns |= {"groups": groups[origin], "origins": np.where(is_copy, self.number[origin], origins)}
        of_copies = {"op_names": "{}!", "phases": "backward", "roles": RECOMPUTED}
        for name, text in of_copies.items():
            values = zip(columns[name], is_copy.tolist(), strict=True)
            columns[name] = tuple(text.format(value) if copy else value for value, copy in values)
        return columns

    def _edges(self) -> tuple[I64, I64]:
        """Returns (tensors, consumers): what each op of the new graph reads, but for what makes copies wait."""
        graph, all_tensors = self.graph, self.graph.edge_tensors
        moved = np.where(self.redirected, self.tensor_copy[all_tensors], all_tensors)
        to_copy = self.blocks.is_repeated[self.readers] & ~self._is_own_state()
        source = np.where(self.between_copies, self.tensor_copy[all_tensors], all_tensors)
        kept, ends = self.blocks.kept_unread
        alike = self.places[graph.producers[kept]] == self.places[ends]
        tensors = np.concatenate((moved, source[to_copy], kept[alike]))
        readers = self.number[graph.consumers], self.copy_number[self.readers[to_copy]], self.number[ends[alike]]
        return tensors, np.concatenate(readers)

    def _is_own_state(self) -> Bool:
        """[E] where an op reads a buffer that it writes: running statistics, which a copy neither needs nor changes."""
        graph, blocks = self.graph, self.blocks
        alike = (graph.groups[self.makers] == graph.groups[self.readers]) & (graph.groups[self.readers] >= 0)
        is_held = graph.is_resident[blocks.graph.base][graph.edge_tensors]
        return np.asarray(is_held & blocks.writes_buffer[self.readers] & alike, np.bool_)

    def _releases(self, tensors: I64, consumers: I64) -> tuple[I64, I64]:
        """Returns (ops, copies that wait for them): the copies are those that read no other copy."""
        blocks, num_tensors = self.blocks, self.graph.num_tensors
        can_start = mask(self.copy_number[self.copies], len(self.op_order))
        can_start[consumers[tensors >= num_tensors]] = False
        makers, waiters = [], []
        for block, before in enumerate(blocks.releases(blocks.first_reader)):
            own = self.copy_number[self.copies[blocks.of_op[self.copies] == block]]
            waiting = own[can_start[own]]
            makers.append(np.repeat(self.number[before], len(waiting)))
            waiters.append(np.tile(waiting, len(before)))
        return np.concatenate(makers), np.concatenate(waiters)

    def _late_gradients(self, waiting: I64) -> list[tuple[int, int]]:
        """Returns pairs (backward op, copy): the op is of the block that the copy's block gets its gradients from.
        Gradients of weights are less urgent than copies: without these edges they would all run last and hold, block by
        block, what is recomputed for them. Ops that may lie on other devices than the copy are left out."""
        blocks, number, places = self.blocks, self.number, self.places
        pairs: list[tuple[int, int]] = []
        source_of = scattered(self.copy_number[self.copies], self.copies, len(self.op_order), _NEW)
        roots = unique(waiting)
        for block, upstream in enumerate(blocks.upstream):
            own = roots[blocks.of_op[source_of[roots]] == block]
            if not len(own):
                continue
            is_late = blocks.is_backward & np.isin(blocks.of_op, upstream) & (number < own[0])
            is_late[self.makers[is_late[self.makers] & is_late[self.readers]]] = False  # implied by what reads them
            for op in np.flatnonzero(is_late).tolist():
                pairs += [(int(number[op]), copy) for copy in own[places[source_of[own]] == places[op]].tolist()]
        return pairs

    def _overwrites(self) -> list[tuple[int, int]]:
        """Returns pairs (op, update): the op, or a copy, reads a parameter, which the update overwrites. Whatever
        update reads a parameter is taken to write it: a new value that nothing reads is no tensor. Originals are among
        the ops, since the backward pass need not wait for them any longer."""
        graph, blocks = self.graph, self.blocks
        is_update = np.array(graph.phases) == "update"
        base = blocks.graph.base[graph.edge_tensors]
        is_state = graph.is_resident[base]
        by_update = is_state & is_update[self.readers]
        writers: dict[int, list[int]] = {}
        for tensor, op in zip(base[by_update].tolist(), self.number[self.readers[by_update]].tolist(), strict=True):
            writers.setdefault(tensor, []).append(op)
        repeated = np.flatnonzero(is_state & blocks.is_repeated[self.readers])
        return [
            (op, writer)
            for number in (self.copy_number, self.number)
            for tensor, op in zip(base[repeated].tolist(), number[self.readers[repeated]].tolist(), strict=True)
            for writer in writers.get(tensor, ())
        ]
