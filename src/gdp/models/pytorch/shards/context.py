"""Context parallelism: each rank has whole weights, and tokens of its own from the embedding to the loss.

    queries of a rank --------------------+--> attention --> results of these tokens
    keys and values of a rank --> gather -+                  (its backward gathers them again, and scatters gradients)

Gradients of weights are summed up over the ranks where they are made. A gather has the bytes of a ring of keys and
values. Executed, a rank has consecutive tokens; the work of causal attention is that of ranks which have one part of
the sequence's first and one of its second half, as Megatron-LM and torchtitan cut it: half of all pairs for each."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.pytorch.fused_attention import has_kernel
from gdp.models.pytorch.shards.collectives import Among, Gather, all_gather, reduce_scatter
from gdp.models.pytorch.shards.cuts import ATTRIBUTE, OUTER, PARTIAL, SEQUENCE, AxisCut, cut_of, mapped, mark
from gdp.models.pytorch.shards.local_run import LocalRun
from gdp.models.pytorch.shards.parts import Rule, aligned
from gdp.models.pytorch.shards.products import Product
from gdp.models.pytorch.shards.weights import read_loss

ops = torch.ops.context
_LIBRARY = torch.library.Library("context", "DEF")
_by_torch: Any = functional.scaled_dot_product_attention
_MEAN, _SUM = 1, 2  # `reduction` of `cross_entropy_loss`
_DEFAULTS = {"query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False}


def _computed(query: Tensor, key: Tensor, value: Tensor, drop: float, is_causal: bool, first: int, scale: Any) -> Any:
    """Returns the attention of a rank's queries, of which `first` is the first, to all keys."""
    mask, shares_heads = _seen(query, key, first) if is_causal else None, key.shape[-3] != query.shape[-3]
    return _by_torch(query, key, value, mask, drop, scale=scale, enable_gqa=shares_heads)


def _seen(query: Tensor, key: Tensor, first_query: int) -> Tensor:
    rows = torch.arange(first_query, first_query + query.shape[-2], device=query.device)
    return torch.arange(key.shape[-2], device=query.device) <= rows.unsqueeze(1)


def _sums(query: Tensor) -> Tensor:
    return query.new_zeros(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))


def _backward(gradient: Tensor, *inputs: Any) -> Any:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        return torch.autograd.grad(_computed(*leaves, *inputs[5:]), leaves, gradient)


_INPUTS, _OPTIONS = "Tensor query, Tensor key, Tensor value", "float dropout_p, bool is_causal, int first, float? scale"
_LIBRARY.define(f"attention({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", tags=torch.Tag.nondeterministic_seeded)
_LIBRARY.define(
    f"attention_backward(Tensor gradient, {_INPUTS}, Tensor o, Tensor s, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("attention", lambda query, *rest: (_computed(query, *rest), _sums(query)), "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
for _name, _fake in (
    ("attention", lambda q, k, v, *_: (q.new_empty((*q.shape[:-1], v.shape[-1])), _sums(q))),
    ("attention_backward", lambda _, *inputs: tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:3])),
):
    torch.library.register_fake(f"context::{_name}", _fake, lib=_LIBRARY)


class _Attention(torch.autograd.Function):
    """Fused attention of a rank's queries to the keys of all ranks, which are not kept for the backward pass."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, num_ranks: int, *options: Any) -> Tensor:
        context.cut, context.options = (num_ranks, key.dim() - 2), options
        keys, values = (all_gather(tensor, *context.cut) for tensor in (key, value))
        output, sums = ops.attention(query, keys, values, *options)
        context.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = context.saved_tensors
        keys, values = (all_gather(tensor, *context.cut) for tensor in (key, value))
        of_query, *others = ops.attention_backward(gradient, query, keys, values, output, sums, *context.options)
        summed = (reduce_scatter(tensor, *context.cut) for tensor in others)
        return of_query, *summed, *(None,) * (1 + len(context.options))


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Computes the attention of a rank's tokens; tensors are whole in all other dimensions, or parts of other ranks."""
    num_ranks, rank, dropout, is_causal = rest
    lower = next((torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    query, key, value = (tensor.to(lower or tensor.dtype) for tensor in (query, key, value))
    how = dropout, is_causal, rank * query.shape[-2], options.get("scale")
    if has_kernel(query, key, value, None, is_causal, options.get("enable_gqa", False)):
        return _Attention.apply(query, key, value, num_ranks, *how)
    key, value = (Gather.apply(tensor, tensor.dim() - 2, 1, num_ranks, rank, True) for tensor in (key, value))
    return _computed(query, key, value, *how)


def _attention(run: Any, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    options = dict(zip(_DEFAULTS, args, strict=False)) | kwargs
    query, key, value, mask, dropout, is_causal = (options.pop(name, other) for name, other in _DEFAULTS.items())
    cut = cut_of(query)
    if cut is None or cut.dim != len(cut.shape) - 2 or cut.outer > 1:
        return run.on_wholes("has queries of all tokens", func, args, kwargs)
    alike = [(other.dim - len(other.shape), other.outer) if (other := cut_of(x)) else None for x in (key, value)]
    if mask is None and alike == [(-2, 1)] * 2:
        rest = run.num_ranks, run.rank, dropout, is_causal
        result = run.of_part(cut, run.applied, scaled_dot_product_attention, query, key, value, *rest, **options)
    else:
        key, value = run.for_cut_work(key), run.for_cut_work(value)
        if mask is not None:
            other = cut_of(mask)
            is_own = other is not None and len(other.shape) - other.dim == 2
            mask = mask if is_own else aligned(run, run.whole(mask), cut, 2)
        elif is_causal:
            mask = _seen(query, key, run.rank * query.shape[-2])
        result = run.of_part(cut, func, query, key, value, mask, dropout, False, **options)
    shape = list(result.shape)
    shape[cut.dim] = cut.shape[cut.dim]
    return mark(result, AxisCut(tuple(shape), cut.dim, cut.num_parts, sources=cut.sources))


def _attention_of_samples(run: Any, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    query = args[0] if args else kwargs["query"]
    cut = cut_of(query)
    if cut is None or cut.dim != 0:
        return run.on_wholes("has queries of all samples", func, args, kwargs)
    args, kwargs = mapped((args, kwargs), lambda tensor: aligned(run, tensor, cut, query.dim()))
    result = run.of_part(cut, func, *args, **kwargs)
    return mark(result, replace(cut, shape=(cut.shape[0], *result.shape[1:])))


def _embedding(run: Any, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    table, ids, *rest = args
    least = 2 if run.has_experts else 1  # positions [S] are those of all samples
    ids = run.begun(ids, -1) if ids.dim() >= least and cut_of(ids) is None else ids
    cut = cut_of(ids)
    result = func(run.entered(table) if cut else table, ids, *rest, **kwargs)
    if cut is None:
        return result
    return mark(result, AxisCut((*cut.shape, result.shape[-1]), cut.dim, cut.num_parts, cut.outer, (), cut.sources))


def _cross_entropy(run: Any, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    logits, target, options = read_loss(args, kwargs)
    cut = cut_of(logits)
    if (
        cut is None
        or cut.dim == 1
        or options["weight"] is not None
        or not options["reduction"]
        or target.is_floating_point()
    ):
        return run.on_wholes("is read by a loss", func, args, kwargs)
    target, dim = run.whole(target), max(cut.dim - 1, 0)
    own = run.own(target, dim, cut)
    reduction, ignored = options["reduction"], options["ignore_index"]
    losses = func(logits, own, None, _SUM, ignored, options["label_smoothing"])
    count = (target != ignored).sum() if reduction == _MEAN else 1
    return mark(losses / count, AxisCut((), PARTIAL, run.num_ranks))


class ContextRun(LocalRun):
    """Runs a forward pass as one rank of several that have the tokens of a sequence, each of which is `num_inner` ranks
    that cut its parts again."""

    context = True
    rules: Mapping[str, Rule] = MappingProxyType(
        {
            **LocalRun.rules,
            "scaled_dot_product_attention": _attention,
            "embedding": _embedding,
            "cross_entropy_loss": _cross_entropy,
        }
    )

    def __init__(self, num_ranks: int, rank: int = 0, *, num_inner: int = 1) -> None:
        super().__init__(Among(num_ranks, num_inner), rank, gathered=frozenset(), plan=None)
        self.attribute = OUTER if num_inner > 1 else ATTRIBUTE

    def begun(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's tokens of whole ones; all of them if ranks do not divide them."""
        if x.shape[dim] % self.num_ranks or x.shape[dim] == self.num_ranks:
            return x
        return self.own(x, dim, AxisCut(tuple(x.shape), dim % x.dim(), self.num_ranks, sources=frozenset({SEQUENCE})))

    def chosen(self, product: Product, operands: list[Tensor]) -> list[Tensor]:
        """Returns the operands of a product, with this rank's rows of one of them and all of the other."""
        if any(isinstance(x, nn.Parameter) for x in operands) and not any(map(cut_of, operands)):
            begins = [x.dim() > 2 and at != product.bias for at, x in enumerate(operands)]
            for at, x in enumerate(operands):
                operands[at] = self.begun(x, -2) if begins[at] and not isinstance(x, nn.Parameter) else x
        cuts = [(at, product.letters[at][cut.dim], cut.outer) for at, x in enumerate(operands) if (cut := cut_of(x))]
        for at, *of in cuts[1:]:
            if of != [*cuts[0][1:]]:  # scores: queries stay cut, keys and values come together
                operands[at] = self.for_cut_work(operands[at])
        return operands


class SampleRun(ContextRun):
    """Runs a forward pass as one rank of several that have samples of a batch, and experts, of their own: a replica but
    for its experts."""

    has_experts = True
    rules: Mapping[str, Rule] = MappingProxyType(
        {
            **ContextRun.rules,
            **dict.fromkeys(("scaled_dot_product_attention", "fused_attention"), _attention_of_samples),
        }
    )

    def begun(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's samples of whole ones; all of them if ranks do not divide them."""
        cut = AxisCut(tuple(x.shape), 0, self.num_ranks, sources=frozenset({SEQUENCE}))
        return x if x.shape[0] % self.num_ranks else self.own(x, 0, cut)
