"""Training a policy on the graph at hand: PPO on refinements of the best placement, and on what it constructs.

The placements that the updates are made of are simulated anyway; the best one that fits is the answer. It begins with
what the policy answers at once (`zero_shot.py`), and some rounds go on varying styles, which is search, not training.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from gdp.budget import Clock
from gdp.placers.zero_shot import Answer, Best, OnProgress, ZeroShotConfig, construct_at_once, sample_at_once
from gdp.policy.base import Policy
from gdp.policy.instance import Instance
from gdp.policy.ppo import PPOConfig, Trials, draw_trials, improve
from gdp.problem import Placement, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneConfig:
    """Training on one graph."""

    learning_rate: float | None = None  # None: the policy's
    num_instances: int = 16  # of an update: groupings
    num_samples: int = 4  # placements of each
    constructing: float = 0.15  # share of the instances that construct, the others refine the best placement
    varying: float = 0.25  # share of the rounds that vary styles
    max_updates: int | None = None
    ppo: PPOConfig = field(default_factory=lambda: PPOConfig(num_epochs=2, entropy_weight=0.003))
    zero_shot: ZeroShotConfig = field(default_factory=ZeroShotConfig)


def fine_tune(
    problem: Problem,
    policy: Policy,
    clock: Clock,
    *,
    seed: int = 0,
    config: FineTuneConfig | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Answer:
    """The best placement seen while `policy` (changed in place) trains on `problem` until the clock is up.

    A budget in simulations makes it reproducible.
    """
    config = config or FineTuneConfig()
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0xF17E]))
    best = Best(problem, clock, on_progress, num_threads)
    if policy.constructor is None:
        styles = None
        sample_at_once(best, policy, rng, config.zero_shot)
    else:
        styles = construct_at_once(best, policy.constructor, rng, config.zero_shot)
    assert best.incumbent is not None
    reference_ns = best.incumbent.step_time_ns
    learning_rate = policy.learning_rate if config.learning_rate is None else config.learning_rate
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    earlier: list[float] = []  # mean reward of each update
    num_instances, num_samples = config.num_instances, config.num_samples
    if styles is None:  # groupings differ, other policies see a problem in one way only
        num_instances, num_samples = 1, num_instances * num_samples
    while best.left and len(earlier) != config.max_updates:
        if styles is not None and rng.random() < config.varying:
            styles.vary(best, config.zero_shot.per_round)
            continue
        trials: list[Trials] = []
        while len(trials) < num_instances and (best.left or not trials):
            constructs = rng.random() < config.constructing
            instance = _instance(policy, problem, None if constructs else best.placement, config.zero_shot, rng)
            trials.append(
                draw_trials(policy, instance, num_samples, rng, config.ppo, reference_ns, num_threads=num_threads)
            )
            best.look(trials[-1].rollouts.placements, trials[-1].step_time_ns, trials[-1].peak_memory_bytes)
        baseline = float(np.mean(earlier)) if config.ppo.baseline == "history" and earlier else None
        improve(policy, optimizer, trials, config.ppo, baselines=[baseline] * len(trials))
        earlier.append(float(np.mean([trial.rewards.mean() for trial in trials])))
    return best.answer(len(earlier))


def _instance(
    policy: Policy, problem: Problem, incumbent: Placement | None, config: ZeroShotConfig, rng: np.random.Generator
) -> Instance:
    """What to train on next; policies that do not refine always construct."""
    if policy.constructor is None:
        return policy.instance(problem, rng)
    sizes = policy.config.num_units if incumbent is None else config.refinement_units
    return policy.constructor.grouped(problem, int(rng.choice(np.array(sizes))), rng, incumbent=incumbent)
