"""The benchmarks of machines and micro-batches: tiny runs, and runs found again."""

from pathlib import Path

import pytest

from benchmarks import microbatches
from benchmarks.machines import MachinesBenchmark
from benchmarks.microbatches import MicrobatchesBenchmark
from benchmarks.models import families
from gdp.budget import Budget
from gdp.errors import InputError

SHORT = Budget(seconds=0.3)


def test_machines_are_placed_with_and_without_slow_devices(tmp_path: Path) -> None:
    """Every row has a ratio; a machine with slow cards has one for each removal; a rerun gives the same figures."""

    def run() -> dict[str, object]:
        benchmark = MachinesBenchmark(
            workloads=("inception-v3-b32",), machines=("fast-and-slow", "gpu-and-cpu"), budget=SHORT
        )
        return benchmark.run(out=tmp_path)

    figures = run()
    rows = figures["rows"]
    assert isinstance(rows, list)
    assert [row["runs"]["auto"][0]["status"] for row in rows] == ["ok", "ok"]
    (harm,) = figures["harm"].values()  # type: ignore[attr-defined]
    assert len(harm) == 2
    assert run() == figures
    with pytest.raises(InputError, match="no machine 'bogus'"):
        MachinesBenchmark(machines=("bogus",), budget=SHORT)


def test_pipelines_are_compared_with_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is never slower than the stages that it begins from, at the same number of micro-batches."""
    sizes = {"num_layers": 8, "hidden": 1024, "num_steps": 1024, "inner": 2816}
    llama = families.LLAMA.workload("llama-8-layers", "4xp100-pcie-16g", 16, **sizes)
    monkeypatch.setattr(microbatches, "MODELS", {"llama": llama})
    figures = MicrobatchesBenchmark(models=("llama",), counts=(1, 2), budget=SHORT).run(out=tmp_path)
    for row in figures["rows"]:
        times = {name: runs[0]["step_time_ns"] for name, runs in row["runs"].items()}
        assert times["auto"] <= times[microbatches.BALANCED]
    assert set(figures["means"]) == set(microbatches.STAGES)
    with pytest.raises(InputError, match="no model 'bogus'"):
        MicrobatchesBenchmark(models=("bogus",), budget=SHORT)
