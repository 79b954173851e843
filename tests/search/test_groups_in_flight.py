"""Groups of sequences in flight of a decoder: their memory, the places of layers, and the rates, by hand."""

import json

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.export.servers import VLLM
from gdp.graph import Graph, Op, Tensor
from gdp.graph.held_memory import is_cache
from gdp.models.model import Model, Reading
from gdp.models.serving import ServedStep, Serving
from gdp.models.source import ModelSource
from gdp.parallel.layout import Layout
from gdp.parallel.step import BatchStream
from gdp.search.batches.place_batches import EQUAL_STAGES, alone
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from gdp.simulator.throughput import Throughput
from hand_cases import make_cluster
from problems import serve

# meta-llama/Llama-3.1-70B, config.json
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# q and o 8192 x 8192, k and v 8192 x 1024, three of 8192 x 28672, two norms of 8192
LAYER_BYTES = 2 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192)
TABLE_BYTES = 2 * 128256 * 8192
# keys and values of 8 heads of 128 in 2 bytes, for 16 x 4096 tokens
LAYER_CACHE_BYTES = 2 * 8 * 128 * 2 * 16 * 4096


def cached_stages() -> Graph:
    """Two stages of 2 and 3 ns; each has 7 bytes of weights, and writes and reads a cache of 11 bytes."""
    ops, tensors = [], []
    for stage, flops in enumerate((2, 3)):
        first = len(ops)
        ops += [
            Op(f"layers.{stage}.w", "parameter", resident_bytes=7),
            Op(f"layers.{stage}.key_cache", "buffer", resident_bytes=11, group=stage),
            Op(f"layers.{stage}.write", "aten.copy_", phase="forward", group=stage),
            Op(f"layers.{stage}.read", "mm", flops=flops, phase="forward"),
        ]
        tensors += [
            Tensor(first, (first + 3,), 7, resident=True),
            Tensor(first + 1, (first + 2,), 11, resident=True),
            Tensor(first + 2, (first + 3,), 11, resident=True),
        ]
        if stage:
            tensors += [Tensor(first - 1, (first + 2,), 0)]
    return Graph.build("cached", ops, tensors)


def test_groups_share_weights_and_not_caches() -> None:
    """Three groups hold the weights once and three caches, and none waits for what another writes.

    Stages of 2 and 3 ns with three in flight: one group is done every 3 ns, and each takes 3 x 3 ns.
    """
    layout = Layout((3,))
    stream = BatchStream.of(cached_stages(), layout)
    assert stream.graph.resident_bytes.sum() == 2 * (7 + 3 * 11)
    problem = Problem.build(stream.graph, make_cluster(2, {})).in_order("GPipe")
    simulation = simulate(
        problem,
        stream.placement(np.repeat([0, 1], 4), ((0, 1),)),
        priority=problem.priority("GPipe", problem.b_level_ns),
    )
    assert simulation.peak_memory_bytes.tolist() == [7 + 3 * 11, 7 + 3 * 11]
    figures = Throughput.of(simulation, layout)
    assert (figures.time_per_batch_ns, figures.latency_ns) == (3, 9)


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Decode of Llama-3.1-70B: 16 sequences of 4,096 tokens in bfloat16."""
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    text = f"hf:{directory}?batch=16&context=4096"
    return ModelSource(text, Reading(training=False, serving=Serving("decode")))._capture_served(1)[1]


def test_decode_of_70b_by_hand(llama_70b: Model) -> None:
    """The cache is 327,680 bytes a token, and a step reads weights and cache once: 160 GB, 78.9 ms at 2.04 TB/s.

    Weights are 80 layers of 1,711,308,800 bytes, two tables of 2,101,346,304 and a norm; a step reads all but the
    table of tokens. In stages of 20 layers on four cards each holds a quarter of the layers and of the cache.
    """
    graph, served = llama_70b.graph, llama_70b.served
    assert served == ServedStep("decode", 16, 1, 4096, 80 * LAYER_CACHE_BYTES)
    assert served.cache_bytes == 327_680 * 16 * 4096
    weights = int(graph.resident_bytes[np.array(graph.kinds) == "parameter"].sum())
    assert weights == 80 * LAYER_BYTES + 2 * TABLE_BYTES + 2 * 8192
    cluster = Cluster.parse("4xa100-sxm-80g:cuda-graphs")
    problem = Problem.build(graph, cluster)
    units = VLLM.read_units(problem)
    simulation = simulate(problem, units.place(np.repeat(np.arange(4), 20)))
    read = weights - TABLE_BYTES + served.cache_bytes
    least_ns = read / cluster.devices[0].memory_bytes_per_second * 1e9
    assert least_ns == pytest.approx(78.7e6, rel=0.01)
    # weights are read at 0.735 of the bandwidth, the cache at 0.87; gaps between 80 layers' kernels are the rest
    least_ns = ((weights - TABLE_BYTES) / 0.735 + served.cache_bytes / 0.87) * least_ns / read
    assert least_ns < simulation.step_time_ns < 1.15 * least_ns
    middle = 20 * (LAYER_BYTES + LAYER_CACHE_BYTES)
    for peak, more in zip(simulation.peak_memory_bytes.tolist(), (TABLE_BYTES, 0, 0, TABLE_BYTES), strict=True):
        assert middle + more <= peak < middle + more + 20e6  # activations of 16 tokens


def test_groups_of_70b_in_flight_by_hand(llama_70b: Model) -> None:
    """Four groups in four stages hold weights once and four caches, and serve nearly four times the tokens.

    A card holds 20 layers of 1.71 GB and 4 x 20 caches of 0.268 GB: 55.7 GB, those at the ends 2.1 GB more.
    """
    graph, served = llama_70b.graph, llama_70b.served
    assert served is not None
    cluster = Cluster.parse("4xa100-sxm-80g")
    choice = serve(graph, cluster, 4, budget="1sims")
    stages = next(each for each in choice.looked_at if each.name == EQUAL_STAGES)
    assert stages.fits
    assert stages.problem.graph.resident_bytes[is_cache(stages.problem.graph)].sum() == 4 * served.cache_bytes
    middle = 20 * (LAYER_BYTES + 4 * LAYER_CACHE_BYTES)
    assert middle == 55_701_012_480
    for peak, more in zip(stages.replay.peak_memory_bytes.tolist(), (TABLE_BYTES, 0, 0, TABLE_BYTES), strict=True):
        assert middle + more <= peak < middle + more + 0.1e9
    one_ns = alone(stages).step_time_ns
    assert 0.25 * one_ns <= stages.step_time_ns < 0.3 * one_ns
