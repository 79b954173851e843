"""Places for a target: the search sees what the target can express, so that its export loses nothing.

ops ---> ordinary plan ---> snapped to units --.
                                               +--> search over units, or over stages ---> a plan of the ops
units as groups of the graph ------------------'
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdp.bounds import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.constraints import Constraints
from gdp.export.snap import Snapped, key_of, order_of, simulated, snap
from gdp.export.stages import StageSearch, balanced_stages
from gdp.export.target import Target
from gdp.graph import I64, Graph
from gdp.place import Progress, place, plan_of
from gdp.placers.base import Start
from gdp.plan import Plan, Search
from gdp.problem import Problem
from gdp.simulate import Simulation, simulate

_ORDINARY_SHARE = 0.4  # of the budget, for the plan of ops that is snapped
_ROUND = 300  # simulations of a descent at most
_PATIENCE = 20  # descents in a row that find nothing better


@dataclass(frozen=True, eq=False)
class Placed:
    """A plan that a target can express, and the ordinary one that it was begun from."""

    plan: Plan
    ordinary: Plan
    snapped: Snapped  # the ordinary plan as the target would run it


def place_for(
    target: Target,
    graph: Graph,
    cluster: Cluster,
    constraints: Constraints,
    *,
    budget: Budget,
    seed: int = 0,
    robust: float | None = None,
    num_threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> Placed:
    """The best plan of `graph` on `cluster` within `budget` that `target` can express: it is never worse than the
    ordinary plan that is found in a part of the budget and snapped. InputError where the target cannot run the graph.
    """
    clock = Clock(budget)
    if stop is not None:
        clock.stop = stop
    problem = Problem.build(graph, cluster, **vars(constraints))
    units = target.read_units(problem)
    keywords: dict[str, Any] = {"seed": seed, "robust": robust, "num_threads": num_threads, "stop": stop}
    first = budget.part(_ORDINARY_SHARE)
    ordinary = place(graph, cluster, budget=first, on_progress=on_progress, **keywords, **vars(constraints))
    snapped = snap(problem, ordinary, target, may_offload=False)
    assert ordinary.search is not None
    spent = ordinary.search.simulations
    if budget.simulations is None:
        rest = Budget(seconds=clock.seconds_left or 0.0)
    else:
        rest = Budget(simulations=max(budget.simulations - spent, 0))
    found, num_simulations = snapped.simulation, 0
    baselines, under_noise = ordinary.search.baselines, None
    if clock.stop.is_set():  # a search that has no time for any placement has no answer
        pass
    elif units.is_chain:
        rest_clock = replace(clock, budget=rest, started=time.monotonic())
        found, num_simulations = _best_stages(problem, snapped, rest_clock, seed)
    else:
        coarse = replace(graph, groups=units.index.copy())
        unused = np.flatnonzero(~units.allowed.any(axis=0)).tolist()
        also = [("", cluster.devices[device].name) for device in unused]  # "" matches every kind
        answer = place(
            coarse, cluster, budget=rest, starts=[Start.of(snapped.simulation)], on_progress=on_progress,
            **keywords, **vars(replace(constraints, forbid=[*constraints.forbid, *also])),
        )  # fmt: skip
        assert answer.search is not None
        found = simulate(problem, answer.placement, order=answer.order)
        num_simulations = answer.search.simulations
        baselines, under_noise = answer.search.baselines, answer.search.under_noise
    if key_of(snapped.simulation) < key_of(found):
        found, under_noise = snapped.simulation, None
    search = Search(
        seconds=clock.seconds,
        simulations=spent + num_simulations,
        baselines=baselines,
        busy_fraction=found.busy_fraction,
        missing_bytes=found.missing_bytes,
        interrupted=clock.stop.is_set(),
        under_noise=under_noise,
        order=order_of(problem, found.placement),
    )
    return Placed(plan_of(found, lower_bound(problem), "auto", seed, search), ordinary, snapped)


def _best_stages(problem: Problem, snapped: Snapped, clock: Clock, seed: int) -> tuple[Simulation, int]:
    """Descents from disturbed stages, the best kept, until the budget or the patience ends."""
    units, rng = snapped.units, np.random.default_rng(seed)
    search = StageSearch(problem.in_order(order_of(problem, snapped.simulation.placement)), units)
    limit = clock.budget.simulations

    def left() -> int:
        return _ROUND if limit is None else min(_ROUND, limit - search.num_simulations)

    best = search.run([snapped.devices, *balanced_stages(problem, units)], search.num_simulations + left())
    failures = 0
    while failures < _PATIENCE and left() > 0 and clock.seconds_left != 0.0 and not clock.stop.is_set():
        starts = [_disturbed(best, problem.num_devices, rng)]
        if not search.is_allowed(starts[0]):
            failures += 1
            continue
        found = search.run(starts, search.num_simulations + left())
        if search.key(found) < search.key(best):
            best, failures = found, 0
        else:
            failures += 1
    return simulated(problem, units.place(best)), search.num_simulations


def _disturbed(devices: I64, num_devices: int, rng: np.random.Generator) -> I64:
    """As many stages or others, cut elsewhere, on devices in another order."""
    num_units = len(devices)
    used = [int(device) for device in dict.fromkeys(devices.tolist())]
    free = [device for device in range(num_devices) if device not in used]
    for _ in range(int(rng.integers(1, 3))):
        pool = used + free
        first, second = rng.integers(len(used)), rng.integers(len(pool))
        pool[first], pool[second] = pool[second], pool[first]
        used, free = pool[: len(used)], pool[len(used) :]
    if free and rng.random() < 0.3:
        used.insert(int(rng.integers(len(used) + 1)), free.pop())
    used = used[:num_units]
    cuts = np.sort(rng.choice(np.arange(1, num_units), len(used) - 1, replace=False))
    if len(used) == len(set(devices.tolist())) and rng.random() < 0.6:  # near the cuts that there were
        shifted = np.flatnonzero(np.diff(devices)) + 1 + rng.integers(-3, 4, len(used) - 1)
        if (np.diff(shifted) > 0).all() and len(shifted) and shifted[0] > 0 and shifted[-1] < num_units:
            cuts = shifted
    return np.repeat(np.array(used, np.int64), np.diff([0, *cuts.tolist(), num_units]))
