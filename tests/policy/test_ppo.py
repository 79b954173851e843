"""PPO: rewards, advantages, the clipped objective, and that it learns."""

from itertools import product

import numpy as np
import pytest
import torch

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.policy.training.ppo import PPOConfig, Trials, advantages, draw_trials, improve, relative_rewards
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many
from policy.tiny_policy import TinyPolicy, mixed_chain, random_graph, tiny_policy

CONFIG = PPOConfig()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def some_trials(policy: TinyPolicy, problem: Problem, seed: int = 0, config: PPOConfig = CONFIG) -> Trials:
    return draw_trials(policy, policy.instance(problem, rng(seed)), 8, rng(seed), config, 10**6, num_threads=1)


def random_problem(seed: int = 0) -> Problem:
    return Problem.build(random_graph(12, seed), Cluster.parse("3xp100-pcie-16g"))


def test_relative_rewards_fall() -> None:
    """Relative rewards fall with the step time and with missing memory."""
    limits = np.array([100, 50])
    peaks = np.array([[100, 50], [100, 0], [150, 50], [100, 125], [200, 150]])
    # excess relative to the limits: 0, 0, 0.5, 1.5, 1 + 2 = 3
    rewards = relative_rewards(np.array([400, 100, 100, 100, 100]), peaks, limits, 100, 2.0)
    penalties = [2 * (1 + np.log2(1 + excess)) for excess in (0.5, 1.5, 3)]
    assert rewards.tolist() == pytest.approx([-2.0, -1.0, *(-1 - penalty for penalty in penalties)])
    assert np.isfinite(relative_rewards(np.array([1]), np.array([[7]]), np.array([0]), 0, 1.0)).all()


def test_advantages_by_batch_or_history() -> None:
    """Rewards are compared with the mean of the batch or of earlier trials."""
    rewards = np.array([-1.0, -2.0, -3.0, -2.0])
    # the deviation is sqrt(0.5); 0.02 is added, so that differences of luck stay small
    assert advantages(rewards, CONFIG) == pytest.approx(np.array([1, 0, -1, 0]) / (np.sqrt(0.5) + 0.02))
    plain = PPOConfig(normalize=False)
    assert advantages(rewards, plain, -1.5).tolist() == [0.5, -0.5, -1.5, -0.5]
    assert advantages(rewards, plain).tolist() == [1.0, 0.0, -1.0, 0.0]
    assert advantages(np.full(4, -3.0), CONFIG).tolist() == [0.0] * 4


def test_gradient_is_the_mean_over_problems() -> None:
    """Before the first step all ratios are 1: the gradient is that of mean(advantage * log-probability)."""
    policy, config = tiny_policy(), PPOConfig(num_epochs=1, entropy_weight=0.0, max_gradient_norm=1e9)
    trials = [some_trials(policy, random_problem(seed), seed) for seed in (1, 2, 3)]
    objective = torch.tensor(0.0)
    for trial in trials:
        gain = torch.from_numpy(advantages(trial.rewards, config)).float()
        objective = objective - (gain[:, None] * policy.score(trial.instance, trial.rollouts)[0]).mean() / 3
    expected = torch.autograd.grad(objective, list(policy.parameters()))
    improve(policy, torch.optim.SGD(policy.parameters(), lr=0.0), trials, config)
    for parameter, gradient in zip(policy.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


def test_clipped_choices_no_longer_pull() -> None:
    """Where every ratio has left the clip range on the side of its advantage, the gradient is 0."""
    policy = tiny_policy()
    trial = some_trials(policy, random_problem())
    gain = torch.from_numpy(advantages(trial.rewards, CONFIG)).float()[:, None]
    moved = trial.rollouts.log_prob - 0.5 * gain.sign()  # as if drawn by a policy that made good choices rarer
    trial.rollouts.log_prob.copy_(torch.where(gain == 0, trial.rollouts.log_prob, moved))
    config = PPOConfig(num_epochs=1, entropy_weight=0.0)
    statistics = improve(policy, torch.optim.SGD(policy.parameters(), lr=0.1), [trial], config)
    assert statistics.gradient_norm == 0.0


def test_gradients_are_clipped() -> None:
    """A step is no longer than the clipped gradient."""
    policy, config = tiny_policy(), PPOConfig(num_epochs=1, max_gradient_norm=1e-3)
    before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
    trials = [some_trials(policy, random_problem(seed)) for seed in range(3)]
    statistics = improve(policy, torch.optim.SGD(policy.parameters(), lr=1.0), trials, config)
    assert statistics.gradient_norm > 1e-3
    moved = torch.nn.utils.parameters_to_vector(policy.parameters()) - before
    assert float(moved.detach().norm()) == pytest.approx(1e-3, rel=1e-3)


def test_optimum_is_found_and_kept() -> None:
    """Of all 64 placements the policy ends up choosing the fastest, with either reward."""
    problem = Problem.build(mixed_chain(), Cluster.parse("2xp100-pcie-16g"))
    everything = np.array(list(product(range(2), repeat=6)))
    optimum_ns = int(evaluate_many(problem, everything, num_threads=1)[0].min())
    policy = tiny_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    instance = policy.instance(problem, rng())
    for update in range(40):
        trials = draw_trials(policy, instance, 16, rng(update), CONFIG, optimum_ns, num_threads=1)
        improve(policy, optimizer, [trials], CONFIG)
    likeliest = draw_trials(policy, instance, 1, rng(), CONFIG, optimum_ns, temperature=0.0)
    assert likeliest.step_time_ns.tolist() == [optimum_ns]


def test_bad_gradients_change_nothing() -> None:
    """A gradient that is not finite changes no parameter."""
    policy = tiny_policy()
    trial = some_trials(policy, random_problem())
    trial.rollouts.log_prob[0, 0] = -torch.inf
    before = [parameter.clone() for parameter in policy.parameters()]
    with pytest.raises(InputError, match="gradient is not finite"):
        improve(policy, torch.optim.Adam(policy.parameters()), [trial], CONFIG)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize("wrong", [{"num_epochs": 0}, {"clip": 1.0}, {"entropy_weight": -1.0}])
def test_bad_settings_are_refused(wrong: dict[str, object]) -> None:
    """The error names the setting."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        PPOConfig(**wrong)  # type: ignore[arg-type]
