"""Orders of micro-batches as priorities: which of several ready ops a device starts.

    GPipe   F0 F1 F2 F3 B0 B1 B2 B3    forward ops first: more is in flight, no device waits for gradients early
    1F1B    F0 F1 B0 F2 B1 F3 B2 B3    backward ops first: what a micro-batch holds is freed as early as it can be
    zero-bubble                        as 1F1B, but what one update alone waits for (gradients of weights) comes last:
                                       it fills gaps in which a device would wait, and holds its inputs longer for that

Either way an earlier micro-batch goes first, and within one the op with the longest path below it. Updates come last.
Y. Huang et al., "GPipe", NeurIPS 2019; 1F1B: D. Narayanan et al., "PipeDream", SOSP 2019;
zero-bubble: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Here devices are never idle
while an op is ready, so 1F1B has more micro-batches in flight than its authors' schedule with its fixed warm-up.

A model that calls its layers several times may be started by call as if each were a micro-batch: "by call" is
zero-bubble of calls. Where they depend little on each other that fills pipelines.

With replicas, ops that move data between them go before all others: they take next to no time, and other devices wait
for them. Without micro-batches this is the order "exchanges first", the b-level otherwise. The b-level knows nothing of
the sums over replicas that wait for gradients, and makes gradients of weights last; then the sums run when nothing is
left to compute. So ops also start as the program has them, which is how PyTorch overlaps sums with the backward pass:
"program" without micro-batches, "zero-bubble, program" with them.

The default priority of the machine model, the b-level, runs an op for all micro-batches before the next op: the first
micro-batch leaves a stage nearly as late as the last."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import I64, Bool, combined, mask
from gdp.compiled import kernel
from gdp.graph import Graph
from gdp.graph.copies import ACCUMULATE, RECOMPUTED
from gdp.graph.layers import calls_of
from gdp.graph.microbatches import SHARED

GPIPE, ONE_F_ONE_B, ZERO_BUBBLE, B_LEVEL = "GPipe", "1F1B", "zero-bubble", "b-level"
EXCHANGES_FIRST, BY_CALL = "exchanges first", "by call"
PROGRAM, ZERO_BUBBLE_PROGRAM = "program", "zero-bubble, program"
_NOTHING, _SEVERAL = -1, -2  # in place of the one end that an op's results reach


@dataclass(frozen=True, eq=False)
class OrderTraits:
    """Phases and uses of the ops of a step, which orders go by."""

    graph: Graph
    microbatch: I64  # [N] as `microbatches.microbatch_of` says

    @cached_property
    def is_backward(self) -> Bool:
        """[N] the ops of the backward pass."""
        return self.graph.is_in_phase("backward")

    @cached_property
    def is_update(self) -> Bool:
        """[N] the updates of parameters."""
        return self.graph.is_in_phase("update")

    @cached_property
    def call(self) -> I64 | None:
        """[N] the call that each op belongs to; None where layers are called once."""
        return calls_of(self.graph)

    @cached_property
    def program_level(self) -> I64:
        """[N] `program_levels`."""
        return program_levels(self.graph)

    @cached_property
    def can_wait(self) -> Bool:
        """[N] `only_for_updates`."""
        return only_for_updates(self.graph, self.is_backward, self.is_update)


def orders_for(graph: Graph, microbatch: I64) -> tuple[str, ...]:
    """The orders that are worth trying for a graph: without micro-batches and replicas none but the b-level."""
    has_replicas = bool(graph.is_collective.any())
    if microbatch.max() < 1:
        return (EXCHANGES_FIRST, PROGRAM, B_LEVEL) if has_replicas else (B_LEVEL,)
    if "backward" not in graph.phases:
        return (GPIPE, B_LEVEL)
    orders = (ONE_F_ONE_B, ZERO_BUBBLE, GPIPE, B_LEVEL)
    return (*orders, ZERO_BUBBLE_PROGRAM) if has_replicas else orders


def order_priority(order: str, traits: OrderTraits, level_ns: I64) -> I64:
    """[N] the priority by which `order` starts ops; `level_ns` [N] decides within a micro-batch and phase. Orders by
    the program have a level of their own."""
    if order == B_LEVEL:
        return level_ns
    if order in (PROGRAM, ZERO_BUBBLE_PROGRAM):
        order, level_ns = {PROGRAM: EXCHANGES_FIRST}.get(order, ZERO_BUBBLE), traits.program_level
    position = np.unique(level_ns, return_inverse=True)[1].astype(np.int64)  # levels may be as large as int64
    if order == EXCHANGES_FIRST:
        priority = position
    elif order == BY_CALL:
        assert traits.call is not None, "the order is chosen for models with calls"
        priority = _by_turn(ZERO_BUBBLE, traits, traits.call, position)
    else:
        priority = _by_turn(order, traits, traits.microbatch, position)
    is_collective = traits.graph.is_collective
    if not is_collective.any():
        return priority
    return np.asarray(priority + is_collective * (int(priority.max()) - int(priority.min()) + 1), np.int64)


def _by_turn(order: str, traits: OrderTraits, part: I64, position: I64) -> I64:
    """[N] the priority by phase, then `part` [N] (the micro-batch, say), then `position` [N]."""
    is_first = ~traits.is_backward if order == GPIPE else traits.is_backward
    num_levels = int(position.max()) + 1
    latest = int(part.max())
    turn = np.where(part == SHARED, latest + 1, latest - part)
    priority = (is_first * (latest + 2) + turn) * num_levels + position
    if order == ZERO_BUBBLE:
        priority = np.where(traits.can_wait, turn * num_levels + position - (latest + 3) * num_levels, priority)
        return np.asarray(np.where(traits.is_update, position - (latest + 5) * num_levels, priority), np.int64)
    return np.asarray(np.where(traits.is_update, position - num_levels, priority), np.int64)


def program_levels(graph: Graph) -> I64:
    """Returns levels [N] by which ops start in the order of the program: copies of an op share the level of the first.
    Sums of gradients over micro-batches follow what they add, and moves between replicas come first."""
    original = graph.first_copy
    original = np.where(graph.is_in_role(RECOMPUTED), graph.origins[original], original)
    first = combined(np.minimum, graph.first_copy, np.arange(graph.num_ops), graph.num_ops, graph.num_ops)
    is_sum = graph.is_in_role(ACCUMULATE)
    position = np.where(is_sum, -1, first[original])
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    into = is_sum[targets] & ~is_sum[sources]
    np.maximum.at(position, targets[into], position[sources[into]])
    return np.where(graph.is_collective, graph.num_ops + 1, graph.num_ops - position)


def only_for_updates(graph: Graph, is_backward: Bool, is_update: Bool) -> Bool:
    """[N] the backward ops whose results reach one update and nothing else: gradients of weights and their sums. A
    gradient that is summed over replicas counts as an update; what moves between replicas never waits."""
    is_collective = graph.is_collective
    sources, targets, tensors = graph.producers[graph.edge_tensors], graph.consumers, graph.edge_tensors
    summed = tensors[is_collective[targets] & ~is_collective[sources] & is_backward[sources]]
    is_summed = mask(summed, graph.num_tensors)
    is_summed &= graph.tensor_bytes > 0  # others are waits
    is_end = is_update | is_collective
    reached = np.where(is_update, np.arange(graph.num_ops), _NOTHING)
    own_end = np.where(is_summed, graph.num_ops + np.arange(graph.num_tensors), _NOTHING)[tensors]
    order = np.argsort(-targets, kind="stable")  # ops are numbered topologically: consumers come before producers
    _reach(reached, is_end, sources[order], targets[order], own_end[order])
    return is_backward & ~is_end & (reached >= 0)


@kernel
def _reach(reached, is_end, sources, targets, own_end):
    """Fills `reached` [N] with the one end that each op's results reach."""
    for edge in range(len(sources)):
        source, end = sources[edge], own_end[edge]
        if end == _NOTHING:
            end = reached[targets[edge]]
        if end != _NOTHING and end != reached[source] and not is_end[source]:
            reached[source] = end if reached[source] == _NOTHING else _SEVERAL
