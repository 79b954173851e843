"""Orders of micro-batches with replicas: gradients of weights that only a sum over replicas waits for may wait too."""

import numpy as np
import pytest

from benchmarks.graphs import lstm_training_graph
from gdp.budget import Clock
from gdp.graph import Graph
from gdp.graph.copies import ACCUMULATE
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.placers.starts import replicated_stages
from gdp.search.ops.good_order import in_good_order
from gdp.search.question import Question
from gdp.simulator.orders import PROGRAM, ZERO_BUBBLE_PROGRAM, only_for_updates, program_levels
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from tests.graph.test_microbatches import two_stages


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 1000])
def test_gradients_of_weights_may_wait_for_the_sum(zero: int, bucket_bytes: int) -> None:
    """With replicas the same ops may wait as without, whether a bucket has one gradient or both."""

    def waiting(graph: Graph) -> set[str]:
        phases = np.array(graph.phases)
        can_wait = only_for_updates(graph, phases == "backward", phases == "update")
        return {graph.op_names[op] for op in np.flatnonzero(can_wait)}

    # b0 reaches w0 alone
    stems = {"b0", "b0@1", "w0", "w0@1", "w1", "w1@1", "p0.accumulate@1", "p1.accumulate@1"}
    assert waiting(two_stages(2).graph) == stems
    step = Step.of(two_stages(1).graph, Layout((2, 2), zero), bucket_bytes=bucket_bytes)
    assert waiting(step.graph) == stems | {f"{name}#1" for name in stems}


@pytest.mark.parametrize("layout", ["data=2", "data=2,microbatches=3", "data=2,microbatches=2,zero=1", "data=2,zero=3"])
def test_the_order_of_the_program_is_that_of_one_micro_batch(layout: str) -> None:
    """Copies of an op start as the captured ops stand, sums with the gradients that they add, exchanges first."""
    step = Step.of(two_stages(1).graph, Layout.parse(layout))
    levels, is_collective = program_levels(step.graph), step.graph.is_collective
    is_sum = step.graph.is_in_role(ACCUMULATE)
    assert levels[is_collective].min() > levels[~is_collective].max()
    own = ~(is_collective | is_sum)
    turn = np.unique(-levels[own], return_inverse=True)[1]
    np.testing.assert_array_equal(turn, np.unique(step.origin[own], return_inverse=True)[1])
    level_of = dict(zip(step.graph.op_names, levels.tolist(), strict=True))
    for name in np.array(step.graph.op_names)[is_sum].tolist():
        gradient = {"p0": "w0", "p1": "w1"}[name.partition(".")[0]]
        assert level_of[name] == level_of[gradient]


@pytest.mark.parametrize(("layout", "order"), [("data=2", PROGRAM), ("data=2,microbatches=4", ZERO_BUBBLE_PROGRAM)])
def test_the_order_of_stages_is_kept(layout: str, order: str) -> None:
    """A step with replicas is placed in the order in which its stages do best."""
    step = Step.of(lstm_training_graph(3), Layout.parse(layout))
    problem = Problem.build(step.graph, "4xp100-pcie-16g")
    chosen = in_good_order(Question.about(problem), Clock.of("100sims")).problem
    chain, cuts = next(replicated_stages(problem))
    placement = chain.place(cuts)
    times = [simulate(problem.in_order(each), placement).step_time_ns for each in problem.orders]
    assert order in problem.orders
    assert times[problem.orders.index(chosen.order)] == min(times)
