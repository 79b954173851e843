"""A training that is killed at any moment goes on from its file as if nothing had happened."""

import random
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from execute.killed_training import place, train
from execute.rank_processes import fork_server

STEPS_A_KILL = 40


def start(directory: Path, num_steps: int) -> BaseProcess:
    process = fork_server().Process(target=train, args=(directory, num_steps))
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    process.join()
    return process.exitcode


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
    whole.mkdir()
    killed.mkdir()
    place(whole / "plan.json")
    shutil.copy(whole / "plan.json", killed)
    num_steps, chance = STEPS_A_KILL * num_kills, random.Random(seed)
    assert ended(start(whole, num_steps)) == 0
    done = 0
    for _ in range(num_kills):
        before, process = len(lines_of(killed)), start(killed, num_steps)
        while process.is_alive() and len(lines_of(killed)) == before:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.1))
        if process.is_alive():
            process.kill()
            done += 1
        assert ended(process) in (0, -signal.SIGKILL)
    assert done >= num_kills // 2
    assert ended(start(killed, num_steps)) == 0
    assert losses_of(killed) == losses_of(whole)
    assert len(losses_of(whole)) == num_steps
    rest = {path.name for path in killed.iterdir()} - {"plan.json", "losses.txt", "training.safetensors"}
    assert len(rest) <= num_kills, "at most what a kill left half written, under another name"
