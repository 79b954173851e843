"""Layers of a cache over memory of the modules that read them: keys and values, states, or both. They replace those of
Transformers, which grow with each step: a step here can be repeated."""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import cache_utils as transformers_cache

cache_utils: Any = transformers_cache  # its classes are half typed


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
