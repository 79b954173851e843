"""The choice whether ops are cut over groups of cards: the same question about local programs of several degrees.

    question --tensor=2, 4, .. on groups--> bounds --a look, the least bound first--> solution --.
             --as it is--> its bound ------------------most of the time-------------> solution --+--> the best
                                                              a degree that is best has the time left

A question whose bound is above the best step found is not asked. Groups are looked at where copies of the model do not
use all cards well: in a forward pass, with fewer samples than cards, where a copy and its optimizer state are too large
for a card, and where nothing else fits."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf
from textwrap import shorten
from types import MappingProxyType

from gdp.budget import Clock
from gdp.errors import InputError
from gdp.models.shards import WHOLE, Shards
from gdp.parallel.layout import Layout
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import Solution

Solve = Callable[[PlaceQuestion, Clock], Solution]
_LOOK = 0.3  # of the time is for a look at all degrees,
_WHOLE = 0.6  # of the rest for the step as it is, if a degree fits: placing ops and stages takes long; untuned
_MOST_REASON = 160  # characters


def over_degrees(question: PlaceQuestion, clock: Clock, solve: Solve) -> Solution:
    """Returns the best that `solve` finds for `question` and, where they may win, for local programs on groups. An
    answer without groups is kept unless another one fits better or is faster."""
    degrees = question.degrees
    if not degrees:
        return solve(question, clock)
    if question.needs_groups:
        return _Contest(question, clock, solve).run(degrees)
    whole = solve(question, clock)
    if clock.stop.is_set() or (whole.plan is not None and whole.plan.status == "ok"):
        return whole
    return _Contest(question, clock, solve, {1: whole}).run(degrees)


class _Contest:
    """The answers for several degrees, and why there is none of others."""

    def __init__(
        self, question: PlaceQuestion, clock: Clock, solve: Solve, known: Mapping[int, Solution] = MappingProxyType({})
    ) -> None:
        """`known` are answers by the number of ranks, as all that is found."""
        self.question, self.clock, self.solve = question, clock, solve
        self.found = dict(known)
        self.failures: dict[int, InputError] = {}

    def run(self, degrees: Iterable[int]) -> Solution:
        """Returns the best answer for local programs and, unless it is known, the step as it is."""
        groups = sorted(filter(None, map(self._opened, degrees)), key=lambda each: each.bound_ns)
        look = self.clock.part(_LOOK)
        for turn, asked in enumerate(groups):
            if asked.bound_ns < self._best_ns and not self.clock.is_up:
                self._ask(asked, look.part(1 / (len(groups) - turn)))
        if 1 not in self.found and (self.question.bound_ns < self._best_ns and not (self.found and self.clock.is_up)):
            self._ask(self.question, self.clock.part(_WHOLE if self._best_ns < inf else 1.0))
        if not self.found:
            raise self.failures.get(1) or next(iter(self.failures.values()))
        best = min(self.found, key=lambda degree: _rank(self.found[degree]))
        again = next((each for each in groups if each.shards.num_ranks == best), None)
        if again is not None and not self.clock.is_up:
            self._ask(again, self.clock.part())
        return self._answer(min(self.found.values(), key=_rank))

    def _opened(self, degree: int) -> PlaceQuestion | None:
        """Returns the question about a degree; None where the model or the cluster does not allow it."""
        if not self.clock.has(0.0):
            self.failures[degree] = InputError("there was no time; give a larger --budget")
            return None
        try:
            return self.question.sharded(Shards(degree))
        except InputError as error:  # such as heads that the degree does not divide
            self.failures[degree] = error
            return None

    def _ask(self, asked: PlaceQuestion, clock: Clock) -> None:
        degree = asked.shards.num_ranks
        try:
            solution = self.solve(asked, clock)
        except InputError as error:
            self.failures.setdefault(degree, error)
            return
        known = self.found.get(degree)
        self.found[degree] = solution if known is None else min(known, solution, key=_rank)

    @property
    def _best_ns(self) -> float:
        """The step time of the best answer that fits."""
        return min((rank[1] for rank in map(_rank, self.found.values()) if not rank[0]), default=inf)

    def _answer(self, best: Solution) -> Solution:
        others = [each for solution in self.found.values() if solution is not best for each in solution.looked_at]
        failed = {degree: error for degree, error in self.failures.items() if degree not in self.found}
        notes = best.notes
        if failed:
            reason = shorten(str([*failed.values()][-1]), _MOST_REASON)
            notes += (f"ops were not cut over groups of {', '.join(map(str, failed))} cards: {reason}",)
        bound_ns, plan = best.bound_ns if self.question.parts is None else self.question.bound_ns, best.plan
        if plan is not None and plan.search is not None:
            search = replace(plan.search, seconds=self.clock.seconds, simulations=self.clock.simulations)
            best = best._replace(plan=replace(plan, search=search))
        return best._replace(looked_at=(*best.looked_at, *others), bound_ns=bound_ns, notes=notes)


def stamped(solution: Solution, shards: Shards) -> Solution:
    """Returns the solution of a local program with the shards in its layouts and in its plan."""
    if shards == WHOLE or solution.plan is None:
        return solution
    plan = solution.plan
    document = dict(plan.layout or Layout().document()) | shards.document()
    looked_at = {each: each.on_groups(shards) for each in (solution.best, *solution.looked_at) if each is not None}
    return solution._replace(
        plan=replace(plan, layout=document),
        best=None if solution.best is None else looked_at[solution.best],
        looked_at=tuple(looked_at[each] for each in solution.looked_at),
    )


def _rank(solution: Solution) -> tuple[bool, float]:
    plan = solution.plan
    return (True, inf) if plan is None else (plan.status != "ok", plan.step_time_ns)
