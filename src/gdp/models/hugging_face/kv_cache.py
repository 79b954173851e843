"""The cache of a Transformers model: keys, values and states that are resident in the modules that read them.

A probe, one short prefill, finds which module keeps which tensors. The tensors of the cache become buffers of these
modules, so that the graph has a resident op for each beside its layer. The model runs with a cache object of
Transformers over the buffers:

- decode: each sequence feeds one token, written to the last place of the cache; attention reads all `context` places.
  A layer with a sliding window of W tokens has min(W, context) places. A state (Mamba, linear attention) has one size.
- prefill: a prompt meets an empty cache; its keys and values (of a window its last) are written there.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from gdp.errors import InputError
from gdp.models.hugging_face.cache_layers import (
    CacheRoom,
    ServedAttentionLayer,
    ServedHybridLayer,
    ServedStateLayer,
    cache_utils,
)
from gdp.models.hugging_face.served_attention import attend_as_served, joined_latents
from gdp.models.pytorch.running_module import RunningModule
from gdp.models.pytorch.shards.cuts import cut_of, mark

Cache, DummyLayer = cache_utils.Cache, cache_utils.DummyLayer
DynamicCache, EncoderDecoderCache = cache_utils.DynamicCache, cache_utils.EncoderDecoderCache

_PROBE_TOKENS = 2
_KNOWN = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.DynamicIndexedLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)


@dataclass(slots=True)
class _Probed:
    """The cache of a short prefill, and the module that updated each of its layers."""

    cache: Any
    owners: dict[int, str] = field(default_factory=dict)
    output: Any = None


def serve(model: Any, inputs: Mapping[str, Any], room: CacheRoom, text: str) -> dict[str, Any]:
    """Returns `inputs` with a cache of that room; its memory is registered as buffers of the model's modules.

    `inputs` are those of the step, `room` is that of the decoder's own attention. The model's forward pass then runs
    with attention as serving kernels have it. InputError, with the layer, for a kind of cache that is not modelled.
    """
    is_encoder_decoder = bool(model.config.is_encoder_decoder)
    own, cross = _probe(model, inputs, is_encoder_decoder, text)
    layers = [_layer(model, own, index, room, text) for index in range(len(own.cache.layers))]
    cache: Any = Cache(layers=layers)
    if cross is not None:
        read_only = [_cross_layer(model, cross, index, room) for index in range(len(cross.cache.layers))]
        cache = EncoderDecoderCache(cache, Cache(layers=read_only))
    for module in model.modules():
        if hasattr(module, "latent_cache") and room.is_decode:
            module.expand_kv = joined_latents(module.latent_cache)
    attend_as_served(model, cache, room)
    served = dict(inputs)
    if cross is not None and room.is_decode:  # the encoder ran in the prefill
        encoded = torch.zeros_like(own.output.encoder_last_hidden_state)
        served = {"encoder_outputs": (encoded,), "decoder_input_ids": inputs["decoder_input_ids"]}
    return served | {_argument(model): cache, "use_cache": True}


def share_of_rank(model: Any) -> Fraction:
    """Returns the share of the bytes of a served model's cache that a rank holds."""
    caches = [buffer for name, buffer in model.named_buffers() if "_cache" in name.rpartition(".")[2]]
    own = sum(cache.nbytes for cache in caches)
    cuts = [(cache, cut_of(cache)) for cache in caches]
    return Fraction(own, sum(cache.nbytes * (cut.num_parts if cut is not None else 1) for cache, cut in cuts))


def _argument(model: Any) -> str:
    """Returns the name of the cache among the arguments of a model; Mamba has its own."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"


def _probe(
    model: Any, inputs: Mapping[str, Any], is_encoder_decoder: bool, text: str
) -> tuple[_Probed, _Probed | None]:
    caches = [_Probed(DynamicCache(config=model.config)) for _ in range(1 + is_encoder_decoder)]
    whole: Any = EncoderDecoderCache(*(part.cache for part in caches)) if is_encoder_decoder else caches[0].cache
    running = RunningModule()
    handles = running.watch(model)
    for probed in caches:
        _watch(probed, running)
    short = dict(inputs)  # an encoder's whole input: the keys of its outputs are cached
    if not is_encoder_decoder:
        short["input_ids"] = inputs["input_ids"].new_zeros(inputs["input_ids"].shape[0], _PROBE_TOKENS)
    try:
        with torch.no_grad():
            caches[0].output = model(**short, **{_argument(model): whole}, use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    owners = [model.get_submodule(path) for path in caches[0].owners.values()]
    if not owners:
        raise InputError(f"{text}: the model keeps no cache of keys and values; leave out --phase")
    if not any(getattr(owner, "is_causal", True) for owner in owners):  # BERT fills a cache if it is given one
        raise InputError(f"{text}: its tokens attend to later ones, so it has no cache; leave out --phase")
    return caches[0], caches[1] if is_encoder_decoder else None


def _watch(probed: _Probed, running: RunningModule) -> None:
    """Notes the module that is running when a layer of the cache is first updated."""
    cache = probed.cache
    positions = {"update": 2, "update_conv_state": 1, "update_recurrent_state": 1, "update_indexer": 1}
    for name, position in positions.items():
        update = getattr(cache, name)

        def noted(*args: Any, update: Any = update, position: int = position, **kwargs: Any) -> Any:
            index = args[position] if len(args) > position else kwargs["layer_idx"]
            probed.owners.setdefault(index, running.current)
            return update(*args, **kwargs)

        setattr(cache, name, noted)


def _layer(model: Any, probed: _Probed, index: int, room: CacheRoom, text: str) -> Any:
    """Returns the layer `index` of the cache, over buffers of the module that updates it."""
    layer = probed.cache.layers[index]
    if index not in probed.owners:
        return DummyLayer()
    path = probed.owners[index]
    module = model.get_submodule(path)
    if type(layer) not in _KNOWN:
        raise InputError(
            f"{text}: {path} keeps a {type(layer).__name__}, which this version does not model; leave out --phase"
        )
    served: Any = None
    if getattr(layer, "keys", None) is not None:
        window = getattr(layer, "sliding_window", None)
        places = room.context if window is None else min(room.context, int(window))
        served = ServedAttentionLayer(
            room, *_memory(module, layer.keys, layer.values, places), is_sliding=window is not None
        )
        if getattr(layer, "indexer_keys", None) is not None:
            served.indexer_keys = _buffer(module, "index_key_cache", layer.indexer_keys, places)
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        states = (ServedStateLayer if served is None else ServedHybridLayer)(layer.number_of_states, room)
        for kind, tensors in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for number, state in tensors.items():
                if state is None:
                    continue
                name = f"{kind}_state_cache" + (f"_{number}" if number else "")
                states.hold(kind, number, _buffer(module, name, state))
        if served is not None:
            states.attention = served
        return states
    return served


def _memory(module: nn.Module, keys: Tensor, values: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Registers memory for keys and values, of latent attention in one piece: its absorbed form reads both at once."""
    if hasattr(module, "expand_kv") and keys.shape[1] == values.shape[1] == 1:
        both = _buffer(module, "latent_cache", torch.cat((keys, values), -1), places)
        return both[..., : keys.shape[-1]], both[..., keys.shape[-1] :]
    return _buffer(module, "key_cache", keys, places), _buffer(module, "value_cache", values, places)


def _buffer(module: nn.Module, name: str, like: Tensor, places: int | None = None) -> Tensor:
    """Registers memory of the size of a tensor, but for the places of tokens; of a cut tensor it is cut alike."""

    def sized(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if places is None else (*shape[:-2], places, shape[-1])

    memory, cut = like.new_zeros(sized(tuple(like.shape))), cut_of(like)
    if cut is not None:
        mark(memory, replace(cut, shape=sized(cut.shape)))
    module.register_buffer(name, memory, persistent=False)
    return memory


def _cross_layer(model: Any, probed: _Probed, index: int, room: CacheRoom) -> Any:
    """Returns the keys and values of the encoder's outputs for a decoder layer: written in prefill, read in decode."""
    layer = probed.cache.layers[index]
    if index not in probed.owners:
        return DummyLayer()
    module = model.get_submodule(probed.owners[index])
    keys = _buffer(module, "cross_key_cache", layer.keys)
    values = _buffer(module, "cross_value_cache", layer.values)
    return ServedAttentionLayer(CacheRoom(keys.shape[-2], room.is_decode), keys, values, is_sliding=False)
