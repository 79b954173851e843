"""AmoebaNet-A. Source: Real et al. 2019 (arXiv 1802.01548), figure 5; details from the authors' TPU release. Three
stacks of normal cells, a reduction cell before the second and third, and two reduction cells in the stem. The input of
a cell is the outputs of the two cells before it."""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError
from gdp.models.papers.base import Classifier, Example, ModelConfig, random_images


@dataclass(frozen=True, slots=True)
class AmoebaNetConfig(ModelConfig):
    """Sizes of the model (the paper's N and F; N = 6, F = 190 has 86.7M parameters) and of one batch."""

    batch_size: int
    cells_per_stack: int = 6
    filters: int = 80
    image_size: int = 331
    num_classes: int = 1000
    stem_filters: int = 32
    dropout: float = 0.5

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.filters < 16:
            raise InputError(f"{type(self).__name__}: filters is {self.filters}; at least 16 is expected")


@dataclass(frozen=True, slots=True)
class CellPlan:
    """A cell: ten operations in pairs, each on an earlier state (0 and 1 are the inputs), and the output states."""

    operations: str  # names, for `make_operation`
    sources: tuple[int, ...]
    outputs: tuple[int, ...]


_NORMAL = "average maximum separable_3 identity identity average separable_3 separable_5 average separable_3"
NORMAL_CELL = CellPlan(_NORMAL, (0, 0, 1, 1, 0, 1, 0, 2, 5, 0), (1, 3, 4, 6))
_REDUCTION = "separable_3 average maximum separable_7 maximum maximum separable_3 row_column_7 average separable_7"
REDUCTION_CELL = CellPlan(_REDUCTION, (1, 0, 0, 2, 1, 0, 4, 0, 1, 0), (2, 3, 4, 5, 6))

batch_norm = partial(nn.BatchNorm2d, eps=0.001)  # the release's batch_norm_epsilon


class Pointwise(nn.Module):
    """Rectifier, 1 x 1 convolution, batch normalisation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm = batch_norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(functional.relu(x)))


class FactorizedReduction(nn.Module):
    """Half the resolution without losing every other pixel: two strided 1 x 1 paths, one shifted by a pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = batch_norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(x)
        shifted = functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat((self.even(x), self.odd(shifted)), dim=1))


class Separable(nn.Module):
    """Twice: rectifier, depthwise-separable convolution, batch normalisation; the first may have a stride."""

    def __init__(self, filters: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.depthwise, self.pointwise, self.norms = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for step in (stride, 1):
            self.depthwise.append(nn.Conv2d(filters, filters, kernel, step, kernel // 2, groups=filters, bias=False))
            self.pointwise.append(nn.Conv2d(filters, filters, 1, bias=False))
            self.norms.append(batch_norm(filters))

    def forward(self, x: Tensor) -> Tensor:
        for depthwise, pointwise, norm in zip(self.depthwise, self.pointwise, self.norms, strict=True):
            x = norm(pointwise(depthwise(functional.relu(x))))
        return x


class RowColumn(nn.Module):
    """A 1 x 7 and a 7 x 1 convolution between two 1 x 1 ones, on a quarter of the channels; each is normalised."""

    def __init__(self, filters: int, stride: int) -> None:
        super().__init__()
        inner = filters // 4
        self.reduce = Pointwise(filters, inner)
        self.row = nn.Conv2d(inner, inner, (1, 7), (1, stride), (0, 3), bias=False)
        self.row_norm = batch_norm(inner)
        self.column = nn.Conv2d(inner, inner, (7, 1), (stride, 1), (3, 0), bias=False)
        self.column_norm = batch_norm(inner)
        self.expand = Pointwise(inner, filters)

    def forward(self, x: Tensor) -> Tensor:
        x = self.row_norm(self.row(functional.relu(self.reduce(x))))
        return self.expand(self.column_norm(self.column(functional.relu(x))))


class CellPool(nn.Module):
    """3 x 3 average or maximum."""

    def __init__(self, kind: str, stride: int) -> None:
        super().__init__()
        self.kind, self.stride = kind, stride

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "maximum":
            return functional.max_pool2d(x, 3, self.stride, 1)
        return functional.avg_pool2d(x, 3, self.stride, 1, count_include_pad=False)


def make_operation(name: str, filters: int, stride: int) -> nn.Module:
    """Returns the module for a name in a `CellPlan`."""
    if name == "identity":
        return nn.Identity()
    if name == "row_column_7":
        return RowColumn(filters, stride)
    if name.startswith("separable"):
        return Separable(filters, int(name[-1]), stride)
    return CellPool(name, stride)


class Cell(nn.Module):
    """The output of the last cell and of the one before it -> [batch, len(outputs) * filters, ...]."""

    def __init__(self, plan: CellPlan, last: int, before: int, filters: int, stride: int, *, halve: bool) -> None:
        super().__init__()
        self.plan = plan
        self.fit_last = Pointwise(last, filters)
        self.fit_before = FactorizedReduction(before, filters) if halve else Pointwise(before, filters)
        pairs = zip(plan.operations.split(), plan.sources, strict=True)
        self.operations = nn.ModuleList(make_operation(x, filters, stride if at < 2 else 1) for x, at in pairs)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states = [self.fit_last(last), self.fit_before(before)]
        results: list[Tensor] = []
        for operation, source in zip(self.operations, self.plan.sources, strict=True):
            results.append(operation(states[source]))
            if len(results) == 2:
                states.append(results.pop() + results.pop())
        return torch.cat([states[number] for number in self.plan.outputs], dim=1)


class RectifiedClassifier(Classifier):
    """A rectifier before the classifier."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return super().forward(functional.relu(features), labels)


class AmoebaNet(nn.Module):
    """Images [batch, 3, size, size] and labels [batch] -> mean cross-entropy."""

    normal_cell, reduction_cell = NORMAL_CELL, REDUCTION_CELL

    def __init__(self, config: AmoebaNetConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, config.stem_filters, 3, stride=2, padding=1, bias=False), batch_norm(config.stem_filters)
        )
        filters = config.filters
        cells = [(self.reduction_cell, filters // 4), (self.reduction_cell, filters // 2)]
        for width in (filters, 2 * filters, 4 * filters):
            cells += [(self.reduction_cell, width)] * (width > filters)
            cells += [(self.normal_cell, width)] * config.cells_per_stack
        self.cells = nn.ModuleList()
        last = before = config.stem_filters
        halve = False  # is the output before the last twice as large?
        for plan, width in cells:
            stride = 2 if plan is self.reduction_cell else 1
            self.cells.append(Cell(plan, last, before, width, stride, halve=halve))
            last, before, halve = len(plan.outputs) * width, last, stride == 2
        self.classifier = RectifiedClassifier(last, config.num_classes, config.dropout)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        last = before = self.stem(images)
        for cell in self.cells:
            last, before = cell(last, before), last
        return self.classifier(last, labels)


def build(config: AmoebaNetConfig) -> Example:
    """The model with one batch of random images."""
    return AmoebaNet(config), random_images(config.batch_size, config.image_size, config.num_classes), {}
