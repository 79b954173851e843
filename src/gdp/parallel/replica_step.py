"""One of R replicas: which exchanges it takes part in, and which part it holds of what all replicas have.

    zero=0   gradients -> all_reduce -> updates
    zero=1   gradients -> reduce_scatter -> updates of one's own chunk -> all_gather
             '------------------------------^
    zero=2   gradients -> reduce_scatter -> updates of one's own chunk -> all_gather
    zero=3   chunks -> all_gather -> forward of a block   all_gather -> backward -> reduce_scatter -> updates of a chunk
                          ^ when the block before the last one is done

With zero=2 gradients are freed when they have been sent: updates read the chunk. With zero=3 the gathered parameters
are tensors of the first op of a gather: there from its start to the end of the block. Each micro-batch gathers anew and
sums its gradients over replicas, as FSDP does by default: with M micro-batches, S bytes of parameters and R replicas
2 M (R - 1) S bytes are gathered, and M (R - 1) S bytes of gradients summed. S. Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020; Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling
Fully Sharded Data Parallel", VLDB 2023.

N ops of one replica (with zero=3 of one micro-batch of it), E (tensor, consumer) pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

import numpy as np

from gdp.arrays import I64, Bool, mask, position_in, unique
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import Accumulation
from gdp.graph.builder import GraphBuilder
from gdp.graph.layers import LayerPaths
from gdp.parallel.held_state import HeldState, joined_groups
from gdp.parallel.rings import Bucket, Collective, buckets_of, gradients_of

_WHOLE_BLOCK = 2**62  # bytes of a bucket: a block's gradients are summed together


@dataclass(frozen=True, eq=False)
class ReplicaStep:
    """The step of one replica with the first and last op of each exchange; hops between replicas are left out."""

    graph: Graph
    collectives: Sequence[Collective]  # in the order of their first ops
    after: Sequence[tuple[int, int]] = ()  # (op, op that waits for the one of the micro-batch before)

    @classmethod
    def of(cls, graph: Graph, buckets: Sequence[Bucket], count: int, zero: int) -> "ReplicaStep":
        """Returns the step `graph` of one of `count` replicas, which sum their gradients in `buckets`; zero=0 to 2.
        InputError if `graph` has other gradients than the buckets."""
        gradients = gradients_of(graph, HeldState.of(graph).is_late)
        sizes = {name: gradient.num_bytes for name, gradient in gradients.items()}
        if sorted(sizes) != sorted(name for bucket in buckets for name in bucket.names) or any(
            bucket.num_bytes != sum(sizes[name] for name in bucket.names) for bucket in buckets
        ):
            raise InputError(f"graph {graph.name!r}: its gradients are not those of the other replicas")
        replica = _ReplicaBuilder(graph, buckets, count, zero)
        early = np.flatnonzero(~replica.state.is_late)
        resident = replica.state.cut_resident(graph, count, with_parameters=False) if zero else graph.resident_bytes
        replica.copy(early, resident_bytes=resident[early])
        sums = [replica.add_sum(bucket) for bucket in buckets]
        if zero:
            replica.add_updates()
            replica.gather_updated()
        replica.copy(np.flatnonzero(replica.number < 0))
        replica.copy_tensors(np.ones(len(graph.consumers), np.bool_), with_parameters=False)
        for bucket, ends in zip(buckets, sums, strict=True):
            replica.connect_sum(bucket, ends)
        replica.add_waits()
        return cls(replica.build(), replica.collectives)

    @classmethod
    def sharded(cls, graph: Graph, count: int, places: I64 | None = None, *, at_once: bool = False) -> "ReplicaStep":
        """Returns a micro-batch `graph` of one of `count` replicas that share all parameters: zero=3. `places` [N] are
        equal for ops that are sure to share a device, by default for all of them. A parameter is gathered where its
        chunk is. Blocks are those of `LayerPaths`; a parameter outside of them, or used by another block than its own,
        is gathered alone. `at_once`: gathered parameters are of the gather's last op. InputError without gradients."""
        places = np.zeros(graph.num_ops, np.int64) if places is None else places
        blocks = _blocks(graph)
        gradients = gradients_of(graph, HeldState.of(graph).is_late)
        if not gradients:
            raise InputError(f"graph {graph.name!r}: has no gradients to sum over replicas; capture a training step")
        by_block = np.unique(np.stack([places, blocks]), axis=1, return_inverse=True)[1].reshape(-1)
        alone = np.flatnonzero(blocks < 0)
        by_block[alone] = graph.num_ops + alone
        buckets = buckets_of(gradients, by_block.tolist(), _WHOLE_BLOCK)
        replica = _ReplicaBuilder(graph, buckets, count, 3, blocks, places)
        state, gathers = replica.state, replica.gathers
        others, updates = np.flatnonzero(~state.is_update), np.flatnonzero(state.is_update)
        replica.copy(others, resident_bytes=state.cut_resident(graph, count, with_parameters=True)[others])
        replica.add_updates()
        positions = [4 * others + 1, 4 * updates + 1]
        is_edge = np.ones(len(graph.consumers), np.bool_)
        is_edge[[edge for gather in gathers for edge in gather.edges]] = False
        replica.copy_tensors(is_edge, with_parameters=True)
        starts = [replica.gather_block(index, at_once) for index in range(len(gathers))]
        positions += [np.full(2, 4 * gather.users[0]) for gather in gathers]
        for bucket in buckets:
            replica.connect_sum(bucket, replica.add_sum(bucket))
            last = max(gradients[name].producer for name in bucket.names)
            positions.append(np.full(2, 4 * last + 2))
        position = np.concatenate(positions)
        order = np.argsort(position, kind="stable")
        place = position_in(order, len(order))
        in_order = np.argsort(place[[start for start, _ in replica.starts]]).tolist()
        after = [
            (int(place[replica.number[gathers[before].users[-1]]]), int(place[starts[index]]))
            for before, index in _between_microbatches(gathers)
        ]
        return cls(replica.build(position), [replica.collectives[index] for index in in_order], after)

    def repeated(self, num_microbatches: int) -> tuple[Graph, I64]:
        """Returns the step of so many micro-batches, and the ops [2, X] of which each second one waits for the first.
        They are of a micro-batch and the next one."""
        step = Accumulation.of(self.graph, num_microbatches)
        before, after = np.array(self.after, np.int64).reshape(-1, 2).T
        return step.graph, np.stack((step.number[:-1, before].ravel(), step.number[1:, after].ravel()))


@dataclass(eq=False)
class _Gather:
    """Parameters that are gathered together, for one pass of a block."""

    place: int
    is_backward: bool
    edges: list[int] = field(default_factory=list)  # of (tensor, consumer) pairs that read the gathered parameters
    users: list[int] = field(default_factory=list)  # the consumers, ascending and distinct
    parameters: list[int] = field(default_factory=list)


class _ReplicaBuilder:
    """A replica under construction: ops are copied, exchanges added, and edges redirected to what these make."""

    def __init__(
        self,
        graph: Graph,
        buckets: Sequence[Bucket],
        count: int,
        zero: int,
        blocks: I64 | None = None,
        places: I64 | None = None,
    ) -> None:
        self.graph, self.count, self.zero = graph, count, zero
        self.places = np.zeros(graph.num_ops, np.int64) if places is None else places
        self.state = HeldState.of(graph)
        self.gradients = gradients_of(graph, self.state.is_late)
        self.writers = self.state.writers(graph) if zero else {}
        self.gathers = [] if blocks is None else _gathers(graph, self.state, blocks, self.places)
        self.updates = [bucket.updates(self.gradients) for bucket in buckets]
        together = [*self.updates, *([op, *ops] for op, ops in self.writers.items())]
        self.groups = joined_groups(graph, [*together, *(gather.parameters for gather in self.gathers)])
        self.builder, self.number = GraphBuilder(), np.full(graph.num_ops, -1)
        self.collectives: list[Collective] = []
        self.starts: list[tuple[int, int]] = []  # first ops of exchanges, and the ops of `graph` that these are for
        self.waits: list[tuple[int, int]] = []  # (op, op of the new graph)
        self.late_waits: list[tuple[int, int]] = []  # (op of the new graph, op of `graph` that is numbered later)
        self.last_done: dict[int, int] = {}  # of each place: its gathers take turns, as on a stream

    def copy(self, ops: I64, **changed: I64) -> None:
        """Copies ops of the graph, with other columns."""
        self.number[ops] = self.builder.copy_ops(self.graph, ops, groups=self.groups[ops], **changed)

    def add_updates(self) -> None:
        """Adds the updates of one's own chunk."""
        self.number[self.state.is_update] = self.state.add_updates(self.builder, self.graph, self.count, self.groups)

    def copy_tensors(self, is_edge: Bool, *, with_parameters: bool) -> None:
        """Copies all tensors, which keep their numbers, and the consumers `is_edge` [E] but for gradients sent away."""
        graph, state, sizes = self.graph, self.state, self.graph.tensor_bytes
        if self.zero:
            sizes = state.cut_tensors(graph, self.count)
        if with_parameters:
            sizes = np.where(state.is_parameter[graph.producers], -(-sizes // self.count), sizes)
        if self.zero >= 2:
            is_summed = mask([gradient.tensor for gradient in self.gradients.values()], graph.num_tensors)
            is_edge = is_edge & ~(is_summed[graph.edge_tensors] & state.is_late[graph.consumers])
        self.builder.copy_origins(graph, self.number)
        self.builder.copy_tensors(graph, self.number, tensor_bytes=sizes, is_edge=is_edge)

    def add(self, collective: Collective, made_for: int, copied_bytes: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Adds the ends of an exchange for an op of the graph, with which they share a device."""
        ends = collective.add_ends(self.builder, int(self.groups[made_for]), copied_bytes)
        self.collectives.append(collective)
        self.starts.append((ends[0], made_for))
        return ends

    def add_sum(self, bucket: Bucket) -> tuple[int, int]:
        """Adds the ends of the sum of a bucket."""
        exchange = "reduce_scatter" if self.zero else "all_reduce"
        number = sum(collective.exchange == exchange for collective in self.collectives)
        collective = Collective(exchange, number, bucket.num_bytes, bucket.dtype, "backward")
        chunk = -(-bucket.num_bytes // self.count)  # which outlives the rest of the gradients
        return self.add(collective, bucket.updates(self.gradients)[0], (0, chunk if self.zero >= 2 else 0))

    def connect_sum(self, bucket: Bucket, ends: tuple[int, int]) -> None:
        """Sends gradients into a sum; updates wait for it, or read the chunks that it makes."""
        start, done = ends
        members = [self.gradients[name] for name in bucket.names]
        tensors = np.array([gradient.tensor for gradient in members])
        self.builder.add_edges(tensors, np.full(len(tensors), start))
        if self.zero < 2:
            self.late_waits += [(done, op) for op in bucket.updates(self.gradients)]
            return
        self.builder.add_edges(tensors, np.full(len(tensors), done))
        sizes = np.array([-(-gradient.num_bytes // self.count) for gradient in members])
        chunks = self.builder.add_tensors(np.full(len(members), done), sizes)
        readers = [len(gradient.updates) for gradient in members]
        updates = np.array([op for gradient in members for op in gradient.updates])
        self.builder.add_edges(np.repeat(chunks, readers), self.number[updates])

    def gather_updated(self) -> None:
        """Gathers parameters after their updates: those of a bucket together, each other one alone."""
        graph, state = self.graph, self.state
        bucket_of = _buckets_of_updates(graph, state, self.updates)
        for index, parameters in enumerate(_alike(self.writers, bucket_of)):
            size = int(state.own_bytes[parameters].sum())
            collective = Collective("all_gather", index, size, graph.dtypes[parameters[0]], "update")
            own = sorted({writer for op in parameters for writer in self.writers[op]})
            start, done = self.add(collective, parameters[0], (0, size - size // self.count))  # others' pieces
            self.waits += [(int(self.number[writer]), start) for writer in own]
            self.late_waits += [(done, op) for op in state.followers(graph, own)]

    def gather_block(self, index: int, at_once: bool) -> int:
        """Gathers the parameters of a block for one pass; returns the first op."""
        graph, gather, builder = self.graph, self.gathers[index], self.builder
        size = int(self.state.own_bytes[gather.parameters].sum())
        phase = "backward" if gather.is_backward else "forward"
        collective = Collective("all_gather", index, size, graph.dtypes[gather.parameters[0]], phase)
        start, done = ends = self.add(collective, gather.parameters[0], (-(-size // self.count), size))
        self._read_gathered(gather, ends, at_once)
        if (released := _released_by(self.gathers, index)) is not None:
            builder.control(self.number[[released]], np.array([start]))
        if gather.place in self.last_done:
            builder.control(np.array([self.last_done[gather.place]]), np.array([start]))
        self.last_done[gather.place] = done
        return start

    def _read_gathered(self, gather: _Gather, ends: tuple[int, int], at_once: bool) -> None:
        """Makes the users read the gathered parameters, and wait for the last chunk. A user at another place, or any
        `at_once`, reads what the last op of the gather makes: before, not all of it is there."""
        graph, builder, number, places = self.graph, self.builder, self.number, self.places
        start, done = ends
        edges = np.array(gather.edges)
        tensors, users = graph.edge_tensors[edges], graph.consumers[edges]
        is_near = places[graph.producers[tensors]] == places[users]
        for end, chosen in ((ends[at_once], is_near), (done, ~is_near)):
            read = unique(tensors[chosen])
            bases = graph.view_of[read]
            read = unique(np.concatenate((read, bases[bases >= 0])))
            views = graph.view_of[read]
            first = builder.num_tensors
            view_of = np.where(views >= 0, first + np.searchsorted(read, views), -1)
            made = builder.add_tensors(np.full(len(read), end), graph.tensor_bytes[read], view_of=view_of)
            builder.add_edges(made[np.searchsorted(read, tensors[chosen])], number[users[chosen]])
        waiting = number[gather.users]
        builder.control(np.full(len(waiting), done), waiting)
        held = np.flatnonzero(np.isin(graph.producers, gather.parameters) & (graph.view_of < 0))
        builder.add_edges(held, np.full(len(held), start))

    def add_waits(self) -> None:
        """Makes ops wait that read nothing of what they wait for."""
        waits = self.waits + [(source, int(self.number[op])) for source, op in self.late_waits]
        sources, targets = np.array(waits, np.int64).reshape(-1, 2).T
        self.builder.control(sources, targets)

    def build(self, position: I64 | None = None) -> Graph:
        """Returns the graph, its ops ordered by `position` [M], or as they were added."""
        starts, made_for = np.array(self.starts, np.int64).T
        self.builder.set_origins(starts, self.number[made_for])
        return self.builder.build(self.graph.name, position)


def _buckets_of_updates(graph: Graph, state: HeldState, together: Sequence[Sequence[int]]) -> list[int]:
    """Returns the bucket that each op waits for [N]; -1 for none or for several."""
    none, several = -1, -2
    bucket_of = [none] * graph.num_ops
    for index, updates in enumerate(together):
        for op in updates:
            bucket_of[op] = index if bucket_of[op] in (none, index) else several
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    within = np.flatnonzero(state.is_update[sources] & state.is_update[targets])
    within = within[np.argsort(targets[within], kind="stable")]
    for source, target in zip(sources[within].tolist(), targets[within].tolist(), strict=True):
        if bucket_of[source] not in (none, bucket_of[target]):
            bucket_of[target] = bucket_of[source] if bucket_of[target] == none else several
    return [max(bucket, none) for bucket in bucket_of]


def _alike(writers: Mapping[int, Sequence[int]], bucket_of: Sequence[int]) -> list[list[int]]:
    """Returns the parameters that are gathered together: those of a bucket, and each other one alone."""
    alike: dict[tuple[int, int], list[int]] = {}
    for parameter, ops in writers.items():
        buckets = {bucket_of[op] for op in ops}
        bucket = buckets.pop() if len(buckets) == 1 else -1
        alike.setdefault((bucket, -1) if bucket >= 0 else (len(bucket_of), parameter), []).append(parameter)
    return [alike[key] for key in sorted(alike)]


def _blocks(graph: Graph) -> I64:
    """Returns the block of each op [N]; -1 outside of blocks, and for all where the names tell fewer than two."""
    paths = LayerPaths.of(graph)
    if len(paths.names) < 2:
        return np.full(graph.num_ops, -1)
    return np.array([paths.of_module.get(module, -1) for module in graph.modules], np.int64)


def most_gathered_bytes(graph: Graph) -> int:
    """Returns the bytes that zero=3 gathers of parameters at once at most, of two blocks that follow each other, and
    those of the largest block's gradients, which are whole until they are summed; `graph` is of one place."""
    blocks, state = _blocks(graph), HeldState.of(graph)
    gathers = _gathers(graph, state, blocks, np.zeros(graph.num_ops, np.int64))
    sizes = [int(state.own_bytes[gather.parameters].sum()) for gather in gathers]
    of_block: dict[int, int] = {}
    for gradient in gradients_of(graph, state.is_late).values():
        block = int(blocks[gradient.updates[0]])
        key = block if block >= 0 else graph.num_ops + gradient.updates[0]
        of_block[key] = of_block.get(key, 0) + gradient.num_bytes
    return max(map(add, [0, *sizes], sizes), default=0) + max(of_block.values(), default=0)


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


def _released_by(gathers: Sequence[_Gather], index: int) -> int | None:
    """Returns the op at whose end a gather may begin: the last user of the second gather before it."""
    if index < 2:
        return None
    first = gathers[index].users[0]
    return max((user for user in gathers[index - 2].users if user < first), default=None)


def _between_microbatches(gathers: Sequence[_Gather]) -> list[tuple[int, int]]:
    """Returns pairs of gathers: the second one begins when the micro-batch before is done with the first one. At each
    place the first two gathers of a pass wait for the last two of that pass. Where one place has all, a micro-batch
    waits for the backward pass of the one before, since nothing is won by having several in flight."""
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
