"""Overlap: exchanges that run beside the products of parameters' gradients."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.costs.breakdown import Breakdown
from gdp.costs.op_times import op_times
from gdp.costs.overlap import overlapped
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.models.model import Reading
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from tests.models.shard_cases import case

GROUP = Cluster.parse("4xa100-sxm-40g").grouped(4)
ROWS, WIDTH = 4096, 2048


def backward(columns: int = WIDTH) -> Graph:
    """The backward pass of a column-wise layer: gradients of its input, its weight and its bias, and the sum."""
    whole, cut, weight = (f"float16[{a},{b}]" for a, b in ((ROWS, WIDTH), (ROWS, columns), (columns, WIDTH)))
    flops, size = 2 * ROWS * WIDTH * columns, 2 * ROWS * WIDTH
    calls = [
        ("dgrad", f"aten.mm {cut} {weight} > {whole}", flops),
        ("wgrad", f"aten.mm float16[{columns},{ROWS}]{{1,{columns}}} {whole} > {weight}", flops),
        ("bias", f"aten.sum {cut} (0) 1 > float16[1,{columns}]", ROWS * columns),
        ("sum", f"collective.all_reduce {whole} 4 > {whole}", 0),
    ]
    ops = [Op("x", "input"), Op("weight", "parameter", resident_bytes=2 * columns * WIDTH)]
    ops.append(Op("gradient", "aten.mul", phase="backward"))
    for name, shapes, work in calls:
        own = {"shapes": shapes, "dtype": "float16", "phase": "backward"}
        ops.append(Op(name, shapes.split()[0], work, size, **own))
    ops.append(Op("norm", "aten.native_layer_norm_backward", phase="backward"))
    ops.append(Op("update", "optimizer", phase="update"))
    tensors = [
        Tensor(0, (4,), size),
        Tensor(1, (3, 8), 2 * columns * WIDTH, resident=True),
        Tensor(2, (3, 4, 5), 2 * ROWS * columns),
        Tensor(3, (6,), size),
        Tensor(4, (8,), 2 * columns * WIDTH),
        Tensor(5, (8,), 2 * columns),
        Tensor(6, (7,), size),
    ]
    return Graph.build("layer", ops, tensors)


@pytest.mark.parametrize("columns", [64, WIDTH, 16 * WIDTH])
def test_a_sum_takes_what_products_leave_of_it(columns: int) -> None:
    """From the start of the sum on the step takes the longer one: the sum, or the gradients of weight and bias."""
    inline = backward(columns)
    beside = overlapped(inline)
    times, left = op_times(inline, GROUP)[:, 0], op_times(beside, GROUP)[:, 0]
    others = times[4] + times[5]
    assert left.tolist() == [*times[:6], max(times[6] - others, 0), *times[7:]]
    problem = Problem.build(beside, GROUP, host_time_ns=np.zeros((9, 1), np.int64))
    step_ns = simulate(problem, np.zeros(9, np.uint8)).step_time_ns
    assert step_ns == times[:4].sum() + max(others, times[6])
    assert Breakdown(beside, GROUP.devices[0]).time_ns <= Breakdown(inline, GROUP.devices[0]).time_ns


def test_measured_sums_are_as_they_were_measured() -> None:
    """A time that was told of a sum is what is left of it already."""
    graph = overlapped(backward())
    times = [{"a100-sxm-40g": 5_000_000} if name == "sum" else {} for name in graph.op_names]
    assert op_times(replace(graph, times_ns=tuple(times)), GROUP)[6, 0] == 5_000_000


def beside(name: str, shards: Shards) -> dict[str, list[str]]:
    """Returns the ops beside each sum of a captured case."""
    model, inputs = case(name)
    source = ModelSource.of_example((model, (), inputs), Reading(training=True))
    graph = source.sharded(shards).part(1).graph
    edges = np.flatnonzero((graph.tensor_bytes == 0)[graph.edge_tensors])
    found: dict[str, list[str]] = {}
    for edge in edges.tolist():
        op, reader = int(graph.producers[graph.edge_tensors[edge]]), int(graph.consumers[edge])
        if graph.kinds[reader].startswith("collective."):
            assert graph.groups[op] == graph.groups[reader] >= 0
            found.setdefault(graph.op_names[reader], []).append(graph.op_names[op])
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_beside_sums_of_a_llama(sequence: bool) -> None:
    """Each layer's two sums run beside the weights' gradients of the layers that read what they sum: queries, keys and
    values, gate and up; that of the head beside the head's."""
    found = beside("llama", Shards(2, sequence, overlap=True))
    assert sorted(len(ops) for ops in found.values()) == [1, 2, 2, 3, 3]
    assert not beside("llama", Shards(2, sequence))


def test_overlap_is_of_gradients_of_shards() -> None:
    """One line refuses overlap without ranks, and without a backward pass."""
    with pytest.raises(InputError, match="add tensor=2 or more"):
        Shards(overlap=True)
    model, inputs = case("llama")
    del inputs["labels"]
    source = ModelSource.of_example((model, (), inputs), Reading(training=False))
    with pytest.raises(InputError, match="inference has none; leave it out"):
        source.sharded(Shards(2, overlap=True)).part(1)
