"""The policy can learn from good placements."""

import numpy as np
import pytest
import torch

from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.policy.imitation import Example, ImitationConfig, draw_lesson, imitate
from gdp.policy.scheduler import SchedulerConfig, SchedulerPolicy
from gdp.problem import Problem

SMALL = SchedulerConfig(hidden=16, num_graph_layers=2, num_placer_layers=1, num_heads=2, segment=8, num_units=(12,))


def towers() -> Example:
    """Three chains of four ops that never meet, on three devices: one chain on each."""
    ops = [Op(f"op{i}", "mm", flops=10**9) for i in range(12)]
    tensors = [Tensor(i, (i + 3,), 10**6) for i in range(9)]
    problem = Problem.build(Graph.build("towers", ops, tensors), Cluster.parse("3xp100-pcie-16g"))
    return Example(problem, np.arange(12) % 3)


def policy(seed: int = 0) -> SchedulerPolicy:
    torch.manual_seed(seed)
    return SchedulerPolicy(SMALL)


@pytest.mark.parametrize("refining", [0.0, 1.0])
def test_a_lesson_asks_for_the_placement_up_to_the_names_of_like_devices(refining: float) -> None:
    example, rng, num_wrong = towers(), np.random.default_rng(0), 0
    for _ in range(10):
        lesson = draw_lesson(policy(), example, rng, ImitationConfig(refining=refining))
        chosen = lesson.choices.device[0].numpy()[lesson.instance.units.unit_of_op]
        pairs = set(zip(chosen.tolist(), example.placement.tolist(), strict=True))
        assert len(pairs) == 3  # one name for each device
        asked = lesson.choices.mask[0].sum(dim=1) > 1
        assert asked.any()
        if refining:
            wrong = lesson.instance.units.incumbent != lesson.choices.device[0].numpy()
            assert asked.numpy()[wrong].all()
            num_wrong += int(wrong.sum())
    assert (num_wrong > 0) == (refining > 0)


def test_like_devices_are_named_in_the_order_of_their_first_use() -> None:
    example = Example(towers().problem, 2 - towers().placement)
    lesson = draw_lesson(policy(), example, np.random.default_rng(0), ImitationConfig(refining=0.0))
    used = list(dict.fromkeys(lesson.choices.device[0].tolist()))
    assert used == sorted(used)


def test_imitation_learns_to_keep_chains_together() -> None:
    learner, example, rng = policy(), towers(), np.random.default_rng(0)
    torch.nn.init.zeros_(learner.base)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.02)
    steps = [
        imitate(learner, optimizer, [draw_lesson(learner, example, rng, ImitationConfig()) for _ in range(4)])
        for _ in range(40)
    ]
    assert np.mean([loss for loss, _ in steps[-5:]]) < 0.3 * steps[0][0]
    assert np.mean([share for _, share in steps[-5:]]) > 0.9
