"""Replicas in reports: whose devices are whose, what exchanges cost, what memory is for, and the page that shows it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, browser, open_page, resize
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.cluster import Cluster
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.report.copies import Copies, exchanges_document
from gdp.report.memory_curves import GATHERED, GRADIENTS, STATE, MemoryParts, memory_curves
from gdp.report.page import render
from gdp.report.page_data import PageData, summary
from gdp.search.question import plan_of
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Allocations, Simulation, simulate
from tests.parallel.test_replicas import chain
from tests.parallel.test_zero import run

LAYOUTS = ("data=2", "data=3,zero=1", "data=2,microbatches=2:1,zero=2", "data=2,microbatches=2,zero=3")


def test_exchanges_by_hand() -> None:
    """A ring that nothing hides costs its hops; each device sends and receives in both of them."""
    # 3 replicas, a parameter of 3,000 bytes, links of 1 GB/s with 10 us of latency: see tests/parallel/test_zero.py
    #   reduce-scatter: 2 hops of 1,000 bytes, 11,000 ns each, on 3 devices: 6,000 bytes; the all-gather as well
    simulation = run(Step.of(chain([3000]), Layout((1, 1, 1), 1)))
    found = exchanges_document(simulation)
    assert found is not None
    hops = [(22_000, 22_000)] * 3
    assert [(row["name"], row["phase"], row["number"], row["bytes"], row["devices"]) for row in found["kinds"]] == [
        ("reduce-scatter", "backward", 1, 6000, hops),
        ("all-gather", "update", 1, 6000, hops),
    ]
    assert found["devices"] == [(44_000, 44_000)] * 3
    assert found["rings"] == [[0, 1, 2]]
    assert [(row["name"], row["bare"]) for row in found["listed"]] == [
        ("reduce-scatter 0", 22_000),
        ("all-gather 0", 22_000),
    ]
    assert exchanges_document(_one_copy()) is None


def _one_copy() -> Simulation:
    graph = chain([3000])
    return simulate(Problem.build(graph, Cluster.parse("2xp100-pcie-16g")), np.zeros(graph.num_ops, np.int64))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.sampled_from(LAYOUTS), st.integers(1, 4000))
def test_exchanges_and_memory_add_up(sizes: list[int], layout: str, bucket_bytes: int) -> None:
    """Hidden and other times are those counted ns by ns; the uses of memory add up to the curve of each device."""
    simulation = run(Step.of(chain(sizes), Layout.parse(layout), bucket_bytes=bucket_bytes))
    found = exchanges_document(simulation)
    assert found is not None
    assert found["devices"] == [_counted(simulation, device) for device in range(simulation.problem.num_devices)]
    assert sum(row["bytes"] for row in found["kinds"]) == _hop_bytes(simulation)
    allocations = Allocations.of(simulation)
    parts = MemoryParts.of(simulation, allocations)
    for curve in memory_curves(simulation, allocations):
        for time_ns, used in zip(curve.times_ns[::7].tolist(), curve.used_bytes[::7].tolist(), strict=True):
            assert sum(parts.at(curve.device, time_ns).values()) == used
        peak = parts.at(curve.device, curve.peak_ns)
        assert peak[STATE] >= sum(sizes) // (3 if "zero" in layout else 1)
        assert peak[GATHERED] == 0 or "zero=3" in layout


def _counted(simulation: Simulation, device: int) -> tuple[int, int]:
    """Returns the ns with a hop to or from `device`, and those of them without an op on it."""
    graph = simulation.problem.graph
    is_sent, is_busy = np.zeros((2, simulation.step_time_ns), np.bool_)
    for op in simulation.order[device].tolist():
        is_busy[simulation.op_start_ns[op] : simulation.op_finish_ns[op]] = True
    producers = graph.producers[simulation.transfer_tensors]
    for transfer, op in enumerate(producers.tolist()):
        ends = {int(simulation.placement[op]), int(simulation.transfer_destinations[transfer])}
        if graph.is_resident[simulation.transfer_tensors[transfer]] and device in ends:
            is_sent[simulation.transfer_start_ns[transfer] : simulation.transfer_arrival_ns[transfer]] = True
    return int(is_sent.sum()), int((is_sent & ~is_busy).sum())


def _hop_bytes(simulation: Simulation) -> int:
    graph = simulation.problem.graph
    return int((graph.tensor_bytes * graph.is_resident)[simulation.transfer_tensors].sum())


def test_gradients_are_told_from_activations() -> None:
    """At the end of the backward pass of a plain step all gradients are there, and nothing else is made."""
    simulation = run(Step.of(chain([1000, 500]), Layout((1, 1))))
    parts = MemoryParts.of(simulation, Allocations.of(simulation))
    graph = simulation.problem.graph
    last = max(int(simulation.op_finish_ns[op]) for op, phase in enumerate(graph.phases) if graph.kinds[op] == "mm")
    assert parts.at(0, last)[GRADIENTS] == 1500


def test_names_tell_copies() -> None:
    """Names on a page are without numbers of copies; hops say what they do, and which hop of the replica it is."""
    step = Step.of(chain([3000, 10]), Layout((2, 2)), bucket_bytes=1)
    names, number, microbatch = Copies(run(step)).names()
    shown = {names[base] for base in number.tolist()}
    assert {"all-reduce 0, begins", "all-reduce 1, sum at hop 1", "all-reduce 0, copy at hop 1"} <= shown
    assert not any("@" in name or "#" in name for name in shown)
    assert microbatch.max() == 1


def test_replicas_are_alike_or_not() -> None:
    """Replicas on devices of their own are alike; an op on a device of another replica makes them differ."""
    step = Step.of(chain([3000, 10]), Layout((1, 1)))
    simulation = run(step)
    assert Copies(simulation).are_alike()
    assert Copies(simulation).device_replicas().tolist() == [0, 1]
    placement = simulation.placement.copy()
    placement[step.graph.op_numbers["f0"]] = 1
    moved = Copies(simulate(simulation.problem, placement))
    assert not moved.are_alike()
    assert not Copies(_one_copy()).are_alike()


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no chromium or no chromedriver")
def test_a_page_shows_one_replica_or_all(tmp_path: Path) -> None:
    """The page begins with one of three replicas that are alike, shows any other, and all, in each of its parts."""
    step = Step.of(chain([3000, 200, 10]), Layout((2, 2, 2), 1), bucket_bytes=1)
    simulation = run(step)
    plan = plan_of(simulation, 0, "auto", 0)
    object.__setattr__(plan, "layout", step.document())
    data = PageData(plan, simulation)
    assert summary(data)["layout"]["option"] == "data=3,microbatches=2,zero=1"
    page = tmp_path / "page.html"
    page.write_text(render(data), encoding="utf-8", newline="")
    with browser() as driver:
        resize(driver, 1280)
        open_page(driver, page)

        def look(script: str) -> Any:
            return driver.execute_script(f"return {script}")

        assert driver.get_log("browser") == []
        assert "3 replicas of the model on one device each" in driver.find_element("css selector", ".lead").text
        for choice, devices in (("0", ["d0"]), ("2", ["d2"]), ("all", ["d0", "d1", "d2"])):
            driver.execute_script(
                "const select = document.getElementById('replica'); select.value = arguments[0];"
                "select.dispatchEvent(new Event('change'))",
                choice,
            )
            assert look("gdpReport.timeline.bands") == devices
            rows = driver.find_elements("css selector", "#peaks .holder:first-child tbody tr")
            assert [row.text.split()[0] for row in rows] == devices
            ops = int(np.isin(simulation.placement, [int(name[1:]) for name in devices]).sum())
            assert look("gdpReport.graph.nodes.reduce((sum, node) => sum + node.ops, 0)") == ops
        # to choose an op of a replica that is not shown shows it
        driver.execute_script("document.getElementById('replica').value = '0'")
        driver.execute_script("document.getElementById('replica').dispatchEvent(new Event('change'))")
        driver.execute_script("gdpReport.timeline.chooseOp(arguments[0])", step.graph.op_numbers["f1@1#2"])
        details = driver.find_element("css selector", "#details").text.split("\n")
        assert look("gdpReport.timeline.bands") == ["d2"]
        assert details[0] == "f1"
        assert details[details.index("micro-batch") + 1] == "1"
        assert details[details.index("replica") + 1] == "2"
        assert driver.get_log("browser") == []
