"""The page of a plan, in a headless Chromium: what it says, that it works, that names are data."""

import base64
import gzip
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, browser, open_page, resize, set_dark
from report_cases import HOSTILE, page_data, two_towers

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.accumulation import accumulated
from gdp.notebook import digits
from gdp.parallel.layout import Layout
from gdp.planning.advice import Advice, WhatIf
from gdp.planning.layout_answer import LayoutAnswer, LayoutRow
from gdp.report.page import embed, render, write_report
from gdp.report.page_data import PageData, columns, summary
from gdp.search.candidate import ESTIMATED, OK
from gdp.simulator.plan import Baseline, Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate
from hand_cases import HAND_CASES, make_cluster

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium or no chromedriver (Debian: chromium, chromium-driver)"
)


@pytest.fixture(scope="module")
def made() -> PageData:
    return page_data(two_towers())


@pytest.fixture(scope="module")
def page(made: PageData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(made), encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.fixture
def driver(shared: Any, page: Path) -> Any:
    """A browser that shows the page, light and 1280 pixels wide."""
    _show(shared, page)
    return shared


def _show(driver: Any, page: Path) -> None:
    driver.get("about:blank")
    driver.get_log("browser")
    driver.get_log("performance")
    resize(driver, 1280)
    set_dark(driver, False)
    open_page(driver, page)


def _run(driver: Any, script: str, *arguments: object) -> Any:
    return driver.execute_script(script, *arguments)


def _view(driver: Any) -> tuple[float, float]:
    low, high = _run(driver, "return gdpReport.timeline.view")
    return low, high


def _press(driver: Any, keys: str) -> None:
    driver.switch_to.active_element.send_keys(keys)


def _find(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def _wait(driver: Any, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20, 0.05).until(lambda there: there.execute_script(f"return {script}"))


def _check_quiet(driver: Any, page: Path) -> None:
    """The page is drawn, has said nothing on the console, and has asked for nothing but itself."""
    assert _run(driver, "return document.documentElement.dataset.ready") == "true"
    assert driver.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [item["params"]["request"]["url"] for item in messages if item["method"] == "Network.requestWillBeSent"]
    assert page.as_uri() in asked
    assert [url for url in asked if url != page.as_uri() and not url.startswith("data:")] == []


@needs_browser
def test_opens_quietly_and_alone(driver: Any, page: Path) -> None:
    """The page is drawn without a word on the console and without any request."""
    _check_quiet(driver, page)


@needs_browser
def test_says_the_plans_figures(driver: Any, made: PageData) -> None:
    """Cards, tables and curves show the figures of the plan and its replay."""
    text = _find(driver, "main").text
    step_ms = made.plan.step_time_ns / 1e6
    cards = [card.text.split("\n")[0] for card in driver.find_elements("css selector", ".card")]
    assert cards[0] == f"{step_ms:.3g} ms" or float(cards[0].split()[0]) == pytest.approx(step_ms, rel=1e-3)
    assert "no single device can hold it" in text
    assert "2.00×" in cards  # the expert, as made up
    assert "1.50×" in cards  # metis
    assert f"step time, {digits(0.9 * step_ms, 3)} ms to {digits(1.25 * step_ms, 3)} ms" in text
    peaks = [np.float64(made.simulation.peak_memory_bytes[device] / 2**20) for device in range(2)]
    for peak in peaks:
        assert re.search(rf"{peak:.3g} MiB", text), peak
    rows = [row.text for row in driver.find_elements("css selector", "#run tr")]
    assert any(row.startswith("plan ") and row.endswith("-50 %") for row in rows), rows  # took twice as long
    gap = made.plan.step_time_ns / made.plan.lower_bound_ns - 1
    assert f"{digits(100 * gap, 3)} %" in cards
    assert sum(HOSTILE[0] in row for row in rows) == 3  # a kind of ops, an op, a transfer
    starts = _run(driver, "return Array.from(gdpReport.data.start)")
    assert starts == made.simulation.op_start_ns.tolist()


@pytest.mark.parametrize(
    ("status", "layout", "texts"),
    [
        ("ok", {}, ["the best single device", "plain data parallelism"]),
        ("ok", {"tensor": 2}, ["the best single group of cards", "data parallelism of such groups"]),
        ("infeasible", {}, ["plain data parallelism", "no single device can hold the whole batch"]),
        ("failed", {}, ["plain data parallelism"]),  # pins are to several devices
    ],
)
def test_terminal_and_page_name_baselines_alike(
    made: PageData, status: str, layout: dict[str, int], texts: list[str]
) -> None:
    """Baselines of plans on groups are on groups, too; that no device holds the step is said only where it is so."""
    baselines = {"single": Baseline(status, 10**9, 0.1), "data parallel": Baseline("ok", 10**9, 0.1)}
    plan = replace(made.plan, layout=Layout().document() | layout)
    assert plan.search is not None
    document = summary(replace(made, plan=replace(plan, search=replace(plan.search, baselines=baselines))))
    assert [text for _, text in document["against"]] == texts
    assert all(text in document["headline"] for text in texts)


@needs_browser
def test_draws_what_runs_when(driver: Any, made: PageData) -> None:
    """A column of a device's row is coloured if and only if an op runs there, within a pixel."""
    width, ratio, drawn = _run(
        driver,
        """
        const { raster, rows } = gdpReport.timeline, drawn = [];
        for (let row = 0; row < 2; row++) {
            const line = (rows[row].top + rows[row].height - 2) * raster.ratio * raster.across;
            drawn.push(Array.from(raster.pixels.subarray(line, line + raster.across), pixel => pixel !== 0));
        }
        return [raster.across, raster.ratio, drawn];""",
    )
    assert ratio == 1
    simulation = made.simulation
    for device, row in enumerate(drawn):
        at = np.arange(width)
        starts, ends = simulation.op_start_ns, simulation.op_finish_ns
        here = (simulation.placement == device) & (ends > starts)
        scale = width / simulation.step_time_ns
        low, high = starts[here] * scale, ends[here] * scale
        sure = ((low[:, None] + 1 <= at) & (at <= high[:, None] - 1)).any(axis=0)
        possible = ((low[:, None] - 2 <= at) & (at <= high[:, None] + 2)).any(axis=0)
        zero = starts[(simulation.placement == device) & (ends == starts)] * scale
        possible |= (abs(zero[:, None] - at) <= 2).any(axis=0)
        assert sure.sum() > width / 4
        assert np.array(row)[sure].all()
        assert not np.array(row)[~possible].any()


@needs_browser
def test_keys_pan_zoom_and_choose(driver: Any) -> None:
    """Keys on the timeline pan, zoom, walk through rows and ops; buttons zoom too."""
    step = _view(driver)[1]
    _run(driver, "document.getElementById('timeline').focus()")
    _press(driver, "++")
    low, high = _view(driver)
    assert high - low == pytest.approx(step / 4, rel=1e-3)
    _press(driver, "\ue014")  # right
    assert _view(driver)[0] == pytest.approx(low + step / 20, rel=1e-2)
    _press(driver, "-0")
    assert _view(driver) == (0, step)
    _press(driver, "\ue015")  # down: the first row
    first = _find(driver, "#details .name").text
    _press(driver, "]")
    second = _find(driver, "#details .name").text
    assert first != second
    _press(driver, "[")
    assert _find(driver, "#details .name").text == first
    _find(driver, "#zoom-in").click()
    assert _view(driver)[1] - _view(driver)[0] == pytest.approx(step / 2, rel=1e-3)
    _find(driver, "#zoom-all").click()
    assert _view(driver) == (0, step)


@needs_browser
def test_wheel_and_drag(driver: Any) -> None:
    """Ctrl and the wheel zoom around the pointer; dragging pans."""
    from selenium.webdriver.common.action_chains import ActionChains, ScrollOrigin

    timeline = _find(driver, "#timeline")
    _run(driver, "arguments[0].scrollIntoView({ block: 'center' })", timeline)
    step = _view(driver)[1]
    origin = ScrollOrigin.from_element(timeline, 100, -40)
    ActionChains(driver).key_down("\ue009").scroll_from_origin(origin, 0, -400).key_up("\ue009").perform()
    _wait(driver, f"gdpReport.timeline.view[1] - gdpReport.timeline.view[0] < {0.95 * step}")
    low, high = _view(driver)
    drag = ActionChains(driver).move_to_element_with_offset(timeline, 100, -40).click_and_hold()
    drag.move_by_offset(-60, 0).move_by_offset(-60, 0).release().perform()
    _wait(driver, f"gdpReport.timeline.view[0] > {low}")
    assert _view(driver)[1] - _view(driver)[0] == pytest.approx(high - low, rel=1e-3)


@needs_browser
def test_search_finds_ops(driver: Any, made: PageData) -> None:
    """`/` goes to the search; it counts ops by name, module or kind, and Enter shows one after the other."""
    graph = made.simulation.problem.graph
    _run(driver, "document.getElementById('timeline').focus()")
    _press(driver, "/")
    _press(driver, "tower_LEFT.layers.3")
    _wait(driver, "document.getElementById('found').textContent !== ''")
    assert _find(driver, "#found").text == "2 ops"
    _press(driver, "\n")
    assert _find(driver, "#found").text == "1 of 2 ops"
    _press(driver, "\n")
    assert _find(driver, "#details .name").text == "tower_left.layers.3.mm"
    low, high = _view(driver)
    op = graph.op_names.index("tower_left.layers.3.mm")
    assert low <= made.simulation.op_start_ns[op] <= high
    _press(driver, "\ue00c")  # escape
    assert _find(driver, "#search").get_attribute("value") == ""
    assert _run(driver, "return gdpReport.timeline.matches") is None


@needs_browser
def test_hover_tells_of_ops_and_transfers(driver: Any, made: PageData) -> None:
    """The pointer over an op tells name, device, times and why it waited; over a transfer, bytes and channel."""
    from selenium.webdriver.common.action_chains import ActionChains

    _run(driver, "document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    where = """
        const t = gdpReport.timeline, row = arguments[0], at = arguments[1], box = t.place.getBoundingClientRect();
        const [x] = t.chart.convertToPixel({ gridIndex: 0 }, [at, 0]), { top, height } = t.rows[row];
        return [x - box.width / 2, 8 + top + height / 2 - box.height / 2];"""
    simulation = made.simulation
    graph = simulation.problem.graph
    op = graph.op_names.index("head.mm")
    middle = (simulation.op_start_ns[op] + simulation.op_finish_ns[op]) / 2
    x, y = _run(driver, where, int(simulation.placement[op]), float(middle))
    timeline = _find(driver, "#timeline")
    ActionChains(driver).move_to_element_with_offset(timeline, x, y).perform()
    _wait(driver, "!document.getElementById('tip').hidden")
    tip = _find(driver, "#tip").text
    assert tip.startswith("head.mm\n")
    assert made.plan.devices[simulation.placement[op]] in tip
    assert "waited for" in tip or "whose output it reads" in tip
    sent = int(np.argmax(simulation.transfer_end_ns - simulation.transfer_start_ns))
    row = _run(
        driver,
        "return gdpReport.timeline.rows.findIndex(row => !row.isDevice && row.items.includes(arguments[0]))",
        sent,
    )
    between = (simulation.transfer_start_ns[sent] + simulation.transfer_end_ns[sent]) / 2
    x, y = _run(driver, where, row, float(between))
    ActionChains(driver).move_to_element_with_offset(timeline, x, y).perform()
    _wait(driver, "document.getElementById('tip').textContent.startsWith('Output of')")
    assert "MiB" in _find(driver, "#tip").text


def _plan_of(simulation: Simulation) -> Plan:
    """Returns a plan by hand, without a bound."""
    graph, cluster = simulation.problem.graph, simulation.problem.cluster
    return Plan(
        graph.fingerprint,
        cluster.fingerprint,
        tuple(device.name for device in cluster.devices),
        simulation.placement,
        simulation.order,
        simulation.step_time_ns,
        simulation.peak_memory_bytes,
        0,
        "hand",
        0,
        "0",
    )


@needs_browser
def test_hosts_have_lanes(shared: Any, tmp_path: Path) -> None:
    """A device's row shows where it waits for its host, and a row below it when the host issues each op.

    h0 |00.......1122 |   the host takes 2 ns an op, and waits for the end of op 0
    d0 |::0000000::1:2|   5 of 14 ns are waits, 36 %
    """
    case = next(case for case in HAND_CASES if case.name.startswith("a host that waits for an op"))
    times, hosts = np.array(case.op_time_ns), np.array(case.host_time_ns)
    problem = Problem(case.graph, case.cluster, times, hosts, times >= 0, np.full(1, 2**40), np.full(3, -1))
    simulation = simulate(problem, case.placement)
    row = LayoutRow("data=1", Layout(), 1, OK, 14, 0, (0,), "")
    answer = LayoutAnswer((row,), 0, 0, ("a tie with <b>data=2</b>",))
    page = tmp_path / "hosts.html"
    page.write_text(render(PageData(_plan_of(simulation), simulation, layouts=answer)), encoding="utf-8", newline="")
    _show(shared, page)
    listed = _run(shared, "return ['issueStart', 'issueEnd', 'start'].map(name => [...gdpReport.data[name]])")
    assert listed == [[0, 9, 11], [2, 11, 13], [2, 11, 13]]
    at = """
        const t = gdpReport.timeline, { ratio, across, pixels } = t.raster, [row, ns] = arguments;
        const { top, height } = t.rows[row], [left, x] = [0, ns].map(at => t.chart.convertToPixel("grid", [at, 0])[0]);
        const first = Math.round((top + height / 2) * ratio) * across + Math.round((x - left) * ratio);
        const hit = t.hit(x, 8 + top + height / 2), near = new Set(pixels.subarray(first - 6, first + 6));
        return [hit && t.describe(hit).textContent, [...near].map(pixel => pixel !== 0)]"""
    told, wait = _run(shared, at, 0, 10)
    assert told.endswith("waited 9 ns for the device. Then waits 2 ns for the host.")
    assert "host2 ns, from 9 ns to 11 ns" in told
    assert sorted(wait) == [False, True]  # hatched
    assert _run(shared, at, 0, 5)[1] == [True]
    assert [_run(shared, at, 1, ns)[1] for ns in (1, 5, 12)] == [[True], [False], [True]]
    text = _find(shared, "main").text
    assert "d0 waits for its host for 36%" in text
    assert re.search(r"busy waits for its host.*\n.* 64 % 36 % ", text)
    assert "A tie with <b>data=2</b>." in text
    _check_quiet(shared, page)


@needs_browser
def test_says_why_things_waited(shared: Any, tmp_path: Path) -> None:
    """Sentences under ops and transfers tell what they waited for and how long.

    d0: op0 0-10, op3 10-13, op5 57-60      a, of op0: 10-30      c, of op1: 50-57 to d0
    d1: op1 0-50, op2 50-54, op4 54-56      b, of op3: made at 13, its channel free at 30, there at 35
    """
    graph = Graph.build(
        "waits",
        [Op(f"op{number}") for number in range(6)],
        [Tensor(0, (2, 3), 20), Tensor(3, (4,), 5), Tensor(1, (5,), 7)],
    )
    times = np.repeat(np.array([[10], [50], [4], [3], [2], [3]], np.int64), 2, axis=1)
    cluster = make_cluster(2, {})
    problem = Problem(graph, cluster, times, 0 * times, times >= 0, np.full(2, 2**40), np.full(6, -1))
    placement = np.array([0, 1, 1, 0, 1, 0])
    simulation = simulate(problem, placement)
    plan = _plan_of(simulation)
    page = tmp_path / "waits.html"
    page.write_text(render(PageData(plan, simulation)), encoding="utf-8", newline="")
    _show(shared, page)
    said = _run(
        shared,
        """
        const { timeline } = gdpReport, said = {};
        timeline.fold(false);
        timeline.rows.forEach((row, number) => row.items.forEach((_, index) => {
          const content = timeline.describe({ row: number, index });
          const name = content.querySelector(".name").textContent + (row.isDevice ? "" : " " + row.name);
          said[name] = content.lastChild.textContent;
        }));
        return said;""",
    )
    assert said == {
        "op0": "Starts with the step.",
        "op1": "Starts with the step.",
        "op2": "Inputs there at 30 ns; waited 20 ns for the device.",
        "op3": "Starts as op0 ends, whose output it reads.",
        "op4": "Inputs there at 35 ns; waited 19 ns for the device.",
        "op5": "Device idle for 44 ns: waited for 7 B of op1 from d1, made at 50 ns and there at 57 ns.",
        "Output of op0 d0-d1": "Starts as soon as the tensor is made.",
        "Output of op3 d0-d1": "Waited 17 ns for the channel, behind the output of op0.",
        "Output of op1 d1-d0": "Starts as soon as the tensor is made.",
    }
    rows = [row.text for row in shared.find_elements("css selector", ".path-row")]
    assert [row.split("\n")[0] for row in rows] == ["0", "50 ns", "57 ns"]
    assert not _find(shared, ".bad").is_displayed()
    small = replace(problem, memory_limit_bytes=np.array([2**40, 1]))
    page.write_text(render(PageData(plan, simulate(small, placement))), encoding="utf-8", newline="")
    _show(shared, page)
    missing = int(simulation.peak_memory_bytes[1]) - 1
    assert _find(shared, ".bad").text.endswith(f"limit 1, {missing} bytes missing.")
    assert _find(shared, ".card").text == "60 ns\nstep time"
    assert "Step time 0.00006000 ms" in page.read_text()  # without scripts
    assert _find(shared, ".card:last-child").text.startswith("unknown")


@needs_browser
def test_modules_and_graph_open(driver: Any, made: PageData, page: Path) -> None:
    """The tree opens by a click and by keys, the graph by its buttons, which keep the focus."""
    rows = [row.text for row in driver.find_elements("css selector", "#modules .label")]
    assert {row.strip("▸ ") for row in rows} >= {"tower_left", "tower_right", "head"}
    driver.find_elements("css selector", "#modules .node")[0].click()
    assert _find(driver, "#modules .node").get_attribute("aria-expanded") == "true"
    _run(driver, "document.querySelector('#modules .node').focus()")
    _press(driver, "\ue015\ue014")  # down, right
    assert len(driver.find_elements("css selector", "#modules [aria-expanded=true]")) == 2
    _press(driver, "\ue012\ue012\ue012")  # left: closes, goes to the parent, closes that
    assert driver.find_elements("css selector", "#modules [aria-expanded=true]") == []
    nodes = "return gdpReport.graph.nodes.map(node => node.path)"
    assert "tower_left.layers.5" in _run(driver, nodes)
    _run(driver, "document.querySelector('#graph-buttons button').focus()")
    _press(driver, "\n")  # close all
    assert set(_run(driver, nodes)) == {"tower_left", "tower_right", "head", "outside any module"}
    for path in ("tower_left", "tower_left.layers"):
        _run(driver, "document.querySelector(`#graph-buttons [data-path='${arguments[0]}']`).focus()", path)
        _press(driver, "\n")
        assert _run(driver, "return document.activeElement.dataset.path") == path
    assert {f"tower_left.layers.{layer}" for layer in range(6)} < set(_run(driver, nodes))
    _press(driver, "\n")
    assert "tower_left.layers" in _run(driver, nodes)
    # the module's own devices, not those of what was open in it
    busy = "return gdpReport.graph.nodes.reduce((sum, node) => sum + node.ns, 0)"
    finish, start = made.simulation.op_finish_ns, made.simulation.op_start_ns
    assert _run(driver, busy) == (finish - start).sum()
    _check_quiet(driver, page)


@needs_browser
def test_critical_path_adds_up(driver: Any, made: PageData) -> None:
    """The runs of the critical path follow one another over the step; sums by layer and by kind add up to the step."""
    step_ns = made.simulation.step_time_ns
    assert _find(driver, "#path select").get_attribute("value") == "time"
    _run(driver, "document.querySelector('#path details').open = true")
    while _find(driver, "#path-more").is_displayed():
        _run(driver, "document.getElementById('path-more').click()")
    shown = _run(driver, "return [...document.querySelectorAll('.path-row')].map(row => row.children[1].textContent)")
    units = {"ns": 1, "µs": 1e3, "ms": 1e6}
    lengths = [float(number) * units[unit] for number, unit in (text[2:].split() for text in shown if text != "+ 0")]
    assert sum(lengths) == pytest.approx(step_ns, rel=1e-3)
    shares = re.findall(r"([\d.]+) %", _find(driver, "#path-shares").text)
    assert sum(map(float, shares)) == pytest.approx(100, abs=1)
    sums = [part.text for part in driver.find_elements("css selector", "#path-sums > div")]
    assert [text.split("\n")[0] for text in sums] == ["By layer", "By kind"]
    for text in sums:
        assert sum(float(share) for share in re.findall(r"([\d.]+) %", text)) == pytest.approx(100, abs=1)
    _run(driver, "document.querySelector('.path-row button').click()")
    assert _view(driver)[1] - _view(driver)[0] < step_ns


@needs_browser
def test_layers_have_their_devices(driver: Any, made: PageData) -> None:
    """The strip has a cell for each layer in its device's colour, the legend lists the layers of each device."""
    simulation = made.simulation
    graph, busy_ns = simulation.problem.graph, simulation.op_finish_ns - simulation.op_start_ns
    layers = [f"tower_{side}.layers.{layer}" for side in ("left", "right") for layer in range(6)]
    cells = driver.find_elements("css selector", "#layers .cell")
    assert [cell.get_attribute("aria-label").split(": ")[0] for cell in cells] == [*layers, "head"]
    of_device: list[list[int]] = [[], []]
    for layer, cell in zip(layers, cells, strict=False):
        inside = [op for op, module in enumerate(graph.modules) if module == layer]
        shares = np.bincount(simulation.placement[inside], weights=busy_ns[inside], minlength=2)
        device = int(np.argmax(shares))
        of_device[device].append(int(layer[-1]))
        assert f"{made.plan.devices[device]} 100 %" in cell.get_attribute("aria-label")
        colour = _run(driver, "return getComputedStyle(arguments[0]).backgroundColor", cell)
        assert colour == ("rgb(0, 114, 178)", "rgb(230, 159, 0)")[device]  # #0072b2, #e69f00
    assert all(of_device)
    legend = [entry.text for entry in driver.find_elements("css selector", "#layers .legend span")]
    for device, text in enumerate(legend):
        assert text.startswith(f"{made.plan.devices[device]}: ")
        assert all(re.search(rf"\b{layer}\b|–", text) for layer in of_device[device]), text
    cells[3].click()
    assert _find(driver, "#found").text == "2 ops"  # the parameter and its product
    _press(driver, "\ue014")  # right
    assert _run(driver, "return document.activeElement.textContent") == "4"


@needs_browser
def test_channels_unfold(driver: Any, made: PageData, page: Path) -> None:
    """A band for each device shows its ops and what it sends; `c` gives each channel a band of its own, and back."""
    folded = "return gdpReport.timeline.rows.filter(row => !row.isDevice).flatMap(row => [...row.items])"
    bands = "return gdpReport.timeline.bands"
    assert _run(driver, bands) == list(made.plan.devices)
    assert sorted(_run(driver, folded)) == list(range(len(made.simulation.transfer_tensors)))
    _run(driver, "document.getElementById('timeline').focus()")
    _press(driver, "c")
    assert len(_run(driver, bands)) > len(made.plan.devices)
    assert _find(driver, "#fold").get_attribute("aria-pressed") == "true"
    _press(driver, "c")
    assert _run(driver, bands) == list(made.plan.devices)
    _check_quiet(driver, page)


@needs_browser
def test_pipelines_show_microbatches(shared: Any, tmp_path: Path) -> None:
    """A step of micro-batches on 8 devices is coloured by them, numbers on it, with a row of memory for each device."""
    cluster = Cluster.parse("8xa100-sxm-80g")
    made = page_data(accumulated(two_towers(), 3), cluster=cluster)
    page = tmp_path / "pipeline.html"
    page.write_text(render(made), encoding="utf-8", newline="")
    _show(shared, page)
    options = [option.text for option in shared.find_elements("css selector", "#colour option")]
    assert options == ["micro-batch", "layer", "module", "phase", "kind"]
    labels = _run(shared, "return gdpReport.timeline.stretches.flatMap(stretch => stretch.labels)")
    assert set(labels) - {""} == {"0", "1", "2"}
    numbers = made.simulation.problem.microbatch
    assert _run(shared, "return [...gdpReport.data.microbatch]") == numbers.tolist()
    highest = _run(
        shared,
        """
        const { raster, row, top } = gdpReport.memory, high = row - 5;
        return gdpReport.data.memoryOffsets.slice(1).reduce((all, _, device) => {
            let most = 0;
            for (let y = row * device; y < row * (device + 1); y++) {
                const line = raster.pixels.subarray(y * raster.across, (y + 1) * raster.across);
                if (line.some(Boolean)) most = Math.max(most, row * (device + 1) - 1 - y);
            }
            return [...all, most / high * top];
        }, []);""",
    )
    pixel_bytes = made.simulation.peak_memory_bytes.max() * 1.04 / 33  # rows of 38 pixels, 33 of them for bytes
    assert np.allclose(highest, made.simulation.peak_memory_bytes, atol=pixel_bytes)
    _check_quiet(shared, page)


@needs_browser
def test_what_if_comes_early(shared: Any, made: PageData, tmp_path: Path) -> None:
    """Changes of the machine stand before the timeline; where none were asked for, the page says how."""
    page = tmp_path / "advice.html"
    fewer = WhatIf("one device fewer", "without gpu0", made.plan.step_time_ns * 2)
    more = WhatIf("one device more", "gpu2", 10**9, "data=3")
    advice = Advice((fewer, more), (), False, made.plan)
    shown = ["one device fewer", "without gpu0", "2.000", "gpu2: data=3", "~1,000 ms"]
    for given, expected in ((advice, shown), (None, ["--no-advice"])):
        page.write_text(render(replace(made, advice=given)), encoding="utf-8", newline="")
        _show(shared, page)
        text = _find(shared, "main").text
        place = _find(shared, "#advice-part").text
        assert all(part in place for part in expected)
        assert text.index("What if") < text.index("Timeline")


@needs_browser
def test_layouts_left_out_may_be_faster(shared: Any, made: PageData, tmp_path: Path) -> None:
    """Of a layout past the twelfth the page says only that it is there: it may be an estimate below the plan's time."""
    rows = [LayoutRow(f"data={count}", Layout((1,) * count), 1, ESTIMATED, 5, 0, None, "") for count in range(2, 14)]
    answer = LayoutAnswer((LayoutRow("data=1", Layout(), 1, OK, 14, 0, (0,), ""), *rows), 0, 0, ())
    page = tmp_path / "layouts.html"
    page.write_text(render(replace(made, layouts=answer)), encoding="utf-8", newline="")
    _show(shared, page)
    assert _find(shared, "#layouts summary").text == "1 more"
    assert "~5 ns" in _find(shared, "#layouts").text


@needs_browser
def test_cut_tables_say_so(driver: Any) -> None:
    """A table that is wider than a telephone has a mark at its right edge until it is scrolled to the end."""
    cut = "document.querySelector('#peaks .holder').className.includes('cut-right')"
    assert not _run(driver, f"return {cut}")
    resize(driver, 390)
    _wait(driver, cut)
    _run(driver, "const scroll = document.querySelector('#peaks .scroll'); scroll.scrollLeft = scroll.scrollWidth")
    _wait(driver, f"!{cut} && document.querySelector('#peaks .holder').className.includes('cut-left')")


def test_write_report(made: PageData, tmp_path: Path) -> None:
    """A plan's page is written from Python; a name that is no page's, or another graph, is refused before."""
    problem = made.simulation.problem
    write_report(made.plan, tmp_path / "page.html", problem.graph, problem.cluster)
    assert "<h1>two-towers on" in (tmp_path / "page.html").read_text()
    for name, graph in (("page.txt", problem.graph), ("other.html", two_towers(layers=2))):
        with pytest.raises(InputError):
            write_report(made.plan, tmp_path / name, graph, problem.cluster)
        assert not (tmp_path / name).exists()


@needs_browser
def test_memory_shows_limits_if_asked(driver: Any, made: PageData) -> None:
    """The scale of memory ends near the peaks where limits are far, and goes up to the limits with a click."""
    top = "return gdpReport.memory.top"
    peak, limit = made.simulation.peak_memory_bytes.max(), made.simulation.problem.memory_limit_bytes.max()
    assert limit > 4 * peak
    assert peak <= _run(driver, top) <= 1.1 * peak
    assert "limit of 16.0 GiB above it" in _run(driver, "return gdpReport.memory.chart.getOption().title[0].text")
    _find(driver, "#up-to-limits").click()
    assert limit <= _run(driver, top) <= 1.1 * limit


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_themes_and_widths(driver: Any, page: Path, width: int) -> None:
    """Nothing is wider than the window; text stands out in both themes; the button and the preference choose them."""
    resize(driver, width)
    grounds = []
    for is_dark in (False, True):
        set_dark(driver, is_dark)
        _wait(driver, f"matchMedia('(prefers-color-scheme: dark)').matches === {str(is_dark).lower()}")
        colours = _run(
            driver,
            """
            const style = getComputedStyle(document.documentElement);
            const names = ["ground", "raised", "text", "quiet", "bad"];
            return names.map(name => style.getPropertyValue(`--${name}`).trim());""",
        )
        ground, raised, *texts = colours
        assert all(_contrast(text, back) >= 4.5 for text in texts for back in (ground, raised)), colours
        grounds.append(ground)
        _wait(
            driver,
            f"gdpReport.timeline.chart.getWidth() <= {width} && document.documentElement.scrollWidth === {width}",
        )
    assert len(set(grounds)) == 2
    _find(driver, "#theme").click()
    assert _run(driver, "return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    _check_quiet(driver, page)


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2, contrast ratio of two colours `#rrggbb`."""
    light = []
    for colour in (one, other):
        parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ (0.2126, 0.7152, 0.0722)))
    return (max(light) + 0.05) / (min(light) + 0.05)


@needs_browser
def test_names_are_data(shared: Any, tmp_path: Path) -> None:
    """Names with markup, quotes, emoji or 10,000 characters are shown as they are and do nothing, wherever they are."""
    plain = Cluster.parse("2xp100-pcie-16g")
    devices = [replace(device, name=name) for device, name in zip(plain.devices, HOSTILE[:2], strict=True)]
    cluster = replace(plain, name=HOSTILE[1], devices=tuple(devices), channels=(*HOSTILE[2:], *plain.channels)[:4])
    page = tmp_path / "hostile.html"
    page.write_text(render(page_data(two_towers(HOSTILE), cluster=cluster)), encoding="utf-8", newline="")
    _show(shared, page)
    assert _run(shared, "return window.broken") is None
    assert len(_run(shared, "return [...document.scripts].map(script => script.id)")) == 3  # columns are read and gone
    assert _run(shared, "return document.images.length") == 0
    assert set(HOSTILE) <= set(_run(shared, "return gdpReport.data.names"))
    for name in HOSTILE:
        _run(shared, "gdpReport.timeline.search(arguments[0]); gdpReport.timeline.showFound(1)", name)
    for _ in range(3):  # modules, those in them, and so on
        _run(shared, "document.querySelectorAll('#modules [aria-expanded=false]').forEach(row => row.click())")
    for by in ("layer", "kind", "phase"):
        _run(shared, "gdpReport.timeline.colour(arguments[0]); gdpReport.timeline.redraw()", by)
    assert HOSTILE[0] in _run(shared, "return document.body.innerText")
    assert _run(shared, "return document.querySelectorAll('#modules .node').length") > len(HOSTILE)
    resize(shared, 390)
    _wait(shared, "document.documentElement.scrollWidth === 390")
    assert _run(shared, "return window.broken") is None
    _check_quiet(shared, page)


@needs_browser
def test_prints(driver: Any) -> None:
    """A printed page has the charts, light, no wider than paper."""
    set_dark(driver, True)
    _run(driver, "window.addEventListener('beforeprint', () => window.widths = gdpReport.timeline.chart.getWidth())")
    document = driver.execute_cdp_cmd("Page.printToPDF", {})
    assert len(document["data"]) > 20_000
    assert _run(driver, "return window.widths") == 680
    assert _run(driver, "return gdpReport.timeline.chart.getWidth()") > 1000


def test_columns_come_back(made: PageData) -> None:
    """Packed columns hold the simulation's figures."""
    content = gzip.decompress(base64.b64decode(columns(made)))
    length = struct.unpack_from("<I", content, 4)[0]
    header, start = json.loads(content[8 : 8 + length]), 8 + length + -(8 + length) % 8
    arrays = {
        name: np.frombuffer(content, {"f8": "<f8", "i4": "<i4", "u1": "u1"}[kind], size, start + offset)
        for name, (kind, offset, size) in header.pop("columns").items()
    }
    assert header["names"] == list(made.simulation.problem.graph.op_names)
    assert arrays["finish"].tolist() == made.simulation.op_finish_ns.tolist()
    assert arrays["arrival"].tolist() == made.simulation.transfer_arrival_ns.tolist()


def test_embedded_json_cannot_end_its_element() -> None:
    """JSON in a page has no `<`, `>` or `&`, and says the same."""
    text = embed({"name": list(HOSTILE)})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": list(HOSTILE)}
