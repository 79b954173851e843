"""`gdp tune` from its options to its answer, with commands that stand in for a training."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gdp.cli import main

MODEL = "test_tune:net"
QUICK = "--devices", "2xl4-24g", "--search", "30sims", "--threads", "1"
TIMED = """echo $(basename $GDP_CANDIDATE) >> seen; echo "step: 1$(basename $GDP_CANDIDATE).5 ms" """


def net() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a small model whose batch can be split."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]), (torch.ones(4, 8),)


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


def test_measured_by_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Each plan is exported into its directory and measured; the answer is the fastest, a plan that `gdp simulate`
    takes. A run goes on with --resume, and is not overwritten without."""
    words = ["tune", MODEL, "--measure", TIMED, "--pattern", r"step: ([\d.]+) ms", *QUICK, "--to", "torch-fsdp"]
    assert main([*words, "--steps", "1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["candidate"] for row in first["measurements"]] == [0]
    assert len(os.listdir("tune/0")) == 5  # plan, devices, export, and what the command printed
    assert main([*words, "--steps", "2"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*words, "--steps", "2", "--resume", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["measurements"][0] == first["measurements"][0]
    assert (
        second["step_time_ns"] == min(row["step_ns"] for row in second["measurements"]) == 10_500_000
    )  # 10.5 and 11.5 ms
    assert Path("seen").read_text().split() == ["0", "1"]
    assert main(["simulate", second["plan"], "--json"]) == 0


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in a measurement ends it, and answers with the plan that was measured before."""
    command = 'test -e begun && { touch hangs; exec sleep 60; }; touch begun; echo {\\"step_time_ms\\": 3}'

    def interrupt() -> None:
        while not Path("hangs").exists():
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["tune", MODEL, "--measure", command, *QUICK, "--json"]) == 130
    thread.join()
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ended"], answer["step_time_ns"]) == ("interrupted", 3_000_000)
    assert Path(answer["plan"]).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--on local"),
        (("--on", "local", "--measure", "true"), "--on local"),
        (("--measure", "true"), "--devices"),
        (("--on", "local", "--pattern", "x"), "--pattern"),
        (("--measure", "true", *QUICK, "--budget", "9sims"), "--budget"),
    ],
)
def test_bad_options(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that make no sense together are refused in a line, and nothing is written."""
    assert main(["tune", MODEL, *words]) == 2
    assert says in capsys.readouterr().err
    assert not Path("tune").exists()


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no plan runs, the exit status is 3 and the line has the reason of the first."""
    assert main(["tune", MODEL, "--measure", "echo no card >&2; exit 4", *QUICK, "--steps", "2"]) == 3
    assert "exit status 4: no card" in capsys.readouterr().err
