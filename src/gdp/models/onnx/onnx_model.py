"""`read_onnx`: the graph of an ONNX file, one step of inference, from shapes alone.

An exporter of quantised models writes `x_q -> DequantizeLinear -> Conv -> QuantizeLinear -> y_q` ("QDQ"). ONNX Runtime
(onnxruntime/core/optimizer/qdq_transformer), TensorRT (explicit quantisation) and OpenVINO run that as one kernel on
8-bit integers. So

- a product all of whose operands are dequantised 8-bit tensors computes in int8 and reads these tensors; an operator by
  element, a pooling or a movement does too if its result is quantised again;
- the QuantizeLinear that alone reads its result, or reads it through one Relu or Clip, is part of it;
- a product with a weight of at most 4 bits reads that weight, and computes in floats (ONNX Runtime: MatMulNBits);
- a DequantizeLinear that no other op reads is gone, and so is one that a QuantizeLinear undoes.

A weight of 8 bits beside operands in floats stays as the file has it: a float copy is made in each step."""

import ast
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from onnx import ModelProto, NodeProto, ValueInfoProto

from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.builder import UniqueNames
from gdp.models.names import element_bits, names
from gdp.models.onnx.node_costs import GROUPED_QUERIES, table_name
from gdp.models.onnx.nodes import GraphScope, ModelContext, OnnxOp
from gdp.models.onnx.onnx_file import DEFAULT_DOMAINS, FLOAT, TensorInfo, read_model
from gdp.models.onnx.shapes import Dims, dims_of

_NAMED = 5  # ops or dimensions named in a note
_SCOPES = "pkg.torch.onnx.name_scopes"  # where PyTorch's exporter writes module paths
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
_BETWEEN = frozenset({"Relu", "Clip"})  # a range, which quantisation cuts off by itself
# Operators of ONNX Runtime's QDQ node groups beside the products
_OTHERS = names(
    """
    Add Sub Mul Div Sigmoid Tanh LeakyRelu Relu Clip Softmax Gelu AveragePool GlobalAveragePool MaxPool Concat Where
    Resize Transpose Slice Split Gather Pad Expand DepthToSpace SpaceToDepth Max Min ReduceMean
    """
)
_DEQUANTIZE, _QUANTIZE = "DequantizeLinear", "QuantizeLinear"


def fuse_quantised(steps: list[OnnxOp], kept: Collection[str]) -> tuple[list[OnnxOp], int]:
    """Returns the ops as runtimes run them, and the number of products that compute in int8. kept: names of tensors
    that are results of the model, which stay."""
    readers: dict[str, list[int]] = {}
    makers: dict[str, int] = {}
    for number, step in enumerate(steps):
        for name in step.inputs:
            readers.setdefault(name, []).append(number)
        makers.update(dict.fromkeys(step.outputs, number))
    fused: dict[int, OnnxOp] = {}
    gone: set[int] = set()
    num_products = 0
    for number, step in enumerate(steps):
        kind = table_name(step.kind)
        sources = {name: steps[maker] for name in step.inputs if (maker := makers.get(name, -1)) >= 0}
        wide = {name: source for name, source in sources.items() if _dequantised_bits(source)}
        if kind == _QUANTIZE and wide:
            fused[number] = _absorbed(step, wide)  # of a tensor that is moved and not computed with
            continue
        if not wide or number in gone:
            continue
        chain = _chain_to_quantise(steps, number, readers, kept)
        # all operands are dequantised, or parameters: biases, which a kernel adds in 32 bits
        is_whole = wide.keys() == sources.keys()
        eight_bits = is_whole and {_dequantised_bits(source) for source in wide.values()} <= {8, 32}
        # both operands have 8 bits; they may be one tensor
        wide_bits = [_dequantised_bits(wide[name]) for name in step.operands[:2] if name in wide]
        is_product = kind in _PRODUCTS and wide_bits == [8, 8]
        if eight_bits and (is_product or (kind in _OTHERS and chain)):
            fused[number] = replace(_joined(_absorbed(step, wide), steps, chain), dtype="int8")
            gone.update(chain)
            num_products += is_product
        elif kind in _PRODUCTS:
            narrow = {name: source for name, source in wide.items() if _dequantised_bits(source) <= 4}
            if narrow:
                fused[number] = _absorbed(step, narrow)
    result = [fused.get(number, step) for number, step in enumerate(steps) if number not in gone]
    read = {name for step in result for name in step.inputs} | set(kept)
    return [step for step in result if table_name(step.kind) != _DEQUANTIZE or read & step.outputs.keys()], num_products


def _dequantised_bits(step: OnnxOp) -> int:
    """Returns the bits of the input of a DequantizeLinear; biases have 32; 0 for any other op."""
    if table_name(step.kind) != _DEQUANTIZE or not step.inputs:
        return 0
    bits = element_bits(step.read_dtype) or 0
    return bits if bits <= 4 or step.read_dtype in ("int8", "uint8", "int32") else 0


def _chain_to_quantise(
    steps: list[OnnxOp], number: int, readers: dict[str, list[int]], kept: Collection[str]
) -> list[int]:
    """Returns the ops from the one after `number` to the QuantizeLinear that alone reads the result; [] if none."""
    chain: list[int] = []
    while True:
        outputs = list(steps[number].outputs)
        if len(outputs) != 1 or outputs[0] in kept or len(readers.get(outputs[0], ())) != 1:
            return []
        number = readers[outputs[0]][0]
        chain.append(number)
        kind = table_name(steps[number].kind)
        if kind == _QUANTIZE:
            return chain
        if kind not in _BETWEEN or len(chain) > 1:
            return []


def _absorbed(step: OnnxOp, wide: dict[str, OnnxOp]) -> OnnxOp:
    """Returns `step` with the inputs of the ops in `wide` in place of their results."""
    inputs: list[str] = []
    num_bytes = step.bytes_accessed
    for name in step.inputs:
        if name in wide:
            inputs += wide[name].inputs
            num_bytes += wide[name].bytes_accessed - 2 * wide[name].outputs[name].num_bytes
        else:
            inputs.append(name)
    return replace(step, inputs=list(dict.fromkeys(inputs)), bytes_accessed=max(0, num_bytes))


def _joined(step: OnnxOp, steps: list[OnnxOp], chain: list[int]) -> OnnxOp:
    """Returns `step` with the ops after it in the same kernel: what is between them stays in registers."""
    for number in chain:
        other = steps[number]
        (name, value), *_ = step.outputs.items()
        num_bytes = step.bytes_accessed + other.bytes_accessed - 2 * value.num_bytes
        inputs = [*step.inputs, *(one for one in other.inputs if one != name)]
        read, flops = list(dict.fromkeys(inputs)), step.flops + other.flops
        step = replace(step, inputs=read, outputs=other.outputs, flops=flops, bytes_accessed=max(0, num_bytes))
    return step


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """One inference step of an ONNX model, and how well its costs are known."""

    graph: Graph
    unknown: Mapping[str, int]  # kind -> number of ops estimated at one FLOP per element of the result
    open_loops: Mapping[str, int]  # kind -> number of loops with an unknown trip count, counted once
    notes: tuple[str, ...]  # assumptions, a sentence each
    is_alone: bool  # whether all this follows from the file, without the external data beside it


def read_onnx(path: str | Path, dims: Mapping[str, int] = MappingProxyType({})) -> OnnxModel:
    """Returns the graph of one inference of the model in `path`; its weights are not read. dims: sizes of all symbolic
    dimensions of the inputs, by name. A dimension without a name is called `input[axis]`. InputError, one line, for a
    file that is damaged, too new for the installed `onnx`, or refers to data outside of its directory, for a node that
    is not valid, for a symbolic dimension without a size, and for names in `dims` that the model does not have."""
    path = Path(path)
    try:
        return _read(path, dims)
    except InputError as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from None  # names may hold line breaks


def _read(path: Path, dims: Mapping[str, int]) -> OnnxModel:
    model, is_alone = read_model(path)
    opsets = {"" if item.domain in DEFAULT_DOMAINS else item.domain: item.version for item in model.opset_import}
    if odd := next((version for version in (*opsets.values(), model.ir_version) if not 0 <= version < 2**31), None):
        raise InputError(f"has version {odd} of opset or format; the file is damaged, export it again")
    symbols, notes = Dims(dims), list[str]()
    context = ModelContext({"": 1, **opsets}, model.ir_version, symbols)
    initialized = {tensor.name for tensor in model.graph.initializer}
    inputs = {item.name: _input(item, symbols, notes) for item in model.graph.input if item.name not in initialized}
    symbols.check_names()
    if missing := symbols.not_given:
        options = " ".join(f"--dim {shlex.quote(f'{name}=')}N" for name in missing)
        raise InputError(f"symbolic dimensions have no size: {', '.join(missing)}; add {options}")
    scope = GraphScope(context, model.graph)
    scope.run(inputs)
    results = {scope.root(item.name) for item in model.graph.output}
    scope.steps, num_products = fuse_quantised(scope.steps, results)
    if num_products:
        notes.append(
            f"{num_products} products between QuantizeLinear and DequantizeLinear compute in int8, each with these as "
            "one kernel, as ONNX Runtime, TensorRT and OpenVINO run them"
        )
    if context.estimated:
        listed = _listed(context.estimated)
        notes.append(f"shapes of the results of {listed} are not known from shapes alone; estimated")
    graph = _assemble(model, scope, inputs, path.stem)
    unknown, loops = (MappingProxyType(dict(found)) for found in (context.unknown, context.open_loops))
    return OnnxModel(graph, unknown, loops, (*notes, *dict.fromkeys(context.notes)), is_alone)


def _input(item: ValueInfoProto, dims: Dims, notes: list[str]) -> TensorInfo:
    if not item.name:
        raise InputError("an input has no name; the file is damaged, export it again")
    kind, is_sequence = item.type, False
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        is_sequence = is_sequence or kind.HasField("sequence_type")
        kind = kind.sequence_type.elem_type if kind.HasField("sequence_type") else kind.optional_type.elem_type
    tensor = kind.tensor_type
    sizes = dims_of(kind)
    if is_sequence:
        notes.append(f"input {item.name!r} is a sequence; it is taken as one element")
    if sizes is None:
        notes.append(f"input {item.name!r} has no shape; it is taken as one number")
        return TensorInfo(tensor.elem_type or FLOAT, (), is_sequence)
    shape = []
    for axis, dim in enumerate(sizes):
        symbol = f"{item.name}[{axis}]" if dim is None else dim
        shape.append(symbol if isinstance(symbol, int) else dims.of_input(symbol, f"input {item.name!r}"))
    return TensorInfo(tensor.elem_type or FLOAT, tuple(shape), is_sequence)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# From steps to a Graph


def _assemble(model: ModelProto, scope: GraphScope, inputs: Mapping[str, TensorInfo], name: str) -> Graph:
    """Builds the graph: inputs, parameters that ops read, and ops, in this order, and their tensors."""
    outputs = {scope.root(item.name) for item in model.graph.output}
    read = {item for step in scope.steps for item in step.inputs} | outputs
    names = UniqueNames()
    ops: list[Op] = []
    tensors: dict[str, tuple[int, int, bool]] = {}  # producer, bytes, resident
    modules = _modules(scope.steps)
    shared = _shared_caches(scope.steps, inputs)
    groups = {past: number for number, step in enumerate(scope.steps) for past in map(shared.get, step.outputs)}
    for item, value in inputs.items():
        tensors[item] = (len(ops), value.num_bytes, False)
        ops.append(Op(names.of(item), "input", dtype=value.dtype, phase="forward", group=groups.get(item, -1)))
    for item, (value, num_bytes) in scope.parameters.items():
        if item in read:
            tensors[item] = (len(ops), num_bytes, True)
            own = _slashed(item) if "/" in item else item.rpartition(".")[0]
            module = own or modules.get(item, "")
            ops.append(Op(names.of(item), "parameter", 0, 0, value.dtype, num_bytes, "forward", module))
    for item in sorted(filter(scope.is_constant, outputs)):
        value = scope.values[item]
        tensors[item] = (len(ops), value.num_bytes, False)
        ops.append(Op(names.of(item), "constant", 0, value.num_bytes, value.dtype, phase="forward"))
    consumers: dict[str, list[int]] = {item: [] for item in tensors}
    for step in scope.steps:
        number = len(ops)
        for item in step.inputs:
            consumers[item].append(number)
        for item, value in step.outputs.items():
            tensors[item], consumers[item] = (number, value.num_bytes, item in shared), []
        label = names.of(step.node.name, step.kind.rpartition(":")[2])
        module = _module(step.node)
        figures = step.flops, step.bytes_accessed, step.dtype, step.resident_bytes
        group = max((groups[shared[item]] for item in step.outputs if item in shared), default=-1)
        ops.append(Op(label, step.kind, *figures, "forward", module, group, shapes=step.shapes))
    if not ops:
        raise InputError("has no inputs, weights or operators; there is nothing to place")
    rows = [
        Tensor(producer, tuple(consumers[item]), num_bytes, resident, keep=item in outputs or item in groups)
        for item, (producer, num_bytes, resident) in tensors.items()
    ]
    return Graph.build(name, ops, rows)


def _shared_caches(steps: Iterable[OnnxOp], inputs: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Returns the inputs that are past keys or values, by the present ones of as many bytes that overwrite them."""
    readers = Counter(item for step in steps for item in step.inputs)
    return {
        present: past
        for step in steps
        if step.kind.endswith(GROUPED_QUERIES)
        for past, present in zip(step.operands[3:5], step.node.output[1:3], strict=False)
        if past in inputs and readers[past] == 1 and present in step.outputs
        if inputs[past].shape == step.outputs[present].shape
    }


def _module(node: NodeProto) -> str:
    """Returns the module path of a node, from PyTorch's metadata or the slashes in its name."""
    for item in node.metadata_props:
        if item.key == _SCOPES:
            try:
                scopes = ast.literal_eval(item.value)
                return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                break
    return _slashed(node.name)


def _slashed(name: str) -> str:
    """Turns `/encoder/layers.3/attention/MatMul` into `encoder.layers.3.attention`."""
    return ".".join(part for part in name.split("/")[:-1] if part)


def _modules(steps: Iterable[OnnxOp]) -> dict[str, str]:
    """Maps each tensor to the module of the first op that reads it, for weights with names that say nothing."""
    modules: dict[str, str] = {}
    for step in steps:
        module = _module(step.node)
        for item in step.inputs:
            modules.setdefault(item, module)
    return modules
