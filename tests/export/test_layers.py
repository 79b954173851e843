"""llama-cpp, vllm and megatron: layers by name and number, read by the tools' own code where it can be installed."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from export_models import graph_of, llama
from readers import read_devices

import gdp
from gdp.errors import InputError
from gdp.export import llama_cpp, megatron
from gdp.export.adapt import adapt
from gdp.export.gguf_names import gguf_tensors
from gdp.export.servers import VLLM
from gdp.search.question import plan_of
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.build(graph_of("llama"), gdp.Cluster.parse("3xp100-pcie-16g+cpu-16core"))


def first_match(lines: str, tensor: str) -> str | None:
    """What llama.cpp does with `-ot`: the first regular expression that is found in the tensor's name."""
    for line in filter(lambda line: line.startswith("-ot"), lines.splitlines()):
        pattern, _, device = re.fullmatch(r"-ot '(.*)'", line)[1].rpartition("=")  # type: ignore[index]
        if re.search(pattern, tensor):
            return device
    return None


PLACES = ["CUDA0", "CUDA1", "CUDA2", "CPU"]


@pytest.mark.parametrize("split_layers", [False, True])
def test_patterns_of_llama_cpp(problem: Problem, split_layers: bool) -> None:
    """The patterns for llama.cpp put each GGUF tensor where its parameter is."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    target = llama_cpp.LlamaCpp(split_layers=split_layers).target()
    units = target.read_units(problem)
    assert units.num_units == (2 * 4 if split_layers else 4) + 3
    parameters = [path for path, _ in llama()[0].named_parameters()]
    assert len(parameters) == 4 * 9 + 3
    for seed in range(4):
        devices = np.random.default_rng(seed).integers(4, size=units.num_units)
        lines = target.write(problem, units, devices)
        assert np.array_equal(read_devices(target.name, lines, problem, units), devices)
        placed = dict(zip(problem.graph.op_names, units.place(devices).tolist(), strict=True))
        for path in parameters:
            tensor = names.get_name(path, try_suffixes=(".weight", ".bias"))
            assert first_match(lines, tensor) == PLACES[placed[path]], (path, tensor)


DECODERS = {  # architecture of llama.cpp, model type of Transformers, the fields that its defaults do not fill
    "LLAMA": ("mixtral", {"num_local_experts": 4}),
    "QWEN3": ("qwen3", {"head_dim": 16}),
    "QWEN3MOE": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}),
    "GEMMA2": ("gemma2", {"head_dim": 16}),
    "GEMMA3": ("gemma3_text", {"head_dim": 16}),
    "GEMMA3N": (
        "gemma3n_text",
        {
            "vocab_size_per_layer_input": 100,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    ),
    "PHI3": ("phi3", {}),
    "DEEPSEEK2": ("deepseek_v3", {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "GLM4": ("glm4", {"head_dim": 16}),
    "GPT_OSS": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}),
    "OLMO2": ("olmo2", {}),
    "GRANITE_MOE": ("granitemoe", {"num_local_experts": 4}),
    "GPT2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "MAMBA2": ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 1}),
}


@pytest.mark.parametrize("architecture", DECODERS)
def test_names_of_architectures(architecture: str) -> None:
    """Where the architecture's own table has the parameter, it has the same name; no parameter is without one."""
    gguf = pytest.importorskip("gguf")
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = DECODERS[architecture]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **fields))
    parameters = [path for path, _ in model.named_parameters()]
    tensors = gguf_tensors(parameters)
    assert set(tensors) == set(parameters)
    own = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture), 2)
    names = {path: own.get_name(path, try_suffixes=(".weight", ".bias")) for path in parameters}
    known = {path: name.removesuffix(".weight").removesuffix(".bias") for path, name in names.items() if name}
    assert len(known) > len(parameters) / 2
    assert {path: tensors[path] for path in known} == known


LAYER = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]


def test_lists_that_gguf_stacks() -> None:
    """Members of a list outside of layers become one tensor, as convert_hf_to_gguf.py stacks them."""
    pytest.importorskip("gguf")
    lists = {
        f"model.{name}.{number}.weight": tensor
        for name, tensor in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj"))
        for number in range(3)
    }
    tensors = gguf_tensors([*LAYER, *lists])
    assert {path: tensors[path] for path in lists} == lists


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (  # an architecture of Gemma-3n has no convolution of a state space
            [
                "model.altup_projections.0.weight",
                "model.altup_unembed_projections.0.weight",
                "model.layers.0.mamba.conv1d.weight",
            ],
            "gemma3n, lacks one for 'model.layers.0.mamba.conv1d'",
        ),
        (["model.embed_tokens.weight", "transformer.wte.weight"], "lacks one for 'transformer.wte'"),  # one tensor
        (["model.layers.0.nonsense.weight"], "no GGUF tensor for the parameters of 'model.layers.0.nonsense'"),
    ],
)
def test_reasons_of_llama_cpp(parameters: list[str], reason: str) -> None:
    """A refusal names the parameter that is too much, and no vision part where there is none."""
    pytest.importorskip("gguf")
    with pytest.raises(InputError, match=reason) as caught:
        gguf_tensors([*LAYER, *parameters])
    assert "text_config" not in str(caught.value)
    with pytest.raises(InputError, match="text_config"):
        gguf_tensors([*LAYER, "vision_tower.nonsense.weight"])


def test_memory_of_the_cache() -> None:
    """With the cache a device holds one layer, without it all of them."""
    graph = graph_of("llama")
    # 4 layers, 2 heads of 16: 1000 tokens * 2 (key, value) * 32 elements * 2 bytes = 128,000 bytes a layer
    cache = llama_cpp.LlamaCpp(1000).cache(graph)
    beside = {graph.op_names[op]: int(cache.op_bytes[op]) for op in np.flatnonzero(cache.op_bytes)}
    assert beside == {f"model.layers.{number}.self_attn.k_proj.weight": 128_000 for number in range(4)}
    # weights of a layer: 4 * 4096 + 3 * 8192 + 2 * 128 = 41,216 bytes; a device of 300,000 bytes holds one with its
    # cache and its tensors, and not two; without the cache it holds them all
    cluster = gdp.Cluster.parse("4xp100-pcie-16g")
    problem = Problem.build(graph, cluster, max_memory_bytes={f"gpu{number}": 300_000 for number in range(4)})
    plan = plan_of(simulate(problem, np.zeros(graph.num_ops, np.int64)), 0, "by hand", 0)
    assert set(adapt(problem, plan, llama_cpp.LlamaCpp(0).target()).devices.tolist()) == {0}
    adapted = adapt(problem, plan, llama_cpp.LlamaCpp(1000).target())
    assert adapted.simulation.feasible
    assert adapted.simulation.peak_memory_bytes.min() > 128_000 + 41_216
    assert "-c 1000\n-ngl 5\n" in adapted.content
    assert "-ts 1,1,1,2\n" in adapted.content
    assert "1,000 tokens" in adapted.notes[0]
    # a graph that was captured with its cache (a buffer of each attention) gets no other one
    ops = [graph.op(op) for op in range(graph.num_ops)]
    ops[0] = replace(
        ops[0], name="model.layers.0.self_attn.key_cache", kind="buffer", module="model.layers.0.self_attn"
    )
    cached = gdp.Graph.build("cached", ops, [graph.tensor(tensor) for tensor in range(graph.num_tensors)])
    assert llama_cpp.LlamaCpp().cache(cached).is_in_graph
    assert llama_cpp.LlamaCpp().with_room(Problem.build(cached, cluster)).graph is cached
    with pytest.raises(InputError, match="has its cache already"):
        llama_cpp.LlamaCpp(1000).cache(cached)
    # with 150,000 bytes each no layer fits
    tight = Problem.build(graph, cluster, max_memory_bytes={f"gpu{number}": 150_000 for number in range(4)})
    assert adapt(tight, plan, llama_cpp.LlamaCpp(1000).target()).simulation.missing_bytes.any()


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        ([0, 0, 1, 2], ["-ngl 5", "-dev CUDA0,CUDA1,CUDA2", "-ts 2,1,2"]),
        ([3, 1, 1, 0], ["-ngl 4", "-dev CUDA1,CUDA0,CUDA2", "-ts 2,2,0"]),  # the CPU has the first layer
        ([3, 3, 3, 3], ["-ngl 0"]),
        ([0, 1, 0, 1], ["-ngl 999"]),  # two stretches on a GPU
        ([0, 0, 3, 3], ["-ngl 999"]),  # the CPU can have the first layers only
    ],
)
def test_devices_of_layers_and_cache(problem: Problem, devices: list[int], options: list[str]) -> None:
    """The rule of load_tensors in llama-model.cpp, applied to the written options, gives the devices of the layers."""
    target = llama_cpp.LlamaCpp(0).target()
    units = target.read_units(problem)
    place = {f"blk.{number}": device for number, device in enumerate(devices)}
    placement = np.array([place.get(members[0], 0) for members in units.members])
    lines = target.write(problem, units, placement).splitlines()
    assert [line for line in lines if not line.startswith("-ot")] == options
    notes = target.notes(problem, units, placement)
    assert any("not one stretch" in note for note in notes) == (options == ["-ngl 999"])
    if len(options) == 3:
        num_on_gpus = int(options[0].split()[1])
        names, sizes = options[1].split()[1].split(","), np.array(options[2].split()[1].split(","), float)
        upper = np.cumsum(sizes) / sizes.sum()
        for layer, device in enumerate(devices):
            on_gpu = layer - max(4 + 1 - num_on_gpus, 0)
            found = names[np.searchsorted(upper, on_gpu / num_on_gpus, side="right")] if on_gpu >= 0 else "CPU"
            assert found == PLACES[device]
    # such devices are brought into stretches, as many layers on each as before
    arranged = llama_cpp.in_stretches(problem, units, placement)
    assert sorted(arranged) == sorted(placement)
    assert target.write(problem, units, arranged).splitlines()[0] != "-ngl 999"
    assert np.array_equal(llama_cpp.in_stretches(problem, units, arranged), arranged)


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        ("2xmi300x-192g", {"ROCm0", "ROCm1"}),
        ("cpu-16core+m2-ultra-192g", {"CPU", "MTL0"}),
        ("p100-pcie-16g+mi300x-192g", {"CUDA0", "ROCm0"}),
    ],
)
def test_devices_of_other_makers(devices: str, names: set[str]) -> None:
    """llama.cpp's backends for AMD's and Apple's cards have names of their own, and number their own cards."""
    other = Problem.build(graph_of("llama"), gdp.Cluster.parse(devices))
    units = llama_cpp.TARGET.read_units(other)
    lines = llama_cpp.TARGET.write(other, units, np.arange(units.num_units) * 2 // units.num_units)
    assert set(re.findall(r"=(\w+)'", lines)) == names
    assert {"-dev ROCm0,ROCm1", "-dev MTL0", "-dev CUDA0,ROCm0"} & set(lines.splitlines())


@pytest.mark.parametrize("cuts", [(1, 3), (2,), ()])
def test_partition_of_vllm(problem: Problem, cuts: tuple[int, ...]) -> None:
    """The partition for vLLM counts the layers of each rank."""
    units = VLLM.read_units(problem)
    devices = np.array([2, 0, 1])[np.searchsorted(cuts, np.arange(4), side="right")]
    text = VLLM.write(problem, units, devices)
    sizes = np.diff([0, *cuts, 4]).tolist()
    assert f"VLLM_PP_LAYER_PARTITION={','.join(map(str, sizes))}\n" in text
    assert f"CUDA_VISIBLE_DEVICES={','.join('201'[: len(sizes)])}\n" in text
    assert np.array_equal(read_devices(VLLM.name, text, problem, units), devices)
    # the embedding is on the first rank, the head on the last
    placed = dict(zip(problem.graph.op_names, units.place(devices).tolist(), strict=True))
    assert placed["model.embed_tokens.weight"] == devices[0]
    assert placed["lm_head.weight"] == placed["model.norm.weight"] == devices[-1]


@pytest.mark.parametrize("cuts", [(1, 3), (4, 5), (3,), ()])
@pytest.mark.filterwarnings("ignore::UserWarning:megatron", "ignore::DeprecationWarning")
def test_stages_of_megatron(problem: Problem, cuts: tuple[int, ...], tmp_path: Path) -> None:
    """Megatron reads the layout as the stages that were meant."""
    units = megatron.read_units(problem)
    assert units.num_units == 6
    devices = np.array([1, 0, 2])[np.searchsorted(cuts, np.arange(6), side="right")]
    text = megatron.write(problem, units, devices)
    assert np.array_equal(read_devices(megatron.NAME, text, problem, units), devices)
    (tmp_path / "megatron.env").write_text(text)
    # the layout is for the shell, the GPUs are for what it starts
    command = ["sh", "-c", '. ./megatron.env; echo "$PIPELINE_LAYOUT"; env']
    sourced = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    first, *variables = sourced.stdout.splitlines()
    assert first == megatron.layout(units, devices)
    assert any(re.fullmatch(r"CUDA_VISIBLE_DEVICES=[0-2,]+", variable) for variable in variables)
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    found = layouts.PipelineParallelLayerLayout.from_str(megatron.layout(units, devices), len(cuts) + 1)
    found.validate_layer_layout(num_layers=4, mtp_num_layers=None)
    stages = [[layer.name for (layers,) in [rank] for layer in layers] for rank in found.layout]
    chain = ["embedding", *["decoder"] * 4, "loss"]
    assert stages == [part.tolist() for part in np.split(np.array(chain), cuts)]


def test_models_of_other_names() -> None:
    """Models of other names are refused in one line."""
    cluster = gdp.Cluster.parse("2xp100-pcie-16g")
    with pytest.raises(InputError, match="no GGUF tensor for the parameters of 'bert"):
        llama_cpp.TARGET.read_units(Problem.build(graph_of("bert"), cluster))
    flat = gdp.Graph.build("flat", [gdp.graph.graph.Op("a", "mm")], [])
    for read_units in (llama_cpp.TARGET.read_units, VLLM.read_units, megatron.read_units):
        with pytest.raises(InputError, match="its ops have no module paths"):
            read_units(Problem.build(flat, cluster))
    two = [
        gdp.graph.graph.Op(f"{op}", "mm", 10**9, module=f"{op}") for op in ("encoder.0", "encoder.1", "dec.0", "dec.1")
    ]
    chain = gdp.Graph.build("two", two, [gdp.graph.graph.Tensor(op, (op + 1,), 4) for op in range(3)])
    for read_units in (llama_cpp.TARGET.read_units, VLLM.read_units, megatron.read_units):
        with pytest.raises(InputError, match=r"has layers in encoder and in dec; .*try torch-pipelining"):
            read_units(Problem.build(chain, cluster))
    with pytest.raises(InputError, match="a rank is a GPU"):
        VLLM.read_units(Problem.build(graph_of("llama"), gdp.Cluster.parse("2xcpu-16core")))
