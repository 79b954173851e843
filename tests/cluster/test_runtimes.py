"""Runtimes of clusters: how GPUs run a step, named behind DEVICES."""

import pytest

from gdp.cluster import Cluster
from gdp.costs.fusion import fused
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem


def test_a_runtime_behind_devices_is_that_of_their_gpus(tmp_path):
    """GPUs are run as the text says, CPUs are not, and a file of the cluster says it too."""
    cluster = Cluster.parse("2xa100-sxm-80g+cpu-16core:compile")
    assert [device.runtime for device in cluster.devices] == ["compile", "compile", "eager"]
    assert cluster.devices[0].issue_ns > 0
    assert cluster.devices[0].achieved["multiprocessors"] == 108
    cluster.save(tmp_path / "machine.yaml")
    read = Cluster.load(tmp_path / "machine.yaml")
    assert read.fingerprint == cluster.fingerprint
    assert Cluster.parse(f"{tmp_path}/machine.yaml:eager").name == "2xa100-sxm-80g+cpu-16core:eager"


def test_without_a_runtime_gpus_are_eager():
    """Devices of the catalogue tell what they achieve; a device of a file that has all of a sheet tells it itself."""
    cluster = Cluster.parse("2xa100-sxm-80g")
    assert cluster.fingerprint == Cluster.parse("2xa100-sxm-80g:eager").fingerprint
    document = cluster.to_document()
    for device in document["devices"]:
        del device["achieved"], device["issue"]
    sheet = Cluster.from_document(document).devices[0]
    assert not sheet.achieved
    assert sheet.issue_ns == 0


def test_graphs_without_shapes_run_at_the_rates_of_the_sheet():
    """1 GFLOP in bfloat16 on an A100 takes 1e9 / 312e12 s and a launch of 5 us, and nothing of the host."""
    graph = Graph.build("g", [Op("a", "mm", 10**9, dtype="bfloat16")], [])
    problem = Problem.build(graph, Cluster.parse("a100-sxm-80g"))
    assert problem.op_time_ns.tolist() == [[5_000 + 3_206]]
    assert not problem.host_time_ns.any()


def test_an_unknown_runtime_is_refused():
    """The error names the runtimes that there are."""
    with pytest.raises(InputError, match="known: eager, compile, cuda-graphs"):
        Cluster.parse("2xl4-24g").run_by("fast")


def test_pointwise_ops_between_products_are_one_kernel():
    """mm, then add and gelu of as many elements, then mm: the two are charged for what enters and leaves them.

    add reads the product (64 bytes) and a bias (8), gelu writes 64 bytes; 64 bytes between them are not written.
    """
    mm, pointwise = "aten.mm float32[4,4] float32[4,4] > float32[4,4]", "float32[4,4] > float32[4,4]"
    ops = [
        Op("x", "input"),
        Op("first", "aten.mm", 128, 192, shapes=mm),
        Op("bias", "parameter"),
        Op("add", "aten.add", 16, 136, shapes=f"aten.add float32[4,4] float32[2] > {pointwise.split()[-1]}"),
        Op("gelu", "aten.gelu", 16, 128, shapes=f"aten.gelu {pointwise}"),
        Op("second", "aten.mm", 128, 192, shapes=mm),
    ]
    tensors = [
        Tensor(0, (1, 5), 64),
        Tensor(1, (3,), 64),
        Tensor(2, (3,), 8, resident=True),
        Tensor(3, (4,), 64),
        Tensor(4, (5,), 64),
        Tensor(5, (), 64, keep=True),
    ]
    fusion = fused(Graph.build("block", ops, tensors))
    assert fusion.is_fused.tolist() == [False, False, False, True, True, False]
    assert fusion.bytes[[3, 4]].tolist() == [72, 64]
    assert fusion.launches[[3, 4]].tolist() == [0, 1]
