"""gdp's policy in this regime: a scorer of candidates by their predicted times, ranges and traits.

    score = -weight * log(predicted / least predicted) + network(log ratio, spread, traits less those of the first)

It starts as the order of costs. In simulation it is trained on drawn choices: predictions are those of a drawn machine,
and steps take what they take on one that differs from it by as much as ranges say (drawn_choices.py). Since the softmax
is over a few candidates whose times are all known there, the expected reward is exact, and so is its gradient.

On measured rewards it learns as published.py's arms do, with its likeliest candidate next. The gate of the hidden units
is that of the choice: superposition. At a learning rate of 0 it is the control: the same policy, as it was trained.

R trials, N candidates, F features, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from benchmarks.few_measurements.drawn_choices import DrawnQuestion, draw_batch
from benchmarks.few_measurements.learning import (
    Adam,
    Inputs,
    Learning,
    Network,
    Parameters,
    learn,
    log_probabilities,
    padded,
    presence,
)
from benchmarks.few_measurements.trial import Arm, Lessons, Trial
from benchmarks.measured_sources.choices import NAMES, Choice
from gdp.arrays import F64

_STEPS, _CHOICES = 600, 48  # of training in simulation; drawn choices of a step
_RATE, _MEASURED_STEPS, _MEASURED_RATE = 0.003, 150, 0.003
_HOLD = 0.1  # of the squared distance from the policy of simulation, where training is on measured choices
_OF_COSTS = 20.0  # initial weight of the order of costs: candidates 5 % apart are 2.7 times as likely


def features_of(predicted: F64, spreads: F64, traits: F64, names: Sequence[str]) -> F64:
    """Returns [N, F]; traits without a place in `NAMES` are left out."""
    first = int(np.argmin(predicted))
    known = np.zeros((len(predicted), len(NAMES)))
    for place, name in enumerate(names):
        if name in NAMES:
            known[:, NAMES.index(name)] = traits[:, place] - traits[first, place]
    ratio = np.log(predicted / predicted[first])
    return np.column_stack((ratio, ratio.clip(max=1) ** 2, spreads, known))


@dataclass(frozen=True)
class Scorer(Network):
    """The network; weights of features start at 0, so that those that training never saw do nothing."""

    hidden: int = 16

    def inputs(self, choices: Sequence[Choice]) -> Inputs:
        """Returns the features of candidates [R, N, F]."""
        rows = [features_of(each.predicted, each.spreads, each.traits, each.names) for each in choices]
        return {"is_there": presence(choices), "features": padded(rows)}

    def start(self, count: int, generator: torch.Generator) -> Parameters:
        """Returns the order of costs."""
        size = self.hidden
        return {
            "weight": torch.full((count, 1, 1), _OF_COSTS),
            "into": torch.zeros(count, 3 + len(NAMES), size),
            "bias": torch.randn((count, 1, size), generator=generator),
            "gate": torch.ones(count, 1, size),
            "out": 0.3 * torch.randn((count, size, 1), generator=generator),
        }

    def logits(self, parameters: Parameters, inputs: Inputs) -> Tensor:
        """Returns scores; the network's is 0 for candidates like the first."""
        features = inputs["features"]
        hidden = torch.tanh(features @ parameters["into"] + parameters["bias"]) * parameters["gate"]
        return (hidden @ parameters["out"] - parameters["weight"] * features[..., :1])[..., 0]


def _train(parameters: Parameters, loss_of: Callable[[Parameters], Tensor], steps: int, rate: float) -> Parameters:
    """Returns parameters after `steps` of Adam."""
    made = {name: value.detach().clone().requires_grad_(True) for name, value in parameters.items()}
    optimizer = Adam(made, rate, {"weight": _OF_COSTS})
    for _ in range(steps):
        optimizer.step(loss_of(made))
    return {name: value.detach() for name, value in made.items()}


def _regret(parameters: Parameters, inputs: Inputs, rewards: Tensor) -> Tensor:
    chances = log_probabilities(Scorer(), parameters, inputs).exp()
    return -(chances * rewards).sum(dim=1).mean()


@cache
def of_simulation(drawn: tuple[DrawnQuestion, ...]) -> Parameters:
    """Returns the policy that is trained on choices of drawn machines."""
    generator, start = np.random.default_rng(0), Scorer().start(1, torch.Generator().manual_seed(0))

    def loss(parameters: Parameters) -> Tensor:
        batch = draw_batch(drawn, _CHOICES, generator)
        rows = [features_of(each.predicted, each.spreads, each.traits, each.names) for each in batch]
        inputs = {"is_there": padded([np.ones(len(row)) for row in rows]) > 0, "features": padded(rows)}
        return _regret(parameters, inputs, padded([each.rewards for each in batch]))

    return _train(start, loss, _STEPS, _RATE)


@cache
def _of_measured(choices: tuple[Choice, ...], drawn: tuple[DrawnQuestion, ...]) -> Parameters:
    """Returns the policy of simulation after training on measured choices, near to what it was."""
    before, inputs = of_simulation(drawn), Scorer().inputs(choices)
    rewards = padded([-np.sqrt(each.measured / each.measured.min()) for each in choices])

    def loss(parameters: Parameters) -> Tensor:
        moved = torch.stack([((parameters[name] - value) ** 2).sum() for name, value in before.items()])
        return _regret(parameters, inputs, rewards) + _HOLD * moved.sum() / len(choices)

    return _train(before, loss, _MEASURED_STEPS, _MEASURED_RATE)


def _learned(learning: Learning, of: str = "") -> Callable[[Sequence[Trial], Lessons], list[list[int]]]:
    def run(trials: Sequence[Trial], lessons: Lessons) -> list[list[int]]:
        parameters = of_simulation(lessons.drawn)
        if of:
            parameters = _of_measured(getattr(lessons, of), lessons.drawn)
        return learn(Scorer(), trials, learning, parameters)

    return run


AS_TRAINED = Learning(learning_rate=0, draws=False)
FINE_TUNED = Learning(learning_rate=0.01, draws=False, remembers=True)

POLICIES = {
    "policy of drawn machines": Arm(_learned(AS_TRAINED), "drawn"),
    "policy of drawn machines, fine-tuned": Arm(_learned(FINE_TUNED), "drawn"),
    "policy of other machines": Arm(_learned(AS_TRAINED, "other_machines"), "other_machines"),
    "policy of other tables": Arm(_learned(AS_TRAINED, "other_tables"), "other_tables"),
}


def order_of(choice: Choice, lessons: Lessons) -> list[int]:
    """Returns the candidates, the likeliest of the policy of simulation first."""
    scorer = Scorer()
    scores = scorer.logits(of_simulation(lessons.drawn), scorer.inputs([choice]))[0]
    order: list[int] = torch.argsort(scores, descending=True, stable=True).tolist()
    return order
