"""Steps of other batch sizes, from two that were captured: all figures of an op are linear in the number of samples.

Bytes and flops are a constant, for weights, plus something for each sample. Where a model is otherwise (experts that
are read or not), the step is near the truth, and is to be captured before it is answered with.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from gdp.arrays import I64
from gdp.graph import Graph
from gdp.graph.shapes import interpolated_shapes

_FIGURES = ("flops", "bytes_accessed", "resident_bytes", "tensor_bytes")


def have_same_ops(one: Graph, other: Graph) -> bool:
    """Returns whether two steps have the same ops and tensors, whatever their sizes."""
    return (
        one.op_names == other.op_names
        and one.kinds == other.kinds
        and one.dtypes == other.dtypes
        and all(
            np.array_equal(getattr(one, name), getattr(other, name))
            for name in ("groups", "producers", "view_of", "consumer_offsets", "consumers")
        )
    )


def interpolated(one: Graph, one_samples: int, other: Graph, other_samples: int, samples: int) -> Graph:
    """Returns the step of `samples` samples, from two steps with the same ops; fractions are rounded up."""
    figures: dict[str, Any] = {
        name: _between(getattr(one, name), one_samples, getattr(other, name), other_samples, samples)
        for name in _FIGURES
    }
    known: dict[tuple[str, str], str] = {}
    for pair in dict.fromkeys(zip(one.shapes, other.shapes, strict=True)):
        known[pair] = interpolated_shapes(pair[0], one_samples, pair[1], other_samples, samples)
    figures["shapes"] = tuple(map(known.__getitem__, zip(one.shapes, other.shapes, strict=True)))
    return replace(one, **figures)


def _between(one: I64, one_samples: int, other: I64, other_samples: int, samples: int) -> I64:
    """Returns the values at `samples` of the lines through two points each; exact integers, at least 0."""
    width = other_samples - one_samples
    slope, rest = np.divmod(other - one, width)  # in whole bytes a sample, and what is left
    away = samples - one_samples
    return np.asarray(np.maximum(one + slope * away - (-rest * away // width), 0), np.int64)
