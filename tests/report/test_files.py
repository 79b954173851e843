"""Other pictures of a step: figures, a terminal, a notebook."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from report_cases import HOSTILE, page_data, two_towers
from rich.console import Console

from gdp.cli import main
from gdp.errors import InputError
from gdp.planning.compare import compare
from gdp.report.run_answer import read_run
from gdp.report.timeline import figure_bytes
from gdp.report.timeline_text import TimelineText, busy_shares
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate
from strategies import Instance, instances

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return page_data(two_towers(HOSTILE)).simulation


def _simulate(instance: Instance) -> Simulation:
    times, hosts = (np.array(table, np.int64) for table in (instance.op_time_ns, instance.host_time_ns))
    limits = np.full(times.shape[1], 2**62)
    problem = Problem(instance.graph, instance.cluster, times, hosts, times >= 0, limits, np.full(len(times), -1))
    return simulate(problem, instance.placement, priority=instance.priority)


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_figures(simulation: Simulation, kind: str, start: bytes) -> None:
    """A figure is data, the same every time."""
    pytest.importorskip("matplotlib")
    first, second = (figure_bytes(simulation, kind) for _ in range(2))
    assert first.startswith(start)
    assert first == second


@settings(max_examples=40)
@given(instances())
def test_terminal_timeline_adds_up(instance: Instance) -> None:
    """The columns of a device's line add up to the time that it computes, and no line is wider than asked for."""
    simulation = _simulate(instance)
    if simulation.step_time_ns:
        shares = busy_shares(simulation, 50)
        np.testing.assert_allclose(shares.mean(axis=1), simulation.busy_fraction, atol=1e-6)
        some = np.arange(simulation.problem.num_ops) % 2 == 0
        parts = busy_shares(simulation, 50, some) + busy_shares(simulation, 50, ~some)
        np.testing.assert_allclose(parts, shares, atol=1e-6)
    console = Console(width=60, file=None, record=True, quiet=True)
    lines = console.render_lines(TimelineText(simulation), console.options, pad=False)
    assert max(sum(len(part.text) for part in line) for line in lines) <= 60


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.data: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.data.append(data)


def test_notebooks_show_plans_and_comparisons() -> None:
    """Plan and Comparison show themselves as a table; names are text in it."""
    data = page_data(two_towers(HOSTILE))
    shown = data.plan._repr_html_()
    object.__setattr__(data.plan, "devices", HOSTILE[:2])
    hostile = data.plan._repr_html_()
    problem = data.simulation.problem
    compared = compare(problem.graph, problem.cluster, placers=["single", "heft"], seeds=1)._repr_html_()
    for text, expected in ((shown, "gpu0"), (hostile, HOSTILE[0]), (compared, "heft")):
        parser = _Text()
        parser.feed(text)
        assert parser.tags == {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
        assert expected in parser.data


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`gdp report` writes what is asked for beside a plan, refuses other names and other graphs in one line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = page_data(two_towers())
    problem = data.simulation.problem
    plan = tmp_path / "plan.json"
    data.plan.save(plan)
    assert main(["report", str(plan)]) == 2
    assert "was made in Python, of a graph called 'two-towers'; name its MODEL or file" in capsys.readouterr().err
    problem.graph.save(tmp_path / "graph.json.gz")
    problem.cluster.save(tmp_path / "cluster.json")
    assert main(["report", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == [str(tmp_path / "report.html")]
    page = (tmp_path / "report.html").read_text()
    assert "speed-up" in page
    assert main(["report", str(plan), "--out", str(tmp_path / "p.html")]) == 0
    assert (tmp_path / "p.html").stat().st_size > 10**6
    capsys.readouterr()
    assert main(["report", str(plan), "--figure", str(tmp_path / "f.jpeg")]) == 2
    assert "a name that ends in .svg or .pdf or .png is expected" in capsys.readouterr().err
    two_towers(layers=2).save(tmp_path / "other.json.gz")
    assert main(["report", str(plan), "--graph", str(tmp_path / "other.json.gz")]) == 2
    assert "is not what was placed: it has 10 ops, not 26" in capsys.readouterr().err


def test_measured_times_are_read_strictly(tmp_path: Path) -> None:
    """What `gdp run --json` printed of the plan is read; anything else, and other plans, are refused in one line."""
    path, data = tmp_path / "run.json", page_data(two_towers())
    arm = {"step_time_ns": 10, "step_time_quartiles_ns": [9, 11]}
    document = {
        **arm,
        "steps": 5,
        "predicted_step_time_ns": data.plan.step_time_ns,
        "one_device": {**arm, "device": "gpu0"},
        "devices": ["gpu0", "gpu1"],
        "results": {"equal": True, "reference": "PyTorch's own step"},
    }
    path.write_text(json.dumps(document))
    assert read_run(path, data.plan)["one_device"]["step_time_quartiles_ns"] == [9, 11]
    for change, words in (
        ({"predicted_step_time_ns": "12"}, "is not what `gdp run --json` prints"),
        ({"results": None}, "is not what `gdp run --json` prints"),
        ({"predicted_step_time_ns": 12}, "is of a plan of 12 ns on gpu0, gpu1, this one takes"),
        ({"devices": ["gpu1", "gpu0"]}, "on gpu1, gpu0, this one takes"),
    ):
        path.write_text(json.dumps(document | change))
        with pytest.raises(InputError, match=words):
            read_run(path, data.plan)
