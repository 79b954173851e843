"""Benchmark `execution` measures every arm and placement, and goes on where it stopped."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import execution, process_execution
from benchmarks.execution import ExecutionBenchmark
from gdp import Cluster, InputError, Problem
from gdp.budget import Budget
from gdp.cluster.detect import Detected
from gdp.execute.calibrate.calibrate import Calibration
from gdp.models.papers import families
from gdp.models.pytorch import capture_fn
from run_cases import CLUSTER

SMALL: dict[str, Any] = {
    "workloads": ("rnnlm-2",),
    "repeats": 2,
    "placements": 3,
    "placement_rounds": 2,
    "placement_repeats": 1,
    "calibration_steps": 1,
    "budget": Budget(simulations=50),
    "quick": True,
}
PROCESSES: dict[str, Any] = {
    "model": "benchmarks.execution:inception_v3",
    "num_ops": 7,
    "step_time_ns": 2_000_000,
    "predicted_ns": 1_000_000,
    "results": {"bit_equal_tensors": 5, "tensors": 5, "reference": "that"},
    "routes": [{"from": "cpu0", "to": "cpu1", "latency_ns": 200_000, "bytes_per_second": 10**9}],
    "transfers": [
        {"from": "cpu0", "to": "cpu1", "num_tensors": 3, "predicted_ns": 1, "measured_ns": 2, "median_error": 0.25}
    ],
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two devices anywhere, and one small subject."""
    file = tmp_path / "two.yaml"
    file.write_text(CLUSTER)
    cluster = Cluster.parse(str(file))
    workload = families.RNNLM.workload("rnnlm-2", "2xp100-pcie-16g", 2, num_steps=2, hidden=8, vocabulary=11)
    monkeypatch.setattr(execution, "SUBJECTS", {"rnnlm-2": workload})
    devices = tuple(Detected(name, "core", 2**30, "cpu") for name in ("cpu0", "cpu1"))
    monkeypatch.setattr(execution, "detect", lambda: SimpleNamespace(devices=devices))
    monkeypatch.setattr(execution, "calibrate", lambda *_, **__: Calibration(cluster, ("as given",)))
    monkeypatch.setattr(process_execution, "measure", lambda *_: PROCESSES)
    return cluster


def test_everything_is_measured_once(small: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is measured once."""
    said: list[str] = []
    figures = ExecutionBenchmark(**SMALL).run(out=tmp_path / "out", say=said.append)
    (row,) = figures["rows"]
    assert [len(row[name]) for name in ("placed_ns", "one_device_ns", "placements")] == [2, 2, 3]
    assert row["results"]["num_equal"] == row["results"]["num_tensors"] > 0
    assert row["speedup"] == np.median(np.divide(row["one_device_ns"], row["placed_ns"]))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "execution.json",
        "execution.md",
        "execution.svg",
        "rows",
    }
    text = figures["markdown"]
    assert f"| {row['speedup']:.2f} |" in text
    assert f"| {row['rank_correlation']:.3f} | {row['median_error']:.1%} |" in text
    for part in ("**25%**. In a step", "(-50%)"):
        assert part in text

    def measured_again(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(execution, "_measure", measured_again)
    monkeypatch.setattr(process_execution, "measure", measured_again)
    again = ExecutionBenchmark(**SMALL).run(out=tmp_path / "out", say=said.append)
    assert again["rows"] == figures["rows"]


def test_placements_are_of_every_quality_and_keep_groups(small: Cluster) -> None:
    """Placements are of every quality and keep groups."""
    workload = families.GNMT.workload("gnmt-2", "2xp100-pcie-16g", 2, num_steps=2, hidden=8, vocabulary=11)
    graph = capture_fn(workload.build, name="gnmt-2").graph
    problem = Problem.build(graph, small)
    config = ExecutionBenchmark(**SMALL | {"placements": 20})
    found = execution._various(problem, np.zeros(graph.num_ops, np.int64), config)
    assert len(found) == len({name for name, _ in found}) == 20
    assert {"auto", "single", "metis"} <= {name for name, _ in found}
    for name, placement in found:
        assert not problem.broken_constraints(placement), name


def test_what_cannot_be_measured_is_said(small: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine or model that cannot be measured is an error with the reason."""
    with pytest.raises(InputError, match=r"no workload 'bert'; .*rnnlm-2"):
        ExecutionBenchmark(**SMALL | {"workloads": ("bert",)}).check_workloads()
    monkeypatch.setattr(execution, "detect", lambda: SimpleNamespace(devices=(Detected("cpu0", "core", 2**30, "cpu"),)))
    with pytest.raises(InputError, match="one device, so there is nothing to place"):
        ExecutionBenchmark(**SMALL).run()
    with pytest.raises(InputError, match="repeats is 0"):
        ExecutionBenchmark(**SMALL | {"repeats": 0})
