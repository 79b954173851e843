"""Sweeps: tables of plans over machines, batches and micro-batches, and pictures of what is fastest at each cost."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from gdp.bounds.layout_bound import layout_bound
from gdp.budget import Clock
from gdp.cli import main
from gdp.cluster import Cluster, changes
from gdp.errors import InputError
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.parallel.layout import NONE, Layout
from gdp.planning.sweep import Sweep, SweepRow, place_row
from gdp.report.sweep_answer import _note
from gdp.search.place import place
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import verify
from tests.planning.test_advice import branches
from tests.search.test_layouts import BATCH, machine_of, parts_of

MODEL = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (torch.randn(8, 64),)
"""


def rows_of(model: object, machines: dict[int, Cluster], parallel: str | None = None) -> list[SweepRow]:
    rows: list[SweepRow] = []
    for value, cluster in machines.items():
        question = PlaceQuestion.of(model, cluster, Constraints(), parallel, None, SearchOptions(num_threads=1))
        rows.append(place_row(value, question, rows, Clock.of("300sims")))
    return rows


def test_ops_on_more_devices_are_not_slower() -> None:
    """A plan of n cards runs on n + 1 of them; 12 branches of work on four cards take less than half of one."""
    cluster = Cluster.parse("4xp100-pcie-16g")
    rows = rows_of(branches(4), {count: changes.first(cluster, count) for count in (1, 2, 3, 4)}, NONE)
    times = [row.step_time_ns or 0 for row in rows]
    assert times == sorted(times, reverse=True)
    assert times[3] < 0.5 * times[0]


def test_rows_are_the_answers_of_place() -> None:
    """With layouts, each row is what `place` answers, and its bound is that of any layout."""
    machines = {count: machine_of([1.0] * count) for count in (1, 2, 4)}
    for row in rows_of(parts_of(), machines):
        plan = place(parts_of(), machines[int(row.value)], budget="300sims", num_threads=1)
        assert row.step_time_ns == plan.step_time_ns
        assert 0 < row.bound_ns <= plan.step_time_ns
        assert BATCH % max(int(row.value), 1) == 0
        assert (row.layout != "") == (plan.layout is not None)


def test_a_better_plan_of_fewer_devices_is_carried_over() -> None:
    """A row that found a slow plan has that of the row before, verified on its own machine, and says so."""
    graph, cluster = branches(2), Cluster.parse("t4-16g+2xp100-pcie-16g")
    first = rows_of(graph, {2: changes.only(cluster, (1, 2))}, NONE)
    options = SearchOptions(placer="single", num_threads=1)
    question = PlaceQuestion.of(graph, cluster, Constraints(), NONE, None, options)
    row = place_row(3, question, first, Clock.of("10sims"))
    assert row.same_as == 2
    assert row.step_time_ns == first[0].step_time_ns
    assert row.plan is not None
    assert verify(Problem.build(graph, cluster), row.plan) == []
    assert not (row.plan.placement == 0).any()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("devices=1..3", (1, 2, 3)),
        ("microbatches=8,1,2", (1, 2, 8)),
        ("devices=4", (4,)),
        ("devices=2..2", (2,)),
        ("batch=1..16", (1, 2, 4, 8, 16)),
        ("batch=3..9", (3, 4, 8)),
        ("batch=6,4", (4, 6)),
        ("machines=2xl4-24g, dgx.yaml", ("2xl4-24g", "dgx.yaml")),
    ],
)
def test_texts_of_sweeps(text: str, values: tuple[int, ...] | tuple[str, ...]) -> None:
    """Ranges and lists are read as sorted values, batches as powers of two, and machines as they are given."""
    assert Sweep.parse(text).values == values
    assert Sweep.parse(text).what == text.partition("=")[0]


@pytest.mark.parametrize(
    "text",
    [
        *("", "devices", "devices=", "devices=a..b", "devices=1..999", "links=1..2", "devices=0", "batch=0..4"),
        *("machines=", "machines=l4-24g,,t4-16g", "machines=l4-24g,l4-24g", "batch=1..9999999999"),
    ],
)
def test_nonsense_of_sweeps(text: str) -> None:
    """A malformed, unknown or excessive sweep is an input error that names `--sweep`."""
    with pytest.raises(InputError, match="--sweep"):
        Sweep.parse(text)


def test_the_command_has_costs_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Machines and batches of a user's function: samples a second, a dollar and a joule by hand; one plan a row."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("sweeps.py").write_text(MODEL)
    Path("prices.yaml").write_text("rtx3090-24g: {dollars_per_hour: 0.2}\nrtx390-24g: {watts: 1}\n")
    words = ["place", "sweeps:net", "--budget", "20sims", "--threads", "1", "--prices", "prices.yaml", "--json"]
    assert main([*words, "--sweep", "machines=l4-24g,2xrtx3090-24g", "--out", "found"]) == 0
    printed = capsys.readouterr()
    assert "rtx390-24g: no such kind of device; did you mean rtx3090-24g" in printed.err
    rows = orjson.loads(printed.out)["rows"]
    assert [row["machines"] for row in rows] == ["l4-24g", "2xrtx3090-24g"]
    assert [row["dollars_per_hour"] for row in rows] == [0.805, 0.4]
    for row in rows:
        rate = 8e9 / row["step_time_ns"]
        assert row["samples_per_second"] == pytest.approx(rate)
        assert row["samples_per_dollar"] == pytest.approx(rate * 3600 / row["dollars_per_hour"])
        assert row["samples_per_joule"] == pytest.approx(rate / row["watts"])
        assert row["lower_bound_ns"] <= row["step_time_ns"]
        assert main(["simulate", row["plan"]]) == 0
    assert Path("found/sweep.svg").read_text().count("rtx3090") == 1
    capsys.readouterr()
    assert main([*words, "--devices", "l4-24g", "--sweep", "batch=4..16", "--out", "batches"]) == 0
    rows = orjson.loads(capsys.readouterr().out)["rows"]
    assert [row["batch"] for row in rows] == [4, 8, 16]
    plain = ["place", "sweeps:net", "--devices", "l4-24g", "--budget", "20sims", "--no-advice", "--json"]
    for row in rows:
        assert row["samples_per_second"] == pytest.approx(row["batch"] * 1e9 / row["step_time_ns"])
        assert main([*plain, "--batch", str(row["batch"])]) == 0
        assert orjson.loads(capsys.readouterr().out)["step_time_ns"] == row["step_time_ns"]
        assert main(["simulate", row["plan"]]) == 0
        capsys.readouterr()
    groups = ["--inference", "--parallel", "tensor=2", "--devices", "3xp100-pcie-16g", "--sweep", "devices=2..3"]
    assert main([*words[:-1], *groups]) == 0
    assert re.findall("uses . of .", capsys.readouterr().out) == ["uses 2 of 3"]


def test_cards_of_groups_are_counted() -> None:
    """A plan on one group of four cards, of five that there are, uses four."""
    (row,) = rows_of(branches(4), {5: Cluster.parse("5xp100-pcie-16g")}, NONE)
    assert row.plan is not None
    layout = {**Layout().document(), "tensor": 4}
    grouped = replace(row.plan, devices=("gpu0-3",), placement=np.zeros_like(row.plan.placement), layout=layout)
    assert _note(replace(row, plan=grouped, num_devices=5)) == "uses 4 of 5"


def test_bounds_of_forward_passes_hold_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row may be on devices or on groups of them, its bound is that of any layout."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sweeps.py").write_text(MODEL)
    model, cluster = ModelSource("sweeps:net", Reading(training=False)), Cluster.parse("2xp100-pcie-16g")
    (row,) = rows_of(model, {2: cluster})
    assert row.bound_ns == layout_bound({1: model.whole().graph}, cluster)


def test_a_plan_that_cannot_be_written_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is printed, names no plan that is not there, and the error is told behind it. Names that would be those
    of one directory, and directories that are files, are told before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("sweeps.py").write_text(MODEL)
    words = ["place", "sweeps:net", "--budget", "5sims", "--threads", "1", "--out", "out", "--json"]
    devices = ["--devices", "2xp100-pcie-16g", "--sweep", "devices=1..2"]
    Path("out").mkdir()
    Path("out/devices-2").touch()
    assert main([*words, *devices]) == 2
    assert "out/devices-2 is no directory" in capsys.readouterr().err
    Path("out/devices-2").unlink()
    monkeypatch.setattr("gdp.cli.sweep._save", _fail_for(2))
    assert main([*words, *devices]) == 2
    printed = capsys.readouterr()
    assert [row["plan"] for row in orjson.loads(printed.out)["rows"]] == ["out/devices-1/plan.json", None]
    assert printed.err.strip().splitlines()[-1] == "gdp: error: no space left"
    for name in ("a-b.yaml", "a/b.yaml"):
        Path(name).parent.mkdir(exist_ok=True)
        changes.first(Cluster.parse("2xp100-pcie-16g"), 1).save(name)
    assert main([*words, "--sweep", "machines=a/b.yaml,a-b.yaml"]) == 2
    assert "a/b.yaml and a-b.yaml would both be written to" in capsys.readouterr().err


def _fail_for(value: int) -> Callable[..., None]:
    def save(request: object, what: str, row: SweepRow) -> None:
        if row.value == value:
            raise InputError("no space left")

    return save


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sweep", "machines=l4-24g", "--devices", "l4-24g"], "leave --devices out"),
        (["--sweep", "machines=l4-24g,l4-25g"], "no kind 'l4-25g'"),
        (["--sweep", "machines=2xl4-24g,l4-24g", "--pin", "a=gpu1"], "error: --sweep machines=l4-24g: --pin a=gpu1: "),
        (["--sweep", "machines=l4-24g", "--pin", "a=gpu1"], "error: --sweep machines=l4-24g: --pin a=gpu1: "),
        (["--sweep", "devices=1..2"], "--devices: name the devices"),
        ([], "--devices: name the devices"),
        (["--sweep", "batch=1,2", "--batch", "2", "--devices", "l4-24g"], "--batch 2 contradicts it"),
        (["--sweep", "batch=1,2", "--parallel", "tensor=2", "--devices", "l4-24g"], "has no 2 equal cards"),
        (["--sweep", "batch=1,2", "--batches", "2", "--inference", "--devices", "l4-24g"], "--sweep: does not go with"),
        (["--sweep", "microbatches=1,2", "--parallel", "auto", "--devices", "l4-24g"], "leave --parallel out"),
        (["--sweep", "batch=1,2", "--prices", "none.yaml", "--devices", "l4-24g"], "none.yaml: no such file"),
        (["--prices", "none.yaml", "--devices", "l4-24g"], "--prices: the table of --sweep has them"),
        (["--batch", "0", "--devices", "l4-24g"], "--batch is 0"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options that contradict each other, and files that are not there, are one line, exit 2, and nothing written."""
    monkeypatch.chdir(tmp_path)
    assert main(["place", "rnnlm-2", "--budget", "1sims", "--out", "found", *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert len(lines) == 1
    assert not Path("found").exists()
