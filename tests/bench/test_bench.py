"""Benchmarks at tiny settings: they run end to end, and their tables say what they must."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdp.bench import graphs, runs, search, simulator
from gdp.bench.tables import geometric_mean, markdown_table, mean_ratio, mean_sentence, milliseconds, verdict
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.plan import Baseline, Plan
from gdp.problem import Problem
from gdp.simulate import verify

ROW = search.Row(
    workload="w", cluster="c", num_ops=3, step_time_ns=(80, 125), lower_bound_ns=50,
    simulations=(9, 11), seconds=(1.0, 1.0),
    baselines={
        "single": Baseline("infeasible", 60, 0.1),
        "expert": Baseline("ok", 200, 0.1),
        "metis": Baseline("ok", 100, 0.1),
        "heft": Baseline("failed", None, 0.1),
    },
)  # fmt: skip


def small_inputs(name: str) -> tuple[Graph, Cluster]:
    """`lstm-K`: K steps of two layers, on two devices."""
    return graphs.lstm_training_graph(int(name.split("-")[1]), num_layers=2), Cluster.parse("2xp100-pcie-16g")


@pytest.fixture(autouse=True)
def _small_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "workload_inputs", small_inputs)
    monkeypatch.setattr(simulator, "workload_inputs", small_inputs)


def run_search(out: Path | None, on_row: Any = lambda line: None) -> dict[str, Any]:
    return search.run(workloads=["lstm-2", "lstm-3"], budget=Budget(simulations=50), seeds=2, out=out, on_row=on_row)


def test_search_reports_every_workload_and_stores_plans_that_verify(tmp_path: Path) -> None:
    lines: list[str] = []
    figures = run_search(tmp_path, lines.append)
    assert [line.split(":")[0] for line in lines] == ["lstm-2", "lstm-3"]
    for row in figures["rows"]:
        problem = Problem.build(*small_inputs(row["workload"]))
        for seed, step_time_ns in enumerate(row["step_time_ns"]):
            plan = Plan.load(tmp_path / f"{row['workload']}-seed{seed}.plan.json.gz")
            assert verify(problem, plan) == []
            assert plan.step_time_ns == step_time_ns >= row["lower_bound_ns"]
        assert {"single", "expert", "metis", "heft"} <= row["baselines"].keys()
        assert row["ratio_to_expert"] > 0
    assert [figures["geometric_means"][name]["num_workloads"] for name in ("to_best_classical", "to_expert")] == [2, 2]
    stored = json.loads((tmp_path / "search.json").read_bytes())
    assert stored["geometric_means"] == figures["geometric_means"]
    text = (tmp_path / "search.md").read_text()
    assert text == figures["markdown"]
    assert "gdp bench search --budget 50sims --seeds 2 --workloads lstm-2,lstm-3" in text
    for part in ("| lstm-2 |", "| best classical |", "| metis |", "target 0.85", "target 0.72", "bound"):
        assert part in text


def test_search_ends_with_an_error_when_a_plan_does_not_give_its_figures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "verify", lambda problem, plan: ["step_time_ns is 1; the replay gives 2"])
    with pytest.raises(RuntimeError, match=r"lstm-2-seed0.plan.json.gz does not hold: .* the replay gives 2"):
        run_search(None)


def test_ratios_are_to_the_best_plan_that_fits() -> None:
    # sqrt(80 * 125) = 100: as fast as METIS (100), half the expert's 200; `single` is fastest but does not fit
    assert (ROW.best_classical, ROW.best_expert) == ("metis", "expert")
    assert ROW.ratio("metis") == pytest.approx(1.0)
    assert ROW.ratio("expert") == pytest.approx(0.5)
    assert ROW.ratio("single") is None
    assert ROW.ratio("heft") is None
    assert ROW.gap == pytest.approx(102.5 / 50 - 1)


def test_a_mean_leaves_out_rows_without_a_ratio_and_says_over_how_many_it_is() -> None:
    mean = mean_ratio([0.5, None, 2.0])
    assert mean == {"ratio": pytest.approx(1.0), "num_workloads": 2, "num_rows": 3}
    sentence = mean_sentence("`auto`", mean, "the expert plan", 0.72, 0.62)
    assert "over 2 workloads, without the 1 where one of both has no plan that fits" in sentence
    assert "target 0.72: missed; aim 0.62: missed" in sentence
    assert "so there is no mean" in mean_sentence("`auto`", mean_ratio([None]), "the expert plan", 0.72, 0.62)


def test_a_verdict_is_of_at_most_or_at_least_the_target_and_the_aim() -> None:
    assert verdict(0.7, 1 / 1.16, 0.65) == "target 0.862: reached; aim 0.65: missed"
    assert verdict(0.5, 0.5, 0.75, at_least=True, text="{:.0%}".format) == "target 50%: reached; aim 75%: missed"


def test_simulator_reports_speed_reference_ratio_and_slope(tmp_path: Path) -> None:
    config = simulator.SimulatorBenchConfig(
        workload="lstm-3", placements_per_family=3, repeats=2, seconds_per_repeat=0.01, sizes=(300, 600, 1200),
        small_size=100, with_compilation=False,
    )  # fmt: skip
    figures = simulator.run(out=tmp_path, on_row=lambda line: None, config=config)
    assert all(min(row["per_second"]) > 0 for row in figures["speed"])
    assert [row["clock"] for row in figures["speed"]].count("second") == 2
    assert all(row["ratio"] > 1 for row in figures["reference"])
    assert len(figures["scaling"]["points"]) == 3
    assert json.loads((tmp_path / "simulator.json").read_bytes())["scaling"] == figures["scaling"]
    for part in ("per core-second", "## Simulator", "reference", "ns an op", "log-log", "Two threads"):
        assert part in figures["markdown"]


def test_geometric_mean_by_hand() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)  # sqrt(16)
    assert geometric_mean([0.5, 1.0, 2.0, 1.0]) == pytest.approx(1.0)
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="geometric mean"):
            geometric_mean(bad)


def test_slope_is_the_power_of_the_size() -> None:
    sizes = np.array([10, 100, 1000])
    assert simulator.log_log_slope(sizes, 3.0 * sizes**1.5) == pytest.approx(1.5)


def test_tables_and_times_in_markdown() -> None:
    assert markdown_table(("a", "b"), [("x", "1")]) == "| a | b |\n| :-- | --: |\n| x | 1 |"
    assert [milliseconds(time) for time in (12_345_678, 999_960_000, 1_234_567_890, 12_345_678_900)] == [
        "12.35", "1000", "1235", "12346",
    ]  # fmt: skip


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
