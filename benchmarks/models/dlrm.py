"""DLRM, a recommendation model: many tables of very unequal sizes side by side, and little to compute. Source: Naumov
et al. 2019 (arXiv 1906.00091), section 2; sizes: the authors' benchmark on the Criteo Terabyte data, with at most ten
million rows a table. Gradients of tables are dense.
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig, WordEmbedding

TABLE_ROWS = (
    *(9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10),
    *(2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36),
)
NUM_DENSE = 13
BOTTOM = (512, 256)  # inner widths of the layers for the dense features
TOP = (512, 512, 256)


@dataclass(frozen=True, slots=True)
class DLRMConfig(ModelConfig):
    """Sizes of one batch and of the model: the first `num_tables` of TABLE_ROWS, each with at most `max_rows`."""

    batch_size: int
    num_tables: int = 26
    hidden: int = 64
    max_rows: int = 10_000_000

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.num_tables > len(TABLE_ROWS):
            raise InputError(f"DLRMConfig: num_tables is {self.num_tables}; at most {len(TABLE_ROWS)} is expected")

    def table_rows(self) -> list[int]:
        """Rows of each table."""
        return [min(rows, self.max_rows) for rows in TABLE_ROWS[: self.num_tables]]


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, each but the last followed by a rectifier."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Dense features [batch, NUM_DENSE], rows of tables [tables, batch], clicks [batch] -> mean cross-entropy."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            WordEmbedding(rows, config.hidden, deviation=rows**-0.5) for rows in config.table_rows()
        )
        self.bottom = nn.Sequential(perceptron(NUM_DENSE, *BOTTOM, config.hidden), nn.ReLU())
        num_pairs = (config.num_tables + 1) * config.num_tables // 2
        self.top = perceptron(num_pairs + config.hidden, *TOP, 1)

    def forward(self, dense: Tensor, rows: Tensor, clicks: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(row) for table, row in zip(self.tables, rows, strict=True))], dim=1)
        products = features @ features.transpose(1, 2)
        first, second = torch.tril_indices(len(self.tables) + 1, len(self.tables) + 1, -1, device=x.device)
        scores = self.top(torch.cat((x, products[:, first, second]), dim=1)).squeeze(1)
        return (functional.softplus(scores) - clicks * scores).mean()  # cross-entropy of the logistic function


def build(config: DLRMConfig) -> Example:
    """The model with one batch of random features."""
    rows = torch.stack([torch.randint(rows, (config.batch_size,)) for rows in config.table_rows()])
    clicks = (torch.rand(config.batch_size) < 0.5).float()
    return DLRM(config), (torch.randn(config.batch_size, NUM_DENSE), rows, clicks), {}
