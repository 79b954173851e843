"""Steps of other batch sizes, from two that were captured: all figures of an op are linear in the number of samples.
Bytes and flops are a constant, for weights, plus something for each sample. Where a model is otherwise (experts that
are read or not), the step is near the truth, and is to be captured before it is answered with."""

from dataclasses import replace
from types import MappingProxyType
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
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in _FIGURES)
    figures: dict[str, Any] = {name: _between(x, one_samples, y, other_samples, samples) for name, x, y in pairs}
    known: dict[tuple[str, str], str] = {}
    for pair in dict.fromkeys(zip(one.shapes, other.shapes, strict=True)):
        known[pair] = interpolated_shapes(pair[0], one_samples, pair[1], other_samples, samples)
    figures["shapes"] = tuple(map(known.__getitem__, zip(one.shapes, other.shapes, strict=True)))
    if any(one.times_ns):
        tables = zip(one.times_ns, other.times_ns, strict=True)
        figures["times_ns"] = tuple(
            MappingProxyType(
                {
                    where: time_between((one_samples, ns), (other_samples, high[where]), samples)
                    for where, ns in low.items()
                    if where in high
                }
            )
            for low, high in tables
        )
    return replace(one, **figures)


def time_between(one: tuple[int, int], other: tuple[int, int], samples: int) -> int:
    """Returns the ns of an op with `samples`, on the line through two (samples, ns), rounded up; -1 stays. Beyond both
    it is between no growth and growth in proportion from the nearer one, whatever noise says of the slope."""
    (low, low_ns), (high, high_ns) = sorted((one, other))
    if min(low_ns, high_ns) < 0:
        return -1
    time_ns = low_ns - (low_ns - high_ns) * (samples - low) // (high - low)
    if low <= samples <= high:
        return time_ns
    near, near_ns = (low, low_ns) if samples < low else (high, high_ns)
    least, most = sorted((near_ns, -(-near_ns * samples // near)))
    return min(max(time_ns, least), most)


def _between(one: I64, one_samples: int, other: I64, other_samples: int, samples: int) -> I64:
    """Returns the values at `samples` of the lines through two points each; exact integers, at least 0."""
    width = other_samples - one_samples
    slope, rest = np.divmod(other - one, width)  # in whole bytes a sample, and what is left
    away = samples - one_samples
    return np.asarray(np.maximum(one + slope * away - (-rest * away // width), 0), np.int64)
