"""Commands on a plan name nothing but the plan, whatever it was made from."""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdp
from gdp.cli import main
from gdp.files import read_json
from gdp.simulator.plan import Plan
from tests.problems import two_chains

MODELS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), (torch.ones(8, 16),)

def wide():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), (torch.ones(8, 16),)

def deep():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()), (torch.ones(8, 16),)

def jax():
    import jax
    return lambda x, y: jax.numpy.tanh(x @ y), (jax.numpy.ones((4, 8)), jax.numpy.ones((8, 2)))
"""
COSTS = "format: gdp-op-costs\nversion: 1\nops:\n  - {kind: aten.relu, flops: 1000000}\n"
BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 16,
}
TWO = ["--devices", "2xcpu-16core"]
QUICK = ["--budget", "5sims", "--no-advice"]
RUNS = ["--on", "cpu,cpu", "--steps", "1"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("models.py").write_text(MODELS)
    Path("costs.yaml").write_text(COSTS)
    Path("bert").mkdir()
    Path("bert/config.json").write_text(json.dumps(BERT))
    two_chains().save("chains.json")
    yield
    sys.modules.pop("models", None)


def onnx() -> None:
    """Writes a model of one product with a symbolic batch."""
    helper = pytest.importorskip("onnx").helper
    x, w, y = (
        helper.make_tensor_value_info(name, 1, shape)
        for name, shape in (("x", ["n", 4]), ("w", [4, 2]), ("y", ["n", 2]))
    )
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x, w], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    Path("net.onnx").write_bytes(proto.SerializeToString())


def policy() -> None:
    """Trains a policy for one update on the model that it then places."""
    words = ["--samples", "8", "--updates", "1", "--seed", "0"]
    assert main(["train", "models:net", *TWO, *words, "--out", "policy.safetensors"]) == 0


STAGES = ["models:net", *TWO, "--microbatches", "4", "--placer", "expert"]
LEARNED = ["models:net", *TWO, "--placer", "gdp-zero-shot", "--checkpoint", "policy.safetensors"]
CASES: dict[str, tuple[list[str], bool]] = {
    "a small GPU": (["models:net", *TWO, "--parallel", "none", "--max-memory", "cpu0=4GiB", "--reserve", "10%"], True),
    "unequal cards": (["models:net", "--devices", "rtx4090-24g+rtx3090-24g", "--optimizer", "sgd"], True),
    "several cards": (["models:net", "--devices", "2xl4-24g", "--parallel", "data=2,microbatches=2,zero=1"], True),
    "equal stages": (STAGES, True),
    "a trained policy": (LEARNED, True),
    "micro-batches": (["models:net", *TWO, "--microbatches", "2", "--pin", "0=cpu1"], True),
    "batches in flight": (["models:net", *TWO, "--inference", "--batches", "2"], True),
    "a Transformers config": (["hf:bert?batch=2&sequence=8", *TWO, "--inference"], True),
    "an ONNX file": (["net.onnx", *TWO, "--dim", "n=8"], False),
    "a JAX function": (["models:jax", *TWO, "--inference"], False),
    "kernels of my own": (["models:net", *TWO, "--op-costs", "costs.yaml", "--parallel", "none"], True),
    "a graph file": (["chains.json", *TWO], False),
}
OUT = ("several cards", "equal stages", "an ONNX file", "a graph file")  # their graphs and clusters are all kinds
EXPORTS = {
    "several cards": "torch-fsdp",
    "equal stages": "torch-pipelining",
    "a Transformers config": "hf-device-map",
    "an ONNX file": "onnxruntime",
}


@pytest.mark.parametrize(
    ("case", "has_out"),
    [
        *(pytest.param(case, False, id=f"{case}, plan alone") for case in CASES),
        *(pytest.param(case, True, marks=[pytest.mark.long] * (case not in OUT), id=f"{case}, out") for case in CASES),
    ],
)
def test_a_plan_is_simulated_shown_exported_and_run(
    case: str, has_out: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands work from another directory too, with all that shaped the step."""
    words, can_run = CASES[case]
    if case == "an ONNX file":
        onnx()
    if case == "a JAX function":
        pytest.importorskip("jax")
    if case == "a Transformers config":
        pytest.importorskip("transformers")
    if case == "a trained policy":
        policy()
    assert main(["place", *words, *QUICK, *(["--out", "."] if has_out else [])]) == 0
    tool = None if case == "equal stages" else EXPORTS.get(case)
    following = "simulate plan.json" if tool is None else f"export plan.json --to {tool}"
    assert f"Next: gdp {following}\n" in capsys.readouterr().out
    plan = str(Path("plan.json").resolve())
    Path("elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("elsewhere")
        patch.delitem(sys.modules, "models", raising=False)
        assert main(["simulate", plan, "--costs", "costs.npz"]) == 0
        costs = np.load("costs.npz")
        assert costs["op_time_ns"].shape == costs["host_time_ns"].shape == (len(Plan.load(plan).placement), 2)
        assert main(["report", plan]) == 0
        if case in EXPORTS:
            assert main(["export", plan, "--to", EXPORTS[case]]) == 0
        if can_run:
            assert main(["run", plan, *RUNS]) == 0
        else:
            assert main(["run", plan, *RUNS]) == 2
    assert gdp.timeline(Plan.load(plan)).rows


def test_a_plan_says_what_was_asked() -> None:
    """MODEL, DEVICES and the options that were given, and always the placer, the budget and the seed."""
    words = [
        "models:net",
        *TWO,
        "--microbatches",
        "2",
        "--pin",
        "0=cpu1",
        "--optimizer",
        "sgd",
        "--max-memory",
        "cpu0=4GiB",
    ]
    assert main(["place", *words, *QUICK]) == 0
    asked = read_json("plan.json")["asked"]
    assert asked == {
        "model": "models:net",
        "cluster": "2xcpu-16core",
        "directory": str(Path.cwd()),
        "options": {
            "microbatches": 2,
            "optimizer": "sgd",
            "pin": ["0=cpu1"],
            "max_memory": ["cpu0=4GiB"],
            "budget": "5sims",
            "placer": "auto",
            "seed": 0,
        },
    }


def change(name: str) -> None:
    """Gives `models:net` the content of another function."""
    Path("models.py").write_text(MODELS + f"\nnet = {name}\n")
    sys.modules.pop("models", None)


@pytest.mark.parametrize("command", [["simulate"], ["run", *RUNS]], ids=["simulate", "run"])
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deep", [], "models:net is not what was placed: it has"),
        ("wide", [], "as many ops, with other costs, names or edges"),
        ("", ["--optimizer", "sgd"], "asked with no --optimizer, not --optimizer sgd; leave the option out"),
        ("", ["--devices", "3xcpu-16core"], "it has cpu0, cpu1, cpu2, and the plan cpu0, cpu1"),
    ],
    ids=["more ops", "wider", "an option", "devices"],
)
def test_a_difference_is_named(
    command: list[str], name: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that has changed since, an option or devices that are not the plan's are bad input, in one line."""
    assert main(["place", "models:net", *TWO, *QUICK, "--parallel", "none"]) == 0
    if name:
        change(name)
    capsys.readouterr()
    assert main([command[0], "plan.json", *command[1:], *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("gdp: error: plan.json: ")
    assert message in line


def test_with_the_graph_beside_the_plan_the_first_op_that_differs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A run needs the model as it was: its first layer is wider now."""
    assert main(["place", "models:net", *TWO, *QUICK, "--parallel", "none", "--out", "."]) == 0
    change("wide")
    assert main(["simulate", "plan.json"]) == 0  # of the graph as it was placed
    assert main(["run", "plan.json", *RUNS]) == 2
    error = capsys.readouterr().err
    assert "op '" in error
    assert " instead of " in error


def test_a_bare_placement_is_scored(capsys: pytest.CaptureFixture[str]) -> None:
    """The file has the device of each op; its figures are those of `gdp.simulate`."""
    graph = two_chains()
    devices = {name: f"cpu{number % 2}" for number, name in enumerate(graph.op_names)}
    score = ["simulate", "chains.json", *TWO, "--placement", "devices.json"]
    Path("devices.json").write_text(json.dumps(devices))
    assert main([*score, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    problem = gdp.Problem.build(graph, gdp.Cluster.parse(TWO[1]))
    expected = gdp.simulate(problem, [number % 2 for number in range(graph.num_ops)])
    assert answer["step_time_ns"] == expected.step_time_ns
    assert main(score) == 0
    first = graph.op_names[0]
    for changed, message in (
        ({first: "cpu7"}, "cpu7"),
        ({"x": "cpu0"}, "op 'x' is not in"),
        (None, f"op {first!r} has no device"),
    ):
        content = (
            {**devices, **changed} if changed else {name: device for name, device in devices.items() if name != first}
        )
        Path("devices.json").write_text(json.dumps(content))
        assert main(score) == 2
        assert message in capsys.readouterr().err


def test_a_question_is_compared_anew(capsys: pytest.CaptureFixture[str]) -> None:
    """The placers get the model, options and budget of the plan, and other devices if they are named."""
    words = ["models:net", *TWO, "--inference", "--parallel", "none", "--pin", "0=cpu1"]
    assert main(["place", *words, *QUICK]) == 0
    compare = ["compare", "plan.json", "--placers", "single,m-etf", "--seeds", "1", "--json"]
    capsys.readouterr()
    assert main(compare) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["budget"], answer["cluster"]["name"]) == ("5sims", TWO[1])
    assert answer["graph"]["fingerprint"] == Plan.load("plan.json").graph
    assert main([*compare, "--devices", "3xcpu-16core", "--budget", "7sims"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["budget"], answer["cluster"]["name"]) == ("7sims", "3xcpu-16core")
    assert main(["compare", "models:net"]) == 2
    assert "is no plan; name the devices" in capsys.readouterr().err
    content = gzip.compress(json.dumps([*range(999)]).encode())
    Path("damaged.json.gz").write_bytes(content[:20] + 200 * b"x" + content[220:])
    assert main(["compare", "damaged.json.gz", *TWO]) == 2
    assert "damaged.json.gz: truncated or damaged gzip" in capsys.readouterr().err


def test_compared_as_it_was_measured_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan with measured times is compared with these, and one of compiled steps on other devices compiled."""
    words = ["models:net", *TWO, "--inference", "--parallel", "none", "--pin", "0=cpu1"]
    compare = ["compare", "plan.json", "--placers", "single", "--seeds", "1", "--json"]
    assert main(["place", *words, *QUICK]) == 0
    capsys.readouterr()
    assert main(compare) == 0
    (modelled,) = json.loads(capsys.readouterr().out)["rows"]
    Path("t.db").touch()  # an empty file is one to be written
    assert main(["run", "plan.json", *RUNS, "--times", "t.db"]) == 0
    assert main(["place", *words, *QUICK, "--times", "t.db"]) == 0
    capsys.readouterr()
    assert main(["compare", "plan-2.json", *compare[2:]]) == 0
    (measured,) = json.loads(capsys.readouterr().out)["rows"]
    assert measured["step_time_ns"] != modelled["step_time_ns"]
    assert main(["compare", "plan-2.json", "--devices", "l4-24g:cuda-graphs"]) == 2
    assert "--runtime cuda-graphs joins them" in capsys.readouterr().err
    cards = ["models:net", "--devices", "2xl4-24g:compile", "--inference", "--parallel", "none", "--out", "compiled"]
    assert main(["place", *cards, *QUICK]) == 0
    capsys.readouterr()
    assert main(["compare", "compiled/plan.json", *compare[2:], "--devices", "l4-24g"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["name"] == "l4-24g:compile"


def test_each_plan_of_a_sweep_knows_its_devices_and_microbatches() -> None:
    """The directory of each value has a plan of its own question."""
    words = ["place", "models:net", *TWO, "--budget", "5sims", "--parallel", "none", "--max-memory", "cpu1=4GiB"]
    assert main([*words, "--sweep", "devices=1..2", "--out", "sweep"]) == 0
    assert main([*words, "--sweep", "microbatches=1..2", "--out", "sweep"]) == 0
    for name, count in (("devices-1", 1), ("devices-2", 2), ("microbatches-1", 2), ("microbatches-2", 2)):
        assert main(["simulate", f"sweep/{name}/plan.json"]) == 0
        Path(f"sweep/{name}/graph.json.gz").unlink()
        assert main(["simulate", f"sweep/{name}/plan.json"]) == 0
        assert main(["run", f"sweep/{name}/plan.json", "--on", ",".join(["cpu"] * count), "--steps", "1"]) == 0
