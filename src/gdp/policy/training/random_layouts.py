"""Layouts to train on: replicas, micro-batches, optimizer state that is cut, blocks that are recomputed."""

import numpy as np

from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.layout import BLOCKS, NONE, Layout
from gdp.parallel.step import Step

_MICROBATCHES = (1, 2, 3, 4, 8)
_UNEVEN_SHARE = 0.3  # of layouts with several replicas: the first ones have a micro-batch more
_ZERO = (0, 0, 1, 2, 3)
_RECOMPUTED_SHARE = 0.25


def draw_layout(rng: np.random.Generator, num_devices: int, max_parts: int) -> Layout:
    """Draws a layout of at most `max_parts` copies of a model, and of at most a replica for each device."""
    data = int(rng.integers(1, min(num_devices, max(max_parts, 1)) + 1))
    most = max(max_parts // data, 1)
    each = int(rng.choice([count for count in _MICROBATCHES if count <= most]))
    counts = [each] * data
    if data > 1 and each < most and rng.random() < _UNEVEN_SHARE:
        first = int(rng.integers(1, data))
        counts[:first] = [each + 1] * first
    zero = int(rng.choice(_ZERO)) if data > 1 else 0
    recompute = BLOCKS if rng.random() < _RECOMPUTED_SHARE else NONE
    return Layout(tuple(counts), zero if len(set(counts)) == 1 else min(zero, 2), recompute)


def step_in(graph: Graph, layout: Layout) -> Graph:
    """Returns the step of `layout` from that of one micro-batch; `graph` itself where the layout does not suit it."""
    try:
        return Step.of(graph, layout).graph
    except InputError:  # it has replicas or micro-batches already, or no blocks
        return graph
