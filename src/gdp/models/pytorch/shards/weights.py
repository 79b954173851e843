"""Functions of weights: products, attention, tables and losses of cut tensors."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gdp.models.pytorch.shards import products
from gdp.models.pytorch.shards.collectives import Repeated, ops
from gdp.models.pytorch.shards.cuts import (
    PARTIAL,
    SEQUENCE,
    AxisCut,
    cut_of,
    cuts_in,
    local_sizes,
    mapped,
    mark,
    whole_shape,
)
from gdp.models.pytorch.shards.exchanges import RankExchanges
from gdp.models.pytorch.shards.parts import Rule, aligned

_MEAN, _SUM = 1, 2  # `reduction` of `cross_entropy_loss`


def _product(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    product = products.read(name, args, kwargs)
    if product is None:
        return run.on_wholes(f"is multiplied by {name}", func, args, kwargs)
    operands = run.chosen(product, list(product.operands))
    for at, tensor in enumerate([] if run.context else operands):  # tokens come together where columns are cut
        cut = cut_of(tensor)
        others = [other for place, other in enumerate(map(cut_of, operands)) if other is not None and place != at]
        if cut is not None and SEQUENCE in cut.sources and others:
            operands[at] = run.for_cut_work(tensor)
    cuts = [cut for cut in map(cut_of, operands) if cut is not None]
    if not cuts:
        return product.call(func, operands)
    lead = max(cuts, key=lambda cut: cut.num_parts)
    if lead.num_parts == 1:
        return run.for_parts(cuts, lambda: product.call(func, list(map(run.entered, operands))))
    letter = next(
        letters[cut.dim] for letters, cut in zip(product.letters, map(cut_of, operands), strict=True) if cut is lead
    )
    is_sum = letter not in product.result
    if not _agree(product.letters, operands, letter, lead) or (
        is_sum and (lead.counts or lead.num_parts < run.num_ranks or product.is_scaled)
    ):
        cut_operands = [run.refused(tensor, f"is multiplied by {name} with another cut") for tensor in operands]
        return product.call(func, cut_operands)
    for at, (letters, tensor) in enumerate(zip(product.letters, operands, strict=True)):
        cut = cut_of(tensor)
        if letter not in letters:
            operands[at] = run.entered(tensor) if not (is_sum and at == product.bias) else tensor
        elif cut is None:
            operands[at] = run.own(tensor, letters.index(letter), lead)
        elif _is_weight(tensor) and tensor.requires_grad and _is_repeated(cut, run.num_ranks):
            sizes = local_sizes(cut) if cut.counts else [tensor.shape[cut.dim]]
            counts = cut.counts or (cut.num_parts,)
            operands[at] = Repeated.apply(tensor, cut.dim, sizes, counts, run.num_ranks, run.rank)
        elif cut.num_parts < lead.num_parts:
            operands[at] = aligned(run, tensor, lead, len(letters) - letters.index(letter))
    sources = frozenset().union(*(cut.sources for cut in cuts))
    if is_sum:
        bias = operands[product.bias] if product.bias is not None else None
        is_flat = run.by_tokens and len(product.result) == 2  # to be viewed by sequence before tokens are cut
        if product.bias is not None and is_flat:  # a part of it is in the summand of each rank
            operands[product.bias], bias = run.entered(operands[product.bias]) / run.num_ranks, None
        result = product.call(func, operands, with_bias=is_flat)
        result = mark(result, AxisCut(tuple(result.shape), PARTIAL, run.num_ranks, sources=sources))
        if bias is None:
            return result
        total = run.summed(result)
        with run:
            return total + bias
    result = product.call(func, operands)
    dim = product.result.index(letter)
    shape = [*result.shape[:dim], lead.shape[lead.dim], *result.shape[dim + 1 :]]
    mark(result, replace(lead, shape=tuple(shape), dim=dim, sources=sources))
    return run.whole(result) if sources & run.gathered else result


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (tensor._is_view() and isinstance(tensor._base, nn.Parameter))


def _is_repeated(cut: AxisCut, num_ranks: int) -> bool:
    return min(cut.counts or (cut.num_parts,)) < num_ranks


def _agree(letters: Sequence[str], operands: Sequence[Tensor], letter: str, lead: AxisCut) -> bool:
    """Returns whether all cuts of operands are those of this letter."""
    for text, cut in zip(letters, map(cut_of, operands), strict=True):
        if cut is None or cut.num_parts == 1:
            continue
        if text[cut.dim] != letter or (cut.outer, cut.segments, cut.counts) != (lead.outer, lead.segments, lead.counts):
            return False
    return True


def _attention(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    query, key, value = args[:3] if len(args) > 2 else (kwargs.pop(part) for part in ("query", "key", "value"))
    rest = list(args[3:])
    triple = []
    for tensor in (query, key, value):
        cut = cut_of(tensor)
        is_by_head = cut is None or (cut.dim == len(cut.shape) - 3 and cut.outer == 1 and not cut.segments)
        if cut is None or is_by_head or cut.num_parts == 1:
            pass
        elif cut.shape[-3] == 1 and run.plan is not None:
            run.plan.repeat(cut.sources, 1)
            tensor = run.whole(tensor)
        else:
            tensor = run.refused(tensor, "is cut otherwise than by heads in attention")
        triple.append(tensor)
    lead = next((cut for cut in map(cut_of, triple) if cut is not None and cut.num_parts == run.num_ranks), None)
    if lead is None:
        return run.on_wholes("has fewer heads than ranks", func, (*triple, *rest), kwargs)
    heads = whole_shape(triple[0])[-3]
    parts = []
    for tensor in triple:
        cut, count = cut_of(tensor), whole_shape(tensor)[-3]
        if cut is None and count > 1:
            num_parts = run.num_ranks if count % run.num_ranks == 0 else count
            if run.num_ranks % num_parts:
                return run.on_wholes("attends in groups that ranks share", func, (*triple, *rest), kwargs)
            tensor = run.own(tensor, -3, AxisCut(tuple(tensor.shape), tensor.dim() - 3, num_parts))
        elif cut is None:
            tensor = run.entered(tensor)
        elif cut.num_parts < run.num_ranks and count == heads:
            tensor = aligned(run, tensor, lead, 3)
        parts.append(tensor)
    lead = cut_of(parts[0])
    assert lead is not None
    rest, kwargs = mapped((rest, kwargs), lambda tensor: aligned(run, tensor, lead, 3))
    shape = (*whole_shape(triple[0])[:-1], whole_shape(triple[2])[-1])
    sources = frozenset().union(*(cut.sources for cut in map(cut_of, triple) if cut is not None))
    result = run.of_part(lead, func, *parts, *rest, **kwargs)
    return mark(result, AxisCut(shape, len(shape) - 3, run.num_ranks, sources=sources))


def _embedding(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    table, ids = args[:2]
    if run.plan is not None and cut_of(table) is None:
        table = run.plan.table(run, table)
    cut = cut_of(table)
    if cut is not None and cut.dim == 1 and cut_of(ids) is None:
        result = func(table, *args[1:], **kwargs)
        return mark(result, replace(cut, shape=(*result.shape[:-1], cut.shape[1]), dim=result.dim() - 1))
    if cut is None or cut.dim != 0 or cut_of(ids) is not None or cut.outer > 1:
        if not cuts_in((args, kwargs)):
            return func(*args, **kwargs)
        return run.on_wholes("is a table", func, (table, *args[1:]), kwargs)
    rows = table.shape[0]
    first = run.rank * rows
    is_other = (ids < first) | (ids >= first + rows)
    places = (ids - first).masked_fill(is_other, 0)
    padding = args[2] - first if len(args) > 2 and 0 <= args[2] - first < rows else -1
    result = func(table, places, padding).masked_fill(is_other.unsqueeze(-1), 0)
    return mark(result, AxisCut(tuple(result.shape), PARTIAL, run.num_ranks, sources=cut.sources))


def _cross_entropy(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    logits, target, options = read_loss(args, kwargs)
    cut = cut_of(logits)
    is_plain = options["weight"] is None and not options["label_smoothing"] and not target.is_floating_point()
    is_small = run.plan is not None and cut is not None and run.plan.is_small(cut.sources)
    if cut is None or cut.dim != 1 or len(cut.shape) < 2 or not is_plain or cut_of(target) is not None or is_small:
        return run.on_wholes("is read by a loss", func, args, kwargs)
    scores = logits.movedim(1, -1).flatten(0, -2) if logits.dim() > 2 else logits
    classes, ignored = target.flatten(), options["ignore_index"]
    if any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")):  # as the whole step's is
        scores = scores.float()
    losses: Tensor = _Losses.apply(scores, classes, cut.shape[1], run.num_ranks, run.rank, ignored)
    if options["reduction"] == _MEAN:
        return losses.sum() / (classes != ignored).sum()
    return losses.sum() if options["reduction"] == _SUM else losses.view(target.shape)


class _Losses(torch.autograd.Function):
    """The loss of each token, of which no rank has all scores; 0 for tokens that are ignored."""

    @staticmethod
    def forward(
        context: Any, logits: Tensor, target: Tensor, num_classes: int, num_ranks: int, rank: int, ignored: int
    ) -> Tensor:
        width = logits.shape[1]
        first = rank * width
        if num_ranks * width > num_classes:  # the filling; all ranks have the same ops
            logits = logits.masked_fill(torch.arange(first, first + width) >= num_classes, -torch.inf)
        largest = ops.all_reduce.max(logits.amax(1), num_ranks)
        shares = (logits - largest.unsqueeze(1)).exp_()
        total = ops.all_reduce(shares.sum(1), num_ranks)
        is_other = (target < first) | (target >= first + width)
        places = (target - first).masked_fill(is_other, 0)
        own = logits.gather(1, places.unsqueeze(1)).squeeze(1).masked_fill(is_other, 0)
        score = ops.all_reduce(own, num_ranks)
        is_ignored = target == ignored
        shares.div_(total.unsqueeze(1))
        context.save_for_backward(shares, places, is_other, is_ignored)
        return (total.log() + largest - score).masked_fill(is_ignored, 0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares, places, is_other, is_ignored = context.saved_tensors
        factor = gradient.masked_fill(is_ignored, 0)
        result = shares * factor.unsqueeze(1)
        result.scatter_add_(1, places.unsqueeze(1), factor.masked_fill(is_other, 0).neg().unsqueeze(1))
        return result, None, None, None, None, None


def read_loss(args: Any, kwargs: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Returns the scores, the targets and the options of a call of `cross_entropy_loss`."""
    logits, target, weight, reduction, ignored, smoothing = [*args, *(None, None, 1, -100, 0.0)[len(args) - 1 :]][:6]
    options = {"weight": weight, "reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}
    return logits, target, options | kwargs


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(products.NAMES, _product),
    **dict.fromkeys(("scaled_dot_product_attention", "fused_attention"), _attention),
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
}
