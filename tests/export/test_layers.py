"""llama-cpp, vllm and megatron: layers by name and number, read by the tools' own code where it can be installed."""

import re

import numpy as np
import pytest
from export_models import graph_of, llama

import gdp
from gdp.errors import InputError
from gdp.export import llama_cpp, megatron, vllm
from gdp.simulator.problem import Problem


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.build(graph_of("llama"), gdp.Cluster.parse("3xp100-pcie-16g+cpu-16core"))


def first_match(lines: str, tensor: str) -> str | None:
    """What llama.cpp does with `-ot`: the first regular expression that is found in the tensor's name."""
    for line in lines.splitlines():
        pattern, _, device = re.fullmatch(r"-ot '(.*)'", line)[1].rpartition("=")  # type: ignore[index]
        if re.search(pattern, tensor):
            return device
    return None


def test_the_patterns_of_llama_cpp_put_each_gguf_tensor_where_its_parameter_is(problem: Problem) -> None:
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    units = llama_cpp.read_units(problem)
    assert units.num_units == 2 * 4 + 3
    devices = np.random.default_rng(1).integers(4, size=units.num_units)
    lines = llama_cpp.write(problem, units, devices)
    assert np.array_equal(llama_cpp.parse(lines, problem, units), devices)
    placed = dict(zip(problem.graph.op_names, units.place(devices).tolist(), strict=True))
    parameters = [path for path, _ in llama()[0].named_parameters()]
    assert len(parameters) == 4 * 9 + 3
    for path in parameters:
        tensor = names.get_name(path, try_suffixes=(".weight", ".bias"))
        assert first_match(lines, tensor) == ["CUDA0", "CUDA1", "CUDA2", "CPU"][placed[path]], (path, tensor)


def test_the_table_of_gguf_names_is_gguf_s(problem: Problem) -> None:
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for path, tensor in llama_cpp.IN_LAYERS.items():
        assert names.get_name(f"model.layers.1.{path}") == f"blk.1.{tensor}"
    assert {names.get_name(path) for path in ("model.embed_tokens", "model.norm", "lm_head")} == set(
        llama_cpp.OUTSIDE.values()
    )


@pytest.mark.parametrize("cuts", [(1, 3), (2,), ()])
def test_vllm_s_partition_counts_the_layers_of_each_rank(problem: Problem, cuts: tuple[int, ...]) -> None:
    units = vllm.read_units(problem)
    devices = np.array([2, 0, 1])[np.searchsorted(cuts, np.arange(4), side="right")]
    text = vllm.write(problem, units, devices)
    sizes = np.diff([0, *cuts, 4]).tolist()
    assert f"VLLM_PP_LAYER_PARTITION={','.join(map(str, sizes))}\n" in text
    assert f"CUDA_VISIBLE_DEVICES={','.join('201'[: len(sizes)])}\n" in text
    assert np.array_equal(vllm.parse(text, problem, units), devices)
    # the embedding is on the first rank, the head on the last
    placed = dict(zip(problem.graph.op_names, units.place(devices).tolist(), strict=True))
    assert placed["model.embed_tokens.weight"] == devices[0]
    assert placed["lm_head.weight"] == placed["model.norm.weight"] == devices[-1]


@pytest.mark.parametrize("cuts", [(1, 3), (4, 5), (3,), ()])
@pytest.mark.filterwarnings("ignore::UserWarning:megatron", "ignore::DeprecationWarning")
def test_megatron_reads_the_layout_as_the_stages_that_were_meant(problem: Problem, cuts: tuple[int, ...]) -> None:
    units = megatron.read_units(problem)
    assert units.num_units == 6
    devices = np.array([1, 0, 2])[np.searchsorted(cuts, np.arange(6), side="right")]
    text = megatron.write(problem, units, devices)
    assert np.array_equal(megatron.parse(text, problem, units), devices)
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    found = layouts.PipelineParallelLayerLayout.from_str(megatron.layout(units, devices), len(cuts) + 1)
    found.validate_layer_layout(num_layers=4, mtp_num_layers=None)
    stages = [[layer.name for (layers,) in [rank] for layer in layers] for rank in found.layout]
    chain = ["embedding", *["decoder"] * 4, "loss"]
    assert stages == [part.tolist() for part in np.split(np.array(chain), cuts)]


def test_models_of_other_names_are_refused_in_one_line() -> None:
    cluster = gdp.Cluster.parse("2xp100-pcie-16g")
    with pytest.raises(InputError, match="no GGUF tensor for the parameters of 'bert"):
        llama_cpp.read_units(Problem.build(graph_of("bert"), cluster))
    flat = gdp.Graph.build("flat", [gdp.graph.graph.Op("a", "mm")], [])
    for read_units in (llama_cpp.read_units, vllm.read_units, megatron.read_units):
        with pytest.raises(InputError, match="its ops have no module paths"):
            read_units(Problem.build(flat, cluster))
    two = [
        gdp.graph.graph.Op(f"{op}", "mm", 10**9, module=f"{op}") for op in ("encoder.0", "encoder.1", "dec.0", "dec.1")
    ]
    chain = gdp.Graph.build("two", two, [gdp.graph.graph.Tensor(op, (op + 1,), 4) for op in range(3)])
    for read_units in (llama_cpp.read_units, vllm.read_units, megatron.read_units):
        with pytest.raises(InputError, match=r"has layers in encoder and in dec; .*try torch-pipelining"):
            read_units(Problem.build(chain, cluster))
    with pytest.raises(InputError, match="a rank is a GPU"):
        vllm.read_units(Problem.build(graph_of("llama"), gdp.Cluster.parse("2xcpu-16core")))
