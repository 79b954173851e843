"""`scaled_dot_product_attention`, captured as the fused operator that cards run.

On a CPU, PyTorch computes attention with dropout, with values of another width than the keys or with unusual masks by
plain products, in float32 for the half types. Cards have fused kernels for these in the type of the inputs. So while a
step is captured, such calls are the CPU's fused operator; `replacements.py` executes them. With real tensors
the CPU's kernel computes the calls that it supports. Attention in float64 is left to PyTorch.

The conditions are those of CUDA's kernels, in `aten/src/ATen/native/transformers/sdp_utils_cpp.h` and
`cuda/sdp_utils.cpp` of PyTorch 2.13: in half types those that the flash and the memory-efficient kernel share, in
float32 those of the latter, which the former does not take. Both draw dropout.

`flex_attention` is captured as PyTorch computes it without torch.compile: with the whole matrix of scores."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import sdpa_dense
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as module
from torch.nn.modules import transformer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gdp.models.pytorch.autocast import kernels
from gdp.models.pytorch.replacements import ATTENTION, is_plain

MASK_NOTE = (
    "attention with a mask that needs a gradient is captured as products of its type and a softmax; the "
    "memory-efficient kernel of a card takes less time and memory"
)
CAUSAL_NOTE = (
    "a square mask of nn.Transformer's layers is taken for causal, as PyTorch finds out from its content; say "
    "is_causal=False (tgt_is_causal of decoders) where it is not"
)
FLEX_NOTE = (
    "flex_attention is captured as PyTorch computes it without torch.compile, with the whole matrix of scores in "
    "float32; its fused kernel takes less time and memory, and skips masked blocks"
)

_computed: Callable[..., Tensor] = torch.ops.aten.scaled_dot_product_attention.default.decompose  # as PyTorch does
_is_causal_mask: Callable[..., bool] = transformer._detect_is_causal_mask
_HALF = (torch.bfloat16, torch.float16)
# `minimum_gemm_alignment` since compute capability 8.0; flash attention pads, but needs equal widths
_WIDTH_MULTIPLE = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}


def attention_as_on_a_card() -> contextlib.AbstractContextManager[None]:
    """Makes attention the fused operator where cards have it; the process has one such region at a time."""
    shapes = ATTENTION._schema.name, _shapes, "Meta"
    return kernels([("scaled_dot_product_attention", _attention, "AutogradCPU"), shapes])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes what `scaled_dot_product_attention` does."""
    if not has_kernel(query, key, value, attn_mask, is_causal, enable_gqa):
        return _computed(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        note(MASK_NOTE)
        if query.dtype in _HALF:  # PyTorch's own products are in float32
            return _products(query, key, value, attn_mask, dropout_p, scale)
        return _computed(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not isinstance(query, FakeTensor) and not is_plain(query, value, dropout_p):  # the CPU's kernel refuses it
        return _computed(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:  # as PyTorch converts it for its kernels
            shown, hidden = (torch.scalar_tensor(number, dtype=query.dtype) for number in (0.0, float("-inf")))
            attn_mask = torch.where(attn_mask, shown, hidden)
        if attn_mask.dim() != 2:
            attn_mask = attn_mask.expand(*(1,) * (4 - attn_mask.dim()), *attn_mask.shape)
    output: Tensor = ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scale: float | None) -> Tensor:
    """Computes attention by products in the type of the inputs, in the capture and without one."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = torch.matmul(query * (query.shape[-1] ** -0.5 if scale is None else scale), key.transpose(-2, -1)) + mask
    shares = torch.dropout(torch._safe_softmax(scores, -1), dropout, train=dropout > 0.0)
    return torch.matmul(shares, value)


def has_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Returns whether a card runs this call by a fused kernel of the inputs' type."""
    inputs = query, key, value
    if query.dtype not in _WIDTH_MULTIPLE or any(tensor.dtype is not query.dtype for tensor in inputs):
        return False
    if any(tensor.dim() != 4 or not tensor.numel() for tensor in inputs):
        return False
    cuda: Any = torch.backends.cuda
    is_half = query.dtype in _HALF
    has_half_kernels = cuda.flash_sdp_enabled() or cuda.cudnn_sdp_enabled()
    if not (cuda.mem_efficient_sdp_enabled() or (is_half and has_half_kernels)):
        return False
    batch, heads, length, width = query.shape
    _, key_heads, num_keys, value_width = value.shape
    are_alike = key.shape == (batch, key_heads, num_keys, width) and value.shape[0] == batch
    has_heads = heads % key_heads == 0 if enable_gqa and is_half else heads == key_heads
    multiple = _WIDTH_MULTIPLE[query.dtype]
    has_widths = (is_half and width == value_width) or width % multiple == value_width % multiple == 0
    if not (are_alike and has_heads and has_widths and all(tensor.stride(-1) == 1 for tensor in inputs)):
        return False
    if mask is None:
        return True
    limits = (batch, heads, length, num_keys)[-mask.dim() :]
    fits = 2 <= mask.dim() <= 4 and all(size in (1, limit) for size, limit in zip(mask.shape, limits, strict=True))
    return fits and not is_causal and mask.dtype in (torch.bool, query.dtype)


def is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Returns whether a mask is causal, as `nn.TransformerEncoder` asks; without content, by its shape."""
    if is_causal is not None or not isinstance(mask, FakeTensor):
        return _is_causal_mask(mask, is_causal, size)
    length = mask.shape[-2] if size is None else size
    if mask.shape != (length, length):
        return False
    note(CAUSAL_NOTE)
    return True


def recorders() -> list[Any]:
    """Returns the recorders of the captures that run here."""
    return [mode for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "notes")]


def note(sentence: str) -> None:
    """Adds a note for the user to a capture, if one runs."""
    for recorder in recorders():
        recorder.notes[sentence] = None


def _shapes(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns the output and the logarithms of sums without content; PyTorch's own takes all widths for equal."""
    batch, heads, length, width = query.shape
    sums = torch.promote_types(query.dtype, torch.float32)
    is_equal = value.shape[-1] == width
    output = torch.empty_like(query) if is_equal else query.new_empty(batch, heads, length, value.shape[-1])
    return output, query.new_empty((batch, length, heads), dtype=sums).transpose(1, 2)


@contextlib.contextmanager
def flex_attention_as_operators() -> Iterator[None]:
    """Makes `flex_attention` run as plain operators, with gradients on the CPU too."""
    with (
        patch.object(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        patch.object(module, "_validate_device", lambda query, key, value: None),
        patch.object(module, "flex_attention_hop", _flex_attention),
    ):
        yield


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
    """Computes the attention in the type of autocast, if that is on, as the operator of PyTorch does."""
    note(FLEX_NOTE)
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type) and query.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device_type)
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
            break
    with torch._C._DisableAutocast():
        return sdpa_dense(query, key, value, *args)
