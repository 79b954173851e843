"""Answers on serving: layers in order by default, groups in flight, the share of memory that vLLM takes."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_cases import machine
from gdp.cli import main
from gdp.planning.plan_source import PlanSource
from gdp.simulator.plan import Plan

SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
# a token of a layer: keys and values of 2 heads of 64 in 4 bytes
CACHE_BYTES = 4 * 2 * 2 * 64 * 4
SEARCH = ["--budget", "60sims", "--threads", "1", "--no-cache"]
Place = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of captured graphs that all tests share, beside their models."""
    directory = tmp_path_factory.mktemp("serving")
    for name, architecture, more in (("llama", "LlamaForCausalLM", {}), ("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS)):
        (directory / name).mkdir()
        config = {"architectures": [architecture], "model_type": name, **SIZES, **more}
        (directory / name / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def place(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    """Calls `gdp place --json`, decode by default: returns the status, the answer, and what it notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "cache"))

    def run(model: str, *options: str, phase: str = "decode") -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        asked = ["place", f"hf:{cache}/{model}", "--phase", phase, *SEARCH, "--json", *options]
        status = main(asked)
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else {}, err

    return run


def limits(size: str, count: int) -> list[str]:
    return [word for gpu in range(count) for word in ("--max-memory", f"gpu{gpu}={size}")]


def devices_of_layers() -> list[set[int]]:
    """The devices of each layer in plan.json."""
    plan = Plan.load("plan.json")
    graph = PlanSource(plan).read().graph
    layers: dict[int, set[int]] = {}
    for module, device in zip(graph.modules, plan.placement.tolist(), strict=True):
        if match := re.match(r"model\.layers\.(\d+)", module):
            layers.setdefault(int(match[1]), set()).add(device)
    return [layers[number] for number in sorted(layers)]


def test_layers_are_whole_and_in_order_by_default(place: Place) -> None:
    """A decode plan has each layer on one device, in order; what single ops would take is a note, or is asked for."""
    options = ["llama?batch=64&context=1024", "--devices", "l4-24g+rtx4090-24g", *limits("0.15GiB", 2)]
    status, answer, notes = place(*options)
    assert status == 0
    assert answer["advice"]["what_ifs"]
    layers = devices_of_layers()
    assert all(len(devices) == 1 for devices in layers)
    order = [min(devices) for devices in layers]
    assert np.count_nonzero(np.diff(order)) == 1
    assert main(["export", "plan.json", "--to", "vllm", "--json"]) == 0
    _, free, _ = place(*options, "--parallel", "none")
    assert free["step_time_ns"] <= answer["step_time_ns"]
    if free["step_time_ns"] < answer["step_time_ns"]:
        assert "no server runs it (--parallel none has it)" in notes


def test_equal_cards_cut_layers_where_that_is_faster(
    place: Place, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On equal cards servers' tensor parallelism is looked at unasked: as fast as asked for, faster than stages."""
    options = ["llama?batch=64&context=1024", "--devices", "2xl4-24g", *limits("0.15GiB", 2)]
    _, answer, _ = place(*options)
    _, asked, _ = place(*options, "--parallel", "tensor=2")
    _, stages, _ = place(*options, "--for", "vllm")
    assert answer["layout"]["tensor"] == asked["layout"]["tensor"] == 2
    assert answer["step_time_ns"] == asked["step_time_ns"] < stages["step_time_ns"]
    assert answer["serving"] == asked["serving"]
    assert main(["simulate", answer["plan"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["serving"] == answer["serving"]
    # the same limits asked for with and without the tool are two questions to the cache of plans
    layouts = []
    for words in (["--reserve", "8%", "--no-advice"], ["--for", "vllm"]):
        asked = ["place", f"hf:{cache}/{options[0]}", "--phase", "decode", *SEARCH[:-1], "--json", *options[1:], *words]
        assert main(asked) == 0
        layouts.append((json.loads(capsys.readouterr().out).get("layout") or {}).get("tensor"))
    assert layouts == [2, None]


def test_experts_may_be_on_a_cpu_by_default(place: Place) -> None:
    """With one card and a CPU the default is what llama.cpp runs with experts apart: as good as asked for by name."""
    options = ["qwen3_moe?batch=1&context=256", "--devices", "l4-24g+cpu-16core", "--max-memory", "gpu0=8MiB"]
    _, answer, _ = place(*options)
    _, named, _ = place(*options, "--for", "llama-cpp", "--split-layers")
    _, whole, _ = place(*options, "--for", "llama-cpp")
    assert answer["status"] == "ok"
    assert answer["step_time_ns"] <= 1.001 * named["step_time_ns"]
    assert answer["step_time_ns"] <= 1.01 * whole["step_time_ns"]


def test_groups_in_flight_tell_the_rates_of_one_and_of_all(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Two groups of 4 sequences have two caches; the machine has the rate of the stream, a group that of a step."""
    model, devices = "llama?batch=4&context=512", ["--devices", "2xl4-24g", *limits("15MiB", 2)]
    status, answer, _ = place(model, "--batches", "2", *devices)
    assert status == 0
    serving, throughput = answer["serving"], answer["throughput"]
    assert serving["cache_bytes"] == 2 * 4 * 512 * CACHE_BYTES
    assert serving["tokens_per_second"] == pytest.approx(4 * throughput["batches_per_second"])
    assert serving["time_per_token_ns"] == throughput["latency_ns"]
    one = serving["one_group"]
    assert one["tokens_per_second"] == pytest.approx(4e9 / one["time_per_token_ns"])
    assert one["tokens_per_second"] < serving["tokens_per_second"] <= 2 * one["tokens_per_second"] * 1.001
    assert all(len(devices) == 1 for devices in devices_of_layers())
    assert main(["simulate", "plan.json", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["serving"]
    assert {name: serving[name] for name in again} == again
    assert main(["simulate", "plan.json"]) == 0
    assert "2 groups of 4 sequences in flight, a token each in" in capsys.readouterr().out
    assert main(["report", "plan.json"]) == 0
    page = Path("report.html").read_text()
    assert "tokens per second: 2 groups of 4 sequences" in page
    assert re.search(r'"cache":[1-9]', page)


def test_replicas_are_servers(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """An export to vLLM has a command for each replica with its layers and cards, and the time of a group and a token.

    The step time is that of the whole run, 4 rounds of 4 groups.
    """
    model, devices = "llama?batch=4&context=512", ["--devices", "4xl4-24g", *limits("15MiB", 4)]
    status, answer, _ = place(model, "--batches", "4", *devices)
    assert (status, answer["layout"]["data"]) == (0, 2)
    plan = Plan.load("plan.json")
    graph = PlanSource(plan).read().graph
    assert main(["export", "plan.json", "--to", "vllm", "--json"]) == 0
    exported = json.loads(capsys.readouterr().out)
    commands = exported["content"].splitlines()[1:]
    for replica, command in enumerate(commands):
        found = re.match(r"VLLM_PP_LAYER_PARTITION=([\d,]+) CUDA_VISIBLE_DEVICES=([\d,]+) vllm serve MODEL ", command)
        assert found is not None
        sizes, cards = ([int(number) for number in text.split(",")] for text in found.groups())
        layers = [
            {d for op, d in enumerate(plan.placement) if graph.replicas[op] == replica and path in graph.modules[op]}
            for path in (f"model.layers.{number}." for number in range(4))
        ]
        assert layers == [{card} for card, size in zip(cards, sizes, strict=True) for _ in range(size)]
        assert command.endswith(f" --port {8000 + replica}")
    assert exported["notes"] == ["2 servers, a line of the file each: on gpu0, gpu1; on gpu2, gpu3."]
    assert exported["throughput"] == answer["throughput"]
    assert exported["step_time_ns"] == answer["step_time_ns"] > 15 * answer["throughput"]["time_per_batch_ns"]
    assert main(["export", "plan.json", "--to", "vllm"]) == 0
    group_ms, token_ms = (answer["throughput"][name] / 1e6 for name in ("time_per_batch_ns", "latency_ns"))
    line = capsys.readouterr().out.splitlines()[1]
    group, token = map(float, re.findall(r"([\d.]+) ms", line))
    assert "a group, as in the plan; with 4 in flight a token takes" in line
    assert (group, token) == (pytest.approx(group_ms, rel=1e-3), pytest.approx(token_ms, rel=1e-3))
    assert main(["export", "plan.json", "--to", "hf-device-map"]) == 2
    assert "has 2 replicas in flight, which hf-device-map does not take; export to vllm" in capsys.readouterr().err


def test_share_of_vllm(place: Place, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM takes 0.92 of a card: what is beyond lacks bytes, unless --reserve says else; the file has the share."""
    command = ["llama?batch=4&context=512", "--devices", "l4-24g"]
    status, answer, _ = place(*command, "--for", "vllm")
    assert status == 0
    assert Plan.load("plan.json").question.options["reserve"] == "8%"
    for options, share in (([], "0.92"), (["--reserve", "3%"], "0.97"), (["--reserve", "0%"], "1")):
        assert main(["export", "plan.json", *options, "--to", "vllm"]) == 0
        assert f"--gpu-memory-utilization {share}\n" in Path("vllm.env").read_text()
    peak = answer["peak_memory_bytes"][0]
    machine([1.0], f"{int(peak / 0.95)}B").save("card.yaml")
    status, _, notes = place(command[0], "--devices", "card.yaml", "--for", "vllm")
    assert status == 3
    lacking = re.search(r"d0 lacks (\d+) bytes", notes)
    assert lacking is not None
    assert int(lacking[1]) == pytest.approx(peak - 0.92 / 0.95 * peak, abs=2)
    assert place(command[0], "--devices", "card.yaml", "--for", "vllm", "--reserve", "0%")[0] == 0
    assert place(command[0], "--devices", "card.yaml")[0] == 0  # nobody asked for vLLM
    assert main(["export", "plan.json", "--to", "vllm"]) == 3
    assert "lacks" in capsys.readouterr().err
    assert main(["place", f"hf:{cache}/{command[0]}", "--phase", "decode", *SEARCH, "--devices", "card.yaml"]) == 0
    following = capsys.readouterr().out.rpartition("Next: gdp ")[2]
    assert following == "export plan.json --to vllm --reserve 4%\n"  # peak / 0.95 is rounded down: not 5% is left
    assert main(following.split()) == 0


def test_exports_of_caches(place: Place, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command of a cache that vLLM lacks names llama.cpp. An export needs the plan alone: where MODEL is
    elsewhere the tool is told no context."""
    model = cache / "moved"
    shutil.copytree(cache / "llama", model)
    command = ["place", f"hf:{model}?batch=4&context=512", "--phase", "decode", *SEARCH, "--devices", "l4-24g"]
    assert main([*command, "--kv-cache", "q8_0"]) == 0
    following = capsys.readouterr().out.rpartition("Next: gdp ")[2]
    assert following == "export plan.json --to llama-cpp\n"
    assert main(following.split()) == 0
    assert Path("override_tensor.txt").read_text().startswith("-c 2048\n-np 4\n-ctk q8_0 -ctv q8_0\n")
    assert main([*command, "--kv-cache", "fp8", "--out", "plans"]) == 0
    following = capsys.readouterr().out.rpartition("Next: gdp ")[2]
    assert following == "export plans/plan.json --to vllm\n"
    assert main([*following.split(), "--out", "vllm.env"]) == 0
    assert "--max-model-len 512" in Path("vllm.env").read_text()
    shutil.rmtree(model)
    assert main([*following.split(), "--out", "vllm.env"]) == 0
    content = Path("vllm.env").read_text()
    assert "fp8" in content
    assert "--max-model-len" not in content


def test_hints_name_options_that_the_request_takes(
    place: Place, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of more sequences and of groups in flight the answer names the options, but for a target, which refuses them."""
    model = f"hf:{cache}/llama?batch=3&context=512"
    asked = ["place", model, "--phase", "decode", *SEARCH, "--devices", "l4-24g+rtx4090-24g", *limits("15MiB", 2)]
    hints = {}
    for options in ((), ("--batch", "3"), ("--for", "vllm")):
        assert main([*asked, *options]) == 0
        hints[options] = capsys.readouterr().out
        assert re.search(r"By their caches \d+ have room", hints[options])
    listed = re.search(r"By their caches (\d+) have room: --sweep batch=(\S+) has their times", hints[()])
    assert listed is not None
    assert listed[2] == f"3,4,{listed[1]}"
    assert ["--batches 2" in hint for hint in hints.values()] == [True, True, False]
    assert ["--sweep" in hint for hint in hints.values()] == [True, False, False]


def test_sweep_of_sequences(place: Place) -> None:
    """Each row has tokens per second, the time per token, that of the first, the cache, and whether it fits.

    The prefill of a prompt of 512 tokens is the same for all, and its layers are where those of the row are.
    """
    status, answer, _ = place(
        "llama?context=512", "--sweep", "batch=4..16", "--devices", "l4-24g", *limits("30MiB", 1), "--out", "rows"
    )
    assert status == 0
    rows = answer["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "infeasible"]  # 9.4 MB of weights, 2.1 MB a sequence
    for row in rows[:2]:
        serving = row["serving"]
        assert serving["time_per_token_ns"] == row["step_time_ns"]
        assert serving["tokens_per_second"] == pytest.approx(row["batch"] * 1e9 / row["step_time_ns"])
        assert serving["cache_bytes"] == row["batch"] * 512 * CACHE_BYTES
    first = {row["serving"]["time_to_first_token_ns"] for row in rows[:2]}
    _, prefill, _ = place("llama?batch=1&sequence=512", "--devices", "l4-24g", phase="prefill")
    assert first == {prefill["step_time_ns"]}
    assert "time per token in ms" in Path("rows/sweep.svg").read_text()
    _, answer, _ = place("llama?context=512", "--parallel", "tensor=2", "--sweep", "machines=2xl4-24g,l4-24g")
    assert [row["tokens_per_second"] is None for row in answer["rows"]] == [False, True]


def test_requests_by_arithmetic(place: Place) -> None:
    """A request of 128 + 384 tokens takes a prefill and 384 steps, shared by 4 sequences; figures are by hand."""
    options = ["--devices", "l4-24g", "--requests", "2"]
    status, answer, _ = place("llama?batch=4&context=512&prompt=128", *options)
    assert status == 0
    _, prefill, _ = place("llama?batch=1&sequence=128&context=512", "--devices", "l4-24g", phase="prefill")
    prefill_s, step_s = prefill["step_time_ns"] / 1e9, answer["step_time_ns"] / 1e9
    requests = answer["requests"]
    assert requests["most_per_second"] == pytest.approx(1 / (prefill_s + 384 * step_s / 4))
    busy = 2 * prefill_s
    at = requests["at"]
    assert at["time_per_token_ns"] == pytest.approx(1e9 * step_s / (1 - busy))
    waits_s = step_s / 2 + busy * prefill_s / (2 * (1 - busy))
    assert at["time_to_first_token_ns"] == pytest.approx(1e9 * (prefill_s + waits_s))
    _, more, _ = place("llama?batch=4&context=512&prompt=128", *options[:2], "--requests", "1000")
    assert more["requests"]["at"]["time_per_token_ns"] is None


def test_requests_to_groups(place: Place) -> None:
    """With two groups in two stages a prefill ends as often as the busier stage is free, a step as in the stream."""
    devices = ["--devices", "2xl4-24g", *limits("15MiB", 2)]
    _, answer, _ = place("llama?batch=4&context=512&prompt=128", "--batches", "2", *devices)
    requests = answer["requests"]
    assert requests["step_ns"] == answer["throughput"]["time_per_batch_ns"]
    assert requests["token_ns"] == answer["throughput"]["latency_ns"]
    assert requests["first_token_ns"] / 2 <= requests["prefill_ns"] < requests["first_token_ns"]


@pytest.mark.parametrize(
    ("model", "options", "phase", "problem"),
    [
        ("llama", ["--requests", "1"], "decode", "the prompt of one: hf:DIR?prompt=1024"),
        ("llama?prompt=8", ["--requests", "1"], "prefill", "add --phase decode"),
        ("llama?prompt=8", ["--requests", "0"], "decode", "a rate per second above 0"),
        ("llama?prompt=8", ["--requests", "1", "--sweep", "batch=1"], "decode", "--sweep"),
        ("llama?prompt=64&context=64", [], "decode", "prompt is 64, and context 64"),
        ("llama?prompt=64", [], "prefill", "give a prefill its sequence"),
    ],
)
def test_requests_that_make_no_sense(place: Place, model: str, options: list[str], phase: str, problem: str) -> None:
    """What cannot be served is refused in one line, and nothing is written."""
    status, _, err = place(model, "--devices", "l4-24g", *options, phase=phase)
    assert status == 2
    assert problem in err.strip().splitlines()[-1]
    assert not Path("plan.json").exists()
