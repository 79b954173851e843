"""Steps: every op of a step knows which op it is a copy of, and replicas are placed alike."""

import numpy as np

from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from tests.parallel.test_replicas import chain


def test_replicas_are_placed_alike() -> None:
    """Replicas are placed alike, with their sums beside the updates."""
    graph = chain([10, 20, 30, 40])
    places = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1])
    step = Step.of(graph, Layout((3, 1)), places=places)
    placement = step.placement(places, [[0, 1], [2, 3]])
    device = dict(zip(step.graph.op_names, placement.tolist(), strict=True))
    assert [device[name] for name in ("w0", "f1@2", "b3@1", "w2.update")] == [0, 0, 1, 1]
    assert [device[name] for name in ("w0#1", "f1#1", "b3#1", "w2.update#1")] == [2, 2, 3, 3]
    assert device["w3.accumulate@2"] == 1
    for name, kind in zip(step.graph.op_names, step.graph.kinds, strict=True):
        if kind.startswith("all_reduce."):
            on_first = name.startswith("all_reduce.1.")  # the gradients of w1 and w0 come last
            assert device[name] == (2 if name.endswith("#1") else 0) + (0 if on_first else 1), name


def test_a_step_that_is_not_cut_is_the_graph() -> None:
    """A layout that cuts nothing returns the graph itself."""
    graph = chain([10, 20])
    step = Step.of(graph, Layout())
    assert step.graph is graph
    assert step.placement(np.arange(8) % 2, [[5, 7]]).tolist() == [5, 7] * 4
