"""`auto`: classical placers, then the policy from their best answer, then a local search in the time left.

    single ... --> contiguous ... METIS ... --> policy --> local search --> the best of all
    weight streaming, where no single device holds all ----^
    given starts, exact placement of small problems -------^

A placer takes seconds on a graph of 50,000 ops: with a small budget the slower ones are skipped, so that time is left
for the policy and for the search.
"""

from collections.abc import Sequence
from dataclasses import replace

from gdp.budget import Clock
from gdp.placers.exact import exact
from gdp.placers.interleaved import interleaved_stages
from gdp.search.candidate import Candidate
from gdp.search.classical import QUICKLY_S, ClassicalRuns
from gdp.search.fewer_devices import search_without
from gdp.search.fewer_microbatches import Few, best_of_few
from gdp.search.local_search import LocalSearch
from gdp.search.question import Question
from gdp.search.solution import Solution
from gdp.search.starts import diverse_starts
from gdp.search.streaming import stream_weights
from gdp.search.zero_shot import draw_near
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER, Simulation, simulate
from gdp.units.forward_units import forward_units
from gdp.units.units import Units

FEWEST = ("single", "contiguous")  # classical placers that `local-search` starts from
QUICKEST = ("single", "expert")  # classical placers that `auto` always runs
QUICK = (*QUICKEST, "m-topo", "heft", "contiguous")  # and without a policy these too
STAGES_S = 2e-6  # for each op and device, about what `contiguous` takes: 0.9 to 5 us on graphs of 5,000 to 55,000 ops
SLOW = ("dp-stages", "m-etf", "m-sct", "metis")  # those that it runs if there is time
CLASSICAL_SHARE = 0.15  # of the time: later no slow placer begins
NUM_PARTITIONS, PARTITIONS_SHARE = 64, 0.1  # for a policy to refine, and of the time left at most
STREAMING_SHARE = 0.2  # of the budget at most
ROBUST_SHARE = 0.15  # of the search: the last part, under perturbed op times
FEW_MICROBATCHES_SHARE, FEWER_DEVICES_SHARE = 0.4, 0.2  # of the search at most
SMALL_UNITS, SMALL_NODES = 12, 200_000  # problems that are not reduced and go to the exact placer; its effort there
NODES_PER_SIMULATION = 20  # of it while nothing fits: most are partial placements, which take far less time


def auto(question: Question, clock: Clock, classical: ClassicalRuns | None = None) -> Solution:
    """Returns the best of classical placers, weight streaming, exact placement where it is small, policy, and search.

    Placers run unless `classical` has their answers. A budget in simulations leaves the policy out: its simulations
    take several times as long as those of the search, so their number is no measure to share by.
    """
    is_small = bool(question.problem.graph.group_index.max() < SMALL_UNITS)
    if is_small:  # a merged chain cannot be parted, and alone its ops may fit
        question = question.unreduced()
    asks_policy = question.asks_policy and clock.simulations_left is None
    classical = classical or run_classical(question, clock, before_policy=asks_policy)
    if not classical.candidates:
        return Solution(None, classical.baselines)
    streaming = streamed(question, clock.part(STREAMING_SHARE), classical.best)
    answers = replayed_starts(question)
    exact_answer = placed_exactly(question, clock, classical.best) if is_small else []
    constructed = [*classical.candidates, *exact_answer, *streaming]
    if asks_policy:
        reduced = question.reduction.problem
        known = [question.reduction.restrict(candidate.placement) for candidate in [*constructed, *answers]]
        partitions = diverse_starts(
            reduced, forward_units(reduced), NUM_PARTITIONS, question.seed, clock.part(PARTITIONS_SHARE)
        )
        drawn, is_complete = draw_near(question, clock, [*known, *interleaved_stages(reduced), *partitions])
        constructed.append(drawn)
        if clock.is_up:
            return Solution(best_of([*constructed, *answers], drawn), classical.baselines)
        searched = search_from(question, clock, [drawn], num_more=None if is_complete else 0)
    else:
        searched = search_from(question, clock, constructed)
    return Solution(best_of([*constructed, *answers], searched), classical.baselines)


def run_classical(question: Question, clock: Clock, *, before_policy: bool = False) -> ClassicalRuns:
    """Runs the quick classical placers, and slow ones as long as little of the time is spent.

    Before a policy, and without micro-batches, few of the quick ones count as such once a plan fits.
    """
    problem = question.problem
    classical, quick = ClassicalRuns(question, Few.of_large(problem)), _with_stages(problem, QUICK)
    if before_policy and problem.microbatch.max() < 1:
        classical.run(QUICKEST, clock)
        if classical.best is not None and classical.best.fits:
            stages_s = STAGES_S * problem.num_ops * problem.num_devices
            quick = ("contiguous",) if clock.has(stages_s - QUICKLY_S) else ()
    classical.run([name for name in quick if name not in classical.baselines], clock)
    slow = [name for name in (*QUICK, *SLOW) if name not in classical.baselines]
    classical.run(slow, clock.until(CLASSICAL_SHARE), all_of_them=False)
    return classical


def local_search(question: Question, clock: Clock) -> Solution:
    """Returns what the local search finds from two classical answers and the starts given."""
    classical = ClassicalRuns(question, Few.of_large(question.problem))
    classical.run(_with_stages(question.problem, FEWEST), clock)
    if not classical.candidates:
        return Solution(None)
    streaming = streamed(question, clock.part(STREAMING_SHARE), classical.best)
    constructed, answers = [*classical.candidates, *streaming], replayed_starts(question)
    searched = search_from(question, clock, constructed)
    return Solution(best_of([*constructed, *answers], searched))


def streamed(question: Question, clock: Clock, rival: Candidate | None) -> list[Candidate]:
    """Returns the fastest step with weights streamed that fits, if there is one; none with micro-batches.

    Where all are far slower than `rival`, few are tried.
    """
    fastest: Simulation | None = None
    rival_ns = rival.step_time_ns if rival is not None and rival.fits else NEVER
    for simulation in stream_weights(question.problem, rival_ns) if question.problem.microbatch.max() < 1 else ():
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
    num_nodes = SMALL_NODES if left is None else left // 2
    if best is None or not best.fits:  # nothing fits yet, which matters more than thrift
        num_nodes *= NODES_PER_SIMULATION
    answer = exact(
        problem,
        max_nodes=min(SMALL_NODES, num_nodes),
        time_limit_s=clock.seconds_left,
        start=None if best is None else best.placement,
        stop=clock.stop,
    )
    clock.spend(answer.num_nodes if left is None else min(answer.num_nodes, left // 2))
    return [] if answer.placement is None else [question.try_orders(answer.placement)]


def search_from(
    question: Question, clock: Clock, constructed: Sequence[Candidate], *, num_more: int | None = None
) -> Candidate:
    """Returns the best that the local search finds from what was constructed and from the starts given, replayed.

    It looks at few micro-batches, at all, without some devices, and last under noise, until the budget is spent. It
    makes up to `num_more` further starts itself.
    """
    problem, noise = question.reduction.problem, question.noise
    search = LocalSearch(
        problem,
        clock,
        seed=question.seed,
        bound_ns=question.bound_ns,
        num_threads=question.num_threads,
        on_progress=question.tell,
    )
    placements = [question.reduction.restrict(candidate.placement) for candidate in constructed]
    starts = [Candidate(placement) for placement in [*placements, *interleaved_stages(problem)]]
    given = [_reduced(question, start) for start in question.starts]
    if (few := Few.of(problem)) is None:
        search.start([*starts, *given], num_more=num_more)
    else:
        search.start([*best_of_few(few, search, starts, FEW_MICROBATCHES_SHARE), *starts, *given], num_more=0)
    last = 1.0 if noise is None else 1.0 - ROBUST_SHARE
    search.run(last - FEWER_DEVICES_SHARE)
    search_without(search, FEWER_DEVICES_SHARE / 2, last)
    if noise is not None:
        search.run(last)
        search.score_under(noise.reduced_ns)
    search.run()
    return question.replay(search.best)


def best_of(answers: Sequence[Candidate], searched: Candidate) -> Candidate:
    """Returns the best candidate that is not slower, under the problem's own op times, than an answer that fits."""
    fastest_ns = min((answer.replay.step_time_ns for answer in answers if answer.fits), default=NEVER)
    candidates = [*answers, searched]
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
