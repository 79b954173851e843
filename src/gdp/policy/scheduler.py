"""The interface of learned placement policies, for training and for use, and the `default` policy: a learned list
scheduler over the units of a problem.

    problem --instance()--> Instance --sample()--> Rollouts --simulate--> rewards
                                |                      |
                                +------ score() <------+        log-probabilities with gradients, for PPO

    roll-out (compiled): each unit in turn scores every device by weights of the device's features, and draws one

The roll-outs see devices only through features, the same functions for all of them (`features.py`): one set of
parameters serves any number and mix of devices, and all units. A style bends the weights of each
sample, so that samples differ by design; the style scorer (`style_scorer.py`) tells which styles suit a problem. The
roll-outs record the features, from which log-probabilities of their choices are computed again with gradients:

    logits [S, P, U, D] = weights [., K] . features [S, P, U, D, K]

A learned list scheduler over device features is also the idea of DOPPLER (arXiv 2505.23131), there for single ops of
one graph.

S samples, N ops, C choices of one placement, P passes, U units, D devices, K features of a unit on a device."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdp.arrays import F32, I64
from gdp.policy.construction import Constructor, Instance, SchedulerConfig, UnitInstance, check_weights
from gdp.policy.features import INITIAL_WEIGHTS
from gdp.policy.settings import PRACTICE
from gdp.policy.style_scorer import Style, StyleScorer, draw_refinement, draw_style, shapes
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import evaluate_many

NORMAL = ("mean", "deviation")  # of the features of problems


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Placements that a policy drew, with its record to score them again."""

    placements: I64  # [S, N] they obey groups and allowed devices
    log_prob: Tensor  # [S, C] of each choice when it was drawn, without gradient; 0 where there was nothing to choose
    record: Any  # the policy's own
    group: I64 | None = None  # [S] group index; advantages are computed within a group; None: all are one group


class Policy(nn.Module, ABC):
    """A distribution over placements with trainable parameters."""

    name: str  # in `checkpoint.POLICIES`
    config: Any  # its frozen configuration
    learning_rate: float = 1e-3  # of Adam

    @abstractmethod
    def instance(self, problem: Problem, rng: np.random.Generator) -> Instance:
        """Returns the features of `problem`; random parts of them, such as a grouping, come from `rng`. Raises
        InputError for a problem that the policy cannot place, such as one with too many devices."""

    @abstractmethod
    def sample(
        self, instance: Instance, num_samples: int, rng: np.random.Generator, *, temperature: float = 1.0
    ) -> Rollouts:
        """Draws `num_samples` placements (the likeliest choices at temperature 0), without gradient."""

    @abstractmethod
    def score(self, instance: Instance, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Returns (log-probability [S, C] of each choice at the temperature at which `sample` draws by default, mean
        entropy of a choice in nats), with gradients."""

    def check(self) -> None:
        """Raises InputError for finite parameters, read from a file, that cannot be used."""

    def num_parameters(self) -> int:
        """Counts the trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device


@contextmanager
def one_thread() -> Iterator[None]:
    """Gives PyTorch's operators one thread meanwhile; simulations take all. The operators are small: two threads gain
    little, and wait for each other on a busy machine (an update of the default policy took 0.2 s with one thread, 20 s
    with two, on two busy cores). Processes share the work better, and the trained parameters do not depend on the
    number of processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class StyleNetwork(nn.Module):
    """The parameters of the style scorer (`style_scorer.py`); as they begin it scores all styles alike."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name, shape in shapes(hidden).items():
            first = torch.full(shape, 1.0 if name == "deviation" else 0.0)
            self.register_parameter(name, nn.Parameter(first, requires_grad=name not in NORMAL))

    def in_numpy(self) -> StyleScorer | None:
        """Returns the parameters for searches; None before training."""
        tensors: dict[str, F32] = {name: values.detach().cpu().numpy() for name, values in self.named_parameters()}
        return StyleScorer(**tensors) if tensors["out"].any() else None


_UNTRAINED = Constructor.of(np.array(INITIAL_WEIGHTS, np.float32))


@dataclass(frozen=True, eq=False)
class Choices:
    """The recorded features and choices of roll-outs."""

    device: Tensor  # int64 [S, P, U]
    features: Tensor  # float32 [S, P, U, D, K]
    mask: Tensor  # bool [S, P, U, D]
    row: Tensor  # int64 [S, P] which weights were used
    scale: Tensor  # float32 [S, P, K] what the sample's style multiplies weights by
    temperature: Tensor  # float32 [S]


class SchedulerPolicy(Policy):
    """The policy; see the module's text."""

    name = "default"
    learning_rate = 0.05  # 48 weights of 1 to 8
    constructor: Constructor

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__()
        self.config = config
        self.base = nn.Parameter(torch.tensor(INITIAL_WEIGHTS, dtype=torch.float32))  # [2, K]
        self.styles = StyleNetwork(config.style_scorer) if config.style_scorer else None
        self.constructor = Constructor(
            lambda: np.ascontiguousarray(self.base.detach().cpu().numpy()),
            lambda: None if self.styles is None else self.styles.in_numpy(),
        )

    def check(self) -> None:
        """See `Policy.check`."""
        check_weights({name: parameter.detach().numpy() for name, parameter in self.named_parameters()})

    def instance(self, problem: Problem, rng: np.random.Generator) -> UnitInstance:
        """Draws units by `rng`: their number, the grouping, and whether backward ops go with their forward ops. A share
        `refining` of the instances has an incumbent: the best of a few placements of the untrained policy, refined up
        to three times, as in the searches that use a policy. So an instance does not depend on parameters, and can be
        kept while they change."""
        sizes = np.array(self.config.num_units)
        instance = self.constructor.grouped(problem, int(rng.choice(sizes)), rng)
        if rng.random() >= self.config.refining:
            return instance
        best: tuple[tuple[int, int], Placement] | None = None
        for _ in range(int(rng.integers(1, 5))):
            styles = [self._training_style(instance, rng) for _ in range(PRACTICE.num_tried)]
            placements = _UNTRAINED.place(instance, styles, rng)
            step_time_ns, peaks = evaluate_many(problem, placements, num_threads=1)
            excess = np.maximum(peaks - problem.memory_limit_bytes, 0).sum(axis=1)
            first = int(np.lexsort((step_time_ns, excess))[0])
            key = int(excess[first]), int(step_time_ns[first])
            if best is None or key < best[0]:
                best = key, placements[first]
            instance = self.constructor.grouped(problem, int(rng.choice(sizes)), rng, incumbent=best[1])
        return instance

    def sample(
        self, instance: Instance, num_samples: int, rng: np.random.Generator, *, temperature: float = 1.0
    ) -> Rollouts:
        """See `Policy.sample`. Samples have styles drawn for training: a few have one each; sixteen share one."""
        assert isinstance(instance, UnitInstance)
        alike = PRACTICE.many if num_samples >= PRACTICE.many else 1
        group = np.arange(num_samples) // alike
        of_group = [self._training_style(instance, rng) for _ in range(int(group[-1]) + 1)]
        temperature *= 1.0 if instance.refines else PRACTICE.temperature
        styles = [replace(of_group[number], temperature=temperature) for number in group]
        placements, options, record = self.constructor.roll_out(instance, styles, rng, num_recorded=num_samples)
        later = np.minimum(np.arange(record.devices.shape[1]), 1)  # of each pass
        temperatures = np.full(num_samples, temperature or 1.0, np.float32)
        style = options.row[:, later], options.scale[:, later], temperatures
        arrays = record.devices, record.features, record.masks, *style
        choices = Choices(*(torch.from_numpy(array).to(self.device) for array in arrays))
        log_prob = torch.from_numpy(record.log_prob).to(self.device)
        return Rollouts(placements, log_prob.flatten(1), choices, group if alike > 1 else None)

    def score(self, instance: Instance, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """See `Policy.score`."""
        assert isinstance(instance, UnitInstance)
        choices: Choices = rollouts.record
        log_prob = self._log_probabilities(choices)
        entropy = -(log_prob.exp() * log_prob.masked_fill(~choices.mask, 0.0)).sum(dim=3).mean()
        return log_prob.gather(3, choices.device[..., None])[..., 0].flatten(1), entropy

    def _log_probabilities(self, choices: Choices) -> Tensor:
        """Returns [S, P, U, D], of every device for every unit; -inf where it may not go."""
        weights = self.base[choices.row] * choices.scale
        logits = torch.einsum("spk,spudk->spud", weights, choices.features)
        logits = logits / choices.temperature[:, None, None, None]
        return logits.masked_fill(~choices.mask, -torch.inf).log_softmax(dim=3)

    def _training_style(self, instance: UnitInstance, rng: np.random.Generator) -> Style:
        style = draw_refinement(rng) if instance.refines else draw_style(rng)
        return replace(style, passes=min(style.passes, PRACTICE.passes))
