"""Bytes that one call of an operator reads and writes, from the tensors involved. Each tensor read counts its distinct
elements once, each tensor made or changed once more; a tensor changed in place is both read and written, unless it is
overwritten. Lookups count the rows that they read or write, not the table. Grouped products read the weights of the
experts that their rows are sent to (`gdp.models.experts`)."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tag, Tensor
from torch._ops import OpOverload

from gdp.models.experts import share_hit
from gdp.models.names import by_name, names
from gdp.models.stored_weights import StoredWeight

NO_BYTES = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_ROW_READERS = frozenset({"embedding", "index", "_unsafe_index", "index_select", "gather", "take"})
_ROW_WRITERS = names("index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ index_reduce_ put_")
_ROW_WRITERS |= names("scatter_ scatter_add_ scatter_reduce_")
# readers of rows that they do not return: the arguments that are the table and the indices
_TABLES = by_name(
    {
        "_embedding_bag _embedding_bag_forward_only": (0, 1),
        "_embedding_bag_per_sample_weights_backward": (1, 2),
        "embedding_renorm_": (0, 1),
    }
)
# losses read one score of each row; their backward passes write it into a gradient of zeros, and read no scores
_GATHERERS = names("nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward")
_OVERWRITERS = frozenset({"copy_", "fill_", "zero_"})
_GROUPED = names("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2")
_GROUPED |= names("grouped_mm_fallback grouped_mm_fallback_backward")


def num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of distinct elements: `expand` repeats none; overlapping windows are at most their memory."""
    count = tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and size > 1:
            count //= size
    return min(int(count) * tensor.element_size(), tensor.untyped_storage().nbytes()) if count else 0


def is_grouped_product(func: OpOverload) -> bool:
    """Returns whether `func` multiplies groups of rows with a matrix each."""
    return func._schema.name.partition("::")[2] in _GROUPED


def bytes_accessed(
    func: OpOverload,
    args: Sequence[Any],
    read: Sequence[Tensor],
    made: Sequence[Tensor],
    changed: Sequence[Tensor],
    *,
    stored_bytes: Callable[[Tensor], int] = num_bytes,
    per_token: int | None = None,
) -> int:
    """Returns the bytes of one call; `read` has each view once, including tensors that the call changes in place.
    stored_bytes: the bytes of a tensor that is read; quantised weights have fewer than their elements say. per_token:
    the number of experts that each token is sent to, if that is known."""
    name = func._schema.name.partition("::")[2]
    if name in NO_BYTES:
        return 0
    bytes_read, bytes_made = sum(map(stored_bytes, read)), sum(map(num_bytes, made))
    bytes_changed = sum(map(num_bytes, changed))
    if func.namespace == "collective":  # the buffer of the exchange, as `gdp.costs.collectives` counts it
        return max(bytes_read, bytes_made)
    if name in _GROUPED and args[0].dim() == 2 and args[1].dim() == 3:
        weights = args[1]
        share = share_hit(int(weights.shape[0]), int(args[0].shape[0]), per_token)
        return bytes_read - math.floor(stored_bytes(weights) * (1 - share)) + bytes_made
    if name in _ROW_READERS and read:
        rows = -(-bytes_made * stored_bytes(read[0]) // max(1, num_bytes(read[0])))
        return bytes_read - stored_bytes(read[0]) + rows + bytes_made
    if name in _GATHERERS:
        scores, target = args[1:3] if name.endswith("backward") else args[:2]
        return int(bytes_read - stored_bytes(scores) + target.numel() * scores.element_size() + bytes_made)
    if name in _TABLES:
        table, indices = (args[position] for position in _TABLES[name])
        rows = -(-stored_bytes(table) * int(indices.numel()) // max(1, int(table.shape[0])))
        return bytes_read - stored_bytes(table) + rows * (2 if changed else 1) + bytes_made
    if name in _ROW_WRITERS:
        is_adding = "add" in name or "reduce" in name or ("put_" in name and tuple(args[3:4]) == (True,))
        rows = _num_elements_written(name, args) * changed[0].element_size()
        return bytes_read - bytes_changed + rows * (2 if is_adding else 1)
    if changed and (name in _OVERWRITERS or Tag.nondeterministic_seeded in func.tags):
        return bytes_read
    return bytes_read + bytes_made + bytes_changed


def _num_elements_written(name: str, args: Sequence[Any]) -> int:
    """Returns the number of elements of the table, the first argument, that a writer of rows writes to."""
    table: Tensor = args[0]
    if name == "put_":
        return int(args[1].numel())
    if name.startswith("scatter"):
        return int(args[2].numel())
    if "index_put" not in name:  # dimension, index
        return int(args[2].numel()) * (table.numel() // max(1, table.shape[args[1]] if table.dim() else 1))
    # an index for each dimension, None: all of it; a mask of one or more dimensions may select all elements of them
    shapes, masked, whole, dim = list[torch.Size](), [1], 1, 0
    for index in args[1]:
        if index is None:
            whole *= table.shape[dim]
        elif index.dtype in (torch.bool, torch.uint8):
            masked.append(index.numel())
            dim += index.dim() - 1
        else:
            shapes.append(index.shape)
        dim += 1
    selected = max(*masked, math.prod(np.broadcast_shapes(*shapes)))
    return int(selected * whole * math.prod(table.shape[dim:]))


class StoredMemories:
    """Memories of weights that are stored in fewer bits, by address."""

    def __init__(self) -> None:
        self._weights: dict[int, StoredWeight] = {}

    def add(self, storage: torch.UntypedStorage, weight: StoredWeight) -> None:
        """Adds the memory of a weight."""
        self._weights[storage._cdata] = weight

    def num_bytes(self, tensor: Tensor) -> int:
        """Returns the bytes that reading `tensor` takes: of a view of a quantised weight, its part of them."""
        count = num_bytes(tensor)
        if not self._weights:
            return count
        storage = tensor.untyped_storage()
        weight = self._weights.get(storage._cdata)
        return count if weight is None else -(-count * weight.num_bytes // max(1, storage.nbytes()))

    def arithmetic(self, read: Iterable[Tensor]) -> str:
        """Returns the type that a product with these operands is computed in because of quantised weights, or ""."""
        weights = (self._weights.get(tensor.untyped_storage()._cdata) for tensor in read)
        return next((weight.arithmetic for weight in weights if weight is not None), "")
