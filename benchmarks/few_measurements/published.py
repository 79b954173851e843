"""The published learners on measured rewards: an HDP-like sequence policy, and GDP's network over candidates.

HDP-like: an LSTM chooses the traits of a candidate one after the other (Mirhoseini et al., ICLR 2018; its grouper has
nothing to group here), from scratch for each choice, by REINFORCE with the mean reward so far as its baseline. Traits
that no candidate with the same first traits has are masked, so that each draw is a candidate.

GDP: attention over the candidates of a choice, conditioned on their representation by superposition, a softmax over
them, PPO (Zhou et al., arXiv 1910.01578). It starts untrained; or is trained on the measured choices of other models
first, as published, with a mean over choices as its objective.

R trials, N candidates, T traits, V values of a trait, F features, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

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
from benchmarks.measured_sources.choices import Choice

_PRE_TRAINING = 200  # updates, of all choices each


def _drawn(generator: torch.Generator, *shape: int) -> Tensor:
    """Returns weights [R, in, out], with X. Glorot's and Y. Bengio's deviation (AISTATS 2010)."""
    drawn: Tensor = torch.randn(shape, generator=generator) * (2 / (shape[-1] + shape[-2])) ** 0.5
    return drawn


@dataclass(frozen=True)
class SequencePolicy(Network):
    """HDP's placer, with traits in place of groups; what it has put out comes in at the next step."""

    num_traits: int
    num_values: int
    hidden: int = 32

    def inputs(self, choices: Sequence[Choice]) -> Inputs:
        """Returns values of traits as numbers [R, N, T], and which values may come next [R, N, T, V]."""
        is_there = presence(choices)
        codes = [
            np.stack([np.unique(c, return_inverse=True)[1] for c in choice.traits.T], axis=1) for choice in choices
        ]
        values = padded([np.pad(each, ((0, 0), (0, self.num_traits - each.shape[1]))).astype(float) for each in codes])
        values = values.long()
        alike = values[:, :, None] == values[:, None]  # [R, N, N, T]
        first = torch.cat((torch.ones_like(alike[..., :1]), alike.cumprod(dim=3)[..., :-1].bool()), dim=3)
        first &= is_there[:, None, :, None]
        one_hot = torch.nn.functional.one_hot(values, self.num_values).float()
        allowed = torch.einsum("rnmt,rmtv->rntv", first.float(), one_hot) > 0
        return {"is_there": is_there, "values": values, "allowed": allowed | ~is_there[:, :, None, None]}

    def start(self, count: int, generator: torch.Generator) -> Parameters:
        """Returns an embedding of values, the gates of an LSTM, and a head for each trait."""
        size, places = self.hidden, self.num_traits * self.num_values
        return {
            "embedding": _drawn(generator, count, places, 4 * size),
            "gates": _drawn(generator, count, size, 4 * size),
            "bias": torch.zeros(count, 1, 4 * size),
            "head": _drawn(generator, count, size, places),
        }

    def logits(self, parameters: Parameters, inputs: Inputs) -> Tensor:
        """Returns the log-probability of each candidate: the sum over its traits."""
        values, allowed, size = inputs["values"], inputs["allowed"], self.hidden
        state = cell = torch.zeros(*values.shape[:2], size)
        total = torch.zeros(values.shape[:2])
        for trait in range(self.num_traits):
            if (values[:, :, trait] == 0).all():
                continue  # all have one value
            gates = state @ parameters["gates"] + parameters["bias"]
            if trait:
                place = values[:, :, trait - 1] + (trait - 1) * self.num_values
                gates = gates + parameters["embedding"].gather(1, place[:, :, None].expand(-1, -1, 4 * size))
            into, keep, out, new = gates.chunk(4, dim=2)
            cell = torch.sigmoid(keep + 1) * cell + torch.sigmoid(into) * torch.tanh(new)
            state = torch.sigmoid(out) * torch.tanh(cell)
            head = parameters["head"][:, :, trait * self.num_values : (trait + 1) * self.num_values]
            scores = (state @ head).masked_fill(~allowed[:, :, trait], -torch.inf)
            total = total + torch.log_softmax(scores, dim=2).gather(2, values[:, :, trait, None])[..., 0]
        return total


@dataclass(frozen=True)
class SuperposedPolicy(Network):
    """GDP's network: a candidate's vector x, c(x) of one layer of attention, and two layers of it on c(x) * x."""

    num_features: int  # twice the traits
    scale: tuple[tuple[float, float], ...]  # mean and deviation of each trait of a table
    hidden: int = 16

    def inputs(self, choices: Sequence[Choice]) -> Inputs:
        """Returns traits in units of their deviation in the choice, and in the table."""
        rows = []
        for choice in choices:
            deviation = choice.traits.std(axis=0)
            own = (choice.traits - choice.traits.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
            shared = [(choice.traits[:, place] - mean) / unit for place, (mean, unit) in enumerate(self.scale)]
            both = np.concatenate((own, np.array(shared).reshape(len(shared), -1).T), axis=1) if shared else own
            rows.append(np.pad(both, ((0, 0), (0, self.num_features - both.shape[1]))))
        return {"is_there": presence(choices), "features": padded(rows)}

    def start(self, count: int, generator: torch.Generator) -> Parameters:
        """Returns the weights of three layers of attention, and what is around them."""
        size = self.hidden
        made = {"embed": _drawn(generator, count, self.num_features, size)}
        for layer in range(3):
            made[f"attend{layer}"] = _drawn(generator, count, size, 3 * size)
            made[f"mix{layer}"] = _drawn(generator, count, size, size)
            made[f"widen{layer}"] = _drawn(generator, count, size, 2 * size)
            made[f"narrow{layer}"] = _drawn(generator, count, 2 * size, size)
        return made | {"head": 0.1 * _drawn(generator, count, size, 1)}

    def logits(self, parameters: Parameters, inputs: Inputs) -> Tensor:
        """Returns a score of each candidate."""
        hidden = torch.tanh(inputs["features"] @ parameters["embed"])
        condition = self._layer(0, hidden, parameters, inputs["is_there"])
        for layer in (1, 2):
            hidden = self._layer(layer, condition * hidden, parameters, inputs["is_there"])
        return (hidden @ parameters["head"])[..., 0]

    def _layer(self, layer: int, x: Tensor, parameters: Parameters, is_there: Tensor) -> Tensor:
        query, key, value = (x @ parameters[f"attend{layer}"]).chunk(3, dim=2)
        scores = (query @ key.transpose(1, 2) / self.hidden**0.5).masked_fill(~is_there[:, None], -torch.inf)
        x = torch.nn.functional.layer_norm(
            x + torch.softmax(scores, dim=2) @ value @ parameters[f"mix{layer}"], (self.hidden,)
        )
        wide = torch.relu(x @ parameters[f"widen{layer}"])
        return torch.nn.functional.layer_norm(x + wide @ parameters[f"narrow{layer}"], (self.hidden,))


# Tried on vTrain's choices with set rows, 3 seeds. Mean regret in % over the first 25 measurements, and after 100:
#
#     learning rate                       0.003        0.01        0.03        0.1
#     HDP-like, a draw an update                  11.9  0.7   12.6  3.7   16.6 10.5
#     HDP-like, four draws                        12.8  0.0   12.7  0.6   12.9  2.9
#     GDP, entropy weight 0           10.7  0.4   11.1  1.2   10.4  1.3
#     GDP, entropy weight 0.03        10.7  0.2   11.0  1.0   10.3  0.0
HDP = Learning(learning_rate=0.01, entropy_weight=0.03, samples=4, repeats=True, most=100)
GDP = Learning(learning_rate=0.03, entropy_weight=0.03, samples=4, epochs=4, clip=0.2, repeats=True, most=100)


def _without_repeats(learning: Learning) -> Learning:
    """Returns the same, made stronger: what is known is not measured again, and updates are over all of it."""
    return replace(learning, samples=2, repeats=False, remembers=True)


def _hdp(learning: Learning) -> Arm:
    def run(trials: Sequence[Trial], _lessons: Lessons) -> list[list[int]]:
        columns = [column for trial in trials for column in trial.choice.traits.T]
        most = max(trial.choice.traits.shape[1] for trial in trials)
        return learn(SequencePolicy(most, max(len(np.unique(column)) for column in columns)), trials, learning)

    return Arm(run)


def _gdp(learning: Learning, *, is_trained: bool) -> Arm:
    def run(trials: Sequence[Trial], lessons: Lessons) -> list[list[int]]:
        known = tuple(lessons.other_models) or tuple(trial.choice for trial in trials)
        network = _network(known)
        return learn(network, trials, learning, _pre_trained(network, known) if is_trained else None)

    return Arm(run, "other_models" if is_trained else "")


def _network(choices: Sequence[Choice]) -> SuperposedPolicy:
    traits = np.concatenate([choice.traits for choice in choices])
    deviation = traits.std(axis=0)
    units = np.where(deviation > 0, deviation, 1)
    scale = tuple(zip(traits.mean(axis=0).tolist(), units.tolist(), strict=True))
    return SuperposedPolicy(2 * len(scale), scale)


@cache
def _pre_trained(network: SuperposedPolicy, choices: tuple[Choice, ...]) -> Parameters:
    """Returns parameters [1, ...] that are trained on measured choices by PPO, four draws of each an update."""
    generator = torch.Generator().manual_seed(0)
    parameters, inputs = network.start(1, generator), network.inputs(choices)
    times = padded([choice.measured / choice.measured.min() for choice in choices])
    for value in parameters.values():
        value.requires_grad_(True)
    optimizer = Adam(parameters, GDP.learning_rate)
    for _ in range(_PRE_TRAINING):
        with torch.no_grad():
            before = log_probabilities(network, parameters, inputs)
            taken = torch.multinomial(before.exp(), GDP.samples, replacement=True, generator=generator)
            rewards = -times.gather(1, taken).sqrt()
            gains = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.02)
            before = before.gather(1, taken)
        for _ in range(GDP.epochs):
            logs = log_probabilities(network, parameters, inputs).clamp(min=-1e4)
            ratio = (logs.gather(1, taken) - before).exp()
            kept = torch.minimum(ratio * gains, ratio.clamp(1 - GDP.clip, 1 + GDP.clip) * gains)
            entropy = -(logs.exp() * logs).sum(dim=1)
            optimizer.step(-(kept.mean(dim=1) + GDP.entropy_weight * entropy).mean(), GDP.max_gradient_norm)
    return {name: value.detach() for name, value in parameters.items()}


PUBLISHED = {
    "HDP-like": _hdp(HDP),
    "HDP-like, none twice": _hdp(_without_repeats(HDP)),
    "GDP": _gdp(GDP, is_trained=False),
    "GDP, none twice": _gdp(_without_repeats(GDP), is_trained=False),
    "GDP, pre-trained": _gdp(GDP, is_trained=True),
    "GDP, pre-trained, none twice": _gdp(_without_repeats(GDP), is_trained=True),
}
