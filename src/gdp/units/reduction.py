"""Smaller problems with the same answers: reduction (exact) and grouping (a coarser space to search in).

`reduce` merges ops that a plan can run back to back without changing any time:

    a --> b             a's only successor is b, b's only predecessor is a            (a chain)
    z --> b             z takes no time and no memory, has no predecessor, and b is its only successor (a constant)

The ops of a group merge with others only if all of them do, into ops of one group: the replicas of a chain, say.

Where hosts take time, b takes none of its host, nor does z, and the host does not wait for a or z: each op that is left
begins to compute when it did before.

A plan of the reduced problem expands to a plan of the original: each merged op becomes its members, one after the
other, on the same device. Its replay has exactly the same step time, for nothing leaves a merged op before its last
member ends, and that member takes time, so completions are requested in the same rounds (docs/machine-model.md,
section 3). Its memory is never higher: the reduced op allocates what its members allocate one by one. Reduced ops are
numbered by their last members, which keeps every tie."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, combined, mask, narrow, position_in, rows_of, scattered, wide
from gdp.graph import Graph
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import roots_of


@dataclass(frozen=True, eq=False)
class Reduction:
    """A reduced problem and the way back. N original ops, M reduced ops."""

    original: Problem
    problem: Problem
    reduced_op: I64  # [N] the reduced op that each op is part of
    member_offsets: I64  # [M + 1] reduced op m consists of members[member_offsets[m]:member_offsets[m + 1]]
    members: I64  # [N] in the order in which they run

    @classmethod
    def nothing(cls, problem: Problem) -> "Reduction":
        """`problem` as it is."""
        ops = np.arange(problem.num_ops)
        return cls(problem, problem, ops, np.arange(problem.num_ops + 1), ops)

    def expand(self, placement: Placement) -> Placement:
        """[N] the original ops' devices under a reduced `placement` [M]."""
        return np.asarray(placement, np.int64)[self.reduced_op]

    def expand_order(self, order: Sequence[I64]) -> tuple[I64, ...]:
        """[D] the original ops in the order that a reduced `order` gives."""
        offsets, members = self.member_offsets, self.members
        parts = [[members[offsets[op] : offsets[op + 1]] for op in ops.tolist()] for ops in order]
        return tuple(np.concatenate(part) if part else np.zeros(0, np.int64) for part in parts)

    def restrict(self, placement: Placement) -> Placement:
        """[M] the reduced placement nearest to `placement` [N]: each merged op goes where its last member is."""
        return np.asarray(placement, np.int64)[self.members[self.member_offsets[1:] - 1]]


def reduce(problem: Problem) -> Reduction:
    """The exact reduction of `problem`; see the module's text for what is merged and why it is exact."""
    graph = problem.graph
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    only_successor = _only_neighbour(graph.num_ops, sources, targets)
    only_predecessor = _only_neighbour(graph.num_ops, targets, sources)
    allowed, times_ns = narrow(problem.allowed), narrow(problem.op_time_ns)
    takes_time = np.where(allowed, times_ns, 1).min(axis=1) > 0
    no_time = np.where(allowed, times_ns, 0).max(axis=1) == 0
    keeps = mask(graph.producers[graph.is_kept], graph.num_ops)
    allocates = (
        problem.simulator.arrays.memory.alloc_bytes > 0
    )  # a source on an idle device starts, and allocates, at once
    op = np.flatnonzero(only_successor >= 0)
    after = only_successor[op]
    takes_host = narrow(problem.host_time_ns).max(axis=1) > 0
    waits = graph.host_waits & problem.simulator.has_hosts
    is_chain = (only_predecessor[after] == op) & ~takes_host[after]
    is_source = (only_predecessor[op] == -1) & no_time[op] & ~allocates[op] & ~takes_host[op]
    # what must stay in memory may lie on another device than its reader
    is_free = takes_time[after] & ~keeps[op] & (graph.resident_bytes[op] == 0) & ~waits[op]
    chosen = np.flatnonzero((is_chain | is_source) & is_free)
    op, after = op[chosen], after[chosen]
    can_run = times_ns >= 0
    is_alike = (allowed[op] == allowed[after]) & (can_run[op] == can_run[after])
    into = scattered(op, np.where(is_alike.all(axis=1), after, -1), graph.num_ops)
    _keep_groups(graph.groups, into)
    last = roots_of(into)
    order = np.argsort(last, kind="stable")
    is_last = into < 0
    number = np.cumsum(is_last) - 1
    reduced_op = number[last]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(reduced_op, minlength=int(is_last.sum())))))
    return Reduction(problem, _merge(problem, reduced_op, is_last), reduced_op, offsets.astype(np.int64), order)


def _keep_groups(groups: I64, into: I64) -> None:
    """Take back, in place, merges `into` [N] of grouped ops that would leave their group or take part of it along."""
    leaves = (groups >= 0) & (into >= 0) & (groups[into] != groups)
    if not leaves.any():
        return
    _, index = np.unique(groups, return_inverse=True)
    targets = groups[into]
    lowest, highest = np.full(index.max() + 1, np.iinfo(np.int64).max), np.full(index.max() + 1, -1)
    np.minimum.at(lowest, index[leaves], targets[leaves])
    np.maximum.at(highest, index[leaves], targets[leaves])
    is_whole = np.bincount(index) == np.bincount(index[leaves], minlength=len(lowest))
    may_leave = is_whole & (lowest == highest) & (lowest >= 0)
    into[leaves & ~may_leave[index]] = -1


def _only_neighbour(num_ops: int, ops: I64, neighbours: I64) -> I64:
    """[N] the one distinct neighbour of each op: -1 if it has none, -2 if it has several."""
    lowest = combined(np.minimum, ops, neighbours, num_ops, np.iinfo(np.int64).max)
    highest = combined(np.maximum, ops, neighbours, num_ops, -1)
    return np.where(highest == -1, -1, np.where(lowest == highest, highest, -2))


def _merge(problem: Problem, reduced_op: I64, is_last: npt.NDArray[np.bool_]) -> Problem:
    graph = problem.graph
    lasts = np.flatnonzero(is_last)
    num_ops = len(lasts)
    resident = combined(np.add, reduced_op, graph.resident_bytes, num_ops)
    times_ns = narrow(problem.op_time_ns)
    times = combined(np.add, reduced_op, np.maximum(times_ns, 0), num_ops)
    times[times_ns[lasts] < 0] = -1
    host_ns = narrow(problem.host_time_ns)
    hosts = combined(np.add, reduced_op, host_ns, num_ops)

    # a merged op holds what its members produce for each other until it ends: one tensor without consumers
    is_inner = ~is_last[graph.producers]
    owned = np.where(graph.is_resident | (graph.view_of >= 0), 0, graph.tensor_bytes)
    inner_bytes = combined(np.add, reduced_op[graph.producers[is_inner]], owned[is_inner], num_ops)
    held_by = np.flatnonzero(inner_bytes)
    kept = np.flatnonzero(~is_inner)
    tensor_number = position_in(kept, graph.num_tensors)
    is_read = ~is_inner[graph.edge_tensors]
    tensors, consumers = tensor_number[graph.edge_tensors[is_read]], reduced_op[graph.consumers[is_read]]
    edges = np.sort(np.unique(tensors * num_ops + consumers, return_index=True)[1])  # the first of each pair
    counts = np.bincount(tensors[edges], minlength=len(kept) + len(held_by))
    none = np.zeros(len(held_by), np.bool_)
    origins = graph.origins[lasts]
    has_origin = (origins >= 0) & is_last[origins]
    changed = {
        "flops": np.zeros(num_ops, np.int64),
        "bytes_accessed": np.zeros(num_ops, np.int64),
        "resident_bytes": resident,
        "origins": np.where(has_origin, reduced_op[origins], -1),
        "times_ns": (MappingProxyType({}),) * num_ops,
        "shapes": ("",) * num_ops,
    }
    merged = Graph(
        name=graph.name,
        **graph.columns_of(lasts) | changed,
        producers=np.concatenate((reduced_op[graph.producers[kept]], held_by)),
        tensor_bytes=np.concatenate((graph.tensor_bytes[kept], inner_bytes[held_by])),
        is_resident=np.concatenate((graph.is_resident[kept], none)),
        is_kept=np.concatenate((graph.is_kept[kept], none)),
        view_of=np.concatenate(
            (np.where(graph.view_of[kept] >= 0, tensor_number[graph.view_of[kept]], -1), np.full(len(held_by), -1))
        ),
        consumer_offsets=np.concatenate(([0], np.cumsum(counts))),
        consumers=consumers[edges],
    )
    times_ns, hosts_ns = wide(times, problem.num_devices), wide(hosts, problem.num_devices)
    allowed, limits, parts = rows_of(problem.allowed, lasts), problem.memory_limit_bytes, problem.microbatch[lasts]
    return Problem(merged, problem.cluster, times_ns, hosts_ns, allowed, limits, parts, problem.order)
