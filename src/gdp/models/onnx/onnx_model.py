"""`read_onnx`: the graph of an ONNX file, one step of inference, from shapes alone."""

import ast
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from onnx import ModelProto, NodeProto, ValueInfoProto

from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.builder import UniqueNames
from gdp.models.onnx.node_costs import GROUPED_QUERIES
from gdp.models.onnx.nodes import GraphScope, ModelContext, OnnxOp
from gdp.models.onnx.onnx_file import DEFAULT_DOMAINS, FLOAT, TensorInfo, read_model
from gdp.models.onnx.quantised import fuse_quantised
from gdp.models.onnx.shapes import Dims, dims_of

_NAMED = 5  # ops or dimensions named in a note
_SCOPES = "pkg.torch.onnx.name_scopes"  # where PyTorch's exporter writes module paths


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """One inference step of an ONNX model, and how well its costs are known."""

    graph: Graph
    unknown: Mapping[str, int]  # kind -> number of ops estimated at one FLOP per element of the result
    open_loops: Mapping[str, int]  # kind -> number of loops with an unknown trip count, counted once
    notes: tuple[str, ...]  # assumptions, a sentence each
    is_alone: bool  # whether all this follows from the file, without the external data beside it


def read_onnx(path: str | Path, dims: Mapping[str, int] = MappingProxyType({})) -> OnnxModel:
    """Returns the graph of one inference of the model in `path`; its weights are not read.

    dims: sizes of all symbolic dimensions of the inputs, by name. A dimension without a name is called `input[axis]`.

    InputError, one line, for a file that is damaged, too new for the installed `onnx`, or refers to data outside of its
    directory, for a node that is not valid, for a symbolic dimension without a size, and for names in `dims` that the
    model does not have."""
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
            module = _path(item) or modules.get(item, "")
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


def _path(name: str) -> str:
    """Returns the module of a weight: `encoder.layers.3` for `encoder.layers.3.weight`."""
    return _slashed(name) if "/" in name else name.rpartition(".")[0]


def _modules(steps: Iterable[OnnxOp]) -> dict[str, str]:
    """Maps each tensor to the module of the first op that reads it, for weights with names that say nothing."""
    modules: dict[str, str] = {}
    for step in steps:
        module = _module(step.node)
        for item in step.inputs:
            modules.setdefault(item, module)
    return modules
