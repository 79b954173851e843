"""Rivals: the parallel steps of other tools, each as the textbook has it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from gdp.cli.inputs import find_rivals
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.models.model import Reading
from gdp.models.serving import Serving
from gdp.models.shards import WHOLE, Shards
from gdp.models.source import ModelSource
from gdp.parallel.layout import BLOCKS, NONE, Layout
from gdp.search.batch_parts import Parts
from gdp.search.place import place
from gdp.search.question import BatchQuestion, Solution
from gdp.search.rivals.rivals import RIVALS, SERVERS, equal_stages, megatron, simulate_layout
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from tests.models.shard_cases import case
from tests.models.test_served_shards import text_of
from tests.parallel.test_replicas import chain
from tests.search.test_layouts import encoder

BATCH = 8


def layered(num_layers: int, num_parts: int, size: int = 3000) -> Graph:
    """The chain with a list of layers, and 1 / `num_parts` of the samples of a batch of 8."""
    graph = chain([size] * num_layers)
    modules = [f"layers.{name.partition('.')[0][1:]}" for name in graph.op_names]
    is_activation = ~graph.is_resident & (graph.tensor_bytes == 1000)
    sizes = np.where(is_activation, 64_000 // num_parts, graph.tensor_bytes)
    return replace(graph, modules=tuple(modules), flops=BATCH * graph.flops // num_parts, tensor_bytes=sizes)


def machine(count: int, memory: str = "1GB") -> Cluster:
    figures = {"memory": memory, "flops": {"float32": 1e12}, "memory_bandwidth": "1TB/s", "launch": 0}
    devices = [{"name": f"d{number}", "kind": "x", **figures} for number in range(count)]
    links = [{"from": "*", "to": "*", "bandwidth": "1GB/s", "latency": "10us"}]
    document = {"format": "gdp-cluster", "version": 1, "name": "equal", "devices": devices, "links": links}
    return Cluster.from_document(document)


def question(num_layers: int, cluster: Cluster) -> BatchQuestion:
    return BatchQuestion(Parts(lambda num_parts: layered(num_layers, num_parts), BATCH), cluster)


def test_ddp_of_two_devices_takes_its_passes_and_a_ring_of_two() -> None:
    """The step is half the batch's passes, two hops, one sum and the update."""
    # one layer of 3,000 bytes, a batch of 8 in two halves, 1e12 flop/s, 1 GB/s with 10 us of latency
    #   forward 4 us and backward 8 us for 4 samples             12,000 ns
    #   2 hops of 1,500 bytes          2 x (1,500 + 10,000) =    23,000 ns
    #   1 sum, 4,500 bytes at 1 TB/s, rounded up                      5 ns
    #   update of 1 byte                                              1 ns
    step = RIVALS["ddp"](question(1, machine(2))).best
    assert step.layout == Layout((1, 1))
    assert step.step_time_ns == 12_000 + 23_000 + 5 + 1


def test_ddp_raises_micro_batches_until_the_step_fits() -> None:
    """Without a byte of what one micro-batch takes it is two, with half the activations each."""
    whole = RIVALS["ddp"](question(4, machine(2))).best
    assert whole.layout == Layout((1, 1))
    assert whole.simulation is not None
    step = RIVALS["ddp"](question(4, machine(2, f"{whole.simulation.peak_memory_bytes.max() - 1}B"))).best
    assert step.layout == Layout((2, 2))
    assert step.fits


def test_a_rival_that_does_not_fit_says_by_how_much() -> None:
    """Parameters with optimizer state take 4 x 2 x 3,000 bytes, 3,000 more than the device has: no try is lost on M."""
    asked: list[int] = []

    def source(num_parts: int) -> Graph:
        asked.append(num_parts)
        return layered(4, num_parts)

    step = RIVALS["ddp"](BatchQuestion(Parts(source, BATCH), machine(2, "21000B"))).best
    assert not step.fits
    assert step.simulation is not None
    missing = int(step.simulation.peak_memory_bytes[0]) - 21_000
    assert step.obstacle == f"does not fit by {missing / 1024:.1f} KiB on d0"
    assert sorted(asked) == [2]


def test_fsdp_fits_where_ddp_and_zero1_do_not() -> None:
    """Of 24,000 bytes of state and 12,000 of gradients fsdp holds half, and two gathered blocks of 3,000 bytes."""

    def small(num_parts: int) -> Graph:
        graph = layered(4, num_parts)
        return replace(graph, tensor_bytes=np.where(graph.tensor_bytes == 64_000 // num_parts, 8, graph.tensor_bytes))

    # half of 36,000 and two blocks are 24,000; zero1 holds 12,000 of parameters, 6,000 of the rest, 12,000 of gradients
    asked = BatchQuestion(Parts(small, BATCH), machine(2, "24100B"))
    assert [name for name in ("ddp", "zero1", "fsdp") if RIVALS[name](asked).best.fits] == ["fsdp"]


def test_fsdp_recomputes_blocks_where_no_number_of_micro_batches_fits() -> None:
    """With one sample a device the activations of all layers are too many; those of one layer at a time are not."""
    cluster, peaks = machine(2, "1GB"), []
    parts = Parts(lambda num_parts: encoder(4 * num_parts), 2)
    for recompute in (NONE, BLOCKS):
        layout = Layout((1, 1), 3, recompute=recompute)
        graph = parts.exact(2)
        grid = np.array([[0], [1]])
        _, simulation = simulate_layout(graph, layout, cluster, np.zeros(graph.num_ops, np.int64), grid)
        peaks.append(int(simulation.peak_memory_bytes.max()))
    assert peaks[1] < peaks[0]
    solution = RIVALS["fsdp"](BatchQuestion(parts, machine(2, f"{peaks[0] - 1}B")))
    step = solution.best
    assert step.fits
    assert step.layout == Layout((1, 1), 3, recompute=BLOCKS)
    assert len(solution.looked_at) == 2


def test_a_batch_without_equal_parts_leaves_a_device_out() -> None:
    """A batch of 8 has no three equal parts: two devices take it, as if there were no third."""
    step = RIVALS["ddp"](question(1, machine(3))).best
    assert step.layout == Layout((1, 1))
    assert step.step_time_ns == RIVALS["ddp"](question(1, machine(2))).best.step_time_ns


def layouts(num_devices: int, num_layers: int) -> Iterator[tuple[Layout, int]]:
    for stages in range(1, num_devices + 1):
        if num_devices % stages or num_layers % stages:
            continue
        replicas = num_devices // stages
        for count in range(1, BATCH + 1):
            if BATCH % (replicas * count) == 0:
                for zero in range(min(replicas, 2)):
                    yield Layout((count,) * replicas, zero, stages=stages), stages


@pytest.mark.parametrize("num_layers", [4, 6, 3])
@pytest.mark.parametrize("memory", ["1GB", "70KB"])
def test_megatron_takes_the_grid_that_trying_all_of_them_finds(num_layers: int, memory: str) -> None:
    """Megatron's rival finds the same step time as trying every grid, and nothing where no grid fits."""
    cluster = machine(4, memory)
    times = {}
    for layout, stages in layouts(4, num_layers):
        graph = layered(num_layers, layout.num_parts)
        stage = np.array([int(module.partition(".")[2]) * stages // num_layers for module in graph.modules])
        _, simulation = simulate_layout(graph, layout, cluster, stage, np.arange(4).reshape(-1, stages))
        if simulation.feasible:
            times[layout] = simulation.step_time_ns
    step = megatron(question(num_layers, cluster)).best
    assert (step.step_time_ns if step.fits else None) == min(times.values(), default=None)
    if times:
        assert times[step.layout] == step.step_time_ns


def cut_question() -> BatchQuestion:
    """Returns the question about a small decoder on four cards."""
    model, inputs = case("llama")
    return BatchQuestion(Parts.of_source(ModelSource.of_example((model, (), inputs))), Cluster.parse("4xa100-sxm-80g"))


def test_megatron_looks_at_all_degrees_of_tensor_parallelism() -> None:
    """Its step is the best of all grids of tensor x data x pipeline, with tokens cut between cut ops."""
    question, times = cut_question(), {}
    for tensor in (1, 2, 4):
        shards = Shards(tensor).settled(training=True) if tensor > 1 else WHOLE
        asked = question.on_groups(shards) if tensor > 1 else question
        for stages, replicas, zero in product((1, 2), (1, 2), (0, 1)):
            if stages * replicas * tensor != 4 or zero >= replicas:
                continue
            for count in asked.parts.counts(replicas):
                layout = Layout((count,) * replicas, zero, stages=stages)
                graph, grid = asked.parts.exact(layout.num_parts), np.arange(4 // tensor).reshape(-1, stages)
                stage = equal_stages(Problem.build(graph, asked.cluster), stages)
                assert stage is not None
                _, simulation = simulate_layout(graph, layout, asked.cluster, stage, grid)
                times[replace(layout, shards=shards)] = simulation.step_time_ns
    assert {layout.shards.tensor for layout in times} == {1, 2, 4}
    solution = megatron(question)
    assert solution.best is not None
    assert solution.best.step_time_ns == min(times.values()) == times[solution.best.layout]
    assert all(times[each.layout] == each.step_time_ns for each in solution.looked_at if each.layout in times)


def test_fsdp_goes_over_groups_whose_ops_are_cut() -> None:
    """Two groups of two cards share all state; a group of all four has no replicas to share it with."""
    best = RIVALS["fsdp-tp"](cut_question()).best
    assert best is not None
    assert str(best.layout) == "data=2,tensor=2,sequence=on,zero=3"
    assert {device.num_cards for device in best.problem.cluster.devices} == {2}
    none = RIVALS["fsdp-tp"](question(4, machine(4))).best
    assert none is not None
    assert "cuts the ops of a MODEL; a step as it is has no shards" in none.obstacle


def test_vllm_tries_all_groups_and_stages() -> None:
    """Its forward pass is the quickest of tensor x pipeline degrees, and auto is not slower."""
    model, inputs = case("llama")
    source = ModelSource.of_example((model, (), inputs), Reading(training=False))
    cluster, times = Cluster.parse("4xa100-sxm-80g:cuda-graphs"), {}
    asked = BatchQuestion(Parts.of_source(source), cluster)
    for tensor, stages in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)):  # of two layers
        part = asked if tensor == 1 else asked.on_groups(Shards(tensor).settled(training=False))
        problem = Problem.build(part.parts.exact(1), part.cluster)
        stage = equal_stages(problem, stages)
        assert stage is not None
        times[tensor, stages] = simulate(problem, stage).step_time_ns
    solution = SERVERS["vllm"](asked)
    assert solution.best is not None
    layouts = {(each.layout.shards.tensor, each.layout.stages or 1) for each in solution.looked_at}
    assert layouts == set(times)
    assert solution.best.step_time_ns == min(times.values())
    assert place(source, cluster, budget="60sims", num_threads=1).step_time_ns <= solution.best.step_time_ns


def test_vllm_decodes_on_groups(tmp_path: Path) -> None:
    """A decode step, whose batch is not split, is tried on groups, too."""
    source = ModelSource(text_of("llama", tmp_path), Reading(training=False, serving=Serving("decode")))
    cluster = Cluster.parse("4xa100-sxm-80g:cuda-graphs")
    solution = find_rivals(["vllm"], source, cluster, Constraints())["vllm"](
        Problem.build(source.whole().graph, cluster)
    )
    assert isinstance(solution, Solution)
    assert {each.layout.shards.tensor for each in solution.looked_at} == {1, 2, 4}


def test_stages_run_the_published_order() -> None:
    """Two stages, four micro-batches: stage p has at most 2 - p in flight, where priorities alone would start more."""
    graph = layered(2, 4)
    stage = np.array([int(module[-1]) for module in graph.modules])
    _, simulation = simulate_layout(graph, Layout((4,), stages=2), machine(2), stage, np.array([[0, 1]]))
    names = simulation.problem.graph.op_names
    orders = [
        [names[op].replace("f", "F").replace("b", "B") for op in ops.tolist() if names[op][0] in "fb"]
        for ops in simulation.order
    ]
    passes = [[f"{name[0]}{(name.partition('@')[2] or '0')}" for name in order] for order in orders]
    assert passes == [
        ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
        ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
    ]
