"""ONNX Runtime's own operators: shapes are those that it computes, FLOPs those by hand; quantised models."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gdp.models.onnx.onnx_model import OnnxModel, read_onnx
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

F, U8, I32, I64 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64
N = helper.make_node
SCALE = {"s": np.array(0.1, np.float32), "z": np.array(1, np.uint8)}


def ms(kind: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    names = ["" if name == "-" else name for name in inputs.split()]
    return N(
        kind, names, ["" if name == "-" else name for name in outputs.split()], domain="com.microsoft", **attributes
    )


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def u8(*shape: int) -> np.ndarray:
    return ones(*shape, dtype=np.uint8)


def i32(*items: int) -> np.ndarray:
    return np.array(items, np.int32)


Case = tuple[onnx.NodeProto, dict[str, np.ndarray], dict[str, np.ndarray], int]
# node, what is fed, what the file holds, FLOPs
CASES: dict[str, Case] = {
    # 2 x 3 x 3 pairs: 2 x 32 and 2 x 32 of 4 heads of 8, softmax 5 of each head
    "grouped attention": (
        ms("GroupQueryAttention", "q k v - - n t", "y pk pv", num_heads=4, kv_num_heads=2),
        {"q": ones(2, 3, 32), "k": ones(2, 3, 16), "v": ones(2, 3, 16), "n": i32(2, 2)},
        {"t": np.array(3, np.int32)},
        18 * (64 + 64 + 20),
    ),
    # one token each after 5, packed, with rotary embedding: heads (4 + 2 x 2) x 16
    "grouped attention with a cache": (
        ms("GroupQueryAttention", "q - - p w n t c i", "y pk pv", num_heads=4, kv_num_heads=2, do_rotary=1),
        {"q": ones(2, 1, 128), "p": ones(2, 2, 5, 16), "w": ones(2, 2, 5, 16), "n": i32(5, 5), "t": i32(6)},
        {"c": ones(16, 8), "i": ones(16, 8)},
        12 * (128 + 128 + 20),
    ),
    "attention across": (
        ms("MultiHeadAttention", "q k v b", num_heads=2),
        {"q": ones(2, 3, 8), "k": ones(2, 5, 8), "v": ones(2, 5, 8), "b": ones(24)},
        {},
        30 * (16 + 16 + 10),
    ),
    "attention with a cache": (
        ms("MultiHeadAttention", "q k v - - - p w", "y pk pv", num_heads=2),
        {"q": ones(2, 1, 8), "k": ones(2, 1, 8), "v": ones(2, 1, 8), "p": ones(2, 2, 5, 4), "w": ones(2, 2, 5, 4)},
        {},
        12 * (16 + 16 + 10),
    ),
    "packed attention": (
        ms("MultiHeadAttention", "q", num_heads=2),
        {"q": ones(2, 3, 2, 3, 8)},
        {},
        18 * (32 + 32 + 10),
    ),
    "attention with its products": (
        ms("Attention", "x w b - p", "y r", num_heads=2),
        {"x": ones(2, 3, 8), "p": ones(2, 2, 2, 5, 4)},
        {"w": ones(8, 24), "b": ones(24)},
        6 * (2 * 8 * 24 + 24) + 48 * (16 + 16 + 10),
    ),
    "quantised attention": (
        ms("QAttention", "x w b s s - z z", num_heads=2),
        {"x": u8(2, 3, 8)},
        {"w": u8(8, 24), "b": ones(24), **SCALE},
        6 * (2 * 8 * 24 + 24) + 18 * (16 + 16 + 10),
    ),
    "rotary": (
        ms("RotaryEmbedding", "x p c i"),
        {"x": ones(2, 3, 16), "p": np.zeros((2, 3), np.int64)},
        {"c": ones(16, 4), "i": ones(16, 4)},
        3 * 96,
    ),
    "skip norm": (
        ms("SkipLayerNormalization", "a b g e i", "y - - t"),
        {"a": ones(2, 3, 8), "b": ones(2, 3, 8)},
        {"g": ones(8), "e": ones(8), "i": ones(8)},
        10 * 48,
    ),
    "skip root mean square": (
        ms("SkipSimplifiedLayerNormalization", "a b g", "y - - t"),
        {"a": ones(2, 3, 8), "b": ones(2, 3, 8)},
        {"g": ones(8)},
        5 * 48,
    ),
    "products of 4 bits": (
        ms("MatMulNBits", "a b k", K=64, N=10, bits=4, block_size=32),
        {"a": ones(2, 3, 64)},
        {"b": u8(10, 2, 16), "k": ones(20)},
        6 * 10 * 2 * 64,
    ),
    "products of bitsandbytes": (
        ms("MatMulBnb4", "a b k", K=64, N=10, quant_type=1, block_size=64),
        {"a": ones(2, 64)},
        {"b": u8(320), "k": ones(10)},
        2 * 10 * 2 * 64,
    ),
    # [3, 2, 4] is [2, 3, 4] of a batch of 2, [4, 2, 5] is [2, 4, 5]
    "batches behind": (
        ms("FusedMatMul", "a b", transBatchA=1, transBatchB=1),
        {"a": ones(3, 2, 4), "b": ones(4, 2, 5)},
        {},
        2 * 2 * 3 * 4 * 5,
    ),
    "batches behind, transposed": (
        ms("FusedMatMul", "a b", transBatchA=1, transA=1),
        {"a": ones(4, 2, 3), "b": ones(2, 4, 5)},
        {},
        2 * 2 * 3 * 4 * 5,
    ),
    "gemm with an activation": (
        ms("FusedGemm", "a b c", activation="Relu", transB=1),
        {"a": ones(3, 4)},
        {"b": ones(5, 4), "c": ones(5)},
        15 * (2 * 4 + 2),
    ),
    # 4 x 3 x 3 pixels: 2 channels of 3 x 3, bias, sum, activation
    "convolution with a sum": (
        ms("FusedConv", "a b c d", activation="Relu"),
        {"a": ones(1, 2, 5, 5), "d": ones(1, 4, 3, 3)},
        {"b": ones(4, 2, 3, 3), "c": ones(4)},
        36 * (2 * 18 + 1 + 2),
    ),
    "bias and gelu": (ms("BiasGelu", "a b"), {"a": ones(2, 3, 8)}, {"b": ones(8)}, 2 * 48),
    "fast gelu": (ms("FastGelu", "a b"), {"a": ones(2, 3, 8)}, {"b": ones(8)}, 2 * 48),
    "quick gelu": (ms("QuickGelu", "a"), {"a": ones(2, 3, 8)}, {}, 48),
    "quantised product": (
        N("QLinearMatMul", list("aszbszsz"), ["y"]),
        {"a": u8(2, 3, 4)},
        {"b": u8(4, 5), **SCALE},
        2 * 6 * 4 * 5,
    ),
    "quantised convolution": (
        N("QLinearConv", list("aszbszsz"), ["y"]),
        {"a": u8(1, 2, 5, 5)},
        {"b": u8(4, 2, 3, 3), **SCALE},
        36 * 2 * 18,
    ),
    "quantised gemm": (ms("QGemm", "a s z b s z - s z", transB=1), {"a": u8(3, 4)}, {"b": u8(5, 4), **SCALE}, 15 * 8),
    "gemm to floats": (ms("QGemm", "a s z b s z", transB=1), {"a": u8(3, 4)}, {"b": u8(5, 4), **SCALE}, 15 * 8),
    "quantised here": (ms("DynamicQuantizeMatMul", "a b s z"), {"a": ones(2, 3, 4)}, {"b": u8(4, 5), **SCALE}, 240),
    "quantised sum": (ms("QLinearAdd", "a s z b s z s z"), {"a": u8(2, 3, 4), "b": u8(4)}, SCALE, 24),
    "quantised softmax": (ms("QLinearSoftmax", "a s z s z", axis=-1, opset=13), {"a": u8(2, 3, 4)}, SCALE, 5 * 24),
    "quantised pool": (
        ms("QLinearAveragePool", "a s z s z", kernel_shape=[2, 3]),
        {"a": u8(1, 2, 5, 5)},
        SCALE,
        24 * 6,
    ),
    "quantised global pool": (ms("QLinearGlobalAveragePool", "a s z s z"), {"a": u8(1, 2, 5, 5)}, SCALE, 50),
    "global pool, channels last": (
        ms("QLinearGlobalAveragePool", "a s z s z", channels_last=1),
        {"a": u8(1, 5, 5, 2)},
        SCALE,
        50,
    ),
    "quantised concat": (
        ms("QLinearConcat", "s z a s z b s z", axis=1),
        {"a": u8(1, 2, 5), "b": u8(1, 3, 5)},
        SCALE,
        25,
    ),
    "quantised where": (
        ms("QLinearWhere", "c a s z b s z s z"),
        {"c": ones(2, 1, dtype=bool), "a": u8(2, 5), "b": u8(5)},
        SCALE,
        10,
    ),
    "rows of blocks": (
        ms("GatherBlockQuantized", "d i k", block_size=32, gather_axis=0, quantize_axis=1, bits=4),
        {"i": np.zeros((2, 3), np.int64)},
        {"d": u8(10, 32), "k": ones(10, 2)},
        6 * 64,
    ),
    # 3 rows, the 2 best of 4 experts: 8 x 16 and 16 x 8
    "experts": (
        ms("MoE", "x r u - d", k=2, activation_type="relu"),
        {"x": ones(3, 8), "r": ones(3, 4)},
        {"u": ones(4, 16, 8), "d": ones(4, 8, 16)},
        2 * 3 * 2 * (128 + 128),
    ),
    "experts of 4 bits": (
        ms("QMoE", "x r u k - d l", k=1, activation_type="relu", expert_weight_bits=4),
        {"x": ones(3, 16), "r": ones(3, 4)},
        {"u": u8(4, 32, 8), "d": u8(4, 16, 16), "k": ones(4, 32), "l": ones(4, 16)},
        2 * 3 * (32 * 16 + 16 * 32),
    ),
    # 6 steps of a batch of 2: weights [1, 4, 20] and [1, 5, 20]
    "quantised lstm": (
        ms("DynamicQuantizeLSTM", "x u r - - - - - s z s z", "y h c", hidden_size=5),
        {"x": ones(6, 2, 4)},
        {"u": u8(1, 4, 20), "r": u8(1, 5, 20), "s": ones(1), "z": u8(1)},
        2 * 12 * 20 * 9,
    ),
    "convolution with a state": (
        ms("CausalConvWithState", "x w", "y t"),
        {"x": ones(2, 4, 6)},
        {"w": ones(4, 1, 3)},
        2 * 48 * 3,
    ),
}
REFUSED = {  # by ONNX Runtime on a CPU: its reason, and the bytes of the results by hand
    "packed attention": ("not implemented for CPU", [4 * 2 * 3 * 16])
}


def proto_of(nodes: list[onnx.NodeProto], fed: dict[str, np.ndarray], held: dict[str, np.ndarray]) -> onnx.ModelProto:
    codes = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in fed.items()}
    inputs = [helper.make_tensor_value_info(name, codes[name], array.shape) for name, array in fed.items()]
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in nodes[-1].output if name],
        [numpy_helper.from_array(array, name) for name, array in held.items() if name in used],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def read(proto: onnx.ModelProto, path: Path) -> OnnxModel:
    path.write_bytes(proto.SerializeToString())
    return read_onnx(path)


def computed(proto: onnx.ModelProto, fed: dict[str, np.ndarray]) -> list[np.ndarray]:
    for item in proto.graph.output:
        item.ClearField("type")  # it infers them
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    arrays: list[np.ndarray] = session.run(None, fed)
    return arrays


@pytest.mark.parametrize("case", CASES)
def test_sizes_and_flops(case: str, tmp_path: Path) -> None:
    """Results have the sizes that ONNX Runtime computes, and FLOPs are those by hand."""
    node, fed, held, flops = CASES[case]
    proto = proto_of([node], fed, held)
    made = read(proto, tmp_path / "m.onnx")
    assert (made.unknown, made.notes) == ({}, ())
    op = next(op for op in map(made.graph.op, range(made.graph.num_ops)) if op.kind.endswith(node.op_type))
    assert op.flops == flops
    is_product = node.op_type in (
        "QAttention",
        "QLinearMatMul",
        "QLinearConv",
        "QGemm",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
    )
    assert op.dtype == ("int8" if is_product else "tf32" if op.shapes else "float32")
    if case in REFUSED:
        reason, expected = REFUSED[case]
        with pytest.raises(Exception, match=reason):
            computed(proto, fed)
    else:
        expected = [array.nbytes for array in computed(proto, fed)]
    assert made.graph.tensor_bytes[made.graph.is_kept].tolist() == expected


@pytest.mark.parametrize(("past", "total", "is_shared"), [(100, 100, True), (100, 60, True), (100, 101, False)])
@pytest.mark.parametrize("length", [1, 3])
def test_caches_in_one_buffer(past: int, total: int, is_shared: bool, length: int, tmp_path: Path) -> None:
    """Present keys and values of [1, 2, past, 16] floats, 128 bytes a row, are written to the past ones' memory."""
    fed = {"q": ones(1, length, 64), "k": ones(1, length, 32), "v": ones(1, length, 32), "n": i32(total - 1)}
    fed |= {"p": ones(1, 2, past, 16), "w": ones(1, 2, past, 16)}
    node = ms("GroupQueryAttention", "q k v p w n t", "y pk pv", num_heads=4, kv_num_heads=2)
    graph = read(proto_of([node], fed, {"t": np.array(total, np.int32)}), tmp_path / "m.onnx").graph
    inputs = length * (256 + 128 + 128) + 2 * past * 128 + 4 + 4  # lengths and their total
    written = 2 * 128 * (length if is_shared else total)
    assert graph.bytes_accessed[-1] == inputs + length * 256 + written
    peak = simulate(Problem.build(graph, "a100-sxm-80g"), np.zeros(graph.num_ops, np.int64)).peak_memory_bytes[0]
    assert peak == inputs - 4 + length * 256 + (0 if is_shared else 2 * 128 * total)  # the total is in the file


@pytest.mark.parametrize(("length", "window", "seen"), [(1, 16, 16), (3, 16, 18), (3, 200, 100), (1, -1, 100)])
def test_windows_of_grouped_queries(length: int, window: int, seen: int, tmp_path: Path) -> None:
    """Of 100 keys in the cache a window of 16 sees 16, or 18 for three queries, and reads as much of the cache."""
    fed = {"q": ones(1, length, 64), "k": ones(1, length, 32), "v": ones(1, length, 32), "n": i32(99)}
    fed |= {"p": ones(1, 2, 100, 16), "w": ones(1, 2, 100, 16)}
    heads = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": window}
    node = ms("GroupQueryAttention", "q k v p w n t", "y pk pv", **heads)
    graph = read(proto_of([node], fed, {"t": np.array(100, np.int32)}), tmp_path / "m.onnx").graph
    assert graph.flops[-1] == length * seen * (2 * 64 + 2 * 64 + 5 * 4)
    # queries and results, new keys and values read and written, the cache, lengths and their total
    assert graph.bytes_accessed[-1] == length * (2 * 256 + 2 * 2 * 128) + 2 * seen * 128 + 4 + 4


def test_quantised_products_are_one_kernel(tmp_path: Path) -> None:
    """x [3, 40] and w [40, 50] in 8 bits: reads 120 + 2000 bytes, writes 150; 2 * 3 * 40 * 50 + 150 FLOPs."""
    for domain in ("", "com.microsoft"):
        nodes = [
            N("QuantizeLinear", ["x", "s", "z"], ["xq"], domain=domain),
            N("DequantizeLinear", ["xq", "s", "z"], ["xf"], domain=domain),
            N("DequantizeLinear", ["w", "s", "z"], ["wf"], domain=domain),
            N("MatMul", ["xf", "wf"], ["h"]),
            N("QuantizeLinear", ["h", "s", "z"], ["hq"], domain=domain),
        ]
        fed, held = {"x": ones(3, 40)}, {"w": u8(40, 50), **SCALE}
        proto = proto_of(nodes, fed, held)
        made = read(proto, tmp_path / "m.onnx")
        graph = made.graph
        quantise, product = (op for op in map(graph.op, range(graph.num_ops)) if op.kind not in ("input", "parameter"))
        assert (quantise.flops, product.kind, product.dtype) == (120, "MatMul", "int8")
        assert product.flops == 2 * 3 * 40 * 50 + 150
        # scale (4 bytes) and zero point (1) are read with each of the three tensors
        assert product.bytes_accessed == 120 + 2000 + 150 + 3 * 5
        assert graph.resident_bytes.sum() == 40 * 50
        assert "1 products between QuantizeLinear and DequantizeLinear compute in int8" in made.notes[0]
        (result,) = computed(proto, fed)
        assert (result.nbytes, result.dtype) == (150, np.uint8)
        assert graph.tensor_bytes[graph.is_kept].tolist() == [150]


@pytest.mark.parametrize("is_kept", [False, True])
def test_shared_dequantised_tensors_stay(is_kept: bool, tmp_path: Path) -> None:
    """xf is read by the product, whose kernel takes xq, and is a result of the model too, or is not."""
    nodes = [
        N("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        N("DequantizeLinear", ["xq", "s", "z"], ["xf"]),
        N("DequantizeLinear", ["w", "s", "z"], ["wf"]),
        N("MatMul", ["xf", "wf"], ["h"]),
        N("Relu", ["h"], ["r"]),
        N("QuantizeLinear", ["r", "s", "z"], ["hq"]),
        *([N("Identity", ["xf"], ["kept"])] if is_kept else []),
    ]
    proto = proto_of(nodes, {"x": ones(3, 40)}, {"w": u8(40, 50), **SCALE})
    graph = read(proto, tmp_path / "m.onnx").graph
    kinds = [kind for kind in graph.kinds if kind not in ("input", "parameter")]
    assert kinds == ["QuantizeLinear", *(["DequantizeLinear"] if is_kept else []), "MatMul"]


def test_what_reads_only_weights_runs_once(tmp_path: Path) -> None:
    """ONNX Runtime computes w.T + b when it loads a file, so a step is a product with [40, 50] floats held once.

    Random numbers and weights in 8 bits, which become floats in each step, stay in it.
    """
    nodes = [
        N("Transpose", ["w"], ["wt"], perm=[1, 0]),
        N("Add", ["wt", "b"], ["sum"]),
        N("MatMul", ["x", "sum"], ["h"]),
    ]
    proto = proto_of(nodes, {"x": ones(3, 40)}, {"w": ones(50, 40), "b": ones(50)})
    graph = read(proto, tmp_path / "m.onnx").graph
    assert graph.kinds == ("input", "parameter", "MatMul")
    assert graph.resident_bytes.sum() == 4 * 40 * 50
    assert graph.flops.sum() == 2 * 3 * 40 * 50
    assert loaded_kinds(proto, tmp_path / "loaded.onnx") == ["MatMul"]
    kept = [
        N("RandomNormalLike", ["w"], ["noise"]),
        N("DequantizeLinear", ["q", "s", "z"], ["wf"]),
        N("Sigmoid", ["wf"], ["gate"]),
        N("Sum", ["noise", "gate", "x"], ["h"]),
    ]
    held = {"w": ones(50, 40), "q": u8(50, 40), **SCALE}
    proto = proto_of(kept, {"x": ones(50, 40)}, held)
    kinds = read(proto, tmp_path / "m.onnx").graph.kinds
    assert [kind for kind in kinds if kind not in ("input", "parameter")] == [node.op_type for node in kept]
    assert sorted(loaded_kinds(proto, tmp_path / "loaded.onnx")) == sorted(node.op_type for node in kept)


def loaded_kinds(proto: onnx.ModelProto, path: Path) -> list[str]:
    """Returns the kinds of the nodes that ONNX Runtime runs, without optimisations for one kind of device."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath, options.log_severity_level = str(path), 4
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path).graph.node]


def test_8_bit_weights_beside_floats(tmp_path: Path) -> None:
    """The product is one of floats: ONNX Runtime runs both ops as the file has them."""
    nodes = [N("DequantizeLinear", ["w", "s", "z"], ["wf"]), N("MatMul", ["x", "wf"], ["h"])]
    proto = proto_of(nodes, {"x": ones(3, 40)}, {"w": u8(40, 50), **SCALE})
    graph = read(proto, tmp_path / "m.onnx").graph
    assert list(graph.kinds[-2:]) == ["DequantizeLinear", "MatMul"]
    assert graph.dtypes[-1] == "tf32"


@pytest.mark.parametrize("kind", ["FusedMatMulActivation", "LinearAttention", "SparseAttention", "Rfft", "NotThere"])
def test_unknown_operators(kind: str, tmp_path: Path) -> None:
    """An operator without a known cost is named."""
    made = read(proto_of([ms(kind, "a b")], {"a": ones(2, 3, 8), "b": ones(8, 4)}, {}), tmp_path / "m.onnx")
    assert made.unknown == {f"com.microsoft::{kind}": 1}
    assert f"y (com.microsoft::{kind})" in made.notes[0]
