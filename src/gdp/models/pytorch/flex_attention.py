"""flex_attention, captured as PyTorch computes it without torch.compile: with the whole matrix of scores."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import sdpa_dense
from torch.nn.attention import flex_attention as module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

NOTE = (
    "flex_attention is captured as PyTorch computes it without torch.compile, with the whole matrix of scores in "
    "float32; its fused kernel takes less time and memory, and skips masked blocks"
)


@contextlib.contextmanager
def flex_attention_as_operators() -> Iterator[None]:
    """Makes `flex_attention` run as plain operators, with gradients on the CPU too."""
    with (
        patch.object(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        patch.object(module, "_validate_device", lambda query, key, value: None),
        patch.object(module, "flex_attention_hop", _attention),
    ):
        yield


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
    """Computes the attention in the type of autocast, if that is on, as the operator of PyTorch does."""
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "notes"):  # the recorder of a capture
            mode.notes[NOTE] = None
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type) and query.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device_type)
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
            break
    with torch._C._DisableAutocast():
        return sdpa_dense(query, key, value, *args)
