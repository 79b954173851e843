"""ONNX files: FLOPs as PyTorch's capture counts them, shapes as ONNX Runtime computes them, bad files in one line."""

import math
import random
import re
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError
from gdp.graph import Graph, Op
from gdp.models.onnx.onnx_model import OnnxModel, read_onnx
from gdp.models.pytorch import capture

F, I8, U8, I64 = TensorProto.FLOAT, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT64


def value(name: str, shape: list[Any] | None, code: int = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, code, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[str],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 20,
    **kwargs: Any,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    domains = {node.domain for node in nodes if node.domain}
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
    made = helper.make_model(graph, opset_imports=imports, **kwargs)
    made.ir_version = min(made.ir_version, 10)
    return made


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., OnnxModel]:
    def read_proto(proto: onnx.ModelProto | bytes, **kwargs: Any) -> OnnxModel:
        path = tmp_path / "model.onnx"
        path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
        return read_onnx(path, **kwargs)

    return read_proto


def ops(graph: Graph) -> dict[str, Op]:
    return {op.name: op for op in map(graph.op, range(graph.num_ops))}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


# The same model from PyTorch


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        mixed = ((q @ k.transpose(-1, -2)) * 0.5).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(self.up(functional.relu(self.grouped(x))), 2).mean((2, 3))


MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), (3, 6)),
    "convolutions": (Convolutions, (2, 4, 8, 8)),
    "attention": (Attention, (2, 5, 8)),
}


@pytest.fixture(params=MODULES)
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, nn.Module, Tensor]:
    build, shape = MODULES[request.param]
    torch.manual_seed(0)
    module, x, path = build().eval(), torch.rand(shape), tmp_path / "exported.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's exporter without onnxscript is deprecated
        torch.onnx.export(
            module, (x,), path, dynamo=False, opset_version=17, input_names=["x"], dynamic_axes={"x": {0: "batch"}}
        )
    return path, module, x


def test_exported_modules(exported: tuple[Path, nn.Module, Tensor]) -> None:
    """An exported module has the FLOPs and the weights of its capture."""
    path, module, x = exported
    made = read_onnx(path, {"batch": len(x)})
    expected = capture(module, (x,), name="m", training=False).graph
    assert made.graph.flops.sum() == expected.flops.sum()
    assert made.graph.resident_bytes.sum() == expected.resident_bytes.sum()
    assert (made.unknown, made.notes) == ({}, ())
    modules = {made.graph.modules[i] for i, kind in enumerate(made.graph.kinds) if kind in ("Gemm", "Conv", "MatMul")}
    assert modules - {""} <= {name for name, _ in module.named_modules()}


def test_sizes_are_those_of_onnx_runtime(exported: tuple[Path, nn.Module, Tensor]) -> None:
    """Results have the sizes that ONNX Runtime computes."""
    path, _, x = exported
    graph = read_onnx(path, {"batch": len(x)}).graph
    proto = onnx.load(path)
    made = {node.name: list(node.output) for node in proto.graph.node}
    known = {item.name for item in proto.graph.output}
    for names in made.values():
        proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    computed = dict(zip(names, session.run(names, {"x": x.numpy()}), strict=True))
    compared = 0
    for number, op in enumerate(graph.op_names):
        sizes = graph.tensor_bytes[graph.producers == number].tolist()
        if op in made:
            assert sizes == [computed[name].nbytes for name in made[op]], op
            compared += len(sizes)
    assert compared >= 3


# ONNX's own test suite: all operators

# what depends on content, which a test gives as an input: not known from shapes alone
DEPENDS_ON_CONTENT = (
    "test_affine_grid_",
    "test_blackmanwindow_",
    "test_hammingwindow_",
    "test_hannwindow_",
    "test_loop11",
    "test_range_",
    "test_reduce_",
    "test_string_split_empty",
    "test_unique_",
)
UNKNOWN = {  # Scan: of opset 8, which had a batch
    "AffineGrid",
    "ImageDecoder",
    "LinearAttention",
    "MaxRoiPool",
    "NonMaxSuppression",
    "RegexFullMatch",
    "RoiAlign",
    "STFT",
    "Scan",
    "SequenceMap",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
}


@pytest.mark.filterwarnings("ignore")  # of the suite's own NumPy code
def test_every_operator_has_a_cost_and_shapes(read: Callable[..., OnnxModel]) -> None:
    """Every operator of ONNX has a cost, and the shapes that its reference gives."""
    from onnx.backend.test.case.node import collect_testcases

    unknown, num_right = set(), 0
    for case in collect_testcases(None):
        sizes = dict.fromkeys(re.findall(r'dim_param: "(\w+)"', str(case.model.graph.input)), 1)
        made = read(case.model, dims=sizes)
        unknown |= {kind for kind in made.unknown if "::" not in kind}
        if case.name.startswith(DEPENDS_ON_CONTENT) or any("sequence" in n or "no shape" in n for n in made.notes):
            continue
        outputs = [array for array in (case.data_sets or [([], [])])[0][1] if isinstance(array, np.ndarray)]
        kept = made.graph.tensor_bytes[made.graph.is_kept].sum()
        aliased = {"input", "constant"} & {made.graph.kinds[p] for p in made.graph.producers[made.graph.is_kept]}
        if (
            len(outputs) == len(case.model.graph.output)
            and not aliased
            and len({id(o) for o in outputs}) == len(outputs)
        ):
            codes = [item.type.tensor_type.elem_type for item in case.model.graph.output]
            expected = sum(_num_bytes(array.size, code) for array, code in zip(outputs, codes, strict=True))
            assert kept == expected, case.name
            num_right += 1
    assert unknown <= UNKNOWN
    assert num_right > 1000


def _num_bytes(numel: int, code: int) -> int:
    bits = {
        TensorProto.INT4: 4,
        TensorProto.UINT4: 4,
        TensorProto.FLOAT4E2M1: 4,
        TensorProto.INT2: 2,
        TensorProto.UINT2: 2,
    }
    if code == TensorProto.STRING:
        return 8 * numel
    if code in bits:
        return -(-numel * bits[code] // 8)
    return numel * helper.tensor_dtype_to_np_dtype(code).itemsize


# Costs by hand

N = helper.make_node
COSTS: dict[str, tuple[onnx.NodeProto, list[tuple[Any, ...]], int]] = {
    # [2, 8, 6, 6] pixels, each 4 / 2 channels x 3 x 3 multiply-adds, and a bias
    "grouped convolution": (
        N("Conv", ["a", "b", "c"], ["y"], group=2, pads=[1] * 4),
        [(2, 4, 6, 6), (8, 2, 3, 3), (8,)],
        2 * 8 * 36 * 2 * 18 + 2 * 8 * 36,
    ),
    # each of 2 x 4 x 9 pixels read meets 3 filters of 2 x 2
    "transposed": (N("ConvTranspose", ["a", "b"], ["y"], strides=[2, 2]), [(2, 4, 3, 3), (4, 3, 2, 2)], 72 * 3 * 4 * 2),
    "gemm": (N("Gemm", ["a", "b", "c"], ["y"], transA=1, transB=1), [(5, 3), (4, 5), (4,)], 2 * 3 * 5 * 4 + 12),
    "broadcast product": (N("MatMul", ["a", "b"], ["y"]), [(7, 1, 3, 5), (2, 5, 4)], 2 * 7 * 2 * 3 * 5 * 4),
    "product with a vector": (N("MatMul", ["a", "b"], ["y"]), [(2, 3, 5), (5,)], 2 * 2 * 3 * 5),
    # bij: 2 x 3 x 4 x 5 multiply-adds
    "einsum": (N("Einsum", ["a", "b"], ["y"], equation="bik,kj->bij"), [(2, 3, 4), (4, 5)], 2 * 2 * 3 * 4 * 5),
    "einsum of three": (
        N("Einsum", ["a", "b", "c"], ["y"], equation="...i,ij,...j->..."),
        [(7, 2), (2, 3), (7, 3)],
        2 * 7 * 2 * 3 + 2 * 7 * 3,
    ),
    # 6 steps of a batch of 2: weights 4 h (4 + 5), h = 5
    "lstm": (N("LSTM", ["a", "b", "c"], ["y"], hidden_size=5), [(6, 2, 4), (1, 20, 4), (1, 20, 5)], 2 * 12 * 20 * 9),
    "gru both ways": (
        N("GRU", ["a", "b", "c"], ["y"], hidden_size=5, direction="bidirectional"),
        [(6, 2, 4), (2, 15, 4), (2, 15, 5)],
        2 * 12 * 2 * 15 * 9,
    ),
    "pooling": (N("AveragePool", ["a"], ["y"], kernel_shape=[2, 3]), [(2, 4, 6, 6)], 2 * 4 * 5 * 4 * 6),
    "softmax": (N("Softmax", ["a"], ["y"]), [(3, 4)], 60),
    "norm": (N("LayerNormalization", ["a", "b"], ["y"]), [(3, 4), (4,)], 96),
    "reduction": (N("ReduceMean", ["a"], ["y"]), [(3, 4)], 12),
    "sum of three": (N("Sum", ["a", "b", "c"], ["y"]), [(3, 4), (4,), (3, 1)], 24),
    "pointwise": (N("Add", ["a", "b"], ["y"]), [(3, 1), (4,)], 12),
    "movement": (N("Transpose", ["a"], ["y"]), [(3, 4)], 0),
    # 2 x 3 heads x 4 x 5 pairs: 2 x 8 and 2 x 6, softmax 5
    "attention": (
        N("Attention", ["a", "b", "c"], ["y"]),
        [(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 6)],
        120 * (16 + 12 + 5),
    ),
    # 2 x 3 x 16 elements: 4 neighbours and their sum; 16; the nearest is moved
    "grid": (N("GridSample", ["a", "b"], ["y"]), [(2, 3, 8, 8), (2, 4, 4, 2)], 96 * 7),
    "cubic grid": (N("GridSample", ["a", "b"], ["y"], mode="cubic"), [(2, 3, 8, 8), (2, 4, 4, 2)], 96 * 31),
    "nearest grid": (N("GridSample", ["a", "b"], ["y"], mode="nearest"), [(2, 3, 8, 8), (2, 4, 4, 2)], 0),
    "grid of volumes": (N("GridSample", ["a", "b"], ["y"]), [(2, 3, 4, 4, 4), (2, 1, 4, 4, 3)], 96 * 15),
    "quantised product": (N("MatMulInteger", ["a", "b"], ["y"]), [(3, 4, U8), (4, 5, I8)], 2 * 3 * 4 * 5),
    # ... of 6 x 6 pixels, 2 channels of 3 x 3
    "quantised convolution": (
        N("ConvInteger", ["a", "b"], ["y"], group=2),
        [(1, 4, 8, 8, U8), (8, 2, 3, 3, I8)],
        2 * 8 * 36 * 18,
    ),
}


def test_shapes_of_convolutions(read: Callable[..., OnnxModel]) -> None:
    """A convolution has the shapes of PyTorch's call of it, with whether it is transposed and its groups."""
    made = read(
        model(
            [COSTS["grouped convolution"][0]],
            [value("a", [2, 4, 6, 6]), value("b", [8, 2, 3, 3]), value("c", [8])],
            ["y"],
        )
    )
    (shapes,) = filter(None, made.graph.shapes)
    assert shapes == "aten.convolution float32[2,4,6,6] float32[8,2,3,3] - - - - 0 - 2 > float32[2,8,6,6]"


@pytest.mark.parametrize("case", COSTS)
def test_costs_by_hand(case: str, read: Callable[..., OnnxModel]) -> None:
    """FLOPs and bytes are those counted by hand."""
    node, shapes, flops = COSTS[case]
    codes = [shape[-1] if len(shape) > 1 and shape[-1] in (I8, U8) and "quantised" in case else F for shape in shapes]
    sizes = [list(shape[:-1] if code != F else shape) for shape, code in zip(shapes, codes, strict=True)]
    inputs = [value(name, size, code) for name, size, code in zip(node.input, sizes, codes, strict=True)]
    made = read(model([node], inputs, ["y"], opset=23))
    assert made.unknown == {}
    assert made.notes == ()
    op = made.graph.op(made.graph.num_ops - 1)
    assert (op.kind, op.flops, op.phase) == (node.op_type, flops, "forward")
    rounded = "tf32" if made.graph.shapes[-1] else "float32"  # products, as ONNX Runtime runs them by default
    assert op.dtype == ("int8" if "quantised" in case else rounded)
    assert op.bytes_accessed == made.graph.tensor_bytes.sum()


def test_the_graph_of_a_small_model(read: Callable[..., OnnxModel]) -> None:
    """Ids pick rows of a table; shape arithmetic folds away; a reshape is its producer's tensor; a slice is a copy."""
    nodes = [
        N("Gather", ["table", "ids"], ["rows"], name="/embed/Gather"),
        N("Shape", ["ids"], ["shape"], start=0, end=1),
        N("Concat", ["shape", "rest"], ["target"], axis=0),
        N("Reshape", ["rows", "target"], ["flat"], name="/Reshape"),
        N("MatMul", ["flat", "w"], ["y"], name="/layers.0/MatMul"),
        N("Slice", ["flat", "zero", "one"], ["first"], name="/layers.0/MatMul"),
        N("Identity", ["y"], ["out"]),
    ]
    weights = {
        "table": zeros(100, 4),
        "w": zeros(12, 5),
        "unused": zeros(9, 9),
        "rest": np.array([-1]),
        "zero": np.array([0]),
        "one": np.array([1]),
    }
    graph = read(model(nodes, [value("ids", [2, 3], I64)], ["out", "first"], weights)).graph
    shapes = "aten.bmm float32[1,2,12] float32[1,12,5] > float32[1,2,5]"
    assert [graph.op(number) for number in range(graph.num_ops)] == [
        Op("ids", "input", dtype="int64", phase="forward"),
        Op("table", "parameter", resident_bytes=1600, phase="forward", module="embed"),
        Op("w", "parameter", resident_bytes=240, phase="forward", module="layers.0"),
        Op("/embed/Gather", "Gather", 0, 48 + 2 * 96, phase="forward", module="embed"),  # ids, rows read and written
        Op("/layers.0/MatMul", "MatMul", 240, 96 + 240 + 40, "tf32", phase="forward", module="layers.0", shapes=shapes),
        Op("/layers.0/MatMul_0", "Slice", 0, 2 * 48 + 16, phase="forward", module="layers.0"),
    ]
    tensors = [graph.tensor(number) for number in range(graph.num_tensors)]
    assert [(t.producer, t.consumers, t.bytes, t.resident, t.keep) for t in tensors] == [
        (0, (3,), 48, False, False),
        (1, (3,), 1600, True, False),
        (2, (4,), 240, True, False),
        (3, (4, 5), 96, False, False),
        (4, (), 40, False, True),
        (5, (), 48, False, True),
    ]


# Graphs inside of nodes


def product_body(outputs: list[str], inputs: list[onnx.ValueInfoProto]) -> onnx.GraphProto:
    nodes = [N("MatMul", ["h", "w"], ["next"]), N("Identity", ["next"], ["seen"])]
    if "go" in outputs:
        nodes.append(N("Identity", ["was"], ["go"]))
    return helper.make_graph(nodes, "body", inputs, [helper.make_empty_tensor_value_info(name) for name in outputs])


def test_costs_of_loops_and_scans(read: Callable[..., OnnxModel]) -> None:
    """A loop costs its body as often as it runs, and a scan as often as its sequence is long."""
    loop_inputs = [value("i", [], I64), value("was", [], TensorProto.BOOL), value("h", None)]
    loop = N("Loop", ["trips", "", "h0"], ["h1", "all"], body=product_body(["go", "next", "seen"], loop_inputs))
    scan = N(
        "Scan",
        ["h1", "all"],
        ["h2", "more"],
        num_scan_inputs=1,
        body=product_body(["next", "seen"], [value("h", None), value("x", None)]),
    )
    weights = {"w": zeros(4, 4), "trips": np.array(7)}
    made = read(model([loop, scan], [value("h0", [3, 4])], ["h2", "more"], weights))
    found = ops(made.graph)
    assert found["Loop_0"].flops == found["Scan_0"].flops == 7 * 2 * 3 * 4 * 4
    assert found["Loop_0"].bytes_accessed == 7 * (2 * 48 + 64)
    assert made.graph.tensor_bytes.tolist() == [48, 64, 48, 7 * 48, 48, 7 * 48]
    assert made.graph.tensor(1).consumers == (2, 3)  # what a body takes from around it is an input of the op
    assert (made.notes, made.open_loops) == ((), {})

    del weights["trips"]
    unknown = read(model([loop], [value("h0", [3, 4]), value("trips", [], I64)], ["h1"], weights))
    assert ops(unknown.graph)["Loop_0"].flops == 2 * 3 * 4 * 4
    assert "trip count is unknown" in unknown.notes[0]
    assert unknown.open_loops == {"Loop": 1}


def test_costs_of_branches(read: Callable[..., OnnxModel]) -> None:
    """An If costs its larger branch, or the one that is known to be taken."""

    def branch(*nodes: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(list(nodes), "b", [], [helper.make_empty_tensor_value_info("z")])

    node = N(
        "If",
        ["c"],
        ["y"],
        then_branch=branch(N("Relu", ["x"], ["z"])),
        else_branch=branch(N("MatMul", ["x", "w"], ["z"])),
    )
    inputs, weights = [value("x", [4, 4])], {"w": zeros(4, 4)}
    open_ = read(model([node], [*inputs, value("c", [], TensorProto.BOOL)], ["y"], weights))
    known = read(model([node], inputs, ["y"], {**weights, "c": np.array(True)}))
    assert (ops(open_.graph)["If_0"].flops, len(open_.notes)) == (128, 1)
    assert (ops(known.graph)["If_0"].flops, known.notes) == (16, ())


# Symbolic dimensions


def test_symbolic_dimensions(read: Callable[..., OnnxModel]) -> None:
    """The error has the option for each dimension that is missing."""
    inputs = [value("x", ["batch", "past + new"]), value("w", ["past + new", None])]
    proto = model([N("MatMul", ["x", "w"], ["y"])], inputs, ["y"])
    with pytest.raises(InputError) as raised:
        read(proto, dims={"new": 1})
    assert str(raised.value).endswith(
        "symbolic dimensions have no size: batch, past, w[1]; add --dim batch=N --dim past=N --dim 'w[1]='N"
    )
    made = read(proto, dims={"batch": 3, "past": 4, "new": 1, "w[1]": 7})
    assert ops(made.graph)["MatMul_0"].flops == 2 * 3 * 5 * 7
    assert made.notes == ()
    with pytest.raises(InputError, match=r"no symbolic dimension 'bach'; .* batch, new, past, w\[1\]"):
        read(proto, dims={"bach": 2})
    with pytest.raises(InputError, match="dimension 'batch' is -1; an integer of at least 0"):
        read(proto, dims={"batch": -1})


def test_unknown_operators(read: Callable[..., OnnxModel]) -> None:
    """An unknown operator is estimated and named."""
    proto = model([N("Mine", ["x"], ["y"], domain="my.own", order=3)], [value("x", [4, 5])], ["y"])
    made = read(proto)
    assert made.unknown == {"my.own::Mine": 1}
    assert ops(made.graph)["Mine_0"].flops == 20
    assert "y (my.own::Mine)" in made.notes[0]


# Operators of ONNX Runtime

MS = "com.microsoft"
RUNTIME: dict[str, tuple[onnx.NodeProto, dict[str, tuple[Any, ...]], int]] = {
    "FusedMatMul": (
        N("FusedMatMul", ["a", "b"], ["y"], domain=MS, transA=1, transB=1),
        {"a": (2, 5, 3), "b": (4, 5)},
        2 * 2 * 3 * 5 * 4,
    ),
    # 2 x 6 rows by 8 x 24 and a bias; pairs 2 x 6 x 6: 2 x 8 + 2 x 8 of all heads, softmax 5 of 2 heads
    "Attention": (
        N("Attention", ["a", "b", "c"], ["y"], domain=MS, num_heads=2),
        {"a": (2, 6, 8), "b": (8, 24), "c": (24,)},
        12 * (2 * 8 * 24 + 24) + 72 * (32 + 10),
    ),
    "MultiHeadAttention": (
        N("MultiHeadAttention", ["a", "b", "c"], ["y"], domain=MS, num_heads=2),
        {"a": (2, 6, 8), "b": (2, 3, 8), "c": (2, 3, 8)},
        36 * (32 + 10),
    ),
    "SkipLayerNormalization": (
        N("SkipLayerNormalization", ["a", "b", "c", "d"], ["y", "", "", "s"], domain=MS),
        {"a": (2, 3, 8), "b": (2, 3, 8), "c": (8,), "d": (8,)},
        9 * 48,
    ),
    "BiasGelu": (N("BiasGelu", ["a", "b"], ["y"], domain=MS), {"a": (2, 3, 8), "b": (8,)}, 96),
    "Gelu": (N("Gelu", ["a"], ["y"], domain=MS), {"a": (2, 3, 8)}, 48),
}


@pytest.mark.parametrize("case", RUNTIME)
def test_operators_of_onnx_runtime(case: str, read: Callable[..., OnnxModel]) -> None:
    """Operators of ONNX Runtime have its shapes, and FLOPs by hand."""
    node, shapes, flops = RUNTIME[case]
    proto = model([node], [value(name, list(shape)) for name, shape in shapes.items()], [n for n in node.output if n])
    for item in proto.graph.output:
        item.type.tensor_type.elem_type = F
    made = read(proto)
    assert (made.unknown, made.notes) == ({}, ())
    assert ops(made.graph)[f"{case}_0"].flops == flops
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    computed = session.run(None, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    assert made.graph.tensor_bytes[made.graph.is_kept].tolist() == [array.nbytes for array in computed]


# Properties


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    size=st.integers(1, 5),
    outs=st.integers(1, 3),
    ins=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    pad=st.integers(0, 1),
    rows=st.integers(1, 4),
    stack=st.integers(0, 3),
)
def test_flops_by_definition(
    read: Callable[..., OnnxModel],
    batch: int,
    groups: int,
    size: int,
    outs: int,
    ins: int,
    kernel: int,
    stride: int,
    pad: int,
    rows: int,
    stack: int,
) -> None:
    """FLOPs of convolutions and products are those of their definitions."""
    length = size + kernel
    x, w = torch.ones(batch, groups * ins, length + 2 * pad), torch.ones(groups * outs, ins, kernel)
    # each multiply-add adds one to the sum of a convolution of ones (the padding's are made, too)
    by_definition = functional.conv1d(x, w, stride=stride, groups=groups).sum()
    a, b = torch.ones(*[2] * stack, rows, size), torch.ones(size, outs)
    nodes = [
        N("Conv", ["x", "w"], ["y"], group=groups, strides=[stride], pads=[pad, pad]),
        N("MatMul", ["a", "b"], ["z"]),
    ]
    inputs = [value("x", [batch, groups * ins, length]), value("a", list(a.shape))]
    graph = read(model(nodes, inputs, ["y", "z"], {"w": w.numpy(), "b": zeros(size, outs) + 1})).graph
    assert ops(graph)["Conv_0"].flops == 2 * by_definition
    assert ops(graph)["MatMul_0"].flops == 2 * (a @ b).sum()


def test_damaged_files(exported: tuple[Path, nn.Module, Tensor], tmp_path: Path) -> None:
    """Damaged bytes give a graph or one line."""
    content, draw = exported[0].read_bytes(), random.Random(0)
    path, lines = tmp_path / "damaged.onnx", list[str]()
    for _ in range(150):
        damaged = bytearray(content)
        if draw.random() < 0.3:
            del damaged[draw.randrange(len(damaged)) :]
        else:
            for _ in range(draw.randint(1, 4)):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            assert isinstance(read_onnx(path, {"batch": 2}).graph, Graph)
        except InputError as error:
            lines.append(str(error))
    assert 0 < len(lines) < 150
    assert all(line.startswith(f"{path}: ") and "\n" not in line for line in lines)


# Bad input


def external(location: str, **entries: str) -> onnx.ModelProto:
    proto = model([N("MatMul", ["x", "w"], ["y"])], [value("x", [3, 40])], ["y"], {"w": zeros(40, 50)})
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=text)
    return proto


def changed(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    proto = model([N("Relu", ["x"], ["y"], name="r")], [value("x", [3])], ["y"])
    change(proto)
    return proto


BAD = {
    "empty": (b"", "is empty; an ONNX model is expected"),
    "text": (b"# not a model\nimport torch\n" * 20, "is no ONNX model, or a damaged one"),
    "nothing inside": (onnx.ModelProto(producer_name="x"), "holds no ONNX model"),
    "no ops": (model([], [], []), "nothing to place"),
    "new ir": (changed(lambda m: setattr(m, "ir_version", 999)), "IR version 999, .*pip install --upgrade onnx"),
    "new opset": (changed(lambda m: setattr(m.opset_import[0], "version", 999)), "opset 999, .*pip install --upgrade"),
    "no such operator": (
        changed(lambda m: setattr(m.graph.node[0], "op_type", "Rlu")),
        "'r' \\(Rlu\\): .*no such operator",
    ),
    "missing input": (
        changed(lambda m: m.graph.node[0].ClearField("input")),
        "'r' \\(Relu\\) is not valid .*input size 0",
    ),
    "unmade input": (changed(lambda m: m.graph.node[0].input.__setitem__(0, "q")), "reads 'q', which nothing makes"),
    "cycle": (
        changed(lambda m: m.graph.node[0].input.__setitem__(0, "y")),
        "'r' \\(Relu\\): waits for its own result, a cycle",
    ),
    "unmade output": (changed(lambda m: m.graph.output.add(name="q")), "output 'q': nothing makes it"),
    "made twice": (
        changed(lambda m: m.graph.node.append(N("Relu", ["x"], ["y"]))),
        "makes 'y', as something else does",
    ),
    "vast": (changed(lambda m: m.graph.input[0].CopyFrom(value("x", [2**40, 2**40]))), "too large for any memory"),
    "axis": (model([N("Softmax", ["x"], ["y"], axis=99)], [value("x", [3])], ["y"]), "axis is 99 for 1 dimensions"),
    "absolute": (external("/etc/passwd"), "'w': external data in '/etc/passwd', outside the directory"),
    "above": (external("a/../../w.bin"), "outside the directory"),
    "on another drive": (external("C:\\w.bin"), "outside the directory"),
    "no location": (external(""), "has no location"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, read: Callable[..., OnnxModel], tmp_path: Path) -> None:
    """Bad files are refused in one line."""
    content, message = BAD[case]
    with pytest.raises(InputError, match=message) as caught:
        read(content)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def test_missing_files(tmp_path: Path) -> None:
    """Missing files and directories are refused."""
    for path, message in ((tmp_path / "no.onnx", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(InputError, match=message):
            read_onnx(path)


def test_weights_elsewhere_are_not_read(read: Callable[..., OnnxModel]) -> None:
    """70e9 parameters, 140 GB in float16, in a file that is not there; and small integers in one that is."""
    layers, width, inner = 80, 8192, 54000
    nodes, tensors = [], []
    for layer in range(layers):
        names = [f"layers.{layer}.up", f"layers.{layer}.down"]
        for name, shape in zip(names, ((width, inner), (inner, width)), strict=True):
            tensor = TensorProto(
                name=name, data_type=TensorProto.FLOAT16, dims=shape, data_location=TensorProto.EXTERNAL
            )
            tensor.external_data.add(key="location", value="weights.bin")
            tensors.append(tensor)
        nodes.append(N("MatMul", [f"h{layer}", names[0]], [f"u{layer}"]))
        nodes.append(N("MatMul", [f"u{layer}", names[1]], [f"h{layer + 1}"]))
    proto = model(nodes, [value("h0", [1, width], TensorProto.FLOAT16)], [f"h{layers}"])
    proto.graph.initializer.extend(tensors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = read(proto).graph
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    assert graph.resident_bytes.sum() == 2 * 2 * layers * width * inner > 140e9
    assert graph.flops.sum() == 2 * 2 * layers * width * inner
    assert set(graph.dtypes) == {"float16"}


def test_weights_inside_of_the_file_are_skipped(tmp_path: Path) -> None:
    """4 GiB of them, a hole in the file: what follows a message in protobuf is merged with it."""

    def field(number: int, size: int) -> bytes:  # lengths in five bytes each, as varints allow
        return bytes([number << 3 | 2, *(size >> shift & 127 | 128 for shift in (0, 7, 14, 21)), size >> 28])

    weight, num_bytes = TensorProto(name="w", data_type=F, dims=[2**15, 2**15]).SerializeToString(), 4 * 2**30
    tensor = weight + field(9, num_bytes)
    graph = field(5, len(tensor) + num_bytes) + tensor
    start = model([N("MatMul", ["x", "w"], ["y"])], [value("x", [1, 2**15])], ["y"]).SerializeToString()
    path = tmp_path / "large.onnx"
    path.write_bytes(start + field(7, len(graph) + num_bytes) + graph)
    with open(path, "ab") as file:
        file.truncate(file.tell() + num_bytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_onnx(path).graph.resident_bytes.sum() == num_bytes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_shapes_beside_the_model(read: Callable[..., OnnxModel], tmp_path: Path) -> None:
    """Shapes are read from a file beside the model."""
    proto = model([N("Tile", ["x", "r"], ["y"])], [value("x", [2, 3])], ["y"], {"r": np.array([4, 5])})
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="shapes.bin")
    tensor.external_data.add(key="offset", value="8")
    assert "y (Tile)" in read(proto).notes[0]  # the file is missing
    (tmp_path / "shapes.bin").write_bytes(np.array([0, 4, 5]).tobytes())
    made = read(proto)
    assert made.notes == ()
    assert made.graph.tensor_bytes.tolist() == [24, 4 * math.prod((8, 15))]


@pytest.mark.parametrize("is_nested", [False, True])
def test_links_of_a_hugging_face_cache(is_nested: bool, tmp_path: Path) -> None:
    """`snapshots/REVISION/model.onnx` and its data are links to `blobs/`, where neither has its name."""
    weights = {"w": zeros(40, 50), "r": np.array([4, 5])}
    nodes = [
        N("MatMul", ["x", "w"], ["h"]),
        N("Neg", ["r"], ["q"]),
        N("Abs", ["q"], ["p"]),
        N("Tile", ["h", "p"], ["y"]),
    ]
    proto = model(nodes, [value("x", [3, 40])], ["y"], weights)
    proto.graph.output[0].type.tensor_type.elem_type = F
    (blobs := tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "0a1b" / ("onnx" if is_nested else "")
    snapshot.mkdir(parents=True)
    onnx.save(proto, blobs / "m", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    (blobs / "model.onnx_data").rename(blobs / "d")
    up = "../" * (3 if is_nested else 2)
    for link, blob in (("model.onnx", "m"), ("model.onnx_data", "d")):
        (snapshot / link).symlink_to(f"{up}blobs/{blob}")
    made = read_onnx(snapshot / "model.onnx")
    assert made.notes == ()
    assert made.graph.resident_bytes.sum() == 4 * 40 * 50
    session = onnxruntime.InferenceSession(snapshot / "model.onnx", providers=["CPUExecutionProvider"])
    (computed,) = session.run(None, {"x": zeros(3, 40)})  # which follows links as well
    assert computed.shape == (12, 250)
    assert made.graph.tensor_bytes[made.graph.is_kept].tolist() == [computed.nbytes]
    (blobs / "d").unlink()  # a file that a download has not fetched yet
    assert read_onnx(snapshot / "model.onnx").graph.resident_bytes.sum() == 4 * 40 * 50
