"""ELMo: words from their letters, then two independent LSTM language models, one reading backwards, which share the
input and the softmax. Source: Peters et al. 2018 (arXiv 1802.05365), section 3; sizes from the authors' release;
projected LSTM: Sak et al. 2014 (arXiv 1402.1128). The softmax is plain, not sampled.
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss, WordEmbedding

NUM_LETTERS, LETTER_WIDTH = 262, 16
FILTERS = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))  # (letters, number)
NUM_HIGHWAYS = 2
CLIP = 3.0  # of cells and outputs


@dataclass(frozen=True, slots=True)
class ELMoConfig(ModelConfig):
    """Sizes of the model and of one batch; `filter_divisor` divides the numbers of filters."""

    batch_size: int
    num_layers: int = 2
    num_steps: int = 20
    hidden: int = 4096
    projected: int = 512
    word_length: int = 50
    vocabulary: int = 32000
    filter_divisor: int = 1
    dropout: float = 0.1


class LetterEncoder(nn.Module):
    """Words as letters [words, letters] -> [words, projected]."""

    def __init__(self, config: ELMoConfig) -> None:
        super().__init__()
        self.embedding = WordEmbedding(NUM_LETTERS, LETTER_WIDTH, deviation=1.0)
        counts = [max(1, count // config.filter_divisor) for _, count in FILTERS]
        self.filters = nn.ModuleList(
            nn.Conv1d(LETTER_WIDTH, count, kernel) for (kernel, _), count in zip(FILTERS, counts, strict=True)
        )
        width = sum(counts)
        self.highways = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(NUM_HIGHWAYS))
        self.project = nn.Linear(width, config.projected)

    def forward(self, letters: Tensor) -> Tensor:
        vectors = self.embedding(letters).transpose(1, 2)
        x = torch.cat([filters(vectors).amax(dim=2).relu() for filters in self.filters], dim=1)
        for highway in self.highways:  # Srivastava et al. 2015, arXiv 1505.00387
            changed, keep = highway(x).chunk(2, dim=1)
            x = torch.lerp(changed.relu(), x, keep.sigmoid())
        return self.project(x)


class ProjectedLSTM(nn.Module):
    """A layer whose output is a projection of its cell, unrolled: steps x [batch, projected] -> the same."""

    def __init__(self, hidden: int, projected: int, dropout: float) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Linear(2 * projected, 4 * hidden)
        self.project = nn.Linear(hidden, projected, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, steps: list[Tensor]) -> list[Tensor]:
        output, outputs = torch.zeros_like(steps[0]), []
        cell = output.new_zeros(len(output), self.hidden)
        for x in steps:
            gates = self.gates(torch.cat((self.dropout(x), output), dim=1))
            write, forget, candidate, read = gates.chunk(4, dim=1)
            cell = (forget.sigmoid() * cell + write.sigmoid() * candidate.tanh()).clamp(-CLIP, CLIP)
            output = self.project(read.sigmoid() * cell.tanh()).clamp(-CLIP, CLIP)
            outputs.append(output)
        return outputs


class Direction(nn.Module):
    """One of the two language models: a residual connection past each layer but the first."""

    def __init__(self, config: ELMoConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ProjectedLSTM(config.hidden, config.projected, config.dropout) for _ in range(config.num_layers)
        )

    def forward(self, steps: list[Tensor]) -> list[Tensor]:
        for number, layer in enumerate(self.layers):
            outputs = layer(steps)
            steps = outputs if number == 0 else [output + x for output, x in zip(outputs, steps, strict=True)]
        return steps


class ELMo(nn.Module):
    """Letters of words [steps, batch, letters], the words after and before them, both [steps, batch] -> mean of both
    directions' mean cross-entropies.
    """

    def __init__(self, config: ELMoConfig) -> None:
        super().__init__()
        self.letters = LetterEncoder(config)
        self.forwards, self.backwards = Direction(config), Direction(config)
        self.dropout = nn.Dropout(config.dropout)
        self.softmax = SoftmaxLoss(config.projected, config.vocabulary)

    def forward(self, letters: Tensor, after: Tensor, before: Tensor) -> Tensor:
        words = self.letters(letters.flatten(0, 1)).unflatten(0, letters.shape[:2])
        steps = list(words.unbind(0))
        ahead = torch.stack(self.forwards(steps))
        behind = torch.stack(self.backwards(steps[::-1])[::-1])
        return (self.softmax(self.dropout(ahead), after) + self.softmax(self.dropout(behind), before)) / 2


def build(config: ELMoConfig) -> Example:
    """The model with one batch of random words."""
    shape = config.num_steps, config.batch_size
    letters = torch.randint(NUM_LETTERS, (*shape, config.word_length))
    after, before = (torch.randint(config.vocabulary, shape) for _ in range(2))
    return ELMo(config), (letters, after, before), {}
