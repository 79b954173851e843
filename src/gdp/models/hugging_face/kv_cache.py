"""The cache of a Transformers model: keys, values and states that are resident in the modules that read them.

A probe, one short prefill, finds which module keeps which tensors. The tensors of the cache become buffers of these
modules, so that the graph has a resident op for each beside its layer. The model runs with a cache object of
Transformers over the buffers:

- decode: each sequence feeds one token, written to the last place of the cache; attention reads all `context` places.
  A layer with a sliding window of W tokens has min(W, context) places. A state (Mamba, linear attention) has one size.
- prefill: a prompt meets an empty cache; its keys and values (of a window its last) are written there.

Attention is as serving kernels have it, where the eager code of Transformers would copy the cache: grouped heads are
not repeated, windows, caps of scores and sinks take no matrix of scores or masks (`fused_attention.py`), and latent
attention (DeepSeek) decodes in the absorbed form, which reads the compressed latents once.

Its layers are over memory of the modules that read them, in place of those of Transformers, which grow with each step:
a step here can be repeated."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

# mypy: disable-error-code=no-any-return
from transformers import cache_utils as transformers_cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from gdp.errors import InputError
from gdp.models.hugging_face.fused_attention import fused_attention
from gdp.models.hugging_face.patches import run_inside
from gdp.models.pytorch.running_module import RunningModule
from gdp.models.pytorch.shards.cuts import cut_of, mark

cache_utils: Any = transformers_cache  # its classes are half typed
Cache, DummyLayer = cache_utils.Cache, cache_utils.DummyLayer
DynamicCache, EncoderDecoderCache = cache_utils.DynamicCache, cache_utils.EncoderDecoderCache

_PROBE_TOKENS = 2
_MASKED = ("sdpa", "eager")  # attention of Transformers that takes a mask as a tensor
_KNOWN = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.DynamicIndexedLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """The places of a cache, and the number of them that are taken before the step."""

    context: int
    is_decode: bool

    @property
    def past(self) -> int:
        """The tokens in the cache before the step."""
        return self.context - 1 if self.is_decode else 0


class ServedAttentionLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [batch, heads, places, width] of a layer; a step writes its new tokens to the last places."""

    def __init__(self, room: CacheRoom, keys: Tensor, values: Tensor, *, is_sliding: bool) -> None:
        super().__init__()
        self.room, self.keys, self.values, self.is_sliding = room, keys, values, is_sliding
        self.indexer_keys: Tensor | None = None  # [batch, places, width] of sparse attention
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new tokens; returns the keys and values that they attend to."""
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Writes the new keys of the indexer of sparse attention; returns all of them."""
        assert self.indexer_keys is not None, "the probe found them"
        return self._written(self.indexer_keys, indexer_key_states)

    def _written(self, memory: Tensor, new: Tensor) -> Tensor:
        if self.room.is_decode:
            memory[..., memory.shape[-2] - new.shape[-2] :, :].copy_(new)
            return memory
        kept = min(memory.shape[-2], new.shape[-2])
        memory[..., :kept, :].copy_(new[..., new.shape[-2] - kept :, :])
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys that a step attends to, and the position of the first."""
        if not self.room.is_decode:
            return query_length, 0
        places = self.keys.shape[-2]
        return places, self.room.context - places

    def get_seq_length(self) -> int:
        """Returns the number of tokens before the step; it stays the same, so that a step can be repeated."""
        return self.room.past

    def get_max_length(self) -> int:
        """Returns the number of places."""
        return self.keys.shape[-2]


class ServedStateLayer(cache_utils.LinearAttentionLayer):  # type: ignore[misc]
    """States of one size over buffers: filled before a decode step, empty before a prefill."""

    attention: Any = None

    def __init__(self, number_of_states: int, room: CacheRoom) -> None:
        super().__init__(number_of_states)
        self.room = room

    def hold(self, kind: str, number: int, memory: Tensor) -> None:
        """Sets the memory of a state, `conv` or `recurrent`."""
        self.dtype, self.device = memory.dtype, memory.device
        if kind == "conv":
            self.conv_states[number], self.is_conv_states_initialized[number] = memory, True
            self.conv_kernel_size[number] = memory.shape[-1]
        else:
            self.recurrent_states[number], self.is_recurrent_states_initialized[number] = memory, True
        self.begin()

    def begin(self) -> None:
        """Puts the layer as it is before a step."""
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), self.room.is_decode)


class ServedHybridLayer(ServedStateLayer, cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """States, and keys and values, of a layer that has both."""

    def __init__(self, number_of_states: int, room: CacheRoom) -> None:
        cache_utils.CacheLayerMixin.__init__(self)
        ServedStateLayer.__init__(self, number_of_states, room)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Updates keys and values."""
        return self.attention.update(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the mask sizes of the attention."""
        return self.attention.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Returns the number of tokens before the step."""
        return self.room.past

    def get_max_length(self) -> int:
        """Returns the number of places for keys."""
        return int(self.attention.get_max_length())


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


def attend_as_served(model: Any, cache: Any, room: CacheRoom, *, knows_windows: bool) -> None:
    """Makes the forward pass of `model` run with attention of serving kernels and the cache as before a step.
    `knows_windows`: whether layers tell their windows to the attention, so that a prefill needs no masks."""
    original = AttentionInterface.get_interface

    def get_interface(self: Any, implementation: str, default: Any) -> Any:
        attend = original(self, implementation, default)
        if implementation not in _MASKED:
            return attend
        return partial(_attend, attend, room, knows_windows, implementation == "eager")

    @contextlib.contextmanager
    def serving() -> Iterator[None]:
        _begin(cache, room)
        masks = _without_masks(room) if room.is_decode or knows_windows else contextlib.nullcontext()
        with patch.object(AttentionInterface, "get_interface", get_interface), masks:
            yield

    run_inside(model, serving)


def _attend(
    attend: Callable[..., Any],
    room: CacheRoom,
    knows_windows: bool,
    is_eager: bool,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns what `attend` of Transformers does, as serving kernels compute it: with one operator in place of eager
    attention, and of that which would need a mask for its window."""
    scaling: Any = kwargs.get("scaling")
    if room.is_decode and key is value and hasattr(module, "latent_cache"):
        return _absorbed(module, query, key, scaling), None
    window, is_fused = kwargs.get("sliding_window") or 0, is_eager
    if not room.is_decode:
        is_plain = attention_mask is None and kwargs.get("position_bias") is None
        is_fused = knows_windows and is_plain and (is_eager or 0 < window < key.shape[-2])
    if is_fused:
        sinks = next((each for each in (kwargs.get("s_aux"), getattr(module, "sinks", None)) if each is not None), None)
        by_head = None if sinks is None else sinks.reshape(1, -1, 1, 1)
        is_causal = query.shape[-2] > 1 and getattr(module, "is_causal", True)
        how = is_causal, window, by_head, scaling, kwargs.get("softcap")
        return fused_attention(query, key, value, *how).transpose(1, 2), None
    width = value.shape[-1]
    if width < key.shape[-1] and not room.is_decode and hasattr(module, "latent_cache"):
        # kernels of one width: Transformers pads values for flash attention, too
        padded = functional.pad(value, (0, key.shape[-1] - width))
        result, weights = attend(module, query, key, padded, attention_mask, *args, **kwargs)
        return result[..., :width], weights
    return attend(module, query, key, value, attention_mask, *args, **kwargs)


def _begin(cache: Any, room: CacheRoom) -> None:
    """Puts the cache as it is before a step."""
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        cache.is_updated = dict.fromkeys(range(len(cache.cross_attention_cache)), room.is_decode)
        cache = cache.self_attention_cache
    for layer in cache.layers:
        if isinstance(layer, ServedStateLayer):
            layer.begin()


def _without_masks(room: CacheRoom) -> contextlib.AbstractContextManager[Any]:
    """Leaves out masks that serving kernels do without: those of a decode step, whose one token sees every place of the
    cache, and causal ones of a prefill, also with a window. Layers that choose places to attend to read their mask
    themselves, and must not be without one."""
    mapping: dict[str, Any] = type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
    return patch.dict(mapping, {name: partial(_mask_if_read, mapping[name], room) for name in _MASKED})


def _mask_if_read(original: Callable[..., Any], room: CacheRoom, *args: Any, **kwargs: Any) -> Any:
    """Returns the mask that a model asks for in any case, in a prefill also one that is not causal or of chunks."""
    is_left_out = kwargs.get("allow_is_causal_skip", room.is_decode)
    if not room.is_decode and (window := kwargs.get("local_size")) is not None:
        is_left_out = is_left_out and window == getattr(kwargs.get("config"), "sliding_window", None)
    return None if is_left_out else original(*args, **kwargs)


@dataclass(slots=True)
class _Probed:
    """The cache of a short prefill, and the module that updated each of its layers."""

    cache: Any
    owners: dict[int, str] = field(default_factory=dict)
    windows: dict[str, int | None] = field(default_factory=dict)  # that modules tell the attention that they call
    output: Any = None

    @property
    def knows_windows(self) -> bool:
        """True if all layers with keys call the attention of Transformers' interface, and tell it their windows."""
        layers = [(path, self.cache.layers[index]) for index, path in self.owners.items()]
        return all(
            getattr(layer, "keys", None) is None or self.windows.get(path, 0) == getattr(layer, "sliding_window", None)
            for path, layer in layers
        )


def serve(
    model: Any, inputs: Mapping[str, Any], room: CacheRoom, text: str, *, cuts_tokens: bool = False
) -> dict[str, Any]:
    """Returns `inputs` with a cache of that room; its memory is registered as buffers of the model's modules. `inputs`
    are those of the step, `room` is that of the decoder's own attention; `cuts_tokens`: ranks have parts of a prompt,
    whose masks stay. The model's forward pass then runs with attention as serving kernels have it. InputError, with the
    layer, for a kind of cache that is not modelled."""
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
    attend_as_served(model, cache, room, knows_windows=own.knows_windows and not cuts_tokens)
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
    handles, original = running.watch(model), AttentionInterface.get_interface

    def get_interface(*args: Any) -> Any:
        attend = original(*args)

        def noted(*args: Any, **kwargs: Any) -> Any:
            caches[0].windows[running.current] = kwargs.get("sliding_window")
            return attend(*args, **kwargs)

        return noted

    for probed in caches:
        _watch(probed, running)
    short = dict(inputs)  # an encoder's whole input: the keys of its outputs are cached
    if not is_encoder_decoder:
        short["input_ids"] = inputs["input_ids"].new_zeros(inputs["input_ids"].shape[0], _PROBE_TOKENS)
    try:
        with torch.no_grad(), patch.object(AttentionInterface, "get_interface", get_interface):
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
