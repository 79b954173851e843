"""Under torchrun, `gdp devices measure` and `gdp run` give each device of a plan a process, and one of them reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from execute.rank_processes import environments, run_command, start_ranks, statuses_of
from gdp import Cluster
from gdp.cli import main
from run_cases import CLUSTER, MODEL


def torchrun(count: int, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, "-m", "gdp", *args], capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_models.py").write_text(MODEL)
    (tmp_path / "two.yaml").write_text(CLUSTER)
    options = ["--devices", "two.yaml", "--placer", "m-topo", "--budget", "5sims", "--out", "p"]
    assert main(["place", "run_models:net", *options]) == 0
    return "p/plan.json"


def test_two_processes(plan: str) -> None:
    """Two processes compute the results of PyTorch."""
    done = torchrun(
        2, "run", "run_models:net", "--plan", plan, "--on", "cpu,cpu", "--steps", "12", "--times", "t.db", "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
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
    ranks = start_ranks(run_command, tmp_path, 2, "devices", "measure", "--quick", "--out", "ranks.yaml", "--json")
    assert statuses_of(ranks) == [0, 0]
    printed, nothing = ((tmp_path / f"{rank}.out").read_text() for rank in range(2))
    assert nothing == ""
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
