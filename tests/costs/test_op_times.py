"""gdp.costs.op_times: op and transfer times against exact rational arithmetic."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdp.cluster import Cluster, Device, Route
from gdp.costs.hosts import CHECKPOINT_KERNELS, RECOMPUTED_KERNELS
from gdp.costs.op_times import count_time_sources, op_times, transfer_occupancy_ns, unused_names
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.models.pytorch import capture
from gdp.parallel.recompute import recomputed
from gdp.simulator.problem import Problem

LARGEST = 2**63 - 1


def device(name: str = "d", kind: str = "k", launch_ns: int = 0, bandwidth: int = 10**9, **flops: int) -> Device:
    return Device(name, kind, 2**30, {"float32": 10**9, **flops}, bandwidth, launch_ns)


def cluster_of(*devices: Device) -> Cluster:
    count = len(devices)
    routes = {(a, b): Route(0, 1, ()) for a in range(count) for b in range(count) if a != b}
    return Cluster.build("c", devices, routes)


def graph_of(*ops: Op) -> Graph:
    return Graph.build("g", ops, [])


def exact_ns(amount: int, rate: int) -> int:
    return math.ceil(Fraction(amount * 10**9, rate))


rates = st.one_of(
    st.integers(1, LARGEST), st.integers(1, 10**6), st.integers(10**12, 2 * 10**16), st.just(LARGEST // 1000)
)
amounts = st.one_of(st.integers(0, LARGEST), st.integers(0, 10**6))


@given(st.lists(amounts, max_size=5), rates)
def test_occupancy_is_exact(sizes: list[int], rate: int) -> None:
    """The occupancy of a channel is the exact quotient, rounded up, or an overflow."""
    expected = [exact_ns(size, rate) for size in sizes]
    if any(time > LARGEST for time in expected):
        with pytest.raises(InputError, match=r"tensor \d+: .* take 2\^63 ns or more"):
            transfer_occupancy_ns(np.array(sizes, np.int64), rate)
    else:
        result = transfer_occupancy_ns(np.array(sizes, np.int64), rate)
        assert result.dtype == np.int64
        assert result.tolist() == expected


@given(
    st.lists(st.tuples(amounts, amounts, st.sampled_from(["float32", "float16", "complex64"])), min_size=1, max_size=6),
    st.tuples(rates, rates, rates),
    st.one_of(st.integers(0, 10_000), st.integers(0, LARGEST)),
)
def test_the_roofline_is_exact(ops: list[tuple[int, int, str]], rate: tuple[int, ...], launch: int) -> None:
    """The time of an op is the exact roofline, rounded up, or an overflow."""
    only = Device("d", "k", 0, {"float32": rate[0], "float16": rate[1]}, rate[2], launch)
    expected = [
        launch + max(exact_ns(flops, rate[1] if dtype == "float16" else rate[0]), exact_ns(moved, rate[2]))
        if flops or moved
        else 0
        for flops, moved, dtype in ops
    ]
    graph = graph_of(*(Op(f"o{i}", flops=f, bytes_accessed=b, dtype=t) for i, (f, b, t) in enumerate(ops)))
    if any(time > LARGEST for time in expected):
        with pytest.raises(InputError, match=r"op \d+ 'o\d+': .* on device 'd'; check"):
            op_times(graph, cluster_of(only))
    else:
        assert op_times(graph, cluster_of(only)).tolist() == [[time] for time in expected]


def test_roofline_by_hand() -> None:
    """Ops take the time of their flops or of their bytes, and the launch."""
    # P100: flops 9.3e9 / 9.3e12 = 1 ms; bytes 732e3 / 732e9 = 1 us; launch 5 us.
    graph = graph_of(
        Op("compute", flops=9_300_000_000, bytes_accessed=732_000),
        Op("memory", flops=1, bytes_accessed=732_000_001),  # 1 ms and a little: rounded up
        Op("half", flops=18_700_000_000, dtype="float16"),
        Op("integer", flops=9_300_000_000, dtype="int64"),  # no such rate: float32
        Op("nothing"),
    )
    times = op_times(graph, Cluster.parse("p100-pcie-16g"))
    assert times[:, 0].tolist() == [1_005_000, 1_005_001, 1_005_000, 1_005_000, 0]


def test_which_time_counts() -> None:
    """Measured times go by device name, then by device kind; else the roofline counts."""
    cluster = cluster_of(device("a", "x", 7), device("b", "x", 7), device("c", "y", 7), device("y", "z", 7))

    def times(time_ns: Mapping[str, int]) -> list[int]:
        return list(op_times(graph_of(Op("o", flops=3, time_ns=time_ns)), cluster)[0])

    assert times({}) == [10, 10, 10, 10]  # 7 ns launch + 3 flops at 1 per ns
    assert times({"x": 5, "b": 6}) == [5, 6, 10, 10]
    assert times({"b": 6, "x": -1}) == [-1, 6, 10, 10]
    assert times({"y": 4}) == [10, 10, 4, 4]  # a kind and another device's name
    assert times({"x": 0, "y": 0, "elsewhere": 9}) == [0, 0, 0, 0]


def test_a_measured_time_spares_the_roofline() -> None:
    """A measured time stands in for figures that overflow."""
    graph = graph_of(Op("o", flops=LARGEST, time_ns={"d": 3}))
    assert op_times(graph, cluster_of(device(float32=1))).tolist() == [[3]]


def test_sources_of_times_are_counted() -> None:
    """For each device ops are counted by the source of their times."""
    graph = graph_of(
        Op("measured", flops=1, time_ns={"x": 5}),
        Op("barred", flops=1, time_ns={"a": -1}),
        Op("modelled", flops=1),
        Op("free"),
    )
    assert count_time_sources(graph, cluster_of(device("a", "x"), device("b", "z"))) == {
        "a": {"measured": 1, "cannot_run": 1, "roofline": 1, "free": 1},
        "b": {"measured": 0, "cannot_run": 0, "roofline": 3, "free": 1},
    }


def test_missing_float_types_are_told() -> None:
    """A V100 has no bfloat16 and takes the rate of float32, 15.7 TFLOP/s, as the note says; an A100 has 312."""
    graph = graph_of(Op("o", flops=15_700_000, dtype="bfloat16"))
    both = Cluster.parse("a100-sxm-80g+v100-sxm-32g")
    (note,) = unused_names(graph, both)
    assert "'bfloat16', for which v100-sxm-32g has no rate" in note
    assert op_times(graph, both).tolist() == [[5_000 + 51, 5_000 + 1_000]]  # 50.3 ns, rounded up
    assert unused_names(graph, Cluster.parse("1xa100-sxm-80g")) == []


def test_times_on_hosts_by_hand() -> None:
    """A host issues the kernels of ops that take time, and takes `host_ns`; what int64 cannot hold is an error."""
    devices = [device("a", "x", 7), replace(device("b", "x", 7), issue_ns=5)]
    ops = Op("o", flops=3, kernels=2, host_ns=1), Op("parameter"), Op("item", host_ns=4)
    problem = Problem.build(graph_of(*ops), cluster_of(*devices))
    assert problem.host_time_ns.tolist() == [[1, 11], [0, 0], [4, 4]]  # 2 x 5 + 1
    with pytest.raises(InputError, match="check kernels, host_ns and issue"):
        Problem.build(graph_of(Op("o", flops=3, kernels=2**62)), cluster_of(*devices))
    with pytest.raises(InputError, match="host_time_ns holds -1; at least 0 is expected"):
        Problem.build(graph_of(*ops), cluster_of(*devices), host_time_ns=np.full((3, 2), -1))


def test_updates_take_their_host_longer_than_their_kernels() -> None:
    """The Python of an optimizer looks at each parameter: 0.25 kernels for each of 8 calls of `foreach`, 0.6 for one
    that is fused, and 0.55 for each call of a loop, besides the kernels."""
    weight, eager = torch.nn.Linear(16, 16, bias=False), replace(device("a", "x", 7), issue_ns=10_000)
    for optimizer, kernels in {"adamw": 8 / 48 + 2, "adamw,fused": 1 / 48 + 0.6, "adamw,for-loop": 8 + 4.4}.items():
        graph = capture(weight, torch.randn(2, 16), optimizer=optimizer).graph
        card = replace(eager, achieved={"gap_ns": 1})
        host_ns = Problem.build(graph, cluster_of(card)).host_time_ns[graph.is_in_phase("update"), 0]
        assert host_ns.tolist() == [math.ceil(kernels * 10_000)]


def test_checkpoints_take_their_host_as_long_as_many_kernels() -> None:
    """A layer that is recomputed costs its host the issue of many more kernels, most of them with the backward pass;
    the ops of a run have equal parts. Nothing without hosts."""
    ops = [Op("x", "input")]
    ops += [Op(f"{name}{i}", "mm", 9, phase="forward", module=f"layers.{i}") for i in (0, 1) for name in "fg"]
    ops += [Op(f"b{i}", "mm", 9, phase="backward", module=f"layers.{i}") for i in (1, 0)]
    edges = [(0, (1,)), (1, (2, 6)), (2, (3,)), (3, (4, 5)), (4, (5,)), (5, (6,))]
    graph = recomputed(Graph.build("g", ops, [Tensor(maker, readers, 8) for maker, readers in edges]), "blocks")
    eager = replace(device("a", "x", 1), issue_ns=5)
    devices = eager, replace(eager, name="b", runtime="compile"), replace(eager, name="c", issue_ns=0)
    times_ns = Problem.build(graph, cluster_of(*devices)).host_time_ns
    longer = {graph.op_names[op]: int(times_ns[op, 0]) for op in np.flatnonzero(times_ns[:, 0] > 5)}
    runs = {"": CHECKPOINT_KERNELS, "!": RECOMPUTED_KERNELS}
    of_layers = {"f0": 1, "f1": 2, "g1": 2}  # ops that run again: b0 reads the result of f0, b1 that of g1
    expected = {
        f"{op}{end}": (1 + kernels / count) * 5 for op, count in of_layers.items() for end, kernels in runs.items()
    }
    assert longer == {op: math.ceil(time_ns) for op, time_ns in expected.items()}
    assert CHECKPOINT_KERNELS < RECOMPUTED_KERNELS
    assert times_ns[:, 1:].max(axis=0).tolist() == [5, 0]
