"""The weights of a module that are cut, found by running its forward pass on parts.

A product of a whole tensor with a weight cuts the weight's columns; one of a tensor that is cut along the inner
dimension, its rows. So a linear layer, or several that read the same tensor, whose result reaches another one through
pointwise functions, attention and views alone is cut by columns, and that one by rows. Where a function cannot run on
parts (a norm, a residual, a loss), the columns that its operand came from are not left cut: a large weight's result is
gathered at once, a small weight stays whole. Passes are repeated until nothing changes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gdp.models.pytorch.shards.alike_layers import AlikeLayers
from gdp.models.pytorch.shards.cuts import (
    SEQUENCE,
    AxisCut,
    columns_of,
    cut_of,
    divided,
    mark,
    of_segments,
    part,
    path_of,
    piece_of,
    segments_of,
)
from gdp.models.pytorch.shards.exchanges import RankExchanges
from gdp.models.pytorch.shards.experts import expert_weights, run_experts_locally
from gdp.models.pytorch.shards.given_styles import given_cuts
from gdp.models.pytorch.shards.local_run import LocalRun
from gdp.models.pytorch.shards.products import Product

_SMALL = 0.01  # of all parameters: weights whose products are repeated rather than gathered
_VOCABULARY = 16_384  # rows of a table or head from which tools cut it, whatever its part of a model is. Untuned
_MOST_PASSES = 32
_WIDENED = 2  # times as many columns as rows, from which the operand is gathered instead of the result summed up
_FILLED = 64  # rows of a rank from which a size that is no multiple is filled up: at most 1.6 % more


Pieces = tuple[tuple[int, int], ...]
"""The sizes of consecutive pieces of a dimension, and the number of parts of each."""


@dataclass(slots=True)
class Role:
    """The cut of a weight: along a dimension, in segments by where they begin."""

    dim: int
    num_parts: int
    size: int
    pieces: dict[int, Pieces] = field(default_factory=dict)
    is_experts: bool = False  # a rank runs with its own ones alone
    again: "Role | None" = None  # of its experts, over the ranks that have the same ones

    @property
    def segments(self) -> Pieces:
        """The sizes of pieces each of which is cut, and in how many parts."""
        segments, end = list[tuple[int, int]](), 0
        for start, pieces in sorted(self.pieces.items()):
            if start > end:
                segments.append((start - end, self.num_parts))
            segments += pieces
            end = sum(size for size, _ in segments)
        return (*segments, *([(self.size - end, self.num_parts)] if end < self.size else []))

    def cut_of(self, weight: Tensor, path: str) -> AxisCut:
        """Returns the cut of the whole `weight`."""
        cut = _cut(tuple(weight.shape), self.dim, self.segments, path)
        own = weight.narrow(self.dim, 0, weight.shape[self.dim] // self.num_parts)
        return cut if self.again is None else replace(cut, again=self.again.cut_of(own, path))


class CutPlan:
    """The roles of weights in a forward pass on parts, and what it has learned for the next one."""

    def __init__(self, model: nn.Module, num_ranks: int, num_expert_parts: int = 1) -> None:
        self.num_ranks, self.num_expert_parts = num_ranks, num_expert_parts
        self._experts = {} if num_expert_parts == 1 else expert_weights(model)
        copies = num_ranks // num_expert_parts
        self.of_experts = CutPlan(model, copies) if 1 < copies < num_ranks else None  # among ranks with the same ones
        self.weights = named = dict(model.named_parameters())
        self.given = given_cuts(model)
        self.num_parameters = sum(parameter.numel() for parameter in named.values())
        self._parameters: dict[int, tuple[str, Tensor] | None] = {}
        self._numels: dict[str, int] = {}
        self._paths = list(named)
        for path, parameter in named.items():
            memory = parameter.untyped_storage()._cdata
            self._parameters[memory] = None if memory in self._parameters else (path, parameter)
            self._numels[pattern_of(path)] = self._numels.get(pattern_of(path), 0) + parameter.numel()
        self.refused: dict[str, str] = {}  # by pattern: why a weight's columns are not left cut
        self.uneven: set[int] = set()  # numbers of tokens that ranks do not divide
        self.whole: dict[str, str] = {}  # by pattern: why a weight is not cut at all
        self._bounds: dict[str, tuple[int, ...]] = {}  # by pattern: the sizes of the segments of columns
        self._repeated: dict[str, dict[tuple[int, int], int]] = {}  # by pattern: parts, fewer than ranks, of columns
        self.begin()

    def begin(self) -> None:
        """Forgets the roles, before another pass."""
        if self.of_experts is not None:
            self.of_experts.begin()
        parts = self.num_expert_parts
        self.roles = {path: Role(0, parts, len(weight), is_experts=True) for path, weight in self._experts.items()}
        self.normed: set[str] = set()  # paths of weights whose columns have been summed up or averaged
        self.has_changed = False
        self._is_new: set[str] = set()  # patterns that have learned in this pass
        self._rows: dict[int, tuple[Tensor, str]] = {}

    @property
    def gathered(self) -> frozenset[str]:
        """The paths of weights whose results are gathered at once."""
        given = frozenset[str]() if self.given is None else self.given.gathered
        return given.union(path for path in self._paths if pattern_of(path) in self.refused)

    @property
    def repeated(self) -> dict[str, str]:
        """The heads of weights, by pattern, that are fewer than ranks: of keys, where others are with them."""
        found = dict[str, str]()
        for path, role in self.roles.items():
            count, is_fused = min(count for _, count in role.segments), len(role.segments) > 1
            if count < self.num_ranks and not role.is_experts:
                heads = f"{count} {'key ' * is_fused}head{'s' * (count > 1)}"
                found[pattern_of(path)] = f"{'has' if is_fused else 'is'} {heads}"
        return found

    def is_small(self, paths: frozenset[str]) -> bool:
        """Returns whether weights have a small part of all parameters, and none is that of a vocabulary."""
        own = {path: self.weights[path] for path in map(path_of, paths) if path in self.weights}
        if any(max(weight.shape) >= _VOCABULARY for weight in own.values()):
            return False
        patterns = set(map(pattern_of, own))
        return sum(self._numels.get(pattern, 0) for pattern in patterns) < _SMALL * self.num_parameters

    def extend(self, layers: AlikeLayers) -> None:
        """Gives the weights of all layers the roles of the one that stands for them."""
        for path in self._paths:
            if (role := self.roles.get(layers.representative(path))) is not None:
                self.roles[path] = role
        if self.of_experts is not None:
            self.of_experts.extend(layers)
            for path in self._experts.keys() & self.of_experts.roles.keys():
                self.roles[path].again = self.of_experts.roles[path]

    # What a pass tells

    def refuse(self, sources: frozenset[str], reason: str, *, is_result: bool = False) -> None:
        """Notes that a tensor made of the columns of these weights cannot stay cut."""
        for path in map(path_of, sources - {SEQUENCE}):
            is_known = pattern_of(path) in self.refused or pattern_of(path) in self._is_new
            if is_known or (is_result and not self.is_small(frozenset({path}))):
                continue
            self.refused[pattern_of(path)] = reason
            self.has_changed = True

    def repeat(self, sources: frozenset[str], num_parts: int) -> None:
        """Notes that columns of a weight are this number of heads, each of which several ranks have."""
        for source in sources - {SEQUENCE}:
            path, first, size = columns_of(source, self.weights[path_of(source)].numel())  # of all: more than there are
            known = self._repeated.setdefault(pattern_of(path), {})
            if known.get((first, first + size)) != num_parts:
                known[first, first + size] = num_parts
                self._is_new.add(pattern_of(path))
                self.has_changed = True

    def pieces(self, cut: AxisCut, first: int, size: int) -> frozenset[str]:
        """Returns the sources of some entries of a cut dimension."""
        sources = set[str]()
        for source in cut.sources:
            if path_of(source) in self.roles and len(self.roles[path_of(source)].pieces) == 1:
                path, start, width = columns_of(source, self.roles[path_of(source)].size)
                each = width // cut.shape[cut.dim]
                source = piece_of(path, start + first * each, size * each) if each else source
            sources.add(source)
        return frozenset(sources)

    def segment(self, cut: AxisCut, sizes: Sequence[int]) -> bool:
        """Notes that columns are segments, each to be cut; False where they cannot be."""
        sources = [source for source in cut.sources if path_of(source) in self.roles]
        total = sum(sizes)
        if not sources or cut.outer > 1 or total != cut.shape[cut.dim]:
            return False
        for source in sources:
            role = self.roles[path_of(source)]
            (size, *others) = {sum(size for size, _ in pieces) for pieces in role.pieces.values()} or {role.size}
            path, first, width = columns_of(source, size)
            if others or width % total:
                return False
            ends = first, *(width // total * size for size in sizes), size - first - width
            segments = divided(self._bounds.get(pattern_of(path), ()), [end for end in ends if end])
            if any(size % cut.num_parts for size in segments):
                return False
            if self._bounds.get(pattern_of(path)) != segments:
                self._bounds[pattern_of(path)] = segments
                self._is_new.add(pattern_of(path))
                self.has_changed = True
        return True

    # Decisions

    def choose(self, run: RankExchanges, product: Product, operands: list[Tensor]) -> list[Tensor]:
        """Returns the operands of a product with its weight cut, if it has one and that is to be."""
        found = [
            place
            for place, tensor in enumerate(operands)
            if place != product.bias and tensor.dim() > 1 and cut_of(tensor) is None and self._base(tensor)
        ]
        others = [place for place in range(len(operands)) if place != product.bias and place not in found]
        if len(found) != 1 or len(others) != 1:
            return operands
        (at,), (x_at,) = found, others
        weight, x = operands[at], operands[x_at]
        letters, cut = product.letters[at], cut_of(x)
        if self.given is not None:
            return self._as_given(run, product, operands, at, x_at)
        if cut is None or cut.num_parts == 1 or SEQUENCE in cut.sources:
            columns = [letter for letter in letters if letter in product.result and letter not in product.letters[x_at]]
            if columns:
                places = [letters.index(letter) for letter in columns]  # heads before their columns
                even = [place for place in places if weight.shape[place] % self.num_ranks == 0]
                operands[at] = self._column(weight, [*even, places[-1]][0])
            return operands
        letter = product.letters[x_at][cut.dim]
        widths = [size for each, size in zip(letters, weight.shape, strict=True) if each in product.result]
        is_wider = letter in letters and widths and widths[-1] > _WIDENED * cut.shape[cut.dim]
        if is_wider and self.normed.intersection(map(path_of, cut.sources)):
            operands[x_at] = run.refused(x, "is normalised and widened")  # sums are larger than what is gathered
            return operands
        if letter not in letters or letter in product.result or cut.num_parts < self.num_ranks or cut.counts:
            return operands
        base = self._base(weight)
        assert base is not None
        _, reader = self._rows.setdefault(id(x), (x, base[0]))
        if reader != base[0]:
            operands[x_at] = run.refused(x, f"is read by {reader} and {base[0]}")
            return operands
        operands[at] = self._cut_if(weight, letters.index(letter), _segments(cut))
        return operands

    def _as_given(
        self, run: RankExchanges, product: Product, operands: list[Tensor], at: int, x_at: int
    ) -> list[Tensor]:
        """Returns the operands with the weight cut as MODEL's own plan says, or whole for a whole operand."""
        weight, cut = operands[at], cut_of(operands[x_at])
        base = self._base(weight)
        assert base is not None
        assert self.given is not None
        path, parameter = base
        is_whole = cut is None or cut.num_parts == 1 or SEQUENCE in cut.sources
        if path not in self.given.dims:
            operands[x_at] = operands[x_at] if is_whole else run.whole(operands[x_at])
            self.whole.setdefault(pattern_of(path), "has no style")
            return operands
        stride = parameter.stride(self.given.dims[path])
        dim = next(place for place in range(weight.dim()) if weight.stride(place) == stride)
        if product.letters[at][dim] in product.result:
            operands[x_at] = operands[x_at] if is_whole else run.whole(operands[x_at])
            operands[at] = self._column(weight, dim)
        else:
            segments = ((weight.shape[dim], self.num_ranks),) if cut is None or is_whole else _segments(cut)
            operands[at] = self._cut_if(weight, dim, segments)
        return operands

    def _column(self, weight: Tensor, dim: int) -> Tensor:
        base = self._base(weight)
        assert base is not None
        path, size = base[0], weight.shape[dim]
        pattern = pattern_of(path)
        sizes = self._bounds.get(pattern, ())
        sizes = sizes if sum(sizes) == size else (size,)
        if path in self.roles:
            return self._cut_if(weight, dim, tuple((size, self.num_ranks) for size in sizes))
        if self.given is None and pattern in self.refused and self.is_small(frozenset({path})):
            self.whole.setdefault(pattern, self.refused[pattern])
            return weight
        known = sorted(
            self._repeated.get(pattern, {}).items(), key=lambda each: each[0][1] - each[0][0]
        )  # closest first
        parts = [
            next((parts for (first, last), parts in known if first <= start < last), self.num_ranks)
            for start in accumulate(sizes[:-1], initial=0)
        ]
        if max(parts) == 1 or (size % max(parts) and size < _FILLED * self.num_ranks):
            self.whole.setdefault(pattern, f"has {size if max(parts) > 1 else 'one head of'} columns")
            return weight
        return self._cut_if(weight, dim, tuple(zip(sizes, parts, strict=True)))

    def table(self, run: RankExchanges, weight: Tensor) -> Tensor:
        """Returns a table of a lookup, its rows cut if it is large."""
        base = self._base(weight)
        if base is None:
            return weight
        path = base[0]
        if self.given is not None:
            dim = self.given.dims.get(path)
            return weight if dim is None else self._cut_if(weight, dim, ((weight.shape[dim], self.num_ranks),))
        if path not in self.roles and (self.is_small(frozenset({path})) or weight.shape[0] < _FILLED):
            return weight
        return self._cut_if(weight, 0, ((weight.shape[0], self.num_ranks),))

    def cut_operand(self, y: Tensor, dim: int, cut: AxisCut, rows_of: Tensor | None = None) -> Tensor | None:
        """Returns a weight, such as a bias, or rows of one, cut as the tensor that it meets; None for other tensors."""
        base = self._base(y if rows_of is None else rows_of)
        return None if base is None else self._cut(y, dim, _segments(cut), base)

    def _cut_if(self, weight: Tensor, dim: int, segments: Pieces) -> Tensor:
        base = self._base(weight)
        assert base is not None
        cut = self._cut(weight, dim, segments, base)
        return weight if cut is None else cut

    def _cut(self, weight: Tensor, dim: int, segments: Pieces, base: tuple[str, Tensor]) -> Tensor | None:
        """Returns a whole weight, or a view or rows of it, cut along its dimension `dim`; None if it is cut otherwise.
        `base` is its path, and the parameter."""
        path, parameter = base
        places = [
            place
            for place, size in enumerate(parameter.shape)
            if size > 1 and parameter.stride(place) == weight.stride(dim)
        ]
        if len(places) != 1 or cut_of(parameter) is not None:
            return None
        (place,), num_parts = places, max(count for _, count in segments)
        role = self.roles.setdefault(path, Role(place, num_parts, parameter.shape[place]))
        if (role.dim, role.num_parts) != (place, num_parts):
            return None
        offset = weight.storage_offset() - parameter.storage_offset()
        start = offset // parameter.stride(place) % parameter.shape[place]
        segments = role.pieces.setdefault(start, segments)
        cut = _cut(tuple(weight.shape), dim, segments, path)
        return mark(part(weight, dim, num_parts, 0, cut.outer, cut.segments, cut.counts), cut)

    def _base(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Returns the path of the parameter that a tensor is, or is a view of, and the parameter."""
        return self._parameters.get(tensor.untyped_storage()._cdata)


def _cut(shape: tuple[int, ...], dim: int, segments: Pieces, path: str) -> AxisCut:
    sizes, counts = zip(*segments, strict=True)
    return of_segments(shape, dim, sizes, counts, frozenset({path}))


def _segments(cut: AxisCut) -> Pieces:
    sizes = segments_of(cut)
    return tuple(zip(sizes, cut.counts or (cut.num_parts,) * len(sizes), strict=True))


def pattern_of(path: str) -> str:
    """Returns what the weights of alike layers have in common."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def planned(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Any,
    num_ranks: int,
    *,
    by_tokens: bool,
    num_expert_parts: int = 1,
    layers: AlikeLayers | None = None,
) -> CutPlan:
    """Returns the plan of a module on fake tensors, found with one of alike layers; the others follow it.

    num_expert_parts: parts of the experts; ranks with the same part have columns of it each.
    """
    plan = CutPlan(model, num_ranks, num_expert_parts)
    run_experts_locally(model, num_expert_parts)
    layers = layers or AlikeLayers.of(model, args, kwargs)
    with layers.shortened():
        for _ in range(_MOST_PASSES):
            plan.begin()
            run = LocalRun(num_ranks, by_tokens=by_tokens, gathered=plan.gathered, plan=plan)
            with torch.no_grad(), run.running():
                output = model(*args, **kwargs)
            run.finished(output, keeps_cuts=False)
            if not (plan.has_changed or (plan.of_experts is not None and plan.of_experts.has_changed)):
                break
    plan.extend(layers)
    return plan
