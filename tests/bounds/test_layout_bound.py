"""The bound of any layout: no group of cards whose ops are cut beats it."""

import numpy as np
import pytest

from gdp.bounds.layout_bound import layout_bound
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from tests.models.test_shards import captured
from tests.search.test_rivals import machine

FURTHER = ("llama", "tied", "vit", "diffusion")


@pytest.mark.parametrize("cluster", [Cluster.parse("4xa100-sxm-80g"), machine(4, "80GB")], ids=["kernels", "roofline"])
@pytest.mark.parametrize(
    "name", ["gpt2", "t5", "mixtral", *(pytest.param(name, marks=pytest.mark.long) for name in FURTHER)]
)
def test_no_degree_beats_the_bound(name: str, cluster: Cluster) -> None:
    """All ranks together do at least the work of the whole step, without launches and with exchanges for nothing."""
    bound_ns, degrees = layout_bound({1: captured(name).graph}, cluster), []
    assert bound_ns > 0
    for tensor, sequence in ((2, False), (2, True), (4, True)):
        try:
            local = captured(name, tensor, sequence=sequence).graph
        except InputError:  # heads that the degree does not divide
            continue
        groups = cluster.grouped(tensor)
        step_ns = simulate(Problem.build(local, groups), np.zeros(local.num_ops, np.int64)).step_time_ns
        assert bound_ns <= layout_bound({1: local}, groups) <= step_ns
        assert bound_ns <= -(-step_ns * tensor // 4)  # as many groups as there are, at best
        degrees.append(tensor)
    assert degrees
