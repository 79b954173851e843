"""Replicas: nothing of the whole batch is lost or made twice, rings take the time and the bytes of the textbook."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.accumulation import accumulated
from gdp.parallel.replicas import replicated
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate


def chain(sizes: list[int], dtype: str = "float32") -> Graph:
    """A step of linear layers, one parameter of each size in bytes; gradients are made from the last one on."""
    count = len(sizes)
    ops = [Op(f"w{i}", "parameter", resident_bytes=2 * size, group=i) for i, size in enumerate(sizes)]
    ops += [Op(f"f{i}", "mm", flops=10**6, phase="forward", dtype=dtype) for i in range(count)]
    ops += [Op(f"b{i}", "mm", flops=2 * 10**6, phase="backward", dtype=dtype) for i in reversed(range(count))]
    ops += [Op(f"w{i}.update", "sgd", bytes_accessed=1, phase="update", group=i) for i in range(count)]
    tensors = [
        Tensor(i, (count + i, 3 * count - 1 - i, 3 * count + i), size, resident=True) for i, size in enumerate(sizes)
    ]
    tensors += [Tensor(count + i, (count + i + 1,), 1000) for i in range(2 * count - 1)]
    tensors += [Tensor(3 * count - 1 - i, (3 * count + i,), size) for i, size in enumerate(sizes)]
    return Graph.build("chain", ops, tensors)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    st.lists(st.integers(1, 3), min_size=2, max_size=5),
    st.integers(1, 3000),
)
def test_work_and_hops(sizes: list[int], microbatches: list[int], bucket_bytes: int) -> None:
    """Work is that of the whole batch, and rings move 2 (R - 1) times the gradients."""
    graph = chain(sizes)
    whole = replicated([accumulated(graph, count) for count in microbatches], bucket_bytes=bucket_bytes)
    total, count = sum(microbatches), len(microbatches)
    kinds, phases = np.array(whole.kinds), np.array(whole.phases)
    for phase in ("forward", "backward"):
        expected = total * sum(graph.flops[np.array(graph.phases) == phase])
        assert whole.flops[(phases == phase) & (kinds == "mm")].sum() == expected
    assert whole.resident_bytes.sum() == count * graph.resident_bytes.sum()
    assert (phases == "update").sum() == count * len(sizes)
    hops = whole.is_resident & np.array([kind.startswith("all_reduce") for kind in kinds])[whole.producers]
    moved, num_buckets = whole.tensor_bytes[hops].sum(), (kinds == "all_reduce.done").sum() // count
    least = 2 * (count - 1) * sum(sizes)
    assert least <= moved < least + 2 * (count - 1) * num_buckets * count
    assert (kinds == "all_reduce.add").sum() == (kinds == "all_reduce.copy").sum() == num_buckets * count * (count - 1)


def test_a_ring_of_three_takes_the_time_of_four_hops() -> None:
    """The step of one parameter is its passes, four hops, two sums and the update."""
    # 3,000 bytes on three devices at 1 GB/s with 10 us of latency
    #   forward 1 us and backward 2 us at 1e12 flop/s           3,000 ns
    #   4 hops of 1,000 bytes, all links at once    4 x (1,000 + 10,000) = 44,000 ns
    #   2 sums of 250 flops and 3,000 bytes at 1 TB/s           2 x 3 = 6 ns
    #   update of 1 byte                                        1 ns
    figures = {"memory": "1GB", "flops": {"float32": 1e12}, "memory_bandwidth": "1TB/s", "launch": 0}
    links = [{"from": "*", "to": "*", "bandwidth": "1GB/s", "latency": "10us"}]
    devices = [{"name": f"d{number}", "kind": "x", **figures} for number in range(3)]
    document = {"format": "gdp-cluster", "version": 1, "name": "three", "devices": devices, "links": links}
    cluster = Cluster.from_document(document)
    whole = replicated([chain([3000])] * 3)
    placement = np.array([int(name.partition("#")[2] or 0) for name in whole.op_names])
    simulation = simulate(Problem.build(whole, cluster), placement)
    assert simulation.step_time_ns == 3000 + 4 * 11_000 + 2 * 3 + 1
    assert simulation.feasible


def test_copies_take_their_hosts_along() -> None:
    """A copy for a micro-batch or a replica has the kernels, host time and waits of its first one."""
    graph = chain([5, 5])
    numbers = np.arange(graph.num_ops)
    graph = replace(graph, kernels=numbers + 2, host_ns=numbers, host_waits=numbers % 2 == 1)
    whole = replicated([accumulated(graph, 3)] * 2)
    copies = np.flatnonzero(whole.first_copy != np.arange(whole.num_ops))
    assert len(copies) > 2 * graph.num_ops
    for name in ("kernels", "host_ns", "host_waits"):
        assert (getattr(whole, name)[copies] == getattr(whole, name)[whole.first_copy[copies]]).all()
    assert set(whole.host_ns.tolist()) == set(numbers.tolist())


def test_one_replica_is_the_graph_itself() -> None:
    """One replica needs no exchange."""
    graph = chain([10, 20])
    assert replicated([graph]) is graph


def test_buckets_close() -> None:
    """Buckets close when they are full, and do not cross places."""
    graph = chain([10, 20, 30, 40])  # gradients are made in the order w3, w2, w1, w0
    for bucket_bytes, expected in ((50, 2), (1000, 1), (1, 4), (40, 3)):
        whole = replicated([graph] * 2, bucket_bytes=bucket_bytes)
        assert whole.kinds.count("all_reduce.done") == 2 * expected
    places = np.array([i % 4 // 2 for i in range(8)] + [1, 1, 0, 0] + [0, 0, 1, 1])
    whole = replicated([graph] * 2, places=places)
    assert whole.kinds.count("all_reduce.done") == 4
    group = dict(zip(whole.op_names, whole.groups.tolist(), strict=True))
    assert group["w0"] == group["w1.update"] != group["w2"] == group["w3"]
    assert len({group[f"w{i}{replica}"] for i in range(4) for replica in ("", "#1")}) == 4


def test_a_step_without_gradients_is_refused() -> None:
    """Replicas of a forward pass have nothing to sum."""
    graph = Graph.build("f", [Op("a"), Op("b")], [Tensor(0, (1,))])
    with pytest.raises(InputError, match="no gradients"):
        replicated([graph, graph])
