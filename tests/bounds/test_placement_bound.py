"""The bound of a placement: no order of its ops beats it, and it is reached where it should be."""

import numpy as np
from hypothesis import given, settings

from gdp.bounds.placement_bound import placement_bounds
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from strategies import Instance, instances


@settings(max_examples=300)
@given(instances(max_ops=20, num_placements=3))
def test_no_order_of_a_placement_beats_its_bound(instance: Instance) -> None:
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    bounds = placement_bounds(problem, instance.placements)
    for placement, bound in zip(instance.placements, bounds.tolist(), strict=True):
        for seed in range(3):
            priority = np.random.default_rng(seed).permutation(problem.num_ops)
            assert bound <= simulate(problem, placement, priority=priority).step_time_ns
        assert bound <= simulate(problem, placement).step_time_ns


def test_one_device_a_chain_and_a_busy_channel_reach_it() -> None:
    cluster = Cluster.parse("2xp100-pcie-16g")
    ops = [Op(f"op{i}", "mm", flops=10**9) for i in range(5)]
    chain = [Tensor(i, (i + 1,), 10**6) for i in range(4)]
    wide = [Tensor(0, (1, 2), 10**8), Tensor(0, (3, 4), 10**8)]  # both go through the same channels, one by one
    for tensors, placement in ((chain, [0] * 5), (chain, [0, 1, 0, 1, 0]), (wide, [0, 1, 1, 1, 1])):
        problem = Problem.build(Graph.build("five", ops, tensors), cluster)
        step_time_ns = simulate(problem, placement).step_time_ns
        bound = int(placement_bounds(problem, [placement])[0])
        assert bound <= step_time_ns
        if tensors is chain:
            assert bound == step_time_ns
        else:  # all but the first of the ops behind the channel, which may start before the second transfer ends
            assert bound >= step_time_ns - 2 * problem.op_time_ns[1, 1]
