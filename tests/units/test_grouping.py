"""Groupings: parts of what the placements have on one device, comparable in size, and as few as asked for."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem
from gdp.units.grouping import Units, group_units
from strategies import Instance, instances


@settings(max_examples=100)
@given(instances(max_ops=24, num_placements=2, keep_groups=True), st.integers(1, 12))
def test_groups_are_parts_of_what_the_placements_have_on_one_device(instance: Instance, num_groups: int) -> None:
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    units = Units.of(problem)
    score = np.random.default_rng(0).random(len(units.first))
    grouping = group_units(units, instance.placements, num_groups, score, 8.0)
    for group in range(grouping.num_groups):
        members = grouping.members[grouping.offsets[group] : grouping.offsets[group + 1]]
        for placement in instance.placements:
            assert len(np.unique(placement[members])) == 1
    assert np.array_equal(np.sort(grouping.members), np.arange(problem.num_ops))
    assert len(np.unique(grouping.group_of_op)) == grouping.num_groups


def test_parts_that_share_no_tensors_do_not_use_up_the_groups() -> None:
    # a chain with work, and beside it 60 counters that nothing reads
    chain = [Op(f"op{i}", "mm", flops=10**10) for i in range(40)]
    counters = [Op(f"counter{i}", "add") for i in range(60)]
    graph = Graph.build("chain", chain + counters, [Tensor(i, (i + 1,), 10**6) for i in range(39)])
    problem = Problem.build(graph, Cluster.parse("2xp100-pcie-16g"))
    units = Units.of(problem)
    grouping = group_units(units, [], 10, units.transfer_ns.astype(np.float64), 2.0)
    assert grouping.num_groups <= 12
    assert len(np.unique(grouping.group_of_op[:40])) >= 5  # the chain is not one group
