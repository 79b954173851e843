"""Likeness of a graph to the built-in workloads: drawn graphs must not be their relatives.

Labels of ops are those of Weisfeiler and Lehman (1968), after RADIUS rounds: equal labels mean equal kinds of ops
within RADIUS steps, whatever the sizes of tensors. Updates and what nothing is connected to are left out. N ops.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdp.graph import Graph
from gdp.models.papers import PAPERS
from gdp.models.source import load

U64 = npt.NDArray[np.uint64]
RADIUS = 2
MAX_LIKENESS = 0.3
"""In common with a built-in workload. ViT and CLIP have 0.35 in common, other models of one origin more, unless they
have hardly an operator in common."""
_VARIANTS = 2  # of a family
_IN, _OUT, _SUMS = (
    np.array(number, np.uint64) for number in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
)


@dataclass(frozen=True, eq=False)
class BuiltIns:
    """The labels of the built-in workloads, by family."""

    labels: Mapping[str, U64]

    @classmethod
    def read(cls, families: Iterable[str] | None = None) -> BuiltIns:
        """Captures small variants of `families`, by default of all; later calls find them in the cache of graphs."""
        wanted = set(PAPERS.family_names() if families is None else families)
        names: dict[str, list[str]] = {}
        for variant in PAPERS.variants:
            if variant.family in wanted:
                names.setdefault(variant.family, []).append(variant.name)
        return cls(
            {
                family: np.concatenate([neighbourhoods(load(name)) for name in variants[:_VARIANTS]])
                for family, variants in names.items()
            }
        )

    def nearest(self, graph: Graph) -> tuple[str, float]:
        """Returns the family most like `graph`, and the larger of the shares that they have of each other's labels."""
        own = neighbourhoods(graph)
        shares = {
            family: max(float(np.isin(own, labels).mean()), float(np.isin(labels, own).mean()))
            for family, labels in self.labels.items()
        }
        family = max(shares, key=shares.__getitem__)
        return family, shares[family]


def neighbourhoods(graph: Graph) -> U64:
    """Returns the labels of the ops of the forward and backward pass that are connected to any."""
    names = map(" ".join, zip(graph.kinds, graph.phases, strict=True))
    labels = _mixed(np.array([zlib.crc32(name.encode()) for name in names], np.uint64))
    pairs = np.unique(graph.producers[graph.edge_tensors] * graph.num_ops + graph.consumers)
    sources, targets = pairs // graph.num_ops, pairs % graph.num_ops
    is_update = graph.is_in_phase("update")
    is_inner = ~(is_update[sources] | is_update[targets])
    sources, targets = sources[is_inner], targets[is_inner]
    for _ in range(RADIUS):
        above, below = np.zeros_like(labels), np.zeros_like(labels)
        np.add.at(above, targets, _mixed(labels[sources] + _IN))
        np.add.at(below, sources, _mixed(labels[targets] + _OUT))
        labels = _mixed(labels + _mixed(above + _IN) * _SUMS + _mixed(below + _OUT))
    connected: U64 = labels[np.unique(np.concatenate((sources, targets)))]
    return connected


def structure(graph: Graph) -> int:
    """Returns a number that graphs of the same labelled structure share; sizes of tensors do not change it."""
    labels, counts = np.unique(neighbourhoods(graph), return_counts=True)
    return zlib.crc32(labels.tobytes() + counts.tobytes())


def _mixed(values: U64) -> U64:
    """Returns well distributed bits (the finaliser of MurmurHash3, Appleby 2011); sums and products wrap around."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
