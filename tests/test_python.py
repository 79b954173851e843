"""What a user types in Python: common mistakes, short `repr`s, and the methods of a plan."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn, ones

import gdp
from gdp.graph import Graph, Op, Tensor

CLUSTER = "2xl4-24g"
GIB = 2**30


def two_layers() -> Graph:
    """Two layers of two ops each, of 1 GFLOP and 1 GiB of parameters an op."""
    ops = [Op(f"op{number}", "mm", 10**9, resident_bytes=GIB, module=f"layers.{number // 2}") for number in range(4)]
    return Graph.build("two-layers", ops, [Tensor(op, (op + 1,), 4096) for op in range(3)])


def place(**keywords: Any) -> gdp.Plan:
    return gdp.place(two_layers(), CLUSTER, **{"budget": "50sims", **keywords})


@pytest.fixture(scope="module")
def split() -> gdp.Plan:
    """A plan with the first layer and the next op on gpu0, and the last op on gpu1."""
    return place(pins={"op[0-2]": "gpu0", "op3": "gpu1"})


@pytest.mark.parametrize(
    "keywords",
    [
        {"pins": [("layers.1", "gpu1")], "max_memory_bytes": {"gpu0": GIB * 5 // 2}, "reserve": 0.1},
        {"pins": {"layers.1": "gpu1"}, "max_memory": {"gpu0": "2.5GiB"}, "reserve": "10%"},
        {"pin": ["layers.1=gpu1"], "max_memory_bytes": {"gpu0": "2.5GiB"}, "reserve": "0.1"},
    ],
)
def test_constraints_in_any_notation_are_the_same(keywords: dict[str, Any]) -> None:
    """Pairs, mappings and texts of the command line make one problem: 2.5 GiB on gpu0, 90 % of 24 GiB on gpu1."""
    problem = gdp.Problem.build(two_layers(), CLUSTER, **keywords)
    memory_bytes = gdp.Cluster.parse(CLUSTER).devices[1].memory_bytes
    assert problem.memory_limit_bytes.tolist() == [GIB * 5 // 2, memory_bytes - int(memory_bytes * 0.1)]
    assert problem.allowed.tolist() == [[True, True]] * 2 + [[False, True]] * 2


def test_a_capture_is_placed_on_named_devices_in_seconds() -> None:
    """A capture stands for its graph, text for a cluster, a number for seconds; the class names the graph."""
    captured = gdp.capture(nn.Linear(8, 4), (ones(2, 8),))
    plan = gdp.place(captured, CLUSTER, budget=0.05, robust="2%")
    assert plan.graph == captured.graph.fingerprint
    assert captured.graph.name == "Linear"


def test_a_module_with_inputs_is_a_model() -> None:
    """A module and its inputs are placed in layouts, as their MODEL would be."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plan = gdp.place((net, (ones(16, 64),)), "2xl4-24g", parallel="data=2", budget="20sims", num_threads=1)
    assert plan.status == "ok"
    assert plan.layout is not None
    assert plan.layout["data"] == 2


@pytest.mark.parametrize(
    ("graph", "cluster", "keywords", "message"),
    [
        (nn.Linear(8, 4), CLUSTER, {}, "PyTorch module, Linear; give gdp.capture"),
        (two_layers, CLUSTER, {}, "function 'two_layers'; give gdp.capture_fn"),
        ("gnmt-44", CLUSTER, {}, "model 'gnmt-44'"),
        (two_layers(), CLUSTER, {"parallel": 2}, "parallel is 2; 'auto', 'none'"),
        (two_layers(), CLUSTER, {"parallel": "data=2", "placer": "single"}, "leave placer and starts out"),
        (two_layers(), CLUSTER, {"parallel": "auto"}, "is a forward pass; --batches N"),
        ((nn.Linear(8, 4),), CLUSTER, {}, r"Linear: returned Linear; \(module, example_inputs\) or"),
        ((), CLUSTER, {}, "example_inputs. or .module, args, kwargs. is expected"),
        ((nn.Linear(8, 4), 3), CLUSTER, {}, "a tensor, a tuple or a dict of keyword inputs"),
        (two_layers(), CLUSTER, {"checkpoint": "nope"}, "nope: no such file"),
        (two_layers(), CLUSTER, {"settings": 5}, "settings is a int"),
        (two_layers(), CLUSTER, {"stop": 3}, "stop is 3; a threading.Event"),
        (two_layers(), CLUSTER, {"on_progress": 3}, "on_progress is 3; a function"),
        (two_layers(), 2, {}, "cluster is a int"),
        (two_layers(), "2xl44", {}, "no kind 'l44'"),
        (two_layers(), CLUSTER, {"budget": None}, "budget is None"),
        (two_layers(), CLUSTER, {"budget": True}, "budget is True"),
        (two_layers(), CLUSTER, {"pins": {"op0": 1}}, "pins has"),
        (two_layers(), CLUSTER, {"pins": ["op0"]}, "pins has 'op0'"),
        (two_layers(), CLUSTER, {"pins": 3}, "pins is 3"),
        (two_layers(), CLUSTER, {"forbid": ["mm"]}, "forbid has 'mm'"),
        (two_layers(), CLUSTER, {"max_memory": {"gpu0": "much"}}, "max-memory gpu0 is 'much'"),
        (two_layers(), CLUSTER, {"max_memory": "1GiB"}, "max_memory is '1GiB'"),
        (two_layers(), CLUSTER, {"reserve": "110%"}, "reserve is '110%'"),
        (two_layers(), CLUSTER, {"robust": "60%"}, "robust is '60%'"),
        (two_layers(), CLUSTER, {"seed": "one"}, "seed is 'one'"),
        (two_layers(), CLUSTER, {"threads": 2}, "argument 'threads' is unknown; did you mean num_threads"),
        (two_layers(), CLUSTER, {"pin": {}, "pins": {}}, "are the same; give one"),
        (two_layers(), CLUSTER, {"constraints": {"pins": ()}}, "constraints is a dict"),
    ],
)
def test_wrong_arguments_are_one_clear_error(graph: Any, cluster: Any, keywords: dict[str, Any], message: str) -> None:
    """Each InputError names the argument and the remedy."""
    with pytest.raises(gdp.InputError, match=message):
        gdp.place(graph, cluster, **{"budget": "10sims", **keywords})


def test_inputs_need_no_tuple() -> None:
    """One tensor, or a dict of inputs by name, is as good as a tuple of one."""
    layer = nn.Linear(8, 4)
    plans = [gdp.place((layer, given), "l4-24g", budget="10sims") for given in ((ones(2, 8),), ones(2, 8))]
    plans.append(gdp.place((layer, {"input": ones(2, 8)}), "l4-24g", budget="10sims"))
    assert len({plan.step_time_ns for plan in plans}) == 1
    assert gdp.capture(layer, ones(2, 8)).graph.num_ops == gdp.capture(layer, (ones(2, 8),)).graph.num_ops


def test_misspelt_names_get_a_suggestion() -> None:
    """An unknown attribute of gdp names the nearest one."""
    with pytest.raises(AttributeError, match="gdp has no 'plase'; did you mean place"):
        gdp.plase  # noqa: B018


def test_reprs_are_one_short_line(split: gdp.Plan) -> None:
    """A `repr` fits on a line, with the time or the name first; 4 ops are 4 GFLOP and 4 GiB."""
    assert repr(two_layers()) == "Graph('two-layers': 4 ops, 3 tensors, 4 GFLOP, 4.0 GiB resident)"
    assert repr(gdp.Cluster.parse("2xl4-24g+cpu-16core")).startswith("Cluster('2xl4-24g+cpu-16core': 2 l4-24g, 1 cpu")
    assert repr(split).startswith(f"Plan({split.step_time_ns / 1e6:.3f} ms on 2 of 2 devices by auto, at most ")
    assert repr(split.problem) == "Problem('two-layers' on '2xl4-24g': 4 ops, 2 devices)"
    step = gdp.simulation_of(split)
    assert repr(step) == f"Simulation({split.step_time_ns / 1e6:.3f} ms: 'two-layers' on '2xl4-24g', 1 transfer)"
    captured = gdp.capture(nn.Linear(8, 4), (ones(2, 8),), training=False)
    assert repr(captured) == f"Capture({captured.graph!r})"
    compared = gdp.compare(two_layers(), CLUSTER, placers="single,heft", seeds=1, budget="10sims")
    assert repr(compared).startswith("Comparison(")
    assert all(len(repr(value)) < 120 for value in (two_layers(), split, split.problem, step, captured, compared))


def test_a_plan_is_a_data_frame(split: gdp.Plan) -> None:
    """A row for each op, with its device; of three ops in a row on gpu0 the third is the last there."""
    frame = split.to_dataframe()
    assert frame["device"].tolist() == ["gpu0", "gpu0", "gpu0", "gpu1"]
    assert frame.groupby("device")["position"].max().to_dict() == {"gpu0": 2, "gpu1": 0}


def test_a_plan_is_exported_as_by_the_command(tmp_path: Path) -> None:
    """`write_export` returns the file of the tool and its step, and writes it; a wrong tool is one error."""
    plan = gdp.place((nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ones(8, 64)), CLUSTER, budget="20sims")
    exported = gdp.write_export(plan, "torch-fsdp" if plan.layout else "hf-device-map", tmp_path / "file")
    assert (tmp_path / "file").read_text() == exported.content
    assert exported.fits
    assert repr(exported).startswith(f"Exported('{exported.target.name}', ")
    with pytest.raises(gdp.InputError, match="target 'torch-fdsp' is unknown; did you mean torch-fsdp"):
        gdp.write_export(plan, "torch-fdsp")


def test_an_infeasible_plan_says_so_first() -> None:
    """Four ops of 1 GiB and 12 KiB of tensors do not fit in twice 1 GiB."""
    plan = place(max_memory={"gpu0": "1GiB", "gpu1": "1GiB"})
    assert plan.status == "infeasible"
    assert repr(plan).startswith("Plan(infeasible: gpu")
    assert " ms if it fitted" in repr(plan)
    assert "<b>Infeasible: gpu" in plan._repr_html_()


def test_ops_of_a_graph_are_a_sequence() -> None:
    """By position, from the end, by slice and by name; the length of a graph is its number of ops."""
    graph = two_layers()
    assert len(graph) == len(graph.ops) == 4
    assert [op.name for op in graph.ops] == ["op0", "op1", "op2", "op3"]
    assert graph.ops[-1] == graph.ops["op3"] == graph.op(3)
    assert [op.name for op in graph.ops[1:3]] == ["op1", "op2"]
    assert repr(graph.ops) == "<4 ops: 'op0', 'op1', 'op2', ...>"
    with pytest.raises(IndexError):
        graph.ops[4]
    with pytest.raises(gdp.InputError, match="no op 'opp1'; did you mean"):
        graph.ops["opp1"]


def test_a_plan_tells_the_device_of_an_op_or_module(split: gdp.Plan) -> None:
    """layers.0 is op0 and op1 on gpu0; layers.1 is op2 on gpu0 and op3 on gpu1; `layers` has all."""
    assert (split.device_of("op3"), split.device_of("layers.0")) == ("gpu1", "gpu0")
    assert split.devices_of("layers") == {"gpu0": 3, "gpu1": 1}
    with pytest.raises(gdp.InputError, match=r"'layers.1' is split: 1 op on gpu0, 1 op on gpu1"):
        split.device_of("layers.1")
    with pytest.raises(gdp.InputError, match=r"neither an op nor a module 'layers.2'; did you mean layers"):
        split.device_of("layers.2")


def test_a_plan_draws_its_timeline_and_writes_its_report(split: gdp.Plan, tmp_path: Path) -> None:
    """The timeline has a line for each device and a row for each op; files have the page and the figure."""
    timeline = gdp.timeline(split)
    assert [line[:4] for line in repr(timeline).splitlines()] == ["gpu0", "gpu1", "    "]
    assert [(row.op, row.device) for row in timeline.rows] == [(f"op{n}", f"gpu{n // 3}") for n in range(4)]
    assert max(row.finish_ns for row in timeline.rows) == split.step_time_ns
    assert timeline._repr_html_().startswith("<img")
    assert timeline.save(tmp_path / "step.svg").read_text().endswith("</svg>\n")
    assert "two-layers on 2xl4-24g" in gdp.write_report(split, tmp_path / "pages" / "report.html").read_text()
    with pytest.raises(gdp.InputError, match="ends in"):
        gdp.write_report(split, tmp_path / "report.pdf")


def test_a_plan_from_a_file_asks_for_a_graph_that_no_file_has(split: gdp.Plan, tmp_path: Path) -> None:
    """The file knows its devices, and the graph by name alone; others are refused."""
    split.save(tmp_path / "plan.json")
    plan = gdp.Plan.load(tmp_path / "plan.json")
    with pytest.raises(gdp.InputError, match="does not have its graph"):
        plan.device_of("op3")
    with pytest.raises(gdp.InputError, match="was made in Python, of a graph called 'two-layers'; name its MODEL"):
        gdp.timeline(plan)
    assert gdp.timeline(plan, two_layers()).rows[0].op == "op0"
    with pytest.raises(gdp.InputError, match="the plan is of graph"):
        plan.device_of("a", Graph.build("other", [Op("a")], []))
    with pytest.raises(gdp.InputError, match="the plan is for cluster"):
        gdp.write_report(plan, tmp_path / "report.html", two_layers(), "3xl4-24g")
    assert plan.device_of("op3", two_layers()) == "gpu1"
    assert gdp.simulation_of(plan, two_layers(), CLUSTER).step_time_ns == plan.step_time_ns


def test_place_takes_what_the_command_takes() -> None:
    """A module with inputs, and a MODEL, are cut where that is faster, as by `gdp place`; a graph is one step."""
    module = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    own = gdp.place((module, (ones(64, 512),)), CLUSTER, parallel="data=2", budget="5sims")
    assert own.layout is not None
    assert own.layout["batch"] == 64
    auto = gdp.place((module, (ones(64, 512),)), CLUSTER, budget="20sims")
    captured = gdp.place(gdp.capture(module, (ones(64, 512),)), CLUSTER, budget="20sims")
    assert captured.layout is None
    assert auto.step_time_ns <= own.step_time_ns
    assert gdp.place((module, (ones(64, 512),)), CLUSTER, parallel="none", budget="20sims").layout is None


def test_notebooks_show_tables() -> None:
    """A graph shows its kinds of ops, the most FLOPs first, and a cluster its devices; names are escaped."""
    assert "<td>mm</td><td>4</td><td>4.000</td>" in two_layers()._repr_html_()
    assert "<td>gpu1</td><td>l4-24g</td>" in gdp.Cluster.parse(CLUSTER)._repr_html_()
    named = Graph.build("<b>", [Op("a", "<script>", 1)], [])
    assert "<script>" not in named._repr_html_()
    shown = gdp.capture(nn.Linear(4, 4), (ones(1, 4),))._repr_html_()
    assert "<td>aten.mm</td>" in shown or "<td>aten.addmm</td>" in shown
    assert "and 4 more" in gdp.Cluster.parse("20xl4-24g")._repr_html_()
