"""Fine-tuning: a policy trains on the graph at hand, by PPO on refinements of the best placement and constructions.

    zero-shot answer --> update --> rounds that refine or vary --> update --> ...

All placements are simulated; the best one that fits is the answer. Fine-tuning begins with a zero-shot answer
(`zero_shot.py`), which has a part of the budget. The rounds between updates ask the policy as it is by then; they are
search, not training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gdp.budget import Clock
from gdp.policy.base import Policy, one_thread
from gdp.policy.checkpoint import load_checkpoint
from gdp.policy.construction import Instance
from gdp.policy.pretrained import shipped
from gdp.policy.training.ppo import PPOConfig, Trials, draw_trials, improve
from gdp.search.ops.zero_shot import Evaluator, Refiner, ZeroShotConfig, draw_at_once
from gdp.search.question import Question
from gdp.search.solution import Solution
from gdp.simulator.problem import Placement, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneConfig:
    """Training on one graph."""

    learning_rate: float | None = None  # None: the policy's
    num_instances: int = 16  # of an update: groupings
    num_samples: int = 4  # placements of each
    constructing: float = 0.15  # share of the instances that construct, the others refine the best placement
    varying: float = 0.1  # share of the rounds between updates that vary styles, the others refine
    num_rounds: int = 24  # after each update
    max_updates: int | None = None
    ppo: PPOConfig = field(default_factory=lambda: PPOConfig(num_epochs=2, entropy_weight=0.003))
    compares_with_history: bool = False  # trials with the mean reward of earlier updates, not with each other
    zero_shot: ZeroShotConfig | None = None  # None: by the size of the problem
    zero_shot_share: float = 1 / 3  # of the budget at most


@one_thread()
def fine_tune(
    question: Question, clock: Clock, *, policy: Policy | None = None, config: FineTuneConfig | None = None
) -> Solution:
    """Returns the best placement seen while `policy` (changed in place) trains on the question until the clock is up.

    By default it begins with the question's policy. A budget in simulations makes the answer reproducible.
    Raises InputError for a bad checkpoint.
    """
    if policy is None:
        policy = load_checkpoint(question.checkpoint or shipped())
    config = config or FineTuneConfig()
    problem, num_threads = question.reduction.problem, question.num_threads
    first = clock.part(config.zero_shot_share)
    at_once = config.zero_shot or ZeroShotConfig.sized(problem, first, question.settings.policy)
    rng = np.random.default_rng(np.random.SeedSequence([question.seed, 0xF17E]))
    evaluator = Evaluator(question, first)
    styles = draw_at_once(evaluator, policy, rng, at_once)
    evaluator.clock = clock
    assert evaluator.best is not None
    reference_ns = evaluator.best.step_time_ns
    learning_rate = policy.learning_rate if config.learning_rate is None else config.learning_rate
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    sizes = question.settings.policy.refinement_units
    refiner = None if policy.constructor is None else Refiner(problem, policy.constructor, sizes)
    earlier: list[float] = []  # mean reward of each update
    num_instances, num_samples = config.num_instances, config.num_samples
    if refiner is None:  # groupings differ, other policies see a problem in one way only
        num_instances, num_samples = 1, num_instances * num_samples
    while not evaluator.is_over and len(earlier) != config.max_updates:
        trials: list[Trials] = []
        while len(trials) < num_instances and (not clock.is_up or not trials):
            constructs = rng.random() < config.constructing
            instance = _instance(policy, problem, None if constructs else evaluator.placement, sizes, rng)
            trials.append(
                draw_trials(policy, instance, num_samples, rng, config.ppo, reference_ns, num_threads=num_threads)
            )
            evaluator.look(trials[-1].rollouts.placements, trials[-1].step_time_ns, trials[-1].peak_memory_bytes)
        baseline = float(np.mean(earlier)) if config.compares_with_history and earlier else None
        improve(policy, optimizer, trials, config.ppo, baselines=[baseline] * len(trials))
        earlier.append(float(np.mean([trial.rewards.mean() for trial in trials])))
        if styles is None or refiner is None:
            continue
        for _ in range(config.num_rounds):
            if clock.is_up:
                break
            if rng.random() < config.varying:
                styles.vary(evaluator, clock.at_most(at_once.num_styles))
            else:
                count = clock.at_most(at_once.num_refined)
                evaluator.try_to_improve(refiner.propose(evaluator.placement, count, rng))
    return evaluator.solution(len(earlier))


def _instance(
    policy: Policy, problem: Problem, incumbent: Placement | None, sizes: Sequence[int], rng: np.random.Generator
) -> Instance:
    """Returns the instance to train on next, of one of `sizes` to refine; policies that do not always construct."""
    if policy.constructor is None:
        return policy.instance(problem, rng)
    sizes = policy.config.num_units if incumbent is None else sizes
    return policy.constructor.grouped(problem, int(rng.choice(np.array(sizes))), rng, incumbent=incumbent)
