"""Convolutions as the products that cuDNN computes (implicit GEMM), and the kernels beside them.

    result     [images x pixels of the result, channels x window] by [channels x window, channels of the result]
    input's    [images x pixels of the input, channels of the result x window / stride] by [.., channels]
    weights'   [channels of the result, images x pixels of the result] by [.., channels x window]

are the products of the forward pass and of the two gradients, in each group of channels. Input and result of a
transposed convolution change places. Tensor cores read channels_last: halves, and float32 that they round, are
transposed before and after.
"""

import math
from collections.abc import Sequence

from gdp.costs.kernels import Kernel, PricedOp
from gdp.costs.passes import array_bytes, is_channels_last
from gdp.graph.shapes import Array

_HALVES = ("float16", "bfloat16")
_WIDTH = 8  # channels that tensor cores take together in half precision, 16 bytes: fewer are padded
_NARROW = 3
"""Height and width of windows up to which libraries have depthwise kernels of their own for the weights' gradient."""


def convolution(op: PricedOp) -> list[Kernel]:
    """One kernel and, with a bias, one that adds it to the result."""
    call = op.calls[0]
    image, weight = call.arrays[:2]
    result = call.results[0]
    kernels = _Convolution(op, image, weight, result).kernels(result, (image, weight))
    has_bias = len(call.arrays) > 2 and not op.is_compiled
    return [*kernels, Kernel("pointwise", 0, 2 * array_bytes(result))] if has_bias else kernels


def convolution_backward(op: PricedOp) -> list[Kernel]:
    """A kernel for each gradient that is asked for: of the input, of the weights, and a sum for the bias."""
    call = op.calls[0]
    gradient, image, weight = call.arrays[:3]
    mask = call.arguments[10]
    assert isinstance(mask, tuple)
    own = _Convolution(op, image, weight, gradient)
    kernels = own.kernels(image, (gradient, weight)) if mask[0] else []
    kernels += own.kernels(weight, (gradient, image)) if mask[1] else []
    return [*kernels, Kernel("reduction", 0, array_bytes(gradient))] if mask[2] else kernels


class _Convolution:
    """A convolution whose result, or the gradient of that, is `result`."""

    def __init__(self, op: PricedOp, image: Array, weight: Array, result: Array) -> None:
        is_backward = op.kind.endswith("backward")
        is_transposed, groups = op.calls[0].arguments[6 + is_backward], op.calls[0].arguments[8 + is_backward]
        assert isinstance(groups, int)
        self._weight, self._groups = weight, groups
        self._narrow, self._wide = (image, result) if is_transposed else (result, image)
        self._channels = self._wide.size[1] // groups, self._narrow.size[1] // groups
        self._is_half, self._is_trained = op.dtype in _HALVES, op.is_trained
        self._is_rounded = op.dtype == "tf32"
        self._is_channels_last = is_channels_last(image) or is_channels_last(weight) or op.is_compiled
        self._end = "_backward" * (is_backward and self._is_channels_last)

    def kernels(self, made: Array, read: Sequence[Array]) -> list[Kernel]:
        """Returns the kernels that make the result, or a gradient, of two arrays."""
        num_bytes, is_weight = sum(map(array_bytes, (made, *read))), made is self._weight
        size = self._product(made)
        flops = 2 * math.prod(size)
        if self._groups > 1 and self._channels[0] == 1:  # PyTorch's own kernels, on the units of float32
            wide = "wide_" * (max(made.size[2:]) > _NARROW)
            kind = f"depthwise_{wide}weight_gradient" if is_weight else "depthwise_convolution"
            kind += "_last" * self._is_channels_last
            return [Kernel(kind, flops, num_bytes, dtype="float32")]
        activations = [each for each in (made, *read) if each is not self._weight]
        moved = [2 * array_bytes(each) for each in activations if self._is_copied(each)]
        copied = "transpose" if self._is_trained or self._is_channels_last else "inference_transpose"
        copied, launches = ("tf32_transpose", 0) if self._is_rounded else (copied, 1)  # TF32 is not on all cards
        copies = [Kernel(copied, 0, num_moved, launches=launches) for num_moved in moved]
        copies.append(Kernel("weight_transpose", 0, 2 * array_bytes(self._weight), launches=0))  # on processors alone
        if self._groups > 1:
            return [Kernel(f"grouped_convolution{self._end}", flops, num_bytes), *copies]
        kind = "first_convolution" if self._channels[0] < _WIDTH else "convolution"
        return [Kernel(kind, flops, num_bytes, size), *copies]

    def _is_copied(self, array: Array) -> bool:
        """Returns whether an array is transposed to or from channels_last, or padded to the width of tensor cores."""
        if self._is_rounded:
            return not self._is_channels_last
        return self._is_half and (not self._is_channels_last or array.size[1] % _WIDTH > 0)

    def _product(self, made: Array) -> tuple[int, int, int, int]:
        """Returns parts, m, n and k of the product that makes an array."""
        wide, narrow = (each.size[0] * math.prod(each.size[2:]) for each in (self._wide, self._narrow))
        window = math.prod(self._weight.size[2:])
        is_padded = self._is_half and (self._groups == 1 or self._channels[0] > 1)
        inner, outer = (-(-each // _WIDTH) * _WIDTH if is_padded else each for each in self._channels)
        if is_padded and self._groups > 1:  # tiles of 8, 16, 32, .. channels
            inner, outer = (2 ** (each - 1).bit_length() for each in (inner, outer))
        if made is self._weight:
            return self._groups, outer, inner * window, narrow
        if made is self._wide:
            return self._groups, wide, inner, -(-outer * window * narrow // wide)
        return self._groups, narrow, outer, inner * window
