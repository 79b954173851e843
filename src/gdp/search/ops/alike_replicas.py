"""Steps with replicas, which are placed alike: few decisions place any number of ops.

    stages of each replica --> cuts shifted in all replicas at once --> one replica searched alone, the others like it

A step of a million ops on 64 devices in 8 replicas has seven cuts. What is found is judged in the whole step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import I64, narrow
from gdp.budget import PREPARED, REPLAYED, Clock
from gdp.cluster import WORD_DEVICES
from gdp.graph.excerpts import Excerpt
from gdp.placers.starts import ReplicatedChain, replicated_stages
from gdp.search.candidate import Candidate
from gdp.search.question import Question, Solution
from gdp.simulator.problem import Placement, Problem
from gdp.units.reduction import reduce
from gdp.units.units import Units


@dataclass(frozen=True, eq=False)
class OneReplica:
    """A problem's first replica on its share of the devices, and the way back. N ops of the whole, n of a replica. A
    simulation of one of 8 replicas takes an eighth of the time. What moves between replicas is left out: an exchange
    ends when it begins."""

    whole: Problem
    problem: Problem
    excerpt: Excerpt
    replica: I64  # [N]

    @classmethod
    def of(cls, problem: Problem) -> "OneReplica | None":
        """Returns the first replica on the first devices. None without others, where they are not alike, and where an
        op may not be there."""
        replica = problem.graph.replicas
        size = problem.num_devices // (int(replica.max()) + 1)
        excerpt = Excerpt.of_replica(problem.graph) if 0 < size <= WORD_DEVICES else None
        if excerpt is None:
            return None
        part = problem.on_devices(range(size)).excerpt(excerpt.graph, excerpt.ops)
        return cls(problem, part, excerpt, replica) if narrow(part.allowed).any(axis=1).all() else None

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
    question: Question, clock: Clock, one: OneReplica, start: Candidate, place: Callable[[Question, Clock], Solution]
) -> list[Candidate]:
    """Returns what `place` finds for one replica, beginning from that of `start`, as a placement of all of them."""
    problem, placement = one.problem, one.restrict(start.placement)
    # an op that may not be in its stage is anywhere
    starts = (Candidate(placement, order=problem.order),) if placement.max() < problem.num_devices else ()
    alone = replace(question, problem=problem, reduction=reduce(problem), starts=starts)
    found = place(replace(alone, known=(), noise=None, bound_ns=0, on_progress=None), clock).best
    if found is None or clock.stop.is_set():
        return []
    whole = one.expand(found.placement)
    return [question.try_orders(whole, (problem.order,)), question.judge_with_transfers(whole, problem.order)]


def placed_by_replicas(
    question: Question, clock: Clock, place: Callable[[Question, Clock], Solution]
) -> list[Candidate]:
    """Returns stages of each replica on devices of its own; none without replicas. Also what shifted cuts give, and
    what `place` finds for one replica, where it has several devices."""
    problem = question.problem
    orders = (problem.order,) if question.is_large else None
    tried = [] if clock.stop.is_set() else stages_of_replicas(question, clock, orders)
    candidates = [*question.known, *(candidate for candidate, _, _ in tried)]
    if not tried or tried[0][1].devices.shape[1] == 1 or not _has_time(question, clock):
        return candidates
    best, part = min(tried, key=lambda each: each[0]), clock.part(question.settings.ops.cuts_share)
    candidates.append(shift_cuts(question, part, *best))
    question.tell(candidates[-1])
    if not _has_time(question, clock) or (one := OneReplica.of(problem)) is None:
        return candidates
    part = clock.part(question.settings.ops.one_replica_share).before(REPLAYED * question.simulation_s)
    if not part.is_up:
        for found in searched_in_one(question, part, one, min(candidates), place):
            candidates.append(found)
            question.tell(found)
    return candidates


def _has_time(question: Question, clock: Clock) -> bool:
    return not clock.is_up and question.has_time(clock, PREPARED)


def stages_of_replicas(
    question: Question, clock: Clock, orders: Sequence[str] | None
) -> list[tuple[Candidate, ReplicatedChain, I64]]:
    """Returns stages of each replica in the best of `orders`, with what they are cut from; none without replicas. The
    first is always tried, others while there is time."""
    found: list[tuple[Candidate, ReplicatedChain, I64]] = []
    for chain, cuts in replicated_stages(question.problem):
        if found and not question.has_time(clock, REPLAYED):
            break
        found.append((question.try_orders(chain.place(cuts), orders, clock), chain, cuts))
        clock.spend(1)
        question.tell(found[-1][0])
    return found


def shift_cuts(question: Question, clock: Clock, start: Candidate, chain: ReplicatedChain, cuts: I64) -> Candidate:
    """Returns the best that shifts of `cuts` [R, S - 1], whose step is `start`, give before the clock is up. Ops start
    in the order of `start`, by the longest remaining path with transfers where that is faster. Step times are under the
    problem's own op times."""
    judge, settings = replace(question, noise=None), question.settings.ops

    def by_level(placement: Placement) -> Candidate:
        return judge.try_orders(placement, (start.order,))

    def with_transfers(placement: Placement) -> Candidate:
        return judge.judge_with_transfers(placement, start.order)

    best, way = min(((way(start.placement), way) for way in (by_level, with_transfers)), key=lambda each: each[0])
    num_vain, num_cuts = 0, cuts.shape[1]
    rng = np.random.default_rng(question.seed)
    while num_vain < settings.most_shifts and question.has_time(clock, REPLAYED) and not clock.is_up:
        shares = np.zeros(num_cuts)
        for cut in rng.integers(num_cuts, size=rng.integers(1, 3)):
            distance = np.exp(rng.uniform(np.log(settings.nearest_cut), np.log(settings.farthest_cut))) / (num_cuts + 1)
            shares[cut] += distance * rng.choice((-1, 1))
        shifted = chain.shifted(cuts, shares)
        candidate = way(chain.place(shifted))
        clock.spend(1)
        num_vain += 1
        if not best < candidate:
            num_vain = 0 if candidate < best else num_vain
            best, cuts = candidate, shifted
    return best if question.noise is None else replace(question.judge(best.replay, best.order), priority=best.priority)
