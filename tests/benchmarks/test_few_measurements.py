"""Few measurements: the regret of arms on choices that are known, and groups of the published tables."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.few_measurements import ARMS, COUNTS, FewMeasurementsBenchmark, regrets_of
from benchmarks.measured_sources import choices
from benchmarks.measured_sources.choices import TABLES, Choice
from benchmarks.measured_sources.source import PredictedRow

TIMES = np.array([4.0, 3.0, 2.0, 1.0])
CHOICE = Choice(
    name="four layouts",
    is_set=False,
    measured=TIMES,
    predicted=np.array([4.0, 3.0, 1.4, 1.6]),
    naive=TIMES[::-1],
    traits=np.arange(4.0)[:, None],
    preference=[(0,), (1,), (2,), (3,)],
    spread=0.2,
)


@pytest.mark.parametrize(
    ("arm", "regrets"), [("expert's rule", [3, 2, 1, 0]), ("naive costs", [3, 2, 1, 0]), ("gdp's costs", [1, 0, 0, 0])]
)
def test_regret_by_hand(arm: str, regrets: list[float]) -> None:
    """Times are 4, 3, 2, 1: an order that begins with the slowest has regrets 3, 2, 1, 0; that of the predictions takes
    the third and then the fourth. After all four nothing changes."""
    found = regrets_of(ARMS[arm], CHOICE, 1e-9, 0)
    assert found[:4].tolist() == pytest.approx(regrets, abs=1e-6)
    assert len(found) == COUNTS[-1]
    assert found[4:].max() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_measures_each_candidate_once(arm: str) -> None:
    """With little noise the regret never grows, and all measured is none; the same seed gives the same run."""
    found = regrets_of(ARMS[arm], CHOICE, 0.001, 3)
    assert (np.diff(found) <= 1e-9).all()
    assert found[3] == pytest.approx(0, abs=1e-9)
    assert found.tolist() == regrets_of(ARMS[arm], CHOICE, 0.001, 3).tolist()


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark of image models, with the measured times as predictions: its page has all arms, and the order of
    the costs has no regret but that of noise."""

    def predict(_source: Any, row: Any, _graphs: Any) -> PredictedRow:
        return PredictedRow(row, row.measured_ms, "")

    monkeypatch.setattr(choices.ImageInference, "predict", predict)
    monkeypatch.setattr(choices, "_SPREAD", 0.1)
    figures = FewMeasurementsBenchmark(sources=("timm",), seeds=2, noises=(0.01,)).run(out=tmp_path / "page.md")
    judged, with_set = figures["tables"]
    assert (judged["is_set"], with_set["is_set"]) == (False, True)
    rows = {row["arm"]: row for row in judged["results"]}
    assert list(rows) == list(ARMS)
    assert rows["gdp's costs"]["mean"][0] < 0.01 < rows["random"]["mean"][0]
    assert all(f"| {arm} |" in (tmp_path / "page.md").read_text() for arm in ARMS)
    assert (tmp_path / "page.svg").exists()


def test_choices_of_layouts() -> None:
    """vTrain's rows have 72 groups, of one model, number of cards and batch, with two layouts or more."""
    table = next(table for table in TABLES if table.name == "gpt")
    sizes = Counter(table.group_of(row) for row in table.source.rows())
    assert sum(size > 1 for size in sizes.values()) == 72
