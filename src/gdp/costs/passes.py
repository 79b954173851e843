"""Passes: kernels that memory bounds, and how often they read and write their tensors."""

import math
import re
from collections.abc import Sequence

from gdp.costs.kernels import Kernel, PricedOp
from gdp.graph.shapes import Array, ShapedCall

_BITS = re.compile(r"\d+")
_LONGEST_KEPT = 1024  # elements of a row that PyTorch's softmax keeps in registers; longer ones are read twice
_TENSORS_OF_A_KERNEL = 48  # of three lists: depth_to_max_tensors in PyTorch's MultiTensorApply.cuh
_FUNCTIONS = re.compile(
    r"gelu|silu|swish|mish|\.elu|celu|selu|softplus|sigmoid|tanh|exp(?!and)|log(?!ical)|erf|pow|rsqrt|sin|cos"
)
_COPIES = "aten.cat", "aten.stack"
_NARROW = 1024  # elements of a row; a thread block has it, and waits for its sum
_NARROW_SUM = 4096  # the same of a sum over rows: blocks have few columns each
# ns that a thread block takes, however many run beside it: of a row of a norm, backward of an element and at most; of a
# byte of a channel or group that it has alone; of the elements of a pool. Fitted on single ops on an H100
# (benchmarks/data/h100/further-ops.csv)
_ROW_NS, _ROW_GRADIENT_NS, _ROW_SUM_NS = 1200, (6, 1700), (9, 3300)
_CHANNEL_NS, _CHANNEL_GRADIENT_NS, _GROUP_NS = 0.17, 0.18, 0.45
_POOL_NS, _POOL_GRADIENT_NS, _POOLED = 4800, 7000, 256  # elements of a block
_STEP_NS = 370  # of a scan across the order of memory, for an element
_PLANE = 150  # elements of a channel of an image: fewer are read in parts of what memory delivers


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


def _are_alike(arrays: Sequence[Array]) -> bool:
    """Returns whether arrays lie in memory without gaps, and elements of one index in one place of each."""
    of_each = {tuple(pair for pair in zip(array.strides, array.size, strict=True) if pair[1] > 1) for array in arrays}
    step = 1
    for stride, size in sorted(min(of_each, default=())):
        if stride != step:
            return False
        step *= size
    return len(of_each) < 2


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
    if op.is_compiled:  # Inductor reads several elements at once in any of these
        kind = {
            "strided_copy": "pointwise",
            "widening_copy": "copy",
            "interleaved_copy": "copy",
            "permuted_copy": "copy",
        }.get(kind, kind)
    elif kind == "transpose":
        kind = "transposed_copy"
    return [Kernel(kind, op.flops, op.bytes)]


def _kind(call: ShapedCall) -> str:
    """Returns the class of a pointwise call: elements of one type are moved four or eight at a time. A mask is of a
    type of its own, but nothing is converted to or from it, unless the call is a copy."""
    if transposes(call):
        return "transpose"
    large = max((array.num_elements for array in (*call.arrays, *call.results)), default=0)
    of_all = [array for array in (*call.arrays, *call.results) if array.num_elements == large]
    types = {array.dtype for array in of_all}
    if "copy" not in call.kind:
        types.discard("bool")
    if len(types) > 1:
        return "widening_copy" if "float32" in {array.dtype for array in call.results} else "copy"
    if call.kind in _COPIES:
        if any(_is_permuted(array, call.results[0]) for array in call.arrays):
            return "permuted_copy"
        if not all(_are_alike([array]) for array in call.arrays):
            return "strided_copy"
        return "interleaved_copy" if any(map(is_channels_last, call.results)) else "copy"
    if not _are_alike(of_all) or any(1 < array.num_elements < large for array in call.arrays):
        return "strided_copy"
    if call.kind.endswith(("native_dropout", "native_dropout_backward")):
        return "masked" if call.kind.endswith("backward") else "random"
    return "function" if _FUNCTIONS.search(call.kind) else "pointwise"


def _is_permuted(part: Array, result: Array) -> bool:
    """Returns whether the dimensions of a part lie in memory in another order than those of the result."""
    own, other = (
        sorted(
            (dim for dim, size in enumerate(array.size) if size > 1 and array.strides[dim]),
            key=lambda dim: -array.strides[dim],
        )
        for array in (part, result)
    )
    if is_contiguous(result):
        return own != sorted(own)
    return len(part.size) == len(result.size) and own != [dim for dim in other if dim in own]


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


def is_training(call: ShapedCall) -> bool:
    """Returns whether a batch norm reads the statistics of its batch."""
    return "no_training" not in call.kind and call.arguments[5:6] != (0,)


def batch_norm(op: PricedOp) -> list[Kernel]:
    """In training the statistics are read first; in inference they are known. In bfloat16 several kernels are launched
    (benchmarks/data/h200/ops.csv, h100/further-ops.csv)."""
    call = op.calls[0]
    values = call.arrays[0]
    if not is_training(call):
        launches = 3 if values.dtype == "bfloat16" and not op.is_compiled else 1
        if op.is_compiled or is_channels_last(values):
            return [Kernel("norm", op.flops, op.bytes, launches=launches)]
        return [Kernel("evaluated_batch_norm", op.flops, round(op.bytes * _of_small_planes(values)), launches=launches)]
    kind, moved = _of_batch_norm(op), op.bytes + array_bytes(values)
    if kind != "native_batch_norm":
        return [Kernel(kind, op.flops, moved, launches=4 if kind.startswith("native") else 1)]
    size = _channels(values, moved, _CHANNEL_NS)
    return [Kernel(kind, op.flops, round(moved * _of_small_planes(values)), size, launches=3)]


def _of_small_planes(values: Array) -> float:
    """Returns how much longer a pass over channels of small images in bfloat16 takes."""
    plane = math.prod(values.size[2:])
    return max(1, _PLANE / plane) if plane and values.dtype == "bfloat16" else 1


def batch_norm_backward(op: PricedOp) -> list[Kernel]:
    """Two sums over gradient and input come first, then both are read again."""
    gradient, values = op.calls[0].arrays[:2]
    kind, moved = _of_batch_norm(op, "_backward"), op.bytes + array_bytes(gradient) + array_bytes(values)
    size = _channels(values, moved, _CHANNEL_GRADIENT_NS) if kind == "native_batch_norm_backward" else ()
    return [Kernel(kind, op.flops, moved, size, launches=3 if kind.endswith("_backward_last") else 1)]


def _channels(values: Array, moved: int, ns: float) -> tuple[int, ...]:
    """Returns the blocks of PyTorch's own batch norm, one for a channel, and the ns that each takes."""
    channels = max(values.size[1], 1) if len(values.size) > 1 else 1
    return channels, round(moved / channels * ns)


def row_norm(op: PricedOp) -> list[Kernel]:
    """Layer and RMS norm: a row stays on the multiprocessor between statistics and result."""
    values = op.calls[0].arrays[0]
    kind, size = ("narrow_norm", (_num_rows(values), _ROW_NS)) if _is_narrow(op, values) else ("norm", ())
    return [*_made_contiguous(values), Kernel(kind, op.flops, op.bytes, size)]


def row_norm_backward(op: PricedOp) -> list[Kernel]:
    """The gradients of input and of weights are kernels of their own, and each reads gradient and input."""
    gradient, values = op.calls[0].arrays[:2]
    both = array_bytes(gradient) + array_bytes(values)
    copies = _made_contiguous(gradient, values)
    if not _is_narrow(op, values):
        return [*copies, Kernel("norm", op.flops, op.bytes), Kernel("reduction", 0, both)]
    rows = _num_rows(values)
    gradient_ns, sum_ns = (min(values.size[-1] * ns, most) for ns, most in (_ROW_GRADIENT_NS, _ROW_SUM_NS))
    norm = Kernel("narrow_norm", op.flops, op.bytes, (rows, gradient_ns))
    return [*copies, norm, Kernel("narrow_sum", 0, both, (rows, sum_ns))]


def _num_rows(array: Array) -> int:
    return array.num_elements // max(array.size[-1], 1)


def group_norm(op: PricedOp) -> list[Kernel]:
    """Statistics are a kernel, the result another."""
    call = op.calls[0]
    read, groups = array_bytes(call.arrays[0]), call.results[1].num_elements if len(call.results) > 1 else 0
    statistics = Kernel("norm", 0, read, (groups, round(read / groups * _GROUP_NS)) if groups else ())
    return [*_made_contiguous(call.arrays[0]), statistics, Kernel("norm", op.flops, op.bytes)]


def softmax(op: PricedOp) -> list[Kernel]:
    """Rows that fit in registers are read once, longer ones twice: for the sum, then for the result. The gradient is
    multiplied by the result first, but for that of a logarithm."""
    call = op.calls[0]
    kept = call.arrays[0] if "backward" not in op.kind else call.arrays[1]
    dim = next((argument for argument in call.arguments if isinstance(argument, int)), -1)
    again = sum(map(array_bytes, call.arrays)) if kept.size and kept.size[dim] > _LONGEST_KEPT else 0
    first = [Kernel("pointwise", 0, op.bytes)] if op.kind == "aten._softmax_backward_data" else []
    return [*_made_contiguous(*call.arrays), *first, Kernel("softmax", op.flops, op.bytes + again)]


def column_sum(op: PricedOp) -> list[Kernel]:
    """Sums over rows are of two kernels, where blocks share a column; of narrow rows each has little of it."""
    values, result = op.calls[0].arrays[0], op.calls[0].results[0]
    width = values.size[-1] if values.size else 1
    if op.is_compiled or not is_contiguous(values) or result.num_elements != width or values.num_elements == width:
        return [Kernel("reduction", op.flops, op.bytes)]
    kind = "narrow_sum" if width <= _NARROW_SUM else "reduction"
    return [Kernel(kind, op.flops, op.bytes), Kernel("reduction", 0, 0)]


def scan(op: PricedOp) -> list[Kernel]:
    """Along neighbours, a thread block has a row; across them a thread has a column, and goes through it alone."""
    call = op.calls[0]
    values, dim = call.arrays[0], next((argument for argument in call.arguments[1:] if isinstance(argument, int)), -1)
    is_inside = not values.size or values.size[dim] < 2 or values.strides[dim] == 1
    size = () if is_inside or op.is_compiled else (1, _STEP_NS * values.size[dim])
    return [Kernel("reduction", op.flops, op.bytes, size)]


def average_pool(op: PricedOp) -> list[Kernel]:
    """Each element looks for its window, or a gradient for all that it may be in."""
    ns = _POOL_GRADIENT_NS if "backward" in op.kind else _POOL_NS
    return [Kernel("pool", op.flops, op.bytes, (op.calls[0].results[0].num_elements // _POOLED, ns))]


def max_pool_backward(op: PricedOp) -> list[Kernel]:
    """The gradient is filled, then each of its elements reads the indices of the windows that it may be in."""
    return [Kernel("pool", op.flops, op.bytes if op.is_compiled else 2 * op.bytes)]


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
