"""Products of matrices as cards run them: cut into tiles, which go to multiprocessors in waves. A product of `parts`
pairs [m, k] x [k, n] is cut into ceil(m / rows) * ceil(n / columns) tiles a part, and, where these are few, each tile
into splits of its k. A multiprocessor runs one tile after the other; a last wave that is not full takes as long as a
full one. In each step of k a tile multiplies, and reads a column and a row of operands from the cache; the longer of
both counts. Libraries choose among tiles by heuristics that are mostly right: the quickest counts."""

import math
import re
from dataclasses import dataclass

import numpy as np

from gdp.arrays import F64
from gdp.cluster import Device
from gdp.costs.kernels import Kernel, PricedOp
from gdp.graph.shapes import ShapedCall

# Rows and columns of tiles: those of CUTLASS's kernels for tensor cores, and narrower ones for few rows or columns
_SIDES = ((256, 128), (256, 64), (128, 128), (128, 64), (128, 32), (64, 64), (64, 32), (64, 16), (32, 32), (32, 16))
_TILES = tuple(dict.fromkeys([*_SIDES, *((columns, rows) for rows, columns in _SIDES)]))
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # of k
_LEAST_SPLIT, _K_STEP = 64, 32  # of k: what a split has, and what is read at a time
# Rows of halves that are no multiple of 16 bytes are read element by element: an RTX 4090 reaches 107-116 TFLOP/s then,
# in place of 156 (github.com/pytorch/pytorch/issues/181718); with libraries of before, an A100 trained nanoGPT 25 %
# faster with 50,304 words than with 50,257, which is about 0.4. Fitted on the 24 set rows of vTrain's GPT, of 50,257.
_ALIGNED, _UNALIGNED_PACE = 8, 0.45
_PADDED = 512  # rows and columns that Inductor fills up where it is quicker: the head of GPT-2, on an H200. Untuned
_SUM_BYTES = 4  # of a partial sum
# Fitted on the tables of all three cards (benchmarks/data/measured/gemm-*.csv): the steps of k that a tile reads until
# it multiplies, and takes to write its sums; and the norm by which reading memory and multiplying overlap.
_FILL, _OVERLAP = 128, 3.0

_SUMS = 128 * 128  # that a multiprocessor holds: tiles that have these together wait for their first operands at once

_ADDED = ("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm", "addmv")
_OTHERS = """mm bmm mv linear matmul _int_mm _scaled_mm _scaled_mm_v2 _weight_int8pack_mm _weight_int4pack_mm
_weight_int4pack_mm_for_cpu _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 _sparse_semi_structured_mm
_sparse_semi_structured_addmm _sparse_semi_structured_linear _cslt_sparse_mm _foreach_mm"""
PRODUCTS = *_ADDED, *_OTHERS.split(), "transformers.grouped_mm_fallback"
"""Kinds of PyTorch's calls that are one product of matrices."""
_GRU_GATES = 3
RECURRENT = "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"  # kinds of calls that are a layer of a recurrent net


def product(op: PricedOp) -> list[Kernel]:
    """One kernel. A bias of one dimension is added by it (cuBLASLt's epilogue); `addmm` and its like copy any other
    summand to the result first, unless they work in place."""
    call = op.calls[0]
    size = product_size(call, op.flops)
    if op.is_compiled:  # Inductor fills odd rows up (`shape_padding`)
        n, k = (-(-each // _ALIGNED) * _ALIGNED if each >= _PADDED else each for each in size[2:])
        size = (*size[:2], n, k)
    kernels = [Kernel("product", op.flops, op.bytes, size)]
    name = call.kind.rpartition(".")[2]
    is_copied = name in _ADDED and not name.endswith("_") and not op.is_compiled
    if is_copied and len(call.arrays) > 2 and len(call.arrays[0].size) > 1:
        copied = call.arrays[0].num_elements + call.results[0].num_elements
        kernels.append(Kernel("pointwise", 0, int(copied * item_bytes(call.results[0].dtype))))
    return kernels


def recurrent(op: PricedOp) -> list[Kernel]:
    """Products of all steps at once with the weights of inputs, and one product a step with those of the state. A step
    waits for the one before, and reads the weights again: its state and gates are computed in the same kernel (J.
    Appleyard et al., "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016, as cuDNN does). Gradients of
    the weights are products of all steps at once."""
    call = op.calls[0]
    (steps, batch, width), (gates, hidden) = call.arrays[0].size, call.arrays[2].size
    held, rows = item_bytes(call.arrays[0].dtype), steps * batch

    def of(m: int, n: int, k: int, more: int = 0) -> Kernel:
        return Kernel("product", 2 * m * n * k, int(held * (m * n + m * k + n * k + more)), (1, m, n, k))

    if call.kind.endswith("_backward"):
        each = [
            of(gates, size, batch, gates * size)._replace(kind="core_product", launches=0) for size in (width, hidden)
        ]
        again = each * steps * (gates == _GRU_GATES * hidden)  # oneDNN sums gradients of a GRU's weights in each step
        wholes = [*again, of(rows, width, gates), of(gates, width, rows), of(gates, hidden, rows)]
        return [of(batch, hidden, gates, batch * (hidden + gates))] * steps + wholes
    return [of(rows, gates, width)] + [of(batch, gates, hidden, batch * (hidden + gates))] * steps


def product_size(call: ShapedCall, flops: int) -> tuple[int, int, int, int]:
    """Returns parts, m, n and k of a product: those of its result, and the k that its FLOPs tell in any packing.
    Operands of three dimensions are of parts: matrices of a batch, or experts with equally many rows."""
    result = call.results[0].size if call.results else ()
    m, n = (*result, 1, 1)[:2] if len(result) < 2 else result[-2:]
    rows = math.prod(result[:-2]) * m
    with_parts = [array.size for array in call.arrays[1:] if len(array.size) > 2 and "pack" not in call.kind]
    if len(result) > 2 and all(len(array.size) < 3 for array in call.arrays):  # gradient of the experts' weights
        with_parts = [result]
    parts = max(min(max((math.prod(size[:-2]) for size in with_parts), default=1), rows), 1)
    k = flops // (2 * rows * n) if rows * n else 0
    return parts, -(-rows // parts), n, k


@dataclass(frozen=True)
class Multiprocessors:
    """The multiprocessors of a card."""

    count: float
    flops_per_ns: F64  # [K] of one, achieved, in the types of K kernels
    bytes_per_ns: float  # of operands that one reads; infinite where the card does not tell
    next_kernel_ns: float  # until a second kernel works, which adds splits
    odd_pace: float = _UNALIGNED_PACE  # of products whose rows of halves are not aligned, beside others


def multiprocessors_of(device: Device, flops_per_second: F64) -> Multiprocessors:
    """Returns those of a device that reaches `flops_per_second` [K]."""
    count, figures = device.achieved["multiprocessors"], device.achieved
    return Multiprocessors(
        count,
        flops_per_second / count / 1e9,
        figures.get("operand_bytes_per_second", 0) / 1e9 or np.inf,
        figures.get("gap_ns", device.launch_ns) + figures.get("product_floor_ns", 0),
        figures.get("odd_pace", 0) or _UNALIGNED_PACE,
    )


def tiled_ns(size: F64, element_bytes: F64, processors: Multiprocessors) -> F64:
    """Returns the ns [K] in which products of `size` [K, 4] are done, if memory is quick enough."""
    parts, m, n, k = size.T
    is_aligned = (element_bytes != 2) | (((n % _ALIGNED == 0) | (n == 1)) & (k % _ALIGNED == 0))
    pace = np.where(is_aligned, 1, processors.odd_pace)
    rows, columns = np.array(_TILES, np.float64).T[:, :, None]  # [T, 1] tiles
    tiles = parts * np.ceil(m / rows) * np.ceil(n / columns)
    height, width = np.where(m == 1, 1, rows), np.where(n == 1, 1, columns)  # kernels for vectors have no tiles
    read_ns = (height + width) * element_bytes / processors.bytes_per_ns
    step_ns = np.maximum(2 * height * width / processors.flops_per_ns, read_ns) / pace
    together = np.maximum(_SUMS // (rows * columns), 1)  # small tiles, which one multiprocessor has at a time
    best = np.full(len(size), np.inf)
    for splits in _SPLITS:
        steps = np.ceil(k / splits / _K_STEP) * _K_STEP
        waves = np.ceil(tiles * splits / processors.count)
        spent_ns = (waves * steps * step_ns + np.ceil(waves / together) * _FILL * read_ns).min(axis=0)
        if splits > 1:
            summed_bytes = 2 * _SUM_BYTES * splits * parts * m * n  # written and read
            spent_ns += processors.next_kernel_ns + summed_bytes / (processors.bytes_per_ns * processors.count)
            spent_ns[k < splits * _LEAST_SPLIT] = np.inf
        best = np.minimum(best, spent_ns)
    return np.asarray(best)


def together_ns(work_ns: F64, bytes_ns: F64) -> F64:
    """Returns the ns [K] of kernels that multiply while they read memory."""
    longest = np.maximum(np.maximum(work_ns, bytes_ns), 1e-9)
    ratio = np.minimum(work_ns, bytes_ns) / longest
    return np.asarray(longest * (1 + ratio**_OVERLAP) ** (1 / _OVERLAP))


def item_bytes(dtype: str) -> float:
    """Returns the bytes of an element, by the bits in the name of its type."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1.0
