"""Search without the device that does least: a slow or badly connected device can do more harm than good.

With fewer devices there are fewer placements to look at, too.

N ops, U units, D devices.
"""

import numpy as np

from gdp.search.candidate import Candidate
from gdp.search.ops.local_search import LocalSearch
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units


def search_without(search: LocalSearch, share: float, until: float) -> None:
    """Searches without the device that does least, from the best placement with its ops moved elsewhere.

    This repeats as long as it is faster; `search` adopts what is found. Each turn takes a `share` of the whole budget,
    none begins after a share `until` of it.
    """
    clock = search.clock
    while clock.share_spent < until and not search.is_over and search.best.fits and clock.has(search.prepared_s):
        best = search.best
        problem = _without_least_useful(search.problem, best)
        if problem is None:
            return
        part_of_time = clock.until(min(clock.share_spent + share, until))
        part = search.part(problem, part_of_time, bound_ns=search.bound_ns)
        part.start([Candidate(placement) for placement in _moves(problem, best.placement)])
        part.run()
        search.adopt(part.best)
        if not part.best < best:
            return


def _without_least_useful(problem: Problem, best: Candidate) -> Problem | None:
    """Returns `problem` without the device of `best` that computes least; None if no step without it can be faster."""
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
    """Returns variants of `placement`: ops that must move go to their fastest devices, or all to one device in turn."""
    units = Units.of(problem)
    devices = placement[units.first_op]
    is_moved = ~units.allowed[np.arange(units.num_units), devices]
    there = np.flatnonzero(problem.allowed.any(axis=0))
    return [
        units.place_allowed(devices),
        *(units.place_allowed(np.where(is_moved, device, devices)) for device in there.tolist()),
    ]
