"""`auto`: classical placers, then a local search from their answers in the time left.

    single ... --> contiguous ... METIS ... --> local search --> the best of all
    weight streaming, where no single device holds all --^
    given starts, replicas, exact placement, own policy -^

A placer takes seconds on a graph of 50,000 ops: with a small budget the slower ones are skipped, so that time is left
for the search.

Steps with replicas are placed alike: few decisions place any number of ops.

    stages of each replica --> cuts shifted in all replicas at once --> one replica searched alone, the others like it

A step of a million ops on 64 devices in 8 replicas has seven cuts. What is found is judged in the whole step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import I64, narrow
from gdp.budget import PREPARED, REPLAYED, Clock
from gdp.cluster import WORD_DEVICES
from gdp.graph.excerpts import Excerpt
from gdp.placers.base import devices_by_speed
from gdp.placers.exact import exact
from gdp.placers.starts import ReplicatedChain, call_grids, interleaved_stages, replicated_stages
from gdp.search.candidate import Candidate
from gdp.search.ops.annealing import is_too_wide
from gdp.search.ops.classical import ClassicalRuns, Few, best_of_few, search_without
from gdp.search.ops.local_search import LocalSearch
from gdp.search.ops.zero_shot import zero_shot
from gdp.search.question import Question, Solution
from gdp.search.streaming.stream_weights import stream_weights
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import NEVER, Simulation, simulate
from gdp.units.reduction import reduce
from gdp.units.units import Units

FEWEST = ("single", "contiguous")  # classical placers that `local-search` starts from
ON_MANY = ("single", "contiguous", "expert")  # those that place on more than 64 devices
QUICK = ("single", "expert", "m-topo", "heft", "contiguous")  # those that `auto` always runs
BY_WORTH = ("expert", "contiguous", "dp-stages", "m-topo", "single", "heft")  # the same where time is short
SLOW = ("dp-stages", "m-etf", "m-sct", "metis")  # those that it runs if there is time


@dataclass(frozen=True, eq=False)
class OneReplica:
    """A problem's first replica on its share of the devices, and the way back. N ops of the whole, n of a replica. A
    simulation of one of 8 replicas takes an eighth of the time. Exchanges between replicas end when they begin."""

    whole: Problem
    problem: Problem
    excerpt: Excerpt
    replica: I64  # [N]

    @classmethod
    def of(cls, problem: Problem) -> "OneReplica | None":
        """Returns the first replica on the first devices; None if others are not alike, or an op may not be there."""
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


def auto(question: Question, clock: Clock, classical: ClassicalRuns | None = None) -> Solution:
    """Returns the best of classical placers, weight streaming, exact placement where it is small, and search. Placers
    run unless `classical` has their answers. A policy of one's own is asked too; the one that comes with gdp makes no
    plan faster that a search follows."""
    if question.problem.cluster.is_large:
        return _placed_on_many(question, clock, classical)
    is_small = bool(question.problem.graph.group_index.max() < question.settings.ops.small_units)
    if is_small:  # a merged chain cannot be parted, and alone its ops may fit
        question = question.unreduced()
    replicated = placed_by_replicas(question, clock, auto)
    classical = classical or run_classical(question, clock)
    if not (classical.candidates or replicated):
        return Solution(None, classical.baselines)
    streaming = streamed(question, clock.part(question.settings.ops.streaming_share), classical.best)
    answers = replayed_starts(question)
    exact_answer = placed_exactly(question, clock, classical.best) if is_small else []
    constructed = [*classical.candidates, *replicated, *exact_answer, *streaming]
    if question.checkpoint is not None and not clock.is_up:
        drawn = zero_shot(question, clock.part(question.settings.ops.policy_share)).best
        constructed += [] if drawn is None else [drawn]
    searched = search_from(question, clock, constructed)
    return Solution(best_of([*constructed, *answers], searched), classical.baselines)


def _placed_on_many(question: Question, clock: Clock, classical: ClassicalRuns | None) -> Solution:
    """Returns the best of quick placers, stages of replicas, a search on 64 of the devices, and one on all of them. The
    ops of one step seldom use so many devices, but graphs with replicas do: with these none is left out."""
    replicated = placed_by_replicas(question, clock, auto)
    classical = classical or run_classical(question, clock)
    answers = [*classical.candidates, *replicated, *replayed_starts(question)]
    if not answers:
        return Solution(None, classical.baselines)
    clock = clock.before(REPLAYED * question.simulation_s)
    near, settings = near_devices(question.problem), question.settings.ops
    is_wide = is_too_wide(question.reduction.problem)
    if not (replicated or clock.is_up) and question.problem.allowed[:, near].any(axis=1).all():
        answers += _placed_near(question, clock.part(1.0 if is_wide else settings.near_devices_share), near)
    if not (clock.is_up or is_wide):
        search = LocalSearch.of(question, clock)
        starts = sorted(answers)[: settings.num_starts_on_many]
        search.start([Candidate(question.reduction.restrict(start.placement)) for start in starts], num_more=0)
        search.run()
        answers.append(question.replay(search.best))
    return Solution(best_of(answers, None), classical.baselines)


def near_devices(problem: Problem) -> I64:
    """Returns the fastest device and those with the quickest routes from it, 64 in all, in ascending order."""
    start = int(devices_by_speed(problem)[0])
    rates = problem.cluster.bytes_per_second[start].astype(np.float64)
    rates[start] = np.inf
    far = np.abs(np.arange(problem.num_devices) - start)  # of equally quick ones those of its own pod
    return np.sort(np.lexsort((far, -rates))[:WORD_DEVICES])


def _placed_near(question: Question, clock: Clock, near: I64) -> list[Candidate]:
    """Returns what `auto` finds on the devices `near`, as a placement on all of them."""
    problem = question.problem
    part = problem.on_devices(near.tolist())
    asked = replace(question, problem=part, reduction=reduce(part), noise=None, starts=(), known=())
    best = auto(asked, clock).best
    if best is None:
        return []
    order: list[I64] = [np.zeros(0, np.int64) for _ in range(problem.num_devices)]
    for device, ops in zip(near.tolist(), best.replay.order, strict=True):
        order[device] = ops
    return [question.judge(simulate(problem, near[best.replay.placement], order=order), best.order)]


def hurries(question: Question, clock: Clock) -> bool:
    """Returns whether classical placers come first and have most of the time: on large problems with little time."""
    return question.is_large and not question.has_time(clock, question.settings.ops.unhurried)


def run_classical(question: Question, clock: Clock) -> ClassicalRuns:
    """Runs the quick classical placers, and slow ones as long as little of the time is spent."""
    problem, settings, is_hurried = question.problem, question.settings.ops, hurries(question, clock)
    classical = ClassicalRuns(question, Few.of_large(question), is_hurried)
    if problem.cluster.is_large:  # others keep tables of ops times devices
        classical.run(ON_MANY, clock.part(settings.quick_share))
        return classical
    if is_hurried:
        clock = clock.before(REPLAYED * question.simulation_s)
        if question.has_time(clock, settings.searched):
            clock = clock.part(settings.hurried_share)
        classical.run(BY_WORTH, clock)
    else:
        classical.run(_with_stages(problem, QUICK), clock.part(settings.quick_share))
        clock = clock.until(settings.slow_share)
    slow = [name for name in (*QUICK, *SLOW) if name not in classical.baselines]
    classical.run(slow, clock, all_of_them=False)
    return classical


def local_search(question: Question, clock: Clock) -> Solution:
    """Returns what the local search finds from two classical answers and the starts given."""
    if question.problem.cluster.is_large:
        return _placed_on_many(question, clock, None)
    classical = ClassicalRuns(question, Few.of_large(question), hurries(question, clock))
    classical.run(_with_stages(question.problem, FEWEST), clock.part(question.settings.ops.hurried_share))
    if not classical.candidates:
        return Solution(None)
    streaming = streamed(question, clock.part(question.settings.ops.streaming_share), classical.best)
    constructed, answers = [*classical.candidates, *streaming], replayed_starts(question)
    return Solution(best_of([*constructed, *answers], search_from(question, clock, constructed)))


def streamed(question: Question, clock: Clock, rival: Candidate | None) -> list[Candidate]:
    """Returns the fastest step with weights streamed that fits, if there is one; none with micro-batches. Where all are
    far slower than `rival`, few are tried."""
    if question.problem.microbatch.max() >= 1:
        return []
    fastest: Simulation | None = None
    rival_ns = rival.step_time_ns if rival is not None and rival.fits else NEVER
    for simulation in stream_weights(question.problem, rival_ns, question.settings.streaming):
        clock.spend(1)
        if simulation.feasible and (fastest is None or simulation.step_time_ns < fastest.step_time_ns):
            fastest = simulation
        if clock.is_up:
            break
    return [] if fastest is None else [question.judge(fastest)]


def replayed_starts(question: Question) -> list[Candidate]:
    """Returns the starts of `question`, simulated; ops that are not allowed where they are have moved."""
    candidates = []
    for start in question.starts:
        if question.problem.broken_constraints(start.placement):
            candidates.append(question.replay(_reduced(question, start)))
        else:
            simulation = simulate(question.problem, start.placement, priority=start.priority)
            candidates.append(replace(question.judge(simulation), priority=start.priority))
    return candidates


def placed_exactly(question: Question, clock: Clock, best: Candidate | None) -> list[Candidate]:
    """Returns the exact placer's answer, if it has one; half of a budget in simulations may go into it."""
    problem, left = question.problem, clock.simulations_left
    num_nodes = question.settings.ops.small_nodes if left is None else left // 2
    if best is None or not best.fits:  # nothing fits yet, which matters more than thrift
        num_nodes *= question.settings.ops.nodes_per_simulation
    answer = exact(
        problem,
        max_nodes=min(question.settings.ops.small_nodes, num_nodes),
        time_limit_s=clock.seconds_left,
        start=None if best is None else best.placement,
        stop=clock.stop,
    )
    clock.spend(answer.num_nodes if left is None else min(answer.num_nodes, left // 2))
    return [] if answer.placement is None else [question.try_orders(answer.placement)]


def search_from(question: Question, clock: Clock, constructed: Sequence[Candidate]) -> Candidate | None:
    """Returns the best that the local search finds from what was constructed and from the starts given, replayed. It
    looks at few micro-batches, at all, without some devices, and last under noise, until the budget is spent. None
    where there is no time to prepare it."""
    problem, noise, settings = question.reduction.problem, question.noise, question.settings.ops
    if question.is_large and not question.has_time(clock, settings.searched):
        return None
    if clock.seconds_left is not None:
        clock = clock.before(REPLAYED * question.simulation_s)
    search = LocalSearch.of(question, clock)
    placements = [question.reduction.restrict(candidate.placement) for candidate in constructed]
    further = [*interleaved_stages(problem), *call_grids(problem)] if question.has_time(clock, PREPARED) else []
    starts = [Candidate(placement) for placement in [*placements, *further]]
    given, num_more = [_reduced(question, start) for start in question.starts], None
    if (few := Few.of(problem, settings.few_microbatches)) is not None:
        starts, num_more = [*best_of_few(few, search, starts, settings.few_microbatches_share), *starts], 0
    search.start([*starts, *given], num_more=num_more)
    last = 1.0 if noise is None else 1.0 - question.settings.noise.last_share
    search.run(last - settings.fewer_devices_share)
    search_without(search, settings.fewer_devices_share / 2, last)
    until = 1.0
    if noise is not None:
        search.run(last)
        if not clock.is_up:
            if search.is_over:  # the bound is reached: only what noise does is left to look at
                until = search.clock.share_spent + question.settings.noise.last_share
            search.score_under(noise.reduced_ns)
    search.run(until)
    return question.replay(search.best)


def best_of(answers: Sequence[Candidate], searched: Candidate | None) -> Candidate:
    """Returns the best candidate that is not slower, under the problem's own op times, than an answer that fits."""
    fastest_ns = min((answer.replay.step_time_ns for answer in answers if answer.fits), default=NEVER)
    candidates = [*answers] if searched is None else [*answers, searched]
    eligible = [x for x in candidates if x.fits and x.replay.step_time_ns <= fastest_ns]
    return min(eligible or candidates)


def _with_stages(problem: Problem, names: Sequence[str]) -> Sequence[str]:
    """Returns `names`, with exact pipeline stages where there are micro-batches."""
    return names if problem.microbatch.max() < 1 else (*names, "dp-stages")


def _reduced(question: Question, start: Candidate) -> Candidate:
    """Returns `start` as a candidate of the reduced problem, moved where it is not allowed."""
    reduction = question.reduction
    units = Units.of(reduction.problem)
    placement = units.place_allowed(reduction.restrict(start.placement)[units.first_op])
    priority = None if start.priority is None else reduction.restrict(start.priority)
    return Candidate(placement, priority=priority, order=reduction.problem.order)
