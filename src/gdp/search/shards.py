"""The choice whether ops are cut over groups of cards: the same question about local programs of several degrees.

    question --as it is--------------------> solution --.
             --sharded(2), (4), .. on groups-> solution --+--> the fastest that fits

Groups are looked at where copies of the model cannot use all cards: in a forward pass, with fewer samples than cards,
and where nothing else fits.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from gdp.budget import Clock
from gdp.errors import InputError
from gdp.models.shards import WHOLE, Shards
from gdp.parallel.layout import AUTO, Layout
from gdp.search.candidate import Candidate
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import Solution

Solve = Callable[[PlaceQuestion, Clock], Solution]
_SHARE = 0.15  # of the time left, for each degree


def over_degrees(question: PlaceQuestion, clock: Clock, solve: Solve) -> Solution:
    """Returns the best that `solve` finds for `question` and, where they may win, for local programs on groups.

    An answer without groups is kept unless another one fits better or is faster.
    """
    degrees = _degrees(question)
    found: list[Solution] = []
    if degrees and _are_first(question):
        found = list(_solved(question, degrees, clock, solve))
        best_ns = min((each.plan.step_time_ns for each in found if each.plan and each.plan.status == "ok"), default=0)
        if best_ns and question.parts is None and question.bound_ns >= best_ns:  # no search of ops can win
            return min(found, key=_rank)
    whole = solve(question, clock)
    if degrees and not found and not clock.stop.is_set() and (whole.plan is None or whole.plan.status != "ok"):
        found = list(_solved(question, degrees, clock, solve))
    return min([whole, *found], key=_rank)


def stamped(solution: Solution, shards: Shards) -> Solution:
    """Returns the solution of a local program with the shards in its layouts and in its plan."""
    if shards == WHOLE or solution.plan is None:
        return solution
    plan = solution.plan
    document = dict(plan.layout or Layout().document()) | shards.document()
    looked_at = {each: _with_shards(each, shards) for each in (solution.best, *solution.looked_at) if each is not None}
    return solution._replace(
        plan=replace(plan, layout=document),
        best=None if solution.best is None else looked_at[solution.best],
        looked_at=tuple(looked_at[each] for each in solution.looked_at),
    )


def _with_shards(candidate: Candidate, shards: Shards) -> Candidate:
    cut = candidate.cut
    if cut is None:
        return candidate
    way = replace(cut.arrangement, layout=replace(cut.arrangement.layout, shards=shards))
    step = None if cut.step is None else replace(cut.step, layout=replace(cut.step.layout, shards=shards))
    return replace(candidate, cut=replace(cut, arrangement=way, step=step))


def _degrees(question: PlaceQuestion) -> tuple[int, ...]:
    """Returns the numbers of ranks that are worth a look; none where layouts are given, or ops are what it is about."""
    source, options = question.source, question.options
    is_asked = question.parallel in (None, AUTO) and options.placer == AUTO and not options.starts
    has_rules = bool(question.constraints.pins or question.constraints.forbid)
    if source is None or not is_asked or has_rules or question.shards != WHOLE or question.num_batches:
        return ()
    if source.is_file or source.is_timed or source.reading.op_costs is not None or source.reading.microbatches > 1:
        return ()
    return question.cluster.group_sizes()


def _are_first(question: PlaceQuestion) -> bool:
    """Returns whether copies of the model leave cards without work: in inference, and with few samples."""
    num_cards = sum(not device.is_cpu for device in question.cluster.devices)
    assert question.source is not None
    return not question.source.reading.training or (question.source.batch_size or 1) < num_cards


def _solved(question: PlaceQuestion, degrees: tuple[int, ...], clock: Clock, solve: Solve) -> Iterator[Solution]:
    """Yields the answers for the degrees that the model and the cluster allow, the largest first."""
    for degree in degrees[::-1]:
        if clock.has(0.0):
            with contextlib.suppress(InputError):  # such as heads that the degree does not divide
                yield solve(question.sharded(Shards(degree)), clock.part(_SHARE))


def _rank(solution: Solution) -> tuple[bool, float]:
    plan = solution.plan
    return (True, inf) if plan is None else (plan.status != "ok", plan.step_time_ns)
