"""gdp place --batches: throughput and latency with their plan, derived anew; what makes no sense is refused."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from batch_cases import forward_layers, machine
from gdp.bounds.lower_bound import lower_bound
from gdp.cli import main
from gdp.cluster.achieved import figures_of_kind
from gdp.search.question import plan_of
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

DEVICES = "2xp100-pcie-16g"
SOURCE = """
import torch
from torch import nn

def build():
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(4096, 512),)
"""

JAX = """
from jax import numpy as jnp

def build():
    return lambda w, x: jnp.tanh(x @ w) @ w, (jnp.zeros((512, 512)), jnp.zeros((8192, 512)))
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model of four layers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("deep.py").write_text(SOURCE)
    return tmp_path


def test_throughput_is_derived_anew_from_the_model_and_from_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Two replicas take half the time per batch of one, and as long for a batch."""
    command = ["deep:build", "--devices", DEVICES, "--inference"]
    options = ["--batches", "2", "--budget", "60sims", "--threads", "1"]
    assert main(["place", *command, *options, "--json", "--out", "out"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["samples_per_batch"] == 4096
    assert answer["layout"]["data"] == answer["batches"] == 2
    alone, replicas = (
        next(row["throughput"] for row in answer["layouts"] if row["baseline"] == name)
        for name in ("one device", "replicas")
    )
    assert answer["throughput"] == replicas
    assert answer["baselines"] == {}  # they are per batch, the step is all batches
    page = Path("out/report.html").read_text()
    lead = re.search('class="lead">(.*)</p>', page)
    assert lead is not None
    assert lead[1] == "2 replicas of the model on one device each, 2 batches in flight."
    assert f'"time_per_batch_ns":{replicas["time_per_batch_ns"]}' in page
    assert 2 * replicas["time_per_batch_ns"] == pytest.approx(alone["time_per_batch_ns"], rel=1e-6)
    assert answer["time_per_batch_bound_ns"] <= replicas["time_per_batch_ns"]
    for source in (command, ["out/graph.json.gz", "--devices", DEVICES]):
        assert main(["simulate", *source, "--plan", "out/plan.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["throughput"] == answer["throughput"]
    assert main(["simulate", *command, "--plan", "out/plan.json", "--batches", "3"]) == 2
    assert "the plan has 2 in flight" in capsys.readouterr().err
    run = ["run", "deep:build", "--inference", "--plan", "out/plan.json", "--on", "cpu,cpu", "--steps", "1", "--json"]
    assert main(run) == 0
    assert json.loads(capsys.readouterr().out)["results"]["equal"]
    assert main(["place", *command, *options]) == 0
    out = capsys.readouterr().out
    assert "Best layout: 2 replicas of the model on one device each" in out
    assert "Time per batch" in out


def test_a_plan_of_one_batch_tells_its_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    """One device takes one batch after the other: the time per batch is the step time, whatever is in flight, less the
    issue of its first kernel, while the batch before it is computed."""
    command = ["deep:build", "--devices", DEVICES, "--inference"]
    assert main(["place", *command, "--placer", "single", "--no-advice"]) == 0
    capsys.readouterr()
    assert main(["simulate", *command, "--plan", "plan.json", "--batches", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    per_batch_ns = answer["step_time_ns"] - figures_of_kind("p100-pcie-16g").issue_ns
    assert answer["throughput"]["time_per_batch_ns"] == per_batch_ns
    assert answer["throughput"]["latency_ns"] == 4 * per_batch_ns


def test_batches_in_flight_of_a_plan_that_do_not_fit_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """In two stages the second one holds what the first one sends ahead, which a plan of one batch has no room for."""
    graph = forward_layers()
    graph.save("layers.json")
    machine([1.0, 0.5]).save("two.json")
    command = ["layers.json", "--devices", "two.json"]
    problem = Problem.build(graph, machine([1.0, 0.5]))
    plan = plan_of(simulate(problem, [0, 0, 1, 1, 0, 0, 1, 1]), lower_bound(problem), "by hand", 0)
    plan.save("plan.json")
    limit = f"d1={plan.peak_memory_bytes[1]}"
    assert main(["simulate", *command, "--plan", "plan.json", "--batches", "1", "--max-memory", limit]) == 0
    assert main(["simulate", *command, "--plan", "plan.json", "--batches", "4", "--max-memory", limit]) == 3
    assert "4 batches in flight do not fit: d1 lacks" in capsys.readouterr().err


def test_files_and_functions_of_jax_are_served_too(capsys: pytest.CaptureFixture[str]) -> None:
    """An ONNX file and a JAX function are forward passes of one batch; their plans are derived anew from them."""
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    module, args = names["build"]()
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(module, args, "deep.onnx", dynamo=False)
    Path("jaxed.py").write_text(JAX)
    for model in ("deep.onnx", "jaxed:build"):
        command = [model, "--devices", DEVICES, "--inference"]
        assert main(["place", *command, "--batches", "4", "--budget", "30sims", "--json", "--out", "out"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["layout"]["data"] == 2
        assert main(["simulate", *command, "--plan", "out/plan.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["throughput"] == answer["throughput"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--batches", "2"], "is a training step; add --inference"),
        (["--inference", "--batches", "0"], "1 to 256"),
        (["--inference", "--batches", "2", "--parallel", "data=2"], "--parallel"),
        (["--inference", "--batches", "2", "--placer", "metis"], "--placer"),
        (["--inference", "--batches", "2", "--robust", "2%"], "--robust"),
        (["--inference", "--batches", "2", "--sweep", "devices=1..2"], "--sweep"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--batches` is refused in one line when its number is bad or the other options do not allow it."""
    assert main(["place", "deep:build", "--devices", DEVICES, "--budget", "20sims", *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert problem in lines[-1]
    assert [line for line in lines if "error" in line] == lines[-1:]


def test_nothing_fits_is_said_with_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """When no layout fits, `place --batches` exits with status 3 and says that nothing fits in memory."""
    command = ["deep:build", "--devices", DEVICES, "--inference", "--batches", "2", "--budget", "20sims"]
    limits = [word for gpu in range(2) for word in ("--max-memory", f"gpu{gpu}=2MiB")]
    assert main(["place", *command, *limits]) == 3
    assert "nothing fits in memory" in capsys.readouterr().err
