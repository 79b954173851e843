"""Embedding tables with perceptrons: bags of rows, drawn interactions, shared experts, several tasks."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.architectures.families.parts import Draws, Example, PlainMLP

INTERACTIONS = ("crosses", "squares", "attention", "pairs", "concatenation")


class TableBag(nn.Module):
    """Numbers of rows [batch, count] -> the sum, mean or maximum of the rows [batch, width]."""

    def __init__(self, num_rows: int, inner: int, width: int, join: str) -> None:
        super().__init__()
        self.rows = nn.Embedding(num_rows, inner)
        self.project = nn.Linear(inner, width, bias=False) if inner != width else nn.Identity()
        self.join = join

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.rows(numbers)
        if x.shape[1] == 1:
            x = x.squeeze(1)
        else:
            x = x.amax(1) if self.join == "maximum" else x.sum(1) if self.join == "sum" else x.mean(1)
        return self.project(x)


class FieldInteraction(nn.Module):
    """Fields [batch, fields, width] -> [batch, outputs]."""

    def __init__(self, draws: Draws, kind: str, num_fields: int, width: int) -> None:
        super().__init__()
        self.kind, whole = kind, num_fields * width
        self.outputs = {"squares": width, "pairs": 0}.get(kind, whole)
        if kind == "crosses":  # Wang et al. 2017 (arXiv 1708.05123), with factored weights
            rank, depth = max(width // 2, 8), draws.number(1, 4)
            self.downs = nn.ModuleList(nn.Linear(whole, rank, bias=False) for _ in range(depth))
            self.ups = nn.ModuleList(nn.Linear(rank, whole) for _ in range(depth))
        elif kind == "attention":
            depth = draws.number(1, 3)
            self.mixes = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(depth))
        elif kind == "pairs":
            count = min(draws.number(4, 16), num_fields * (num_fields - 1) // 2)
            pairs = [(one, other) for other in range(num_fields) for one in range(other)]
            self.pairs = draws.some(pairs, count)
            self.outputs = width * len(self.pairs)

    def forward(self, fields: Tensor) -> Tensor:
        if self.kind == "squares":  # Rendle 2010: factorisation machines
            return (fields.sum(1).square() - fields.square().sum(1)) * 0.5
        if self.kind == "pairs":
            columns = fields.unbind(1)
            return torch.cat([columns[one] * columns[other] for one, other in self.pairs], dim=1)
        if self.kind == "attention":
            for mix in self.mixes:
                query, keys, values = mix(fields).chunk(3, dim=2)
                fields = fields + (query @ keys.transpose(1, 2)).softmax(2) @ values
            return fields.flatten(1)
        whole = x = fields.flatten(1)
        if self.kind == "crosses":
            for down, up in zip(self.downs, self.ups, strict=True):
                x = whole * up(down(x)) + x
        return x


class TableModel(nn.Module):
    """Rows of tables, dense features, a value for each task [batch, tasks] -> loss.

    Experts read all interactions; each task gates them (Ma et al. 2018: multi-gate mixtures of experts).
    """

    def __init__(self, draws: Draws, num_ops: int, num_dense: int) -> None:
        super().__init__()
        self.width = draws.size(16, 256, 16)
        act, norm = draws.one_of("relu", "gelu", "silu", "tanh"), draws.one_of("none", "layer")
        kinds = draws.some(INTERACTIONS, draws.number(1, 3))
        num_experts, num_tasks, depth = draws.number(1, 8), draws.number(1, 4), draws.number(1, 4)
        ops_of_layer = 9 if norm == "none" else 14
        fixed = (num_experts * depth + num_tasks * 3 + 4) * ops_of_layer + num_experts * num_tasks * 4
        is_narrow = draws.chance(0.5)
        num_tables = min(max((num_ops - fixed - 60) // (12 if is_narrow else 7), 4), 100)
        self.bags = [draws.number(2, 12) if draws.chance(0.4) else 1 for _ in range(num_tables)]
        self.num_rows = [draws.size(50, 2_000_000, 1) for _ in range(num_tables)]
        join = draws.one_of("sum", "mean", "maximum")
        self.tables = nn.ModuleList(
            TableBag(rows, max(self.width // draws.one_of(1, 2, 4), 8) if is_narrow else self.width, self.width, join)
            for rows in self.num_rows
        )
        inner = draws.size(64, 2048, 64)
        self.dense = PlainMLP([num_dense, *([inner] * draws.number(1, 3)), self.width], act, norm=norm)
        self.interactions = nn.ModuleList(FieldInteraction(draws, kind, num_tables + 1, self.width) for kind in kinds)
        total = sum(interaction.outputs for interaction in self.interactions)  # type: ignore[misc]
        expert = [total, *([inner] * depth)]
        self.experts = nn.ModuleList(
            PlainMLP(expert, act, norm=norm, residual=draws.chance(0.5)) for _ in range(num_experts)
        )
        self.gates = nn.ModuleList(nn.Linear(total, num_experts) for _ in range(num_tasks))
        self.heads = nn.ModuleList(PlainMLP([inner, inner // 2, 1], act) for _ in range(num_tasks))

    def forward(self, dense: Tensor, values: Tensor, *numbers: Tensor) -> Tensor:
        fields = [self.dense(dense), *(table(rows) for table, rows in zip(self.tables, numbers, strict=True))]
        stacked = torch.stack(fields, dim=1)
        x = torch.cat([interaction(stacked) for interaction in self.interactions], dim=1)
        answers = [expert(x) for expert in self.experts]
        losses = []
        for gate, head, value in zip(self.gates, self.heads, values.unbind(1), strict=True):
            weights = gate(x).softmax(1)
            mixed = answers[0] * weights[:, :1]
            for number, answer in enumerate(answers[1:], 1):
                mixed = mixed + answer * weights[:, number : number + 1]
            losses.append(functional.binary_cross_entropy_with_logits(head(mixed).squeeze(1), value))
        return torch.stack(losses).sum()


def build(draws: Draws, num_ops: int) -> Example:
    """Draws a model of tables of about `num_ops` ops, with one batch."""
    batch, num_dense = draws.size(2048, 65536, 64), draws.size(8, 512)
    model = TableModel(draws, num_ops, num_dense)
    numbers = [torch.randint(rows, (batch, bag)) for rows, bag in zip(model.num_rows, model.bags, strict=True)]
    values = (torch.rand(batch, len(model.heads)) < 0.5).float()
    return model, (torch.randn(batch, num_dense), values, *numbers), {}
