"""Fine-tuning: a policy trains on the graph at hand, by PPO on refinements of the best placement and constructions.

    zero-shot answer --> update --> rounds that refine or vary --> update --> ...

All placements are simulated; the best one that fits is the answer. Fine-tuning begins with a zero-shot answer
(`zero_shot.py`), which has a part of the budget. Rounds between updates ask the policy as it is by then."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from gdp.budget import Clock
from gdp.policy.checkpoint import load_checkpoint
from gdp.policy.pretrained import shipped
from gdp.policy.scheduler import SchedulerPolicy, one_thread
from gdp.policy.training.ppo import PPOConfig, Trials, draw_trials, improve
from gdp.search.ops.zero_shot import Evaluator, Refiner, ZeroShotConfig, draw_at_once
from gdp.search.question import Question, Solution


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
    zero_shot: ZeroShotConfig | None = None  # None: by the size of the problem
    zero_shot_share: float = 1 / 3  # of the budget at most


@one_thread()
def fine_tune(
    question: Question, clock: Clock, *, policy: SchedulerPolicy | None = None, config: FineTuneConfig | None = None
) -> Solution:
    """Returns the best placement seen while `policy` (changed in place) trains on the question until the clock is up.
    By default it begins with the question's policy. A budget in simulations makes the answer reproducible. Raises
    InputError for a bad checkpoint."""
    if policy is None:
        policy = load_checkpoint(question.checkpoint or shipped())
    config = config or FineTuneConfig()
    problem, num_threads = question.reduction.problem, question.num_threads
    first = clock.part(config.zero_shot_share)
    at_once = config.zero_shot or ZeroShotConfig.sized(problem, first, question.settings.policy)
    rng = np.random.default_rng(np.random.SeedSequence([question.seed, 0xF17E]))
    evaluator = Evaluator(question, first)
    styles = draw_at_once(evaluator, policy.constructor, rng, at_once)
    evaluator.clock = clock
    assert evaluator.best is not None
    reference_ns = evaluator.best.step_time_ns
    learning_rate = policy.learning_rate if config.learning_rate is None else config.learning_rate
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    sizes = question.settings.policy.refinement_units
    refiner = Refiner(problem, policy.constructor, sizes)
    num_updates = 0
    while not evaluator.is_over and num_updates != config.max_updates:
        trials: list[Trials] = []
        while len(trials) < config.num_instances and (not clock.is_up or not trials):
            constructs = rng.random() < config.constructing
            some = policy.config.num_units if constructs else sizes
            incumbent = None if constructs else evaluator.placement
            num_units = int(rng.choice(np.array(some)))
            instance = policy.constructor.grouped(problem, num_units, rng, incumbent=incumbent)
            draw = partial(draw_trials, policy, instance, config.num_samples, rng, config.ppo, reference_ns)
            trials.append(draw(num_threads=num_threads))
            evaluator.look(trials[-1].rollouts.placements, trials[-1].step_time_ns, trials[-1].peak_memory_bytes)
        improve(policy, optimizer, trials, config.ppo)
        num_updates += 1
        for _ in range(config.num_rounds):
            if clock.is_up:
                break
            if rng.random() < config.varying:
                styles.vary(evaluator, clock.at_most(at_once.num_styles))
            else:
                count = clock.at_most(at_once.num_refined)
                evaluator.try_to_improve(refiner.propose(evaluator.placement, count, rng))
    return evaluator.solution(num_updates)
