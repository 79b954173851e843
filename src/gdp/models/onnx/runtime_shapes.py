"""Shapes of the results of ONNX Runtime's own operators (ContribOperators.md), which the onnx package lacks."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, defs

from gdp.models.names import by_name
from gdp.models.onnx.node_costs import OnnxCall, table_name
from gdp.models.onnx.onnx_file import FLOAT, INT32

_Shapes = list[Sequence[int] | None]
Inferred = list[tuple[int, list[int | None] | None, bool]]
"""By output: the type's code, the shape, whether it is a sequence; (0, None, False) if nothing is known."""


def _product_shape(call: OnnxCall, second: int = 1) -> _Shapes:
    a, b = list(call.input(0).shape), list(call.input(second).shape)
    if call.attributes.get("transBatchA", 0):  # the first dimension goes behind the others of the batch
        a.insert(-1, a.pop(0))
    if call.attributes.get("transBatchB", 0):
        b.insert(-1, b.pop(0))
    if call.attributes.get("transA", 0):
        a[-2:] = a[:-3:-1]
    if call.attributes.get("transB", 0):
        b[-2:] = b[:-3:-1]
    return [[*np.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2])), a[-2], b[-1]]]


def _quantised_concat_shape(call: OnnxCall) -> _Shapes:
    """Scale and zero point of the result, then three inputs for each tensor."""
    shapes, axis = [call.input(place).shape for place in range(2, len(call.inputs), 3)], int(call.attributes["axis"])
    shape = list(shapes[0])
    shape[axis] = sum(other[axis] for other in shapes)
    return [shape]


def _global_pool_shape(call: OnnxCall) -> _Shapes:
    shape = call.input(0).shape
    ones = [1] * (len(shape) - 2)
    return [[shape[0], *ones, shape[-1]] if call.attributes.get("channels_last", 0) else [*shape[:2], *ones]]


def _quantised_lstm_shapes(call: OnnxCall) -> _Shapes:
    """X [length, batch, width], W [directions, width, 4 * hidden]."""
    (length, batch, _), (directions, _, gates) = call.input(0).shape, call.input(1).shape
    last = (directions, batch, gates // 4)
    return [(length, *last), last, last]


def _gathered_blocks_shape(call: OnnxCall) -> _Shapes:
    """data, indices, scales: the last dimension of bytes that hold two numbers each is twice as long."""
    shape, axis = list(call.input(0).shape), int(call.attributes.get("gather_axis", 0))
    if call.input(0).dtype == "uint8":
        shape[-1] *= 8 // int(call.attributes.get("bits", 4))
    shape[axis : axis + 1] = call.input(1).shape
    return [shape]


def _skip_norm_shapes(call: OnnxCall) -> _Shapes:
    shape = call.input(0).shape
    statistics = (*shape[:-1], 1)
    return [shape, statistics, statistics, shape]


def _embed_shapes(call: OnnxCall) -> _Shapes:
    ids = call.input(0).shape
    hidden = (*ids, call.input(2).shape[1])
    return [hidden, ids[:1], hidden]


def _attention_shapes(call: OnnxCall, past_place: int = 4) -> _Shapes:
    """input, weights [width, 3 * hidden], bias, mask, past [2, batch, heads, length, width]; QAttention has scales."""
    batch, length, _ = call.input(0).shape
    hidden = (call.attributes.get("qkv_hidden_sizes") or [call.input(1).shape[1] // 3])[-1]
    heads = int(call.attributes["num_heads"])
    past = call.input(past_place).shape[3] if call.has(past_place) else 0
    return [(batch, length, hidden), (2, batch, heads, past + length, hidden // heads)]


def _multi_head_shapes(call: OnnxCall) -> _Shapes:
    query, heads = call.input(0).shape, int(call.attributes["num_heads"])
    if len(query) == 5:
        return [(query[0], query[1], heads * query[4])]
    key, past = call.input(1).shape, call.input(6).shape[2] if call.has(6) else 0
    length = past + (key[2] if len(key) == 4 else key[1])
    value = call.input(2).shape if call.has(2) else (*key[:2], heads * key[-1])
    width = value[2] if len(value) == 3 else heads * value[3]
    presents = [(query[0], heads, length, size // heads) for size in (query[2], width)]
    return [(*query[:2], width), *presents]


def _grouped_query_shapes(call: OnnxCall) -> _Shapes:
    (batch, length, width), attributes = call.input(0).shape, call.attributes
    heads, key_heads = int(attributes["num_heads"]), int(attributes["kv_num_heads"])
    size = width // heads if call.has(1) else width // (heads + 2 * key_heads)  # packed without key and value
    past = call.input(3).shape[2] if call.has(3) else 0
    content = call.contents[6] if len(call.contents) > 6 else None
    total = past + length if content is None else max(past, int(content.reshape(-1)[0]))
    present = (batch, key_heads, total, size)
    return [(batch, length, heads * size), present, present]


_RULES: dict[str, Callable[[OnnxCall], _Shapes]] = by_name(
    {
        "FusedMatMul TransposeMatMul DynamicQuantizeMatMul MatMulIntegerToFloat": _product_shape,
        "MatMulNBits MatMulBnb4": lambda call: [[*call.input(0).shape[:-1], int(call.attributes["N"])]],
        "QGemm": lambda call: _product_shape(call, 3),  # behind a, its scale and zero point
        "QLinearConcat": _quantised_concat_shape,
        "QLinearWhere": lambda call: [np.broadcast_shapes(*(call.input(place).shape for place in (0, 1, 4)))],
        "QLinearGlobalAveragePool": _global_pool_shape,
        "QAttention": lambda call: _attention_shapes(call, 8),
        "DynamicQuantizeLSTM": _quantised_lstm_shapes,
        "GatherBlockQuantized": _gathered_blocks_shape,
        "BiasSplitGelu": lambda call: [[*call.input(0).shape[:-1], call.input(0).shape[-1] // 2]],
        # x [batch, channels, length], weights [channels, 1, width]; the state begins the next window
        "CausalConvWithState": lambda call: [
            call.input(0).shape,
            (*call.input(0).shape[:2], call.input(1).shape[-1] - 1),
        ],
        """QLinearSoftmax BiasSoftmax BiasAdd MoE QMoE GroupNorm Inverse Gelu BiasGelu FastGelu QuickGelu
        SimplifiedLayerNormalization LayerNormalization RotaryEmbedding""": lambda call: [call.input(0).shape],
        "SkipLayerNormalization SkipSimplifiedLayerNormalization": _skip_norm_shapes,
        "EmbedLayerNormalization": _embed_shapes,
        "Attention": _attention_shapes,
        "MultiHeadAttention": _multi_head_shapes,
        "GroupQueryAttention": _grouped_query_shapes,
    }
)
EQUIVALENTS = {
    f"com.microsoft::{kind}": equivalent
    for kind, equivalent in (
        ("FusedConv", "Conv"),
        ("FusedGemm", "Gemm"),
        ("QuantizeLinear", "QuantizeLinear"),
        ("DequantizeLinear", "DequantizeLinear"),
        ("QLinearAveragePool", "MaxPool"),
    )
}  # operators with the shapes and types of one of ONNX's, for its first inputs and its attributes


def as_equivalent(node: NodeProto, call: OnnxCall) -> tuple[NodeProto, OnnxCall, Any]:
    """Returns the node and call of ONNX's operator in place of its equivalent, and its newest schema."""
    name = EQUIVALENTS[call.kind]
    schema = defs.get_schema(name, defs.onnx_opset_version(), "")
    if call.attributes.get("channels_last", 0):
        raise ValueError("ONNX has no such order of dimensions")
    # its other inputs are scales; ONNX averages no integers, but takes their maximum
    count = 1 if name == "MaxPool" else min(len(node.input), schema.max_input)
    equivalent = NodeProto(op_type=name, input=node.input[:count], output=node.output)
    equivalent.attribute.extend(attribute for attribute in node.attribute if attribute.name in schema.attributes)
    return equivalent, OnnxCall(name, call.inputs[:count], (), call.attributes, call.contents[:count]), schema


_RESULT_CODES: dict[str, Callable[[OnnxCall], int]] = {
    **dict.fromkeys(
        ("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "EmbedLayerNormalization", "QAttention"), lambda call: FLOAT
    ),
    "QGemm": lambda call: call.input(0).code if call.has(7) else FLOAT,  # the scale of the result
    "QLinearConcat": lambda call: call.input(2).code,
    "QLinearWhere": lambda call: call.input(1).code,
    "GatherBlockQuantized": lambda call: call.input(2).code,
}

RUNTIME_KINDS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators of ONNX Runtime in ONNX's own domain that the onnx package does not know, or only in other versions."""


def by_rule(call: OnnxCall, num_outputs: int) -> Inferred:
    """Applies the rule for an operator of `com.microsoft`; empty if there is none, or the inputs do not fit it."""
    name = table_name(call.kind)
    if name not in _RULES or (call.kind == name and name not in RUNTIME_KINDS):
        return []
    try:
        shapes = _RULES[name](call)
        code = _RESULT_CODES[name](call) if name in _RESULT_CODES else call.input(0).code
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return []
    # ids of EmbedLayerNormalization's mask index are int32
    return [
        (code if (name, place) != ("EmbedLayerNormalization", 1) else INT32, list(shapes[place]), False)  # type: ignore[arg-type]
        if place < len(shapes)
        else (0, None, False)
        for place in range(num_outputs)
    ]
