"""Deep Speech 2: convolutions over a spectrogram, bidirectional GRU layers, a loss over all alignments. Source: Amodei
et al. 2015 (arXiv 1512.02595), section 3; three recurrent layers as in table 1, of about 38 M parameters.

What a layer computes from its input is one product for all steps, normalised over all of them (section 3.2); only the
recurrence is unrolled.
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig

NUM_FREQUENCIES = 161  # of windows of 20 ms at 16 kHz
CHANNELS, KERNELS, STRIDES = 32, ((41, 11), (21, 11)), ((2, 2), (2, 1))  # (frequency, time): table 3
CLIP = 20.0  # of the rectifier, section 3.1
NEVER = -1e30  # log-probability of an impossible state, finite so that gradients are numbers


@dataclass(frozen=True, slots=True)
class DeepSpeechConfig(ModelConfig):
    """Sizes of the model and of one batch; a step is two frames of the spectrogram, `num_letters` counts the blank."""

    batch_size: int
    num_layers: int = 3
    num_steps: int = 32
    hidden: int = 1024
    num_letters: int = 29
    text_length: int = 12

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if 2 * self.text_length > self.num_steps:  # a letter and the blank before an equal one
            half = self.num_steps // 2
            raise InputError(
                f"DeepSpeechConfig: text_length is {self.text_length}; at most half of num_steps ({half}) is expected"
            )


class FrontEnd(nn.Module):
    """Spectrograms [batch, 1, frequencies, frames] -> [steps, batch, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        inputs, self.num_features = 1, NUM_FREQUENCIES
        for kernel, stride in zip(KERNELS, STRIDES, strict=True):
            padding = kernel[0] // 2, kernel[1] // 2
            self.convolutions.append(nn.Conv2d(inputs, CHANNELS, kernel, stride, padding, bias=False))
            self.norms.append(nn.BatchNorm2d(CHANNELS))
            inputs, self.num_features = CHANNELS, (self.num_features + 1) // 2
        self.num_features *= CHANNELS

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x)).clamp(0.0, CLIP)
        return x.flatten(1, 2).permute(2, 0, 1)


class GRUDirection(nn.Module):
    """A gated recurrent unit (Cho et al. 2014, arXiv 1406.1078) over the steps in the order given."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input_gates = nn.Linear(inputs, 3 * hidden, bias=False)
        self.norm = nn.BatchNorm1d(3 * hidden)
        self.state_gates = nn.Linear(hidden, 3 * hidden, bias=False)

    def forward(self, x: Tensor, *, backwards: bool) -> Tensor:
        """[steps, batch, inputs] -> [steps, batch, hidden]"""
        num_steps, batch = x.shape[:2]
        from_input = self.norm(self.input_gates(x.flatten(0, 1))).unflatten(0, (num_steps, batch)).unbind(0)
        state, states = x.new_zeros(batch, self.hidden), []
        for gates in reversed(from_input) if backwards else from_input:
            state = self.step(gates, state)
            states.append(state)
        return torch.stack(states[::-1] if backwards else states)

    def step(self, from_input: Tensor, state: Tensor) -> Tensor:
        """Gates of one step [batch, 3 * hidden] and the state before it -> the state after it."""
        update, reset, candidate = from_input.chunk(3, dim=1)
        old_update, old_reset, old_candidate = self.state_gates(state).chunk(3, dim=1)
        keep = (update + old_update).sigmoid()
        candidate = (candidate + (reset + old_reset).sigmoid() * old_candidate).tanh()
        return torch.lerp(candidate, state, keep)


class BidirectionalGRU(nn.Module):
    """Both directions, summed."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.forwards, self.backwards = GRUDirection(inputs, hidden), GRUDirection(inputs, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.forwards(x, backwards=False) + self.backwards(x, backwards=True)


class DeepSpeech(nn.Module):
    """Spectrograms [batch, 1, frequencies, frames] and texts [batch, letters] -> mean loss of the alignments."""

    def __init__(self, config: DeepSpeechConfig) -> None:
        super().__init__()
        self.front = FrontEnd()
        widths = [self.front.num_features, *(config.hidden for _ in range(config.num_layers))]
        self.layers = nn.Sequential(*(BidirectionalGRU(inputs, config.hidden) for inputs in widths[:-1]))
        self.letters = nn.Linear(config.hidden, config.num_letters)

    def forward(self, spectrograms: Tensor, texts: Tensor) -> Tensor:
        scores = self.letters(self.layers(self.front(spectrograms)))
        return alignment_loss(scores.log_softmax(dim=-1), texts).mean()


def alignment_loss(scores: Tensor, texts: Tensor) -> Tensor:
    """Connectionist temporal classification, step by step (Graves et al. 2006, section 4.1).

    Log-probabilities [steps, batch, letters], with the blank as letter 0, and texts [batch, length] -> negative
    log-likelihoods [batch]. PyTorch's own has no fake implementation.
    """
    length = texts.shape[1]
    states = functional.pad(texts.unsqueeze(2), (1, 0)).flatten(1)  # blank, letter, blank, letter, ...
    states = functional.pad(states, (0, 1))
    emitted = scores.gather(2, states.expand(len(scores), -1, -1)).unbind(0)
    # a blank may be left out between two different letters
    stays = (states == 0) | (states == functional.pad(states, (2, 0))[:, :-2])
    skip = torch.zeros_like(emitted[0]).masked_fill(stays, NEVER)
    start = torch.arange(2 * length + 1, device=texts.device) < 2
    reached = emitted[0].masked_fill(~start, NEVER)
    for step in emitted[1:]:
        padded = functional.pad(reached, (2, 0), value=NEVER)
        ways = torch.stack((reached, padded[:, 1:-1], padded[:, :-2] + skip))
        reached = ways.logsumexp(dim=0) + step
    return -reached[:, -2:].logsumexp(dim=1)


def build(config: DeepSpeechConfig) -> Example:
    """The model with one batch of random sound."""
    spectrograms = torch.randn(config.batch_size, 1, NUM_FREQUENCIES, 2 * config.num_steps)
    texts = torch.randint(1, config.num_letters, (config.batch_size, config.text_length))
    return DeepSpeech(config), (spectrograms, texts), {}
