"""The single ops that `benchmarks.card` measures."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

OpCase = tuple[str, str, Callable[[], Any]]  # the op, its sizes, a function that runs it
OptimizerOf = Callable[[str, Sequence[nn.Parameter]], torch.optim.Optimizer]

ROWS = ((4096, 256), (4096, 768), (8192, 1024), (16384, 4096), (65536, 768), (8192, 50304))  # rows, width
VOCABULARY = 50_304
ATTENTIONS = (  # batch, heads, heads of keys and values, tokens, width of a head
    *((8, 12, 12, 512, 64), (8, 12, 12, 1024, 64), (4, 32, 32, 2048, 64)),
    *((2, 32, 8, 4096, 128), (1, 32, 8, 8192, 128), (64, 12, 12, 197, 64)),
)
CONVOLUTIONS = (  # channels in and out, window, stride, groups, side of the input
    *((3, 64, 7, 2, 1, 224), (64, 64, 1, 1, 1, 56), (64, 64, 3, 1, 1, 56), (128, 128, 3, 1, 1, 28)),
    *((256, 256, 3, 1, 1, 14), (512, 512, 3, 1, 1, 7), (256, 1024, 1, 1, 1, 14), (1024, 256, 1, 1, 1, 14)),
    *((128, 128, 3, 1, 32, 56), (512, 512, 3, 1, 32, 14), (96, 96, 3, 1, 96, 112), (240, 240, 5, 1, 240, 28)),
    *((96, 96, 7, 1, 96, 56), (672, 672, 3, 2, 672, 14)),
)


def op_cases(optimizer_of: OptimizerOf) -> Iterator[OpCase]:
    """Yields the ops, in bfloat16 unless their sizes say otherwise."""
    yield from _pointwise()
    for rows, width in ROWS:
        yield from _of_rows(rows, width)
    for batch, heads, kv_heads, length, dim in ATTENTIONS:
        yield from _attention(batch, heads, kv_heads, length, dim)
    for batch in (16, 128):
        for sizes in CONVOLUTIONS:
            for memory_format in (torch.contiguous_format, torch.channels_last):
                yield from _convolution(batch, *sizes, memory_format)
    yield from _optimizers(optimizer_of)


def further_op_cases(optimizer_of: OptimizerOf) -> Iterator[OpCase]:
    """Yields ops that steps have and the others lack: narrow rows, pools, moved data, heads without a mask."""
    for rows, width in ((401_408, 96), (100_352, 192), (25_088, 384), (6272, 768), (50_176, 320)):
        yield from _of_rows(rows, width)
    for rows, width in ((1_204_224, 49), (150_528, 197), (196_608, 512)):
        values = _randn(rows, width)
        out = functional.softmax(values, -1)
        yield "softmax", f"rows={rows} width={width}", partial(functional.softmax, values, -1)
        yield "softmax_backward", f"rows={rows} width={width}", _backward(out, (values,), torch.randn_like(out))
    yield from _optimizers(optimizer_of)
    for channels, side in ((64, 112), (256, 56), (512, 28), (2048, 7)):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            yield from _images(channels, side, memory_format)
    for batch, heads, length, dim in ((64, 12, 197, 64), (16, 16, 512, 64), (8, 8, 2048, 128), (4, 4, 1024, 256)):
        yield from _attention(batch, heads, heads, length, dim, is_causal=False)
    yield from _windows()
    yield from _moved()
    for batch in (8, 64):
        for sizes in CONVOLUTIONS[1:8]:
            yield from _convolution(batch, *sizes, torch.channels_last)
    for sizes in CONVOLUTIONS[-3:]:
        yield from _convolution(128, *sizes, torch.channels_last)


def _optimizers(optimizer_of: OptimizerOf) -> Iterator[OpCase]:
    for how in ("sgd", "adamw-loop", "adamw-foreach", "adamw-fused"):
        for count, size in ((100, 10_000), (300, 500_000), (50, 8_000_000)):
            parameters = [nn.Parameter(torch.randn(size, device="cuda")) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            step = optimizer_of(how, parameters).step
            yield f"optimizer-{how}", f"parameters={count} elements={size} float32", step
            if how == "sgd":
                clip = partial(nn.utils.clip_grad_norm_, parameters, 1e6)
                yield "clip_grad_norm", f"parameters={count} elements={size} float32", clip


def _images(channels: int, side: int, memory_format: torch.memory_format) -> Iterator[OpCase]:
    """Yields pools, norms and what joins and scales maps of 64 images."""

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        values = torch.randn(*shape, device="cuda", dtype=dtype)
        return values.to(memory_format=memory_format).requires_grad_(True)

    name = f"batch=64 channels={channels} side={side} "
    name += "nhwc" if memory_format is torch.channels_last else "nchw"
    maps, gates = randn(64, channels, side, side), randn(64, channels, 1, 1)
    half = randn(64, channels, side, side, dtype=torch.float16)
    norm, groups = nn.BatchNorm2d(channels).cuda(), nn.GroupNorm(1, channels).cuda().bfloat16()
    evaluated = nn.BatchNorm2d(channels).cuda().eval()
    makers: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "avg_pool-3x3": (lambda: functional.avg_pool2d(maps, 3, 1, 1, count_include_pad=False), maps),
        "avg_pool-2x2": (lambda: functional.avg_pool2d(maps, 2, 2, ceil_mode=True), maps),
        "adaptive_avg_pool": (lambda: functional.adaptive_avg_pool2d(maps, 1), maps),
        "mean": (lambda: maps.mean((2, 3), keepdim=True), maps),
        "max_pool": (lambda: functional.max_pool2d(maps, 3, 2, 1), maps),
        "batch_norm": (lambda: norm(maps), maps),
        "batch_norm-float16": (lambda: norm(half), half),
        "batch_norm-eval": (lambda: evaluated(maps), maps),
        "group_norm": (lambda: groups(maps), maps),
        "gate": (lambda: maps * gates.sigmoid(), maps),
        "cat": (lambda: torch.cat((maps, maps), 1), maps),
        "upsample": (lambda: functional.interpolate(maps, scale_factor=2.0, mode="nearest"), maps),
        "half_of_channels": (lambda: maps[:, : channels // 2].contiguous(), maps),
        "to_tokens": (lambda: maps.flatten(2).transpose(1, 2).contiguous(), maps),
    }
    for op, (make, of) in makers.items():
        yield op, name, make
        out = make()
        yield f"{op}_backward", name, _backward(out, (of,), torch.randn_like(out))


def _windows() -> Iterator[OpCase]:
    """Yields attention in windows of 49 tokens with a bias, and the copies that make windows."""
    for windows, heads, channels, side in ((4096, 3, 96, 56), (256, 12, 384, 14)):
        query, key, value = (_randn(windows, heads, 49, 32) for _ in range(3))
        bias = _randn(1, heads, 49, 49)
        attend = partial(functional.scaled_dot_product_attention, query, key, value, bias)
        name = f"windows={windows} heads={heads} length=49 dim=32 bias"
        yield "attention", name, attend
        out = attend()
        yield "attention_backward", name, _backward(out, (query, key, value, bias), torch.randn_like(out))
        maps = _randn(64, side, side, channels)
        name = f"batch=64 side={side} channels={channels}"
        parted = maps.view(64, side // 7, 7, side // 7, 7, channels).permute(0, 1, 3, 2, 4, 5)
        yield "window_partition", name, parted.contiguous
        yield "roll", name, partial(torch.roll, maps, (-3, -3), (1, 2))
        packed = _randn(windows, 49, 3, heads, 32).permute(2, 0, 3, 1, 4)
        yield "split_heads", f"windows={windows} heads={heads}", packed.contiguous


def _moved() -> Iterator[OpCase]:
    """Yields ops that move rows: gathers, scatters, repeats and rotations."""
    for rows, width in ((16_384, 1024), (65_536, 256)):
        values, name = _randn(rows, width), f"rows={rows} width={width}"
        ids = torch.randint(0, rows, (2 * rows,), device="cuda")
        sums = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
        table = torch.randn(50_304, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        looked_up = functional.embedding(ids[:rows], table)
        gradient = torch.randn_like(looked_up)
        yield "embedding_backward", name, _backward(looked_up, (table,), gradient)
        yield "index_select", name, partial(torch.index_select, values.detach(), 0, ids)
        yield "gather_rows", name, partial(operator.getitem, values, ids)
        sources = torch.randn(2 * rows, width, device="cuda", dtype=torch.bfloat16)
        yield "index_add", name, partial(sums.index_add_, 0, ids, sources)
        heads = values.view(8, rows // 8, width // 64, 64).transpose(1, 2)
        yield "merge_heads", name, heads.transpose(1, 2).reshape(8, rows // 8, width).contiguous
        yield "transpose_heads", name, heads.contiguous
        yield "repeat_heads", name, partial(torch.repeat_interleave, heads, 4, 1)
        yield "cat_halves", name, partial(torch.cat, (heads[..., 32:], heads[..., :32]), -1)
        yield "slice_rows", name, values[:, ::2].contiguous
        yield "cumsum", name, partial(torch.cumsum, values, 0)
        yield "topk", name, partial(torch.topk, values, 2)
        yield "where", name, partial(torch.where, values > 0, values, sums)
        yield "silu", name, partial(functional.silu, values)
        yield "cat_rows", name, partial(torch.cat, (values, values), 1)


def _pointwise() -> Iterator[OpCase]:
    for exponent in range(12, 29, 2):
        size = 2**exponent
        for dtype in (torch.bfloat16, torch.float32):
            left, right, out = (torch.randn(size, device="cuda").to(dtype) for _ in range(3))
            name = f"n={size} {dtype}"
            yield "add", name, partial(torch.add, left, right, out=out)
            yield "gelu", name, partial(functional.gelu, left)
            yield "copy", name, partial(out.copy_, left)
            yield "sum", name, left.sum
        yield "cast", f"n={size} f32->bf16", left.bfloat16


def _of_rows(rows: int, width: int) -> Iterator[OpCase]:
    name = f"rows={rows} width={width}"
    values, gradient = _randn(rows, width), torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    scale, shift = _randn(width), _randn(width)
    normed = partial(functional.layer_norm, values, (width,), scale, shift)
    yield "layer_norm", name, normed
    yield "layer_norm_backward", name, _backward(normed(), (values, scale, shift), gradient)
    by_rms = partial(functional.rms_norm, values, (width,), scale)
    yield "rms_norm", name, by_rms
    yield "rms_norm_backward", name, _backward(by_rms(), (values, scale), gradient)
    yield "softmax", name, partial(functional.softmax, values, -1)
    yield "softmax_backward", name, _backward(functional.softmax(values, -1), (values,), gradient)
    yield "sum_rows", name, partial(gradient.sum, 0)
    yield "transpose", name, gradient.t().contiguous
    classes = torch.randint(0, width, (rows,), device="cuda")
    yield "cross_entropy", name, lambda: functional.cross_entropy(values.float(), classes)
    table = torch.randn(VOCABULARY, min(width, 4096), device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, VOCABULARY, (rows,), device="cuda")
    yield "embedding", f"{name} table={VOCABULARY}", partial(functional.embedding, ids, table)
    yield "dropout", name, partial(functional.dropout, values, 0.1)


def _attention(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, is_causal: bool = True
) -> Iterator[OpCase]:
    name = f"batch={batch} heads={heads} kv={kv_heads} length={length} dim={dim}{' causal' if is_causal else ''}"
    query = _randn(batch, heads, length, dim)
    key, value = _randn(batch, kv_heads, length, dim), _randn(batch, kv_heads, length, dim)
    attend = partial(
        functional.scaled_dot_product_attention, query, key, value, is_causal=is_causal, enable_gqa=kv_heads != heads
    )
    yield "attention", name, attend
    out = attend()
    yield "attention_backward", name, _backward(out, (query, key, value), torch.randn_like(out))


def _convolution(
    batch: int,
    channels: int,
    filters: int,
    window: int,
    stride: int,
    groups: int,
    side: int,
    memory_format: torch.memory_format,
) -> Iterator[OpCase]:
    def randn(*shape: int) -> Tensor:
        values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        return values.to(memory_format=memory_format).requires_grad_(True)

    images, weight = randn(batch, channels, side, side), randn(filters, channels // groups, window, window)
    name = f"batch={batch} in={channels} out={filters} window={window} stride={stride} groups={groups} side={side} "
    name += "nhwc" if memory_format is torch.channels_last else "nchw"
    convolve = partial(functional.conv2d, images, weight, None, stride, window // 2, 1, groups)
    yield "conv", name, convolve
    out = convolve()
    gradient = torch.randn_like(out)
    yield "conv_backward_data", name, _backward(out, (images,), gradient)
    yield "conv_backward_weight", name, _backward(out, (weight,), gradient)
    if window == 3 and groups == 1:
        norm = nn.BatchNorm2d(filters).cuda()
        yield "batch_norm", name, partial(norm, out)
        yield "batch_norm_backward", name, _backward(norm(out), (out,), gradient)
        yield "max_pool", name, partial(functional.max_pool2d, out, 3, 2, 1)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _backward(out: Tensor, inputs: tuple[Tensor, ...], gradient: Tensor) -> Callable[[], Any]:
    return partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
