"""What a learned placement policy is, to whoever trains or uses it.

    problem --instance()--> Instance --sample()--> Rollouts --simulate--> rewards
                                |                      |
                                +------ score() <------+        log-probabilities with gradients, for PPO

S samples, N ops of the problem, C choices that make up one placement, D devices.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdp.graph import I64
from gdp.policy.construction import Constructor
from gdp.policy.instance import Instance
from gdp.problem import Problem


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Placements that a policy drew, and what it needs to score them again."""

    placements: I64  # [S, N] they obey groups and allowed devices
    log_prob: Tensor  # [S, C] of each choice when it was drawn, without gradient; 0 where there was nothing to choose
    record: Any  # the policy's own
    group: I64 | None = None  # [S] samples of one number are alike but for luck, and compared; None: all are


class Policy(nn.Module):
    """A distribution over placements with trainable parameters."""

    name: str  # under which `checkpoint.POLICIES` knows it
    config: Any  # its frozen configuration
    learning_rate: float = 1e-3  # of Adam, that suits its parameters
    constructor: Constructor | None = None  # draws placements unit by unit, in styles; None for policies that do not

    def instance(self, problem: Problem, rng: np.random.Generator) -> Instance:
        """The features of `problem`. What is random in them (a grouping, say) comes from `rng`.

        Raises InputError for a problem that the policy cannot place, such as one with too many devices.
        """
        raise NotImplementedError

    def sample(
        self, instance: Instance, num_samples: int, rng: np.random.Generator, *, temperature: float = 1.0
    ) -> Rollouts:
        """`num_samples` placements drawn from the policy (the likeliest choices at temperature 0), without gradient."""
        raise NotImplementedError

    def score(self, instance: Instance, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """(log-probability [S, C] of each choice at temperature 1, a choice's mean entropy in nats), with gradients."""
        raise NotImplementedError

    def check(self) -> None:
        """InputError for parameters, read from a file, that are finite and yet cannot be used."""

    def num_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device
