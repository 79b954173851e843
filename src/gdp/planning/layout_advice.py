"""Advice on layouts: what another machine or a larger batch would give, by estimates made from one replica.

    best over layouts of: estimate with the change * (simulated / estimated, without it, of a layout of that kind)

Kinds of layouts are levels of ZeRO, on one device a replica or on several.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from gdp.bounds.layout_bound import layout_bound
from gdp.budget import Clock
from gdp.cluster import Cluster, changes
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.interpolation import have_same_ops, interpolated
from gdp.planning.advice import FEWER_SAMPLES, LAYOUTS, MEMORY_MATTERS, ONE_FEWER, Advice, WhatIf, larger_machines
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement, Candidate
from gdp.search.layouts.arrangement import replicated_ways
from gdp.search.layouts.estimate import Estimator
from gdp.search.layouts.estimate_queue import EstimateQueue
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.layouts.screening import Screening
from gdp.search.question import BatchQuestion
from gdp.search.solution import Solution
from gdp.simulator.constraints import Constraints

_TRY_SHARE = 0.25  # of the time left, for each change of which something might fit
_Kind = tuple[int, bool]  # the level of ZeRO, and whether a replica has one device


@dataclass(frozen=True, eq=False)
class _LayoutChange:
    change: str
    detail: str
    parts: Parts
    cluster: Cluster
    constraints: Constraints
    batch_factor: int = 1


def advise_on_layouts(solution: Solution, parts: Parts, constraints: Constraints, clock: Clock) -> Advice:
    """Estimates the best layout of each changed machine, and of twice the batch, until `clock` ends."""
    assert solution.best is not None
    assert solution.plan is not None
    simulation, plan = solution.best.replay, solution.plan
    cluster = simulation.problem.cluster
    quick = Parts(parts.within(clock).rough, parts.batch_size, parts.exact(1))
    filled = float((simulation.peak_memory_bytes / np.maximum(simulation.problem.memory_limit_bytes, 1)).max())
    matters = filled > MEMORY_MATTERS
    what_ifs: list[WhatIf] = []
    not_asked: list[str] = []
    estimator = Estimator(quick, cluster, constraints, clock=clock)
    factors = _factors(solution, estimator, clock)
    for change in _layout_changes(quick, cluster, constraints, memory_matters=matters):
        estimate = None
        if not clock.is_up:
            estimate = _best_estimate(change, factors, clock)
        if estimate is None:
            why = "interrupted" if clock.stop.is_set() else "no time left, a larger budget has it"
            not_asked.append(f"{change.change} ({why})")
            continue
        bound_ns = layout_bound(change.parts.read, change.cluster)
        time_ns = None if estimate.missing_bytes else max(estimate.step_time_ns, bound_ns)
        detail = change.detail
        if change.batch_factor > 1 and time_ns is not None:
            detail += f", {time_ns / plan.step_time_ns / change.batch_factor:.2f} of the time per sample"
        what_ifs.append(WhatIf(change.change, detail, time_ns, str(estimate.layout)))
    return Advice(tuple(what_ifs), tuple(not_asked), matters, plan)


def estimated_layout(parts: Parts, cluster: Cluster, constraints: Constraints, clock: Clock) -> WhatIf | None:
    """Returns an estimate of the best layout of the batch; None where none fits, or time is up before."""
    parts = parts.within(clock)
    if clock.is_up:
        return None
    estimator = Estimator(parts, cluster, constraints, clock=clock)

    def attempt(action: Callable[[Arrangement], Candidate], way: Arrangement) -> Candidate | None:
        with contextlib.suppress(InputError):  # the model fails with so few samples, or there is no time to read it
            return action(way)
        return None

    queue = EstimateQueue(estimator, parts.batch_size, attempt)
    queue.add(replicated_ways(estimator.machine, parts.batch_size, is_fixed=parts.is_fixed), clock)
    best = queue.best(clock)
    if best is None or not best.fits:
        return None
    return WhatIf(LAYOUTS, "", best.step_time_ns, str(best.layout))


def changes_that_fit_a_layout(parts: Parts, cluster: Cluster, constraints: Constraints, clock: Clock) -> list[str]:
    """Returns the smallest changes with which a layout fits, as far as `clock` lets them be tried.

    They are more devices and fewer samples.
    """
    if clock.is_up:
        return []
    quick = Parts(parts.within(clock).rough, parts.batch_size, parts.exact(1))
    like = int(np.argmax(Estimator(quick, cluster, constraints).limits_bytes))
    remedies: list[str] = []
    for count, machine, allowed in larger_machines(cluster, constraints, like):
        if clock.is_up:
            return remedies
        if _fits(quick, machine, allowed, clock):
            remedies.append(f"{count} more {cluster.devices[like].kind}")
            break
    for factor in FEWER_SAMPLES:
        if clock.is_up:
            break
        with contextlib.suppress(InputError):  # of parts that are not known
            fewer = Parts(_MoreParts(quick, factor), parts.batch_size // factor, quick.rough(factor))
            if _fits(fewer, cluster, constraints, clock):
                remedies.append(f"1/{factor} of the samples")
                break
    return remedies


def _fits(parts: Parts, cluster: Cluster, constraints: Constraints, clock: Clock) -> bool:
    """Returns whether a layout is found that fits; False where time is up before."""
    search = LayoutSearch(BatchQuestion(parts, cluster, constraints), clock.part(_TRY_SHARE))
    return Screening(search).finds_one_that_fits()


@dataclass(frozen=True)
class _MoreParts:
    parts: Parts
    factor: int

    def __call__(self, num_parts: int) -> Graph:
        return self.parts.rough(num_parts * self.factor)


def _layout_changes(
    parts: Parts, cluster: Cluster, constraints: Constraints, *, memory_matters: bool
) -> Iterator[_LayoutChange]:
    if cluster.num_devices <= changes.MOST_CHANGED:
        yield from _machine_changes(parts, cluster, constraints, memory_matters=memory_matters)
    if (twice := _twice_the_batch(parts)) is not None:
        detail = f"{twice.batch_size} samples"
        yield _LayoutChange("twice the batch", detail, twice, cluster, constraints, batch_factor=2)


def _machine_changes(
    parts: Parts, cluster: Cluster, constraints: Constraints, *, memory_matters: bool
) -> Iterator[_LayoutChange]:
    devices = cluster.devices
    slowest = Estimator(parts, cluster, constraints).machine.usable[-1]
    if len(devices) > 2:
        less = changes.only(cluster, [number for number in range(len(devices)) if number != slowest])
        detail = f"without {devices[slowest].name}"
        yield _LayoutChange(ONE_FEWER, detail, parts, less, constraints.within(less))
    more = changes.with_another(cluster, slowest)
    if more is not None:
        added = more.devices[-1].name
        allowed = constraints.also_for(added, devices[slowest].name)
        yield _LayoutChange("one device more", f"{added} ({devices[slowest].kind})", parts, more, allowed)
    faster = changes.with_faster_links(cluster, 2)
    yield _LayoutChange("links twice as fast", "all of them", parts, faster, constraints)
    if memory_matters:
        larger = changes.with_more_memory(cluster, 2)
        yield _LayoutChange("twice the memory", "on every device", parts, larger, constraints.times_memory(2))


def _twice_the_batch(parts: Parts) -> Parts | None:
    """Returns the parts of a batch of twice the samples, as those of half the number; None where that is not known."""
    size = parts.batch_size
    for one, other in combinations(sorted(parts.read), 2):
        if have_same_ops(parts.read[one], parts.read[other]):
            whole = interpolated(parts.read[one], size // one, parts.read[other], size // other, 2 * size)
            return Parts(_HalfParts(parts), 2 * size, whole)
    return None


@dataclass(frozen=True)
class _HalfParts:
    parts: Parts

    def __call__(self, num_parts: int) -> Graph:
        if num_parts % 2:
            raise InputError(f"a part in {num_parts} of twice the batch is not known")
        return self.parts.exact(num_parts // 2)


def _factors(solution: Solution, estimator: Estimator, clock: Clock) -> dict[_Kind, float]:
    """Returns simulated / estimated step times of the best layout of each kind that was simulated."""
    factors: dict[_Kind, float] = {}
    for each in solution.looked_at:  # the best first
        if clock.is_up:
            break
        kind = _kind(each.way)
        if each.simulation is not None and not each.is_whole and kind not in factors and estimator.has_time(each.way):
            factors[kind] = each.step_time_ns / max(estimator.estimate(each.way).step_time_ns, 1)
    return factors


def _kind(way: Arrangement) -> _Kind:
    return way.layout.zero, way.num_places == 1


def _best_estimate(change: _LayoutChange, factors: Mapping[_Kind, float], clock: Clock) -> Candidate | None:
    """Returns the best estimate over layouts, which lacks memory where nothing fits; None where time is up before."""
    estimator = Estimator(change.parts, change.cluster, change.constraints, clock=clock)

    def attempt(action: Callable[[Arrangement], Candidate], way: Arrangement) -> Candidate | None:
        with contextlib.suppress(InputError):  # of parts that are not known
            estimate = action(way)
            time_ns = round(estimate.step_time_ns * factors.get(_kind(way), 1.0))
            return replace(estimate, figures=replace(estimate.figures, step_time_ns=time_ns))
        return None

    queue = EstimateQueue(estimator, change.parts.batch_size, attempt)
    queue.add(replicated_ways(estimator.machine, change.parts.batch_size), clock)
    return queue.best(clock)
