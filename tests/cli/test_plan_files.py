"""The files of `gdp place --out` for steps of many ops, on many devices, and where the budget is over."""

import signal
from pathlib import Path

import pytest

from benchmarks.graphs import lstm_training_graph
from gdp.cli import main, plan_files, request
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.report.page_data import PageData
from gdp.simulator.problem import Problem

STEP = lstm_training_graph(6)
PLACE = ["place", "step.json.gz", "--no-cache", "--no-advice", "--out", "plans"]


@pytest.fixture(autouse=True)
def many_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the step one of many ops, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    STEP.save("step.json.gz")
    monkeypatch.setattr(plan_files, "_MANY_OPS", STEP.num_ops - 1)


def written() -> set[str]:
    return {path.name for path in Path("plans").iterdir()}


def test_a_large_graph_is_in_columns_and_read_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large graph is written as safetensors and a small one as JSON, and `report` finds the one of the plan."""
    placing = [*PLACE, "--devices", "2xp100-pcie-16g", "--budget", "20sims"]
    assert main(placing) == 0
    assert written() == {"plan.json", "graph.safetensors", "cluster.json", "report.html"}
    assert Graph.load("plans/graph.safetensors").fingerprint == STEP.fingerprint
    assert main(["report", "plans/plan.json", "--out", "again.html"]) == 0
    monkeypatch.setattr(plan_files, "_MANY_OPS", STEP.num_ops)
    before = Path("plans/graph.safetensors").read_bytes()
    placing[1] = "other.json.gz"
    lstm_training_graph(5).save("other.json.gz")
    assert main(placing) == 0
    assert written() == {"plan.json", "graph.safetensors", "graph.json.gz", "cluster.json", "report.html"}
    assert Path("plans/graph.safetensors").read_bytes() == before  # it may be the user's own
    assert main(["report", "plans/plan.json", "--out", "again.html"]) == 0


def test_without_out_a_large_graph_keeps_the_name_that_spares_others() -> None:
    """A large graph's file becomes safetensors only if files were asked for; otherwise it keeps its name."""
    problem = Problem.build(STEP, Cluster.parse("2xp100-pcie-16g"))
    for is_asked_for, name in ((False, "graph-2.json.gz"), (True, "graph-2.safetensors")):
        files = plan_files.PlanFiles(Path("plan-2.json"), Path("graph-2.json.gz"), None, None, is_asked_for)
        graph = files.suited_to(problem).graph
        assert graph is not None
        assert graph.name == name


def test_a_report_that_takes_longer_than_the_budget_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are written until the budget's end; a long report that would end later is not, and a note says so."""
    monkeypatch.setattr(request, "latest_s", lambda _: 0.0)
    assert main([*PLACE, "--devices", "2xp100-pcie-16g", "--budget", "1s"]) == 0
    assert written() == {"plan.json", "graph.safetensors", "cluster.json"}
    printed = capsys.readouterr()
    assert "gdp: note: plans/report.html is not written: that takes longer than the budget has" in printed.err
    assert "Next: gdp simulate plans/plan.json\n" in printed.out


def test_an_interrupt_while_the_report_is_written_leaves_it_out_and_shows_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupt while the report is written leaves it out with a note, and the answer is still printed."""
    reached = []

    def write_slowly(_path: Path, _data: PageData) -> None:
        reached.append("the start")
        signal.raise_signal(signal.SIGTERM)
        reached.append("the end")

    monkeypatch.setattr(plan_files, "write_page", write_slowly)
    assert main([*PLACE, "--devices", "2xp100-pcie-16g", "--budget", "20sims"]) == 130
    assert reached == ["the start"]
    assert written() == {"plan.json", "graph.safetensors", "cluster.json"}
    printed = capsys.readouterr()
    assert "gdp: note: plans/report.html is not written: that takes seconds" in printed.err
    assert "Step time" in printed.out


def test_a_cluster_of_many_devices_is_not_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The cluster file of 132 devices is left out with a note, and `report` works without it."""
    devices = ["--devices", "33x(4xl4-24g)@100gbit"]
    assert main([*PLACE, *devices, "--budget", "2sims"]) == 0
    assert written() == {"plan.json", "graph.safetensors", "report.html"}
    assert "plans/cluster.json is not written" in capsys.readouterr().err
    assert main(["report", "plans/plan.json", "--out", "again.html"]) == 0
