"""`gdp tune` killed at random times: a kill loses one measurement at most, and leaves a log that can be read."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gdp.tune.tuning import LOG
from problems import recurrent

COMMAND = 'echo begun >> begun; sleep 0.05; echo {\\"step_time_ms\\": 1$(basename $GDP_CANDIDATE)}'
TUNE = ["tune", "graph.json", "--measure", COMMAND, "--devices", "2xl4-24g", "--search", "30sims", "--threads", "1"]
STARTS_S = 60.0  # until the first measurement, at most


def measured(log: Path) -> list[int]:
    """Returns the candidates that the whole lines of a log have, in order."""
    lines = [json.loads(line) for line in log.read_bytes().split(b"\n")[1:-1]] if log.exists() else []
    return [line["candidate"] for line in lines if "candidate" in line]


def killed(directory: Path, kills: int, seed: int) -> tuple[int, int]:
    """Kills tunings until as many kills hit; returns the measurements that were begun, and that are in logs."""
    rng, hits, rounds, logged, began = random.Random(seed), 0, 0, 0, 0
    recurrent().save(directory / "graph.json")
    environment = os.environ | {"NO_COLOR": "1", "XDG_CACHE_HOME": str(directory / "cache")}
    program = [sys.executable, "-c", "import sys; from gdp.cli import main; sys.exit(main())", *TUNE]
    while hits < kills:
        out = directory / f"round{rounds}"
        known = measured(out / LOG)
        command = [*program, "--resume", "--out", out.name]
        with (
            open(directory / "said", "ab") as said,
            subprocess.Popen(command, cwd=directory, env=environment, stdout=said, stderr=said) as process,
        ):
            try:
                begins = began + 1 if hits % 3 else 0  # most kills are of measurements, others of whatever runs
                ends = time.monotonic() + STARTS_S
                while process.poll() is None and _num_begun(directory) < begins and time.monotonic() < ends:
                    time.sleep(0.01)
                process.wait(rng.uniform(0, 0.4 if begins else 3.0))
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                hits += 1
        now = measured(out / LOG)
        assert now[: len(known)] == known
        logged += len(now) - len(known)
        time.sleep(0.1)  # the command that ran is no child of the killed one any more
        began = _num_begun(directory)
        assert began - logged <= hits
        if process.returncode == 0:
            rounds += 1
            assert json.loads((out / "plan.json").read_text())["format"] == "gdp-plan"
        else:
            assert process.returncode == -signal.SIGKILL, (directory / "said").read_text()[-2000:]
    return began, logged


def _num_begun(directory: Path) -> int:
    path = directory / "begun"
    return len(path.read_text().split()) if path.exists() else 0


def test_few_kills(tmp_path: Path) -> None:
    """Of three kills each loses one measurement at most."""
    began, logged = killed(tmp_path, 3, seed=0)
    assert began - 3 <= logged <= began


@pytest.mark.long
def test_fifty_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of fifty kills at random times each loses one measurement at most."""
    began, logged = killed(tmp_path, 50, seed=1)
    with capsys.disabled():
        sys.stdout.write(f"\n50 kills: {began} measurements begun, {logged} in logs\n")
    assert began - 50 <= logged <= began
