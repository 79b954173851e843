"""Advice on layouts: what another machine or a larger batch would give, by estimates made from one replica.

    best over layouts of: estimate with the change * (simulated / estimated, without it, of a layout of that kind)

Kinds of layouts are levels of ZeRO, on one device a replica or on several.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from gdp.bounds.layout_bound import layout_bound
from gdp.budget import Clock
from gdp.cluster import Cluster, changes
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.interpolation import have_same_ops, interpolated
from gdp.planning.advice import MEMORY_MATTERS, Advice, WhatIf
from gdp.search.layouts.arrangement import Arrangement, replicated_ways
from gdp.search.layouts.choose import Choice
from gdp.search.layouts.estimate import Estimate, Estimator
from gdp.search.layouts.less_memory import with_less_memory
from gdp.search.layouts.parts import Parts
from gdp.simulator.constraints import Constraints

_Kind = tuple[int, bool]  # the level of ZeRO, and whether a replica has one device


@dataclass(frozen=True, eq=False)
class _LayoutChange:
    change: str
    detail: str
    parts: Parts
    cluster: Cluster
    constraints: Constraints
    batch_factor: int = 1


def advise_on_layouts(choice: Choice, parts: Parts, constraints: Constraints, clock: Clock) -> Advice:
    """Estimates the best layout of each changed machine, and of twice the batch, until `clock` ends."""
    assert choice.trial.candidate is not None
    simulation = choice.trial.candidate.replay
    cluster = simulation.problem.cluster
    quick = Parts(parts.rough, parts.batch_size, parts.exact(1))  # reads no model
    filled = float((simulation.peak_memory_bytes / np.maximum(simulation.problem.memory_limit_bytes, 1)).max())
    matters = filled > MEMORY_MATTERS
    what_ifs: list[WhatIf] = []
    not_asked: list[str] = []
    factors = _factors(choice, quick, cluster, constraints)
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
            detail += f", {time_ns / choice.plan.step_time_ns / change.batch_factor:.2f} of the time per sample"
        what_ifs.append(WhatIf(change.change, detail, time_ns, str(estimate.arrangement.layout)))
    return Advice(tuple(what_ifs), tuple(not_asked), matters, choice.plan)


def _layout_changes(
    parts: Parts, cluster: Cluster, constraints: Constraints, *, memory_matters: bool
) -> Iterator[_LayoutChange]:
    devices = cluster.devices
    slowest = Estimator(parts, cluster, constraints).machine.usable[-1]
    if len(devices) > 2:
        less = changes.only(cluster, [number for number in range(len(devices)) if number != slowest])
        detail = f"without {devices[slowest].name}"
        yield _LayoutChange("one device less", detail, parts, less, constraints.within(less))
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
    if (twice := _twice_the_batch(parts)) is not None:
        detail = f"{twice.batch_size} samples"
        yield _LayoutChange("twice the batch", detail, twice, cluster, constraints, batch_factor=2)


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


def _factors(choice: Choice, parts: Parts, cluster: Cluster, constraints: Constraints) -> dict[_Kind, float]:
    """Returns simulated / estimated step times of the best layout of each kind that was simulated."""
    estimator = Estimator(parts, cluster, constraints)
    factors: dict[_Kind, float] = {}
    for trial in choice.trials:  # the best first
        way = Arrangement(trial.layout, trial.devices)
        if trial.candidate is not None and not trial.is_whole and _kind(way) not in factors:
            estimate = estimator.estimate(way)
            factors[_kind(way)] = trial.step_time_ns / max(estimate.step_time_ns, 1)
    return factors


def _kind(way: Arrangement) -> _Kind:
    return way.layout.zero, way.num_places == 1


def _best_estimate(change: _LayoutChange, factors: Mapping[_Kind, float], clock: Clock) -> Estimate | None:
    """Returns the best estimate over layouts, which lacks memory where nothing fits; None where time is up before."""
    estimator = Estimator(change.parts, change.cluster, change.constraints)
    batch_size = change.parts.batch_size
    queue: list[Estimate] = []
    ways = replicated_ways(estimator.machine, batch_size)
    seen = set(ways)
    while True:
        queue += _known(estimator.least, ways, factors)
        if not queue or clock.is_up:
            return None
        best = min(queue, key=lambda each: (each.missing_bytes, each.step_time_ns))
        if len(best.places):
            return best
        queue.remove(best)
        estimates = list(_known(estimator.estimate, [best.arrangement], factors))
        clock.spend(1)
        queue += estimates
        lacking = [estimate.arrangement for estimate in estimates if estimate.missing_bytes]
        ways = [
            way
            for full in lacking
            for way in with_less_memory(full, batch_size, has_cpu=estimator.has_spare_cpu(full))
            if way not in seen
        ]
        seen.update(ways)


def _known(
    estimated: Callable[[Arrangement], Estimate], ways: Iterable[Arrangement], factors: Mapping[_Kind, float]
) -> Iterator[Estimate]:
    """Yields estimates of `ways`, but of those whose parts are not known."""
    for way in ways:
        with contextlib.suppress(InputError):
            estimate = estimated(way)
            yield replace(estimate, step_time_ns=round(estimate.step_time_ns * factors.get(_kind(way), 1.0)))
