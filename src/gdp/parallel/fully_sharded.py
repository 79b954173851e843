"""ZeRO 3: replicas hold chunks of all parameters and gather those of a block when they need them.

    chunks --> all_gather --> forward of a block       all_gather --> backward --> reduce_scatter --> chunk of gradient
                  ^ when the block before the last one is done

The gathered parameters are tensors of the first op of a gather: there from its start to the end of the block. Each
micro-batch gathers anew and sums its gradients over replicas, as FSDP does by default: with M micro-batches, S bytes of
parameters and R replicas 2 M (R - 1) S bytes are gathered, and M (R - 1) S bytes of gradients summed. Y. Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

N ops of one micro-batch and one replica, E (tensor, consumer) pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import Accumulation
from gdp.graph.layers import LayerPaths
from gdp.parallel.buckets import buckets_of, gradients_of
from gdp.parallel.graph_builder import GraphBuilder
from gdp.parallel.held_state import HeldState, copy_times, joined_groups
from gdp.parallel.rings import Collective
from gdp.parallel.sums import add_chunks

_WHOLE_BLOCK = 2**62  # bytes of a bucket: a block's gradients are summed together


@dataclass(eq=False)
class _Gather:
    """Parameters that are gathered together, for one pass of a block."""

    place: int
    is_backward: bool
    edges: list[int] = field(default_factory=list)  # of (tensor, consumer) pairs that read the gathered parameters
    users: list[int] = field(default_factory=list)  # the consumers, ascending and distinct
    parameters: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class FullyShardedStep:
    """One micro-batch of one of R replicas, with the first and last op of each exchange."""

    graph: Graph
    collectives: Sequence[Collective]  # in the order of their first ops
    after: Sequence[tuple[int, int]]  # (op, op that waits for the one of the micro-batch before)

    @classmethod
    def of(cls, graph: Graph, count: int, places: I64 | None = None) -> "FullyShardedStep":
        """Cuts the parameters of `graph`, a step of one micro-batch, over `count` replicas.

        `places` [N] are equal for ops that are sure to share a device, by default for all of them. A parameter is
        gathered where its chunk is. Blocks are those of `LayerPaths`; a parameter outside of them, or used by another
        block than its own, is gathered alone. InputError where there are no gradients.
        """
        places = np.zeros(graph.num_ops, np.int64) if places is None else places
        state = HeldState.of(graph)
        blocks = _blocks(graph)
        gradients = gradients_of(graph, state.is_late)
        if not gradients:
            raise InputError(f"graph {graph.name!r}: has no gradients to sum over replicas; capture a training step")
        by_block = np.unique(np.stack([places, blocks]), axis=1, return_inverse=True)[1].reshape(-1)
        alone = np.flatnonzero(blocks < 0)
        by_block[alone] = graph.num_ops + alone
        buckets = buckets_of(gradients, by_block.tolist(), _WHOLE_BLOCK)
        gathers = _gathers(graph, state, blocks, places)
        writers = state.writers(graph)
        groups = joined_groups(
            graph,
            [
                *(bucket.updates(gradients) for bucket in buckets),
                *([op, *own] for op, own in writers.items()),
                *(gather.parameters for gather in gathers),
            ],
        )
        is_edge = np.ones(len(graph.consumers), np.bool_)
        is_edge[[edge for gather in gathers for edge in gather.edges]] = False
        is_summed = np.zeros(graph.num_tensors, np.bool_)
        is_summed[[gradient.tensor for gradient in gradients.values()]] = True
        is_edge &= ~(is_summed[graph.edge_tensors] & state.is_late[graph.consumers])

        builder, number, positions = GraphBuilder(), np.full(graph.num_ops, -1), []
        others = np.flatnonzero(~state.is_update)
        resident = state.cut_resident(graph, count, with_parameters=True)[others]
        names = [graph.op_names[op] for op in others.tolist()]
        number[others] = builder.copy_ops(graph, others, names, groups[others], resident_bytes=resident)
        number[state.is_update] = state.add_updates(builder, graph, count, groups)
        positions += [4 * others + 1, 4 * np.flatnonzero(state.is_update) + 1]
        sizes = state.cut_tensors(graph, count)
        sizes = np.where(state.is_parameter[graph.producers], -(-sizes // count), sizes)
        builder.copy_origins(graph, number)
        builder.copy_tensors(graph, number, tensor_bytes=sizes, is_edge=is_edge)

        collectives: list[Collective] = []
        starts: list[int] = []
        last_done: dict[int, int] = {}  # of each place: its gathers take turns, as on a stream
        for index, gather in enumerate(gathers):
            size = int(state.own_bytes[gather.parameters].sum())
            phase = "backward" if gather.is_backward else "forward"
            collective = Collective("all_gather", index, size, graph.dtypes[gather.parameters[0]], phase)
            own = sorted({op for parameter in gather.parameters for op in writers.get(parameter, ())})
            copied = copy_times(graph, own, -(-size // count)), copy_times(graph, own, size)
            ends = collective.add_ends(builder, int(groups[gather.parameters[0]]), copied)
            _connect(builder, graph, gather, places, number, ends)
            if (released := _released_by(gathers, index)) is not None:
                builder.control(number[[released]], np.array([ends[0]]))
            if gather.place in last_done:
                builder.control(np.array([last_done[gather.place]]), np.array([ends[0]]))
            last_done[gather.place] = ends[1]
            positions.append(np.full(2, 4 * gather.users[0]))
            builder.set_origins(np.array(ends[:1]), number[gather.parameters[:1]])
            starts.append(ends[0])
            collectives.append(collective)
        for index, bucket in enumerate(buckets):
            collective = Collective("reduce_scatter", index, bucket.num_bytes, bucket.dtype, "backward")
            owner = gradients[bucket.names[0]].updates[0]
            updates = bucket.updates(gradients)
            copied = {}, copy_times(graph, updates, -(-bucket.num_bytes // count))
            ready, done = collective.add_ends(builder, int(groups[owner]), copied)
            members = [gradients[name] for name in bucket.names]
            tensors = np.array([gradient.tensor for gradient in members])  # copied first, they keep their numbers
            builder.add_edges(tensors, np.full(len(tensors), ready))
            builder.add_edges(tensors, np.full(len(tensors), done))
            add_chunks(builder, members, number, done, count)
            positions.append(np.full(2, 4 * max(gradient.producer for gradient in members) + 2))
            builder.set_origins(np.array([ready]), number[[owner]])
            starts.append(ready)
            collectives.append(collective)
        position = np.concatenate(positions)
        order = np.argsort(position, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        in_order = np.argsort(place[starts]).tolist()
        after = [
            (int(place[number[gathers[before].users[-1]]]), int(place[starts[index]]))
            for before, index in _between_microbatches(gathers)
        ]
        return cls(builder.build(graph.name, position), [collectives[index] for index in in_order], after)

    def repeated(self, num_microbatches: int) -> tuple[Graph, I64]:
        """Returns the step of so many micro-batches, and the ops [2, X] of which each second one waits for the first.

        They are of a micro-batch and the next one.
        """
        step = Accumulation.of(self.graph, num_microbatches)
        before, after = np.array(self.after, np.int64).reshape(-1, 2).T
        return step.graph, np.stack((step.number[:-1, before].ravel(), step.number[1:, after].ravel()))


def _blocks(graph: Graph) -> I64:
    """Returns the block of each op [N]; -1 outside of blocks, and for all where the names tell fewer than two."""
    paths = LayerPaths.of(graph)
    if len(paths.names) < 2:
        return np.full(graph.num_ops, -1)
    return np.array([paths.of_module.get(module, -1) for module in graph.modules], np.int64)


def _gathers(graph: Graph, state: HeldState, blocks: I64, places: I64) -> list[_Gather]:
    """Returns the gathers in the order of their first users."""
    sources = graph.producers[graph.edge_tensors]
    edges = np.flatnonzero(state.is_parameter[sources] & ~state.is_late[graph.consumers])
    edges = edges[np.argsort(graph.consumers[edges], kind="stable")]
    found: dict[tuple[int, bool, int, int], _Gather] = {}
    parameters, users = sources[edges].tolist(), graph.consumers[edges].tolist()
    block_of, place_of = blocks.tolist(), places.tolist()
    for edge, parameter, user in zip(edges.tolist(), parameters, users, strict=True):
        block, is_backward = block_of[user], graph.phases[user] == "backward"
        is_own = block >= 0 and block == block_of[parameter]
        key = place_of[parameter], is_backward, block, -1 if is_own else parameter
        gather = found.setdefault(key, _Gather(place_of[parameter], is_backward))
        gather.edges.append(edge)
        if gather.users[-1:] != [user]:
            gather.users.append(user)
        if parameter not in gather.parameters:
            gather.parameters.append(parameter)
    return list(found.values())


def _connect(
    builder: GraphBuilder, graph: Graph, gather: _Gather, places: I64, number: I64, ends: tuple[int, int]
) -> None:
    """Makes the users read the gathered parameters, and wait for the last chunk.

    A user at another place is sent what the last op of the gather makes: before, not all of it is there.
    """
    ready, done = ends
    edges = np.array(gather.edges)
    tensors, users = graph.edge_tensors[edges], graph.consumers[edges]
    is_near = places[graph.producers[tensors]] == places[users]
    for end, chosen in ((ready, is_near), (done, ~is_near)):
        read = np.unique(tensors[chosen])
        bases = graph.view_of[read]
        read = np.union1d(read, bases[bases >= 0])
        views = graph.view_of[read]
        first = builder.num_tensors
        view_of = np.where(views >= 0, first + np.searchsorted(read, views), -1)
        made = builder.add_tensors(np.full(len(read), end), graph.tensor_bytes[read], view_of=view_of)
        builder.add_edges(made[np.searchsorted(read, tensors[chosen])], number[users[chosen]])
    waiting = number[gather.users]
    builder.control(np.full(len(waiting), done), waiting)
    held = np.flatnonzero(np.isin(graph.producers, gather.parameters) & (graph.view_of < 0))
    builder.add_edges(held, np.full(len(held), ready))  # tensors of `graph` keep their numbers


def _released_by(gathers: Sequence[_Gather], index: int) -> int | None:
    """Returns the op at whose end a gather may begin: the last user of the second gather before it."""
    if index < 2:
        return None
    first = gathers[index].users[0]
    return max((user for user in gathers[index - 2].users if user < first), default=None)


def _between_microbatches(gathers: Sequence[_Gather]) -> list[tuple[int, int]]:
    """Returns pairs of gathers: the second one begins when the micro-batch before is done with the first one.

    At each place the first two gathers of a pass wait for the last two of that pass. Where one place has all, a
    micro-batch waits for the backward pass of the one before, since nothing is won by having several in flight.
    """
    pairs = []
    places = dict.fromkeys(gather.place for gather in gathers)
    for place in places:
        of_pass = [
            [index for index, gather in enumerate(gathers) if gather.place == place and gather.is_backward == late]
            for late in (False, True)
        ]
        forward, backward = of_pass
        for before, after in ((forward, forward), (backward, backward), *[(backward, forward)] * (len(places) == 1)):
            last, first = before[-2:], after[:2]
            pairs += list(zip(last[-len(first) :], first[-len(last) :], strict=False)) if last and first else []
    return pairs
