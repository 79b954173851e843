"""Bytes that one call of an operator reads and writes, from the tensors involved.

Each tensor read counts its distinct elements once, each tensor made or changed once more; a tensor changed in place is
both read and written, unless it is overwritten. Lookups count the rows that they read or write, not the table.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tag, Tensor
from torch._ops import OpOverload

from gdp.models.names import names

NO_BYTES = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_ROW_READERS = frozenset({"embedding", "index", "index_select", "gather", "take"})
_ROW_WRITERS = names(
    """
    index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ scatter_ scatter_add_ scatter_reduce_
    """
)
_OVERWRITERS = frozenset({"copy_", "fill_", "zero_"})


def bytes_accessed(
    func: OpOverload, args: Sequence[Any], read: Sequence[Tensor], made: Sequence[Tensor], changed: Sequence[Tensor]
) -> int:
    """Returns the bytes of one call; `read` has each view once, including tensors that the call changes in place."""
    name = func._schema.name.partition("::")[2]
    if name in NO_BYTES:
        return 0
    bytes_read, bytes_made = sum(map(num_bytes, read)), sum(map(num_bytes, made))
    bytes_changed = sum(map(num_bytes, changed))
    if name in _ROW_READERS and read:
        return bytes_read - num_bytes(read[0]) + 2 * bytes_made
    if name in _ROW_WRITERS and read:
        # (table, indices, values): values as large as rows written; without values, an index for each element
        values = read[-1]
        rows = num_bytes(values) if len(read) > 2 else values.numel() * changed[0].element_size()
        is_adding = "add" in name or "reduce" in name or ("index_put" in name and tuple(args[3:4]) == (True,))
        return bytes_read - bytes_changed + rows * (2 if is_adding else 1)
    if changed and (name in _OVERWRITERS or Tag.nondeterministic_seeded in func.tags):
        return bytes_read
    return bytes_read + bytes_made + bytes_changed


def num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of distinct elements: `expand` repeats none; overlapping windows are at most their memory."""
    count = tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and size > 1:
            count //= size
    return min(int(count) * tensor.element_size(), tensor.untyped_storage().nbytes()) if count else 0
