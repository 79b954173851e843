"""GDP-batch: one policy trains on several workloads at once, and is judged by the placements that it draws.

Each update draws placements of every workload. As in the GDP paper (arXiv 1910.01578) a placement's advantage is its
reward less the mean reward of earlier updates on the same workload, and the objective is the mean over workloads.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.gdp_policy.training import PPO, paper_trials
from gdp.budget import Budget, Clock
from gdp.policy.scheduler import Policy, one_thread
from gdp.policy.training.ppo import improve
from gdp.search.ops.zero_shot import Evaluator
from gdp.search.question import Question
from gdp.units.units import Units


def train_on_batch(
    policy: Policy, questions: Mapping[str, Question], *, num_updates: int, num_samples: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Trains `policy` in place; returns the best step time of each workload, and its mean reward in each update.

    An update draws `num_samples` placements of each of `questions`. A step time is None where no placement fits.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0xBA7C]))
    clock = Clock(Budget(simulations=num_updates * num_samples * len(questions)))
    evaluators = [Evaluator(question, clock) for question in questions.values()]
    instances = [policy.instance(evaluator.problem, rng) for evaluator in evaluators]
    optimizer = torch.optim.Adam(policy.parameters(), lr=policy.learning_rate)
    rewards: list[list[float]] = [[] for _ in questions]  # mean of each update
    with one_thread():
        for _ in range(num_updates):
            trials = [paper_trials(policy, instance, num_samples, rng) for instance in instances]
            for evaluator, trial in zip(evaluators, trials, strict=True):
                evaluator.look(trial.rollouts.placements, trial.step_time_ns, trial.peak_memory_bytes)
            baselines = [float(np.mean(earlier)) if earlier else None for earlier in rewards]
            improve(policy, optimizer, trials, PPO, baselines=baselines)
            for earlier, trial in zip(rewards, trials, strict=True):
                earlier.append(float(trial.rewards.mean()))
    return {
        name: {"best_ns": _step_time_ns(evaluator), "rewards": earlier}
        for name, evaluator, earlier in zip(questions, evaluators, rewards, strict=True)
    }


def judge(policy: Policy, question: Question, *, num_samples: int) -> dict[str, int | None]:
    """Returns the step times of the likeliest placement, and of the best of it and `num_samples` - 1 that are drawn.

    They are None where no placement fits.
    """
    rng = np.random.default_rng(np.random.SeedSequence([question.seed, 0x15D6]))
    evaluator = Evaluator(question, Clock(Budget(simulations=num_samples)))
    instance = policy.instance(evaluator.problem, rng)
    with one_thread():
        evaluator.try_out(policy.sample(instance, 1, rng, temperature=0.0).placements)
        likeliest_ns = _step_time_ns(evaluator)
        evaluator.try_out(policy.sample(instance, num_samples - 1, rng).placements)
    return {"likeliest_ns": likeliest_ns, "drawn_ns": _step_time_ns(evaluator)}


def best_of_random(question: Question, num_samples: int) -> int | None:
    """Returns the best step time of placements whose choices are drawn uniformly; None where none fits."""
    rng = np.random.default_rng(np.random.SeedSequence([question.seed, 0x4A2D]))
    evaluator = Evaluator(question, Clock(Budget(simulations=num_samples)))
    units = Units.of(evaluator.problem)
    for _ in range(num_samples):
        devices = rng.integers(evaluator.problem.num_devices, size=units.num_units)
        evaluator.try_out(units.place_allowed(devices)[None])
    return _step_time_ns(evaluator)


def _step_time_ns(evaluator: Evaluator) -> int | None:
    best = evaluator.best
    return best.step_time_ns if best is not None and best.fits else None
