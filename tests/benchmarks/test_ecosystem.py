"""The benchmark against accelerate's device maps: a tiny run, found again."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ecosystem, model_configs
from benchmarks.ecosystem import EcosystemBenchmark
from gdp.budget import Budget
from gdp.errors import InputError

SHORT = Budget(seconds=0.3)


def test_a_model_is_placed_and_compared_with_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that is too small beside a processor inference alone; no mode is faster; a rerun gives the same."""
    bert = model_configs.get("bert-base")
    monkeypatch.setattr(model_configs, "get", lambda _: replace(bert, config={**bert.config, "num_hidden_layers": 4}))

    def run() -> dict[str, object]:
        machines = ("fast-and-slow", "gpu-and-cpu")
        benchmark = EcosystemBenchmark(models=("bert-base",), machines=machines, budget=SHORT)
        return benchmark.run(out=tmp_path / "ecosystem.md", rows=tmp_path / "rows")

    figures = run()
    rows = figures["rows"]
    assert isinstance(rows, list)
    assert [row["workload"].split("-on-")[0].rpartition("-")[2] for row in rows] == ["inference"] * 2 + ["training"]
    for row in rows:
        (auto,) = row["runs"]["gdp"]
        assert auto["status"] == "ok"
        assert set(row["baselines"]) == set(ecosystem.MODES)
        assert row["baselines"]["auto"] == row["baselines"]["balanced"]
        for mode in row["baselines"].values():
            assert mode["status"] != "ok" or mode["step_time_ns"] >= auto["step_time_ns"]
    ratios = [figures["modes"][mode]["ratio"] for mode in ("auto", "balanced")]  # type: ignore[index]
    assert ratios[0] == ratios[1] <= 1.0
    assert run() == figures
    with pytest.raises(InputError, match="no machine 'bogus'"):
        EcosystemBenchmark(machines=("bogus",), budget=SHORT)
