"""Op placement on more than 64 devices: the ops of one step seldom use so many, but graphs with replicas do.

    quick classical placers on all devices, replicas ----.
    all of `auto` on the 64 devices nearest to the first --+--> local search on all devices --> the best of all

What the search of 64 devices finds is a placement on all of them. N ops, D devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gdp.arrays import I64
from gdp.budget import REPLAYED, Clock
from gdp.cluster import WORD_DEVICES
from gdp.placers.base import devices_by_speed
from gdp.search.candidate import Candidate
from gdp.search.ops.annealing import is_too_wide
from gdp.search.ops.local_search import LocalSearch
from gdp.search.question import Question, Solution
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from gdp.units.reduction import reduce


def search_on_many(
    question: Question,
    clock: Clock,
    constructed: Sequence[Candidate],
    place_few: Callable[[Question, Clock], Solution],
    *,
    has_replicas: bool,
) -> list[Candidate]:
    """Returns what `place_few` finds on 64 devices, and what a local search on all finds from there.

    `constructed` are known already; with replicas, which need all devices, there is no search on 64.
    """
    clock = clock.before(REPLAYED * question.simulation_s)
    found: list[Candidate] = []
    problem, reduction = question.reduction.problem, question.reduction
    near = near_devices(question.problem)
    if not has_replicas and not clock.is_up and question.problem.allowed[:, near].any(axis=1).all():
        share = 1.0 if is_too_wide(problem) else question.settings.ops.near_devices_share
        found += _placed_near(question, clock.part(share), near, place_few)
    if clock.is_up or is_too_wide(problem):
        return found
    search = LocalSearch.of(question, clock)
    starts = sorted([*constructed, *found])[: question.settings.ops.num_starts_on_many]
    search.start([Candidate(reduction.restrict(start.placement)) for start in starts], num_more=0)
    search.run()
    return [*found, question.replay(search.best)]


def near_devices(problem: Problem) -> I64:
    """Returns the fastest device and those with the quickest routes from it, 64 in all, in ascending order."""
    start = int(devices_by_speed(problem)[0])
    rates = problem.cluster.bytes_per_second[start].astype(np.float64)
    rates[start] = np.inf
    far = np.abs(np.arange(problem.num_devices) - start)  # of equally quick ones those of its own pod
    return np.sort(np.lexsort((far, -rates))[:WORD_DEVICES])


def _placed_near(
    question: Question, clock: Clock, near: I64, place_few: Callable[[Question, Clock], Solution]
) -> list[Candidate]:
    problem = question.problem
    part = problem.on_devices(near.tolist())
    asked = replace(question, problem=part, reduction=reduce(part), noise=None, starts=(), known=())
    best = place_few(asked, clock).best
    if best is None:
        return []
    order: list[I64] = [np.zeros(0, np.int64) for _ in range(problem.num_devices)]
    for device, ops in zip(near.tolist(), best.replay.order, strict=True):
        order[device] = ops
    return [question.judge(simulate(problem, near[best.replay.placement], order=order), best.order)]
