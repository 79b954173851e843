"""Attention as serving kernels have it, where the eager code of Transformers would copy the cache. Grouped heads are
not repeated, and latent attention (DeepSeek) decodes in the absorbed form, which reads the compressed latents once."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from gdp.models.hugging_face.cache_layers import CacheRoom, ServedStateLayer, cache_utils
from gdp.models.hugging_face.patches import run_inside


def joined_latents(memory: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns a function in place of `expand_kv`, which hands the latents on as they are cached."""

    def joined(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return memory, memory

    return joined


def _absorbed(module: Any, query: Tensor, latents: Tensor, scaling: float) -> Tensor:
    """Returns the attention [batch, 1, heads, width] of one token to latents [batch, 1, places, rank + rotary]. The
    projection from latents to keys is applied to the query, that to values to the result (DeepSeek-V2, arXiv
    2405.04434, section 2.1.2). The product with the values covers the rotary part too, so that one operator reads the
    latents once, as fused kernels do; these columns of the result are dropped."""
    rank, nope, width = module.kv_lora_rank, module.qk_nope_head_dim, module.v_head_dim
    batch, heads = query.shape[:2]
    weight = module.kv_b_proj.weight.view(heads, nope + width, rank)
    inner = torch.bmm(query[:, :, 0, :nope].transpose(0, 1), weight[:, :nope])  # [heads, batch, rank]
    absorbed = torch.cat((inner.transpose(0, 1).unsqueeze(2), query[..., nope:]), dim=-1)
    result = functional.scaled_dot_product_attention(absorbed, latents, latents, scale=scaling, enable_gqa=True)
    values = torch.bmm(result[:, :, 0, :rank].transpose(0, 1), weight[:, nope:].transpose(1, 2))
    return values.transpose(0, 1).reshape(batch, 1, heads, width)


def _grouped(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns eager attention of one token for each sequence to keys of grouped heads, without repeating them. Scores
    are capped by `softcap` and share their softmax with a sink for each head, where the model has these."""
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    packed = query.reshape(batch, groups, heads // groups, width)
    scores = torch.matmul(packed, key.transpose(2, 3)) * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    sink = s_aux if s_aux is not None else sinks
    if sink is not None:
        column = sink.reshape(1, groups, heads // groups, 1).expand(batch, -1, -1, -1).to(scores.dtype)
        scores = torch.cat((scores, column), dim=-1)
    shares = functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    if sink is not None:
        shares = shares[..., :-1]
    return torch.matmul(shares, value).reshape(batch, 1, heads, value.shape[-1])


def attend_as_served(model: Any, cache: Any, room: CacheRoom) -> None:
    """Makes the forward pass of `model` run with attention of serving kernels and the cache as before a step."""
    original = AttentionInterface._global_mapping["sdpa"]

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        scaling: Any = kwargs.get("scaling")
        if room.is_decode and key is value and hasattr(module, "latent_cache"):
            return _absorbed(module, query, key, scaling), None
        width = value.shape[-1]
        if width < key.shape[-1] and not room.is_decode and hasattr(module, "latent_cache"):
            # kernels of one width: Transformers pads values for flash attention, too
            padded = functional.pad(value, (0, key.shape[-1] - width))
            result, weights = original(module, query, key, padded, attention_mask, *args, **kwargs)
            return result[..., :width], weights
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    def attend_eagerly(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        options = {name: kwargs.get(name) for name in ("scaling", "softcap", "s_aux", "sinks")}
        if hasattr(module, "sinks") and options["s_aux"] is None:
            options["sinks"] = module.sinks
        return _grouped(module, query, key, value, **options), None

    functions = {"sdpa": attend} | ({"eager": attend_eagerly} if room.is_decode else {})

    @contextlib.contextmanager
    def serving() -> Iterator[None]:
        _begin(cache, room)
        masks = _without_masks() if room.is_decode else contextlib.nullcontext()
        with patch.dict(AttentionInterface._global_mapping, functions), masks:
            yield

    run_inside(model, serving)


def _begin(cache: Any, room: CacheRoom) -> None:
    """Puts the cache as it is before a step."""
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        cache.is_updated = dict.fromkeys(range(len(cache.cross_attention_cache)), room.is_decode)
        cache = cache.self_attention_cache
    for layer in cache.layers:
        if isinstance(layer, ServedStateLayer):
            layer.begin()


def _without_masks() -> contextlib.AbstractContextManager[Any]:
    """Leaves out masks of a decode step: its one token sees every place of the cache. Layers that choose places to
    attend to read their mask themselves, and must not be without one."""
    mapping: dict[str, Any] = type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
    return patch.dict(mapping, {name: partial(_mask_if_read, mapping[name]) for name in ("sdpa", "eager")})


def _mask_if_read(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the mask that a model asks for in any case, else None."""
    return original(*args, **kwargs) if kwargs.get("allow_is_causal_skip") is False else None
