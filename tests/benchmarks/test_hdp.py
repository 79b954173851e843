"""HDP obeys every constraint, spends no more than it may, repeats itself, and learns."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from benchmarks.hdp import HdpConfig, HdpPolicy, hdp
from gdp.budget import Budget, Clock
from gdp.graph import Graph, Op, Tensor
from gdp.search.candidate import Candidate
from gdp.search.question import Question
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many, simulate
from hand_cases import make_cluster
from strategies import Instance, instances

SMALL = HdpConfig(placer_hidden=32, learning_rate=0.01, grouper_temperature=1.0)  # groupings are random at first


def run(problem: Problem, num_updates: int, seed: int = 0) -> Candidate | None:
    question = Question.about(problem, seed=seed)
    return hdp(question, Clock(Budget(seconds=60)), config=SMALL, max_updates=num_updates).best


def two_chains(memory_bytes: int = 2**50, resident_bytes: int = 0) -> Problem:
    """Two chains of four ops of 10 ns, 10 bytes (and ns) from op to op, that nothing connects; on two equal devices."""
    ops = [Op(f"op{op}", kind=f"kind{op % 2}", resident_bytes=resident_bytes) for op in range(8)]
    chains = ([0, 2, 4, 6], [1, 3, 5, 7])
    tensors = [Tensor(a, (b,), 10) for chain in chains for a, b in pairwise(chain)]
    cluster = make_cluster(2, {}, memory_bytes)
    return Problem.build(Graph.build("test", ops, tensors), cluster, op_time_ns=np.full((8, 2), 10, np.int64))


@settings(max_examples=25)
@given(instances(max_ops=12, max_devices=4))
def test_answers(instance: Instance) -> None:
    """Every answer obeys groups, devices and memory, and has its simulated time."""
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    best = run(problem, 2)
    if best is not None:
        assert best.replay.reasons == []
        assert best.replay.step_time_ns == best.step_time_ns
        assert simulate(problem, best.placement).reasons == []


def test_finds_the_optimum_of_a_tiny_problem() -> None:
    """HDP finds the optimum of a tiny problem."""
    problem = two_chains()
    placements = np.array(list(product(range(2), repeat=8)), np.int64)
    assert evaluate_many(problem, placements)[0].min() == 40  # a chain on each device
    best = run(problem, 150)
    assert best is not None
    assert best.step_time_ns == 40


def test_learns_what_as_many_untrained_samples_do_not_find() -> None:
    # a chain of 40 ops of 10 ns that pays 1000 ns wherever it changes device
    """HDP learns a placement that as many untrained samples do not find."""
    tensors = [Tensor(op, (op + 1,), 1000) for op in range(39)]
    graph = Graph.build("test", [Op(f"op{op}") for op in range(40)], tensors)
    problem = Problem.build(graph, make_cluster(2, {}), op_time_ns=np.full((40, 2), 10, np.int64))
    torch.manual_seed(0)
    untrained, generator = HdpPolicy(problem, SMALL), torch.Generator().manual_seed(0)
    times = [evaluate_many(problem, untrained.sample(4, generator)[0])[0].min() for _ in range(150)]
    assert min(times) > 1400
    best = run(problem, 150)
    assert best is not None
    assert best.step_time_ns == 400  # one device


def test_same_seed_and_updates_give_the_same_answer() -> None:
    """The same seed and number of updates give the same answer."""
    problem = two_chains()
    first, second = run(problem, 5, seed=3), run(problem, 5, seed=3)
    assert first is not None
    assert second is not None
    assert np.array_equal(first.placement, second.placement)
    others = [run(problem, 1, seed=seed) for seed in range(5)]
    assert len({other.step_time_ns for other in others if other is not None}) > 1


@pytest.mark.parametrize("simulations", [0, 3, 10])
def test_spends_exactly_a_budget_in_simulations(simulations: int) -> None:
    """HDP spends exactly a budget in simulations."""
    clock = Clock(Budget(simulations=simulations))
    solution = hdp(Question.about(two_chains()), clock, config=SMALL)
    assert clock.simulations == simulations
    assert (solution.best is None) == (simulations == 0)


def test_stops_when_time_is_up_or_it_is_asked_to() -> None:
    """HDP stops when time is up or it is asked to."""
    question = Question.about(two_chains())
    assert hdp(question, Clock(Budget(seconds=0.0)), config=SMALL).num_updates == 0
    clock = Clock(Budget(seconds=60))
    stopping = replace(question, on_progress=lambda best: clock.stop.set())
    assert hdp(stopping, clock, config=SMALL).num_updates == 1


def test_what_does_not_fit_is_met_and_never_returned() -> None:
    # a device holds the parameters of five ops, and all tensors
    """Placements that do not fit are met and never returned."""
    problem = two_chains(memory_bytes=5 * 10_000 + 60, resident_bytes=10_000)
    torch.manual_seed(0)
    placements, _ = HdpPolicy(problem, SMALL).sample(64, torch.Generator().manual_seed(0))
    assert np.any(evaluate_many(problem, placements)[1] > problem.memory_limit_bytes)
    best = run(problem, 50)
    assert best is not None
    assert simulate(problem, best.placement).feasible
    assert run(two_chains(memory_bytes=9_999, resident_bytes=10_000), 20) is None


def test_log_probabilities() -> None:
    """Log probabilities are those that samples are drawn with."""
    torch.manual_seed(0)
    policy = HdpPolicy(two_chains(), SMALL)
    torch.nn.init.normal_(policy.placer.out.weight, std=5.0)  # far from uniform
    num_samples = 20_000
    groups = torch.randn(3, policy.placer.encoder.input_size)
    allowed = torch.tensor([[True, True], [True, False], [True, True]])
    devices, log_prob = policy.placer(groups, allowed, num_samples, torch.Generator().manual_seed(0))
    expected = {tuple(row): math.exp(value) for row, value in zip(devices.T.tolist(), log_prob.tolist(), strict=True)}
    drawn = Counter(map(tuple, devices.T.tolist()))
    assert len(expected) == 4  # the forbidden device was never drawn
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-4)
    for row, probability in expected.items():
        spread = math.sqrt(probability * (1.0 - probability) / num_samples)
        assert abs(drawn[row] / num_samples - probability) < 4.0 * spread


def test_gradients_are_finite_where_devices_are_forbidden() -> None:
    """Gradients are finite where devices are forbidden."""
    times = np.full((8, 2), 10, np.int64)
    times[0, 0] = times[1, 1] = times[4, 0] = -1
    problem = Problem.build(two_chains().graph, two_chains().cluster, op_time_ns=times)
    torch.manual_seed(0)
    policy = HdpPolicy(problem, SMALL)
    placements, log_prob = policy.sample(8, torch.Generator().manual_seed(0))
    log_prob.sum().backward()
    assert problem.allowed[np.arange(8), placements].all()
    assert log_prob.isfinite().all()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients if gradient is not None)


def test_refuses_sizes_that_make_no_sense() -> None:
    """Sizes that make no sense are refused."""
    for wrong in ({"num_groups": 0}, {"placer_hidden": 7}, {"temperature": 0.0}, {"baseline_decay": 1.0}):
        with pytest.raises(ValueError, match="expected"):
            HdpConfig(**wrong)
