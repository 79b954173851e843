"""Placers on a clock: each answers with the best that it has, or says that it has none."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.budget import Budget, Clock
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.placers import CLASSICAL, NoTimeError
from gdp.placers import list_scheduling as lists
from gdp.placers.base import TriedPlacements
from gdp.placers.starts import replicated_stages
from gdp.simulator.problem import Problem
from problems import CASES, accumulating, recurrent


def up() -> Clock:
    """Returns a clock that is up."""
    return Clock(Budget(seconds=0.0))


@pytest.mark.parametrize("name", CLASSICAL)
@pytest.mark.parametrize("case", CASES)
def test_placers_out_of_time(name: str, case: str) -> None:
    """A placer whose clock is up has a placement or says that it has none."""
    problem = CASES[case].problem()
    try:
        placement = CLASSICAL[name](problem, 0, up())
    except NoTimeError:
        return
    assert placement is None or not problem.broken_constraints(placement)


@pytest.mark.parametrize("name", CLASSICAL)
def test_clocks_change_no_placement(name: str) -> None:
    """With time left, a clock changes no placement."""
    problem = Problem.build(recurrent(), "3xp100-pcie-16g")
    without, with_one = CLASSICAL[name](problem, 0), CLASSICAL[name](problem, 0, Clock(Budget(seconds=1e6)))
    np.testing.assert_array_equal(without, with_one)


@pytest.mark.parametrize("name", ["heft", "m-etf", "m-sct"])
def test_slices_equal_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """List schedules made in slices are those made at once."""
    problem = Problem.build(accumulating(), "3xp100-pcie-16g")
    at_once = CLASSICAL[name](problem, 0)
    monkeypatch.setattr(lists, "LISTS", replace(lists.LISTS, slice=7 * problem.num_devices))
    np.testing.assert_array_equal(at_once, CLASSICAL[name](problem, 0))


def test_first_placement_is_always_tried() -> None:
    """The first placement is tried even when the clock is up."""
    problem = Problem.build(recurrent(), "2xl4-24g")
    assert TriedPlacements(problem, up()).run([np.zeros(problem.num_ops, np.int64)])


def test_replicas_are_placed_on_devices_of_their_own() -> None:
    """Two replicas on four devices: each uses two of them, and none of the other's."""
    step = Step.of(recurrent(), Layout.parse("data=2"))
    problem = Problem.build(step.graph, "4xp100-pcie-16g")
    placements = [chain.place(cuts) for chain, cuts in replicated_stages(problem)]
    assert placements
    for placement in placements:
        own = [set(placement[(step.replica == replica) & ~step.graph.is_collective].tolist()) for replica in range(2)]
        assert own == [{0, 1}, {2, 3}]


def test_no_replicas_no_stages() -> None:
    """A step without replicas has no stages of replicas."""
    assert list(replicated_stages(Problem.build(recurrent(), "2xl4-24g"))) == []
