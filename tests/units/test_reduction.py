"""Reduction: fewer ops, the same times."""

import numpy as np
from hypothesis import given, settings

from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from gdp.units.reduction import reduce
from strategies import Instance, instances


@given(instances(keep_groups=True))
@settings(max_examples=1000)
def test_expanded_plan_has_the_same_step_time(instance: Instance) -> None:
    """A plan of the reduced problem, expanded, takes exactly as long, needs no more memory and breaks nothing."""
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    reduction = reduce(problem)
    placement = reduction.restrict(instance.placement)
    reduced = simulate(reduction.problem, placement)
    expanded = simulate(problem, reduction.expand(placement), order=reduction.expand_order(reduced.order))
    assert expanded.step_time_ns == reduced.step_time_ns
    assert (expanded.peak_memory_bytes <= reduced.peak_memory_bytes).all()
    assert reduction.problem.broken_constraints(placement) == [] == problem.broken_constraints(expanded.placement)


def test_chains_and_constants_merge() -> None:
    """A chain of four ops fed by a constant becomes one op; the branch beside it stays."""
    from gdp.cluster import Cluster
    from gdp.graph import Graph, Op, Tensor

    # constant -> a -> b -> c -> d, and x -> d: d has two predecessors, so a, b and c merge, with the constant
    ops = [
        Op(name, flops=work)
        for name, work in zip(("constant", "a", "b", "c", "x", "d"), (0, 9, 9, 9, 9, 9), strict=True)
    ]
    tensors = [Tensor(0, (1,), 4), Tensor(1, (2,), 4), Tensor(2, (3,), 4), Tensor(3, (5,), 4), Tensor(4, (5,), 4)]
    reduction = reduce(Problem.build(Graph.build("chain", ops, tensors), Cluster.parse("2xp100-pcie-16g")))
    assert reduction.problem.graph.op_names == ("c", "x", "d")
    assert reduction.members.tolist() == [0, 1, 2, 3, 4, 5]
    assert (
        reduction.problem.op_time_ns[:, 0].tolist()
        == np.add.reduceat(reduction.original.op_time_ns[:, 0], [0, 4, 5]).tolist()
    )
