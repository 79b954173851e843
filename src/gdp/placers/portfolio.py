"""`auto`: classical placers, then the local search from all their answers in the time left.

    single ... contiguous --> METIS ... --> (zero-shot -->) local search (, guided by the policy) --> the best of all
                                weight streaming, where no single device holds everything -------^

`guided` asks the policy too. It is not the default, for on average it is no better (docs/results.md). A placer takes
seconds on a graph of 50,000 ops: with a small budget the slower ones are skipped, so that time is left for the search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from gdp.budget import Budget, Clock
from gdp.coarsen import Reduction
from gdp.errors import InputError
from gdp.forward_units import forward_units
from gdp.pipelines import B_LEVEL
from gdp.placers import CLASSICAL
from gdp.placers.base import Start, UnitArrays, devices_by_speed
from gdp.placers.classical_runs import ClassicalRuns
from gdp.placers.contiguous import folded_chain, stages
from gdp.placers.exact import exact
from gdp.placers.fewer_devices import search_without
from gdp.placers.fewer_microbatches import Few, best_of_few
from gdp.placers.interleaved import interleaved_stages
from gdp.placers.island import Incumbent
from gdp.placers.local_search import LocalSearch, OnProgress
from gdp.placers.noise import Candidate, Noise, key_of
from gdp.placers.streaming import stream_weights
from gdp.placers.zero_shot import zero_shot
from gdp.plan import Baseline
from gdp.policy.construction import Constructor
from gdp.policy.pretrained import read_constructor, read_policy
from gdp.problem import Placement, Problem
from gdp.simulate import NEVER, Simulation, simulate

SEARCHES = ("auto", "guided", "local-search", "exact")
WITH_POLICY = ("guided", "gdp-zero-shot", "gdp-finetune")  # they ask a trained one
LEARNED = ("gdp-zero-shot", "gdp-finetune", "gdp-one", "hdp")
PLACERS = (*SEARCHES, *LEARNED, *CLASSICAL)
FEWEST = ("single", "contiguous")  # classical placers that the local search starts from
QUICK = ("single", "expert", "m-topo", "heft", "contiguous")  # those that a search always runs
SLOW = ("dp-stages", "m-etf", "m-sct", "metis")  # those that it runs if there is time
POLICY_SHARE, CLASSICAL_SHARE = 0.25, 0.15  # of the time: for the policy at most; until no classical placer is begun
STREAMING_SHARE = 0.2  # of the budget at most
ROBUST_SHARE = 0.15  # of the search: the last part, under perturbed op times
FEW_MICROBATCHES_SHARE, FEWER_DEVICES_SHARE = 0.4, 0.2  # of the search at most
SMALL_UNITS, SMALL_NODES = 12, 200_000  # problems that are not reduced and go to the exact placer; its effort there
NODES_PER_SIMULATION = 20  # of it while nothing fits: most are partial placements, which take far less time


@dataclass(frozen=True, eq=False)
class Found:
    """What a placer found: the best placement (None: none at all) as a replayed simulation, and what else was run."""

    best: Simulation | None  # of the original problem
    simulations: int
    order: str = B_LEVEL  # of `best`
    baselines: Mapping[str, Baseline] = field(default_factory=dict)


def find(
    reduction: Reduction,
    placer: str,
    clock: Clock,
    *,
    seed: int = 0,
    bound_ns: int = 0,
    noise: Noise | None = None,
    checkpoint: str | None = None,
    starts: Sequence[Start] = (),
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Found:
    """Run `placer` within the clock's budget. InputError for an unknown name.

    Classical placers see the original problem, searches and learned placers the reduced one, searches until they reach
    `bound_ns` and from `starts` [N] too. With `noise` step times are means over its tables. `checkpoint` is the file of
    another policy than the one that comes with gdp.
    """
    if placer not in PLACERS:
        raise InputError(f"placer {placer!r} is unknown; one of {', '.join(PLACERS)} is expected")
    reduction = _in_good_order(reduction)
    if placer == "exact":
        return _find_exactly(reduction.original, clock, noise)
    if placer in LEARNED:
        return _ask_policy(reduction, placer, clock, seed, noise, checkpoint, num_threads, on_progress)
    if placer not in SEARCHES:
        classical = ClassicalRuns(reduction.original, clock, seed, noise, on_progress)
        classical.run((placer,))
        return _found(classical.best, len(classical.candidates))
    constructor = read_constructor(checkpoint) if placer == "guided" and reduction.problem.num_devices > 1 else None
    return _search(
        reduction, clock, constructor, starts,
        seed=seed, is_quick=placer == "local-search", bound_ns=bound_ns, noise=noise, num_threads=num_threads,
        on_progress=on_progress,
    )  # fmt: skip


def _search(
    reduction: Reduction,
    clock: Clock,
    constructor: Constructor | None,
    given: Sequence[Start],
    *,
    seed: int,
    is_quick: bool,
    bound_ns: int,
    noise: Noise | None,
    num_threads: int | None,
    on_progress: OnProgress | None,
) -> Found:
    """Starts, then the local search; guided if there is a `constructor`, from two starts alone if it `is_quick`."""
    if not is_quick and _is_small(reduction.original):  # a merged chain cannot be parted, and alone that may fit
        reduction = Reduction.nothing(reduction.original)
        noise = None if noise is None else replace(noise, reduced_ns=noise.original_ns)
    problem, limit = reduction.problem, clock.budget.simulations
    report = None if on_progress is None else _Improving(on_progress)
    large = Few.of_large(reduction.original)
    classical = ClassicalRuns(reduction.original, clock, seed, noise, report, large)
    always = list(FEWEST if is_quick else QUICK)
    if len(problem.orders) > 1:
        always.append("dp-stages")
    classical.run(always)
    if not is_quick:
        classical.run([name for name in SLOW if name not in always], until=CLASSICAL_SHARE)
    starts = [reduction.restrict(candidate.simulation.placement) for candidate in classical.candidates]
    known = [_reduced(reduction, start) for start in given]
    num_simulations = len(classical.candidates)
    baselines = {} if is_quick else classical.baselines
    if constructor is not None:
        share = replace(clock, budget=_share(clock, POLICY_SHARE))
        after = None if report is None else report.after(num_simulations)
        answer = zero_shot(problem, constructor, share, seed=seed, num_threads=num_threads, on_progress=after)
        starts.append(answer.incumbent.placement)
        num_simulations += answer.num_simulations
    if not starts:
        return Found(None, num_simulations, baselines=baselines)
    answers = list(classical.candidates)
    if len(problem.orders) == 1:
        streamed, count = _streamed(reduction.original, clock)
        num_simulations += count
        if streamed is not None:
            answers.append(Candidate(key_of(streamed, noise), streamed, problem.order))
    for before, incumbent in zip(given, known, strict=True):  # reducing it may have moved ops
        if reduction.original.broken_constraints(before.placement):
            begun = expand(reduction, incumbent)
        else:
            begun = simulate(reduction.original, before.placement, priority=before.priority)
        answers.append(Candidate(key_of(begun, noise), begun, incumbent.order))
    if not is_quick and _is_small(problem):
        num_nodes = SMALL_NODES if limit is None else limit // 2
        if classical.best is None or classical.best.key[0]:  # nothing fits yet, which matters more than thrift
            num_nodes *= NODES_PER_SIMULATION
        max_nodes = min(SMALL_NODES, num_nodes)
        start = None if classical.best is None else reduction.restrict(classical.best.simulation.placement)
        exactly = exact(problem, max_nodes=max_nodes, time_limit_s=clock.seconds_left, start=start, stop=clock.stop)
        num_simulations += exactly.num_nodes if limit is None else min(exactly.num_nodes, limit // 2)
        if exactly.placement is not None:
            starts.append(exactly.placement)
            answers.append(Candidate.of(reduction.original, reduction.expand(exactly.placement), noise))
    search = LocalSearch(
        problem, clock,
        seed=seed, num_spent=num_simulations, bound_ns=bound_ns, constructor=constructor, num_threads=num_threads,
        on_progress=None if report is None else report.after(num_simulations),
    )  # fmt: skip
    _run(search, [*starts, *interleaved_stages(problem)], known, noise)
    searched = expand(reduction, search.best)
    candidates = [*answers, Candidate(key_of(searched, noise), searched, search.best.order)]
    return _found(_choose(candidates, answers), search.spent, baselines)


def _streamed(problem: Problem, clock: Clock) -> tuple[Simulation | None, int]:
    """The fastest step that fits with weights streamed, and the simulations made, in a share of the budget at most."""
    budget, began = clock.budget.part(STREAMING_SHARE), clock.seconds
    best: Simulation | None = None
    count = 0
    for found in stream_weights(problem):
        count += 1
        if found.feasible and (best is None or found.step_time_ns < best.step_time_ns):
            best = found
        if clock.stop.is_set() or (budget.simulations is not None and count >= budget.simulations):
            break
        if budget.seconds is not None and clock.seconds - began >= budget.seconds:
            break
    return best, count


def _run(search: LocalSearch, starts: list[Placement], known: list[Incumbent], noise: Noise | None) -> None:
    """Spend what is left of the budget: on few micro-batches, on all, without some devices, under noise."""
    if (few := Few.of(search.problem)) is not None:
        found, num_simulations = best_of_few(few, search, starts, FEW_MICROBATCHES_SHARE)
        search.num_spent += num_simulations
        search.start([*found, *starts], known, num_more=0)
    else:
        search.start(starts, known)
    last = 1.0 if noise is None else 1.0 - ROBUST_SHARE
    search.run(last - FEWER_DEVICES_SHARE)
    search_without(search, FEWER_DEVICES_SHARE / 2, last)
    if noise is not None:
        search.run(last)
        search.score_under(noise.reduced_ns)
    search.run()


def _reduced(reduction: Reduction, start: Start) -> Incumbent:
    """`start` on the reduced ops, moved where it is not allowed; figures are to be measured."""
    units = UnitArrays.of(reduction.problem)
    placement = units.place(reduction.restrict(start.placement)[units.first_op])
    priority = None if start.priority is None else reduction.restrict(start.priority)
    return Incumbent(placement, 0, priority=priority, order=reduction.problem.order)


def _choose(candidates: Sequence[Candidate], answers: Sequence[Candidate]) -> Candidate:
    """The best of those that are not slower, under the problem's own op times, than an answer that fits: of a classical
    or the exact placer, or one to begin from."""
    fastest_ns = min((x.simulation.step_time_ns for x in answers if not x.key[0]), default=NEVER)
    eligible = [x for x in candidates if not x.key[0] and x.simulation.step_time_ns <= fastest_ns]
    return min(eligible or candidates, key=lambda candidate: candidate.key)


def _found(best: Candidate | None, simulations: int, baselines: Mapping[str, Baseline] = MappingProxyType({})) -> Found:
    if best is None:
        return Found(None, simulations, baselines=baselines)
    return Found(best.simulation, simulations, best.order, baselines)


def _in_good_order(reduction: Reduction) -> Reduction:
    """With the order in which contiguous stages do best, for all placers to judge placements by."""
    problem = reduction.problem
    if len(problem.orders) == 1:
        return reduction
    units = UnitArrays.of(problem, forward_units(problem))
    devices = np.sort(devices_by_speed(problem))
    order = Candidate.of(
        problem, units.place(stages(problem, units, folded_chain(problem, units), devices)), None
    ).order
    return replace(reduction, original=reduction.original.in_order(order), problem=problem.in_order(order))


def _is_small(problem: Problem) -> bool:
    return bool(problem.group_index.max() < SMALL_UNITS)


@dataclass(eq=False)
class _Improving:
    """Reports the best so far, whichever part of a search found it, and the simulations of all parts."""

    report: OnProgress
    best: Incumbent | None = None

    def __call__(self, incumbent: Incumbent, num_simulations: int) -> None:
        if self.best is None or incumbent.key < self.best.key:
            self.best = incumbent
        self.report(self.best, num_simulations)

    def after(self, num_spent: int) -> OnProgress:
        """What a part is to call that begins when `num_spent` simulations have been made."""
        return lambda incumbent, num_simulations: self(incumbent, num_spent + num_simulations)


def _share(clock: Clock, share: float) -> Budget:
    """What the clock's budget must be for a part that may take a `share` of what is left."""
    if clock.budget.simulations is not None:
        return Budget(simulations=int(share * clock.budget.simulations))
    return Budget(seconds=clock.seconds + share * (clock.seconds_left or 0.0))


def _find_exactly(problem: Problem, clock: Clock, noise: Noise | None) -> Found:
    """The exact placer's answer; when nothing fits, what a single device would lack."""
    if noise is not None:
        raise InputError("robust: the exact placer knows one set of costs only; use another placer")
    answer = exact(problem, time_limit_s=clock.seconds_left, max_nodes=clock.budget.simulations, stop=clock.stop)
    placement = CLASSICAL["single"](problem, 0) if answer.placement is None else answer.placement
    return Found(None if placement is None else simulate(problem, placement), answer.num_nodes, problem.order)


def prepare(placer: str) -> None:
    """Import what `placer` needs, before a clock runs: PyTorch takes seconds."""
    if placer in LEARNED and placer != "gdp-zero-shot":
        from gdp.placers import hdp, learned  # noqa: F401


def _ask_policy(
    reduction: Reduction,
    placer: str,
    clock: Clock,
    seed: int,
    noise: Noise | None,
    checkpoint: str | None,
    num_threads: int | None,
    on_progress: OnProgress | None,
) -> Found:
    """A learned placer's answer."""
    if noise is not None:
        raise InputError(f"robust: {placer} knows one set of costs only; use another placer")
    problem = reduction.problem
    if placer == "gdp-zero-shot":
        answer = zero_shot(
            problem, read_policy(checkpoint), clock, seed=seed, num_threads=num_threads, on_progress=on_progress
        )
    elif placer == "hdp":
        from gdp.placers.hdp import hdp
        from gdp.placers.learned import one_thread

        with one_thread():
            found = hdp(problem, clock, seed=seed, on_progress=on_progress)
        if found.placement is None or found.step_time_ns is None:
            return Found(None, found.num_simulations)
        incumbent = Incumbent(found.placement, found.step_time_ns)
        return Found(expand(reduction, incumbent), found.num_simulations, problem.order)
    else:
        from gdp.placers import learned

        answer = learned.ask(
            placer, problem, clock,
            seed=seed, checkpoint=checkpoint, num_threads=num_threads, on_progress=on_progress,
        )  # fmt: skip
    return Found(expand(reduction, answer.incumbent), answer.num_simulations, problem.order)


def expand(reduction: Reduction, incumbent: Incumbent) -> Simulation:
    """The replay on the original ops of what was found on the reduced ones."""
    reduced = simulate(reduction.problem, incumbent.placement, priority=incumbent.priority)
    order = reduction.expand_order(reduced.order)
    return simulate(reduction.original, reduction.expand(incumbent.placement), order=order)
