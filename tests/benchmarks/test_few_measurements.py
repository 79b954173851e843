"""Few measurements: the regret of arms on choices that are known, groups of the published tables, and a user's file."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.few_measurements import FewMeasurementsBenchmark, published, replay, scorer
from benchmarks.few_measurements.arms import ARMS
from benchmarks.few_measurements.drawn_choices import DrawnQuestion, draw_batch, faster
from benchmarks.few_measurements.elsewhere import beliefs, learned
from benchmarks.few_measurements.learning import measure
from benchmarks.few_measurements.replay import COUNTS, Lessons, Trial, regrets_of
from benchmarks.few_measurements.user_file import read_choices
from benchmarks.measured_sources import choices
from benchmarks.measured_sources.choices import TABLES, Choice
from benchmarks.measured_sources.source import PredictedRow
from gdp.cluster import Cluster
from gdp.errors import InputError

TIMES = np.array([4.0, 3.0, 2.0, 1.0])
CHOICE = Choice(
    name="four layouts",
    is_set=False,
    measured=TIMES,
    predicted=np.array([4.0, 3.0, 1.4, 1.6]),
    naive=TIMES[::-1],
    traits=np.arange(4.0)[:, None],
    preference=[(0,), (1,), (2,), (3,)],
    spreads=np.full(4, 0.2),
    names=("micro_batch",),
    table="gpt",
    machine="one",
)
DRAWN = DrawnQuestion(("micro_batch",), np.arange(4.0)[:, None], TIMES, np.full(4, 0.1), np.full((4, 4), 0.25))
OTHER = replace(CHOICE, machine="another", predicted=TIMES * np.exp(0.1 * np.arange(4.0)))
LESSONS = Lessons((DRAWN,), (OTHER,), (OTHER,), (OTHER,))
TAUGHT = {replay._class_of(CHOICE): LESSONS}


def regrets(arm: str, noise: float, seed: int) -> Any:
    """Returns the regret of an arm on the choice after 1, 2, ... measurements."""
    return regrets_of(ARMS[arm], [Trial(CHOICE, noise, seed)], TAUGHT)[0]


@pytest.mark.parametrize(
    ("arm", "expected"), [("expert's rule", [3, 2, 1, 0]), ("naive costs", [3, 2, 1, 0]), ("gdp's costs", [1, 0, 0, 0])]
)
def test_regret_by_hand(arm: str, expected: list[float]) -> None:
    """Times are 4, 3, 2, 1: an order that begins with the slowest has regrets 3, 2, 1, 0; that of the predictions takes
    the third and then the fourth. After all four nothing changes."""
    found = regrets(arm, 1e-9, 0)
    assert found[:4].tolist() == pytest.approx(expected, abs=1e-6)
    assert len(found) >= COUNTS[-1]
    assert found[4:].max() == pytest.approx(0, abs=1e-6)


@pytest.fixture(autouse=True)
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes training before a choice short."""
    monkeypatch.setattr(published, "_PRE_TRAINING", 10)
    monkeypatch.setattr(scorer, "_STEPS", 20)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_ends_at_the_fastest(arm: str) -> None:
    """With little noise the regret never grows, and is none when each candidate is measured: after four measurements
    where none is repeated, else after many; the same seed gives the same run."""
    found = regrets(arm, 0.001, 3)
    repeats = arm.startswith(("HDP", "GDP")) and "none twice" not in arm
    assert (np.diff(found) <= 1e-9).all()
    assert found[-1 if repeats else 3] == pytest.approx(0, abs=1e-9)
    assert found.tolist() == regrets(arm, 0.001, 3).tolist()


def test_rewards_teach() -> None:
    """Published learners come to draw the fastest candidate: of the last 100 of 400 draws, over 10 seeds, most are
    it, and by chance a quarter would be."""
    policy, trials = published.SequencePolicy(1, 4), [Trial(CHOICE, 0.01, seed) for seed in range(10)]
    generator = torch.Generator().manual_seed(0)
    taken = measure(policy, policy.start(10, generator), trials, replace(published.HDP, most=400), generator)
    assert (taken[:, -100:] == 3).mean() > 0.5


def test_fine_tuning_without_a_rate_is_the_policy_as_it_was() -> None:
    """The policy of drawn machines begins with the least predicted time here, and is its own control."""
    assert regrets("policy of drawn machines", 1e-9, 0)[0] == 1
    assert regrets("policy of drawn machines, fine-tuned", 1e-9, 0)[0] == 1


def test_errors_of_other_machines_are_learned() -> None:
    """On three other machines a unit of the trait adds 10 % to the prediction, so that measured over predicted falls by
    as much: a ridge of 3 with three sums of squares of 5 leaves 15 / (15 + 3) of the slope."""
    several = tuple(replace(OTHER, machine=f"machine {number}") for number in range(3))
    weights, width, _ = learned(several)
    assert weights[0] == pytest.approx(-0.1 * 15 / 18, rel=1e-6)
    assert width < 1


def test_bandit_learns_who_wins() -> None:
    """Its belief counts wins on other machines, at most as many as a run can change."""
    counts = beliefs(LESSONS)
    assert counts.shape == (2, 3)
    assert (counts.sum(axis=0) <= 10 + 1e-9).all()
    assert (beliefs(Lessons(LESSONS.drawn)) == 1).all()


def test_drawn_machines() -> None:
    """Rewards of a drawn choice are at most that of the fastest, -1; faster links are faster, and nothing else is."""
    (drawn,) = draw_batch([DRAWN], 1, np.random.default_rng(0))
    assert drawn.rewards.max() <= -1 + 0.05
    cluster = Cluster.parse("2xl40s-48g")
    quick = faster(cluster, "links", 2)
    assert quick.route(0, 1).bytes_per_second == 2 * cluster.route(0, 1).bytes_per_second
    assert quick.devices == cluster.devices
    assert faster(cluster, "hosts", 2).devices[0].issue_ns == cluster.devices[0].issue_ns / 2


@pytest.fixture
def drawn_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts one small question in place of the simulated ones."""
    document = {name: np.asarray(getattr(DRAWN, name)).tolist() for name in DrawnQuestion.__annotations__}
    monkeypatch.setattr(replay, "drawn_questions", lambda _graphs, _say: {"questions": [document]})


def few(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves these arms alone."""
    monkeypatch.setattr(replay, "ARMS", {name: ARMS[name] for name in names})


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn_quickly: None) -> None:
    """The benchmark of image models, with the measured times as predictions: its page has all arms but those that learn
    on other tables, and the order of the costs has no regret but that of noise."""

    def predict(_source: Any, row: Any, _graphs: Any) -> PredictedRow:
        return PredictedRow(row, row.measured_ms, "")

    monkeypatch.setattr(choices.ImageInference, "predict", predict)
    monkeypatch.setattr(choices, "SPREAD", 0.1)
    names = "random", "HDP-like, none twice", "gdp's costs", "gdp's costs, residual", "policy of drawn machines"
    few(monkeypatch, *names, "residual of other tables")
    figures = FewMeasurementsBenchmark(sources=("timm",), seeds=2, noises=(0.01,)).run(out=tmp_path / "page.md")
    judged, with_set = figures["tables"]
    assert (judged["is_set"], with_set["is_set"]) == (False, True)
    rows = {row["arm"]: row for row in judged["results"]}
    assert list(rows) == list(names)
    assert rows["gdp's costs"]["mean"][0] < 0.01 < rows["random"]["mean"][0]
    assert all(f"| {arm} |" in (tmp_path / "page.md").read_text() for arm in names)
    assert (tmp_path / "page.svg").exists()


def test_rows_notice_other_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn_quickly: None) -> None:
    """Rows of arms are found again while what they choose from is the same, and refused where a prediction is not."""
    few(monkeypatch, "gdp's costs", "gdp's costs, residual")
    path, bench = tmp_path / "mine.csv", partial(FewMeasurementsBenchmark, seeds=1, noises=(0.01,))
    path.write_text(USERS)
    first = bench(file=path).run(rows=tmp_path / "rows")
    assert bench(file=path).run(rows=tmp_path / "rows")["tables"] == first["tables"]
    path.write_text(USERS.replace("a,4,40", "a,5,40"))
    with pytest.raises(InputError, match="another choices"):
        bench(file=path).run(rows=tmp_path / "rows")


USERS = """choice,predicted,measured,micro_batch,schedule
a,4,40,1,1f1b
a,3,30,2,gpipe
b,5,9,1,gpipe
b,6,8,2,1f1b
"""


def test_file_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn_quickly: None) -> None:
    """Lines of one choice are its candidates, texts are traits that are equal or not. Of `a` the faster one is
    predicted, of `b` the slower one, 9 / 8 - 1 = 12.5 %: the mean regret of the costs' first is half of it."""
    path = tmp_path / "mine.csv"
    path.write_text(USERS)
    first, second = read_choices(path)
    assert first.names == ("micro_batch", "schedule=1f1b", "schedule=gpipe")
    assert first.traits.tolist() == [[1, 1, 0], [2, 0, 1]]
    assert second.measured.tolist() == [9, 8]
    few(monkeypatch, "random", "expert's rule", "gdp's costs", "gdp's costs, residual")
    figures = FewMeasurementsBenchmark(file=path, seeds=2, noises=(0.001,)).run()
    (part,) = figures["tables"]
    rows = {row["arm"]: row for row in part["results"]}
    assert list(rows) == ["random", "gdp's costs", "gdp's costs, residual"]
    assert rows["gdp's costs"]["mean"][0] == pytest.approx(0.0625)
    assert f"--file {path}" in figures["markdown"]


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("measured", "time", "no column measured"),
        ("b,5,9", "b,5,-9", "line 4: measured is '-9'; a time above 0 is expected"),
        ("b,5,9", "c,5,9", "line 4: choice 'c' has no other candidate; add one"),
        (",1,gpipe\n", "\n", ""),
        (",micro_batch,schedule", "", "has no column besides choice, predicted, measured"),
        (USERS[USERS.index("\n") :], "\n", "has no rows"),
    ],
)
def test_bad_files(old: str, new: str, part: str, tmp_path: Path) -> None:
    """A bad file is one line that names it, the line and the remedy; traits may be left out."""
    path = tmp_path / "mine.csv"
    path.write_text(USERS.replace(old, new))
    if not part:
        assert len(read_choices(path)) == 2
        return
    with pytest.raises(InputError, match=r"mine\.csv: ") as error:
        read_choices(path)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_choices_of_layouts() -> None:
    """vTrain's rows have 72 groups, of one model, number of cards and batch, with two layouts or more."""
    table = next(table for table in TABLES if table.name == "gpt")
    sizes = Counter(table.group_of(row) for row in table.source.rows())
    assert sum(size > 1 for size in sizes.values()) == 72
