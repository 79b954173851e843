"""The choice of tensor degrees: which are looked at, for how long, and what is said of others."""

import re
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gdp.search.place
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.models.model import Reading
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from gdp.parallel.layout import Layout
from gdp.planning.layout_answer import LayoutAnswer
from gdp.search.layouts.choose import choose_layout, search_further
from gdp.search.place import answer
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.search.question import Solution
from gdp.search.shards import over_degrees
from gdp.simulator.constraints import Constraints
from tests.models.shard_cases import case


def question(
    devices: str, name: str = "blocks", num_tokens: int = 0, num_copies: int = 1, **constraints: Any
) -> PlaceQuestion:
    """Returns the question about a small model that trains on copies of two samples, or on one of so many tokens."""
    model, inputs = case(name)
    inputs = {key: torch.cat([value] * num_copies) for key, value in inputs.items()}
    if num_tokens:
        inputs = dict.fromkeys(inputs, torch.ones(1, num_tokens, dtype=torch.int64))
    source = ModelSource.of_example((model, (), inputs))
    return PlaceQuestion.of(source, Cluster.parse(devices), Constraints(**constraints), None, None, SearchOptions())


@dataclass(frozen=True)
class FoundSearch:
    """Holds the fields of the record of a search that a choice of degrees reads and writes."""

    missing_bytes: NDArray[np.int64]
    seconds: float = 0.0
    simulations: int = 0


@dataclass(frozen=True)
class FoundPlan:
    """Holds the fields of a plan that a choice of degrees reads."""

    step_time_ns: int
    status: str = "ok"
    search: FoundSearch | None = None
    layout: dict[str, Any] | None = None


@dataclass(frozen=True)
class FoundCandidate:
    """Holds the fields of the best candidate that a choice of degrees reads."""

    is_whole: bool
    name: str = ""
    cut: object = True
    devices: tuple[tuple[int, ...], ...] = ((0,),)

    def on_groups(self, shards: Shards) -> "FoundCandidate":
        del shards
        return self


def solution_of(step_time_ns: int) -> Solution:
    """Returns a solution that fits, of a plan without ops."""
    plan: Any = FoundPlan(step_time_ns)
    return Solution(None, plan=plan)


def turns_of(asked: PlaceQuestion, times: dict[Shards, int]) -> list[Shards]:
    """Returns the degrees that are looked at in turn, whose steps take these ns."""
    turns = list[Shards]()

    def solve(part: PlaceQuestion, _: Clock) -> Solution:
        turns.append(replace(part.shards, sequence=None))
        return solution_of(times[turns[-1]])

    over_degrees(asked, Clock(Budget(simulations=9)), solve)
    return turns


def asked_by(asked: PlaceQuestion, monkeypatch: pytest.MonkeyPatch) -> tuple[Solution, list[tuple[int, int | None]]]:
    """Returns the answer, and the degrees that were looked at with the step time that each found."""
    turns, solve = [], gdp.search.place._answer

    def noted(part: PlaceQuestion, *others: Any) -> Solution:
        solution = solve(part, *others)
        turns.append((part.shards.num_ranks, None if solution.plan is None else solution.plan.step_time_ns))
        return solution

    monkeypatch.setattr(gdp.search.place, "_answer", noted)
    return answer(asked, Clock(Budget(simulations=120))), turns


def told_degrees(note: str) -> set[int]:
    """Returns the degrees that a note has reasons for."""
    found = re.findall(r"of ([\d, ]+) cards: ", note)
    return {int(degree) for degrees in found for degree in degrees.split(", ")}


def test_degrees_are_looked_at_and_the_best_has_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples on four cards: groups of two first, the step as it is, and the best one. A note has those left out,
    by a bound above the best step."""
    asked = question("4xa100-sxm-80g")
    solution, turns = asked_by(asked, monkeypatch)
    times, best_ns = dict(turns), min(time_ns for _, time_ns in turns if time_ns is not None)
    assert solution.plan is not None
    assert solution.plan.step_time_ns == best_ns
    assert turns[0][0] == 2
    left_out = {degree for note in solution.notes for degree in told_degrees(note)}
    assert left_out == {2, 4} - set(times)
    for degree in left_out:
        assert asked.sharded(Shards(degree)).bound_ns >= best_ns
    if solution.plan.num_ranks > 1:
        assert turns[-1][0] == solution.plan.num_ranks
    assert {candidate.layout.shards.tensor for candidate in solution.looked_at} == set(times)
    assert solution.bound_ns <= solution.plan.step_time_ns


def test_a_degree_that_is_not_possible_is_told_in_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths of 64 and 128 have no three or six equal parts; the layouts of other degrees stand in one table."""
    asked = question("6xa100-sxm-80g")
    solution, _ = asked_by(asked, monkeypatch)
    (note,) = solution.notes
    assert note.startswith("ops were not cut over groups of 3 cards: ")
    assert told_degrees(note) >= {3, 6}
    assert asked.parts is not None
    told = LayoutAnswer.of(solution, asked.parts)
    assert note in told.notes
    assert any("tensor=" in row.option for row in told.rows)


def test_batches_in_flight_are_served_by_groups_where_these_are_quicker() -> None:
    """Batches go to replicas of cards and of groups of cards; the answer is the quickest for a batch of all of them."""
    model, inputs = case("llama")
    source = ModelSource.of_example((model, (), inputs), Reading(training=False))
    cluster, limits = Cluster.parse("4xa100-sxm-80g:cuda-graphs"), Constraints()
    asked = PlaceQuestion.of(source, cluster, limits, None, 2, SearchOptions())
    solution = answer(asked, Clock(Budget(simulations=60)))
    assert solution.best is not None
    assert solution.plan is not None
    assert {each.layout.shards.tensor for each in solution.looked_at} >= {1, 2}
    assert solution.best.step_time_ns == min(each.step_time_ns for each in solution.looked_at)
    assert solution.plan.layout is not None
    assert solution.plan.layout["batches"] == 2


def test_groups_have_no_look_where_copies_use_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample for each card, and a copy that fits: the step as it is has all of the time. Too little memory for a
    copy has them looked at, after the step as it is, since a small copy is gathered soon."""
    solution, turns = asked_by(question("2xa100-sxm-80g"), monkeypatch)
    assert [degree for degree, _ in turns] == [1]
    assert solution.notes == ()
    held = int(question("2xa100-sxm-80g").graph.resident_bytes.sum())
    limits = dict.fromkeys(("gpu0", "gpu1"), held // 2)
    solution, turns = asked_by(question("2xa100-sxm-80g", max_memory_bytes=limits), monkeypatch)
    assert 2 in dict(turns)


def test_what_is_behind_a_slower_degree_is_left_out_and_what_stays_whole_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two samples on eight cards: groups of four come first, those of eight are faster, so that two are not asked. The
    answer says why, and what its own local program leaves whole."""
    times, turns = {4: 20, 8: 10, 1: 30}, list[int]()

    def solve(asked: PlaceQuestion, _: Clock) -> Solution:
        turns.append(asked.shards.num_ranks)
        return solution_of(10**12 * times[turns[-1]])

    def sharded(asked: PlaceQuestion, shards: Shards) -> PlaceQuestion:
        return replace(asked, shards=shards, notes=(f"groups of {shards.tensor} leave a layer whole",))

    monkeypatch.setattr(PlaceQuestion, "sharded", sharded)
    solution = over_degrees(question("8xa100-sxm-80g"), Clock(Budget(simulations=9)), solve)
    assert turns == [4, 8, 1, 8]
    assert solution.notes == (
        "groups of 8 leave a layer whole",
        "ops were not cut over groups of 2 cards: groups of 4 are slower than those of 8",
    )


def test_a_degree_at_which_cards_wait_less_is_looked_at_behind_a_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples on eight cards take groups of two and four as long, but for exchanges, and those of eight less;
    twelve leave four cards waiting, so that groups are looked at."""
    times, turns = {4: 20, 2: 10, 8: 9, 1: 30}, list[int]()

    def solve(asked: PlaceQuestion, _: Clock) -> Solution:
        turns.append(asked.shards.num_ranks)
        return solution_of(10**12 * times[turns[-1]])

    monkeypatch.setattr(PlaceQuestion, "sharded", lambda asked, shards: replace(asked, shards=shards))
    monkeypatch.setattr(ModelSource, "batch_size", 3)
    over_degrees(question("8xa100-sxm-80g"), Clock(Budget(simulations=9)), solve)
    assert turns == [2, 4, 8, 1, 8]
    for samples, needs in ((8, False), (12, True), (64, False)):
        monkeypatch.setattr(ModelSource, "batch_size", samples)
        assert question("8xa100-sxm-80g").needs_groups == needs


def test_where_nothing_fits_the_answer_lacks_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of answers that do not fit, of several degrees and of several looks at one, that whose fullest card lacks least
    is kept, be it slower."""
    times = {2: [10, 5], 4: [20, 20], 1: [30, 30]}  # of a first look and of a second
    lacks = {30: [7, 0], 20: [8, 8], 10: [6, 6], 5: [9, 0]}

    def solve(asked: PlaceQuestion, _: Clock, *known: Solution) -> Solution:
        time_ns = times[asked.shards.num_ranks].pop(0)
        plan: Any = FoundPlan(time_ns, "infeasible", FoundSearch(np.array(lacks[time_ns])))
        return Solution(None, plan=plan)

    monkeypatch.setattr(PlaceQuestion, "sharded", lambda asked, shards: replace(asked, shards=shards))
    plan = over_degrees(question("4xa100-sxm-80g"), Clock(Budget(simulations=9)), solve).plan
    assert plan is not None
    assert plan.step_time_ns == 10
    assert times[2] == []


def test_op_placement_on_groups_is_searched_on_where_its_bound_is_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look searches ops for a moment, so a degree whose op placement is far from its bound may still win, and comes
    again before the best; one whose layouts are as far does not."""
    asked, turns = question("4xa100-sxm-80g"), list[int]()

    def solve(part: PlaceQuestion, _: Clock, *known: Solution) -> Solution:
        turns.append(part.shards.num_ranks)
        plan: Any = FoundPlan(3 * asked.bound_ns if turns[-1] == 1 else 100 * asked.bound_ns)
        best: Any = FoundCandidate(is_whole=turns[-1] == 2)
        return Solution(best, plan=plan)

    monkeypatch.setattr(PlaceQuestion, "sharded", lambda asked, shards: replace(asked, shards=shards))
    over_degrees(asked, Clock(Budget(simulations=9)), solve)
    assert turns == [2, 4, 1, 2, 1]


def test_what_a_search_of_places_may_gain_comes_before_what_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two degrees that are as fast, the one whose replicas have several devices is asked again first."""
    asked, turns = question("4xa100-sxm-80g"), list[int]()

    def solve(part: PlaceQuestion, _: Clock, *known: Solution) -> Solution:
        turns.append(part.shards.num_ranks)
        plan: Any = FoundPlan((100 if turns[-1] == 1 else 3) * asked.bound_ns + turns[-1])
        best: Any = FoundCandidate(is_whole=False, devices=((0, 1),) if turns[-1] == 4 else ((0,), (1,)))
        return Solution(best, plan=plan)

    monkeypatch.setattr(PlaceQuestion, "sharded", lambda asked, shards: replace(asked, shards=shards))
    over_degrees(asked, Clock(Budget(simulations=9)), solve)
    assert turns[:3] == [2, 4, 1]
    assert turns[3:] == [4, 2]


def test_local_programs_that_come_later_are_captured_on_top_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums of gradients take long, groups are captured once the step as it is is far from their bound."""
    asked = replace(question("2x(2xl4-24g)@1gbit", num_copies=4), captured_s=1.0)
    assert not asked.needs_groups
    assert asked.may_need_groups
    captured, far, turns = list[int](), 10**12, list[int]()
    sharded = PlaceQuestion.sharded

    def noted(asked: PlaceQuestion, shards: Shards) -> PlaceQuestion:
        captured.append(shards.tensor)
        time.sleep(0.2)
        return sharded(asked, shards)

    def solve(part: PlaceQuestion, clock: Clock) -> Solution:
        turns.append(part.shards.num_ranks)
        assert clock.seconds < 0.2
        return solution_of(far)

    monkeypatch.setattr(PlaceQuestion, "sharded", noted)
    asked.prepare()
    assert captured == []
    over_degrees(asked, Clock(Budget(seconds=0.2)), solve)
    assert captured == [2]
    assert turns[:2] == [1, 2]
    captured.clear()
    over_degrees(asked, Clock(Budget(seconds=0.2)), lambda *_: solution_of(asked.bound_ns))
    assert captured == []


def test_op_placement_is_searched_on_from_what_is_known() -> None:
    """Where op placement of the whole step is the best of all, the time left goes to it, from the best placement on."""
    turns = list[tuple[int, list[Solution]]]()

    def solve(asked: PlaceQuestion, _: Clock, *known: Solution) -> Solution:
        turns.append((asked.shards.num_ranks, [*known]))
        is_whole = asked.shards == Shards()
        best: Any = FoundCandidate(is_whole=True) if is_whole else None
        return solution_of(10**12 // (3 if is_whole else 1))._replace(best=best)

    over_degrees(question("4xa100-sxm-80g"), Clock(Budget(simulations=9)), solve)
    assert [ranks for ranks, _ in turns] == [2, 4, 1, 1]
    assert [len(known) for _, known in turns] == [0, 0, 0, 1]
    asked = question("2xa100-sxm-80g")
    batch = asked.about_batch()
    known = choose_layout(replace(batch, layout=Layout()), Clock(Budget(simulations=20)))
    further = search_further(batch, known, Clock(Budget(simulations=40)))
    assert known.best is not None
    assert further.best is not None
    assert further.best.is_whole
    assert min(each.step_time_ns for each in further.looked_at) <= min(each.step_time_ns for each in known.looked_at)
    assert further.plan is not None
    assert further.plan.step_time_ns == further.best.step_time_ns


def test_groups_come_after_copies_that_sum_gradients_over_slow_connections() -> None:
    """Four samples on two hosts of two cards, whose sums take longer than the work: copies have half of the time, then
    pairs have a look, unless their bound says that they hardly come near."""
    slow, fast = (question(f"2x(2xa100-sxm-80g)@{rate}gbit", num_copies=2) for rate in (1, 400))
    times = {Shards(): 10**9, Shards(2): 5 * 10**8}
    assert turns_of(slow, times) == [Shards(), Shards(2), Shards(2)]
    assert turns_of(slow, times | {Shards(2): 2 * 10**9}) == [Shards(), Shards(2), Shards()]
    assert turns_of(slow, times | {Shards(): int(1.9 * slow.bound_ns)}) == [Shards(), Shards()]
    assert turns_of(fast, times) == [Shards()]


@pytest.mark.parametrize(("name", "first"), [("llama", 4), ("mixtral", 2)])
def test_large_groups_of_dense_models_come_first_on_slow_connections(name: str, first: int) -> None:
    """No card holds a copy: groups of four leave two stages the most memory, but cut experts into small products."""
    fits = question("2x(4xa100-sxm-80g)@1gbit", name, num_copies=8)
    held = int(fits.graph.resident_bytes.sum())
    limits = {device.name: held // 2 for device in fits.cluster.devices if not device.is_cpu}
    asked = question("2x(4xa100-sxm-80g)@1gbit", name, num_copies=8, max_memory_bytes=limits)
    assert asked.needs_groups
    assert asked.degrees[0] == first


def test_experts_are_placed_on_parts_of_a_group() -> None:
    """A mixture is looked at with whole experts on each card of the best group, then with parts of them, until these
    are slower; the best has the time left."""
    two, four, whole, halves = Shards(2), Shards(4), Shards(4, expert=4), Shards(4, expert=2)
    times = {two: 10**12, four: 9 * 10**11, whole: 7 * 10**11, halves: 8 * 10**11, Shards(): 2 * 10**12}
    turns = turns_of(question("4xa100-sxm-80g", "mixtral"), times)
    assert turns == [two, four, whole, halves, Shards(), whole]


def test_experts_are_placed_on_replicas() -> None:
    """A mixture that no card can hold, with a sample for each: cards that cut experts alone are looked at before those
    that cut all ops."""
    held = int(question("2xa100-sxm-80g", "mixtral").graph.resident_bytes.sum())
    asked = question("2xa100-sxm-80g", "mixtral", max_memory_bytes=dict.fromkeys(("gpu0", "gpu1"), held // 2))
    two, replicas, both, whole = Shards(2), Shards(expert=2), Shards(2, expert=2), Shards()
    times = {two: 10**12, both: 7 * 10**11, whole: 2 * 10**12}
    assert turns_of(asked, times | {replicas: 6 * 10**11}) == [whole, two, replicas, replicas]
    assert turns_of(asked, times | {replicas: 11 * 10**11}) == [whole, two, replicas, both, both]


def test_tokens_are_cut_where_exchanges_promise_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence on four cards: its tokens are cut beside ops, in two parts first, until that is slower. A short
    one has less to exchange with ops cut alone than gradients of whole weights are."""
    monkeypatch.setattr(PlaceQuestion, "bound_ns", 0)
    two, four, both, context = Shards(2), Shards(4), Shards(2, context=2), Shards(context=4)
    times = {two: 6_000_000, four: 4_000_000, both: 3_800_000, context: 3_900_000, Shards(): 9_000_000}
    assert turns_of(question("4xa100-sxm-80g", "llama", 2**15), times) == [four, two, both, context, Shards(), both]
    assert turns_of(question("4xa100-sxm-80g", "llama", 2**9), times) == [four, two, Shards(), four]


def test_stages_come_first_where_no_group_holds_a_copy_and_what_was_found_takes_part_again() -> None:
    """Two groups on two hosts, each too small for a copy of the model: Megatron-LM's layout is simulated at once; asked
    for again, with more time, the answer is not slower and simulates it no second time. A layout that is asked for is
    the only one."""
    asked = question("2x(2xa100-sxm-80g)@100gbit", "llama")
    batch = asked.sharded(Shards(2)).about_batch()
    staged = choose_layout(replace(batch, layout=Layout.parse("stages=2,microbatches=2")), Clock(Budget(simulations=4)))
    assert staged.plan is not None
    num_bytes = int(1.05 * max(staged.plan.peak_memory_bytes))
    limits = Constraints(max_memory_bytes=dict.fromkeys(staged.plan.devices, num_bytes))
    batch = replace(batch, constraints=limits)
    known = choose_layout(batch, Clock(Budget(simulations=2)))
    assert [each.fits for each in known.looked_at if each.layout.stages and each.may_be_answer] == [True]
    again = choose_layout(batch, Clock(Budget(simulations=60)), known)
    assert known.best is not None
    assert again.best is not None
    assert again.best.step_time_ns <= known.best.step_time_ns
    assert len([each for each in again.looked_at if each.layout.stages]) == 1
    alone = choose_layout(replace(batch, layout=Layout.parse("microbatches=2")), Clock(Budget(simulations=20)))
    assert {each.layout.stages for each in alone.looked_at} == {None}


def test_the_plan_on_groups_says_that_tokens_are_cut_in_training() -> None:
    """The plan has the degrees as the local program was captured, which tools are set up by."""

    def solve(asked: PlaceQuestion, _: Clock, *known: Solution) -> Solution:
        return solution_of(10**12 // (3 if asked.shards.tensor == 2 else 1))

    plan = over_degrees(question("4xa100-sxm-80g"), Clock(Budget(simulations=9)), solve).plan
    assert plan is not None
    assert plan.layout is not None
    assert plan.layout["tensor"] == 2
    assert plan.layout["sequence"] is True
