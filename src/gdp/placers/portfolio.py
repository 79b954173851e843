"""`auto`: every classical placer, then the local search from all their answers in the time left."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gdp.budget import Clock
from gdp.errors import InputError
from gdp.graph import I64
from gdp.placers import CLASSICAL
from gdp.placers.exact import exact
from gdp.placers.local_search import Incumbent, OnProgress, local_search
from gdp.problem import Baseline, Placement, Problem
from gdp.simulate import evaluate, simulate

SEARCHES = ("auto", "local-search", "exact")
PLACERS = (*SEARCHES, *CLASSICAL)
SMALL_UNITS, SMALL_NODES = 12, 200_000  # problems that `auto` hands to the exact placer first, and its effort there


@dataclass(frozen=True, eq=False)
class Found:
    """What a placer found: the best incumbent (None: no placement at all), and what else it ran."""

    best: Incumbent | None
    simulations: int
    baselines: Mapping[str, Baseline] = field(default_factory=dict)


def find(
    problem: Problem,
    placer: str,
    clock: Clock,
    *,
    seed: int = 0,
    op_times_ns: I64 | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Found:
    """Run `placer` on `problem` within the clock's budget. InputError for an unknown name.

    With `op_times_ns` [K, N, D] step times are means over these tables (see `local_search`).
    """
    if placer not in PLACERS:
        raise InputError(f"placer {placer!r} is unknown; one of {', '.join(PLACERS)} is expected")
    if placer == "exact":
        answer = exact(problem, seed, time_limit_s=clock.seconds_left, max_nodes=clock.budget.simulations)
        best = None if answer.placement is None else _score(problem, answer.placement, op_times_ns)
        return Found(best, answer.num_nodes)
    if placer in CLASSICAL:
        incumbent, _ = _run_classical(problem, placer, seed, op_times_ns)
        return Found(incumbent, 1)

    names = tuple(CLASSICAL) if placer == "auto" else ("single", "contiguous")
    starts: list[Incumbent] = []
    baselines: dict[str, Baseline] = {}
    for name in names:
        if clock.stop.is_set():
            break
        incumbent, baseline = _run_classical(problem, name, seed, op_times_ns)
        baselines[name] = baseline
        if incumbent is not None:
            starts.append(incumbent)
            if on_progress:
                on_progress(min(starts, key=lambda x: x.key), len(starts))
    if not starts:
        return Found(None, 0, baselines)
    if placer == "auto" and problem.group_index.max() < SMALL_UNITS:
        answer = exact(problem, seed, max_nodes=SMALL_NODES, time_limit_s=clock.seconds_left)
        if answer.placement is not None:
            starts.append(_score(problem, answer.placement, op_times_ns))
    best = min(starts, key=lambda x: x.key)
    searched, simulations = local_search(
        problem,
        [start.placement for start in starts],
        clock,
        seed=seed,
        op_times_ns=op_times_ns,
        num_threads=num_threads,
        on_progress=on_progress,
    )
    best = min(best, searched, key=lambda x: x.key)
    return Found(best, simulations + len(starts), baselines if placer == "auto" else {})


def _run_classical(
    problem: Problem, name: str, seed: int, op_times_ns: I64 | None
) -> tuple[Incumbent | None, Baseline]:
    began = time.perf_counter()
    placement = CLASSICAL[name](problem, seed)
    if placement is None:
        return None, Baseline("failed", None, time.perf_counter() - began)
    incumbent = _score(problem, placement, op_times_ns)
    status = "infeasible" if incumbent.excess_bytes else "ok"
    nominal_ns = incumbent.step_time_ns if op_times_ns is None else evaluate(problem, placement)[0]
    return incumbent, Baseline(status, nominal_ns, time.perf_counter() - began)


def _score(problem: Problem, placement: Placement, op_times_ns: I64 | None) -> Incumbent:
    step_time_ns, peaks = evaluate(problem, placement)
    excess = int(np.maximum(peaks - problem.memory_limit_bytes, 0).sum())
    if op_times_ns is not None:
        step_time_ns = mean_step_time_ns(problem, placement, op_times_ns)
    return Incumbent(np.asarray(placement, np.int64), step_time_ns, excess)


def mean_step_time_ns(
    problem: Problem, placement: Placement, op_times_ns: I64, order: Sequence[I64] | None = None
) -> int:
    """Mean step time of `placement` over the tables `op_times_ns` [K, N, D], replaying `order` if given; rounded down."""
    times = [
        simulate(Problem(problem.graph, problem.cluster, table, problem.allowed, problem.memory_limit_bytes), placement,
                 priority=problem.b_level_ns, order=order).step_time_ns
        for table in op_times_ns
    ]  # fmt: skip
    return sum(times) // len(times)


def perturbed_times(problem: Problem, spread: float, num_tables: int, seed: int) -> I64:
    """[K, N, D] tables of op times with a relative normal noise of deviation `spread`, the same on all devices of an op."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x0B057]))
    factors = np.maximum(1.0 + spread * rng.standard_normal((num_tables, problem.num_ops, 1)), 0.1)
    times = problem.op_time_ns[None]
    return np.where(times > 0, np.rint(times * factors).astype(np.int64), times)


Placer = Callable[..., Found]
