"""A training that is killed at any moment goes on from its file as if nothing had happened."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch
from torch import nn
import gdp

STEPS = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 8))
batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(number)) for number in range(STEPS)]
layout = gdp.Layout.parse("data=2,microbatches=2,zero=1")
plan = gdp.Plan.load("plan.json")
resume = "training.safetensors" if os.path.exists("training.safetensors") else None
with gdp.placed(model, plan, on=["cpu", "cpu"], learning_rate=0.01, resume=resume) as trained:
    while trained.num_steps < STEPS:
        loss = trained(batches[trained.num_steps])
        with open("losses.txt", "a") as lines:
            lines.write(f"{trained.num_steps} {loss.item().hex()}\\n")
        trained.save("training.safetensors")
"""
PLACE = """
import torch
from torch import nn
import gdp
from gdp.search.batch_parts import Parts

model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 8))

def part(count):
    return gdp.capture(model, (torch.zeros(8 // count, 16),), name="Sequential").graph

layout = gdp.Layout.parse("data=2,microbatches=2,zero=1")
plan = gdp.place(Parts(part, 8), gdp.Cluster.parse("2xcpu-16core"), parallel=layout, budget="10sims")
plan.save("plan.json")
"""
STEPS_A_KILL = 40


def run(directory: Path, script: str, *args: str) -> "subprocess.Popen[bytes]":
    directory.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, "-c", script, *args], cwd=directory)


def lines_of(directory: Path) -> list[str]:
    path = directory / "losses.txt"
    return path.read_text().splitlines() if path.exists() else []


def losses_of(directory: Path) -> dict[str, set[str]]:
    """Returns by step the losses of all its runs: a step that was not saved is run again."""
    found: dict[str, set[str]] = {}
    for line in lines_of(directory):
        number, loss = line.split()
        found.setdefault(number, set()).add(loss)
    return found


@pytest.mark.parametrize(
    ("num_kills", "seed"), [(2, 0), *(pytest.param(50, seed, marks=pytest.mark.long) for seed in range(1, 5))]
)
def test_a_training_that_is_killed_loses_nothing(tmp_path: Path, num_kills: int, seed: int) -> None:
    """Every loss is that of an unbroken run, and the file is whole at any moment."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(whole, PLACE).wait() == 0
    killed.mkdir()
    shutil.copy(whole / "plan.json", killed)
    steps, chance = str(STEPS_A_KILL * num_kills), random.Random(seed)
    assert run(whole, SCRIPT, steps).wait() == 0
    done = 0
    for _ in range(num_kills):
        before, process = len(lines_of(killed)), run(killed, SCRIPT, steps)
        while process.poll() is None and len(lines_of(killed)) == before:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.1))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            done += 1
        assert process.wait() in (0, -signal.SIGKILL)
    assert done >= num_kills // 2
    assert run(killed, SCRIPT, steps).wait() == 0
    assert losses_of(killed) == losses_of(whole)
    assert len(losses_of(whole)) == int(steps)
    rest = {path.name for path in killed.iterdir()} - {"plan.json", "losses.txt", "training.safetensors"}
    assert len(rest) <= num_kills, "at most what a kill left half written, under another name"
