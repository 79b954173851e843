"""Pieces: tensors that are cut over replicas, and which elements of each weight a replica owns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gdp.execute.layouts.cut import Cut, RingPlaces, Span
from gdp.models.pytorch.strides import StridedLayout


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor that is cut over replicas: the tensors and their elements [R]."""

    tensors: tuple[int, ...]
    spans: tuple[Span, ...]
    layout: StridedLayout  # of the whole, which is dense

    def joined(self, held: Mapping[int, Tensor]) -> Tensor:
        """Returns the whole, on the CPU."""
        ordered = sorted(zip(self.spans, self.tensors, strict=True))
        row = torch.cat(
            [held[tensor].to("cpu") for (first, last), tensor in ordered if last > first] or [torch.empty(0)]
        )
        return row.as_strided(self.layout.size, self.layout.stride)


@dataclass(frozen=True, eq=False)
class Ownership:
    """The elements of weights that each replica updates."""

    places: RingPlaces
    _spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)  # by weight, of each chunk

    def __contains__(self, weight: int) -> bool:
        return weight in self._spans

    def cut(self, weight: int, spans: tuple[Span, ...]) -> None:
        """Cuts a weight, unless it is cut already: all replicas cut alike."""
        self._spans.setdefault(weight, spans)

    def piece(self, weight: int, replica: int) -> Span:
        """Returns the elements of a weight that a replica owns."""
        return self._spans[weight][self.places.owned(replica)]

    def gathered(self, weights: Sequence[int], item_sizes: Sequence[int]) -> Cut:
        """Returns the cut of a buffer in which all pieces come together; items of each weight's elements."""
        return Cut(
            tuple(
                tuple((first * size, last * size) for first, last in self._spans[weight])
                for weight, size in zip(weights, item_sizes, strict=True)
            )
        )
