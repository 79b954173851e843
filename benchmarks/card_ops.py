"""The single ops that `benchmarks.card` measures."""

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
    for how in ("sgd", "adamw-loop", "adamw-foreach", "adamw-fused"):
        for count, size in ((100, 10_000), (300, 500_000), (50, 8_000_000)):
            parameters = [nn.Parameter(torch.randn(size, device="cuda")) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            step = optimizer_of(how, parameters).step
            yield f"optimizer-{how}", f"parameters={count} elements={size} float32", step


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


def _attention(batch: int, heads: int, kv_heads: int, length: int, dim: int) -> Iterator[OpCase]:
    name = f"batch={batch} heads={heads} kv={kv_heads} length={length} dim={dim} causal"
    query = _randn(batch, heads, length, dim)
    key, value = _randn(batch, kv_heads, length, dim), _randn(batch, kv_heads, length, dim)
    attend = partial(
        functional.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=kv_heads != heads
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
