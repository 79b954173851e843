"""Imitation: the default policy learns to choose as good placements have it, before reinforcement takes over.

A placement that a search found is an example for many groupings: units are drawn within its devices' shares, take their
devices from it one after the other, and the policy is asked at each turn for what is right, given all that came
before (teacher forcing). Devices are seen through features of what they hold, so nothing depends on their numbers;
devices that are exchangeable are renamed in the order of their first use, as the policy would use them.

    construct   no unit is placed at first
    refine      the example with some units on wrong devices is the incumbent; those and some others choose again

A search's solutions as a teacher is expert iteration (T. Anthony et al., arXiv 1705.08439).
U units, D devices, K features of a unit on a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gdp.graph import I64
from gdp.policy.rollout import NUM_FEATURES, roll_out
from gdp.policy.scheduler import Choices, SchedulerPolicy, UnitInstance, log_probabilities
from gdp.policy.units import UnitGraph, incumbent_features
from gdp.problem import Placement, Problem
from gdp.simulate import simulate

_ANY_MEMORY = np.array([1e9])  # the example shows what fits; the estimate need not agree


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationConfig:
    """What lessons are like."""

    refining: float = 0.5  # share of them
    wrong: tuple[float, float] = (0.03, 0.3)  # share of the units of an incumbent that are on wrong devices
    others: tuple[float, float] = (0.02, 0.3)  # share of the right ones that choose again as well


@dataclass(frozen=True, eq=False)
class Example:
    """A problem and a placement worth imitating."""

    problem: Problem
    placement: Placement  # [N]


@dataclass(frozen=True, eq=False)
class Lesson:
    """Units of an example, and what they should choose."""

    instance: UnitInstance
    choices: Choices  # of one sample; units that have nothing to choose have one device in the mask


def draw_lesson(policy: SchedulerPolicy, example: Example, rng: np.random.Generator, config: ImitationConfig) -> Lesson:
    """A lesson from `example` in a grouping drawn by `rng`."""
    problem, placement = example.problem, example.placement
    source = policy.source(problem)
    num_units = int(rng.choice(np.array(policy.config.num_units)))
    units = source.draw(num_units, rng, within=placement)
    right = np.empty(units.num_units, np.int64)
    right[units.unit_of_op] = placement
    if rng.random() < config.refining:
        wrong = _spoiled(units, right, rng, config)
        units = replace(units, incumbent=wrong)
        seen = incumbent_features(units, simulate(problem, wrong[units.unit_of_op]))
        units = replace(units, features=np.concatenate((units.features[:, : -seen.shape[1]], seen), axis=1))
        chooses = (wrong != right) | (rng.random(units.num_units) < rng.uniform(*config.others))
        chooses[rng.integers(units.num_units)] = True  # at least one
        fixed = np.where(chooses, -1, right)[None]
    else:
        right = _first_use_first(right, source.equal_before)[right]
        fixed = np.full((1, units.num_units), -1)
    instance = policy.view(problem, units)
    shape = (1, units.num_units, problem.num_devices)
    chosen, features, mask = (
        np.zeros(shape[:2], np.int64),
        np.zeros((*shape, NUM_FEATURES), np.float32),
        np.zeros(shape, np.bool_),
    )
    roll_out(
        instance.arrays, np.zeros((units.num_units, NUM_FEATURES), np.float32), 0.0, np.zeros(shape[:2]), _ANY_MEMORY,
        np.full(shape[0], instance.problem.num_devices), fixed, np.where(fixed < 0, right[None], -1), units.incumbent, chosen, features, mask, np.empty(shape[0]),
    )  # fmt: skip
    tensors = (torch.from_numpy(array).to(policy.device) for array in (chosen, features, mask))
    return Lesson(instance, Choices(*tensors))


def imitate(
    policy: SchedulerPolicy,
    optimizer: torch.optim.Optimizer,
    lessons: Sequence[Lesson],
    *,
    max_gradient_norm: float = 1.0,
) -> tuple[float, float]:
    """A step towards the choices of `lessons`, which all count alike; (mean loss, share of right choices) before."""
    optimizer.zero_grad()
    losses, hits = [], []
    for lesson in lessons:
        loss, hit = lesson_loss(policy, lesson)
        (loss / len(lessons)).backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        hits.append(hit)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), max_gradient_norm)
    optimizer.step()
    return float(np.mean(losses)), float(np.mean(hits))


def lesson_loss(policy: SchedulerPolicy, lesson: Lesson) -> tuple[Tensor, float]:
    """(mean negative log-probability of what is right, where there is a choice, and how often it is the likeliest)."""
    choices = lesson.choices
    log_prob = log_probabilities(policy.weights(lesson.instance), choices)
    chooses = choices.mask.sum(dim=2) > 1
    count = chooses.sum().clamp(min=1)
    right = log_prob.gather(2, choices.device[..., None])[..., 0]
    likeliest = log_prob.detach().argmax(dim=2) == choices.device
    return -right[chooses].sum() / count, float((likeliest & chooses).sum() / count)


def _spoiled(units: UnitGraph, right: I64, rng: np.random.Generator, config: ImitationConfig) -> I64:
    """[U] `right` with some units on other devices: alone or a stretch of them; at random, or where a neighbour is."""
    num_units, num_devices = units.time_ns.shape
    count = max(round(rng.uniform(*config.wrong) * num_units), 1)
    if rng.random() < 0.5:
        moved = rng.choice(num_units, count, replace=False)
    else:
        moved = (rng.integers(num_units) + np.arange(count)) % num_units
    spoiled = right.copy()
    kind = rng.integers(3)
    if kind == 0:
        spoiled[moved] = rng.integers(0, num_devices, count)
    elif kind == 1:
        spoiled[moved] = rng.integers(num_devices)
    else:
        for unit in moved.tolist():
            neighbours = np.concatenate((units.targets[units.sources == unit], units.sources[units.targets == unit]))
            if len(neighbours):
                spoiled[unit] = right[rng.choice(neighbours)]
    may_go = units.time_ns[np.arange(num_units), spoiled] >= 0
    return np.where(may_go, spoiled, right)


def _first_use_first(right: I64, equal_before: I64) -> I64:
    """[D] new numbers of devices: exchangeable ones in the order in which units `right` [U] first use them."""
    num_devices = len(equal_before)
    first_like = np.arange(num_devices)
    for device in range(num_devices):
        if equal_before[device] >= 0:
            first_like[device] = first_like[equal_before[device]]
    free = {like: np.flatnonzero(first_like == like).tolist() for like in first_like.tolist()}
    numbers = np.full(num_devices, -1)
    for device in dict.fromkeys([*right.tolist(), *range(num_devices)]):
        numbers[device] = free[int(first_like[device])].pop(0)
    return numbers
