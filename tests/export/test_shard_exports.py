"""`gdp export` of layouts with shards: PyTorch trains with its module, and other tools read their options."""

import json
import shlex
from copy import copy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_models import MODELS
from layout_training import train

import gdp
from execute.rank_processes import start_ranks, statuses_of
from gdp.cli import main
from gdp.errors import InputError
from gdp.export.export_target import cards_of
from gdp.export.exported_plan import Exported, check_takes_layout, exported
from gdp.export.layouts.target import CutStep
from gdp.export.servers import SGLANG, TENSORRT_LLM, VLLM
from gdp.export.targets_by_name import LAYOUT_TARGETS, TARGETS
from gdp.models.model import Reading
from gdp.models.serving import Serving
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.search.question import plan_of
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from tests.models.shard_cases import case
from tests.models.test_served_shards import text_of


def planned(
    text: str,
    model: str = "grouped",
    devices: str = "4xp100-pcie-16g",
    *,
    training: bool = True,
    of: ModelSource | None = None,
) -> tuple[Problem, Plan, ModelSource]:
    """A plan of a layout with shards whose replicas are on neighbouring groups, and the model."""
    layout = Layout.parse(text)
    source = of or ModelSource.of_example(MODELS[model](), Reading(training=training))
    local = source.sharded(layout.shards)
    shards = local.reading.shards
    graph, cluster = local.whole().graph, gdp.Cluster.parse(devices).grouped(shards.num_ranks)
    step = Step.of(graph, layout.of_groups)
    problem = Problem.build(step.graph, cluster)
    placement = step.placement(np.zeros(graph.num_ops, np.int64), np.arange(layout.data).reshape(-1, 1))
    plan = plan_of(simulate(problem, placement), 0, "by hand", 0)
    asked = replace(plan.question, options={"inference": not training})
    document = step.document() | shards.document() | {"data": layout.num_copies}
    document["batch"] = layout.num_parts * shards.samples
    return problem, replace(plan, layout=document, asked=asked), source


def for_tool(tool: str, text: str, **options: Any) -> Exported:
    problem, plan, source = planned(text, **options)
    return exported(problem, plan, LAYOUT_TARGETS[tool], source)


@pytest.mark.parametrize(
    ("tool", "tensor", "remedy"),
    [("torchtitan", 4, "place with tensor=2"), ("megatron", 8, "place with tensor=4"), ("megatron", 4, "")],
)
def test_heads_that_a_tool_does_not_divide(tool: str, tensor: int, remedy: str) -> None:
    """Four heads, two of them of keys: tools refuse ranks without heads of their own, torchtitan such that share a head
    of keys. So does the export, with the most that the tool takes."""
    model, inputs = case("llama")
    source = ModelSource.of_example((model, (), inputs))
    text, devices = f"tensor={tensor},microbatches=2", f"{tensor}xa100-sxm-80g"
    if remedy:
        with pytest.raises(InputError, match=f"MODEL has 4, 2 of them of keys, for {tensor} ranks; {remedy}"):
            for_tool(tool, text, of=source, devices=devices)
    else:
        assert "--tensor-model-parallel-size 4" in for_tool(tool, text, of=source, devices=devices).content


def test_parts_train_as_the_whole(tmp_path: Path) -> None:
    """Two ranks that have parts of a model, also of its tokens, have the loss and gradients of the whole one."""
    cases = [
        ("grouped", "tensor=2,sequence=off"),
        ("grouped", "tensor=2,microbatches=2"),
        ("grouped", "tensor=2,recompute=blocks"),
        ("blocks", "tensor=2"),
    ]
    names = [f"{model}_{number}" for number, (model, _) in enumerate(cases)]
    for name, (model, text) in zip(names, cases, strict=True):
        tmp_path.joinpath(f"{name}.py").write_text(for_tool("torch-fsdp", text, model=model).content)
    assert statuses_of(start_ranks(train, tmp_path, 2, *names), patience_seconds=240) == [0, 0]
    assert (tmp_path / "equal.txt").read_text().split() == names


def test_replicas_of_parts(tmp_path: Path) -> None:
    """Four ranks, two for each replica, train as one device, with and without ZeRO."""
    names = []
    for number, text in enumerate(("", ",zero=2,microbatches=2", ",zero=3")):
        names.append(f"grouped_{number}")
        tmp_path.joinpath(f"{names[-1]}.py").write_text(for_tool("torch-fsdp", f"data=2,tensor=2{text}").content)
    assert statuses_of(start_ranks(train, tmp_path, 4, *names), patience_seconds=240) == [0] * 4
    assert (tmp_path / "equal.txt").read_text().split() == names


def test_degrees_of_training_tools() -> None:
    """Megatron-LM and torchtitan get the degree, and whether tokens are cut; ranks of a group are neighbours."""
    both = [for_tool(tool, "data=2,tensor=2,zero=1").content for tool in ("megatron", "torchtitan")]
    assert "--tensor-model-parallel-size 2 " in both[0]
    assert "--sequence-parallel " in both[0]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in both[0]
    assert "CONNECTIONS" not in for_tool("megatron", "data=4").content + both[1]
    assert all("CUDA_VISIBLE_DEVICES=0,1,2,3\n" in text for text in both)
    words = shlex.split(for_tool("torchtitan", "data=2,tensor=2,sequence=off").content.partition('"$@"')[2])
    assert words[words.index("--parallelism.tensor_parallel_degree") + 1] == "2"
    assert "--sequence-parallel" not in for_tool("megatron", "data=2,tensor=2,sequence=off").content
    manager = pytest.importorskip("torchtitan.config.manager")
    config = manager.ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b", *words]).parallelism
    degrees = config.tensor_parallel_degree, config.data_parallel_replicate_degree, config.data_parallel_shard_degree
    assert (*degrees, config.enable_sequence_parallel) == (2, 2, 1, False)


def test_ranks_of_a_sequence() -> None:
    """Megatron-LM and torchtitan get the number of ranks of a sequence; other tools have none."""
    text = "data=2,context=2,sequence=off,tensor=2,zero=1"
    steps = [for_tool(tool, text, devices="8xp100-pcie-16g") for tool in ("megatron", "torchtitan")]
    assert all("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n" in each.content for each in steps)
    words = [shlex.split(each.content.partition('"$@"')[2]) for each in steps]
    expected = [
        {f"--{name}-size": 2 for name in ("tensor-model-parallel", "context-parallel", "global-batch")},
        {f"--parallelism.{name}_degree": 2 for name in ("tensor_parallel", "context_parallel", "data_parallel_shard")}
        | {"--parallelism.fsdp_reshard_after_forward": "never"},
    ]
    for own, values in zip(words, expected, strict=True):
        assert {name: own[own.index(name) + 1] for name in values} == {name: str(each) for name, each in values.items()}
    step = steps[1].step
    assert isinstance(step, CutStep)
    assert any("cuts parameters over ranks of a group" in note for note in LAYOUT_TARGETS["torchtitan"].notes(step))
    for tool in ("torch-fsdp", "transformers"):
        with pytest.raises(InputError, match=f"{tool}: has no context shards; export to torchtitan or megatron"):
            for_tool(tool, "context=2")
    manager = pytest.importorskip("torchtitan.config.manager")
    config = manager.ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b", *words[1]]).parallelism
    assert (config.tensor_parallel_degree, config.context_parallel_degree) == (2, 2)


def test_ranks_with_samples_and_experts_of_their_own() -> None:
    """Two samples on two replicas that share their experts: Megatron-LM and torchtitan get one a rank. FSDP, whose
    ranks torchtitan places experts on, cuts parameters as well; torch-fsdp has no experts."""
    model, inputs = case("mixtral")
    source = ModelSource.of_example((model, (), inputs))
    words = [
        shlex.split(for_tool(tool, "data=2,expert=2", of=source).content.partition('"$@"')[2])
        for tool in ("megatron", "torchtitan")
    ]
    expected = [
        {"--micro-batch-size": 1, "--global-batch-size": 2, "--expert-model-parallel-size": 2}
        | {"--expert-tensor-parallel-size": 1},
        {"--training.local_batch_size": 1, "--training.global_batch_size": 2}
        | {f"--parallelism.{name}_degree": 2 for name in ("data_parallel_shard", "expert_parallel")},
    ]
    for own, values in zip(words, expected, strict=True):
        assert {name: own[own.index(name) + 1] for name in values} == {name: str(each) for name, each in values.items()}
    assert words[1].index("--training.disable_cuda_graphs") < words[1].index("activation-checkpoint:none")
    with pytest.raises(InputError, match="torch-fsdp: has no expert shards; export to torchtitan or megatron"):
        for_tool("torch-fsdp", "data=2,expert=2", of=source)
    model, inputs = case("mixtral", num_key_value_heads=4)
    four = ModelSource.of_example((model, (), inputs))
    with pytest.raises(InputError, match="no ranks that share an expert; place with expert=4, or export to megatron"):
        assert for_tool("torchtitan", "tensor=4,expert=2", of=four).content
    with pytest.raises(InputError, match="with tokens cut alone; place with sequence=on"):
        assert for_tool("megatron", "tensor=2,sequence=off", of=source).content


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 64}


def test_the_next_command_of_a_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where tokens are cut over ranks, the command that an answer ends with is the export to torchtitan, since
    torch-fsdp has no such ranks; the batch of one group, four samples, is that of MODEL."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("llama").mkdir()
    tmp_path.joinpath("llama", "config.json").write_text(json.dumps(LLAMA | SIZES))
    place = ["place", "hf:llama?batch=4&sequence=8", "--devices", "2xl4-24g", "--budget", "9sims", "--no-advice"]
    assert main([*place, "--parallel", "context=2", "--out", "plans"]) == 0
    command = capsys.readouterr().out.rpartition("Next: gdp ")[2].split()
    assert command == ["export", "plans/plan.json", "--to", "torchtitan"]
    assert main(command) == 0
    assert "--training.global_batch_size 4 " in tmp_path.joinpath("plans", "torchtitan.sh").read_text()


def test_overlap_is_of_megatron() -> None:
    """Megatron-LM overlaps, and a note says so of plans that do not; other tools wait, and refuse plans with it."""
    for text, is_noted in (("tensor=2", True), ("tensor=2,overlap=on", False)):
        step = for_tool("megatron", text).step
        assert isinstance(step, CutStep)
        assert any("place with overlap=on" in note for note in LAYOUT_TARGETS["megatron"].notes(step)) == is_noted
    with pytest.raises(InputError, match="place without overlap, or export to megatron"):
        for_tool("torchtitan", "tensor=2,overlap=on")


def test_degrees_of_servers() -> None:
    """Servers get the ranks of a group as their tensor degree, and the cards of it next to each other."""
    problem, plan, _ = planned("tensor=2", training=False)
    texts = {name: exported(problem, plan, TARGETS[name]).content for name in ("vllm", "sglang", "tensorrt-llm")}
    share = "--gpu-memory-utilization 0.92"
    for name in ("vllm", "sglang"):
        assert "PP_LAYER_PARTITION=2\nCUDA_VISIBLE_DEVICES=0,1\n" in texts[name]
    within = TARGETS["vllm"].within_share(problem)
    command = f"# vllm serve MODEL --tensor-parallel-size 2 --pipeline-parallel-size 1 {share}\n"
    assert exported(within, plan, TARGETS["vllm"]).content.startswith(command)
    assert texts["sglang"].startswith("# python -m sglang.launch_server --model-path MODEL --tp-size 2 --pp-size 1\n")
    assert texts["tensorrt-llm"] == (
        "# CUDA_VISIBLE_DEVICES=0,1 trtllm-serve MODEL --extra_llm_api_options tensorrt-llm.yaml\n"
        "tensor_parallel_size: 2\npipeline_parallel_size: 1\npp_partition: [2]\n"
    )


@pytest.mark.parametrize(("tensor", "remedy"), [(2, ""), (8, "place with tensor=4")])
def test_servers_of_a_decode_step(tensor: int, remedy: str, tmp_path: Path) -> None:
    """Servers are told the tokens of a sequence and the type of the cache that the plan has, and heads that they do not
    divide are refused, though the module of a decode step is built with its cache."""
    text = text_of("llama", tmp_path)
    source = ModelSource(text, Reading(training=False, serving=Serving("decode", Fraction(1))))
    problem, plan, _ = planned(f"tensor={tensor}", training=False, of=source, devices=f"{tensor}xa100-sxm-80g")
    options = {
        "vllm": "--max-model-len 9 --kv-cache-dtype fp8",
        "sglang": "--context-length 9 --kv-cache-dtype fp8_e4m3",
        "tensorrt-llm": "max_seq_len: 9\nkv_cache_config: {dtype: fp8}\n",
    }
    for name, expected in options.items():
        if remedy:
            with pytest.raises(InputError, match=f"MODEL has 4, 2 of them of keys, for 8 ranks; {remedy}"):
                exported(problem, plan, TARGETS[name], source)
        else:
            assert expected in exported(problem, plan, TARGETS[name], source).content


def test_caches_of_served_steps(tmp_path: Path) -> None:
    """Tools are told the context that a plan assumes where MODEL does not say it, 64 positions here, and llama.cpp the
    tokens of both sequences. A type of the cache that a tool lacks is refused."""
    pytest.importorskip("gguf")
    text = text_of("llama", tmp_path).partition("&")[0]
    cases = [
        ("vllm", None, "--max-model-len 64 --pipe"),
        ("vllm", Fraction(2), "--max-model-len 64 --pipe"),
        ("vllm", Fraction(17, 16), "keeps 1 or 2 bytes of an element in its cache, and the plan 1.0625; place with"),
        ("llama-cpp", None, "-c 128\n-np 2\n-ngl 3\n"),
        ("llama-cpp", Fraction(17, 16), "-c 128\n-np 2\n-ctk q8_0 -ctv q8_0\n-ngl 3\n"),
        ("llama-cpp", Fraction(9, 16), "-ctk q4_0 -ctv q4_0\n"),
        ("llama-cpp", Fraction(1), "has no cache of 1 bytes an element; place with --kv-cache q8_0"),
    ]
    for name, element_bytes, expected in cases:
        source = ModelSource(text, Reading(training=False, serving=Serving("decode", element_bytes)))
        problem = Problem.build(source.whole().graph, "p100-pcie-16g")
        plan = plan_of(simulate(problem, np.zeros(problem.num_ops, np.int64)), 0, "by hand", 0)
        if "place with" in expected:
            with pytest.raises(InputError, match=expected):
                exported(problem, plan, TARGETS[name], source)
        else:
            assert expected in exported(problem, plan, TARGETS[name], source).content


def test_what_servers_cannot_be_told() -> None:
    """A server over two hosts is started by more than a file, and vLLM takes one share of the memory of all cards."""
    graph = ModelSource.of_example(MODELS["grouped"](), Reading(training=False)).whole().graph
    for devices, limits, reason in (
        ("2x(1xa100-sxm-80g)@100gbit", {}, "vllm: a server is on 2 hosts"),
        ("2xa100-sxm-80g", {"gpu0": 2**33}, "vllm: takes the same share of the memory of all cards; place with --res"),
        ("2xa100-sxm-80g", {"gpu0": 2**33, "gpu1": 2**33}, ""),
    ):
        problem = Problem.build(graph, devices, max_memory_bytes=limits)
        units = TARGETS["vllm"].read_units(problem)
        plan = plan_of(simulate(problem, (units.index >= 1).astype(np.int64)), 0, "by hand", 0)
        if reason:
            with pytest.raises(InputError, match=reason):
                exported(problem, plan, TARGETS["vllm"]).content  # noqa: B018
        else:
            assert "--gpu-memory-utilization 0.1017" in exported(problem, plan, TARGETS["vllm"]).content


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (
            "data=2,expert=2",
            {
                "vllm": "--data-parallel-size 2 --enable-expert-parallel",
                "sglang": "--tp-size 2 --dp-size 2 --enable-dp-attention --ep-size 2",
                "tensorrt-llm": "\ntensor_parallel_size: 2\nenable_attention_dp: true\nmoe_expert_parallel_size: 2\n",
            },
        ),
        (
            "tensor=2,expert=2",
            {
                "vllm": "--tensor-parallel-size 2 --enable-expert-parallel",
                "sglang": "--tp-size 2 --ep-size 2",
                "tensorrt-llm": "\ntensor_parallel_size: 2\nmoe_expert_parallel_size: 2\n",
            },
        ),
    ],
)
def test_experts_of_servers(parallel: str, options: dict[str, str]) -> None:
    """Servers place whole experts on each card of a group, beside parts of attention, or of the requests."""
    model, inputs = case("mixtral")
    del inputs["labels"]
    source = ModelSource.of_example((model, (), inputs), Reading(training=False))
    problem, plan, _ = planned(parallel, training=False, of=source)
    for name, text in options.items():
        check_takes_layout(plan, TARGETS[name])
        assert text in exported(problem, plan, TARGETS[name]).content
    halves = replace(plan, layout=dict(plan.layout or {}) | Shards(4, expert=2).document())
    with pytest.raises(InputError, match="which vllm does not take"):
        check_takes_layout(halves, TARGETS["vllm"])


def test_stages_of_ranks_with_requests_of_their_own() -> None:
    """vLLM numbers the stages of such a rank one behind the other; the others, the ranks of a stage."""
    problem = Problem.build(planned("tensor=2")[0].graph, gdp.Cluster.parse("4xp100-pcie-16g").grouped(2))
    visible = {
        tool.name: replace(tool, shards=Shards(expert=2))._visible(problem, [0, 1])
        for tool in (VLLM, SGLANG, TENSORRT_LLM)
    }
    assert visible == {"vllm": "0,2,1,3", "sglang": "0,1,2,3", "tensorrt-llm": "0,1,2,3"}


def test_cards_left_out_of_groups_keep_their_numbers() -> None:
    """Of two slow cards and four fast ones, groups of four are cards 2 to 5."""
    cluster = gdp.Cluster.parse("2xp100-pcie-16g+4xa100-sxm-80g").grouped(4)
    problem = Problem.build(planned("tensor=2")[0].graph, gdp.Cluster.parse("4xp100-pcie-16g").grouped(2))
    assert cards_of(replace(problem, cluster=cluster))[-1] == [("", number) for number in range(2, 6)]


def test_degrees_of_transformers() -> None:
    """Transformers builds its configuration from the degrees, and says that it sums gradients more often."""
    transformers = pytest.importorskip("transformers")
    problem, plan, source = planned("data=2,tensor=2,sequence=off")
    source.text = "hf:grouped"
    answer = exported(problem, plan, LAYOUT_TARGETS["transformers"], source)
    config = transformers.DistributedConfig(**json.loads(answer.content))
    assert (config.tp_size, config.dp_replicate_size, config.fsdp_size) == (2, 2, 1)
    assert any("five all-reduces" in note for note in LAYOUT_TARGETS["transformers"].notes(answer.step))


def test_mixed_precision_of_transformers() -> None:
    """Transformers loads float32 weights only where it is told to, and FSDP computes in bf16 by an option."""
    source = ModelSource.of_example(MODELS["grouped"](), Reading(precision="mixed", dtype="bfloat16"))
    for layout, is_sharded in (("data=2,tensor=2,sequence=off,zero=3", True), ("tensor=2,sequence=off", False)):
        problem, plan, _ = planned(layout, of=source)
        named = copy(source)
        named.text = "hf:grouped"
        answer = exported(problem, plan, LAYOUT_TARGETS["transformers"], named)
        assert json.loads(answer.content).get("fsdp_mixed_precision", False) == is_sharded
        notes = " ".join(LAYOUT_TARGETS["transformers"].notes(answer.step))
        assert "transformers holds float32 weights" in notes
        assert "Load MODEL with dtype=torch.float32" in notes
        assert ("give Trainer bf16=True" in notes) != is_sharded


@pytest.mark.parametrize("name", ["hf-device-map", "torch-pipelining", "onnxruntime", "openvino", "llama-cpp", "vllm"])
def test_tools_without_shards(name: str) -> None:
    """A tool that does not cut ops refuses them in one line, and names those that do."""
    _, plan, _ = planned("tensor=2")
    with pytest.raises(InputError, match=f"which {name} does not take; export to torch-fsdp, torchtitan or megatron"):
        check_takes_layout(plan, TARGETS[name])


def test_modules_that_are_not_cut() -> None:
    """Weights that PyTorch's styles do not cut as the plan does are named, with a remedy."""
    problem, plan, source = planned("tensor=2", "tied")
    with pytest.raises(InputError, match=r"torch-fsdp: layers.0.self_attn.in_proj_weight is of a MultiheadAttention"):
        exported(problem, plan, LAYOUT_TARGETS["torch-fsdp"], source).content  # noqa: B018
    with pytest.raises(InputError, match="is inference, and megatron trains in layouts; export to vllm"):
        exported(*planned("tensor=2", training=False)[:2], LAYOUT_TARGETS["megatron"])
