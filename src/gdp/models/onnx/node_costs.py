"""FLOPs, bytes and type of arithmetic of an ONNX operator, from the shapes of one call. The rules are those of
`gdp.models.pytorch.flops`, so that PyTorch and ONNX give a model the same FLOPs: a fused multiply-add is two,
element-wise operators count one per element of the result for any function, reductions one per element read,
normalisations and softmax by their definition per element, moving data nothing. Operators and argument orders:
https://onnx.ai/onnx/operators/ and, for `com.microsoft`, ONNX Runtime's ContribOperators.md."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gdp.arrays import Content
from gdp.graph.shapes import Array, call_text, product_text
from gdp.models.experts import share_hit
from gdp.models.names import by_name, counts, listed, names
from gdp.models.onnx.onnx_file import DEFAULT_DOMAINS, TensorInfo
from gdp.models.pytorch.flops import FORMULA, MOVEMENT, POINTWISE, UNKNOWN
from gdp.models.textbook_flops import interpolation


@dataclass(frozen=True, eq=False, slots=True)
class OnnxCall:
    """A node with its known inputs and outputs; None is an optional one that is absent."""

    kind: str  # op_type, with `domain::` before it if the domain is not ONNX's own
    inputs: tuple[TensorInfo | None, ...]
    outputs: tuple[TensorInfo | None, ...]
    attributes: Mapping[str, Any]  # without graphs; strings are str
    contents: tuple[Content | None, ...] = ()  # of small inputs that are known

    def input(self, position: int) -> TensorInfo:
        """Returns the input at `position`. LookupError if it is absent."""
        value = self.inputs[position]
        if value is None:
            raise LookupError(position)
        return value

    def has(self, position: int) -> bool:
        return position < len(self.inputs) and self.inputs[position] is not None

    @property
    def out(self) -> TensorInfo:
        """The first output. LookupError if it is absent."""
        value = self.outputs[0]
        if value is None:
            raise LookupError(0)
        return value

    @property
    def made(self) -> int:
        """The elements of all outputs."""
        return sum(value.numel for value in self.outputs if value is not None)


Formula = Callable[[OnnxCall], int]  # from a call to its FLOPs


GROUPED_QUERIES = "GroupQueryAttention"
"""The operator whose present keys and values are in the memory of the past ones, where they have as much."""


def kind_of(domain: str, op_type: str) -> str:
    """Returns the kind of an op: `Conv`, `com.microsoft::FusedMatMul`."""
    return op_type if domain in DEFAULT_DOMAINS else f"{domain}::{op_type}"


def table_name(kind: str) -> str:
    """Returns the name in the tables here, which have ONNX Runtime's own operators beside ONNX's, without conflicts."""
    return kind.removeprefix("com.microsoft::")


def count_flops(call: OnnxCall) -> tuple[int, str]:
    """Returns (FLOPs, how they were found)."""
    # `com.microsoft::Attention` is another operator than `Attention`
    name = call.kind if call.kind in _FORMULAS else table_name(call.kind)
    if name in _FORMULAS:
        try:
            return int(_FORMULAS[name](call)), FORMULA
        except (LookupError, TypeError, ValueError, ArithmeticError):
            return call.made, UNKNOWN  # inputs that are not as the operator has them
    if name in _MOVEMENT:
        return 0, MOVEMENT
    return call.made, POINTWISE if name in POINTWISE_KINDS else UNKNOWN


def count_bytes(call: OnnxCall, distinct: list[TensorInfo]) -> int:
    """Returns the bytes read and written: `distinct` inputs once, but only the picked rows of a table, and outputs."""
    written = sum(value.num_bytes for value in call.outputs if value is not None)
    read = sum(value.num_bytes for value in distinct)
    name, inputs = table_name(call.kind), call.inputs
    if name in _ROW_READERS and inputs and inputs[0] is not None:
        return read - inputs[0].num_bytes + min(inputs[0].num_bytes, written) + written
    if name == "EmbedLayerNormalization":  # ids, segments, then tables of words, positions and segments
        tables = [value for value in inputs[2:5] if value is not None]
        rows = sum(min(value.num_bytes, call.out.num_bytes) for value in tables)
        return read - sum(value.num_bytes for value in tables) + rows + written
    if name in ("MoE", "QMoE") and call.has(1):
        return read - _unread_experts(call) + written
    if name == GROUPED_QUERIES and call.has(3) and len(call.outputs) > 2:
        presents = [value for value in call.outputs[1:3] if value is not None and value.shape == call.input(3).shape]
        length = call.input(0).shape[1]
        written -= sum(value.num_bytes - value.num_bytes * length // value.shape[2] for value in presents)
        seen, total = _grouped_keys(call)
        read -= sum(value.num_bytes - value.num_bytes * seen // max(total, 1) for value in presents)
    return read + written


def _unread_experts(call: OnnxCall) -> int:
    """Returns the bytes of the weights of experts that no row is expected to be sent to (`gdp.models.experts`).
    Weights, biases and scales have the experts as first dimension."""
    rows, experts = call.input(1).shape[:2]
    per_row = int(call.attributes.get("k", 1))
    weights = sum(x.num_bytes for x in call.inputs[2:] if x is not None and x.shape and x.shape[0] == experts)
    return math.floor(weights * (1 - share_hit(experts, rows * per_row, per_row)))


def dtype_of(call: OnnxCall) -> str:
    """Returns the type of the arithmetic: the first float output or input, int8 in quantised products; else the first.
    There may be no tensor; then it is int64."""
    if table_name(call.kind) in _INT8:
        return "int8"
    values = [value for value in (*call.outputs, *call.inputs) if value is not None]
    return next((value.dtype for value in values if value.is_float), values[0].dtype if values else "int64")


# Formulas


def _product(call: OnnxCall) -> int:
    """A [.., m, k] @ B [.., k, n]: each element of the result is k multiply-adds, with or without broadcasting."""
    shape = call.input(0).shape
    if not call.attributes.get("transA", 0) or len(shape) < 2:
        return 2 * call.out.numel * shape[-1]
    return 2 * call.out.numel * shape[0 if call.attributes.get("transBatchA", 0) else -2]


def product_shapes(call: OnnxCall, flops: int, dtype: str) -> str:
    """Returns the shapes of a product of matrices, a convolution or a recurrent layer in each direction, as graphs
    carry them, by PyTorch's call of it. "" for other operators. ONNX Runtime adds the bias in the kernel."""
    name = table_name(call.kind)
    if name in ("LSTM", "GRU", "RNN"):
        sequence, *weights = (call.input(place).shape for place in range(3))
        batch_first = bool(call.attributes.get("layout", 0))
        steps = (sequence[batch_first], sequence[not batch_first], sequence[2])
        arrays = [Array(dtype, steps), *(Array(dtype, weight[1:]) for weight in weights)]
        one = call_text("aten.mkldnn_rnn_layer", arrays, (Array(dtype, (*steps[:2], weights[1][-1])),))
        return "; ".join([one] * weights[0][0])
    if name in ("Conv", "ConvTranspose", "FusedConv"):
        image, weight, result = (Array(dtype, one.shape) for one in (call.input(0), call.input(1), call.out))
        options = None, None, None, None, int(name == "ConvTranspose"), None, int(call.attributes.get("group", 1))
        return call_text("aten.convolution", (image, weight, *options), (result,))
    if name not in _PRODUCTS or not call.out.numel:
        return ""
    parts = math.prod(call.input(1).shape[:-2]) if name in _BATCHED else 1
    n = call.out.shape[-1] if call.out.shape else 1
    return product_text(dtype, parts, call.out.numel // (parts * n), n, flops // (2 * call.out.numel))


def _gemm(call: OnnxCall, bias: int = 2) -> int:
    return _product(call) + (call.out.numel if call.has(bias) else 0)


def _product_of_weights(call: OnnxCall, weight: int, bias: int) -> int:
    """A convolution by weight [out, in / groups, ...], or a transposed one by [in, out / groups, ...]."""
    pixels = call.input(0) if table_name(call.kind) == "ConvTranspose" else call.out
    per_pixel = math.prod(call.input(weight).shape[1:])
    return 2 * pixels.numel * per_pixel + (call.out.numel if call.has(bias) else 0)


def _convolution(call: OnnxCall) -> int:
    return _product_of_weights(call, 1, 2)


def _deformed_convolution(call: OnnxCall) -> int:
    """X, W, offset, B: a convolution of samples, each interpolated between four pixels (7)."""
    out, channels = call.out.shape, call.input(0).shape[1]
    samples = math.prod(out[2:]) * out[0] * channels * math.prod(call.input(1).shape[2:])
    return _product_of_weights(call, 1, 3) + 7 * samples


def _attention_flops(pairs: int, heads: int, key_width: int, value_width: int) -> int:
    """Counts two products and a softmax (5) for all pairs, causal or not; widths are of all heads together."""
    return pairs * (2 * key_width + 2 * value_width + 5 * heads)


def _attention(call: OnnxCall) -> int:
    """Q, K, V, mask, past key, past value: [batch, heads, length, width] or [batch, length, heads * width]."""
    query, key, value = (call.input(position).shape for position in range(3))
    past = call.input(4).shape[2] if call.has(4) else 0
    if len(query) == 4:
        heads, length = query[1], query[2]
        return _attention_flops(query[0] * length * (key[2] + past), heads, heads * query[3], heads * value[3])
    heads, key_heads = int(call.attributes["q_num_heads"]), int(call.attributes["kv_num_heads"])
    value_width = value[2] // key_heads * heads
    return _attention_flops(query[0] * query[1] * (key[1] + past), heads, query[2], value_width)


def _attention_with_projection(call: OnnxCall, past_place: int = 4) -> int:
    """com.microsoft: input [batch, length, width], weights [width, 3 * hidden], bias, mask, past [2, b, h, l, w]."""
    batch, length, _ = call.input(0).shape
    weights = call.input(1)
    past = call.input(past_place).shape[3] if call.has(past_place) else 0
    query, _, value = call.attributes.get("qkv_hidden_sizes") or [weights.shape[1] // 3] * 3
    project = batch * length * (2 * weights.numel + (weights.shape[1] if call.has(2) else 0))
    heads = int(call.attributes["num_heads"])
    return project + _attention_flops(batch * length * (length + past), heads, query, value)


def _multi_head_attention(call: OnnxCall) -> int:
    """query [b, l, width] (packed: [b, l, heads, 3, w]), key [b, l', width] or [b, heads, l', w], .. past key (6)."""
    query, heads = call.input(0).shape, int(call.attributes["num_heads"])
    past = call.input(6).shape[2] if call.has(6) else 0
    if len(query) == 5:
        return _attention_flops(query[0] * query[1] * (query[1] + past), heads, heads * query[4], heads * query[4])
    key = call.input(1).shape
    length = key[2] if len(key) == 4 else key[1]
    return _attention_flops(query[0] * query[1] * (length + past), heads, query[2], call.out.shape[2])


def _grouped_query_attention(call: OnnxCall) -> int:
    """query [b, l, heads * w], key, value, past key [b, kv heads, l', w], ...; output 1 is the present key."""
    width, (batch, length) = call.out.shape[2], call.input(0).shape[:2]
    seen, _ = _grouped_keys(call)
    return _attention_flops(batch * length * seen, int(call.attributes["num_heads"]), width, width)


def _grouped_keys(call: OnnxCall) -> tuple[int, int]:
    """Returns the number of keys in the windows of all queries, each of which ends with its query, and of all keys."""
    present, length = call.outputs[1] if len(call.outputs) > 1 else None, call.input(0).shape[1]
    past = call.input(3).shape[2] if call.has(3) else 0
    total = present.shape[2] if present is not None else length + past
    window = int(call.attributes.get("local_window_size", -1))
    return min(total, window + length - 1) if window > 0 else total, total


def _experts(call: OnnxCall) -> int:
    """input [.., width], router [rows, experts], weights of two or three products, each of [experts, ..]. The `k` best
    experts multiply each row; weights of QMoE are packed in bytes."""
    rows, experts = call.input(1).shape
    is_packed = table_name(call.kind) == "QMoE"
    packed = 8 // int(call.attributes.get("expert_weight_bits", 4)) if is_packed else 1
    weights = [call.input(place).numel * packed for place in ((2, 5, 8) if is_packed else (2, 4, 6)) if call.has(place)]
    return 2 * rows * int(call.attributes.get("k", 1)) * (sum(weights) // experts)


def _einsum(call: OnnxCall) -> int:
    """Operands from left to right, in pairs, as `torch.einsum` does; a pair that sums nothing is products only."""
    sides = call.attributes["equation"].replace(" ", "").split("->")
    terms, sizes = sides[0].split(","), dict[str, int]()
    letters: list[set[str]] = []
    for term, position in zip(terms, range(len(call.inputs)), strict=True):
        shape = call.input(position).shape
        before, dots, after = term.partition("...")
        num_dots = len(shape) - len(before) - len(after) if dots else 0
        labels = [*before, *(f".{num_dots - i}" for i in range(num_dots)), *after]  # dots align at their right
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
        letters.append(set(labels))
    everywhere = "".join(terms)
    result = set(sides[1]) if len(sides) > 1 else {label for label in everywhere if everywhere.count(label) == 1}
    result |= {label for label in sizes if label.startswith(".")}
    if len(letters) == 1:
        return call.input(0).numel if letters[0] - result else 0
    flops, left = 0, letters[0]
    for place, right in enumerate(letters[1:], 2):
        both = left | right
        remaining = result.union(*letters[place:]) & both
        flops += math.prod(sizes[label] for label in both) * (2 if both - remaining else 1)
        left = remaining
    return flops


def _pool(call: OnnxCall) -> int:
    """One comparison or addition per element of each window."""
    return int(call.out.numel * math.prod(call.attributes["kernel_shape"]))


def _sort(call: OnnxCall) -> int:
    numel = call.input(0).numel
    return numel * max(1, math.ceil(math.log2(max(2, numel))))


def _fourier(call: OnnxCall) -> int:
    """DFT: 5 n log2(n) of a complex transform of n elements, half if one side is real (FFTW's measure)."""
    data, rank = call.input(0).shape, len(call.input(0).shape)
    axis = int(call.attributes.get("axis", 1 if "axis" in call.attributes or len(call.inputs) < 3 else -2))
    if len(call.contents) > 2 and call.contents[2] is not None:
        axis = int(call.contents[2].reshape(-1)[0])
    sides = [data[:-1], call.out.shape[:-1]]
    longest = max(sides, key=math.prod)
    flops = 5 * math.prod(longest) * math.ceil(math.log2(max(2, longest[axis % rank])))
    is_real = data[-1] == 1 or call.attributes.get("onesided", 0)
    return flops // 2 if is_real else flops


def _resize(call: OnnxCall) -> int:
    """nearest moves data; linear between four (four products, three sums), cubic between sixteen."""
    per_element = {"nearest": 0, "linear": 7, "bilinear": 7, "cubic": 31}
    return per_element[call.attributes.get("mode", "nearest")] * call.out.numel


def _variadic(call: OnnxCall) -> int:
    return max(1, len(call.inputs) - 1) * call.out.numel


def _skip_norm(per_element: int) -> Formula:
    """input, skip and then the norm's own; a bias after them is one more sum."""

    def formula(call: OnnxCall) -> int:
        has_bias = call.has(3 if table_name(call.kind) == "SkipSimplifiedLayerNormalization" else 4)
        return (per_element + 1 + has_bias) * call.out.numel

    return formula


def _read(count: int, position: int = 0) -> Formula:
    return lambda call: count * call.input(position).numel


def _out(count: int) -> Formula:
    return lambda call: count * call.out.numel


_BATCHED = names("MatMul MatMulInteger FusedMatMul TransposeMatMul")
_PRODUCTS = _BATCHED | names("QLinearMatMul DynamicQuantizeMatMul MatMulIntegerToFloat Gemm FusedGemm QGemm")
_FORMULAS: dict[str, Formula] = {name: _out(count) for name, count in counts("onnx", "out").items()}
_FORMULAS |= {name: _read(count) for name, count in counts("onnx", "read").items()}
_FORMULAS |= by_name(
    {
        "MatMul MatMulInteger QLinearMatMul FusedMatMul TransposeMatMul": _product,
        "DynamicQuantizeMatMul MatMulIntegerToFloat": _product,
        "Gemm": _gemm,
        "FusedGemm": lambda call: _gemm(call) + call.out.numel,
        # weights in blocks of few bits; unpacking the blocks is not counted
        "MatMulNBits MatMulBnb4": lambda call: call.out.numel * (2 * int(call.attributes["K"]) + call.has(5)),
        "QGemm": lambda call: _gemm(call, 6),  # behind a and b, each with its scale and zero point
        "QAttention": lambda call: _attention_with_projection(call, 8),
        "MoE QMoE": _experts,
        "Conv ConvTranspose": _convolution,
        "FusedConv": lambda call: _convolution(call) + call.out.numel * (1 + call.has(3)),  # a sum, an activation
        "ConvInteger": lambda call: _product_of_weights(call, 1, 99),  # inputs 2 and 3 are zero points
        "QLinearConv": lambda call: _product_of_weights(call, 3, 8),
        "DeformConv": _deformed_convolution,
        "CausalConvWithState": _convolution,
        # X [length, batch, width] or [batch, length, width], W, R [directions, gates, ...]: weights act at each step
        "LSTM GRU RNN DynamicQuantizeLSTM": lambda call: (
            2 * math.prod(call.input(0).shape[:2]) * (call.input(1).numel + call.input(2).numel)
        ),
        "Attention": _attention,
        "com.microsoft::Attention": _attention_with_projection,
        "MultiHeadAttention": _multi_head_attention,
        GROUPED_QUERIES: _grouped_query_attention,
        "Einsum": _einsum,
        "MaxPool AveragePool QLinearAveragePool": _pool,
        "LpPool": lambda call: 2 * _pool(call),
        "NegativeLogLikelihoodLoss": _read(1, 1),
        "SkipLayerNormalization": _skip_norm(8),
        "SkipSimplifiedLayerNormalization": _skip_norm(4),
        "EmbedLayerNormalization": lambda call: (8 + 1 + call.has(4)) * call.out.numel,  # two or three tables added
        # squares, sums; scale, add, pow, divide
        "LRN": lambda call: (2 * int(call.attributes["size"]) + 4) * call.out.numel,
        "GroupNorm": lambda call: (8 + bool(call.attributes.get("activation", 0))) * call.out.numel,
        **dict.fromkeys(("QLinearConcat", "QLinearWhere", "GatherBlockQuantized"), _out(1)),  # to another scale
        # add; the approximation by tanh is one function
        "FastGelu": lambda call: (1 + call.has(1)) * call.out.numel,
        "Max Min Sum": _variadic,
        "Mean": lambda call: _variadic(call) + call.out.numel,
        "Unique": _sort,
        "Det": lambda call: 2 * call.input(0).numel * call.input(0).shape[-1] // 3,
        "DFT": _fourier,
        "Resize Upsample": _resize,
        "GridSample": lambda call: interpolation(
            call.out.numel, len(call.out.shape) - 2, str(call.attributes.get("mode", "linear"))
        ),
        # if elements are added, multiplied or compared; nothing if they replace
        "ScatterElements ScatterND Scatter": lambda call: (
            0 if call.attributes.get("reduction", "none") == "none" else call.input(2).numel
        ),
    }
)

POINTWISE_KINDS, _MOVEMENT = listed("onnx", "pointwise"), listed("onnx", "movement")

_ROW_READERS = names("Gather GatherElements GatherND Slice Compress SequenceAt GatherBlockQuantized")

_INT8 = listed("onnx", "int8")
