"""FLOPs and bytes of a JAX primitive, from its parameters and the shapes of its inputs and outputs. FLOPs are counted
as in PyTorch captures (`pytorch/flops.py`): a fused multiply-add is two, element-wise primitives one per element of the
result (an exponential too), reductions one per element read, moving data nothing. Bytes are inputs and outputs, each
once; of a larger array that is indexed or updated, only the part. A primitive that is in no table here and has no
function from `gdp.register_flops` is estimated at one FLOP per element of its results."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdp.graph.shapes import product_text
from gdp.models import textbook_flops as textbook
from gdp.models.experts import share_hit
from gdp.models.jax.equations import IDENTITIES, called_jaxpr
from gdp.models.names import element_bits, listed, names
from gdp.models.pytorch.flops import FORMULA, MOVEMENT, POINTWISE, UNKNOWN, registered_formula

Params = Mapping[str, Any]
Formula = Callable[[Params, Sequence[Any], Sequence[Any]], int]
"""From a primitive's parameters and the abstract values (`shape`, `dtype`) of its inputs and outputs to FLOPs."""

POINTWISE_PRIMITIVES, _MOVEMENT = listed("jax", "pointwise"), listed("jax", "movement")
CONVERSIONS = frozenset({"convert_element_type", "real", "imag", "copy", "copy_p", "bitcast_convert_type"})
"""Element by element like the above, with nothing to count."""

_DRAWS, _REDUCTIONS = listed("jax", "draws"), listed("jax", "reductions")
_PLAIN_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})
_READERS = frozenset({"slice", "dynamic_slice", "gather"})
_FULL = re.compile(r"HIGHEST|\bF32_F32_F32")  # precisions that round nothing
_PRODUCTS = names("dot_general conv_general_dilated ragged_dot ragged_dot_general scaled_matmul_wrapper")


def num_elements(aval: Any) -> int:
    """Returns the number of elements of an abstract value; tokens have none."""
    return math.prod(getattr(aval, "shape", (0,)))


def num_bytes(aval: Any) -> int:
    """Returns the bytes of an abstract value; random keys have their real size."""
    return num_elements(aval) * int(getattr(getattr(aval, "dtype", None), "itemsize", 0))


def dtype_name(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """Returns the type of a primitive's arithmetic: its first float result, or the first float operand of a product.
    Without floats it is the first integer type; products of integers of up to 8 bits run at the rate of int8."""
    ordered = (*inputs, *outputs) if name in _PRODUCTS else (*outputs, *inputs)
    dtypes = [str(getattr(aval, "dtype", "")) for aval in ordered]
    floats = [dtype for dtype in dtypes if dtype.startswith(("float", "bfloat", "complex")) and dtype != "float0"]
    integers = [dtype for dtype in dtypes if dtype.startswith(("int", "uint", "bool"))]
    dtype = next(iter((*floats, *integers)), "int64")
    is_small = name in _PRODUCTS and not floats and (element_bits(dtype) or 64) <= 8
    return "int8" if is_small else dtype


def rounded(dtype: str, name: str, params: Params) -> str:
    """Returns `tf32` for products in float32 that cards may round (`jax.lax.Precision`), as they do by default."""
    asked = str(params.get("precision"))
    return "tf32" if dtype == "float32" and name in _PRODUCTS and not _FULL.search(asked) else dtype


def keeps_operand_whole(name: str, position: int) -> bool:
    """Returns whether a primitive needs this operand in memory, where others read a repeated value as it was."""
    if name.startswith("scatter") or name == "dynamic_update_slice":
        return position == 0
    tables = (POINTWISE_PRIMITIVES, CONVERSIONS, _DRAWS, _MOVEMENT, _REDUCTIONS)
    return not any(name in names for names in tables)


@dataclass(slots=True)
class Costs:
    """The costs of a primitive, or of a whole function that is one op."""

    flops: int = 0
    bytes_accessed: int = 0
    unknown: Counter[str] = field(default_factory=Counter)  # primitives that were estimated
    open_loops: Counter[str] = field(default_factory=Counter)  # loops of unknown length, counted once


def costs_of(name: str, params: Params, inputs: Sequence[Any], outputs: Sequence[Any], bytes_read: list[int]) -> Costs:
    """Returns the FLOPs and bytes of one primitive; `bytes_read` are those of the distinct arrays behind each input."""
    loop = _loop(name, params)
    if loop is not None and registered_formula(name) is None:
        loop.bytes_accessed = max(loop.bytes_accessed, sum(bytes_read) + sum(map(num_bytes, outputs)))
        return loop
    flops, how = _count_flops(name, params, inputs, outputs)
    unknown = Counter({name: 1}) if how == UNKNOWN else Counter[str]()
    return Costs(flops, _bytes_accessed(name, params, inputs, outputs, bytes_read), unknown)


def _count_flops(name: str, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, str]:
    formula = registered_formula(name)
    if formula is not None:
        return formula(inputs, params, list(outputs)), FORMULA
    if name in _FORMULAS:
        return _FORMULAS[name](params, inputs, outputs), FORMULA
    if name in POINTWISE_PRIMITIVES or name in _DRAWS:
        return num_elements(outputs[0]), POINTWISE
    if name in _MOVEMENT or name in CONVERSIONS:
        return 0, MOVEMENT
    estimate = params.get("cost_estimate")  # of a Pallas kernel, if its author gave one
    if estimate is not None:
        return int(estimate.flops), FORMULA
    return sum(map(num_elements, outputs)), UNKNOWN


def _bytes_accessed(
    name: str, params: Params, inputs: Sequence[Any], outputs: Sequence[Any], bytes_read: list[int]
) -> int:
    written = sum(map(num_bytes, outputs))
    if name in _READERS:  # the part, and its position
        return min(bytes_read[0], written) + sum(bytes_read[1:]) + written
    if name == "dynamic_update_slice":
        return 2 * num_bytes(inputs[1]) + sum(bytes_read[2:])
    if name.startswith("scatter"):  # operand, indices, updates
        passes = 2 if name == "scatter" else 3
        return sum(bytes_read[1:2]) + passes * num_bytes(inputs[2])
    if name.startswith("ragged_dot") and inputs[0].ndim == 2 and inputs[1].ndim == 3:  # weights of the groups hit
        share = share_hit(int(inputs[1].shape[0]), int(inputs[0].shape[0]))
        return sum(bytes_read) - math.floor(bytes_read[1] * (1 - share)) + written
    estimate = params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.bytes_accessed)
    return sum(bytes_read) + written


# Loops and branches that are one op


def _loop(name: str, params: Params) -> Costs | None:
    """Returns the costs of a loop or branch; None for other primitives. A scan counts all iterations, a while loop one;
    branches count as the most expensive one, a map over axes of a mesh counts all shards."""
    if name == "scan":
        return _times(body_costs(params["jaxpr"]), int(params["length"]))
    if name == "while":
        costs = _sum([body_costs(params["cond_jaxpr"]), body_costs(params["body_jaxpr"])])
        costs.open_loops[name] += 1
        return costs
    if name == "cond":
        return max(map(body_costs, params["branches"]), key=lambda costs: (costs.flops, costs.bytes_accessed))
    if name == "custom_linear_solve":
        return body_costs(params["jaxprs"].solve)
    if name == "shard_map":
        shape = params["mesh"].shape
        axes = params.get("newly_manual_axes", params.get("manual_axes", shape))  # by the version of JAX
        return _times(body_costs(params["jaxpr"]), math.prod(int(shape[axis]) for axis in axes))
    return None


def body_costs(closed: Any) -> Costs:
    """Adds up all equations of a jaxpr; views and repeated values cost nothing."""
    jaxpr = getattr(closed, "jaxpr", closed)
    parts: list[Costs] = []
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        callee = called_jaxpr(name, params)
        if callee is not None:
            parts.append(body_costs(callee))
            continue
        inputs = [variable.aval for variable in equation.invars]
        outputs = [variable.aval for variable in equation.outvars]
        if name in IDENTITIES or name == "broadcast_in_dim" or is_view(name, params, inputs, outputs):
            continue
        parts.append(costs_of(name, params, inputs, outputs, list(map(num_bytes, inputs))))
    return _sum(parts)


def _sum(parts: Sequence[Costs]) -> Costs:
    total = Costs()
    for part in parts:
        total.flops += part.flops
        total.bytes_accessed += part.bytes_accessed
        total.unknown += part.unknown
        total.open_loops += part.open_loops
    return total


def _times(costs: Costs, count: int) -> Costs:
    return Costs(costs.flops * count, costs.bytes_accessed * count, costs.unknown, costs.open_loops)


# Views

_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "random_wrap", "random_unwrap"})


def is_view(name: str, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Returns whether a primitive gives the same bytes another shape, order of dimensions or name."""
    if name == "reshape":
        return params.get("dimensions") is None
    if name == "broadcast_in_dim":
        return num_elements(inputs[0]) == num_elements(outputs[0])
    if name == "convert_element_type":  # of the weak type alone
        return bool(inputs[0].dtype == outputs[0].dtype)
    if name in _PLAIN_REDUCTIONS:  # over dimensions of one element
        return num_elements(inputs[0]) == num_elements(outputs[0])
    return name in _VIEWS


# Formulas


def _extent(aval: Any, axes: Iterable[int]) -> int:
    return math.prod(int(aval.shape[axis]) for axis in axes)


def product_shapes(name: str, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """Returns the shapes of a product of matrices, as graphs carry them; "" for other primitives."""
    if name != "dot_general":
        return ""
    (contracted, _), (batch, _) = params["dimension_numbers"]
    parts, k, made = _extent(inputs[0], batch), _extent(inputs[0], contracted), num_elements(outputs[0])
    rows = num_elements(inputs[0]) // max(parts * k, 1)
    return product_text(dtype_name(name, inputs, outputs), parts, rows, made // max(parts * rows, 1), k)


def _dot_general(params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    (contracted, _), _ = params["dimension_numbers"]
    each = 8 if str(inputs[0].dtype).startswith("complex") else 2  # of parts: four products and four sums
    return each * num_elements(outputs[0]) * _extent(inputs[0], contracted)


def _convolution(params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """lhs, rhs: each element of the result meets one filter; if lhs is dilated, each of its elements meets all."""
    lhs, rhs = inputs
    out_axis, in_axis = params["dimension_numbers"].rhs_spec[:2]
    if any(step > 1 for step in params["lhs_dilation"]):  # the zeros in between are not multiplied
        num_groups = params["feature_group_count"] * params["batch_group_count"]
        return 2 * num_elements(lhs) * num_elements(rhs) // max(1, int(rhs.shape[in_axis] * num_groups))
    return 2 * num_elements(outputs[0]) * num_elements(rhs) // max(1, int(rhs.shape[out_axis]))


def _ragged_product(params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """lhs [rows, inner], rhs [groups, inner, columns]: each row meets the matrix of its group."""
    dimensions = params.get("ragged_dot_dimension_numbers")
    if dimensions is None:
        return 2 * num_elements(outputs[0]) * int(inputs[0].shape[-1])
    (contracted, _), _ = dimensions.dot_dimension_numbers
    ragged = set(dimensions.lhs_ragged_dimensions)
    inner = _extent(inputs[0], set(contracted) - ragged)
    if ragged & set(contracted):  # the groups' inner dimensions add up to the whole, once for all groups
        inner *= _extent(inputs[0], ragged)
        return 2 * num_elements(outputs[0]) * inner // max(1, int(outputs[0].shape[0]))
    return 2 * num_elements(outputs[0]) * inner


def _sort(params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """n log2(n) comparisons of each row."""
    return num_elements(inputs[0]) * max(1, math.ceil(math.log2(max(2, inputs[0].shape[params["dimension"]]))))


def _fourier(params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """5 n log2(n) of a complex transform of n elements, half if one side is real (FFTW's measure)."""
    sides = (inputs[0], outputs[0])
    flops = 5 * max(map(num_elements, sides)) * math.ceil(math.log2(max(2, math.prod(params["fft_lengths"]))))
    return flops if all(str(side.dtype).startswith("complex") for side in sides) else flops // 2


def _per_input(position: int) -> Formula:
    return lambda params, inputs, outputs: num_elements(inputs[position])


def _of_matrices(count: Callable[..., int]) -> Formula:
    """Counts each matrix of the first input by its rows and columns, and the primitive's parameters."""

    def formula(params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        *batch, m, n = (int(size) for size in inputs[0].shape)
        return math.prod(batch) * count(m, n, params)

    return formula


def _householder_product(params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Matrices, and the factor of each reflection."""
    *batch, m, n = (int(size) for size in inputs[0].shape)
    return math.prod(batch) * textbook.householder_product(m, n, int(inputs[1].shape[-1]))


_FORMULAS: dict[str, Formula] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("ragged_dot", "ragged_dot_general"), _ragged_product),
    **dict.fromkeys(_REDUCTIONS, _per_input(0)),
    # one comparison or addition per element of each window
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
        lambda params, inputs, outputs: num_elements(outputs[0]) * math.prod(params["window_dimensions"]),
    ),
    # source, operand: each window is searched again, and one value added
    **dict.fromkeys(
        ("select_and_scatter_add", "select_and_scatter", "select_and_gather_add"),
        lambda params, inputs, outputs: num_elements(inputs[0]) * math.prod(params["window_dimensions"]),
    ),
    **dict.fromkeys(
        (f"scatter{dash}{how}" for dash in "-_" for how in ("add", "sub", "mul", "min", "max")), _per_input(2)
    ),
    # [batch, m, k], [batch, n, k]
    "scaled_matmul_wrapper": lambda params, inputs, outputs: 2 * num_elements(outputs[0]) * int(inputs[0].shape[-1]),
    "sort": _sort,
    "fft": _fourier,
    "cholesky": _of_matrices(lambda m, n, params: textbook.cholesky(n)),
    "lu": _of_matrices(lambda m, n, params: textbook.lu(m, n)),
    "eigh": _of_matrices(lambda m, n, params: textbook.eigh(n)),
    "eig": _of_matrices(lambda m, n, params: textbook.eig(n)),
    "geqrf": _of_matrices(lambda m, n, params: textbook.qr(m, n, has_q=False)),
    "qr": _of_matrices(lambda m, n, params: textbook.qr(m, n, is_complete=bool(params.get("full_matrices")))),
    "householder_product": _householder_product,
    "svd": _of_matrices(
        lambda m, n, params: textbook.svd(
            m, n, has_vectors=bool(params["compute_uv"]), is_complete=bool(params["full_matrices"])
        )
    ),
    # n^2 for each right-hand side (Golub and Van Loan, section 3.1)
    "triangular_solve": lambda params, inputs, outputs: num_elements(inputs[1]) * int(inputs[0].shape[-1]),
}
