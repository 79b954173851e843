"""`auto`: every classical placer, then the local search from all their answers in the time left."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gdp.budget import Clock
from gdp.coarsen import Reduction
from gdp.errors import InputError
from gdp.graph import I64
from gdp.placers import CLASSICAL
from gdp.placers.exact import exact
from gdp.placers.local_search import Incumbent, OnProgress, local_search
from gdp.plan import Baseline
from gdp.problem import Problem
from gdp.simulate import Simulation, simulate

SEARCHES = ("auto", "local-search", "exact")
WITH_POLICY = ("gdp-zero-shot", "gdp-finetune")  # they begin with a trained one
LEARNED = (*WITH_POLICY, "gdp-one", "hdp")
PLACERS = (*SEARCHES, *LEARNED, *CLASSICAL)
SMALL_UNITS, SMALL_NODES = 12, 200_000  # problems that `auto` hands to the exact placer first, and its effort there


@dataclass(frozen=True, eq=False)
class Found:
    """What a placer found: the best placement (None: none at all) as a replayed simulation, and what else was run."""

    best: Simulation | None  # of the original problem
    simulations: int
    baselines: Mapping[str, Baseline] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Noise:
    """Perturbed op times to average step times over, of the original ops [K, N, D] and of the reduced [K, M, D]."""

    original_ns: I64
    reduced_ns: I64

    @classmethod
    def draw(cls, reduction: Reduction, spread: float, num_tables: int, seed: int) -> "Noise":
        """Tables with a relative normal noise of deviation `spread` on each original op."""
        original = perturbed_times(reduction.original, spread, num_tables, seed)
        reduced = np.add.reduceat(np.maximum(original, 0)[:, reduction.members], reduction.member_offsets[:-1], axis=1)
        reduced = np.where(reduction.problem.op_time_ns < 0, -1, reduced)
        reduced.setflags(write=False)
        return cls(original, reduced)


def find(
    reduction: Reduction,
    placer: str,
    clock: Clock,
    *,
    seed: int = 0,
    bound_ns: int = 0,
    noise: Noise | None = None,
    checkpoint: str | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Found:
    """Run `placer` within the clock's budget. InputError for an unknown name.

    Classical placers see the original problem, searches and learned placers the reduced one, searches until they reach
    `bound_ns`. With `noise` step times are means over its tables. `checkpoint` is the file of another policy than the
    one that comes with gdp.
    """
    if placer not in PLACERS:
        raise InputError(f"placer {placer!r} is unknown; one of {', '.join(PLACERS)} is expected")
    if placer == "exact":
        return _find_exactly(reduction.original, clock, noise)
    if placer in LEARNED:
        return _ask_policy(reduction, placer, clock, seed, noise, checkpoint, num_threads, on_progress)
    names = {"auto": tuple(CLASSICAL), "local-search": ("single", "contiguous")}.get(placer, (placer,))
    candidates, baselines = _run_classical(reduction.original, names, clock, seed, noise, on_progress)
    if not candidates:
        return Found(None, 0, baselines)
    num_simulations = len(candidates)
    if placer in SEARCHES:
        starts = [reduction.restrict(candidate.placement) for _, candidate in candidates]
        if placer == "auto" and reduction.problem.group_index.max() < SMALL_UNITS:
            limit = clock.budget.simulations
            max_nodes = SMALL_NODES if limit is None else min(SMALL_NODES, limit // 2)
            answer = exact(reduction.problem, max_nodes=max_nodes, time_limit_s=clock.seconds_left, stop=clock.stop)
            num_simulations += answer.num_nodes
            if answer.placement is not None:
                starts.append(answer.placement)
        searched, searches = local_search(
            reduction.problem,
            starts,
            clock,
            seed=seed,
            num_spent=num_simulations,
            bound_ns=bound_ns if noise is None else 0,
            op_times_ns=None if noise is None else noise.reduced_ns,
            num_threads=num_threads,
            on_progress=on_progress,
        )
        num_simulations += searches
        expanded = expand(reduction, searched)
        candidates.append((_key(expanded, noise), expanded))
    best = min(candidates, key=lambda candidate: candidate[0])[1]
    return Found(best, num_simulations, baselines if placer == "auto" else {})


def _find_exactly(problem: Problem, clock: Clock, noise: Noise | None) -> Found:
    """The exact placer's answer; when nothing fits, what a single device would lack."""
    if noise is not None:
        raise InputError("robust: the exact placer knows one set of costs only; use another placer")
    answer = exact(problem, time_limit_s=clock.seconds_left, max_nodes=clock.budget.simulations, stop=clock.stop)
    placement = CLASSICAL["single"](problem, 0) if answer.placement is None else answer.placement
    return Found(None if placement is None else simulate(problem, placement), answer.num_nodes)


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
    if placer == "hdp":
        from gdp.placers.hdp import hdp
        from gdp.placers.learned import one_thread

        with one_thread():
            found = hdp(reduction.problem, clock, seed=seed, on_progress=on_progress)
        if found.placement is None or found.step_time_ns is None:
            return Found(None, found.num_simulations)
        return Found(expand(reduction, Incumbent(found.placement, found.step_time_ns)), found.num_simulations)
    from gdp.placers import learned  # PyTorch takes seconds to import

    answer = learned.ask(
        placer, reduction.problem, clock,
        seed=seed, checkpoint=checkpoint, num_threads=num_threads, on_progress=on_progress,
    )  # fmt: skip
    return Found(expand(reduction, answer.incumbent), answer.num_simulations)


def _run_classical(
    problem: Problem,
    names: Sequence[str],
    clock: Clock,
    seed: int,
    noise: Noise | None,
    on_progress: OnProgress | None,
) -> tuple[list[tuple[tuple[int, int], Simulation]], dict[str, Baseline]]:
    """(the placements of these placers, each with what it is compared by; how each of them did)."""
    candidates: list[tuple[tuple[int, int], Simulation]] = []
    baselines: dict[str, Baseline] = {}
    for name in names:
        if clock.stop.is_set():
            break
        began = time.perf_counter()
        placement = CLASSICAL[name](problem, seed)
        seconds = time.perf_counter() - began
        if placement is None or problem.broken_constraints(placement):
            baselines[name] = Baseline("failed", None, seconds)
            continue
        simulation = simulate(problem, placement)
        status = "ok" if simulation.feasible else "infeasible"
        baselines[name] = Baseline(status, simulation.step_time_ns, seconds)
        candidates.append((_key(simulation, noise), simulation))
        if on_progress:
            key, best = min(candidates, key=lambda candidate: candidate[0])
            on_progress(Incumbent(best.placement, key[1], key[0]), len(candidates))
    return candidates, baselines


def expand(reduction: Reduction, incumbent: Incumbent) -> Simulation:
    """The replay on the original ops of what was found on the reduced ones."""
    reduced = simulate(reduction.problem, incumbent.placement, priority=incumbent.priority)
    order = reduction.expand_order(reduced.order)
    return simulate(reduction.original, reduction.expand(incumbent.placement), order=order)


def _key(simulation: Simulation, noise: Noise | None) -> tuple[int, int]:
    """What placements are compared by: bytes missing, then step time."""
    if noise is None:
        return int(simulation.missing_bytes.sum()), simulation.step_time_ns
    return int(simulation.missing_bytes.sum()), mean_step_time_ns(simulation, noise.original_ns)


def mean_step_time_ns(simulation: Simulation, op_times_ns: I64) -> int:
    """Mean step time when the order of `simulation` is replayed under each of `op_times_ns` [K, N, D], rounded down."""
    problem, placement, order = simulation.problem, simulation.placement, simulation.order
    times = [simulate(problem, placement, order=order, op_time_ns=table).step_time_ns for table in op_times_ns]
    return sum(times) // len(times)


def perturbed_times(problem: Problem, spread: float, num_tables: int, seed: int) -> I64:
    """[K, N, D] op times with a relative normal noise of deviation `spread`, the same on all devices of an op."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x0B057]))
    factors = np.maximum(1.0 + spread * rng.standard_normal((num_tables, problem.num_ops, 1)), 0.1)
    times = problem.op_time_ns[None]
    tables = np.where(times > 0, np.rint(times * factors).astype(np.int64), times)
    tables.setflags(write=False)  # see `Problem.time_table_ns`
    return tables
