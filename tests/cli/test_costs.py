"""`gdp costs`: where the time of a step goes."""

import json
from dataclasses import replace

import pytest

from gdp.cli import main
from gdp.cluster import Cluster
from gdp.costs.hosts import host_times
from gdp.costs.op_times import op_times
from gdp.graph import Graph, Op, Tensor


@pytest.fixture
def graph_file(tmp_path):
    """A product of 2 x 4096^3 FLOPs, twice, and a sum of 3 x 32 MiB."""
    product = "aten.mm bfloat16[4096,4096] bfloat16[4096,4096] > bfloat16[4096,4096]"
    added = "aten.add bfloat16[4096,4096] bfloat16[4096,4096] > bfloat16[4096,4096]"
    size = 2 * 4096 * 4096
    ops = [
        Op("a", "aten.mm", 2 * 4096**3, 3 * size, "bfloat16", shapes=product),
        Op("b", "aten.mm", 2 * 4096**3, 3 * size, "bfloat16", shapes=product),
        Op("sum", "aten.add", 4096 * 4096, 3 * size, "bfloat16", shapes=added),
    ]
    path = tmp_path / "graph.json"
    Graph.build("block", ops, [Tensor(0, (2,), size), Tensor(1, (2,), size)]).save(path)
    return str(path)


def test_kernels_are_told_by_class_with_what_bounds_them(graph_file, capsys):
    """Products are bound by arithmetic and equal ones are one row, the sum by memory; shares are of all kernels."""
    assert main(["costs", graph_file, "--devices", "2xa100-sxm-80g", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    product, pointwise = found["classes"]
    assert (product["name"], product["count"], product["limit"]) == ("product", 2, "arithmetic")
    assert (pointwise["name"], pointwise["count"], pointwise["limit"]) == ("pointwise", 1, "memory")
    assert found["kernels_ns"] == pytest.approx(product["time_ns"] + pointwise["time_ns"], abs=2)
    assert [row["count"] for row in found["ops"]] == [2, 1]
    # 274.9 GFLOP at 312 TFLOP/s are 881 us; 100.7 MB at 2,039 GB/s are 49 us: neither is reached in full
    assert 881e3 < product["time_ns"] < 2 * 881e3
    # of its reads, half of the cache of 42 MB is still there
    assert 39e3 < pointwise["time_ns"] < 2 * 49e3
    # three kernels are issued one by one
    assert found["host_ns"] > 0


def test_the_table_names_the_rule_of_each_op(graph_file, capsys):
    """People see kernels by class, and equal ops with their shapes."""
    assert main(["costs", graph_file, "--devices", "a100-sxm-80g:cuda-graphs", "--top", "1"]) == 0
    printed = capsys.readouterr().out
    assert "block on a100-sxm-80g, cuda-graphs" in printed
    assert "aten.mm bfloat16[4096,4096] bfloat16[4096,4096] > bfloat16[4096,4096]" in printed
    assert "aten.add" not in printed


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "--devices: name the devices"),
        (["--devices", "cpu-16core"], "tells nothing of kernels"),
        (["--devices", "l4-24g", "--runtime", "fast"], "--runtime is 'fast'"),
        (["--devices", "l4-24g", "--parallel", "auto"], "give degrees of its group alone"),
    ],
)
def test_what_cannot_be_priced_is_refused(args, reason, graph_file, capsys):
    """One line says what is missing."""
    assert main(["costs", graph_file, *args]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_times_that_a_graph_gives_count(tmp_path, capsys):
    """What was measured is in the sum and in the tables; nothing is said of why. An op that cannot run takes none."""
    product = "aten.mm bfloat16[4096,4096] bfloat16[4096,4096] > bfloat16[4096,4096]"
    one = Op("a", "aten.mm", 2 * 4096**3, 3 * 2**25, "bfloat16", shapes=product)
    ops = [one, replace(one, name="b", time_ns={"l4-24g": 5_000_000}), replace(one, name="c", time_ns={"l4-24g": -1})]
    graph = Graph.build("block", ops, [])
    graph.save(tmp_path / "graph.json")
    cluster = Cluster.parse("l4-24g")
    times_ns = op_times(graph, cluster)
    assert main(["costs", str(tmp_path / "graph.json"), "--devices", "l4-24g", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    assert found["kernels_ns"] == pytest.approx(times_ns.clip(0).sum(), abs=2)
    assert found["host_ns"] == host_times(graph, cluster, times_ns).sum()
    rows = [(row["name"], row["count"], row["limit"]) for row in found["classes"]]
    assert rows == [("given", 1, "given"), ("product", 1, "arithmetic")]
    assert [row["count"] for row in found["ops"]] == [1, 1]


def test_a_graph_without_shapes_is_refused(tmp_path, capsys):
    """Its kernels are not known."""
    Graph.build("bare", [Op("a", "aten.mm", 10, 10)], []).save(tmp_path / "graph.json")
    assert main(["costs", str(tmp_path / "graph.json"), "--devices", "l4-24g"]) == 2
    assert "its ops have no shapes" in capsys.readouterr().err


@pytest.mark.parametrize("shapes", ["aten.convolution > float32[2]", "aten.convolution_backward float32[2] > int8[2]"])
def test_shapes_of_no_such_call_are_refused(shapes, tmp_path, capsys):
    """A file may have any shapes: one line names the op."""
    path = tmp_path / "graph.json"
    Graph.build("bad", [Op("conv", shapes.split()[0], 10, 10, shapes=shapes)], []).save(path)
    assert main(["costs", str(path), "--devices", "l4-24g"]) == 2
    error = capsys.readouterr().err
    assert "op 0 'conv': shapes" in error
    assert error.count("\n") == 1
