"""Advice: step times on changed machines, by placing and simulating.

    plan --start--> search on one device fewer | one more | links twice as fast | twice the memory

Each search begins from the plan. A machine that has more is never told to be slower than the plan itself there, whose
ops may wait for the times that they start at now."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import unique
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster, changes
from gdp.cluster.changes import MOST_CHANGED
from gdp.cluster.device import COMPILE, CUDA_GRAPHS
from gdp.costs.fusion import joins_ops
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.search.candidate import Candidate
from gdp.search.place import place
from gdp.search.question import plan_of, step_times_under_noise
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate

MEMORY_MATTERS = 0.5  # of its limit filled somewhere: below, twice the memory is not asked for
HOST_MATTERS = 0.2  # share of the step that a device waits for its host: below, other runtimes are not asked for
AS_FAST = 1.01  # what is called as fast
ONE_FEWER = "one device fewer"  # the change to a machine without the device that does least
FASTER = "links twice as fast"
MORE = "one device more"
MEMORY = "twice the memory"
RUNTIMES = {"--runtime compile": COMPILE, "--runtime cuda-graphs": CUDA_GRAPHS}
LAYOUTS = "--parallel auto"  # the change from op placement to the best layout of the batch


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The best plan found on a changed machine."""

    change: str  # such as "one device more"
    detail: str  # such as "gpu4, a p100-pcie-16g"
    step_time_ns: int | None  # None: nothing fits
    layout: str = ""  # an estimate of this layout; "": a plan of the same graph was found

    def is_as_fast_as(self, step_time_ns: int) -> bool:
        """True if it takes at most 1 % longer."""
        return self.step_time_ns is not None and self.step_time_ns <= AS_FAST * step_time_ns


@dataclass(frozen=True, slots=True)
class Advice:
    """Answers to questions that a plan raises."""

    what_ifs: tuple[WhatIf, ...]
    not_asked: tuple[str, ...]  # changes that were not tried, and why
    memory_matters: bool  # whether some device is more than half full
    plan: Plan  # the one given, or a better one found without one of the devices

    def one_fewer_is_as_fast(self, step_time_ns: int) -> bool:
        """True if a step without one of the devices was found that takes at most 1 % longer."""
        return any(each.change == ONE_FEWER and each.is_as_fast_as(step_time_ns) for each in self.what_ifs)


@dataclass(frozen=True, eq=False)
class MachineChange:
    """A change to a machine."""

    name: str
    detail: str
    cluster: Cluster
    constraints: Constraints
    others: Sequence[int] | None = None  # the devices that are left, by their numbers; None: the machine has more


def advise(
    graph: Graph,
    simulation: Simulation,
    plan: Plan,
    constraints: Constraints,
    *,
    budget: Budget,
    seed: int = 0,
    num_threads: int | None = None,
    least_s: float = 0.0,
    stop: threading.Event | None = None,
) -> Advice:
    """Searches plans for changed machines from `plan`, whose replay is `simulation`, each in a part of `budget`.

    After `stop`, and when the budget has no `least_s` left for one, the changes left are not asked."""
    num_devices = simulation.problem.num_devices
    filled = float((simulation.peak_memory_bytes / np.maximum(simulation.problem.memory_limit_bytes, 1)).max())
    changes = [] if num_devices > MOST_CHANGED else list(_changes(simulation, constraints, filled))
    clock = Clock(budget, stop=stop)
    what_ifs: list[WhatIf] = []
    not_asked: list[str] = []
    has_cards = any(not device.is_cpu for device in simulation.problem.cluster.devices)
    if has_cards and num_devices < MOST_CHANGED and all(change.name != MORE for change in changes):
        not_asked.append(f"{MORE} (nothing tells how it would be linked)")
    for turn, change in enumerate(changes, 1):
        if clock.stop.is_set() or clock.seconds_left == 0.0 or not clock.has(least_s):
            why = "interrupted" if clock.stop.is_set() else "no time left, a larger budget has it"
            not_asked.append(f"{change.name} ({why})")
            continue
        try:
            answer = place(
                graph,
                change.cluster,
                change.constraints,
                placer="local-search",
                budget=_share(budget, clock, len(changes), turn, least_s),
                seed=seed,
                robust=0.0,
                starts=[_start(simulation, change.others)],
                num_threads=num_threads,
                stop=clock.stop,
            )
        except InputError as error:
            why = "interrupted" if clock.stop.is_set() else str(error)
            not_asked.append(f"{change.name} ({why})")
            continue
        if clock.stop.is_set():
            not_asked.append(f"{change.name} (interrupted)")
            continue
        step_time_ns = answer.step_time_ns if answer.status == "ok" else None
        if change.others is None:
            own_ns = own_time_ns(plan, change)
            step_time_ns = own_ns if step_time_ns is None else min(step_time_ns, own_ns)
        elif step_time_ns is not None and step_time_ns < plan.step_time_ns:
            plan = _on_all_devices(plan, answer, simulation.problem, constraints, change.others)
            step_time_ns = plan.step_time_ns  # that of the answer: on fewer devices it is as fast, at the least
        what_ifs.append(WhatIf(change.name, change.detail, step_time_ns))
    return Advice(tuple(what_ifs), tuple(not_asked), filled > MEMORY_MATTERS, plan)


def own_time_ns(plan: Plan, change: MachineChange, *, has_time: bool = True) -> int:
    """Returns what `plan` takes on a machine that has more: simulated with faster links or hosts, if `has_time`."""
    is_other = change.name in (FASTER, *RUNTIMES) and has_time
    step = carried(plan, change.cluster, change.constraints, range(len(plan.devices))) if is_other else None
    return plan.step_time_ns if step is None or not step.feasible else min(step.step_time_ns, plan.step_time_ns)


def _on_all_devices(plan: Plan, fewer: Plan, problem: Problem, constraints: Constraints, others: Sequence[int]) -> Plan:
    """Returns a plan found on the devices `others` as one of the whole machine, or `plan` where that is better."""
    simulation = carried(fewer, problem.cluster, constraints, others)
    if plan.search is None or fewer.search is None or simulation is None or not simulation.feasible:
        return plan
    noise = plan.search.under_noise
    better = plan_on(simulation, fewer, 0.0 if noise is None else noise.noise)
    assert better.search is not None
    noisy = better.search.under_noise
    if noise is not None and noisy is not None and noisy.mean_ns > noise.mean_ns:
        return plan
    search = replace(plan.search, busy_fraction=simulation.busy_fraction, under_noise=noisy, order=fewer.search.order)
    return replace(better, lower_bound_ns=plan.lower_bound_ns, placer=plan.placer, seed=plan.seed, search=search)


def machine_changes(
    simulation: Simulation, constraints: Constraints, least: int | None, most: int | None, *, memory_matters: bool
) -> Iterator[MachineChange]:
    """Yields the cluster of a step without the device `least`, with one more like `most`, with faster links, with more
    memory, and by other runtimes where a host limits the step."""
    cluster = simulation.problem.cluster
    devices = cluster.devices
    if least is not None:
        others = [number for number in range(len(devices)) if number != least]
        less = changes.only(cluster, others)
        yield MachineChange(ONE_FEWER, f"without {devices[least].name}", less, constraints.within(less), others)
    more = None if most is None else changes.with_another(cluster, most)
    if most is not None and more is not None:
        added = more.devices[-1].name
        allowed = constraints.also_for(added, devices[most].name)
        yield MachineChange(MORE, f"{added} ({devices[most].kind})", more, allowed)
    if len(devices) > 1:
        yield MachineChange(FASTER, "all of them", changes.with_faster_links(cluster, 2), constraints)
    if memory_matters:
        larger, allowed = changes.with_more_memory(cluster, 2), constraints.times_memory(2)
        yield MachineChange(MEMORY, "on every device", larger, allowed)
    if simulation.host_wait_fraction.max() > HOST_MATTERS:
        waits = f"now a device waits for its host for {simulation.host_wait_fraction.max():.0%}"
        graph = simulation.problem.graph
        is_trained, is_measured = bool(graph.is_in_phase("backward").any()), any(graph.times_ns)
        for name, runtime in RUNTIMES.items():
            if is_measured and joins_ops(runtime, is_trained=is_trained):  # times are of ops that run one by one
                continue
            if any(device.runtime != runtime and not device.is_cpu for device in devices):
                yield MachineChange(name, waits, cluster.run_by(runtime), constraints)


def _changes(simulation: Simulation, constraints: Constraints, filled: float) -> Iterator[MachineChange]:
    placement, busy = simulation.placement, simulation.busy_fraction
    cluster, used, least = simulation.problem.cluster, unique(placement), None
    if len(used) > 1:  # a slow device is long busy with little
        done_ns = np.bincount(placement, simulation.problem.simulator.fastest_ns, cluster.num_devices)
        least = int(used[np.lexsort((-busy[used], done_ns[used]))[0]])
    cards = [number for number, device in enumerate(cluster.devices) if not device.is_cpu]
    most = max(cards, key=lambda number: busy[number], default=None)  # another CPU is another host
    yield from machine_changes(simulation, constraints, least, most, memory_matters=filled > MEMORY_MATTERS)


def _start(simulation: Simulation, others: Sequence[int] | None) -> Candidate:
    """Returns the plan to begin a search from. Without a device, its ops are on one of its kind among the `others` that
    holds none, or else on the busiest."""
    placement = simulation.placement
    if others is None:
        return Candidate.start(simulation)
    (least,) = set(range(simulation.problem.num_devices)) - set(others)
    used, devices = unique(placement[placement != least]), simulation.problem.cluster.devices
    idle = [device for device in others if device not in used and devices[device].kind == devices[least].kind]
    taker = idle[0] if idle else int(used[np.argmax(simulation.busy_fraction[used])])
    moved = np.where(placement > least, placement - 1, placement)
    moved[placement == least] = list(others).index(taker)
    return Candidate(moved)


def _share(budget: Budget, clock: Clock, num_changes: int, turn: int, least_s: float) -> Budget:
    """Returns the budget of the change whose `turn` it is, from 1 on; `least_s` if that is left."""
    if budget.simulations is not None:
        return budget.part(1 / num_changes)
    left_s = clock.seconds_left or 0.0
    return Budget(seconds=max(left_s / (num_changes + 1 - turn), min(least_s, left_s)))


def carried(
    plan: Plan, cluster: Cluster, constraints: Constraints, numbers: Sequence[int] | None = None
) -> Simulation | None:
    """Returns the step of `plan` on `cluster`, where its devices are those with these `numbers`. Without numbers each
    is the first free one with its figures. None where there is none, or constraints forbid it."""
    problem = plan.problem
    assert problem is not None
    numbers = changes.same_devices(problem.cluster, cluster) if numbers is None else numbers
    if numbers is None:
        return None
    larger = Problem.build(problem.graph, cluster, constraints)
    placement = np.asarray(numbers)[plan.placement]
    if larger.broken_constraints(placement):
        return None
    order: list[Placement] = [np.zeros(0, np.int64) for _ in range(cluster.num_devices)]
    for number, ops in zip(numbers, plan.order, strict=True):
        order[number] = ops
    return simulate(larger, placement, order=order)


def plan_on(step: Simulation, plan: Plan, noise_share: float = 0.0) -> Plan:
    """Returns `plan`, which `step` is on another machine, as a plan for that; with its times under noise, if any."""
    assert plan.search is not None
    noisy = step_times_under_noise(step, noise_share, plan.seed + 1) if noise_share else plan.search.under_noise
    search = replace(plan.search, busy_fraction=step.busy_fraction, missing_bytes=step.missing_bytes, under_noise=noisy)
    bound_ns = min(lower_bound(step.problem), step.step_time_ns)
    return replace(plan_of(step, bound_ns, plan.placer, plan.seed, search), layout=plan.layout)
