"""Fused attention as cards run it: blocks of queries, each of which goes through the keys that it sees. FlashAttention
(T. Dao, "FlashAttention-2", ICLR 2024): a multiprocessor takes a block of queries of a head after the other, and of
causal attention only the keys up to the block's last query. One token to a cache (decoding) has a block for the queries
of all heads that share keys. Where there are few blocks, those of one query or of 64, the keys are split (its
`set_params_splitkv`)."""

import math

import numpy as np

from gdp.arrays import F64, Bool
from gdp.costs.kernels import Kernel, PricedOp
from gdp.costs.products import Multiprocessors, item_bytes
from gdp.graph.shapes import Argument, Array

_BLOCK, _SHORT_BLOCK, _KEYS = 128, 64, 64  # queries of a block, of one whose keys are split; keys read at a time
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # of keys
_LEAST_SPLIT = 128
_FEW = 0.8  # blocks a multiprocessor: with fewer, FlashAttention splits the keys of a forward pass
# FlashAttention takes no bias of single heads: kernels that do take 2 to 3 times as long, in BEiT's forward pass on an
# H100 (benchmarks/data/h100/further-step-ops.csv). A mask of all heads is that of a window, which kernels know
_BIASED = 2
_BIAS = {  # its place among the tensors of kernels that take one
    "flash_attention_for_cpu": 3,
    "efficient_attention": 3,
    "cudnn_attention": 3,
    "flash_attention_for_cpu_backward": 6,
    "cudnn_attention_backward": 8,
}
# Fitted on the tables of all three cards (benchmarks/data/measured/attention-*.csv): what a block takes to begin and
# end, and what a key takes one multiprocessor that decodes, of any card: it waits for memory.
_BLOCK_NS, _KEY_NS = 2_500, 20.0

_CORE_BLOCKS = (768, 256), (192, 64), (0, 32)  # on a processor core: from so many queries on, queries of a block
# Rows so many bytes apart share a place in a core's cache. What they take longer then, in bytes that are copied across
# the order of memory, was read off a layer of `nn.MultiheadAttention` on a Xeon
_CONFLICT_BYTES, _CONFLICTS = 4096, 6

_PREFIX, _SERVED = "_scaled_dot_product_", "served.fused_attention"
_CAUSAL = {  # where calls say whether they are causal
    "flash_attention": 4,
    "flash_attention_for_cpu": 4,  # captures run where there is no card
    "efficient_attention": 6,
    "cudnn_attention": 6,
    "flash_attention_backward": 11,
    "flash_attention_for_cpu_backward": 7,
    "efficient_attention_backward": 11,
    "cudnn_attention_backward": 14,
    "torch_attn._varlen_attn": 7,  # behind the ends of sequences and the lengths of the longest
    "torch_attn._varlen_attn_out": 8,
    "torch_attn._varlen_attn_backward": 10,
    _SERVED: 3,
    "context.attention": 4,
    "context.attention_backward": 7,
}
_ZIGZAG = 2  # causal, of queries of which each part has its mirror image: they see half of the keys
ATTENTION = tuple(name if "." in name else _PREFIX + name for name in _CAUSAL)  # kinds that are fused attention


def attention(op: PricedOp) -> list[Kernel]:
    """One kernel, which computes half of the FLOPs where attention is causal. Its gradient has two more: one sums the
    products of result and gradient, and one rounds the gradient of the queries, which is summed in float32."""
    call = op.calls[0]
    is_backward = call.kind.endswith("_backward")
    first = is_backward or call.kind.endswith("_out")  # a gradient or a result
    query, key = call.arrays[first : 2 + first]
    name = call.kind.removeprefix(f"aten.{_PREFIX}")
    place = _CAUSAL[name]
    if len(query.size) == 3:
        sequences, longest = call.arrays[6 if is_backward else 3 + first].num_elements - 1, call.arguments[place - 2 :]
        query, key = (_of_equal_lengths(*one, sequences) for one in zip((query, key), longest, strict=False))
    (batch, heads, queries, width), (kv_heads, keys) = query.size, key.size[-3:-1]
    bias = call.arrays[_BIAS.get(name, len(call.arrays)) :][:1]
    by_head = [pair for array in bias for pair in zip(array.size[-3:-2], array.strides[-3:-2], strict=True)]
    is_biased = item_bytes(query.dtype) < 4 and any(size > 1 and stride for size, stride in by_head)
    is_causal = place < len(call.arguments) and call.arguments[place] == 1
    causal = int(is_causal) * (_ZIGZAG if call.kind.startswith("context.") else 1)
    window, shown = next(iter(call.arguments[place + 1 :]), 0) if name == _SERVED else 0, keys
    if causal and isinstance(window, int) and 0 < window < keys:  # as one that is not causal, of the keys that it sees
        causal, shown = 0, round(window - window * (window - 1) / (2 * max(queries, 1)))
    size = (batch * kv_heads, max(heads // max(kv_heads, 1), 1), queries, shown, width, causal, is_biased)
    seen = float(keys_seen(np.array([size], np.float64), 1)[0])
    flops = round(op.flops * seen / keys) if keys else 0
    kernels = [Kernel("attention_backward" if is_backward else "attention", flops, op.bytes, size)]
    row_bytes = item_bytes(key.dtype)
    if key.strides[-2] and key.strides[-2] * row_bytes % _CONFLICT_BYTES == 0:
        rows = batch * heads * -(-queries // core_block(queries)) * 2 * keys
        kernels.append(Kernel("conflicting_read", 0, int(_CONFLICTS * rows * width * row_bytes), launches=0))
    if is_backward:
        elements, held = query.num_elements, item_bytes(query.dtype)
        kernels.append(Kernel("pointwise", 0, int(elements * 2 * held) + 4 * batch * heads * queries))
        kernels.append(Kernel("pointwise", 0, int(elements * (4 + held))))
    return kernels


def _of_equal_lengths(packed: Array, longest: Argument, sequences: int) -> Array:
    """Returns sequences of [tokens, heads, width], or of pages of such, as [sequences, heads, tokens, width]."""
    *tokens, heads, width = packed.size
    *_, row, head, element = packed.strides
    length = math.prod(tokens) // max(sequences, 1)
    length = min(length, longest) if isinstance(longest, int) else length
    return Array(packed.dtype, (sequences, heads, length, width), (row * length, head, row, element))


def core_block(queries: int) -> int:
    """Returns the queries of a block on a processor core."""
    return next(rows for least, rows in _CORE_BLOCKS if queries >= least)


def attention_ns(size: F64, flops: F64, is_forward: Bool, processors: Multiprocessors) -> F64:
    """Returns the ns [K] of attention of `size` [K, 7], if memory is quick enough, without its floor. A size has
    sequences x heads of keys, heads of queries for each of them, queries, keys, width, 1 if causal, 2 in zigzag, and 1
    with a bias of heads."""
    parts, group, queries, keys, _, _, is_biased = size.T
    is_decode, flops = queries == 1, np.where(is_biased, _BIASED, 1) * flops
    pairs = parts * group * queries * keys_seen(size, 1)
    is_few = is_forward & (parts * group * np.ceil(queries / _SHORT_BLOCK) < _FEW * processors.count)
    best = np.full(len(size), np.inf)
    for splits in _SPLITS:
        block = np.where(is_decode | (splits > 1), _SHORT_BLOCK, _BLOCK)
        blocks = parts * np.where(is_decode, np.ceil(group / block), group * np.ceil(queries / block))
        key_ns = block * flops / np.maximum(pairs, 1) / processors.flops_per_ns
        key_ns = np.where(is_decode, np.maximum(key_ns, _KEY_NS), key_ns)
        seen = np.where(is_decode, keys, keys_seen(size, _BLOCK if splits == 1 else _SHORT_BLOCK))
        spent_ns = _BLOCK_NS + np.ceil(seen / splits / _KEYS) * _KEYS * key_ns
        spent_ns *= np.ceil(blocks * splits / processors.count)
        if splits > 1:
            spent_ns = np.where((is_decode | is_few) & (seen >= splits * _LEAST_SPLIT), spent_ns, np.inf)
            spent_ns += processors.next_kernel_ns
        best = np.minimum(best, spent_ns)
    return np.asarray(best)


def keys_seen(size: F64, block: int) -> F64:
    """Returns the mean number of keys [K] that a block of queries sees; the last query sees all."""
    _, _, queries, keys, _, is_causal, _ = size.T
    rows = np.minimum(queries, keys)  # that see a key
    seen = (keys - np.maximum(rows - block, 0) / 2) * rows / np.maximum(queries, 1)
    return np.asarray(np.where(is_causal == 1, seen, keys / np.where(is_causal == _ZIGZAG, 2, 1)))
