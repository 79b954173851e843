"""The benchmark against accelerate's device maps: a tiny run, found again."""

from pathlib import Path

import pytest

from gdp.bench import ecosystem
from gdp.budget import Budget
from gdp.errors import InputError

SHORT = Budget(seconds=0.3)


def test_a_model_is_placed_and_compared_with_every_mode(tmp_path: Path) -> None:
    """On a card that is too small beside a processor inference alone; no mode is faster; a rerun gives the same."""

    def run() -> dict[str, object]:
        return ecosystem.run(
            names=["efficientnet-b0"], machines=["fast-and-slow", "gpu-and-cpu"], budget=SHORT, seeds=1, out=tmp_path,
            on_row=lambda _: None,
        )  # fmt: skip

    figures = run()
    rows = figures["rows"]
    assert isinstance(rows, list)
    assert [row["workload"].split("-on-")[0].rpartition("-")[2] for row in rows] == ["inference"] * 2 + ["training"]
    for row in rows:
        (auto,) = row["runs"]["auto"]
        assert auto["status"] == "ok"
        assert set(row["baselines"]) == set(ecosystem.MODES)
        assert row["baselines"]["auto"] == row["baselines"]["balanced"]
        for mode in row["baselines"].values():
            assert mode["status"] != "ok" or mode["step_time_ns"] >= auto["step_time_ns"]
    assert run() == figures
    with pytest.raises(InputError, match="no machine 'bogus'"):
        ecosystem.run(machines=["bogus"], budget=SHORT, seeds=1, out=None, on_row=lambda _: None)
