"""Costs that depend on what was recorded before: of reading quantised weights, and of routed experts."""

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from gdp.models.pytorch.bytes_accessed import num_bytes
from gdp.models.pytorch.records import PENDING, OpRecord, ValueRecord
from gdp.models.stored_weights import StoredWeight

aten = torch.ops.aten


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


def experts_per_token(values: list[ValueRecord], record: OpRecord) -> int | None:
    """Returns the number of experts that a token of a grouped product is sent to.

    It is the `k` of the nearest `topk` that the groups' sizes are computed from; None if there is none.
    """
    waiting, seen = deque([record]), {record}
    while waiting:
        one = waiting.popleft()
        for call in one.calls:
            if call.func is aten.topk.default:
                return int(call.args[1])
        for value in one.reads:
            producer = values[value].producer
            is_weight = values[value].owner is not None
            if producer not in seen and producer is not PENDING and not is_weight:
                seen.add(producer)
                waiting.append(producer)
    return None
