"""Does the plan get faster without one of its devices? A slow or badly connected one can do more harm than good, and a
search with fewer devices has fewer placements to look at.

N ops, U units, D devices.
"""

import numpy as np

from gdp.budget import Clock
from gdp.placers.base import UnitArrays
from gdp.placers.island import Incumbent
from gdp.placers.local_search import LocalSearch
from gdp.problem import Placement, Problem


def search_without(search: LocalSearch, share: float, until: float) -> None:
    """Search without the device that does least, from the best placement with its ops moved elsewhere, and go on as
    long as that is faster; `search` adopts what is found.

    Each turn takes a `share` of the whole budget, none begins after a share `until` of it.
    """
    while search.share_spent < until and not search.is_over and search.best.excess_bytes == 0:
        best = search.best
        problem = _without_least_useful(search.problem, best)
        if problem is None:
            return
        clock = search.clock_until(min(search.share_spent + share, until))
        found = _search(problem, best, search, clock)
        search.adopt(found.best, found.num_simulations)
        if found.best.key >= best.key:
            return


def _search(problem: Problem, best: Incumbent, search: LocalSearch, clock: Clock) -> LocalSearch:
    part = LocalSearch(
        problem, clock,
        seed=search.seed, config=search.config, num_spent=search.spent, bound_ns=search.bound_ns,
        num_threads=search.num_threads,
    )  # fmt: skip
    part.start(_moves(problem, best.placement))
    part.run()
    return part


def _without_least_useful(problem: Problem, best: Incumbent) -> Problem | None:
    """`problem` without the device of `best` that computes least, if it can be as fast without; None if not."""
    work_ns = np.bincount(
        best.placement, problem.op_time_ns[np.arange(problem.num_ops), best.placement], problem.num_devices
    )
    used = np.unique(best.placement)
    for device in used[np.argsort(work_ns[used], kind="stable")].tolist():
        others = np.setdiff1d(used, device)
        allowed = np.zeros_like(problem.allowed)
        allowed[:, others] = problem.allowed[:, others]
        if not len(others) or not allowed.any(axis=1).all():
            continue
        fastest_ns = np.where(allowed, problem.op_time_ns, np.iinfo(np.int64).max).min(axis=1)
        held = int(problem.graph.resident_bytes.sum())
        if fastest_ns.sum() / len(others) < best.step_time_ns and held <= problem.memory_limit_bytes[others].sum():
            return problem.with_allowed(allowed)
        return None  # the others do more and would be missed more
    return None


def _moves(problem: Problem, placement: Placement) -> list[Placement]:
    """`placement` with what may not stay put on the fastest devices, and all of it on each device in turn."""
    units = UnitArrays.of(problem)
    devices = placement[units.first_op]
    is_moved = ~units.allowed[np.arange(units.num_units), devices]
    there = np.flatnonzero(problem.allowed.any(axis=0))
    return [units.place(devices), *(units.place(np.where(is_moved, device, devices)) for device in there.tolist())]
