"""GDP as published is a distribution over placements that keeps the rules and can be trained."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gdp_policy.graph_embedding import GraphEmbeddingConfig
from benchmarks.gdp_policy.paper_policy import KINDS, PaperConfig, PaperPolicy, kind_numbers, paper_policy
from benchmarks.gdp_policy.placement_network import SegmentTransformerConfig
from benchmarks.gdp_policy.training import paper_rewards
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many
from strategies import Instance, instances

SMALL = PaperConfig(
    kinds=("aten.mm", "aten.add"),
    graph=GraphEmbeddingConfig(num_layers=2, hidden=16),
    placer=SegmentTransformerConfig(d_model=16, num_heads=2, feed_forward=32, segment=8),
    max_devices=6,
)
WITHOUT_ATTENTION = replace(SMALL, placer=replace(SMALL.placer, attention=False))
ABLATIONS = [SMALL, WITHOUT_ATTENTION, replace(SMALL, superposition=False)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def policy_of(config: PaperConfig, seed: int = 0) -> PaperPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PaperPolicy(config)


def chain(num_devices: int, op_time_ns: list[list[int]], *, groups: tuple[int, ...] = ()) -> Problem:
    """Ops that feed one another, each of its own kind."""
    num_ops = len(op_time_ns)
    ops = [Op(f"op{i}", f"kind{i}", group=groups[i] if groups else -1) for i in range(num_ops)]
    tensors = [Tensor(i, (i + 1,), 1000) for i in range(num_ops - 1)]
    cluster = Cluster.parse(f"{num_devices}xp100-pcie-16g")
    return Problem.build(Graph.build("chain", ops, tensors), cluster, op_time_ns=np.array(op_time_ns))


@settings(max_examples=60)
@given(instances(max_ops=24, keep_groups=True), st.sampled_from(ABLATIONS), st.sampled_from([0.0, 0.5, 1.0]))
def test_samples_keep_rules_and_scores(instance: Instance, config: PaperConfig, temperature: float) -> None:
    """Samples keep groups and allowed devices, and score as they were drawn."""
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    policy = policy_of(config)
    view = policy.instance(problem, rng())
    rollouts = policy.sample(view, 5, rng(), temperature=temperature)
    assert rollouts.placements.shape == (5, problem.num_ops)
    assert not any(problem.broken_constraints(placement) for placement in rollouts.placements)
    assert not rollouts.log_prob.requires_grad
    log_prob, entropy = policy.score(view, rollouts)
    assert log_prob.shape == rollouts.log_prob.shape == (5, problem.graph.group_index.max() + 1)
    (log_prob.mean() + entropy).backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters())
    _, choosers = np.unique(problem.graph.group_index, return_index=True)
    forced = torch.from_numpy(problem.allowed[choosers].sum(axis=1) == 1)
    assert (log_prob[:, forced] == 0).all()
    assert 0 <= entropy.item() <= np.log(problem.num_devices) + 1e-6
    if temperature == 1:
        torch.testing.assert_close(log_prob.detach(), rollouts.log_prob)


def test_forbidden_devices_are_never_drawn() -> None:
    """A forbidden device has probability 0 and finite gradients, however much it is wanted."""
    problem = chain(3, [[1, -1, 1]] * 4 + [[1, 1, -1]] * 4)
    policy = policy_of(SMALL)
    with torch.no_grad():
        policy.head.bias[1:3] = 1e4
    view = policy.instance(problem, rng())
    rollouts = policy.sample(view, 500, rng())
    assert problem.allowed[np.arange(8), rollouts.placements].all()
    log_prob, entropy = policy.score(view, rollouts)
    (log_prob.sum() + entropy).backward()
    assert log_prob.isfinite().all()
    assert entropy.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())


def test_probabilities_are_frequencies() -> None:
    """Probabilities sum to 1 over placements, and are the frequencies of samples."""
    problem = chain(3, [[1, 1, 1], [1, -1, 1], [1, 1, 1], [1, 1, 1]], groups=(0, -1, -1, 0))
    policy = policy_of(SMALL, seed=3)
    view = policy.instance(problem, rng())
    rollouts = policy.sample(view, 20000, rng())
    every = np.array([(a, b, c, a) for a, b, c in product(range(3), (0, 2), range(3))])
    with torch.no_grad():
        log_prob, entropy = policy.score(view, replace(rollouts, placements=every))
    probability = log_prob.sum(dim=1).double().exp().numpy()
    np.testing.assert_allclose(probability.sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(-(probability * np.log(probability)).sum() / 3, entropy.item(), rtol=1e-4)
    frequency = (rollouts.placements[:, None] == every).all(axis=2).mean(axis=0)
    assert np.abs(frequency - probability).max() < 5 * np.sqrt(0.25 / 20000)  # 5 standard deviations at least
    likeliest = policy.sample(view, 2, rng(), temperature=0.0)
    assert (likeliest.placements == every[probability.argmax()]).all()
    assert (likeliest.log_prob == 0).all()


@pytest.mark.parametrize("config", ABLATIONS)
def test_training_reaches_the_optimum(config: PaperConfig) -> None:
    """Training reaches the optimum of a tiny problem."""
    # two chains of three ops; each op is fast on one of two devices, and a transfer costs about what that gains
    fast = (0, 1, 0, 1, 0, 1)  # ops 0, 2, 4 are one chain, ops 1, 3, 5 the other
    ops = [Op(f"op{i}", kind) for i, kind in enumerate(("aten.mm", "aten.add") * 3)]
    tensors = [Tensor(i, (i + 2,), 1000) for i in range(4)]
    times = [[20_000, 50_000] if device == 0 else [50_000, 20_000] for device in fast]
    cluster = Cluster.parse("2xp100-pcie-16g")
    problem = Problem.build(Graph.build("two chains", ops, tensors), cluster, op_time_ns=np.array(times))
    every = np.array(list(product(range(2), repeat=6)))
    step_times, _ = evaluate_many(problem, every, num_threads=1)
    best = every[step_times.argmin()]
    assert tuple(best) == fast
    assert (step_times == step_times.min()).sum() == 1

    policy, draws = policy_of(config), rng()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    view = policy.instance(problem, draws)
    for _ in range(60):  # REINFORCE with the batch's mean as the baseline
        rollouts = policy.sample(view, 16, draws)
        reward = -np.sqrt(evaluate_many(problem, rollouts.placements, num_threads=1)[0] / 1e9)
        advantage = torch.from_numpy((reward - reward.mean()) / (reward.std() + 1e-8)).float()
        log_prob, _ = policy.score(view, rollouts)
        optimizer.zero_grad()
        (-(advantage * log_prob.sum(dim=1)).mean()).backward()
        optimizer.step()
    assert tuple(policy.sample(view, 1, draws, temperature=0.0).placements[0]) == fast


def test_seeds_repeat() -> None:
    """A seed gives the same parameters and samples, and leaves PyTorch's generator alone."""
    state = torch.random.get_rng_state()
    first, second, other = map(paper_policy, (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    same, different = (torch.nn.utils.parameters_to_vector(policy.parameters()) for policy in (second, other))
    mine = torch.nn.utils.parameters_to_vector(first.parameters())
    assert torch.equal(mine, same)
    assert not torch.equal(mine, different)
    problem = chain(4, [[1] * 4] * 10)
    view = first.instance(problem, rng())
    draws = [first.sample(view, 3, rng(5)).placements for _ in range(2)]
    assert (draws[0] == draws[1]).all()


def test_unknown_kinds_have_buckets() -> None:
    """Unknown kinds fall into buckets behind the known ones, always into the same."""
    names = [f"onnx.Op{i}" for i in range(50)]
    numbers = kind_numbers(("b", *names, "a", "b"), common=("a", "b"), num_unknown=4)
    assert numbers[[0, -2, -1]].tolist() == [1, 0, 1]
    assert set(numbers[1:-2].tolist()) == {2, 3, 4, 5}
    assert (kind_numbers(names[::-1], ("a", "b"), 4)[::-1] == numbers[1:-2]).all()


def test_too_many_devices_are_refused() -> None:
    """More devices than the policy takes are one clear error."""
    policy = policy_of(replace(SMALL, max_devices=2))
    policy.instance(chain(2, [[1, 1]]), rng())
    with pytest.raises(InputError) as error:
        policy.instance(chain(3, [[1, 1, 1]]), rng())
    assert "3 devices, policy 'paper' takes at most 2; place on fewer devices" in str(error.value)
    assert "\n" not in str(error.value)


def test_glorots_weights_tell_ops_apart() -> None:
    """PyTorch's initial weights give ops of unlike kinds nearly equal probabilities, TensorFlow's do not."""
    tensors = [Tensor(i, (i + 1,), 1000) for i in range(9)]
    graph = Graph.build("chain", [Op(f"op{i}", KINDS[5 * i]) for i in range(10)], tensors)
    problem = Problem.build(graph, Cluster.parse("2xp100-pcie-16g"))
    spread: dict[str, list[float]] = {"pytorch": [], "glorot": []}
    for initial, deviations in spread.items():
        for seed in range(3):
            policy = policy_of(PaperConfig(initial=initial), seed)
            view = policy.instance(problem, rng())
            every = policy.sample(view, 1, rng())
            with torch.no_grad():
                log_prob, _ = policy.score(view, replace(every, placements=np.zeros((1, 10), np.int64)))
            deviations.append(float(log_prob.exp().std()))
    assert min(spread["glorot"]) > 2 * max(spread["pytorch"])


@pytest.mark.parametrize(
    "wrong", [{"initial": "zero"}, {"max_devices": 0}, {"kinds": ("a", "a")}, {"num_unknown_kinds": 0}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, object]) -> None:
    """The error names the size."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(SMALL, **wrong)


def test_rewards_are_those_of_the_paper() -> None:
    """Minus the root of the step time in seconds, and -10 where memory is exceeded."""
    rewards = paper_rewards(np.array([250_000_000, 4_000_000_000, 1]), np.array([True, True, False]))
    assert rewards.tolist() == [-0.5, -2.0, -10.0]
