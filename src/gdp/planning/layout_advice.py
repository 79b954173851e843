"""Advice on layouts: what another machine or a larger batch would give, by estimates made from one replica.

    best over layouts of: estimate with the change * (simulated / estimated, without it, of a layout of that kind)

Kinds of layouts are levels of ZeRO, on one device a replica or on several."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np

from gdp.bounds.layout_bound import layout_bound
from gdp.budget import Clock
from gdp.cluster import Cluster
from gdp.cluster.changes import MOST_CHANGED
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.interpolation import have_same_ops, interpolated
from gdp.parallel.layout import AUTO
from gdp.planning.advice import (
    FASTER,
    LAYOUTS,
    MEMORY,
    MEMORY_MATTERS,
    RUNTIMES,
    Advice,
    MachineChange,
    WhatIf,
    machine_changes,
    own_time_ns,
)
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement, Candidate
from gdp.search.layouts.arrangement import forced, replicated_ways
from gdp.search.layouts.choose import layout_plan
from gdp.search.layouts.estimate import Estimator
from gdp.search.layouts.estimate_queue import EstimateQueue
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.question import BatchQuestion, Solution, step_times_under_noise
from gdp.simulator.constraints import Constraints
from gdp.simulator.simulate import NEVER, replay

_LIKELY_SHARE = 0.4  # of it, for layouts like that of the plan, on each changed machine
_FACTORS_SHARE = 0.3  # of it, for simulated / estimated times of other kinds than that of the plan
_Kind = tuple[int, bool]  # the level of ZeRO, and whether a replica has one device


@dataclass(frozen=True, eq=False)
class _LayoutChange:
    machine: MachineChange
    parts: Parts
    batch_factor: int = 1

    @property
    def adds(self) -> bool:
        """True if the plan itself runs there, too."""
        return self.machine.others is None and self.batch_factor == 1


def advise_on_layouts(
    solution: Solution, parts: Parts, constraints: Constraints, clock: Clock
) -> tuple[Advice, Solution]:
    """Estimates the best layout of each changed machine, and of twice the batch, until `clock` ends. The layout of the
    plan comes first on all of them, then others in the time left. Where the plan is faster without a device, the
    solution is that plan; else it is the one given."""
    best, plan = solution.best, solution.plan
    assert best is not None
    assert plan is not None
    simulation = best.replay
    cluster = simulation.problem.cluster
    quick = Parts(parts.within(clock).rough, parts.batch_size, parts.exact(1))
    filled = float((simulation.peak_memory_bytes / np.maximum(simulation.problem.memory_limit_bytes, 1)).max())
    matters = filled > MEMORY_MATTERS
    estimator = Estimator(quick, cluster, constraints, clock=clock)
    factors = _factors((best,), estimator, clock)
    asked: list[_LayoutChange] = []
    if cluster.num_devices <= MOST_CHANGED:
        usable = estimator.machine.usable
        least = usable[-1] if cluster.num_devices > 2 else None
        most = next((number for number in reversed(usable) if not cluster.devices[number].is_cpu), None)
        machines = machine_changes(simulation, constraints, least, most, memory_matters=matters)
        asked += [_LayoutChange(machine, quick) for machine in machines]
    known = replace(best.way, layout=best.step.layout)  # with the blocks that it recomputes, which take long to find
    likes = [best.way if change.machine.name == MEMORY else known for change in asked]
    pairs = zip(asked, likes, strict=True)
    likely = [_best_estimate(change, factors, clock.part(_LIKELY_SHARE), like) for change, like in pairs]
    alike = [each for each in solution.looked_at if each.layout.shards == best.layout.shards]
    factors = _factors(alike, estimator, clock.part(_FACTORS_SHARE)) | factors
    if (twice := _twice_the_batch(quick)) is not None:  # which needs two parts of the batch, read by now
        same = MachineChange("twice the batch", f"{twice.batch_size} samples", cluster, constraints)
        asked.append(_LayoutChange(same, twice, batch_factor=2))
        likely.append(_best_estimate(asked[-1], factors, clock.part(_LIKELY_SHARE), known))
    what_ifs: list[WhatIf] = []
    not_asked: list[str] = []
    for turn, change in enumerate(asked):
        machine, part = change.machine, clock.part(1 / (len(asked) - turn))
        estimate = min(filter(None, (likely[turn], _best_estimate(change, factors, part))), default=None)
        time_ns, layout = _time_of(estimate, change)
        if change.adds:
            has_time = clock.has(clock.effort.close.seconds(simulation.problem.num_ops))
            own_ns = own_time_ns(plan, machine, has_time=has_time)
            is_sure = (has_time and machine.name in (FASTER, *RUNTIMES)) or estimate is not None
            if is_sure and own_ns <= (time_ns or NEVER):
                time_ns, layout = own_ns, ""
        if estimate is None and time_ns is None:
            why = "interrupted" if clock.stop.is_set() else "no time left, a larger budget has it"
            not_asked.append(f"{machine.name} ({why})")
            continue
        if machine.others is not None and estimate is not None and (time_ns or NEVER) < plan.step_time_ns:
            question = BatchQuestion(parts.within(clock), cluster, constraints)
            solution, time_ns = _on_fewer(solution, LayoutSearch(question, clock), machine.others, estimate)
            assert solution.plan is not None
            layout, plan = "" if solution.plan is not plan else layout, solution.plan
        detail = machine.detail
        if change.batch_factor > 1 and time_ns is not None:
            detail += f", {time_ns / plan.step_time_ns / change.batch_factor:.2f} of the time per sample"
        what_ifs.append(WhatIf(machine.name, detail, time_ns, layout))
    return Advice(tuple(what_ifs), tuple(not_asked), matters, plan), solution


def _time_of(estimate: Candidate | None, change: _LayoutChange) -> tuple[int | None, str]:
    """Returns the step time of an estimate, at least what the work takes, and its layout; (None, "") of none."""
    if estimate is None:
        return None, ""
    bound_ns, layout = layout_bound(change.parts.read, change.machine.cluster), estimate.layout
    if not isinstance(layout.recompute, str):  # the modules that are those of the plan
        layout = replace(layout, recompute=AUTO)
    if not isinstance(layout.offload, str):
        layout = replace(layout, offload=AUTO)
    return None if estimate.missing_bytes else max(estimate.step_time_ns, bound_ns), str(layout)


def _on_fewer(
    solution: Solution, search: LayoutSearch, others: Sequence[int], estimate: Candidate
) -> tuple[Solution, int]:
    """Returns the better one of `solution` and the step of `estimate` on the devices `others`, and that step's time.
    Without the time to simulate it, the estimate is told to be as slow as the plan."""
    plan = solution.plan
    assert plan is not None
    assert plan.search is not None
    devices = tuple(tuple(others[device] for device in group) for group in estimate.devices)
    way = replace(estimate.way, devices=devices)
    step = None
    if search.has_time(way):
        step = search.attempt(partial(search.simulate, places=estimate.places, is_captured=True), way)
    if step is None or not step.may_be_answer or not step.fits:
        return solution, plan.step_time_ns
    if step.step_time_ns >= plan.step_time_ns:
        return solution, step.step_time_ns
    better = layout_plan(search, step, dict(plan.search.baselines))
    noise = plan.search.under_noise
    noisy = None if noise is None else step_times_under_noise(replay(step.problem, better), noise.noise, plan.seed + 1)
    assert better.search is not None
    record = replace(better.search, under_noise=noisy, seconds=plan.search.seconds, simulations=plan.search.simulations)
    looked_at = (step, *solution.looked_at)
    return solution._replace(best=step, looked_at=looked_at, plan=replace(better, search=record)), step.step_time_ns


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
    return WhatIf(LAYOUTS, "", best.step_time_ns, str(best.named_layout))


def _twice_the_batch(parts: Parts) -> Parts | None:
    """Returns the parts of a batch of twice the samples, as those of half the number; None where that is not known."""

    def part_of_twice(num_parts: int) -> Graph:
        if num_parts % 2:
            raise InputError(f"a part in {num_parts} of twice the batch is not known")
        return parts.exact(num_parts // 2)

    size = parts.batch_size
    for one, other in combinations(sorted(parts.read), 2):
        if have_same_ops(parts.read[one], parts.read[other]):
            whole = interpolated(parts.read[one], size // one, parts.read[other], size // other, 2 * size)
            return Parts(part_of_twice, 2 * size, whole)
    return None


def _factors(looked_at: Sequence[Candidate], estimator: Estimator, clock: Clock) -> dict[_Kind, float]:
    """Returns simulated / estimated step times of the best layout of each kind that was simulated."""
    factors: dict[_Kind, float] = {}
    for each in looked_at:  # the best first
        if clock.is_up:
            break
        if each.simulation is None or each.is_whole or _kind(each.way) in factors or not estimator.has_time(each.way):
            continue
        factors[_kind(each.way)] = each.step_time_ns / max(estimator.estimate(each.way).step_time_ns, 1)
    return factors


def _kind(way: Arrangement) -> _Kind:
    return way.layout.zero, way.num_places == 1


def _best_estimate(
    change: _LayoutChange, factors: Mapping[_Kind, float], clock: Clock, like: Arrangement | None = None
) -> Candidate | None:
    """Returns the best estimate over layouts, which lacks memory where nothing fits; None where time is up before. Of
    layouts `like` one these are that one, and those of its kind on as many devices as there are."""
    if clock.is_up:
        return None
    size = change.parts.batch_size
    estimator = Estimator(change.parts, change.machine.cluster, change.machine.constraints, clock=clock)

    def attempt(action: Callable[[Arrangement], Candidate], way: Arrangement) -> Candidate | None:
        with contextlib.suppress(InputError):  # of parts that are not known
            estimate = action(way)
            time_ns = round(estimate.step_time_ns * factors.get(_kind(way), 1.0))
            return replace(estimate, figures=replace(estimate.figures, step_time_ns=time_ns))
        return None

    ways = replicated_ways(estimator.machine, size)
    if like is not None:
        same = [way for way in ways if _kind(way) == _kind(like)]
        same = [replace(way, layout=replace(way.layout, recompute=like.layout.recompute)) for way in same]
        for factor in {1, change.batch_factor}:
            with contextlib.suppress(InputError):  # there are not as many devices, or too many micro-batches
                layout = replace(like.layout, microbatches=tuple(factor * count for count in like.layout.microbatches))
                same = [*forced(estimator.machine, layout, size)[:1], *same]
        same = [way for way in same if len(way.all_devices) == len(estimator.machine.usable)]
        ways = same or [way for way in ways if way.num_places == like.num_places]
    queue = EstimateQueue(estimator, size, attempt)
    queue.add(ways, clock)
    best = queue.best(clock)
    return None if best is None or (like is not None and not best.fits) else best  # another layout may fit
