"""Networks that learn by measured rewards: a softmax over the candidates of a choice, and policy gradients.

Trials learn side by side, each with parameters of its own: a tensor of parameters is [R, ...] for R trials, and
[1, ...] where all share it. Candidates are padded to the most of any trial. R trials, N candidates, S measurements of
an update.

    logits --draw S, or the likeliest--> measurements --> rewards less those before --> policy gradient, Adam --.
       ^-----------------------------------------------------------------------------------------------------'
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.few_measurements.trial import Trial, fastest_so_far
from benchmarks.measured_sources.choices import Choice

I64 = npt.NDArray[np.int64]
Parameters = Mapping[str, Tensor]
Inputs = Mapping[str, Tensor]
_MOST_TRIALS, _MOST_PAIRS = 400, 300_000  # that learn side by side: what stays in the cache; pairs of candidates
_LEAST_DEVIATION = 0.02  # of rewards, which are about -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How measured rewards change a network. The reward is minus the square root of the time, as in HDP and GDP; here
    relative to the first measured one, since steps take from milliseconds to seconds. An advantage is the reward less
    the mean of those so far, over their deviation."""

    learning_rate: float
    entropy_weight: float = 0.0
    samples: int = 1  # measurements of an update
    epochs: int = 1
    clip: float = 0.0  # of PPO; 0: REINFORCE
    repeats: bool = False  # a candidate may be measured again, which shows the same time
    draws: bool = True  # else the likeliest comes next
    remembers: bool = False  # updates are over all measurements so far
    most: int = 50  # measurements
    max_gradient_norm: float = 1.0


class Adam:
    """Adam (D. Kingma and J. Ba, 2014), with the gradient of each trial bounded in its norm by itself. That of PyTorch
    bounds none, and its first step imports a compiler, which takes longer than many runs here."""

    def __init__(self, parameters: Parameters, rate: float, faster: Mapping[str, float] | None = None) -> None:
        self.parameters, self.rates = parameters, {name: rate * (faster or {}).get(name, 1) for name in parameters}
        self.means = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.squares = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.steps = 0

    def step(self, loss: Tensor, most: float = np.inf) -> None:
        """Makes one step down the gradient of `loss`."""
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), materialize_grads=True)
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factor, self.steps = (most / norms.clamp(min=1e-12)).clamp(max=1), self.steps + 1
        with torch.no_grad():
            for (name, value), gradient in zip(self.parameters.items(), gradients, strict=True):
                own = gradient * factor.view(-1, *[1] * (gradient.dim() - 1))
                mean = self.means[name].mul_(0.9).add_(own, alpha=0.1)
                square = self.squares[name].mul_(0.999).addcmul_(own, own, value=0.001)
                root = (square / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
                value.addcdiv_(mean, root, value=-self.rates[name] / (1 - 0.9**self.steps))


class Network(ABC):
    """A network over the candidates of choices."""

    @abstractmethod
    def inputs(self, choices: Sequence[Choice]) -> Inputs:
        """Returns tensors [R, N, ...], among them `is_there` [R, N]."""

    @abstractmethod
    def start(self, count: int, generator: torch.Generator) -> Parameters:
        """Returns parameters for `count` trials."""

    @abstractmethod
    def logits(self, parameters: Parameters, inputs: Inputs) -> Tensor:
        """Returns [R, N]; those of padding are not looked at."""


def presence(choices: Sequence[Choice]) -> Tensor:
    """Returns which candidates are there [R, N]."""
    most = max(len(choice.measured) for choice in choices)
    return torch.tensor([[number < len(choice.measured) for number in range(most)] for choice in choices])


def padded(rows: Sequence[npt.NDArray[np.float64]]) -> Tensor:
    """Returns arrays [N, ...] of any N as one tensor, zeros behind each."""
    made = np.zeros((len(rows), max(map(len, rows)), *rows[0].shape[1:]), np.float32)
    for place, row in enumerate(rows):
        made[place, : len(row)] = row
    return torch.from_numpy(made)


def log_probabilities(network: Network, parameters: Parameters, inputs: Inputs) -> Tensor:
    """Returns [R, N], minus infinity for padding."""
    logits = network.logits(parameters, inputs).masked_fill(~inputs["is_there"], -torch.inf)
    return torch.log_softmax(logits, dim=1)


def learn(
    network: Network, trials: Sequence[Trial], learning: Learning, parameters: Parameters | None = None
) -> list[list[int]]:
    """Returns the answers of trials. Each starts from `parameters` [1, ...], or from some that its seed draws."""
    answers = list[list[int]]()
    pairs = max(len(trial.seen) for trial in trials) ** 2
    together = min(max(_MOST_PAIRS // pairs, 1), _MOST_TRIALS)
    for first in range(0, len(trials), together):
        chunk = trials[first : first + together]
        generator = torch.Generator().manual_seed(first)
        if parameters is None:
            own = network.start(len(chunk), generator)
        else:
            own = {
                name: value.detach().repeat(len(chunk), *[1] * (value.dim() - 1)) for name, value in parameters.items()
            }
        measured = measure(network, own, chunk, learning, generator)
        for trial, row in zip(chunk, measured.tolist(), strict=True):
            num = learning.most if learning.repeats else len(trial.seen)
            answers.append(fastest_so_far(trial, row[:num]))
    return answers


def measure(
    network: Network, parameters: Parameters, trials: Sequence[Trial], learning: Learning, generator: torch.Generator
) -> I64:
    """Returns the candidates [R, M] that each trial measures."""
    inputs, seen = network.inputs([trial.choice for trial in trials]), padded([trial.seen for trial in trials])
    for value in parameters.values():
        value.requires_grad_(learning.learning_rate > 0)
    optimizer = Adam(parameters, learning.learning_rate)
    open_, taken = inputs["is_there"].clone(), torch.empty((len(trials), 0), dtype=torch.int64)
    most = learning.most if learning.repeats else open_.shape[1]
    while taken.shape[1] < most:
        with torch.no_grad():
            scores = log_probabilities(network, parameters, inputs).clamp(min=-1e4).masked_fill(~open_, -torch.inf)
            chosen = _choose(scores, min(learning.samples, most - taken.shape[1]), learning, generator)
        taken = torch.cat((taken, chosen), dim=1)
        if not learning.repeats:
            open_ = open_.scatter(1, chosen, False)
        if learning.learning_rate > 0 and taken.shape[1] < most:
            _update(network, parameters, inputs, optimizer, learning, taken, _rewards(seen, taken))
    return taken.numpy()


def _choose(scores: Tensor, count: int, learning: Learning, generator: torch.Generator) -> Tensor:
    """Returns [R, S]: the largest after Gumbel noise are a sample; of repeated draws each has noise of its own."""
    if not learning.draws:
        return scores.topk(count, dim=1).indices
    shape = (len(scores), count, scores.shape[1]) if learning.repeats else scores.shape
    noise = -torch.empty(shape).exponential_(generator=generator).log()
    if learning.repeats:
        return (scores[:, None] + noise).argmax(dim=2)
    return (scores + noise).topk(min(count, scores.shape[1]), dim=1).indices


def _rewards(seen: Tensor, taken: Tensor) -> Tensor:
    times = seen.gather(1, taken)
    return -(times / times[:, :1]).clamp(min=1e-9).sqrt()


def _update(
    network: Network,
    parameters: Parameters,
    inputs: Inputs,
    optimizer: Adam,
    learning: Learning,
    taken: Tensor,
    rewards: Tensor,
) -> None:
    """Makes the steps of an update in all trials."""
    deviation = rewards.std(dim=1, keepdim=True, correction=0) + _LEAST_DEVIATION
    gains = (rewards - rewards.mean(dim=1, keepdim=True)) / deviation
    if not learning.remembers:
        taken, gains = taken[:, -learning.samples :], gains[:, -learning.samples :]
    before = None
    for _ in range(learning.epochs):
        logs = log_probabilities(network, parameters, inputs).clamp(min=-1e4)
        chosen = logs.gather(1, taken)
        before = chosen.detach() if before is None else before
        if learning.clip:
            ratio = (chosen - before).exp()
            kept = torch.minimum(ratio * gains, ratio.clamp(1 - learning.clip, 1 + learning.clip) * gains)
        else:
            kept = gains * chosen
        entropy = -(logs.exp() * logs).sum(dim=1)
        loss = -(kept.mean(dim=1) + learning.entropy_weight * entropy).sum()  # trials do not know of each other
        optimizer.step(loss, learning.max_gradient_norm)
