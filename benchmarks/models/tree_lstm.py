"""Tree-LSTM: a sentence is read up its binary tree, and every node is classified. Source: Tai et al. 2015
(arXiv 1503.00075), section 3.2; the nodes' classes: the Stanford Sentiment Treebank's. All trees of a batch are the
same balanced one, so that a node is one step for the whole batch.
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig, WordEmbedding
from gdp.models.papers.lstm import State


@dataclass(frozen=True, slots=True)
class TreeLSTMConfig(ModelConfig):
    """Sizes of the model and of one batch; the paper's vectors have 300 elements, its states 150."""

    batch_size: int
    num_leaves: int = 32
    hidden: int = 1024
    word_width: int = 300
    vocabulary: int = 32000
    num_classes: int = 5
    dropout: float = 0.5

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.num_leaves & (self.num_leaves - 1):
            raise InputError(f"TreeLSTMConfig: num_leaves is {self.num_leaves}; a power of two is expected")


class Leaf(nn.Module):
    """A word's vector [batch, width] -> State."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 3 * hidden)

    def forward(self, x: Tensor) -> State:
        write, read, candidate = self.gates(x).chunk(3, dim=1)
        cell = write.sigmoid() * candidate.tanh()
        return read.sigmoid() * cell.tanh(), cell


class Join(nn.Module):
    """The states of two children -> their parent's; each child has a forget gate (equations 9 to 14)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, left: State, right: State) -> State:
        gates = self.gates(torch.cat((left[0], right[0]), dim=1))
        write, read, candidate, forget_left, forget_right = gates.chunk(5, dim=1)
        cell = write.sigmoid() * candidate.tanh() + forget_left.sigmoid() * left[1] + forget_right.sigmoid() * right[1]
        return read.sigmoid() * cell.tanh(), cell


class TreeLSTM(nn.Module):
    """Words [leaves, batch], a class for each of the 2 * leaves - 1 nodes [nodes, batch] -> mean cross-entropy.

    Nodes are numbered from the leaves up, level by level.
    """

    def __init__(self, config: TreeLSTMConfig) -> None:
        super().__init__()
        self.words = WordEmbedding(config.vocabulary, config.word_width, deviation=0.1)
        self.leaf = Leaf(config.word_width, config.hidden)
        self.join = Join(config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.classes = nn.Linear(config.hidden, config.num_classes)

    def forward(self, words: Tensor, classes: Tensor) -> Tensor:
        level: list[State] = [self.leaf(x) for x in self.words(words).unbind(0)]
        nodes = list(level)
        while len(level) > 1:
            level = [self.join(left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
            nodes += level
        losses = [
            functional.cross_entropy(self.classes(self.dropout(output)), truth)
            for (output, _), truth in zip(nodes, classes.unbind(0), strict=True)
        ]
        return torch.stack(losses).mean()


def build(config: TreeLSTMConfig) -> Example:
    """The model with one batch of random sentences."""
    words = torch.randint(config.vocabulary, (config.num_leaves, config.batch_size))
    return (
        TreeLSTM(config),
        (words, torch.randint(config.num_classes, (2 * config.num_leaves - 1, config.batch_size))),
        {},
    )
