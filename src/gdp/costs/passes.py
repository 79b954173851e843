"""Passes: kernels that memory bounds, and how often they read and write their tensors."""

import math
import re

from gdp.costs.kernels import Kernel, PricedOp
from gdp.graph.shapes import Array, ShapedCall

_BITS = re.compile(r"\d+")
_LONGEST_KEPT = 1024  # elements of a row that PyTorch's softmax keeps in registers; longer ones are read twice
_TENSORS_OF_A_KERNEL = 48  # of three lists: depth_to_max_tensors in PyTorch's MultiTensorApply.cuh
_FUNCTIONS = re.compile(
    r"gelu|silu|swish|mish|\.elu|celu|selu|softplus|sigmoid|tanh|exp(?!and)|log(?!ical)|erf|pow|rsqrt|sin|cos"
    r"|native_dropout$"
)
_COPIES = "aten.cat", "aten.stack"
_NARROW = 1024  # elements of a row; a thread block has it, and waits for its sum


def array_bytes(array: Array) -> int:
    """Returns the bytes of distinct elements: `expand` repeats none."""
    bits = _BITS.search(array.dtype)
    elements = math.prod(size for size, stride in zip(array.size, array.strides, strict=True) if stride)
    return elements * max(1, int(bits[0]) // 8 if bits else 1)


def call_bytes(call: ShapedCall) -> int:
    """Returns the bytes of a call that reads its arguments and writes its results once."""
    return sum(map(array_bytes, (*call.arrays, *call.results)))


def innermost(array: Array) -> tuple[int, int]:
    """Returns the dimension along which neighbours in memory lie, and how many of them; (-1, 1): none."""
    pairs = [(stride, -dim) for dim, stride in enumerate(array.strides) if stride and array.size[dim] > 1]
    stride, dim = min(pairs, default=(0, 1))
    return (-dim, array.size[-dim]) if stride == 1 else (-1, 1)


def is_contiguous(array: Array) -> bool:
    """Returns whether elements lie in memory in the order of their indices, but for dimensions of one element."""
    step = 1
    for size, stride in zip(reversed(array.size), reversed(array.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def is_channels_last(array: Array) -> bool:
    """Returns whether PyTorch takes an image or volume to be in channels_last: by its strides, in doubt not."""
    dims, least = len(array.size), 0
    if dims not in (4, 5) or not array.strides[1]:
        return False
    for dim in (1, *range(dims - 1, 1, -1), 0):
        stride = array.strides[dim]
        if stride < least or (dim == 0 and least == array.strides[1]):
            return False
        least = stride * max(array.size[dim], 1)
    return True


def transposes(call: ShapedCall) -> bool:
    """Returns whether neighbours in the result lie apart in an argument of its size, or of more elements."""
    if not call.results:
        return False
    result = call.results[0]
    dim, length = innermost(result)
    for array in call.arrays:
        if array.num_elements < result.num_elements or len(array.size) != len(result.size) or dim < 0:
            continue
        if innermost(array)[0] not in (dim, -1) and min(length, innermost(array)[1]) > 1:
            return True
    return False


def pointwise(op: PricedOp) -> list[Kernel]:
    """Operands are read, the result is written: across the order of memory if strides differ."""
    kind = _kind(op.calls[0])
    return [Kernel("transposed_copy" if kind == "transpose" and not op.is_compiled else kind, op.flops, op.bytes)]


def _kind(call: ShapedCall) -> str:
    """Returns the class of a pointwise call: elements of one type are moved four or eight at a time. A mask is of a
    type of its own, but nothing is converted to or from it, unless the call is a copy."""
    if transposes(call):
        return "transpose"
    large = max((array.num_elements for array in (*call.arrays, *call.results)), default=0)
    types = {array.dtype for array in (*call.arrays, *call.results) if array.num_elements == large}
    if "copy" not in call.kind:
        types.discard("bool")
    if len(types) > 1 or call.kind in _COPIES:
        return "copy"
    return "function" if _FUNCTIONS.search(call.kind) else "pointwise"


def _made_contiguous(*arrays: Array) -> list[Kernel]:
    """Copies that kernels have made which take contiguous tensors alone."""
    return [Kernel("transposed_copy", 0, 2 * array_bytes(array)) for array in arrays if not is_contiguous(array)]


def _of_batch_norm(op: PricedOp, end: str = "") -> str:
    """Returns the class of a batch norm in training: in bfloat16 PyTorch takes kernels of its own."""
    array = op.calls[0].arrays[0]
    if array.dtype != "bfloat16" or op.is_compiled:
        return "norm" if end else "batch_norm"
    return f"native_batch_norm{end}{'_last' * is_channels_last(array)}"


def _is_narrow(op: PricedOp, array: Array) -> bool:
    return "group" not in op.kind and not op.is_compiled and bool(array.size) and array.size[-1] <= _NARROW


def batch_norm(op: PricedOp) -> list[Kernel]:
    """In training the statistics are read first; in inference they are known."""
    call = op.calls[0]
    is_training = "no_training" not in call.kind and call.arguments[5] != 0
    kind = _of_batch_norm(op) if is_training else "norm"
    return [Kernel(kind, op.flops, op.bytes + is_training * array_bytes(call.arrays[0]))]


def batch_norm_backward(op: PricedOp) -> list[Kernel]:
    """Two sums over gradient and input come first, then both are read again."""
    gradient, values = op.calls[0].arrays[:2]
    return [Kernel(_of_batch_norm(op, "_backward"), op.flops, op.bytes + array_bytes(gradient) + array_bytes(values))]


def row_norm(op: PricedOp) -> list[Kernel]:
    """Layer and RMS norm: a row stays on the multiprocessor between statistics and result."""
    values = op.calls[0].arrays[0]
    return [*_made_contiguous(values), Kernel("narrow_norm" if _is_narrow(op, values) else "norm", op.flops, op.bytes)]


def row_norm_backward(op: PricedOp) -> list[Kernel]:
    """The gradients of input and of weights are kernels of their own, and each reads gradient and input."""
    gradient, values = op.calls[0].arrays[:2]
    both = array_bytes(gradient) + array_bytes(values)
    copies = _made_contiguous(gradient, values)
    kinds = ("narrow_norm", "narrow_sum") if _is_narrow(op, values) else ("norm", "reduction")
    return [*copies, Kernel(kinds[0], op.flops, op.bytes), Kernel(kinds[1], 0, both)]


def group_norm(op: PricedOp) -> list[Kernel]:
    """Statistics are a kernel, the result another."""
    values = array_bytes(op.calls[0].arrays[0])
    return [*_made_contiguous(op.calls[0].arrays[0]), Kernel("norm", 0, values), Kernel("norm", op.flops, op.bytes)]


def softmax(op: PricedOp) -> list[Kernel]:
    """Rows that fit in registers are read once, longer ones twice: for the sum, then for the result."""
    call = op.calls[0]
    kept = call.arrays[0] if "backward" not in op.kind else call.arrays[1]
    dim = next((argument for argument in call.arguments if isinstance(argument, int)), -1)
    again = sum(map(array_bytes, call.arrays)) if kept.size and kept.size[dim] > _LONGEST_KEPT else 0
    return [*_made_contiguous(*call.arrays), Kernel("softmax", op.flops, op.bytes + again)]


def filled_and_copied(op: PricedOp) -> list[Kernel]:
    """Gradients of slices, and padding: the result is filled, then a part of it is copied."""
    call = op.calls[0]
    made, part = array_bytes(call.results[0]), min(array_bytes(call.arrays[0]), array_bytes(call.results[0]))
    copy = Kernel(_kind(call), 0, 2 * part)
    return [Kernel("pointwise", 0, made), copy]


def optimizer(op: PricedOp) -> list[Kernel]:
    """The update of a parameter: one call after the other in a loop, else a part of kernels of many parameters."""
    moved, once, calls = (max(number, 1) for number in op.calls[0].arguments if isinstance(number, int))
    tensors = 1 if op.calls[0].kind == "optimizer.for-loop" else _TENSORS_OF_A_KERNEL
    return [Kernel("optimizer", op.flops, op.bytes * moved // once, launches=calls / tensors)]
