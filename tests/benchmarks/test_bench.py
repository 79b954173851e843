"""Benchmarks at tiny settings: they run end to end, and their tables say what they must."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import graphs, page, runs, simulator
from benchmarks.comparison import BEST_CLASSICAL, EXPERT, MeanRatio, WorkloadRow
from benchmarks.graphs import Inputs
from benchmarks.page import geometric_mean, header, milliseconds, spread
from benchmarks.search import SearchBenchmark
from benchmarks.simulator import SimulatorBenchmark
from gdp.budget import Budget
from gdp.errors import InputError
from gdp.simulator.plan import Baseline, Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import verify

ROW = WorkloadRow(
    workload="w",
    cluster="c",
    num_ops=3,
    lower_bound_ns=50,
    runs={"auto": tuple(runs.Run("ok", time_ns, 1.0, 1.0, 9, 0, {}) for time_ns in (80, 125))},
    baselines={
        "single": Baseline("infeasible", 60, 0.1),
        "expert": Baseline("ok", 200, 0.1),
        "metis": Baseline("ok", 100, 0.1),
        "heft": Baseline("failed", None, 0.1),
    },
)


pytestmark = pytest.mark.usefixtures("small_inputs")
SEARCH = SearchBenchmark(workloads=("lstm-2", "lstm-3"), budget=Budget(simulations=50), seeds=2)


def test_search(tmp_path: Path, small_inputs: Inputs) -> None:
    """Search reports every workload and stores plans that verify."""
    lines: list[str] = []
    figures = SEARCH.run(out=tmp_path, say=lines.append)
    assert [line.split(":")[0] for line in lines] == ["lstm-2", "lstm-3"]
    for row in figures["rows"]:
        problem = Problem.build(*small_inputs(row["workload"]))
        for seed, run in enumerate(row["runs"]["auto"]):
            plan = Plan.load(tmp_path / f"rows/{row['workload']}-auto-seed{seed}.plan.json.gz")
            assert verify(problem, plan) == []
            assert plan.step_time_ns == run["step_time_ns"] >= row["lower_bound_ns"]
        assert {"single", "expert", "metis", "heft"} <= row["baselines"].keys()
    assert [figures["geometric_means"][name]["num_workloads"] for name in ("to_best_classical", "to_expert")] == [2, 2]
    stored = json.loads((tmp_path / "search.json").read_bytes())
    assert stored["geometric_means"] == figures["geometric_means"]
    text = (tmp_path / "search.md").read_text()
    assert text == figures["markdown"]
    assert "python -m benchmarks search --budget 50sims --seeds 2 --workloads lstm-2,lstm-3" in text
    for part in ("| lstm-2 |", "| best classical |", "| metis |", "(over 2 workloads)", "(search.svg)"):
        assert part in text


def test_wrong_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search ends with an error when a plan does not give its figures again."""
    monkeypatch.setattr(runs, "verify", lambda problem, plan: ["step_time_ns is 1; the replay gives 2"])
    with pytest.raises(RuntimeError, match=r"lstm-2-auto-seed0.plan.json.gz does not hold: .* the replay gives 2"):
        SEARCH.run()


def test_a_page(tmp_path: Path) -> None:
    """A page is written with its figure and rows are kept apart."""
    benchmark = SearchBenchmark(workloads=("lstm-2",), budget=Budget(simulations=20), seeds=1)
    figures = benchmark.run(out=tmp_path / "page.md", rows=tmp_path / "rows")
    assert {path.name for path in tmp_path.iterdir()} == {"page.md", "page.svg", "rows"}
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# Search\n\n    python -m benchmarks search --budget 20sims --seeds 1 --workloads lstm-2\n")
    assert "![Search](page.svg)" in text
    assert benchmark.run(rows=tmp_path / "rows")["rows"] == figures["rows"]  # found again


@pytest.mark.parametrize("options", [{"seeds": 0}, {"workloads": ()}])
def test_empty_settings(options: dict[str, Any]) -> None:
    """Settings that measure nothing are refused."""
    with pytest.raises(InputError, match=r"search: .*(seeds is 0|no workloads); at least"):
        SearchBenchmark(**options)


def test_ratios() -> None:
    # sqrt(80 * 125) = 100: as fast as METIS (100), half the expert's 200; `single` is fastest but does not fit
    """Ratios are to the best plan that fits."""
    assert (ROW.best_classical, ROW.best_expert) == ("metis", "expert")
    assert ROW.ratio("auto", BEST_CLASSICAL) == pytest.approx(1.0)
    assert ROW.ratio("auto", EXPERT) == pytest.approx(0.5)
    assert ROW.ratio("auto", "single") is None
    assert ROW.ratio("auto", "heft") is None
    assert ROW.to_bound("auto") == pytest.approx(2.0)
    assert [ROW.baseline_cell(placer) for placer in ("single", "heft")] == ["OOM", "none"]


def test_the_expert() -> None:
    """The expert is the single device where that is faster but not in the table of placers."""
    row = replace(ROW, baselines={"single": Baseline("ok", 1_000_000, 0.1), "expert": Baseline("ok", 2_000_000, 0.1)})
    assert (row.times_ns(EXPERT), row.named_cell(EXPERT)) == ((1_000_000,), "1.000 (single)")
    assert row.baseline_cell("expert") == "2.000"


def test_means() -> None:
    """A mean leaves out rows without a ratio and says over how many it is."""
    mean = MeanRatio.of([[0.5, 0.5], None, [2.0, 4.5]])
    # by seed sqrt(0.5 * 2) and sqrt(0.5 * 4.5)
    assert (mean.ratio, mean.by_seed) == (pytest.approx(1.5**0.5), pytest.approx((1.0, 1.5)))
    assert (mean.num_workloads, mean.num_rows) == (2, 3)
    assert str(mean) == "1.225 (1.000 to 1.500)"
    assert str(MeanRatio.of([None])) == "-"
    macros = page._templates().get_template("_parts.md").module
    sentence = macros.mean("`auto`", mean, "the expert plan").strip()
    assert sentence.startswith(
        "`auto` takes **1.225x** the step time of the expert plan (over 2 workloads, without the 1"
    )
    assert "so there is no mean" in macros.mean("`auto`", MeanRatio.of([None]), "the expert plan")


def test_simulator(tmp_path: Path) -> None:
    """Simulator reports speed reference ratio and slope."""
    benchmark = SimulatorBenchmark(
        workload="lstm-3",
        placements_per_family=3,
        repeats=2,
        seconds_per_repeat=0.01,
        sizes=(300, 600, 1200),
        small_size=100,
    )
    figures = benchmark.run(out=tmp_path)
    assert all(min(row["per_second"]) > 0 for row in figures["speed"])
    assert [row["clock"] for row in figures["speed"]].count("second") == 2
    assert all(row["ratio"] > 1 for row in figures["reference"])
    assert len(figures["scaling"]["points"]) == 3
    assert json.loads((tmp_path / "simulator.json").read_bytes())["scaling"] == figures["scaling"]
    for part in ("per core-second", "# Simulator", "reference", "ns an op", "log-log", "Two threads"):
        assert part in figures["markdown"]


def test_geometric_mean_by_hand() -> None:
    """The geometric mean is that of a calculation by hand."""
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)  # sqrt(16)
    assert geometric_mean([0.5, 1.0, 2.0, 1.0]) == pytest.approx(1.0)
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="geometric mean"):
            geometric_mean(bad)


def test_slope_is_the_power_of_the_size() -> None:
    """The slope is the power of the size."""
    sizes = np.array([10, 100, 1000])
    assert simulator.log_log_slope(sizes, 3.0 * sizes**1.5) == pytest.approx(1.5)


def test_tables_and_times_in_markdown() -> None:
    """Tables and times are written in Markdown."""
    assert header("a", ["b"]) == "| a | b |\n| :-- | --: |"
    assert [spread(values, ".1f") for values in ([2.0, 1.0], [1.01, 1.0])] == ["1.0 to 2.0", "1.0"]
    assert [milliseconds(time) for time in (12_345_678, 999_960_000, 1_234_567_890, 12_345_678_900)] == [
        "12.35",
        "1000",
        "1235",
        "12346",
    ]


def test_synthetic_graph_is_a_training_step_of_the_size_that_was_asked_for() -> None:
    """Two layers over three steps: the ops of each cell and step, and an update for each of five parameters."""
    graph = graphs.lstm_training_graph(3, num_layers=2)
    kinds = Counter(zip(graph.kinds, graph.phases, strict=True))
    # a cell: 2 matmul, 3 sigmoid, 2 tanh, 3 mul, 2 add and a dropout; a step besides: a projection and a loss
    expected = {"matmul": 2 * 6 + 3, "sigmoid": 18, "tanh": 12, "mul": 18, "add": 12, "dropout": 6, "log_softmax": 3}
    assert {kind: kinds[kind, "forward"] for kind in expected} == expected
    assert kinds["update", "update"] == kinds["parameter", "forward"] == 5
    # a matmul has a gradient for each of its inputs, but for the zero outputs that a layer starts from: 2 * 15 - 2
    assert kinds["matmul", "backward"] == 28
    for size in (1_000, 5_000):
        assert abs(graphs.lstm_training_graph_of(size).num_ops / size - 1) < 0.1


def test_every_page_has_a_template_that_compiles() -> None:
    """A mistake in a template is found before hours of measuring."""
    templates = page._templates()
    names = {name for name in templates.list_templates(extensions=["md"]) if templates.get_template(name)}
    assert {"search.md", "paper.md", "execution.md", "_parts.md"} <= names
