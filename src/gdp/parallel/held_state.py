"""State that replicas have in common: parameters, optimizer state, and their updates. N ops, T tensors, R replicas."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from gdp.arrays import I64, Bool, combined, mask, unique
from gdp.graph import Graph
from gdp.graph.builder import GraphBuilder, find
from gdp.graph.microbatches import reached, shared_ops

_NO_PARAMETERS = ("buffer", "constant", "input")  # kinds of sources


@dataclass(frozen=True, eq=False)
class HeldState:
    """The ops of a graph that hold or change parameters. A parameter with optimizer state has more resident bytes than
    its own tensors. Sources that updates alone read are optimizer state as well. Weights held by an op that itself
    computes are neither: every replica keeps all of them."""

    is_late: Bool  # [N] updates and what follows them
    is_update: Bool  # [N] updates, and what other updates wait for
    is_parameter: Bool  # [N] sources that forward or backward ops read, or that hold a parameter which nothing reads
    is_state: Bool  # [N] sources that updates alone read
    own_bytes: I64  # [N] bytes of a parameter itself, without optimizer state

    @classmethod
    def of(cls, graph: Graph) -> "HeldState":
        """Finds the state of `graph`, a step of one replica."""
        is_source, is_late = shared_ops(graph)
        sources, targets = graph.producers[graph.edge_tensors], graph.consumers
        late = is_late[sources]
        is_update = reached(graph.is_in_phase("update"), targets[late], sources[late])
        is_candidate = is_source & ~graph.is_of_kind(*_NO_PARAMETERS) & (graph.resident_bytes > 0)
        is_read = mask(sources[~is_late[targets]], graph.num_ops)
        is_updated = mask(sources[is_update[targets]], graph.num_ops)
        is_parameter = is_candidate & (is_read | ~is_updated)
        held = np.flatnonzero(graph.is_resident)
        own = combined(np.add, graph.producers[held], graph.tensor_bytes[held], graph.num_ops)
        own = np.where(own > 0, np.minimum(own, graph.resident_bytes), graph.resident_bytes)
        return cls(is_late, is_update, is_parameter, is_candidate & ~is_parameter, np.where(is_parameter, own, 0))

    def cut_resident(self, graph: Graph, count: int, *, with_parameters: bool) -> I64:
        """Returns the resident bytes [N] of one of `count` replicas that share optimizer state, or parameters too."""
        replicated = np.where(with_parameters | self.is_state, 0, self.own_bytes)
        shared = -(-(graph.resident_bytes - replicated) // count)
        return np.where(self.is_parameter | self.is_state, replicated + shared, graph.resident_bytes)

    def cut_tensors(self, graph: Graph, count: int) -> I64:
        """Returns the bytes [T] of tensors where each of `count` replicas updates a part of the parameters."""
        leaves = graph.is_kept | graph.is_resident | ~self.is_update[graph.producers]
        leaves[graph.edge_tensors[~self.is_update[graph.consumers]]] = True
        return np.where(leaves, graph.tensor_bytes, -(-graph.tensor_bytes // count))

    def writers(self, graph: Graph) -> dict[int, list[int]]:
        """Returns the updates of each parameter: those in its group, else those that read it."""
        updates = np.flatnonzero(self.is_update)
        of_group, readers = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for op, group in zip(updates.tolist(), graph.groups[updates].tolist(), strict=True):
            if group >= 0:
                of_group[group].append(op)
        sources = graph.producers[graph.edge_tensors]
        is_read = self.is_parameter[sources] & self.is_update[graph.consumers]
        for source, target in zip(sources[is_read].tolist(), graph.consumers[is_read].tolist(), strict=True):
            readers[source].append(target)
        ops, groups = np.flatnonzero(self.is_parameter).tolist(), graph.groups
        found = {op: of_group.get(int(groups[op]), readers.get(op)) for op in ops}
        return {op: updates for op, updates in found.items() if updates}

    def followers(self, graph: Graph, updates: Sequence[int]) -> list[int]:
        """Returns the ops that are no updates and take what `updates` make."""
        chosen = mask(list(updates), graph.num_ops)
        is_edge = chosen[graph.producers[graph.edge_tensors]] & ~self.is_update[graph.consumers]
        result: list[int] = unique(graph.consumers[is_edge]).tolist()
        return result

    def add_updates(self, builder: GraphBuilder, graph: Graph, count: int, groups: I64) -> I64:
        """Adds the updates of a replica, with an R-th of their work each, R being `count`; returns their numbers.
        Optimizers treat parameters as flat arrays, as FSDP's and DeepSpeed's do: an R-th is rounded up for each op.
        Sums over replicas of what they need of whole parameters, such as norms, are left out: few bytes."""
        ops = np.flatnonzero(self.is_update)
        return builder.copy_ops(
            graph,
            ops,
            groups=groups[ops],
            flops=-(-graph.flops[ops] // count),
            bytes_accessed=-(-graph.bytes_accessed[ops] // count),
            times_ns=[_cut_times(graph.times_ns[op], count) for op in ops.tolist()],
        )


def _cut_times(times: Any, count: int) -> Any:
    return MappingProxyType({on: -(-ns // count) if ns > 0 else ns for on, ns in times.items()}) if times else times


def joined_groups(graph: Graph, together: Sequence[Sequence[int]]) -> I64:
    """Returns the groups [N] of `graph`, where the groups of each list of ops are one, and each list has one."""
    leader: dict[int, int] = {}
    groups = graph.groups.copy()
    following = int(groups.max(initial=-1)) + 1
    for ops in together:
        chosen = np.array(ops, np.int64)
        alone = chosen[groups[chosen] < 0]
        groups[alone] = following
        first = find(leader, int(groups[chosen[0]]))
        for group in unique(groups[chosen]).tolist():
            leader[find(leader, group)] = first
        following += 1
    renamed = np.arange(following)
    for group in leader:
        renamed[group] = find(leader, group)
    return np.where(groups >= 0, renamed[groups], -1)
