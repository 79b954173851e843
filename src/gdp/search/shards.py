"""The choice whether ops are cut over groups of cards: the same question about local programs of several degrees.

    question --tensor=4, 2, .. on groups--> its bound --a look, as many groups as samples first--> solution --.
             --as it is--> its bound --------------------a look--------------------------------> solution --+--> best
                                          the two that promise the fastest layouts share the time left

A question whose bound is above the best step found is not asked, nor one behind a degree that is slower than another:
as degrees grow, cards idle less and exchange more. To capture the local programs of the first two degrees comes before
the clock begins, those of others are of the budget. Groups are looked at where copies of the model do not use all cards
well: in a forward pass, with fewer samples than cards, where a copy and its optimizer state are too large for a card,
and where nothing else fits."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf
from textwrap import shorten
from types import MappingProxyType

from gdp.budget import Clock
from gdp.errors import InputError
from gdp.models.shards import WHOLE, Shards
from gdp.notebook import milliseconds
from gdp.parallel.layout import Layout
from gdp.parallel.step import in_flight
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import Solution

Solve = Callable[[PlaceQuestion, Clock], Solution]
_LOOK = 0.3  # of the time is for a look at all degrees,
_WHOLE = 0.3  # of the rest for the step as it is, if a degree fits,
_AGAIN = 2  # degrees at most share what is left: the one whose best layout, estimated or simulated, is the fastest,
_NEAR = 1.1  # and one that promises no more than this times its step time. Untuned
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
        self.opened = {1: question}
        self.failures: dict[int, InputError] = {}

    def run(self, degrees: Iterable[int]) -> Solution:
        """Returns the best answer for local programs, the most promising first, and the step as it is, if not known."""
        look, turns = self.clock.part(_LOOK), [*degrees]
        for turn, degree in enumerate(turns):
            try:
                self._ask(self._opened(degree), look.part(1 / (len(turns) - turn)))
            except InputError as error:  # such as heads that the degree does not divide
                self.failures[degree] = error
        if 1 not in self.found and (self.question.bound_ns < self._best_ns and not (self.found and self.clock.is_up)):
            self._ask(self.question, self.clock.part(_WHOLE if self._best_ns < inf else 1.0))
        if not self.found:
            raise self.failures.get(1) or next(iter(self.failures.values()))
        promised_ns = {degree: self._promised_ns(degree) for degree in self.found if degree in self.opened}
        limit_ns = min(self._best_ns, _NEAR * min(promised_ns.values(), default=inf))
        again = sorted(
            (degree for degree in promised_ns if promised_ns[degree] <= limit_ns), key=promised_ns.__getitem__
        )
        for turn, degree in enumerate(again[:_AGAIN]):
            if not self.clock.is_up:
                self._ask(self.opened[degree], self.clock.part(1 / (len(again[:_AGAIN]) - turn)))
        return self._answer(min(self.found.values(), key=_rank))

    def _opened(self, degree: int) -> PlaceQuestion:
        """Returns the question about a degree. InputError where the model or the cluster does not allow it, where it
        cannot win, and where there is no time to capture it."""
        best = min(self.found, key=lambda each: _rank(self.found[each]), default=1)
        for other in [*self.found] if self._best_ns < inf else []:
            if 1 < min(degree, best) < other < max(degree, best):
                raise InputError(f"groups of {other} are slower than those of {best}")
        if self.clock.is_up or not self.clock.has(self.question.reading_s(degree)):
            raise InputError("there was no time; give a larger --budget")
        asked = self.opened[degree] = self.question.sharded(Shards(degree))
        if asked.bound_ns >= self._best_ns:
            raise InputError(f"no step of theirs takes less than {milliseconds(asked.bound_ns)}")
        return asked

    def _ask(self, asked: PlaceQuestion, clock: Clock) -> None:
        degree = asked.shards.num_ranks
        try:
            solution = self.solve(asked, clock)
        except InputError as error:
            self.failures.setdefault(degree, error)
            return
        known = self.found.get(degree)
        self.found[degree] = solution if known is None else min(known, solution, key=_rank)

    def _promised_ns(self, degree: int) -> float:
        """The step time of the best answer or layout of a degree that fits, be it an estimate."""
        misses, answer_ns = _rank(self.found[degree])
        estimates = (each for each in self.found[degree].looked_at if each.has_places and each.fits)
        return min((each.step_time_ns for each in estimates), default=inf if misses else answer_ns)

    @property
    def _best_ns(self) -> float:
        """The step time of the best answer that fits."""
        return min((rank[1] for rank in map(_rank, self.found.values()) if not rank[0]), default=inf)

    def _answer(self, best: Solution) -> Solution:
        others = [each for solution in self.found.values() if solution is not best for each in solution.looked_at]
        reasons: dict[str, list[str]] = {}
        for degree, error in self.failures.items():
            if degree > 1 and degree not in self.found:
                reasons.setdefault(shorten(str(error), _MOST_REASON), []).append(str(degree))
        chosen = next(asked for degree, asked in self.opened.items() if self.found.get(degree) is best)
        notes = *best.notes, *(note for note in chosen.notes if note not in self.question.notes)
        if reasons:
            each = (f"{', '.join(degrees)} cards: {reason}" for reason, degrees in reasons.items())
            notes += (f"ops were not cut over groups of {'; of '.join(each)}",)
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
    kept = (each for each in (solution.best, *solution.looked_at) if each is not None)
    looked_at = {each: replace(each.on_groups(shards), name="") for each in kept}  # names are of ways on single cards
    return solution._replace(
        plan=replace(plan, layout=document),
        best=None if solution.best is None else looked_at[solution.best],
        looked_at=tuple(looked_at[each] for each in solution.looked_at),
    )


def _rank(solution: Solution) -> tuple[bool, float]:
    plan, best = solution.plan, solution.best
    if plan is None:
        return True, inf
    is_in_flight = best is not None and in_flight(plan.layout)
    return plan.status != "ok", best.step_time_ns if is_in_flight and best is not None else plan.step_time_ns
