"""Floating point operations of an operator, from the shapes of one call. A fused multiply-add is two. Matrix products
count by their definition; element-wise operators one per element of the result, for any function (an exponential is
one); reductions one per element read; normalisations and softmax by their definition per element; moving data counts
nothing. An operator that is in no table here and not in `torch.utils.flop_counter` is estimated as one per element of
the result and named in the capture's coverage."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.flop_counter import flop_registry

from gdp.models.names import by_name, counts, listed
from gdp.models.pytorch import linear_algebra
from gdp.models.textbook_flops import interpolation

Args = Sequence[Any]
Formula = Callable[[Args, Mapping[str, Any], list[Tensor]], int]
"""From a call's args, kwargs and the tensors that it returned or overwrote to FLOPs."""

FORMULA, POINTWISE, MOVEMENT, UNKNOWN = "formula", "pointwise", "movement", "unknown"
"""How FLOPs were found: by a formula, one per element, none to count, estimated."""

_registered: dict[str, Formula] = {}


def register_flops(op: str | OpOverload | OpOverloadPacket) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorates a function that returns the FLOPs of `op` (`"mylib.op"`, `"mylib.op.overload"` or the operator).

    It is called as `function(*args, out_val=result, **kwargs)` with the (fake) tensors of the call, as raw formulas of
    `torch.utils.flop_counter` are, and returns an integer. It precedes every formula of gdp and PyTorch. `op` may also
    be a JAX primitive (`"pallas_call"`): then the arguments are abstract values with `shape` and `dtype`, and the
    keyword arguments the primitive's parameters."""
    name = str(op).replace("::", ".")

    def register(function: Callable[..., int]) -> Callable[..., int]:
        def formula(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
            return int(function(*args, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs), **kwargs))

        _registered[name] = formula
        return function

    return register


def registered_formula(name: str) -> Formula | None:
    """Returns the formula that `register_flops` was given for `name`, if any."""
    return _registered.get(name)


def has_registered() -> bool:
    """Returns whether `register_flops` was called, so that this process counts differently from others."""
    return bool(_registered)


def count_flops(func: OpOverload, args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> tuple[int, str]:
    """Returns (FLOPs, how they were found) of one call; `outputs` are the tensors that it made or overwrote."""
    if _registered:
        formula = _registered.get(str(func)) or _registered.get(str(func.overloadpacket))
        if formula is not None:
            return formula(args, kwargs, outputs), FORMULA
    kind, table_formula = classify(func)
    if table_formula is not None:
        return table_formula(args, kwargs, outputs), kind
    if kind == FORMULA:
        result = outputs[0] if len(outputs) == 1 else tuple(outputs)
        return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)), kind
    if kind == MOVEMENT:
        return 0, kind
    return sum(output.numel() for output in outputs), kind


def product_operand(func: OpOverload, args: Args) -> Tensor | None:
    """Returns the operand of a product whose type says in which type the card multiplies; None for other calls. Results
    may be wider, and weights that are packed in fewer bits are unpacked to the type of the activations."""
    formula = classify(func)[1]
    position = None if formula is None else _OPERANDS.get(formula)
    return None if position is None else args[position]


@cache
def classify(func: OpOverload) -> tuple[str, Formula | None]:
    """Returns how FLOPs of an operator are found, and the formula, if it is one of gdp."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    if name in _FORMULAS:
        return FORMULA, _FORMULAS[name]
    if name in _MOVEMENT or name.endswith("_copy"):
        return MOVEMENT, None
    if func.overloadpacket in flop_registry:
        return FORMULA, None
    if torch.Tag.pointwise in func.tags or name in _POINTWISE or name.startswith("_foreach_"):
        return POINTWISE, None
    return UNKNOWN, None


def _product(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """[.., m, k] @ [.., k, n]; a product and a sum of complex numbers are four of each."""
    columns = args[1].shape[-1] if args[1].dim() > 1 else 1
    return (8 if args[0].is_complex() else 2) * int(args[0].numel()) * int(columns)


def _linear(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """x [.., in], weight [out, in]"""
    return 2 * outputs[0].numel() * int(args[0].shape[-1])


def _added_product(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """Counts c + a @ b: the sum is one more per element."""
    return _product(args[1:], kwargs, outputs) + outputs[0].numel()


def _grouped_product(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """Mixture-of-experts product: rows (or columns, or inner dimension) of the groups add up to the operand's own."""
    a, b = args[0], args[1]
    rows, inner = int(a.shape[-2]), int(a.shape[-1])
    return 2 * rows * inner * _pairs(a) * int(b.shape[-1]) * (int(a.shape[0]) if a.dim() == b.dim() == 3 else 1)


def _packed_product(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """[m, k] @ a weight of n columns in any packing: a pair of four-bit elements counts as one in a shape."""
    return 2 * int(args[0].numel()) * _pairs(args[0]) * int(outputs[0].shape[-1])


def _half_product(weight: int) -> Formula:
    """Counts two of four weights, which are stored and multiplied: 2 for each column, or row of a linear layer."""
    return lambda args, kwargs, outputs: 2 * args[weight].numel() * (outputs[0].numel() // args[weight].shape[0])


def _pairs(operand: Tensor) -> int:
    return 2 if operand.dtype is torch.float4_e2m1fn_x2 else 1


def _convolution(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """x, weight, bias, ..., transposed at 6; weight [out, in / groups, ...] or, transposed, [in, ...]."""
    x, weight, bias, transposed = args[0], args[1], args[2], args[6]
    pixels = x if transposed else outputs[0]
    # each pixel of each channel meets one filter: weight.shape[1:] multiply-adds
    return int(2 * pixels.numel() * math.prod(weight.shape[1:])) + (outputs[0].numel() if bias is not None else 0)


def _convolution_backward(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """grad, x, weight, bias sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask"""
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    forward = 2 * (x if transposed else grad).numel() * math.prod(weight.shape[1:])
    return int(forward * (bool(mask[0]) + bool(mask[1])) + (grad.numel() if mask[2] else 0))


def _attention(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """query, key, value [.., length, width], dropout: two products and a softmax (5) for all pairs, causal or not. With
    dropout, a draw, the mask and the scale are 3 more."""
    dropout = 3 if len(args) > 3 and args[3] else 0
    return _attention_pairs(args) * (2 * int(args[0].shape[-1]) + 2 * int(args[2].shape[-1]) + 5 + dropout)


def _attention_backward(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """grad, query, key, value, out, sums, dropout: scores again, gradients of value, scores, query and key; softmax 5,
    its backward 4. With dropout, a draw, and mask and scale of the shares and of their gradients are 5 more."""
    query, value, dropout = args[1], args[3], 5 if args[6] else 0
    return _attention_pairs(args[1:]) * (6 * int(query.shape[-1]) + 4 * int(value.shape[-1]) + 9 + dropout)


def _attention_pairs(args: Args) -> int:
    query, key = args[0], args[1]
    return int(math.prod(query.shape[:-1]) * key.shape[-2])


def _packed_attention(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """query, key, value [tokens, heads, width], ends of sequences, .., longest: as `_attention`, of equal lengths."""
    return _packed_pairs(args[0], args[1], args[3], args[6]) * (
        2 * int(args[0].shape[-1]) + 2 * int(args[2].shape[-1]) + 5
    )


def _packed_attention_backward(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """grad, query, key, value, out, sums, ends of sequences, .., longest: as `_attention_backward`."""
    pairs = _packed_pairs(args[1], args[2], args[6], args[9])
    return pairs * (6 * int(args[1].shape[-1]) + 4 * int(args[3].shape[-1]) + 9)


def _packed_pairs(query: Tensor, key: Tensor, ends: Tensor, longest: int) -> int:
    """Lengths are content. A key may be one of [pages, tokens, heads, width], which hold more than a step reads."""
    keys = math.prod(key.shape[:-2]) / max(1, ends.shape[0] - 1)
    return int(query.shape[0] * query.shape[1] * min(keys, longest))


def _rnn_layer(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """input [time, batch, width], weight_ih, weight_hh: the weights apply at every step of every sequence."""
    steps = math.prod(args[0].shape[:2])
    return int(2 * steps * (args[1].numel() + args[2].numel()))


def _scatter(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """One addition per element scattered: the last tensor among the arguments."""
    return int(next(item for item in reversed(list(args)) if isinstance(item, Tensor)).numel())


def _embedding_bag(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """table, indices, .., weights at 6: one addition per element looked up, and a product if it has a weight."""
    return int(args[1].numel() * args[0].shape[1]) * (2 if len(args) > 6 and args[6] is not None else 1)


def _sort(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    numel = int(args[0].numel())
    return numel * max(1, math.ceil(math.log2(max(2, numel))))


def _fourier(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """x, dimensions: 5 n log2(n) of a complex transform of n elements, half if one side is real (FFTW's measure)."""
    sides = (args[0], outputs[0])
    longest = max(sides, key=Tensor.numel)
    length = math.prod(longest.shape[dim] for dim in args[1])
    flops = 5 * longest.numel() * math.ceil(math.log2(max(2, length)))
    return int(flops) if all(side.is_complex() for side in sides) else int(flops) // 2


def _search(places: int) -> Formula:
    """Counts a comparison of each element for each halving of the sorted places, an argument."""
    return lambda args, kwargs, outputs: _comparisons(outputs[0], args[places].shape[-1])


def _comparisons(searched: Tensor, places: int) -> int:
    return int(searched.numel()) * math.ceil(math.log2(max(2, places)))


def _smoothed(taps: int, *, is_backward: bool = False) -> Formula:
    """Returns the formula of a resized image [.., height, width], with `taps` inputs in a dimension for an output. As
    many more as it shrinks, for it is smoothed; a product and a sum for each (`UpSampleBilinear2d.cu`)."""

    def formula(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
        before, after = (outputs[0], args[0]) if is_backward else (args[0], outputs[0])
        shrinks = (max(1.0, x / y) for x, y in zip(before.shape[-2:], after.shape[-2:], strict=True))
        return int(2 * after.numel() * math.prod(math.ceil(taps * shrink) for shrink in shrinks))

    return formula


def _read(count: int, argument: int = 0) -> Formula:
    """Counts per element of an argument."""
    return lambda args, kwargs, outputs: count * int(args[argument].numel())


def _out(count: int) -> Formula:
    """Counts per element of the result."""
    return lambda args, kwargs, outputs: count * outputs[0].numel()


def _pool(args: Args, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """x, kernel_size: one comparison or addition per element of each window; one number stands for all dimensions. A
    window may be larger than x (with `ceil_mode`, all of it is pooled)."""
    kernel, num_dims = args[1], outputs[0].dim() - 2
    sizes = list(kernel) if isinstance(kernel, (list, tuple)) else [kernel]
    sizes = sizes if len(sizes) > 1 else sizes * num_dims
    sides = args[0].shape[args[0].dim() - len(sizes) :]
    return int(outputs[0].numel() * math.prod(min(size, side) for size, side in zip(sizes, sides, strict=True)))


# by name without namespace `aten` and final underscore
_FORMULAS: dict[str, Formula] = dict.fromkeys(listed("pytorch", "reductions"), _read(1))
_FORMULAS |= {name: _out(count) for name, count in counts("pytorch", "out").items()}
_FORMULAS |= {name: _read(count) for name, count in counts("pytorch", "read").items()}
_FORMULAS |= linear_algebra.FORMULAS | by_name(
    {
        "mm bmm mv _int_mm": _product,
        "linear": _linear,
        "addmm baddbmm addmv addbmm _addmm_activation": _added_product,
        "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2": _grouped_product,
        "_scaled_mm _scaled_mm_v2 _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu": _packed_product,
        "_mixed_dtypes_linear": _packed_product,
        "_sparse_semi_structured_mm": _half_product(0),
        "_sparse_semi_structured_addmm _sparse_semi_structured_linear": _half_product(1),
        # with places among the weights; inner size from [k, n]
        "_cslt_sparse_mm": lambda args, kwargs, outputs: outputs[0].numel() * args[1].shape[-2],
        "_foreach_mm": lambda args, kwargs, outputs: _product([args[0][0], args[1][0]], kwargs, outputs),
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        "_scaled_dot_product_flash_attention_for_cpu context::attention": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward context::attention_backward": _attention_backward,
        "served::fused_attention": lambda args, kwargs, outputs: _attention(args[:3], kwargs, outputs),
        "torch_attn::_varlen_attn": _packed_attention,
        "torch_attn::_varlen_attn_out": lambda args, kwargs, outputs: _packed_attention(args[1:], kwargs, outputs),
        "torch_attn::_varlen_attn_backward": _packed_attention_backward,
        "mkldnn_rnn_layer": _rnn_layer,
        "mkldnn_rnn_layer_backward": lambda args, kwargs, outputs: 2 * _rnn_layer(args, kwargs, outputs),
        "scatter_add scatter_reduce index_add index_reduce index_put _index_put_impl put": _scatter,
        # a [.., n, n], b [.., n, m]: a product and a sum for each element of the triangle and column of b
        "linalg_solve_triangular": lambda args, kwargs, outputs: int(outputs[0].numel() * args[0].shape[-1]),
        "sort argsort": _sort,
        "_fft_r2c _fft_c2r _fft_c2c": _fourier,
        "_embedding_bag _embedding_bag_forward_only": _embedding_bag,
        # gradient of the bags, indices: one addition per element looked up
        "_embedding_bag_backward _embedding_bag_dense_backward": lambda args, kwargs, outputs: int(
            args[1].numel() * args[0].shape[1]
        ),
        # gradient of the bags, table, indices: a product of two rows for each index
        "_embedding_bag_per_sample_weights_backward": lambda args, kwargs, outputs: int(
            2 * args[2].numel() * args[1].shape[1]
        ),
        # table, indices: square, sum, scale
        "embedding_renorm": lambda args, kwargs, outputs: int(3 * args[1].numel() * args[0].shape[1]),
        "max_pool1d max_pool2d_with_indices max_pool3d_with_indices": _pool,
        "avg_pool1d avg_pool2d avg_pool3d": _pool,
        # one tensor in a list, see `Recorder`: square and sum, or compare
        "_foreach_norm _foreach_max": lambda args, kwargs, outputs: 2 * sum(int(one.numel()) for one in args[0]),
        # Transformers' grouped product for types without a fake implementation in PyTorch: a, b, ends of groups; the
        # gradient of each is a product as large as the forward one
        "transformers::grouped_mm_fallback": _grouped_product,
        "transformers::grouped_mm_fallback_backward": lambda args, kwargs, outputs: (
            2 * _grouped_product(args, kwargs, outputs)
        ),
        # gradients of both gates 5, of the new state 5, two products; six sums for the biases
        "_thnn_fused_gru_cell_backward": lambda args, kwargs, outputs: (23 if args[2] else 17) * int(args[0].numel()),
        # tanh; gradients of the cell 7, of three gates 4 and of one 3; of the last cell; four sums for the biases
        "_thnn_fused_lstm_cell_backward_impl": lambda args, kwargs, outputs: (
            (28 if args[5] else 24) * int(args[2].numel())
        ),
        "nll_loss_forward nll_loss2d_forward": _read(1, 1),
        # of each time and state: a logarithm of the sum of three exponentials; backward: as much, three for the sums of
        # states of a class, three of each class
        "_ctc_loss": lambda args, kwargs, outputs: 13 * outputs[1].numel(),
        "_ctc_loss_backward": lambda args, kwargs, outputs: int(16 * args[6].numel() + 3 * outputs[0].numel()),
        "grid_sampler_2d grid_sampler_3d": lambda args, kwargs, outputs: interpolation(
            outputs[0].numel(), outputs[0].dim() - 2, ("linear", "nearest", "cubic")[args[2]]
        ),
        "_upsample_bilinear2d_aa": _smoothed(2),
        "_upsample_bicubic2d_aa": _smoothed(4),
        "_upsample_bilinear2d_aa_backward": _smoothed(2, is_backward=True),
        "_upsample_bicubic2d_aa_backward": _smoothed(4, is_backward=True),
        "bucketize": _search(1),
        "isin": lambda args, kwargs, outputs: _comparisons(
            outputs[0], args[1].numel() if isinstance(args[1], Tensor) else 1
        ),
        "searchsorted": _search(0),
        "_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive mode": _sort,
        "_unsafe_index_put": _scatter,
        # theta [.., dims, dims + 1]: a product and a sum for each column and coordinate
        "affine_grid_generator": lambda args, kwargs, outputs: int(2 * args[0].shape[-1] * outputs[0].numel()),
        # [time, batch, in], [width, in, out]
        "conv_tbc": lambda args, kwargs, outputs: int(2 * outputs[0].numel() * args[1].numel() // args[1].shape[-1]),
    }
)

_OPERANDS: dict[Formula, int] = {_product: 0, _linear: 0, _packed_product: 0, _grouped_product: 0, _added_product: 1}

_POINTWISE, _MOVEMENT = listed("pytorch", "pointwise"), listed("pytorch", "movement")
