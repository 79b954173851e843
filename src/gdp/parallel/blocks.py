"""Blocks: parts of a model whose forward ops run again for the backward pass, or whose activations leave the device. A
block is a module with all that is below it. Its backward pass reads results of its forward ops (activations) and of
others (inputs). N ops, T tensors, E (tensor, consumer) pairs, B blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import I64, Bool, combined, mask, unique
from gdp.errors import InputError, suggest
from gdp.graph import Graph
from gdp.graph.layers import LayerPaths, enclosing
from gdp.parallel.layout import BLOCKS, SELECTIVE

_SOURCES = ("parameter", "buffer", "constant", "input")
_IGNORES_OLD_CONTENT = "batch_norm"  # in training: it updates running statistics, and computes from the batch's own


def block_paths(graph: Graph, modules: str | Sequence[str]) -> list[str]:
    """Returns the paths of the blocks that `modules` names: BLOCKS, the layers of `LayerPaths`, or paths of modules. A
    path inside another one is left out. InputError for a path without forward ops, and for a model without layers."""
    ops = zip(graph.modules, graph.phases, graph.kinds, strict=True)
    computing = {module for module, phase, kind in ops if phase == "forward" and kind not in _SOURCES}
    known = dict.fromkeys(prefix for module in sorted(computing) for prefix in enclosing(module))
    if modules in (BLOCKS, SELECTIVE):
        layers = LayerPaths.of(graph)
        paths = [name for name, of_list in zip(layers.names, layers.lists, strict=True) if of_list and name in known]
        if not paths:
            raise InputError(
                f"recompute={modules}: {graph.name!r} has no list of layers that compute; take recompute=PATH; "
                f"known: {', '.join(list(known)[:8]) or 'none'}"
            )
        return paths
    paths = [modules] if isinstance(modules, str) else list(dict.fromkeys(modules))
    for path in paths:
        if path not in known:
            raise InputError(f"recompute: {graph.name!r} has no module {path!r}; {suggest(path, list(known))}")
    return [path for path in paths if not set(enclosing(path)[:-1]) & set(paths)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a training step, and what their backward passes read of their forward passes."""

    graph: Graph
    paths: tuple[str, ...]  # [B]
    of_op: I64  # [N] by module: the block of each op, forward and backward; -1: none
    is_selective: bool = False  # attention and every second product do not run again

    @classmethod
    def of(cls, graph: Graph, modules: str | Sequence[str]) -> "Blocks":
        """Finds the blocks that `modules` names; see `block_paths` for errors."""
        paths = block_paths(graph, modules)
        number = {path: block for block, path in enumerate(paths)}
        captured = set(graph.modules)
        by_module = {x: next((number[path] for path in enclosing(x) if path in number), -1) for x in captured}
        of_op = np.array([by_module[module] for module in graph.modules], np.int64)
        return cls(graph, tuple(paths), of_op, modules == SELECTIVE)

    @cached_property
    def is_source(self) -> Bool:
        """[N] parameters, buffers and inputs."""
        return self.graph.is_of_kind(*_SOURCES)

    @cached_property
    def is_forward(self) -> Bool:
        """[N] the forward ops of blocks; what has no block, and parameters, buffers and inputs, are not among them."""
        is_forward = self.graph.is_in_phase("forward")
        return np.asarray((self.of_op >= 0) & is_forward & ~self.is_source, np.bool_)

    @cached_property
    def is_saved(self) -> Bool:
        """[N] the forward ops whose results are kept where recomputation is selective. They are attention and of each
        block the first product and every second one after it, as the policy of torchtitan 0.2 has it: `_apply_op_sac`
        in torchtitan/distributed/activation_checkpoint.py."""
        kinds = np.array(self.graph.kinds)
        saved: Bool = np.char.find(kinds, "attention") >= 0
        products = np.flatnonzero(self.is_forward & (kinds == "aten.mm"))
        for block in range(len(self.paths)):
            saved[products[self.of_op[products] == block][::2]] = True
        return np.asarray(saved & self.is_forward & self.is_selective, np.bool_)

    @cached_property
    def kept_unread(self) -> tuple[I64, I64]:
        """Returns (tensors, ops): what is kept of each block though nothing late reads it, and its last backward op. A
        selective checkpoint of PyTorch frees what its copies did not ask for at the end of its backward pass."""
        graph, tensors, readers = self.graph, self.graph.edge_tensors, self.graph.consumers
        read = mask(graph.base[tensors[self.is_backward[readers] | self.is_repeated[readers]]], graph.num_tensors)
        kept = self.is_saved[graph.producers] & self.is_activation & (graph.view_of < 0) & ~read
        last = np.full(len(self.paths) + 1, -1)
        np.maximum.at(last, self.of_op[self.is_backward], np.flatnonzero(self.is_backward))
        found, ends = np.flatnonzero(kept), last[self.of_op[graph.producers[kept]]]
        return found[ends >= 0], ends[ends >= 0]

    @cached_property
    def is_backward(self) -> Bool:
        """[N] the backward ops of the whole model."""
        return self.graph.is_in_phase("backward")

    @cached_property
    def is_activation(self) -> Bool:
        """[T] results of a block's forward ops which the step need not hold: neither resident nor kept to its end."""
        graph = self.graph
        is_held = mask(graph.base[graph.is_kept], graph.num_tensors)
        is_held |= graph.is_resident | (graph.tensor_bytes == 0)
        return self.is_forward[graph.producers] & ~is_held[graph.base] & ~is_held

    @cached_property
    def is_read(self) -> Bool:
        """[E] where the backward pass of a block reads an activation of it. A backward op belongs to a block by its
        module, or because it takes gradients to what no forward op outside the block reads."""
        graph = self.graph
        block = self.of_op[graph.producers[graph.edge_tensors]]
        by_forward = ~self.is_backward[graph.consumers]
        crossing = graph.edge_tensors[by_forward & (self.of_op[graph.consumers] != block)]
        is_output = mask(graph.base[crossing], graph.num_tensors)
        has_gradient = mask(graph.consumers[self.is_backward[graph.producers[graph.edge_tensors]]], graph.num_ops)
        is_inner = has_gradient[graph.consumers] & ~is_output[graph.base[graph.edge_tensors]]
        is_own = (self.of_op[graph.consumers] == block) | is_inner
        return np.asarray(self.is_activation[graph.edge_tensors] & self.is_backward[graph.consumers] & is_own, np.bool_)

    @cached_property
    def writes_buffer(self) -> Bool:
        """[N] the forward ops that overwrite memory of other ops, such as running statistics."""
        graph = self.graph
        is_written = graph.is_resident[graph.base] & (graph.resident_bytes[graph.producers] == 0)
        writes = mask(graph.producers[is_written], graph.num_ops)
        return np.asarray(writes & graph.is_in_phase("forward") & ~self.is_source, np.bool_)

    @cached_property
    def is_repeatable(self) -> Bool:
        """[N] the forward ops of blocks that compute the same when they run again, without writing what stays. Not
        among them are ops that write buffers, batch normalisation apart, or read what another op overwrites: a buffer,
        or a tensor that an operator in place (`aten.add_`) changes, unless it runs again as well."""
        graph, tensors = self.graph, self.graph.edge_tensors
        makers, readers = graph.producers[tensors], graph.consumers
        is_resident = graph.is_resident[graph.base]
        is_forward_pass = graph.is_in_phase("forward")
        writes = self.writes_buffer
        written = graph.groups[writes & (graph.groups >= 0)]
        reads_written = mask(readers[is_resident[tensors] & np.isin(graph.groups[makers], written)], graph.num_ops)
        normalises = np.array([_IGNORES_OLD_CONTENT in kind for kind in graph.kinds], np.bool_)
        may_run = (graph.resident_bytes == 0) & (normalises | ~(writes | reads_written))
        repeatable: Bool = np.asarray(self.is_forward & may_run & ~self.is_saved, np.bool_)
        in_place = np.array([kind.endswith("_") for kind in graph.kinds], np.bool_) & is_forward_pass
        overwritten = tensors[in_place[readers] & (graph.tensor_bytes[tensors] > 0)]
        is_overwritten = mask(graph.base[overwritten], graph.num_tensors)
        needs_copy = is_overwritten[self.graph.base[tensors]] & ~is_resident[tensors]
        needs_copy &= self.is_forward[readers]
        while True:  # as deep as chains of such operators are
            has_copy = repeatable[makers] & (self.of_op[makers] == self.of_op[readers]) & self.is_activation[tensors]
            lost = unique(readers[needs_copy & ~has_copy])
            if not repeatable[lost].any():
                return repeatable
            repeatable[lost] = False

    @cached_property
    def is_repeated(self) -> Bool:
        """[N] the forward ops that run again: those whose results backward passes read, and what these are made of."""
        graph, tensors = self.graph, self.graph.edge_tensors
        makers = graph.producers[tensors]
        can_pull = self.is_activation[tensors] & self.is_repeatable[makers]
        repeated = mask(makers[self.is_read & can_pull], graph.num_ops)
        inside = can_pull & (self.of_op[makers] == self.of_op[graph.consumers]) & self.is_repeatable[graph.consumers]
        sources, targets = makers[inside], graph.consumers[inside]
        order = np.argsort(-targets, kind="stable")  # ops are numbered topologically: consumers come before producers
        flags = repeated.tolist()
        for source, target in zip(sources[order].tolist(), targets[order].tolist(), strict=True):
            flags[source] = flags[source] or flags[target]
        return np.array(flags, np.bool_)

    @cached_property
    def first_reader(self) -> I64:
        """[B] the first backward op that reads activations of each block; -1: none."""
        graph = self.graph
        return self.first_of(self.is_read & self.is_repeated[graph.producers[graph.edge_tensors]])

    def releases(self, first_reader: I64) -> list[I64]:
        """[B] Returns the ops before which nothing of each block need be there. They make the gradients that the op
        `first_reader` [B] takes; where it takes none, the release is the block's last forward op before it. Empty
        without a reader."""
        graph, found = self.graph, []
        sources = graph.producers[graph.edge_tensors]
        for block, reader in enumerate(first_reader.tolist()):
            before = unique(sources[(graph.consumers == reader) & self.is_backward[sources]])
            if reader >= 0 and not len(before):
                before = np.flatnonzero(self.is_forward & (self.of_op == block))
                before = before[before < reader][-1:]
            found.append(before)
        return found

    @cached_property
    def upstream(self) -> list[list[int]]:
        """[B] the blocks from which gradients enter each block, through ops of itself and of no block."""
        graph, is_backward = self.graph, self.is_backward
        sources = graph.producers[graph.edge_tensors]
        between = is_backward[sources] & is_backward[graph.consumers]
        inputs: dict[int, list[int]] = {}
        for source, target in zip(sources[between].tolist(), graph.consumers[between].tolist(), strict=True):
            inputs.setdefault(target, []).append(source)
        found = []
        for block, ops in enumerate(self.releases(self.first_reader)):
            reached, pending = set(ops[is_backward[ops]].tolist()), ops[is_backward[ops]].tolist()
            blocks: dict[int, None] = {}
            while pending:
                op = pending.pop()
                if (own := int(self.of_op[op])) not in (block, -1):
                    blocks[own] = None
                    continue
                pending += (new := [item for item in inputs.get(op, ()) if item not in reached])
                reached.update(new)
            found.append(list(blocks))
        return found

    def held_bytes(self, chosen: Bool) -> int:
        """Returns the bytes of tensors that are held for the backward pass if the blocks `chosen` [B] are recomputed.
        They are those of the forward pass that backward ops or copies read; parameters and buffers are not counted."""
        graph, tensors = self.graph, self.graph.edge_tensors
        makers = graph.producers[tensors]
        in_chosen = np.append(chosen, False)[self.of_op]  # -1 is no block
        is_moved = self.is_read & self.is_repeated[makers] & in_chosen[makers]
        is_late = self.is_backward[graph.consumers] & ~is_moved
        runs_again = self.is_repeated & in_chosen
        is_inner = self.of_op[makers] == self.of_op[graph.consumers]
        is_inner &= runs_again[makers] & self.is_activation[tensors]
        is_late |= runs_again[graph.consumers] & ~is_inner
        kept = self.kept_unread[0]
        kept = kept[in_chosen[graph.producers[kept]]]
        held = unique(np.append(self.graph.base[tensors[is_late & ~self.is_backward[makers]]], kept))
        return int(graph.tensor_bytes[held[~graph.is_resident[held]]].sum())

    @cached_property
    def copy_bytes(self) -> I64:
        """[B] the bytes of all activations that are made again when a block is recomputed."""
        graph = self.graph
        is_copied = self.is_activation & self.is_repeated[graph.producers] & (graph.view_of < 0)
        return combined(np.add, self.of_op[graph.producers[is_copied]], graph.tensor_bytes[is_copied], len(self.paths))

    def first_of(self, is_read: Bool) -> I64:
        """[B] Returns the first op that reads tensors of each block on the edges `is_read` [E]; -1: none."""
        graph = self.graph
        first = np.full(len(self.paths), graph.num_ops)
        np.minimum.at(first, self.of_op[graph.producers[graph.edge_tensors[is_read]]], graph.consumers[is_read])
        return np.where(first < graph.num_ops, first, -1)


def longest_held_blocks(graph: Graph) -> list[tuple[str, int]]:
    """Returns the paths of layers, whose activations are held the longest first, and an op of each; empty without."""
    blocks = _layers(graph)
    if blocks is None:
        return []
    return _in_order(blocks, np.argsort(-blocks.first_of(blocks.is_read), kind="stable"), blocks.is_forward)


def cheapest_blocks(graph: Graph, op_time_ns: I64) -> list[tuple[str, int]]:
    """Returns the paths of layers whose recomputation saves memory, and an op of each. Those that save most for each ns
    come first; `op_time_ns` [N] is the time of each op of the step `graph`, on any one device. Of equal ones, the first
    of the model are taken: they are recomputed when the others' activations are gone."""
    blocks = _layers(graph)
    if blocks is None:
        return []
    time_ns = combined(np.add, blocks.of_op[blocks.is_repeated], op_time_ns[blocks.is_repeated], len(blocks.paths))
    held = blocks.held_bytes(np.zeros(len(blocks.paths), np.bool_))
    saved = np.array([held - blocks.held_bytes(one) for one in np.eye(len(blocks.paths), dtype=np.bool_)], np.int64)
    order = np.lexsort((-blocks.first_reader, -saved / np.maximum(time_ns, 1)))
    return _in_order(blocks, order[saved[order] > 0], blocks.is_repeated)


def recomputed_ns(graph: Graph, modules: str | Sequence[str], op_time_ns: I64) -> int:
    """Returns the time of the ops that run again with blocks `modules` recomputed."""
    return int(op_time_ns[Blocks.of(graph, modules).is_repeated].sum())


def _layers(graph: Graph) -> Blocks | None:
    try:
        return Blocks.of(graph, BLOCKS)
    except InputError:
        return None


def _in_order(blocks: Blocks, order: I64, is_chosen: Bool) -> list[tuple[str, int]]:
    """Returns the paths of blocks in this order, each with its first op of those that are chosen [N]."""
    first = (int(np.flatnonzero(is_chosen & (blocks.of_op == block))[0]) for block in order.tolist())
    return list(zip(map(blocks.paths.__getitem__, order.tolist()), first, strict=True))
