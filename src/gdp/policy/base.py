"""The interface of learned placement policies, for training and for use.

    problem --instance()--> Instance --sample()--> Rollouts --simulate--> rewards
                                |                      |
                                +------ score() <------+        log-probabilities with gradients, for PPO

S samples, N ops of the problem, C choices that make up one placement, D devices."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdp.arrays import I64
from gdp.policy.construction import Instance
from gdp.simulator.problem import Problem


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
