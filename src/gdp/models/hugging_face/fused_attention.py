"""Attention of serving kernels (vLLM, FlashInfer, llama.cpp) as one operator, `served::fused_attention`: with windows,
capped scores and sinks, which PyTorch's operator does not have."""

# mypy: disable-error-code="no-untyped-call"

import torch
from torch import Tensor
from torch.nn import functional

_LIBRARY = torch.library.Library("served", "DEF")
_LIBRARY.define(
    "fused_attention(Tensor query, Tensor key, Tensor value, bool is_causal, int window, Tensor? sinks, float? scale, "
    "float? softcap) -> Tensor"
)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    window: int,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Returns the attention [batch, heads, queries, width] to keys of grouped heads. A query of causal attention sees
    the last `window` keys, all of them if it is 0. Scores are capped by `softcap` and share their softmax with `sinks`
    [1, heads, 1, 1]."""
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    scores = torch.matmul(query.reshape(batch, groups, -1, width), key.transpose(2, 3))
    scores = scores.view(batch, heads, queries, keys) * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        positions = torch.arange(keys, device=query.device)
        age = positions[:queries].unsqueeze(1) - positions  # of a key, as a query sees it
        scores = scores.masked_fill((age < 0) | (age >= (window or keys)), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(batch, -1, queries, -1).to(scores.dtype)), dim=-1)
    shares = functional.softmax(scores, dim=-1, dtype=torch.float32)[..., :keys].to(value.dtype)
    result = torch.matmul(shares.reshape(batch, groups, -1, keys), value).view(batch, heads, queries, -1)
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _shapes(query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
    """Returns the result without content: tokens are in its memory before heads, as kernels write it."""
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)


_LIBRARY.impl("fused_attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("served::fused_attention", _shapes, lib=_LIBRARY)
fused_attention = torch.ops.served.fused_attention
