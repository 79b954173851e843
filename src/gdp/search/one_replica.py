"""Search of one of several replicas: all are placed alike, each on devices of its own.

    2 replicas, 4 devices    replica 0 on gpu0, gpu1, searched alone --copied--> replica 1 on gpu2, gpu3

A simulation of one of 8 replicas takes an eighth of the time, and what is found there is judged in the whole step. What
moves between replicas is left out: an exchange ends when it begins.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import I64, narrow, rows_of
from gdp.budget import Clock
from gdp.cluster.changes import only
from gdp.graph.excerpts import Excerpt
from gdp.graph.microbatches import replica_of
from gdp.search.candidate import Candidate
from gdp.search.question import Question
from gdp.search.solution import Solution
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.records import WORD_DEVICES
from gdp.units.units import Units


@dataclass(frozen=True, eq=False)
class OneReplica:
    """A problem's first replica on its share of the devices, and the way back. N ops of the whole, n of a replica."""

    whole: Problem
    problem: Problem
    excerpt: Excerpt
    replica: I64  # [N]

    @classmethod
    def of(cls, problem: Problem) -> "OneReplica | None":
        """Returns the first replica on the first devices.

        None without others, where they are not alike, and where an op may not be there.
        """
        replica = replica_of(problem.graph)
        size = problem.num_devices // (int(replica.max()) + 1)
        excerpt = Excerpt.of_replica(problem.graph) if 0 < size <= WORD_DEVICES else None
        if excerpt is None:
            return None
        allowed = rows_of(problem.allowed[:, :size], excerpt.ops)
        if not narrow(allowed).any(axis=1).all():
            return None
        part = replace(
            problem,
            graph=excerpt.graph,
            cluster=only(problem.cluster, range(size)),
            op_time_ns=rows_of(problem.op_time_ns[:, :size], excerpt.ops),
            allowed=allowed,
            memory_limit_bytes=problem.memory_limit_bytes[:size],
            microbatch=problem.microbatch[excerpt.ops],
        )
        return cls(problem, part, excerpt, replica)

    def restrict(self, placement: Placement) -> Placement:
        """Returns the placement [n] of the replica in one [N] of the whole that has it on its devices."""
        return placement[self.excerpt.ops]

    def expand(self, placement: Placement) -> Placement:
        """Returns a placement [n] of the replica as one [N] of all replicas, each on devices of its own."""
        size, twin = self.problem.num_devices, self.excerpt.twin
        units = Units.of(self.whole)
        devices = np.where(twin >= 0, self.replica * size + placement[twin], -1)
        chosen = np.full(units.num_units, -1)
        np.maximum.at(chosen, units.index, devices)  # hops go with the group that they are in
        return units.place_allowed(np.maximum(chosen, 0))


def searched_in_one(
    question: Question,
    clock: Clock,
    one: OneReplica,
    start: Candidate,
    place: Callable[[Question, Clock], Solution],
) -> list[Candidate]:
    """Returns what `place` finds for one replica, beginning from that of `start`, as a placement of all of them."""
    problem, placement = one.problem, one.restrict(start.placement)
    # an op that may not be in its stage is anywhere
    starts = (Candidate(placement, order=problem.order),) if placement.max() < problem.num_devices else ()
    alone = Question.about(
        problem,
        seed=question.seed,
        starts=starts,
        checkpoint=question.checkpoint,
        num_threads=question.num_threads,
        asks_policy=question.asks_policy,
    )
    found = place(alone, clock).best
    if found is None or clock.stop.is_set():
        return []
    whole = one.expand(found.placement)
    return [question.try_orders(whole, (problem.order,)), question.judge_with_transfers(whole, problem.order)]
