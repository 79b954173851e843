"""PPO for placement policies: draw placements, reward them, compare them, make the better ones likelier.

    policy --draw_trials--> placements --simulate--> step times, peaks --> rewards --> advantages
       ^                                                                                   |
       +------------ improve: clipped objective, several epochs over the same trials <-----+

J. Schulman et al., "Proximal policy optimization algorithms", arXiv 1707.06347 (2017), equation 7, for each choice. As
in GDP (arXiv 1910.01578) there is no value function: a trial's advantage is its reward less the mean reward of the same
problem, and the objective is the mean over problems, so that every graph counts alike, large or small.
S samples, C choices of a trial, D devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, nan

import numpy as np
import torch
from torch import Tensor

from gdp.arrays import F64, I64, Bool
from gdp.errors import InputError
from gdp.policy.construction import Instance
from gdp.policy.scheduler import Policy, Rollouts
from gdp.simulator.simulate import evaluate_many

_LEAST_DEVIATION = 0.02  # rewards are near -1; a spread of a few percent is mostly chance, not to be scaled up to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Rewards of trials, and the update from them."""

    infeasible_penalty: float = 3.0  # where memory only just falls short: as for a step 9 times as long
    normalize: bool = True  # divide advantages by the deviation of the problem's rewards
    clip: float = 0.2  # Schulman et al., table 1
    num_epochs: int = 4
    entropy_weight: float = 0.01
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise InputError(f"num_epochs is {self.num_epochs}; at least 1 is expected")
        if not 0 < self.clip < 1:
            raise InputError(f"clip is {self.clip}; more than 0 and less than 1 is expected")
        for name in ("infeasible_penalty", "entropy_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}; at least 0 is expected")
        if not 0 < self.max_gradient_norm < float("inf"):
            raise InputError(f"max_gradient_norm is {self.max_gradient_norm}; more than 0 is expected")


CONSTRUCTING = PPOConfig(num_epochs=1)
"""For policies that construct: a further step on the same trials takes as long as new trials, and is worth no more."""


@dataclass(frozen=True, eq=False)
class Trials:
    """Placements of one problem that a policy drew, with their outcomes."""

    instance: Instance
    rollouts: Rollouts
    step_time_ns: I64  # [S]
    peak_memory_bytes: I64  # [S, D]
    fits: Bool  # [S] in memory
    rewards: F64  # [S]
    reference_ns: int  # step times are seen relative to it

    @property
    def best(self) -> int | None:
        """The number of the fastest trial that fits, if any."""
        fitting = np.flatnonzero(self.fits)
        return int(fitting[np.argmin(self.step_time_ns[fitting])]) if len(fitting) else None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of an update, each a mean over its problems; figures on the policy are of the last epoch."""

    reward: float
    step_time_ratio: float  # mean step time of a problem's trials over its reference; geometric mean over problems
    best_step_time_ratio: float  # the same of the fastest trial that fits, over problems with one; nan if none has
    feasible: float  # share of trials that fit
    entropy: float  # of a choice, in nats
    gradient_norm: float  # before clipping


def draw_trials(
    policy: Policy,
    instance: Instance,
    num_samples: int,
    rng: np.random.Generator,
    config: PPOConfig,
    reference_ns: int,
    *,
    temperature: float = 1.0,
    num_threads: int | None = None,
) -> Trials:
    """Draws `num_samples` placements, simulates them on `num_threads` (default: all processors), rewards them."""
    problem = instance.problem
    rollouts = policy.sample(instance, num_samples, rng, temperature=temperature)
    step_time_ns, peaks = evaluate_many(problem, rollouts.placements, num_threads=num_threads)
    fits: Bool = np.all(peaks <= problem.memory_limit_bytes, axis=1)
    rewards = relative_rewards(step_time_ns, peaks, problem.memory_limit_bytes, reference_ns, config.infeasible_penalty)
    return Trials(instance, rollouts, step_time_ns, peaks, fits, rewards, reference_ns)


def relative_rewards(
    step_time_ns: I64, peak_memory_bytes: I64, memory_limit_bytes: I64, reference_ns: int, infeasible_penalty: float
) -> F64:
    """Returns minus the square root of the step time relative to a reference, [S]: steps of all lengths weigh alike.
    Beyond memory the reward is less by the penalty, and once more for each doubling of 1 + the excess. The excess is
    that of the peaks [S, D] over the limits [D], relative to the limits, summed over devices: less is always better."""
    excess = (np.maximum(peak_memory_bytes - memory_limit_bytes, 0) / np.maximum(memory_limit_bytes, 1)).sum(axis=1)
    penalty = np.where(excess > 0, infeasible_penalty * (1 + np.log2(1 + excess)), 0.0)
    return np.asarray(-np.sqrt(step_time_ns / max(reference_ns, 1)) - penalty, np.float64)


def advantages(rewards: F64, config: PPOConfig, baseline: float | None = None, group: I64 | None = None) -> F64:
    """Returns rewards [S] less `baseline` (None: their group's mean), by their deviation if `config.normalize`."""
    if baseline is None and group is not None:
        mean = np.bincount(group, rewards)[group] / np.bincount(group)[group]
    else:
        mean = np.full(len(rewards), rewards.mean() if baseline is None else baseline)
    deviation = rewards.std() if group is None else float(np.sqrt(np.mean((rewards - mean) ** 2)))
    return (rewards - mean) / (deviation + _LEAST_DEVIATION) if config.normalize else rewards - mean


def improve(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    trials: Sequence[Trials],
    config: PPOConfig,
    *,
    baselines: Sequence[float | None] | None = None,
) -> Statistics:
    """Makes one PPO update: `num_epochs` steps of `optimizer`, each over all `trials`, which all count alike.
    `baselines` replaces the mean reward of each of `trials`. Raises InputError unless the gradient is finite."""
    device = policy.device
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    sizes = [parameter.numel() for parameter in parameters]
    pairs = zip(trials, baselines or [None] * len(trials), strict=True)
    all_gains = (advantages(trial.rewards, config, baseline, trial.rollouts.group) for trial, baseline in pairs)
    gains = [torch.from_numpy(each).to(device, torch.float32) for each in all_gains]
    for _ in range(config.num_epochs):
        figures = torch.zeros(7, dtype=torch.float64)
        gradient = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        for trial, gain in zip(trials, gains, strict=True):
            loss, entropy = _loss(policy, trial, gain, config)
            figures += torch.tensor([*_outcome(trial), float(entropy)], dtype=torch.float64)
            if loss.requires_grad:  # not where a problem leaves nothing to choose
                parts = torch.autograd.grad(loss / len(trials), parameters, allow_unused=True, materialize_grads=True)
                gradient += torch.cat([part.reshape(-1) for part in parts])
        norm = float(gradient.norm())
        if not np.isfinite(norm):
            raise InputError("the gradient is not finite; train with a lower learning rate")
        gradient *= min(1.0, config.max_gradient_norm / max(norm, 1e-12))
        for parameter, part in zip(parameters, torch.split(gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        optimizer.step()
    return _statistics(figures.tolist(), norm)


def _loss(policy: Policy, trials: Trials, gains: Tensor, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """Returns (the loss, the entropy of a choice)."""
    log_prob, entropy = policy.score(trials.instance, trials.rollouts)
    ratio = (log_prob - trials.rollouts.log_prob).exp()
    gain = gains[:, None]
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - config.clip, 1 + config.clip) * gain).mean()
    return -objective - config.entropy_weight * entropy, entropy.detach()


def _outcome(trials: Trials) -> list[float]:
    """Returns the first six figures of `_statistics`, of one problem."""
    reference_ns, best = max(trials.reference_ns, 1), trials.best
    log_best = 0.0 if best is None else float(np.log(max(trials.step_time_ns[best], 1) / reference_ns))
    log_mean = float(np.log(max(trials.step_time_ns.mean(), 1.0) / reference_ns))
    return [1.0, float(trials.rewards.mean()), log_mean, float(trials.fits.mean()), float(best is not None), log_best]


def _statistics(sums: Sequence[float], gradient_norm: float) -> Statistics:
    """Returns the means of figures that are summed over problems."""
    count, reward, log_mean, feasible, solved, log_best, entropy = sums
    problems = max(count, 1.0)
    ratios = reward / problems, exp(log_mean / problems), exp(log_best / solved) if solved else nan
    return Statistics(*ratios, feasible / problems, entropy / problems, gradient_norm)
