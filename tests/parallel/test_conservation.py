"""Conservation laws of parallel steps, on models as they are captured."""

import numpy as np
import pytest

from benchmarks.workloads import model_of, workloads
from gdp.graph import Graph
from gdp.graph.copies import ACCUMULATE
from gdp.graph.held_memory import HeldMemory
from gdp.graph.microbatches import microbatch_of, shared_ops
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.parallel.layout import Layout
from gdp.parallel.rings import gradients_of
from gdp.parallel.step import Step
from tiny_models import captured

LAYOUTS = (
    "data=3",
    "data=2,microbatches=2:1",
    "data=3,microbatches=2,zero=1",
    "data=2,zero=2",
    "data=2,microbatches=2,zero=3",
)
SMALLEST = [
    next(model_of(workload.name) for workload in workloads.workloads if workload.family == family)
    for family in workloads.family_names()
]


def assert_conserved(graph: Graph, layout: Layout) -> None:
    """Asserts that the step does the work of `layout.num_parts` micro-batches, and holds and moves what it has to."""
    step = Step.of(graph, layout)
    whole, count, zero = step.graph, layout.data, layout.zero
    kinds, phases = np.array(whole.kinds), np.array(whole.phases)
    is_collective = whole.is_collective
    is_sum = whole.is_in_role(ACCUMULATE)
    is_source, is_late = shared_ops(graph)
    is_pass = ~is_source & ~is_late
    ours = ~is_collective & ~is_sum & ~is_late[step.origin] & ~is_source[step.origin]
    for figure in ("flops", "bytes_accessed"):
        assert getattr(whole, figure)[ours].sum() == layout.num_parts * getattr(graph, figure)[is_pass].sum()
    of_update = np.array([phase == "update" for phase in graph.phases])
    all_flops, work = whole.flops[(phases == "update") & ~is_collective].sum(), graph.flops[of_update].sum()
    times = 1 if zero else count
    assert times * work <= all_flops <= times * work + count * of_update.sum()

    held, once = HeldMemory.of(whole), HeldMemory.of(graph)
    slack = count * graph.num_ops
    parameter_times, state_times = (1 if zero == 3 else count), (1 if zero else count)
    assert 0 <= held.parameter_bytes - parameter_times * once.parameter_bytes <= slack
    assert 0 <= held.optimizer_state_bytes - state_times * once.optimizer_state_bytes <= slack
    assert held.other_bytes == count * once.other_bytes

    gradient_bytes = sum(gradient.num_bytes for gradient in gradients_of(graph, is_late).values())
    is_hop = (whole.is_resident & is_collective[whole.producers])[whole.edge_tensors]
    moved = {
        exchange: int(
            whole.tensor_bytes[whole.edge_tensors[is_hop & np.char.startswith(kinds[whole.consumers], exchange)]].sum()
        )
        for exchange in ("all_reduce", "reduce_scatter", "all_gather")
    }
    slack = (count - 1) * int(is_collective.sum())
    sums = layout.microbatches[0] if zero == 3 else 1
    expected = {
        "all_reduce": 0 if zero else 2 * (count - 1) * gradient_bytes,
        "reduce_scatter": sums * (count - 1) * gradient_bytes if zero else 0,
    }
    for exchange, least in expected.items():
        assert least <= moved[exchange] <= least + slack
    if zero in (1, 2):  # parameters that are updated, once each
        assert 0 < moved["all_gather"] <= (count - 1) * once.parameter_bytes + slack
    assert whole.replicas.max() == count - 1
    assert microbatch_of(whole).max() == (max(layout.microbatches) - 1 if max(layout.microbatches) > 1 else -1)


@pytest.mark.parametrize("family", ["bert", "rnnlm"])
def test_tiny_models_conserve(family: str) -> None:
    """Work, memory and hops of parallel steps are those of the captured micro-batch, by the layout's arithmetic."""
    graph = captured(family).graph
    for text in LAYOUTS:
        assert_conserved(graph, Layout.parse(text))
    assert Step.of(graph, Layout()).graph is graph


@pytest.mark.long
@pytest.mark.parametrize("name", SMALLEST)
def test_workloads_conserve(name: str) -> None:
    """The laws hold for the smallest workload of each family, with all of its batch in a micro-batch."""
    graph = ModelSource(name, Reading()).part(1).graph
    for text in LAYOUTS:
        assert_conserved(graph, Layout.parse(text))
