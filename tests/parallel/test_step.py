"""Steps: every op of a step knows which op it is a copy of, and replicas are placed alike."""

from dataclasses import replace

import numpy as np

from gdp.parallel.layout import Layout
from gdp.parallel.step import Step, with_waits
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


def test_hosts_wait_at_exchanges_of_stages() -> None:
    """A host waits for what a pass receives first and for what it sends on; without stages, none does."""
    graph = chain([10, 20, 30, 40])
    places = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1])
    step = Step.of(graph, Layout((2,), stages=2), places=places)
    waiting = np.flatnonzero(step.graph.host_waits)
    # stage 0 sends what f1 makes and receives what b2 makes; the weights of stage 1 are no exchange
    names = [f"{name}{end}" for end in ("", "@1") for name in ("f1", "f2", "b2", "b1")]
    assert sorted(step.graph.op_names[op] for op in waiting) == sorted(names)
    assert not Step.of(graph, Layout((2,)), places=places).graph.host_waits.any()
    assert not with_waits(graph, np.zeros(16, int)).host_waits.any()
    assert replace(step.graph, host_waits=np.zeros(step.graph.num_ops, bool)).fingerprint != step.graph.fingerprint
