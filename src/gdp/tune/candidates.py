"""Candidates of a tuning: plans of one question that differ in layout, placement or order, and plans as users run
today."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import log, log1p

import numpy as np

from gdp.budget import Clock
from gdp.cluster.device import COMPILE, CUDA_GRAPHS, EAGER
from gdp.errors import InputError
from gdp.models.shards import WHOLE
from gdp.placers import CLASSICAL
from gdp.search.candidate import Candidate
from gdp.search.layouts.choose import in_layout
from gdp.search.ops.good_order import in_program_order
from gdp.search.place import answer
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import Solution, plan_of, search_record
from gdp.search.rivals.rivals import RIVALS
from gdp.simulator.orders import PROGRAM
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

OWN, SINGLE = "place", "single"
_USERS = "ddp", "fsdp"  # that run as they are predicted
_SHARE = 0.5  # of the time is for the search that `place` makes; the rest for layouts that it has estimated. Untuned
_EIGHTY = 2.563  # deviations of a normal distribution between its 10th and 90th percentile
_SPREAD = 0.15  # relative deviation of predictions where no range is known. Untuned


@dataclass(frozen=True, eq=False)
class PlannedCandidate:
    """A plan to be measured."""

    name: str  # its layout or placer
    plan: Plan
    comes_first: bool = False  # measured whatever is predicted: the answer of `place` and what users run
    runtime: str = EAGER
    order: str = ""  # in which ops start; "": as the search has left them

    def run_by(self, runtime: str) -> "PlannedCandidate":
        """Returns the same plan in another runtime, where it may not fit."""
        plan, problem = self.plan, self.plan.problem
        assert problem is not None
        cluster = problem.cluster.run_by(runtime)
        limits = dict(zip(plan.devices, problem.memory_limit_bytes.tolist(), strict=True))
        other = Problem.build(problem.graph, cluster, max_memory_bytes=limits)
        step = simulate(other, plan.placement, order=plan.order)
        busy, missing = step.busy_fraction, step.missing_bytes
        search = plan.search and replace(plan.search, busy_fraction=busy, missing_bytes=missing)
        plan = replace(plan_of(step, 0, plan.placer, plan.seed, search), layout=plan.layout)
        return replace(self, plan=plan, comes_first=False, runtime=runtime)

    def in_other_orders(self) -> Iterator["PlannedCandidate"]:
        """Yields plans with the same placement whose devices start ops in another order, if they fit."""
        plan, problem, known = self.plan, self.plan.problem, [self.plan.order]
        assert problem is not None
        for order in dict.fromkeys((*problem.orders, *([PROGRAM] if problem.microbatch.max() < 1 else []))):
            step = simulate(problem, plan.placement, priority=problem.priority(order, problem.b_level_ns))
            if step.feasible and not any(all(map(np.array_equal, step.order, other)) for other in known):
                known.append(step.order)
                search = plan.search and replace(plan.search, order=order, busy_fraction=step.busy_fraction)
                other = replace(plan_of(step, 0, plan.placer, plan.seed, search), layout=plan.layout)
                yield replace(self, name=f"{self.name}, {order}", plan=other, comes_first=False, order=order)

    @property
    def key(self) -> tuple[str, bytes, str]:
        """Equal for equal plans."""
        return str({**(self.plan.layout or {}), "places": None}), self.plan.placement.tobytes(), self.order

    @property
    def traits(self) -> list[float]:
        """Numbers by which steps are alike: logarithms of devices, parts of the batch, transfers and more."""
        plan, layout = self.plan, self.plan.layout or {}
        counts = layout.get("microbatches", 1)
        num_microbatches = max(counts) if isinstance(counts, list) else counts
        used, ops = np.unique(plan.placement, return_counts=True)
        numbers = len(used), layout.get("data", 1), num_microbatches, layout.get("zero", 0), layout.get("stages") or 0
        more = layout.get("recompute", "none") != "none", layout.get("offload", "none") != "none"
        runtimes = self.runtime == COMPILE, self.runtime == CUDA_GRAPHS
        return [
            *(log1p(float(number)) for number in numbers),
            *map(float, more + runtimes),
            float(ops.max() / ops.sum()),
        ]

    @property
    def spread(self) -> float:
        """The relative deviation of its prediction, from the range of steps of its kind."""
        known = self.plan.step_range
        return _SPREAD if known is None else log(known.high / known.low) / _EIGHTY


def find_candidates(
    question: PlaceQuestion,
    clock: Clock,
    most: int,
    find: Callable[[PlaceQuestion, Clock], Solution] = answer,
    say: Callable[[str], None] = lambda text: None,
) -> list[PlannedCandidate]:
    """Returns at most `most` plans that fit, the ones that come first in front, then by predicted time; `find` is the
    search of `place`, and `say` is told which of what users run is left out, and why."""
    known, chosen = set[tuple[str, bytes, str]](), list[PlannedCandidate]()
    for each in _plans(question, clock, find, say):
        if each.plan.status == "ok" and each.key not in known:
            known.add(each.key)
            chosen.append(each)
        elif each.plan.status != "ok" and each.comes_first:
            say(f"{each.name} is not measured: it does not fit in memory")
    return in_turn(chosen)[:most]


def in_turn(candidates: Iterable[PlannedCandidate]) -> list[PlannedCandidate]:
    """Returns those that come first, then the others by predicted time."""
    return sorted(candidates, key=lambda each: (not each.comes_first, each.comes_first or each.plan.step_time_ns))


def _plans(
    question: PlaceQuestion, clock: Clock, find: Callable[[PlaceQuestion, Clock], Solution], say: Callable[[str], None]
) -> Iterator[PlannedCandidate]:
    solution = find(question, clock.part(_SHARE))
    assert solution.plan is not None
    yield PlannedCandidate(OWN, solution.plan, comes_first=True)
    is_cut = question.parts is not None and not question.num_batches
    yield from _of_placers(question, clock, (SINGLE,) if is_cut else tuple(CLASSICAL))
    if not is_cut:
        return
    for name in _USERS:
        reason = "the batch has no equal parts"
        with contextlib.suppress(InputError):
            rival = RIVALS[name](question.about_batch()).best
            if rival is not None and rival.may_be_answer:
                yield PlannedCandidate(name, _plan_of(question, rival, clock), comes_first=True)
                continue
            reason = (rival and rival.refusal) or reason
        say(f"{name} is not measured: {reason}")
    others = [each for each in solution.looked_at if each.refusal is None]
    simulated = [each for each in others if each.may_be_answer and each.problem.cluster is question.cluster]
    for each in simulated:
        yield PlannedCandidate(str(each.named_layout), _plan_of(question, each, clock))
    estimated = [each for each in others if each not in simulated and not each.layout.is_whole]
    for number, each in enumerate(sorted(estimated)):
        if clock.is_up:
            break
        own = replace(each.layout, shards=WHOLE)
        with contextlib.suppress(InputError):
            asked = replace(question.sharded(each.layout.shards), layout=own, parallel=own)
            plan = answer(asked, clock.part(1 / (len(estimated) - number))).plan
            assert plan is not None
            yield PlannedCandidate(str(each.layout), plan)


def _of_placers(question: PlaceQuestion, clock: Clock, names: tuple[str, ...]) -> Iterator[PlannedCandidate]:
    """Yields what placers make of the ops of the whole step."""
    for name in names:
        options = replace(question.options, placer=name, robust=0.0)
        asked = replace(question, options=options, parts=None, layout=None, parallel=None)
        with contextlib.suppress(InputError):  # it finds no placement
            plan = answer(asked, clock.part(1 / len(names))).plan
            assert plan is not None
            yield PlannedCandidate(name, plan, comes_first=name in (SINGLE, "expert"))


def _plan_of(question: PlaceQuestion, candidate: Candidate, clock: Clock) -> Plan:
    """Returns the plan of a step that was simulated."""
    simulation = in_program_order(candidate.replay)
    assert question.parts is not None
    record = search_record(simulation, clock, candidate.order, {})
    plan = plan_of(simulation, 0, candidate.name or "auto", question.options.seed, record)
    return in_layout(plan, candidate, question.parts)
