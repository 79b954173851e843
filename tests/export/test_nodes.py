"""onnxruntime and openvino, on the only device that they have here, the CPU; what they say of the rest is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from readers import read_devices

import gdp
from gdp.errors import InputError
from gdp.export import onnxruntime as ort_target
from gdp.export import openvino as ov_target
from gdp.export.targets_by_name import TARGETS
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem

INPUT = np.arange(8, dtype=np.float32).reshape(2, 4)


def onnx_model() -> Any:
    """x @ w, Relu (a node without a name), @ w."""
    from onnx import TensorProto, helper

    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.arange(16, dtype=np.float32))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Sigmoid", ["b"], ["c"], name="second"),
        helper.make_node("MatMul", ["c", "w"], ["d"], name="third"),
        helper.make_node("Relu", ["d"], ["y"], name="fourth"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.fixture
def problem() -> Problem:
    """The graph that a front end for ONNX makes of it: ops have the names and operators of nodes."""
    chain = [
        Op("x", "input"),
        Op("w", "parameter", resident_bytes=64),
        Op("first", "MatMul", 64),
        Op("Relu_0", "Relu", 8),
        Op("second", "Sigmoid", 8),
        Op("third", "MatMul", 64),
        Op("fourth", "Relu", 8),
    ]
    tensors = [Tensor(0, (2,), 32), Tensor(1, (2, 5), 64, resident=True)]
    tensors += [Tensor(op, (op + 1,), 32) for op in range(2, 6)]
    graph = Graph.build("onnx", chain, [*tensors, Tensor(6, (), 32, keep=True)])
    return Problem.build(graph, gdp.Cluster.parse("2xp100-pcie-16g+cpu-16core"))


def test_annotations_of_onnxruntime(problem: Problem, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime takes annotations and settings, and maps those of the CPU."""
    onnxruntime = pytest.importorskip("onnxruntime")
    units = ort_target.TARGET.read_units(problem)
    assert units.members == (("first",), ("Relu_0",), ("second",), ("third",), ("fourth",))
    devices = np.array([2, 2, 0, 1, 2])
    content = ort_target.TARGET.write(problem, units, devices)
    assert np.array_equal(read_devices(ort_target.NAME, content, problem, units), devices)
    model = onnx_model()
    settings = ort_target.annotate(model, json.loads(content))
    assert settings == "cpu(=gdp.cpu);gpu:0(=gdp.gpu0);gpu:1(=gdp.gpu1)"
    marks = [{item.key: item.value for item in node.metadata_props} for node in model.graph.node]
    # the node without a name is with its input
    assert [mark["layer_ann"] for mark in marks] == ["gdp.cpu", "gdp.cpu", "gdp.gpu0", "gdp.gpu1", "gdp.cpu"]

    def run(entry: str) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 0
        if entry:
            options.add_session_config_entry(ort_target.SETTINGS, entry)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, {"x": INPUT})[0]

    assert np.array_equal(run(settings), run(""))
    said = capfd.readouterr().err
    assert "Parsed 3 annotation-based layering rules" in said
    assert "(cpu -> gdp.cpu) mapped to EP: CPUExecutionProvider" in said
    # there is no GPU here: these two are understood, and not mapped
    assert "device='gpu:0', annotation='gdp.gpu0'" in said
    assert "device='gpu:1', annotation='gdp.gpu1'" in said
    with pytest.raises(Exception, match="Invalid layering config"):
        run("cpu")


def test_affinities_of_openvino(problem: Problem, tmp_path: Path) -> None:
    """OpenVINO compiles and runs a model with the affinities."""
    openvino = pytest.importorskip("openvino")
    units = ov_target.TARGET.read_units(problem)
    devices = np.array([2, 0, 1, 2, 2])
    content = ov_target.TARGET.write(problem, units, devices)
    assert np.array_equal(read_devices(ov_target.NAME, content, problem, units), devices)
    affinities = json.loads(content)
    assert affinities == {"first": "CPU", "Relu_0": "GPU.0", "second": "GPU.1", "third": "CPU", "fourth": "CPU"}
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_model().SerializeToString())
    core = openvino.Core()
    model = core.read_model(path)
    placed = ov_target.apply_affinities(model, affinities)
    assert placed["first"] == "CPU"
    assert placed["second"] == "GPU.1"
    assert {node.get_friendly_name(): node.get_rt_info()["affinity"] for node in model.get_ordered_ops()}.keys() == (
        placed.keys()
    )
    # only the CPU is here: with all on it, HETERO compiles what was marked, and the outputs are the plain model's
    on_cpu = core.read_model(path)
    ov_target.apply_affinities(on_cpu, dict.fromkeys(affinities, "CPU"))
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    output = core.compile_model(on_cpu, "HETERO:CPU", exact)({"x": INPUT})[0]
    np.testing.assert_allclose(output, core.compile_model(core.read_model(path), "CPU", exact)({"x": INPUT})[0])


def test_other_models_are_refused(problem: Problem) -> None:
    """A model that was not placed is refused, and so are graphs of PyTorch."""
    from export_models import graph_of

    with pytest.raises(InputError, match="is it the model that was placed"):
        ort_target.annotate(onnx_model(), {"annotations": {"other": "gdp.cpu"}, ort_target.SETTINGS: ""})
    pytorch = Problem.build(graph_of("tied"), problem.cluster)
    for target in (ort_target.TARGET, ov_target.TARGET):
        with pytest.raises(InputError, match="is that of a PyTorch model"):
            target.read_units(pytorch)


def test_graphs_of_other_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ONNX file with the slashed names of PyTorch's exporter, and a JAX function with scopes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = onnx_model()
    for number, node in enumerate(model.graph.node):
        node.name = f"/model/layers.{number // 2}/{node.op_type}"
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    cluster = gdp.Cluster.parse("2xp100-pcie-16g")
    nodes = gdp.load(str(tmp_path / "net.onnx"))
    assert "model.layers.1" in nodes.modules
    jax = pytest.importorskip("jax")

    def net(weights: Any, x: Any) -> Any:
        for name in ("model.layers.0", "model.layers.1"):
            with jax.named_scope(name):
                x = jax.numpy.tanh(x @ weights)
        return x

    shape = jax.ShapeDtypeStruct((4, 4), "float32")
    scopes = gdp.capture_jax(net, shape, shape, name="net").graph
    assert any(scopes.modules)
    for name, target in TARGETS.items():
        takes_nodes = name in ("onnxruntime", "openvino")
        for graph, message in (
            (nodes, "its ops are those of an ONNX file .*; capture .* or export it to onnxruntime or openvino"),
            (scopes, "is that of a JAX function" if takes_nodes else "its ops are those of a JAX function .*; capture"),
        ):
            problem = Problem.build(graph, cluster)
            if takes_nodes and graph is nodes:
                assert target.read_units(problem).num_units == len(model.graph.node)
                continue
            with pytest.raises(InputError, match=message) as raised:
                target.read_units(problem)
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize("target", [ort_target.TARGET, ov_target.TARGET])
def test_losses_of_node_plans(problem: Problem, target: Any) -> None:
    """A plan of nodes loses only where weights were apart from their first reader."""
    from gdp.export.adapt import adapt, simulated
    from gdp.search.question import plan_of
    from gdp.simulator.simulate import simulate

    for placement, is_equal in (([2, 0, 0, 0, 1, 1, 1], False), ([0, 0, 0, 0, 1, 1, 2], True)):
        plan = plan_of(simulate(problem, placement), 0, "by hand", 0)
        allowed = problem.allowed.copy()
        allowed[[1, -1]] = np.arange(3) == [[0], [placement[-1]]]  # no device alone may have all
        adapted = adapt(problem.with_allowed(allowed), plan, target)
        assert adapted.simulation.placement.tolist() == [placement[2], *placement[1:]]
        assert (adapted.step_time_ns == plan.step_time_ns) == is_equal
        devices = read_devices(target.name, adapted.content, problem, adapted.units)
        again = simulated(problem, adapted.units.place(devices), plan)
        assert again.step_time_ns == adapted.step_time_ns
