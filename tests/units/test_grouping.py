"""Groupings: parts of what the placements have on one device, comparable in size, and as few as asked for."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem
from gdp.units.units import Units, group_units, move_arrays
from strategies import Instance, instances


@settings(max_examples=100)
@given(instances(max_ops=24, num_placements=2, keep_groups=True), st.integers(1, 12))
def test_groups_share_a_device(instance: Instance, num_groups: int) -> None:
    """Groups are parts of what each of the placements has on one device."""
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    units = Units.of(problem)
    pairs = units.pairs()
    score = np.random.default_rng(0).random(len(pairs.first))
    groups = group_units(units, pairs, instance.placements, num_groups, score, 8.0)
    assert all(groups.devices_of(placement) is not None for placement in instance.placements)
    assert len(np.unique(groups.index)) == groups.num_units
    arrays = move_arrays(groups, units, pairs)
    for op, other in zip(problem.graph.producers[problem.graph.edge_tensors], problem.graph.consumers, strict=True):
        group, neighbour = groups.index[op], groups.index[other]
        near = arrays.neighbours[arrays.neighbour_offsets[group] : arrays.neighbour_offsets[group + 1]]
        assert group == neighbour or neighbour in near


@settings(max_examples=100)
@given(instances(max_ops=24, keep_groups=True), st.integers(1, 6), st.integers(0, 2**32))
def test_figures_of_units_are_those_of_their_ops(instance: Instance, num_units: int, seed: int) -> None:
    """Work and bytes of units are sums over their ops."""
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    index = np.unique(np.random.default_rng(seed).integers(0, num_units, problem.num_ops), return_inverse=True)[1]
    units = Units.of(problem, index)
    for unit in range(units.num_units):
        ops = np.flatnonzero(index == unit)
        assert units.ops[units.offsets[unit] : units.offsets[unit + 1]].tolist() == ops.tolist()
        assert units.first_op[unit] == ops[0]
        assert units.time_ns[unit].tolist() == np.maximum(problem.op_time_ns[ops], 0).sum(axis=0).tolist()
        assert units.allowed[unit].tolist() == problem.allowed[ops].all(axis=0).tolist()
        assert units.resident_bytes[unit] == problem.graph.resident_bytes[ops].sum()
    devices = np.arange(units.num_units) % problem.num_devices
    assert units.devices_of(units.place(devices)).tolist() == devices.tolist()  # type: ignore[union-attr]


def test_parts_without_shared_tensors() -> None:
    """Parts that share no tensors do not use up the groups."""
    # a chain with work, and beside it 60 counters that nothing reads
    chain = [Op(f"op{i}", "mm", flops=10**10) for i in range(40)]
    counters = [Op(f"counter{i}", "add") for i in range(60)]
    graph = Graph.build("chain", chain + counters, [Tensor(i, (i + 1,), 10**6) for i in range(39)])
    problem = Problem.build(graph, Cluster.parse("2xp100-pcie-16g"))
    units = Units.of(problem)
    pairs = units.pairs()
    groups = group_units(units, pairs, [], 10, pairs.transfer_ns.astype(np.float64), 2.0)
    assert groups.num_units <= 12
    assert len(np.unique(groups.index[:40])) >= 5  # the chain is not one group
