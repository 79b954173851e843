"""Under torchrun, `gdp devices measure` and `gdp run` give each device of a plan a process, and one of them reports."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from execute.rank_processes import environments, run_command, start_ranks, statuses_of
from gdp import Cluster
from gdp.cli import main
from run_cases import CLUSTER, MODEL


def forked(out: Path, *args: str) -> tuple[int, str, str]:
    """Runs `gdp` in two processes; returns the exit status, what the first one printed, and what the other did."""
    statuses = statuses_of(start_ranks(run_command, out, 2, *args))
    printed, other = ((out / f"{rank}.out").read_text() for rank in range(2))
    return int(any(statuses)), printed, other


def torchrun(out: Path, *args: str) -> tuple[int, str, str]:
    """Runs `gdp` under torchrun; returns the exit status, what it printed, and what it printed of errors."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gdp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *args], capture_output=True, text=True, env=environment, timeout=120)
    return done.returncode, done.stdout, "" if done.returncode == 0 else done.stderr


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_models.py").write_text(MODEL)
    (tmp_path / "two.yaml").write_text(CLUSTER)
    options = ["--devices", "two.yaml", "--placer", "m-topo", "--budget", "5sims", "--out", "p"]
    assert main(["place", "run_models:net", *options]) == 0
    return "p/plan.json"


@pytest.mark.parametrize("started", [forked, pytest.param(torchrun, marks=pytest.mark.long)])
def test_two_processes(started: Callable[..., tuple[int, str, str]], plan: str, tmp_path: Path) -> None:
    """Two processes compute the results of PyTorch."""
    options = ["--plan", plan, "--on", "cpu,cpu", "--steps", "12", "--times", "t.db", "--json"]
    status, printed, other = started(tmp_path, "run", "run_models:net", *options)
    assert (status, other) == (0, "")
    found = json.loads(printed)
    assert found["results"]["equal"]
    assert found["results"]["bit_equal_tensors"] == found["results"]["tensors"] > 4
    assert found["one_device"] is None
    assert len(found["step_times_ns"]) == 12
    routes = {(row["from"], row["to"]) for row in found["prediction"]["transfers"]}
    assert routes <= {("cpu0", "cpu1"), ("cpu1", "cpu0")}  # none where no op had to wait for a tensor
    timed = ["--devices", "two.yaml", "--placer", "m-topo", "--budget", "5sims", "--times", "t.db", "--out", "q"]
    assert main(["place", "run_models:net", *timed]) == 0


def test_a_wrong_number_of_processes(
    plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong number of processes is refused in one line."""
    for name, value in environments(1)[0].items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert main(["run", "run_models:net", "--plan", plan]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("gdp: error: ")
    assert "the plan has 2 devices (cpu0, cpu1); torchrun started 1 process" in line


def test_measured_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured processes are a cluster."""
    monkeypatch.chdir(tmp_path)
    status, printed, other = forked(tmp_path, "devices", "measure", "--quick", "--out", "ranks.yaml", "--json")
    assert (status, other) == (0, "")
    found = json.loads(printed)
    cluster = Cluster.parse("ranks.yaml")
    assert cluster.fingerprint == found["fingerprint"]
    assert cluster.num_devices == 2
    for a, b in ((0, 1), (1, 0)):
        route = cluster.route(a, b)
        assert 0 <= route.latency_ns < 10**8
        assert 10**6 < route.bytes_per_second < 10**12
        assert len(route.channels) == 1
    assert cluster.route(0, 1).channels != cluster.route(1, 0).channels
