"""Offload: activations of blocks wait on the host for the backward pass.

    gpu   f ---> g ---> ... backward of the next block ---> g' ---> f'
          | activation            . released                ^
    host  '-------------------> copy -----------------------'

The activation of op `f` is sent to the host when it is made, and to the ops that read it after the op `f.host` there,
of kind `host.copy`. It starts with the gradients that the block before needs in the backward pass: so a block's
activations come back while that one runs. The op takes no time.

N ops, T tensors, E (tensor, consumer) pairs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import I64, Bool, combined, position_in, unique
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.builder import UniqueNames, write_after_read
from gdp.graph.copies import HOST_COPY
from gdp.parallel.blocks import Blocks
from gdp.parallel.layout import AUTO, NONE

KIND = "host.copy"
LEAST_BYTES = 2**20  # a smaller tensor takes longer to start on its way than to be sent: 10 us of latency at 32 GB/s


@dataclass(frozen=True, eq=False)
class Offload:
    """A step with ops that hold activations on the host, and where its tensors come from; S tensors of the step."""

    graph: Graph
    tensor_origin: I64  # [S] the tensor of the given graph that each has the content of; -1: one that makes ops wait

    @classmethod
    def of(cls, graph: Graph, modules: str | Sequence[str], *, least_bytes: int = LEAST_BYTES) -> "Offload":
        """Returns the training step `graph` in which activations of blocks wait on the host: NONE, BLOCKS or paths.
        Tensors below `least_bytes` stay, and of the blocks the one that comes first in the backward pass, since no
        other tells when it is wanted. InputError for a path that is no module's."""
        if modules == NONE or not len(modules):
            return cls(graph, np.arange(graph.num_tensors))
        if modules == AUTO:
            raise InputError("offload=auto depends on devices, as a search knows them; name modules, or take blocks")
        blocks = Blocks.of(graph, modules)
        tensors, consumers = graph.edge_tensors, graph.consumers
        first_reader = blocks.first_of(blocks.is_read)
        order = [block for block in np.argsort(first_reader).tolist() if first_reader[block] >= 0]
        leaves = blocks.is_read & (graph.tensor_bytes >= least_bytes)[blocks.graph.base[tensors]]
        leaves &= np.isin(blocks.of_op[graph.producers[tensors]], order[1:])
        moved = unique(tensors[leaves])
        moved = moved[(graph.view_of[moved] < 0) | ~np.isin(graph.view_of[moved], moved)]  # a view comes with its base
        is_moved = np.isin(np.arange(graph.num_tensors), moved)
        carrier = np.where(is_moved, np.arange(graph.num_tensors), blocks.graph.base)
        first = combined(np.minimum, carrier[tensors[leaves]], consumers[leaves], graph.num_tensors, graph.num_ops)
        place = np.concatenate((2 * np.arange(graph.num_ops) + 1, 2 * first[moved]))
        op_order = np.argsort(place, kind="stable")
        number = position_in(op_order, len(op_order))
        copy_of = dict(zip(moved.tolist(), number[graph.num_ops :].tolist(), strict=True))
        rows, origin = _tensors(graph, leaves, carrier, copy_of, number)
        pairs = _releases(blocks, order, first_reader, moved, number)
        rows += write_after_read(len(op_order), rows, pairs)
        names = UniqueNames(graph.op_names)
        ops = [replace(op, origin=int(number[op.origin])) if op.origin >= 0 else op for op in graph.ops]
        for op in graph.producers[moved].tolist():
            name, module = names.of(f"{graph.op_names[op]}.host"), graph.modules[op]
            ops.append(Op(name, KIND, phase="backward", module=module, origin=int(number[op]), role=HOST_COPY))
        step = Graph.build(graph.name, [ops[op] for op in op_order.tolist()], rows)
        return cls(step, np.array([*origin, *[-1] * (len(rows) - len(origin))], np.int64))


def _tensors(
    graph: Graph, leaves: Bool, carrier: I64, copy_of: dict[int, int], number: I64
) -> tuple[list[Tensor], list[int]]:
    """Returns the tensors of `graph`, then what the copies send back, and which tensor of `graph` each one is.
    Consumers on edges that `leaves` [E] get what the copies send back."""
    staying: list[list[int]] = [[] for _ in range(graph.num_tensors)]
    sent: dict[int, dict[int, list[int]]] = {tensor: {tensor: []} for tensor in copy_of}
    for tensor, op, goes in zip(
        graph.edge_tensors.tolist(), number[graph.consumers].tolist(), leaves.tolist(), strict=True
    ):
        if goes:
            sent[int(carrier[tensor])].setdefault(tensor, []).append(op)
        else:
            staying[tensor].append(op)
    for tensor, op in copy_of.items():
        staying[tensor].append(op)
    rows = [
        replace(graph.tensor(tensor), producer=int(number[graph.producers[tensor]]), consumers=tuple(sorted(ops)))
        for tensor, ops in enumerate(staying)
    ]
    origin = list(range(graph.num_tensors))
    for whole, parts in sent.items():
        base = len(rows)
        origin += parts
        for tensor, ops in parts.items():
            size, view_of = int(graph.tensor_bytes[tensor]), -1 if tensor == whole else base
            rows.append(Tensor(copy_of[whole], tuple(sorted(ops)), size, view_of=view_of))
    return rows, origin


def _releases(blocks: Blocks, order: list[int], first_reader: I64, moved: I64, number: I64) -> list[tuple[int, int]]:
    """Returns pairs (op, copy that waits for it); `order` are the blocks as the backward pass takes them. A copy waits
    for the gradients that the block before its own needs, and for the backward ops of the one before that."""
    graph, releases = blocks.graph, blocks.releases(first_reader)
    of_copy, copies = blocks.of_op[graph.producers[moved]], number[graph.num_ops :]
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    pairs = []
    for place, block in enumerate(order[1:]):
        own = np.sort(copies[of_copy == block])
        makers = releases[order[place]]
        if place and len(own):
            is_late = blocks.is_backward & (blocks.of_op == order[place - 1]) & (number[: graph.num_ops] < own[0])
            is_late[sources[is_late[sources] & is_late[targets]]] = False  # implied by what reads them
            makers = np.concatenate((makers, np.flatnonzero(is_late)))
        for maker in number[makers].tolist():
            pairs += [(maker, copy) for copy in own.tolist() if maker < copy]
    return pairs
