"""The choice of tensor degrees: which are looked at, for how long, and what is said of others."""

from typing import Any

import pytest

import gdp.search.place
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from gdp.planning.layout_answer import LayoutAnswer
from gdp.search.place import answer
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.search.question import Solution
from gdp.simulator.constraints import Constraints
from tests.models.shard_cases import case


def question(devices: str, **constraints: Any) -> PlaceQuestion:
    """Returns the question about a small model that trains on two samples."""
    model, inputs = case("blocks")
    source = ModelSource.of_example((model, (), inputs))
    return PlaceQuestion.of(source, Cluster.parse(devices), Constraints(**constraints), None, None, SearchOptions())


def asked_by(asked: PlaceQuestion, monkeypatch: pytest.MonkeyPatch) -> tuple[Solution, list[tuple[int, int | None]]]:
    """Returns the answer, and the degrees that were looked at with the step time that each found."""
    turns, solve = [], gdp.search.place._answer

    def noted(part: PlaceQuestion, *others: Any) -> Solution:
        solution = solve(part, *others)
        turns.append((part.shards.num_ranks, None if solution.plan is None else solution.plan.step_time_ns))
        return solution

    monkeypatch.setattr(gdp.search.place, "_answer", noted)
    return answer(asked, Clock(Budget(simulations=120))), turns


def test_degrees_are_looked_at_and_the_best_has_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples on four cards: each degree that its bound does not rule out, the step as it is, and the best one."""
    asked = question("4xa100-sxm-80g")
    solution, turns = asked_by(asked, monkeypatch)
    times, best_ns = dict(turns), min(time_ns for _, time_ns in turns if time_ns is not None)
    assert solution.plan is not None
    assert solution.plan.step_time_ns == best_ns
    for degree in {1, 2, 4} - set(times):
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
    assert note.startswith("ops were not cut over groups of 3, 6 cards: ")
    assert asked.parts is not None
    told = LayoutAnswer.of(solution, asked.parts)
    assert note in told.notes
    assert any("tensor=" in row.option for row in told.rows)


def test_groups_have_no_look_where_copies_use_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample for each card, and a copy that fits: the step as it is has all of the time. Too little memory for a
    copy has them looked at."""
    solution, turns = asked_by(question("2xa100-sxm-80g"), monkeypatch)
    assert [degree for degree, _ in turns] == [1]
    assert solution.notes == ()
    held = int(question("2xa100-sxm-80g").graph.resident_bytes.sum())
    limits = dict.fromkeys(("gpu0", "gpu1"), held // 2)
    solution, turns = asked_by(question("2xa100-sxm-80g", max_memory_bytes=limits), monkeypatch)
    assert 2 in dict(turns)
