"""Steps with replicas: one of them stands for all, and few cuts place them."""

from typing import Any

import numpy as np
import pytest

from gdp.budget import Clock
from gdp.graph import Graph
from gdp.graph.accumulation import accumulated
from gdp.graph.excerpts import Excerpt
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.placers.starts import ReplicatedChain, replicated_stages
from gdp.search.ops.auto import OneReplica, auto, placed_by_replicas, searched_in_one, shift_cuts
from gdp.search.ops.good_order import in_good_order
from gdp.search.question import Question
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from problems import recurrent

LAYOUTS = ("data=2", "data=2,microbatches=3", "data=3,microbatches=2,zero=1", "data=3,zero=2", "data=2,zero=3")


def random_placement(problem: Problem, seed: int) -> np.ndarray:
    """Returns a placement that keeps groups together."""
    groups = problem.graph.group_index
    return np.random.default_rng(seed).integers(0, problem.num_devices, groups.max() + 1)[groups]


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_one_replica_takes_as_long_as_the_model_alone(num_microbatches: int) -> None:
    """With a bucket for each parameter an exchange, which ends when it begins, changes nothing."""
    model = recurrent()
    alone = accumulated(model, num_microbatches)
    step = Step.of(model, Layout((num_microbatches,) * 3), bucket_bytes=1)
    excerpt = Excerpt.of_replica(step.graph)
    assert excerpt is not None
    kept = ~excerpt.graph.is_collective
    assert {excerpt.graph.op_names[op] for op in np.flatnonzero(kept)} == set(alone.op_names)
    problem, of_alone = (Problem.build(graph, "2xp100-pcie-16g") for graph in (excerpt.graph, alone))
    devices = dict(zip(alone.op_names, random_placement(of_alone, 1).tolist(), strict=True))
    of_group = {excerpt.graph.groups[op]: devices[excerpt.graph.op_names[op]] for op in np.flatnonzero(kept)}
    placement = np.array([
        devices.get(name, of_group[group])
        for name, group in zip(excerpt.graph.op_names, excerpt.graph.groups.tolist(), strict=True)
    ])  # fmt: skip
    assert problem.broken_constraints(placement) == []
    times = [
        simulate(one, where).step_time_ns
        for one, where in ((problem, placement), (of_alone, np.array(list(devices.values()))))
    ]
    assert times[0] == times[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_placement_of_one_replica_is_one_of_all(layout: str) -> None:
    """A placement of one replica expands to a valid placement of all replicas and can be restored from it."""
    step = Step.of(recurrent(), Layout.parse(layout))
    problem = Problem.build(step.graph, "7xp100-pcie-16g")  # one device is left over
    one = OneReplica.of(problem)
    assert one is not None
    size = 7 // step.layout.data
    assert one.problem.num_devices == size
    placement = random_placement(one.problem, 2)
    whole = one.expand(placement)
    assert problem.broken_constraints(whole) == []
    np.testing.assert_array_equal(one.restrict(whole), placement)
    np.testing.assert_array_equal(whole // size, step.replica)


def test_replicas_with_different_numbers_of_micro_batches_are_not_alike() -> None:
    """Replicas with different numbers of micro-batches cannot be placed as one."""
    assert OneReplica.of(Problem.build(Step.of(recurrent(), Layout((2, 1))).graph, "4xp100-pcie-16g")) is None


@pytest.mark.parametrize("layout", [*LAYOUTS, "microbatches=2+1"])
def test_cuts_shift_in_all_replicas_at_once(layout: str) -> None:
    """Shifting a cut moves it in all replicas, keeps cuts in order, and keeps each op on its own replica's devices."""
    way = Layout((2, 1)) if "+" in layout else Layout.parse(layout)
    step = Step.of(recurrent(), way)
    problem = Problem.build(step.graph, "6xp100-pcie-16g")
    size = 6 // way.data
    for chain, cuts in replicated_stages(problem):
        np.testing.assert_array_equal(chain.shifted(cuts, np.zeros(size - 1)), cuts)
        moved = chain.shifted(cuts, np.array([0.9, *[0.0] * (size - 2)]))
        assert (moved >= cuts).all()
        assert (moved[:, 0] > cuts[:, 0]).all()
        assert (np.diff(moved, axis=1) >= 0).all()
        placement = chain.place(moved)
        assert problem.broken_constraints(placement) == []
        np.testing.assert_array_equal((placement // size)[~step.graph.is_collective],
                                      step.replica[~step.graph.is_collective])  # fmt: skip


def of_rnn(layout: str) -> tuple[Question, ReplicatedChain, np.ndarray]:
    problem = Problem.build(Step.of(recurrent(), Layout.parse(layout)).graph, "4xp100-pcie-16g")
    return Question.about(problem), *next(replicated_stages(problem))


@pytest.mark.parametrize("layout", ["data=2", "data=2,microbatches=3"])
def test_shifted_cuts_and_a_search_of_one_replica_are_judged_in_the_whole_step(layout: str) -> None:
    """Shifting bad cuts makes them faster, and step times found from one replica are those of the whole step."""
    question, chain, cuts = of_rnn(layout)
    bad = chain.shifted(cuts, np.array([0.4]))  # most of the work in the first stage
    start = question.try_orders(chain.place(bad), (question.problem.order,))
    shifted = shift_cuts(question, Clock.of("60sims"), start, chain, bad)
    assert shifted < start
    one = OneReplica.of(question.problem)
    assert one is not None
    for found in [shifted, *searched_in_one(question, Clock.of("200sims"), one, start, auto)]:
        again = simulate(question.problem, found.placement, order=found.replay.order)
        assert again.step_time_ns == found.step_time_ns
        assert again.feasible


def test_replicas_are_placed_in_time_and_the_same_with_one_seed() -> None:
    """Placing by replicas is repeatable, is no worse than plain stages, and gives one answer when time is up."""
    question, _, _ = of_rnn("data=2,microbatches=3")
    first, again = (placed_by_replicas(question, Clock.of("300sims"), auto) for _ in range(2))
    assert [each.step_time_ns for each in first] == [each.step_time_ns for each in again]
    stages = [question.try_orders(chain.place(cuts)) for chain, cuts in replicated_stages(question.problem)]
    assert min(first).step_time_ns <= min(stages).step_time_ns
    up = Clock.of("1s").part(0.0)
    assert len(placed_by_replicas(question, up, auto)) == 1


@pytest.mark.parametrize(
    "limits",
    [
        {"pins": [("layers.1", "gpu3")]},  # where the first replica may not be alone
        {"pins": [("layers.1", "gpu0")]},
        {"forbid": [("dropout", "gpu0")]},
        {"forbid": [("dropout", "gpu0"), ("dropout", "gpu1")]},
        {"max_memory_bytes": {"gpu0": 2**30}},
    ],
    ids=str,
)
def test_constraints_hold_in_all_replicas(limits: dict[str, Any]) -> None:
    """A device is left over, to which ops move that may not be where they are."""
    step = Step.of(recurrent(), Layout((2, 2)))
    problem = Problem.build(step.graph, "5xp100-pcie-16g", Constraints(**limits))
    question = in_good_order(Question.about(problem), Clock.of("200sims"))
    for found in placed_by_replicas(question, Clock.of("200sims"), auto):
        assert problem.broken_constraints(found.placement) == []
        again = simulate(problem, found.placement, order=found.replay.order)
        assert again.step_time_ns == found.step_time_ns


def test_after_an_interrupt_what_is_known_is_the_answer() -> None:
    """After an interrupt, placing by replicas returns only the one candidate that is known already."""
    question, _, _ = of_rnn("data=2,microbatches=3")
    clock = Clock.of("300sims")
    question = in_good_order(question, clock)
    clock.stop.set()
    assert placed_by_replicas(question, clock, auto) == [*question.known]
    assert len(question.known) == 1


def test_a_step_without_replicas_has_no_excerpt() -> None:
    """A step that has micro-batches but no replicas has no excerpt of one replica."""
    graph: Graph = accumulated(recurrent(), 3)
    assert Excerpt.of_replica(graph) is None
