"""NASNet-A: AmoebaNet's network with the cells of Zoph et al. 2017 (arXiv 1707.07012), figure 4; details from the
TensorFlow-Slim release.
"""

from dataclasses import dataclass

from gdp.models.papers.amoebanet import AmoebaNet, AmoebaNetConfig, CellPlan
from gdp.models.papers.base import Example, random_images

NORMAL_CELL = CellPlan(
    "separable_5 separable_3 separable_5 separable_3 average identity average average separable_3 identity",
    (0, 1, 1, 1, 0, 1, 1, 1, 0, 0),
    (1, 2, 3, 4, 5, 6),
)
REDUCTION_CELL = CellPlan(
    "separable_5 separable_7 maximum separable_7 average separable_5 identity average separable_3 maximum",
    (0, 1, 0, 1, 0, 1, 3, 2, 2, 0),
    (3, 4, 5, 6),
)


@dataclass(frozen=True, slots=True)
class NASNetConfig(AmoebaNetConfig):
    """Sizes of the model (NASNet-A (6 @ 4032): N = 6 cells a stack, 4032 / 24 filters) and of one batch."""

    filters: int = 168
    stem_filters: int = 96


class NASNet(AmoebaNet):
    """Images [batch, 3, size, size] and labels [batch] -> mean cross-entropy."""

    normal_cell, reduction_cell = NORMAL_CELL, REDUCTION_CELL


def build(config: NASNetConfig) -> Example:
    """The model with one batch of random images."""
    return NASNet(config), random_images(config.batch_size, config.image_size, config.num_classes), {}
