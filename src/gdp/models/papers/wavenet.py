"""WaveNet: dilated causal convolutions over raw audio. Source: van den Oord et al. 2016 (arXiv 1609.03499)."""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.papers.base import Example, ModelConfig, WordEmbedding


@dataclass(frozen=True, slots=True)
class WaveNetConfig(ModelConfig):
    """Sizes of the model (its paper gives no widths) and of one batch; a stack has dilations 1, 2, 4, ..."""

    num_stacks: int
    batch_size: int
    layers_per_stack: int = 9
    num_samples: int = 16384
    channels: int = 64
    skip_channels: int = 256
    quantization: int = 256


class SampleEmbedding(WordEmbedding):
    """Quantised samples [batch, samples] -> vectors [batch, channels, samples]."""

    def forward(self, samples: Tensor) -> Tensor:
        return super().forward(samples).transpose(1, 2).contiguous()


class GatedLayer(nn.Module):
    """Adds the layer's residual to x [batch, channels, samples] and its skip output to the sum so far (figure 4). The
    last layer has no residual: nothing would read it."""

    def __init__(self, channels: int, skip_channels: int, dilation: int, *, last: bool) -> None:
        super().__init__()
        self.dilation = dilation
        self.filter = nn.Conv1d(channels, channels, 2, dilation=dilation)
        self.gate = nn.Conv1d(channels, channels, 2, dilation=dilation)
        self.residual = None if last else nn.Conv1d(channels, channels, 1)
        self.skip = nn.Conv1d(channels, skip_channels, 1)

    def forward(self, x: Tensor, skips: Tensor | None) -> tuple[Tensor, Tensor]:
        past = functional.pad(x, (self.dilation, 0))
        gated = self.filter(past).tanh() * self.gate(past).sigmoid()
        skip = self.skip(gated)
        return (x if self.residual is None else x + self.residual(gated), skip if skips is None else skips + skip)


class WaveNetHead(nn.Module):
    """Sum of the skip outputs [batch, skip, samples], next samples [batch, samples] -> mean cross-entropy."""

    def __init__(self, skip_channels: int, quantization: int) -> None:
        super().__init__()
        self.hidden = nn.Conv1d(skip_channels, skip_channels, 1)
        self.output = nn.Conv1d(skip_channels, quantization, 1)

    def forward(self, skips: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.output(self.hidden(skips.relu()).relu()), targets)


class WaveNet(nn.Module):
    """Quantised samples and next samples, both [batch, samples] -> mean cross-entropy."""

    def __init__(self, config: WaveNetConfig) -> None:
        super().__init__()
        self.embedding = SampleEmbedding(config.quantization, config.channels, deviation=1.0)
        num_layers = config.num_stacks * config.layers_per_stack
        sizes = config.channels, config.skip_channels
        steps = ((2 ** (number % config.layers_per_stack), number == num_layers - 1) for number in range(num_layers))
        self.layers = nn.ModuleList(GatedLayer(*sizes, dilation=step, last=is_last) for step, is_last in steps)
        self.head = WaveNetHead(config.skip_channels, config.quantization)

    def forward(self, samples: Tensor, targets: Tensor) -> Tensor:
        x, skips = self.embedding(samples), None
        for layer in self.layers:
            x, skips = layer(x, skips)
        return self.head(skips, targets)


def build(config: WaveNetConfig) -> Example:
    """The model with one batch of random audio."""
    shape = config.batch_size, config.num_samples
    samples, targets = (torch.randint(config.quantization, shape) for _ in range(2))
    return WaveNet(config), (samples, targets), {}
