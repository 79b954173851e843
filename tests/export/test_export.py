"""`gdp export` and `gdp place --for`: figures, memory, one-line errors."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_models import graph_of
from readers import read_devices

import gdp
from gdp.budget import Budget, Clock
from gdp.cli import main
from gdp.errors import InputError
from gdp.export.adapt import adapt, simulated
from gdp.export.exportable_plan import place_for
from gdp.export.targets_by_name import LAYOUT_TARGETS, TARGETS, find_target
from gdp.graph import Graph, Op, Tensor
from gdp.graph.accumulation import accumulated
from gdp.parallel.layout import NONE
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.search.question import plan_of
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

Run = Callable[..., tuple[int, str, str]]
MIB = 2**20
LAYERS = [f"model.layers.{number}" for number in range(4)]
FOR_MODULES = [name for name in TARGETS if name not in ("onnxruntime", "openvino")]
INFERENCE = ("llama-cpp", "vllm", "sglang", "tensorrt-llm")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*args: str) -> tuple[int, str, str]:
        status = main(args)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def three_modules(resident_bytes: int = 0) -> Graph:
    """Modules a, b, c of three ops of 1 ms each on a P100 (9.3 TFLOP/s), one after the other, with a byte from each to
    the next; the first op of each module holds `resident_bytes`."""
    ops = [
        Op(f"{module}.{number}", "mm", 9_300_000_000, module=module, resident_bytes=0 if number else resident_bytes)
        for module in "abc"
        for number in range(3)
    ]
    return Graph.build("three", ops, [Tensor(op, (op + 1,), 1) for op in range(8)])


def plan_with(graph: Graph, cluster: gdp.Cluster, placement: list[int]) -> Plan:
    return plan_of(simulate(Problem.build(graph, cluster), placement), 0, "by hand", 0)


def test_modules_go_where_most_time_was() -> None:
    """A module goes where most of its time was, and the loss is simulated."""
    # 9 ops of 1 ms, one after the other; the plan crosses 7 times, the adapted one once: a byte (1 ns) and the latency
    cluster = gdp.Cluster.parse("2xp100-pcie-16g")
    problem = Problem.build(three_modules(1), cluster)
    plan = plan_with(problem.graph, cluster, [0, 1, 0, 1, 0, 1, 0, 1, 1])
    adapted = adapt(problem, plan, find_target("hf_device_map"))
    assert adapted.near is not None
    assert adapted.near.placement.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    latency = cluster.route(0, 1).latency_ns
    assert plan.step_time_ns - adapted.near.step_time_ns == 6 * (1 + latency)
    # one device crosses never
    assert plan.step_time_ns - adapted.step_time_ns == 7 * (1 + latency)
    assert json.loads(adapted.content) == {"": 0}
    assert adapted.notes == ["All of the model is on gpu0: what hf-device-map makes of the plan takes 9.051 ms a step."]
    assert adapted.loss == adapted.step_time_ns / plan.step_time_ns - 1 < 0


def test_units_that_do_not_fit(run: Run) -> None:
    """Units that do not fit where they were are moved, and a plan that cannot fit is refused."""
    # each module holds 6 MiB in its first op. By time all three belong to device 0, which has 13 MiB; 2 + 1 fit
    graph, cluster = three_modules(6 * MIB), gdp.Cluster.parse("2xp100-pcie-16g")
    limits = {"gpu0": 13 * MIB, "gpu1": 7 * MIB}
    problem = Problem.build(graph, cluster, max_memory_bytes=limits)
    plan = plan_with(graph, cluster, [0, 0, 0, 0, 0, 0, 1, 0, 0])
    adapted = adapt(problem, plan, find_target("hf-device-map"))
    assert adapted.simulation.feasible
    assert sorted(np.bincount(adapted.simulation.placement).tolist()) == [3, 6]
    # with 11 MiB and 5 MiB one op of 6 MiB has no place but gpu0, and two are 12 MiB
    plan.save("plan.json")
    graph.save("graph.json.gz")
    cluster.save("cluster.json")
    tight = ["--max-memory", "gpu0=11MiB", "--max-memory", "gpu1=5MiB"]
    status, out, err = run("export", "plan.json", "--to", "hf-device-map", *tight)
    assert status == 3
    assert out == ""
    assert "nothing fits in memory with module level: gpu" in err
    assert "bytes" in err
    assert not Path("device_map.json").exists()
    # where there is a CPU that holds what is left there, that is done
    for devices, also, fits in (
        ("2xp100-pcie-16g", [], False),
        ("2xp100-pcie-16g+cpu-16core", [], True),
        ("2xp100-pcie-16g+cpu-16core", ["--max-memory", "cpu0=5MiB"], False),
    ):
        args = ["place", "graph.json.gz", "--devices", devices, *tight, *also, "--budget", "50sims", "--no-cache"]
        status, _, err = run(*args, "--for", "hf-device-map", "--out", "offloaded")
        assert status == (0 if fits else 3)
        assert ("nothing fits" in err) != fits
        if fits:
            status, _, err = run(
                "simulate", "offloaded/graph.json.gz", "--plan", "offloaded/plan.json", "--devices", devices, *tight
            )
            assert (status, err) == (0, "")
            assert run(*args, "--out", "ordinary")[0] == 0
            assert run("export", "ordinary/plan.json", "--to", "hf-device-map", *tight)[0] == 0


def test_steps_on_the_cpu_alone() -> None:
    """A step that no GPU can hold is computed on the CPU."""
    graph, cluster = three_modules(6 * MIB), gdp.Cluster.parse("2xp100-pcie-16g+cpu-16core")
    problem = Problem.build(graph, cluster, max_memory_bytes={"gpu0": 1, "gpu1": 1})
    adapted = adapt(problem, plan_with(graph, cluster, [2] * 9), find_target("hf-device-map"))
    assert adapted.simulation.feasible
    assert json.loads(adapted.content) == {"": "cpu"}
    assert adapted.step_time_ns == simulate(problem, [2] * 9).step_time_ns


def test_unused_memory_is_noted() -> None:
    """Three weights of 6 MiB and a GPU of 13 MiB: the third is on another GPU, or on the CPU if that is too small."""
    cluster = gdp.Cluster.parse("2xp100-pcie-16g+cpu-16core")
    weights = [Op(f"{module}.weight", "parameter", module=module, resident_bytes=6 * MIB) for module in "abc"]
    products = [Op(f"{module}.mm", "aten.mm", 9_300_000_000, module=module) for module in "abc"]
    read = [Tensor(number, (3 + number,), 6 * MIB, resident=True) for number in range(3)]
    graph = Graph.build("three", [*weights, *products], [*read, Tensor(3, (4,), 1), Tensor(4, (5,), 1)])
    for size, is_offloaded in ((13, False), (5, True)):
        problem = Problem.build(graph, cluster, max_memory_bytes={"gpu0": 13 * MIB, "gpu1": size * MIB})
        adapted = adapt(problem, plan_with(graph, cluster, [0] * 6), find_target("hf-device-map"))
        assert adapted.is_offloaded == is_offloaded
        assert any("Memory is left unused: gpu1 uses 0.0 of" in note for note in adapted.notes) == is_offloaded


@pytest.mark.parametrize(("name", "training"), [(name, name not in INFERENCE) for name in FOR_MODULES])
def test_plans_for_a_target(name: str, training: bool) -> None:
    """A plan for a target is no worse than a snapped one, and its export loses nothing."""
    graph, cluster, target = graph_of("llama", training), gdp.Cluster.parse("3xp100-pcie-16g"), find_target(name)
    question = PlaceQuestion.of(graph, cluster, Constraints(), NONE, None, SearchOptions(seed=1))
    placed = place_for(target, question, Clock(Budget(simulations=300)))
    problem, plan = Problem.build(graph, cluster), placed.plan
    assert gdp.verify(problem, plan) == []
    assert plan.step_time_ns <= placed.adapted.step_time_ns
    exported = adapt(problem, plan, target)
    assert exported.step_time_ns == plan.step_time_ns
    devices = read_devices(target.name, exported.content, problem, exported.units)
    assert simulated(problem, exported.units.place(devices), plan).step_time_ns == plan.step_time_ns
    if name in ("llama-cpp", "megatron"):
        again = place_for(target, question, Clock(Budget(simulations=300)))
        assert np.array_equal(again.plan.placement, plan.placement)


@pytest.mark.parametrize("name", FOR_MODULES)
def test_files_parse_back(name: str) -> None:
    """An exported file parses back to the figure that is printed."""
    graph, cluster, target = graph_of("llama"), gdp.Cluster.parse("3xp100-pcie-16g"), find_target(name)
    problem = Problem.build(graph, cluster)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        plan = plan_with(graph, cluster, rng.integers(3, size=graph.num_ops).tolist())
        adapted = adapt(problem, plan, target)
        devices = read_devices(target.name, adapted.content, problem, adapted.units)
        assert np.array_equal(devices, adapted.devices)
        assert simulated(problem, adapted.units.place(devices), plan).step_time_ns == adapted.step_time_ns
        assert adapted.simulation.feasible


@pytest.mark.parametrize("name", ["torch-pipelining", "megatron"])
def test_micro_batches_stay_together(name: str) -> None:
    """Copies of an op in other micro-batches go with it."""
    one, cluster = graph_of("llama", True), gdp.Cluster.parse("2xp100-pcie-16g")
    graph = accumulated(one, 3)
    problem, target = Problem.build(graph, cluster), find_target(name)
    plan = gdp.place(graph, cluster, budget="200sims", robust=0.0)
    adapted = adapt(problem, plan, target)
    unit = dict(zip(graph.op_names, adapted.units.index.tolist(), strict=True))
    assert {op: unit[op] for op in one.op_names} == {op: unit.get(f"{op}@2", unit[op]) for op in one.op_names}
    assert adapted.units.num_units == target.read_units(Problem.build(one, cluster)).num_units


@pytest.mark.parametrize("name", ["hf-device-map", "llama-cpp"])
def test_micro_batches_are_refused(name: str, run: Run) -> None:
    """Tools that run one batch after the other get no micro-batches."""
    cluster = gdp.Cluster.parse("2xp100-pcie-16g")
    Path("d").mkdir()
    cluster.save("d/cluster.json")
    for training in (False, True) if name == "hf-device-map" else (False,):
        graph = accumulated(graph_of("llama", training), 3)
        graph.save("d/graph.json.gz")
        plan_with(graph, cluster, [0] * graph.num_ops).save("d/plan.json")
        graph_of("llama", training).save("one.json.gz")
        placing = ["place", "one.json.gz", "--devices", "2xp100-pcie-16g", "--microbatches", "3", "--for", name]
        for command in (["export", "d/plan.json", "--to", name], placing):
            status, out, err = run(*command)
            line = err.splitlines()[-1]
            assert (status, out) == (2, "")
            assert f"{name}: graph 'llama" in line
            assert "3 micro-batches" in line
            assert "leave out --microbatches, or take torch-pipelining" in line
            assert ("megatron" in line) == training
    assert {path.name for path in Path("d").iterdir()} == {"cluster.json", "graph.json.gz", "plan.json"}
    assert not Path("plan.json").exists()


@pytest.mark.parametrize("name", TARGETS)
def test_training_steps(name: str, run: Run) -> None:
    """Tools for inference refuse training steps, and the others take them."""
    graph, cluster = graph_of("llama", True), gdp.Cluster.parse("2xp100-pcie-16g")
    if name in ("onnxruntime", "openvino"):  # graphs of PyTorch they refuse anyhow
        ops = [Op("a", "MatMul", 9, phase="forward"), Op("b", "MatMul", 9, phase="backward")]
        graph = Graph.build("nodes", ops, [Tensor(0, (1,), 4)])
    graph.save("graph.json.gz")
    cluster.save("cluster.json")
    plan_with(graph, cluster, [0] * graph.num_ops).save("plan.json")
    placing = ["place", "graph.json.gz", "--devices", "2xp100-pcie-16g", "--budget", "20sims", "--out", "d"]
    for command in (["export", "plan.json", "--to", name], [*placing, "--no-cache", "--for", name]):
        status, out, err = run(*command)
        if name in ("hf-device-map", "torch-pipelining", "megatron"):
            assert status == 0
        else:
            assert (status, out, err.count("\n")) == (2, "", 1)
            assert f"{name}: graph {graph.name!r} is a training step, and {name} runs inference only" in err
            assert "--inference" in err


@pytest.mark.parametrize("name", ["hf-device-map", "torch-pipelining", "llama-cpp", "megatron"])
def test_constraints(name: str, run: Run) -> None:
    """The plan has all on gpu0. Layer 1 is pinned to gpu1, and matrix products stay off gpu2."""
    graph, cluster = graph_of("llama"), gdp.Cluster.parse("3xp100-pcie-16g")
    graph.save("graph.json.gz")
    cluster.save("cluster.json")
    plan_with(graph, cluster, [0] * graph.num_ops).save("plan.json")
    rules = ["--pin", r"layers\.1\.=gpu1", "--pin", "layers.3=gpu0", "--forbid", "aten.mm=gpu2"]
    status, out, _ = run("export", "plan.json", "--to", name, "--json", *rules)
    assert status == 0
    problem, target = Problem.build(graph, cluster), find_target(name)
    units = target.read_units(problem)
    placement = units.place(read_devices(target.name, json.loads(out)["content"], problem, units))
    where = [set(placement[[module.startswith(path) for module in graph.modules]]) for path in LAYERS]
    assert where[1] == {1}
    assert where[3] == {0}
    assert 2 not in placement[[kind == "aten.mm" for kind in graph.kinds]]
    Path(target.file_name).unlink()
    # a layer's halves are one unit, or run again after the other one
    apart = {"hf-device-map": "layers.0.mlp=gpu1", "llama-cpp": "layers.0.self_attn.k_proj=gpu1"}
    pins = ["--pin", "layers.0.self_attn.q_proj=gpu0", "--pin", apart.get(name, "layers.1.mlp=gpu1")]
    status, out, err = run("export", "plan.json", "--to", name, *pins, "--pin", "layers.2=gpu0")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "relax --pin or --forbid" in err
    assert not Path(target.file_name).exists()


def test_commands(run: Run) -> None:
    """The commands print one figure and write the file; a plan that was found before has its notes again."""
    graph_of("llama").save("model.json.gz")
    arguments = ["--devices", "2xp100-pcie-16g", "--budget", "300sims", "--out", "d", "--for", "device_map", "--json"]
    status, out, err = run("place", "model.json.gz", *arguments)
    assert status == 0
    assert "a plan of single ops takes" in err
    made = json.loads(out)
    _, _, again = run("place", "model.json.gz", *arguments)
    assert "found before" in again
    assert "a plan of single ops takes" in again
    status, out, _ = run("export", "d/plan.json", "--to", "hf-device-map", "--json")
    document = json.loads(out)
    assert status == 0
    assert document["step_time_ns"] == document["plan_step_time_ns"] == made["step_time_ns"]
    assert document["loss"] == 0
    assert document["path"] == "d/device_map.json"
    assert Path("d/device_map.json").read_text() == document["content"]
    status, out, _ = run("export", "d/plan.json", "--to", "vllm", "--out", "my.env")
    assert status == 0
    assert "whole decoder layers by rank: " in out
    assert " ms a step instead of " in out
    assert Path("my.env").is_file()
    assert run("place", "model.json.gz", *arguments[:6], "--for", "llama-cpp", "--ctx", "128")[0] == 0
    for words, tokens in (([], 128), (["--ctx", "64"], 64), (["--to", "llama_cpp", "--ctx", "64"], 64)):
        status, out, _ = run("export", "d/plan.json", *words, "--json")
        assert status == 0
        assert f"-c {tokens}\n" in json.loads(out)["content"]


def test_help(run: Run) -> None:
    """The help names every target."""
    _, out, _ = run("export", "--help")
    assert {*TARGETS, *LAYOUT_TARGETS} <= set(re.findall(r"[a-z-]+", out))


def test_plans_over_hosts() -> None:
    """Tools of one process take the cards of one host; ranks of Megatron-LM are started on each, whatever the cluster
    calls its hosts."""
    graph = graph_of("llama")
    for name in ("hf-device-map", "llama-cpp"):
        with pytest.raises(InputError, match=f"{name}: runs on one host, and .* has 2; place on one"):
            TARGETS[name].read_units(Problem.build(graph, "2x(2xp100-pcie-16g)@10gbit"))
    hosts = gdp.Cluster.parse("2x(2xp100-pcie-16g)@10gbit")
    measured = [replace(each, name=each.name.replace(".gpu", "-cuda")) for each in hosts.devices]
    for cluster in (hosts, replace(hosts, devices=tuple(measured))):
        problem = Problem.build(graph, cluster)
        units = TARGETS["megatron"].read_units(problem)
        text = TARGETS["megatron"].write(problem, units, np.arange(units.num_units) * 4 // units.num_units)
        assert text.endswith(
            "# on host0: export CUDA_VISIBLE_DEVICES=0,1\n# on host1: export CUDA_VISIBLE_DEVICES=0,1\n"
        )
    with pytest.raises(InputError, match="stages in turns on hosts"):
        TARGETS["megatron"].write(
            problem, units, np.array([0, 2, 1, 3])[np.arange(units.num_units) * 4 // units.num_units]
        )


def test_bad_input(run: Run) -> None:
    """A plan of Python knows its devices, not its graph; others are refused by what differs."""
    graph, cluster = three_modules(), gdp.Cluster.parse("2xp100-pcie-16g")
    plan_with(graph, cluster, [0] * 9).save("plan.json")
    cases: list[tuple[list[str], str]] = [
        (["--to", "hf-device-mapp"], "target 'hf-device-mapp' is unknown; did you mean hf-device-map?"),
        (["--to", "hf-device-map"], "made in Python, of a graph called 'three'"),
        (["--to", "hf-device-map", "--devices", "2xp100-pcie-16g"], "made in Python, of a graph called 'three'"),
        (
            ["--to", "hf-device-map", "--devices", "3xp100-pcie-16g", "--graph", "g.json"],
            "the plan is for other devices",
        ),
        (
            ["--to", "hf-device-map", "--devices", "2xp100-pcie-16g", "--graph", "h.json"],
            "h.json is not what was placed",
        ),
        (["--to", "vllm", "--devices", "2xp100-pcie-16g", "--graph", "g.json"], "is that of a list of layers"),
        (["--to", "onnxruntime", "--devices", "2xp100-pcie-16g", "--graph", "p.json"], "p.json is not what was placed"),
        (
            ["--to", "hf-device-map", "--microbatches", "2", "--devices", "2xp100-pcie-16g"],
            "made in Python, of a graph called 'three'",
        ),
        (["--to", "hf-device-map", "--inference"], "made in Python, of a graph called 'three'"),
        (["--to", "hf-device-map", "--out", "../{here}/plan.json"], "the plan needs that file"),
        (["--to", "hf-device-map", "--out", "graph.json.gz"], "the plan needs that file"),
    ]
    graph.save("g.json")
    three_modules(1).save("h.json")
    graph_of("tied").save("p.json")
    before = set(Path().iterdir())
    for arguments, message in cases:
        arguments = [argument.format(here=Path.cwd().name) for argument in arguments]
        status, out, err = run("export", "plan.json", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert message in err
    assert set(Path().iterdir()) == before
    status, _, err = run("place", "g.json", "--devices", "2xp100-pcie-16g", "--for", "vllm", "--placer", "metis")
    assert status == 2
    assert "--for: places with auto" in err
    nameless = Graph.build("nameless", [Op("a", "mm", 1)], [])
    nameless.save("n.json")
    status, _, err = run("place", "n.json", "--devices", "2xp100-pcie-16g", "--for", "hf-device-map")
    assert status == 2
    assert "its ops have no module paths" in err
