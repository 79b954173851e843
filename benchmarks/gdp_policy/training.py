"""Training of GDP's policy on one problem, as published: placements are drawn, rewarded and compared with earlier ones.

The reward is minus the square root of the step time in seconds, and -10 where memory is exceeded (arXiv 1910.01578).
An advantage is the reward less the mean reward of earlier updates, normalised: else the entropy bonus outweighs
differences of milliseconds (it stayed at the uniform policy on inception-v3-b32). S samples.
"""

from dataclasses import replace

import numpy as np
import torch

from gdp.arrays import F64, I64, Bool
from gdp.budget import Clock
from gdp.policy.construction import Instance
from gdp.policy.scheduler import Policy, one_thread
from gdp.policy.training.ppo import PPOConfig, Trials, draw_trials, improve
from gdp.search.ops.zero_shot import Evaluator
from gdp.search.question import Question, Solution

PPO = PPOConfig()
NUM_SAMPLES = 64  # placements of an update
_INFEASIBLE_REWARD = -10.0
_FIRST_SHARE = 1 / 3  # of the budget at most, for placements before the first update


def paper_rewards(step_time_ns: I64, fits: Bool) -> F64:
    """Returns GDP's rewards [S]."""
    return np.where(fits, -np.sqrt(step_time_ns * 1e-9), _INFEASIBLE_REWARD)


def paper_trials(policy: Policy, instance: Instance, num_samples: int, rng: np.random.Generator) -> Trials:
    """Draws placements and rewards them as the paper does."""
    trials = draw_trials(policy, instance, num_samples, rng, PPO, 1, num_threads=1)
    return replace(trials, rewards=paper_rewards(trials.step_time_ns, trials.fits))


@one_thread()
def train_published(
    question: Question,
    clock: Clock,
    policy: Policy,
    *,
    num_drawn: int = 512,
    at_a_time: int = 8,
    max_updates: int | None = None,
    has_own_reward: bool = True,
) -> Solution:
    """Returns the best placement seen while `policy` (changed in place) trains on the question until the clock is up.

    `num_drawn` placements come before the first update. Without its own reward the policy has gdp's.
    """
    first = clock.part(_FIRST_SHARE)
    rng = np.random.default_rng(np.random.SeedSequence([question.seed, 0xF17E]))
    evaluator = Evaluator(question, first)
    instance = policy.instance(evaluator.problem, rng)
    evaluator.try_out(policy.sample(instance, 1, rng, temperature=0.0).placements)
    while not first.is_up and (left := first.at_most(num_drawn - first.simulations)) > 0:
        evaluator.try_out(policy.sample(instance, min(at_a_time, left), rng).placements)
    evaluator.clock = clock
    assert evaluator.best is not None
    reference_ns = evaluator.best.step_time_ns
    optimizer = torch.optim.Adam(policy.parameters(), lr=policy.learning_rate)
    earlier: list[float] = []  # mean reward of each update
    while not evaluator.is_over and len(earlier) != max_updates:
        if has_own_reward:
            trials, baseline = paper_trials(policy, instance, NUM_SAMPLES, rng), np.mean(earlier) if earlier else None
        else:
            trials = draw_trials(policy, instance, NUM_SAMPLES, rng, PPO, reference_ns, num_threads=1)
            baseline = None
        evaluator.look(trials.rollouts.placements, trials.step_time_ns, trials.peak_memory_bytes)
        improve(policy, optimizer, [trials], PPO, baselines=[None if baseline is None else float(baseline)])
        earlier.append(float(trials.rewards.mean()))
    return evaluator.solution(len(earlier))
