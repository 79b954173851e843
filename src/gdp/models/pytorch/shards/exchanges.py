"""Tensors of a rank as work needs them: whole, a part, or summed up, each made once and by an exchange if need be."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from gdp.models.pytorch.shards.collectives import Enter, Gather, Leave, Own, Scatter, Term
from gdp.models.pytorch.shards.cuts import (
    ATTRIBUTE,
    SEQUENCE,
    AxisCut,
    cut_of,
    local_sizes,
    mapped,
    mark,
    part,
    tensors_in,
)

_RUNS: list["RankExchanges"] = []  # the innermost last
_parts = [0]  # that random numbers are drawn for, the innermost last


def current_run() -> "RankExchanges | None":
    """Returns the rank whose forward pass runs; None outside of one."""
    return _RUNS[-1] if _RUNS else None


def drawn_part() -> int:
    """Returns the part of a cut tensor that random numbers are drawn for; 0 of a whole one."""
    return _parts[-1]


class RankExchanges(TorchFunctionMode):
    """A rank of `num_ranks`; `plan` decides on weights, and is None once they are cut. With `context` ranks have whole
    weights, and tokens of their own in all layers. Cuts are those of `attribute`; other ranks may cut parts again."""

    context = False
    has_experts = False  # of its own, besides tokens
    attribute = ATTRIBUTE

    def __init__(self, num_ranks: int, rank: int = 0, *, by_tokens: bool = False, gathered: frozenset[str], plan: Any):
        super().__init__()
        self.num_ranks, self.rank, self.by_tokens = num_ranks, rank, by_tokens
        self.gathered, self.plan = gathered, plan
        self.is_off = False
        self._once: dict[tuple[Any, ...], tuple[Tensor, Any]] = {}
        self._sources: dict[int, tuple[Tensor, Tensor, tuple[int, ...]]] = {}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Runs code on the parts of this rank inside, as if they were whole."""
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = False

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Runs modules on the parts of this rank inside, which other ranks may cut again."""
        _RUNS.remove(self)
        try:
            with self.off():
                yield
        finally:
            _RUNS.append(self)

    def chosen(self, product: Any, operands: list[Tensor]) -> list[Tensor]:
        """Returns the operands of a product as this rank has them."""
        return operands if self.plan is None else self.plan.choose(self, product, operands)

    def applied(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a function of parts of this rank, which other ranks may cut again."""
        if self.attribute == ATTRIBUTE:
            return func(*args, **kwargs)
        return handle_torch_function(func, (args[0],), *args, **kwargs)

    def of_part(self, cut: AxisCut, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a function of parts, whose random numbers are those of this rank's part."""
        _parts.append(_parts[-1] * cut.num_parts + self.own_part(cut))
        try:
            return func(*args, **kwargs)
        finally:
            _parts.pop()

    def kept(self, key: tuple[Any, ...], tensor: Tensor, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned the first time for this tensor."""
        key = (*key, id(tensor), tensor._version)
        if key not in self._once:
            self._once[key] = tensor, make()
        return self._once[key][1]

    def is_summed(self, x: Tensor) -> bool:
        """Returns whether partial results have been summed up already."""
        return ("sum", id(x), x._version) in self._once

    def entered(self, x: Tensor) -> Tensor:
        """Returns a whole tensor for cut work: the same one for all its readers."""
        cut = cut_of(x)
        if not (x.requires_grad and torch.is_grad_enabled()) or (cut is not None and cut.num_parts == 1):
            return x
        result = self.kept(("enter",), x, lambda: self.applied(Enter.apply, x, self.num_ranks))
        result._is_param = isinstance(x, nn.Parameter)
        return result

    def for_parts(self, cuts: Sequence[AxisCut], make: Callable[[], Any]) -> Any:
        """Returns what `make` makes of whole tensors for cut work, for cut work, too."""
        result, sources = make(), frozenset().union(*(cut.sources for cut in cuts))
        for tensor in tensors_in(result):
            mark(tensor, AxisCut(tuple(tensor.shape), 0, 1, sources=sources))
        return result

    def is_entered(self, x: Tensor) -> bool:
        """Returns whether a tensor is one for cut work already."""
        return ("enter", id(x), x._version) in self._once

    def rows_of(self, x: Tensor) -> Tensor | None:
        """Returns the parameter whose rows a tensor has been looked up from, if it has."""
        found = self._once.get(("rows", id(x), x._version))
        return None if found is None else found[1]

    def term(self, x: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor that is added to partial results."""
        return self.kept(("term",), x, lambda: Term.apply(x, self.num_ranks))

    def for_cut_work(self, x: Tensor) -> Tensor:
        """Returns the whole of a tensor for cut work; views and rows that are taken from it are for cut work, too."""
        x = self.summed(x)
        cut = cut_of(x)
        if cut is None:
            result = self.entered(x)
        elif (found := self.source(x)) is not None:
            source = self.for_cut_work(found[0])
            result = self.expanded(source.expand(found[1]).reshape(cut.shape), source, found[1])
        else:
            result = self.whole(x, is_summed=True)
        return self.kept(("enter",), result, lambda: result)

    def expanded(self, x: Tensor, source: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Notes what a tensor has been expanded from, to a whole `shape`, before a view, so that no copies are
        exchanged."""
        self._sources[id(x)] = x, source, shape
        return x

    def source(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
        """Returns what a tensor has been expanded from, and to which whole shape."""
        return None if id(x) not in self._sources else self._sources[id(x)][1:]

    def summed(self, x: Tensor, *, is_whole: bool = False) -> Tensor:
        """Returns the sum of the partial results of all ranks, with tokens cut; others stay as they are."""
        cut = cut_of(x)
        if cut is None or not cut.is_partial:
            return x
        dim = max(x.dim() - 2, 0)
        is_uneven = x.dim() > 1 and x.shape[dim] % self.num_ranks > 0
        if is_uneven and not is_whole and self.by_tokens and self.plan is not None and x.dim() > 2:
            self.plan.uneven.add(x.shape[dim])
        if not self.by_tokens or is_whole or x.dim() < 2 or is_uneven:
            return self.kept(("sum",), x, lambda: self.applied(Leave.apply, x, self.num_ranks))
        tokens = AxisCut(cut.shape, dim, self.num_ranks, sources=frozenset({SEQUENCE}))
        return self.kept(("sum",), x, lambda: mark(Scatter.apply(x, dim, self.num_ranks), tokens))

    def whole(self, x: Tensor, *, is_summed: bool = False) -> Tensor:
        """Returns the whole of a cut tensor; `is_summed`: for cut work."""
        cut = cut_of(x)
        if cut is None:
            return x
        if cut.is_partial:
            return self.summed(x, is_whole=True)
        return self.kept(("whole", is_summed), x, lambda: self._gathered(x, cut, is_summed))

    def _gathered(self, x: Tensor, cut: AxisCut, is_summed: bool) -> Tensor:
        if cut.segments:
            pieces = x.split(local_sizes(cut), cut.dim)
            shape = list(cut.shape)
            wholes = []
            counts = cut.counts or (cut.num_parts,) * len(pieces)
            for piece, size, count in zip(pieces, cut.segments, counts, strict=True):
                shape[cut.dim] = size
                wholes.append(self._gathered(piece, AxisCut(tuple(shape), cut.dim, count), is_summed))
            return torch.cat(wholes, cut.dim)
        result: Tensor = self.applied(Gather.apply, x, cut.dim, cut.outer, self.num_ranks, self.rank, is_summed)
        copies = self.num_ranks // cut.num_parts
        if copies > 1:
            apart = result.unflatten(cut.dim, (cut.num_parts, copies, x.shape[cut.dim]))
            result = apart.select(cut.dim + 1, 0).flatten(cut.dim, cut.dim + 1)
        return result if result.shape[cut.dim] == cut.shape[cut.dim] else result.narrow(cut.dim, 0, cut.shape[cut.dim])

    def own(self, y: Tensor, dim: int, cut: AxisCut) -> Tensor:
        """Returns this rank's part of a whole tensor that meets one with a `cut` at the size of its dimension `dim`."""
        dim %= y.dim()
        is_by_token = self.plan is None or SEQUENCE in cut.sources  # weights such as positions stay whole
        planned = None if is_by_token else self.plan.cut_operand(y, dim, cut, self.rows_of(y))
        if planned is not None:
            return planned
        of_y = replace(cut, shape=tuple(y.shape), dim=dim)

        def make() -> Tensor:
            source, shape = self.source(y) or (y, ())
            if shape == y.shape and source.shape[dim] == 1 and y.shape[dim] % cut.num_parts == 0:
                size = y.shape[dim] // cut.num_parts
                return self.entered(source).expand(*y.shape[:dim], size, *y.shape[dim + 1 :])
            is_even = cut.num_parts == self.num_ranks and not cut.segments and y.shape[dim] % cut.num_parts == 0
            if is_even and y.requires_grad and torch.is_grad_enabled() and not self.is_entered(y):
                return self.applied(Own.apply, y, dim, cut.outer, self.num_ranks, self.rank)
            return part(self.entered(y), dim, cut.num_parts, self.own_part(cut), cut.outer, cut.segments, cut.counts)

        key = "own", dim, cut.outer, cut.num_parts, cut.segments, cut.counts
        return self.kept(key, y, lambda: mark(make(), of_y))

    def own_part(self, cut: AxisCut) -> int:
        """Returns which part is this rank's."""
        return self.rank * cut.num_parts // self.num_ranks

    def refused(self, x: Tensor, reason: str, *, is_result: bool = False) -> Tensor:
        """Returns the whole of a tensor that a function cannot have in parts, and tells the plan."""
        cut = cut_of(x)
        if cut is not None and self.plan is not None and not cut.is_partial:
            self.plan.refuse(cut.sources, reason, is_result=is_result)
        return self.whole(x)

    def on_wholes(self, reason: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on whole tensors, and tells the plan why."""
        args, kwargs = mapped((args, kwargs), lambda tensor: self.refused(tensor, reason))
        return func(*args, **kwargs)
