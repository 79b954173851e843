"""gdp place --parallel: a layout with its plan, derived anew from the model; what makes no sense is refused."""

import json
import os
from pathlib import Path

import pytest

from gdp.cli import main
from gdp.simulator.plan import Plan

DEVICES = "4xp100-pcie-16g"
SOURCE = """
import torch
from torch import nn

def build():
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(65536, 512),)
"""
ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))

    def forward(self, x):
        y = self.layers(x)
        return (y @ y.T).sum()

def build():
    return Odd(), (torch.randn(8, 16),)
"""


SQUARE = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.scale).mean()

def build():
    return Scaled(), (torch.randn(64, 64),)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model that replicas serve well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("wide.py").write_text(SOURCE)
    return tmp_path


def test_the_plan_of_the_best_layout_is_derived_anew_from_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """`simulate` and `place --parallel LAYOUT` give the same step time from the model as `place --parallel auto`."""
    command = ["wide:build", "--devices", DEVICES]
    assert main(["place", *command, "--parallel", "auto", "--budget", "300sims", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layout"]["data"] == 4
    assert answer["layout_bound_ns"] <= answer["step_time_ns"]
    assert {"layout", "status", "step_time_ns", "peak_memory_bytes", "limit"} <= set(answer["layouts"][0])
    assert main(["simulate", *command, "--plan", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_ns"] == answer["step_time_ns"]
    text = "data=4" + (f",zero={answer['layout']['zero']}" if answer["layout"]["zero"] else "")
    assert main(["place", *command, "--parallel", text, "--budget", "300sims"]) == 0
    out = capsys.readouterr().out
    assert "4 replicas of the model on one device each" in out
    assert f"--parallel {text})" in out
    assert Plan.load("plan.json").step_time_ns == answer["step_time_ns"]


def test_layouts_are_the_default_and_an_identical_call_is_answered_from_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`place` considers layouts unless told `--parallel none`, and answers an identical call from the cache."""
    command = ["place", "wide:build", "--devices", DEVICES, "--budget", "300sims", "--threads", "1"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert "Best layout: 4 replicas" in first.out
    assert {"single", "data parallel"} <= {line.split("  ")[0] for line in first.out.splitlines()}
    assert "twice the batch" in first.out
    assert "Expected with op times that vary by 2.0%" in first.out
    assert main(command) == 0
    second = capsys.readouterr()
    assert second.out == first.out  # the same names too: the plan is of the same model
    assert "found before" in second.err
    assert main([*command, "--parallel", "none"]) == 0
    assert "Best layout" not in capsys.readouterr().out
    assert sorted(name for name in os.listdir() if name.startswith("plan")) == ["plan.json"]


def test_another_batch_dimension_is_another_question(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and columns of a square are equally many samples of one graph. The whole step on one card is the answer for
    both, after a search for each."""
    Path("square.py").write_text(SQUARE)
    command = ["place", "square:build", "--devices", DEVICES, "--budget", "5sims"]
    kept = []
    for dimension in ("0", "1", "1"):
        assert main([*command, "--batch-dim", dimension]) == 0
        kept.append("found before" in capsys.readouterr().err)
    assert kept == [False, False, True]


@pytest.mark.parametrize("options", [["--placer", "single"], ["--microbatches", "2"], ["--inference"]])
def test_the_default_gives_way_to_options_of_op_placement(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--parallel`, an option that is only for op placement turns layouts off."""
    assert main(["place", "wide:build", "--devices", DEVICES, "--budget", "20sims", *options]) == 0
    assert "Best layout" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--parallel", "data=3"], "no 3 equal micro-batches"),
        (["--parallel", "data=8"], "8 replicas on 4 devices"),
        (["--parallel", "zero=1"], "add data=2"),
        (["--parallel", "data=2,stages=3"], "2 replicas of 3 stages each on 4 devices"),
        (["--parallel", "data=2,recompute=nowhere"], "nowhere"),
        (["--parallel", "tensor=8"], "has no 8 equal cards"),
        (["--parallel", "tensor=x"], "error: --parallel: tensor is 'x'; a whole number"),
        (["--parallel", "best"], "auto, none or such as"),
        (["--parallel", "auto", "--microbatches", "2"], "--parallel microbatches=M"),
        (["--parallel", "auto", "--inference"], "layouts cut training steps"),
        (["--parallel", "auto", "--placer", "metis"], "--placer"),
        (["--parallel", "auto", "--sweep", "microbatches=1..2"], "--sweep"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layout that is impossible or contradicts other options is refused in one line, and no plan is written."""
    assert main(["place", "wide:build", "--devices", DEVICES, "--budget", "20sims", *options]) == 2
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert problem in lines[-1]
    assert [line for line in lines if "error" in line] == lines[-1:]
    assert sorted(os.listdir()) == ["wide.py"] or set(os.listdir()) == {"wide.py", "cache", "__pycache__"}


def test_cards_that_are_in_no_group_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Of four cards, groups of three leave one out, which a note says."""
    options = ["--parallel", "tensor=3", "--budget", "20sims", "--inference"]
    Path("wide.py").write_text(SOURCE.replace("512", "576"))
    assert main(["place", "wide:build", "--devices", DEVICES, *options]) == 0
    assert "gdp: note: wide:build: gpu3 is left out: in no group of 3 cards\n" in capsys.readouterr().err


JAX = """
import jax
from jax import numpy as jnp

def loss(w, x):
    return jnp.square(jnp.tanh(x @ w) @ w).mean()

def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)

def build():
    return step, (jnp.zeros((512, 512)), jnp.zeros((8192, 512)))
"""


def test_micro_batches_of_a_file_are_dealt_out_to_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """A file of four micro-batches is a step of four replicas, or of two with two each."""
    assert main(["capture", "wide:build", "--microbatches", "4", "--out", "four.json.gz"]) == 0
    command = ["four.json.gz", "--devices", DEVICES]
    capsys.readouterr()
    assert main(["place", *command, "--parallel", "auto", "--budget", "100sims", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layout"]["data"] == 4
    assert {row["layout"]["microbatches"] * row["layout"]["data"] for row in answer["layouts"]} <= {1, 4}
    assert main(["simulate", *command, "--plan", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_ns"] == answer["step_time_ns"]
    assert main(["place", *command, "--parallel", "data=2,microbatches=2,zero=1", "--budget", "20sims"]) == 0
    assert main(["place", *command, "--parallel", "data=2", "--budget", "20sims"]) == 2
    assert "let data times microbatches be 4" in capsys.readouterr().err


def test_the_step_of_jax_is_dealt_out_from_a_file_of_one_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments of a JAX function do not say what is their batch: the file says the step, the option how many."""
    Path("jaxstep.py").write_text(JAX)
    assert main(["place", "jaxstep:build", "--devices", DEVICES, "--parallel", "auto", "--budget", "10sims"]) == 2
    assert "capture the step of one micro-batch, and give that file with --microbatches M" in capsys.readouterr().err
    assert main(["capture", "jaxstep:build", "--out", "one.json.gz"]) == 0
    command = ["one.json.gz", "--devices", DEVICES, "--microbatches", "4"]
    capsys.readouterr()
    assert main(["place", *command, "--parallel", "data=4", "--budget", "20sims", "--json"]) == 0
    step_time_ns = json.loads(capsys.readouterr().out)["step_time_ns"]
    assert main(["simulate", *command, "--plan", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_ns"] == step_time_ns


def test_files_without_micro_batches_are_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """A graph file without micro-batches is refused for layouts, and the error says which option to use."""
    for options, problem in (([], "say how many there are with --microbatches"), (["--inference"], "--batches N")):
        assert main(["capture", "wide:build", *options, "--out", "graph.json.gz"]) == 0
        assert main(["place", "graph.json.gz", "--devices", DEVICES, "--parallel", "auto"]) == 2
        assert problem in capsys.readouterr().err


def test_notes_say_what_a_cut_step_does_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    """Four replicas of 8 samples: normalised by 2, and rows of another dimension are not the same step.

    X @ X.T of 8 x 16 has 2 * 8 * 8 * 16 flops, that of 2 x 16 four times 2 * 2 * 2 * 16, a quarter.
    """
    Path("odd.py").write_text(ODD)
    command = ["odd:build", "--devices", DEVICES, "--optimizer", "sgd", "--parallel", "data=4,stages=1"]
    assert main(["place", *command, "--budget", "10sims"]) == 2
    assert "dimension 0 of input.0, of size 8, is not the batch" in capsys.readouterr().err
    assert main(["place", *command, "--batch-dim", "0", "--budget", "10sims"]) == 0
    printed = capsys.readouterr()
    assert "batch normalisation sees 2 samples at a time instead of 8" in printed.err
    assert "draws of dropout differ" in printed.err
    assert "of the flops of the whole step" in printed.err
    following = printed.out.strip().splitlines()[-1].removeprefix("Next: gdp ")
    assert following == "export plan.json --to torch-fsdp"
    assert Plan.load("plan.json").question.options["optimizer"] == "sgd"
    assert main(following.split()) == 0


def test_one_device_that_is_too_small_gets_micro_batches_without_asking(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the whole batch fits on the only device, its ops are placed as ever."""
    command = ["place", "wide:build", "--devices", "p100-pcie-16g", "--budget", "40sims", "--json", "--no-cache"]
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)
    assert "layout_bound_ns" not in whole
    limit_bytes = whole["peak_memory_bytes"][0] * 2 // 3
    assert main([*command, "--max-memory", f"gpu0={limit_bytes}B"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layout"]["microbatches"] > 1
    assert answer["peak_memory_bytes"][0] <= limit_bytes
