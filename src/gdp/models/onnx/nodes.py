"""The nodes of an ONNX graph as ops with costs, one after another, so that all earlier shapes are known. If,
Loop and Scan, which contain graphs, are one op each, with the summed costs of their bodies."""

import contextlib
from collections import ChainMap, Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, checker, defs, helper, numpy_helper

from gdp.arrays import Content
from gdp.errors import InputError, first_line
from gdp.graph.builder import topological_order
from gdp.models.onnx.node_costs import OnnxCall, count_bytes, count_flops, dtype_of, kind_of, product_shapes
from gdp.models.onnx.onnx_file import BOOL, DEFAULT_DOMAINS, INT32, INT64, SMALL, TensorInfo, captured, reads, subgraphs
from gdp.models.onnx.runtime_shapes import RUNTIME_KINDS
from gdp.models.onnx.shapes import Dims, NodeOutputs, checked, fold, infer, is_constant
from gdp.models.pytorch.flops import FORMULA, UNKNOWN

_CONTENT_CODES = (1, 2, 3, INT32, INT64, BOOL, 10, 11)  # types whose small tensors NumPy can hold
_NOT_TENSORS = {"Resize": (1, 2, 3), "Upsample": (1,)}  # inputs with options, small floats: no parameters
_ALIASES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})
"""Their result is their first input's memory, in ONNX Runtime too. Slice, Split, Transpose and Expand copy."""
_EACH_TIME = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial"})
_EACH_TIME |= {"Bernoulli", "Dropout", "DequantizeLinear"}
"""Operators that ONNX Runtime runs in each step even of weights: random ones, and those that kernels may take in."""
_AXES = ("axis", "axes", "perm", "batch_axis", "time_axis", "batch_dims", "scan_input_axes", "scan_output_axes")
_ENDLESS = 2**31  # a trip count from here on means "until the condition says so"


@dataclass(frozen=True, slots=True)
class ExecutionCost:
    """The cost of one execution of a node."""

    flops: int
    num_bytes: int
    resident_bytes: int
    dtype: str


def control_flow_outputs(
    node: NodeProto, call: OnnxCall, scope: "GraphScope"
) -> tuple[NodeOutputs, ExecutionCost] | None:
    """Returns the outputs and cost of If, Loop and Scan; None for any other node."""
    reader = {"If": _if, "Loop": _loop, "Scan": _scan}.get(call.kind)
    if reader is None or (call.kind == "Scan" and scope.context.opsets.get("", 1) < 9):  # Scan had another meaning
        return None
    label = f"node {node.name or node.output[0] if node.output else node.name!r} ({call.kind})"
    try:
        results, cost = reader(node, call, scope, label)
    except InputError:
        raise
    except (LookupError, TypeError, ValueError):
        raise InputError(f"{label}: its graph and its inputs do not fit together; export it again") from None
    if len(results.values) != len(node.output):
        raise InputError(f"{label}: its graph has not as many outputs as the node; export it again")
    return results, cost


def _body(node: NodeProto, name: str) -> GraphProto:
    for attribute in node.attribute:
        if attribute.name == name and attribute.HasField("g"):
            return attribute.g  # type: ignore[no-any-return]
    raise LookupError(name)


def _if(node: NodeProto, call: OnnxCall, scope: "GraphScope", label: str) -> tuple[NodeOutputs, ExecutionCost]:
    """Takes the branch that is known to be taken, else the larger."""
    condition = call.contents[0] if call.inputs[0] is not None else None
    names = ["then_branch", "else_branch"]
    if condition is not None and scope.is_constant(node.input[0]):
        names = names[:1] if condition.any() else names[1:]
    context, runs = scope.context, []
    before = context.unknown, context.open_loops
    for name in names:
        context.unknown, context.open_loops = Counter(), Counter()
        inner = scope.inner(_body(node, name))
        inner.run({})
        runs.append((inner, _cost(inner), (context.unknown, context.open_loops)))
    inner, cost, counts = max(runs, key=lambda run: (run[1].flops, run[1].num_bytes))
    context.unknown, context.open_loops = (old + new for old, new in zip(before, counts, strict=True))
    if len(runs) > 1:
        context.notes.append(f"{label}: which branch is taken is unknown; the one of more FLOPs is counted")
    values = tuple(inner.values[item.name] for item in inner.graph.output)
    resident = sum(cost.resident_bytes for _, cost, _ in runs)  # the other branch's weights are there too
    return NodeOutputs(values), replace(cost, resident_bytes=resident)


def _loop(node: NodeProto, call: OnnxCall, scope: "GraphScope", label: str) -> tuple[NodeOutputs, ExecutionCost]:
    """Takes the body times the trip count. Inputs: count, condition, carried; body: number, condition, carried."""
    trips = _number(call, 0, node, scope)
    if call.has(1) and _number(call, 1, node, scope) == 0:
        trips = 0
    if trips is None or not trips < _ENDLESS:
        scope.context.open_loops[call.kind] += 1
        scope.context.notes.append(f"{label}: the trip count is unknown; its body is counted once")
        trips = 1
    inner = scope.inner(_body(node, "body"))
    carried = [call.input(place) for place in range(2, len(call.inputs))]
    inputs = [TensorInfo(INT64, ()), TensorInfo(BOOL, ()), *carried]
    inner.run(dict(zip((item.name for item in inner.graph.input), inputs, strict=True)))
    outputs = [inner.values[item.name] for item in inner.graph.output][1:]
    last = outputs[: len(carried)] if trips else carried
    scanned = [TensorInfo(value.code, (trips, *value.shape)) for value in outputs[len(carried) :]]
    return NodeOutputs((*last, *scanned)), _times(_cost(inner), trips)


def _scan(node: NodeProto, call: OnnxCall, scope: "GraphScope", label: str) -> tuple[NodeOutputs, ExecutionCost]:
    """Takes the body times the length of the scanned inputs, which come after the states."""
    num_scanned = int(call.attributes["num_scan_inputs"])
    values = [call.input(place) for place in range(len(call.inputs))]
    num_states = len(values) - num_scanned
    if num_scanned < 1 or num_states < 0:
        raise LookupError(num_scanned)
    axes = call.attributes.get("scan_input_axes") or [0] * num_scanned
    slices = []
    trips = values[num_states].shape[axes[0]]
    for value, axis in zip(values[num_states:], axes, strict=True):
        shape = list(value.shape)
        del shape[axis]
        slices.append(TensorInfo(value.code, tuple(shape)))
    inner = scope.inner(_body(node, "body"))
    names = [item.name for item in inner.graph.input]
    inner.run(dict(zip(names, [*values[:num_states], *slices], strict=True)))
    outputs = [inner.values[item.name] for item in inner.graph.output]
    axes = call.attributes.get("scan_output_axes") or [0] * (len(outputs) - num_states)
    stacked = []
    for value, axis in zip(outputs[num_states:], axes, strict=True):
        shape = list(value.shape)
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, trips)
        stacked.append(TensorInfo(value.code, tuple(shape)))
    return NodeOutputs((*outputs[:num_states], *stacked)), _times(_cost(inner), trips)


def _number(call: OnnxCall, position: int, node: NodeProto, scope: "GraphScope") -> int | None:
    """Returns the content of a constant input of one element."""
    if not call.has(position) or not scope.is_constant(node.input[position]):
        return None
    content = call.contents[position]
    return int(content.reshape(-1)[0]) if content is not None and content.size == 1 else None


def _cost(inner: "GraphScope") -> ExecutionCost:
    """Returns the cost of one execution of a graph."""
    resident = sum(num_bytes for _, num_bytes in inner.parameters.values())
    resident += sum(step.resident_bytes for step in inner.steps)
    heaviest = max(inner.steps, key=lambda step: (step.flops, step.bytes_accessed), default=None)
    flops, num_bytes = sum(step.flops for step in inner.steps), sum(step.bytes_accessed for step in inner.steps)
    return ExecutionCost(flops, num_bytes, resident, heaviest.dtype if heaviest is not None else "int64")


def _times(cost: ExecutionCost, trips: int) -> ExecutionCost:
    trips = max(0, trips)
    return replace(cost, flops=cost.flops * trips, num_bytes=cost.num_bytes * trips)


@dataclass(eq=False, slots=True)
class OnnxOp:
    """An op being recorded; names of tensors are those of their producers, aliases resolved."""

    node: NodeProto
    kind: str
    inputs: list[str]
    outputs: dict[str, TensorInfo]
    flops: int
    bytes_accessed: int
    dtype: str
    resident_bytes: int = 0  # of initializers inside of its graphs
    operands: tuple[str, ...] = ()  # the first inputs by place, "" where one is absent
    read_dtype: str = ""  # of the first input
    shapes: str = ""  # of a product


@dataclass(eq=False)
class ModelContext:
    """The context of all nodes of a model: versions, dimensions, and notes taken on the way."""

    opsets: Mapping[str, int]
    ir_version: int
    dims: Dims
    unknown: Counter[str] = field(default_factory=Counter)  # by kind
    open_loops: Counter[str] = field(default_factory=Counter)  # by kind, loops counted once
    estimated: list[str] = field(default_factory=list)  # ops with results of a guessed shape
    notes: list[str] = field(default_factory=list)

    def check(self, node: NodeProto, label: str) -> None:
        """Raises InputError for a node that its operator does not allow."""
        domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
        if not node.op_type:
            raise InputError(f"{label} has no operator; the file is damaged, export it again")
        if domain not in ("", "ai.onnx.ml") or (domain == "" and node.op_type in RUNTIME_KINDS):
            return
        if not defs.has(node.op_type, self.opsets.get(domain, 1), domain):
            raise InputError(
                f"{label}: opset {self.opsets.get(domain, 1)} of domain {domain or 'ai.onnx'!r} has no such operator; "
                "export again, or put operators of your own in a domain of their own"
            )
        if any(item.HasField("t") or item.HasField("g") or item.tensors or item.graphs for item in node.attribute):
            return  # its content has been left out, and its graphs are checked node by node
        context = checker.C.CheckerContext()
        context.ir_version, context.opset_imports = self.ir_version, {**self.opsets, "ai.onnx": self.opsets.get("", 1)}
        try:
            checker.check_node(node, context)
        except checker.ValidationError as error:
            raise InputError(f"{label} is not valid ({first_line(error)}); export it again") from None


@dataclass(eq=False)
class GraphScope:
    """The names of one graph and of those around it, with their values, and the ops that make them."""

    context: ModelContext
    graph: GraphProto
    values: ChainMap[str, TensorInfo] = field(default_factory=ChainMap)
    contents: ChainMap[str, Content | None] = field(default_factory=ChainMap)  # of small tensors, as far as known
    constants: ChainMap[str, bool] = field(default_factory=ChainMap)  # True for names that no op makes
    roots: ChainMap[str, str] = field(default_factory=ChainMap)  # by alias, the name that owns its memory
    parameters: dict[str, tuple[TensorInfo, int]] = field(default_factory=dict)  # with bytes: sparse ones have fewer
    steps: list[OnnxOp] = field(default_factory=list)

    def inner(self, graph: GraphProto) -> "GraphScope":
        names: Any = (self.values, self.contents, self.constants, self.roots)
        return GraphScope(self.context, graph, *(known.new_child() for known in names))

    def run(self, inputs: Mapping[str, TensorInfo]) -> None:
        """Records the nodes of the graph, with these inputs."""
        self.declared: dict[str, TypeProto] = {
            item.name: item.type for item in (*self.graph.value_info, *self.graph.output) if item.HasField("type")
        }
        for name, value in inputs.items():
            self._define(name, value)
        for tensor in self.graph.initializer:
            self._add_initializer(tensor.name, tensor)
        for sparse in self.graph.sparse_initializer:
            name, value = sparse.values.name, TensorInfo(sparse.values.data_type, tuple(sparse.dims))
            self._define(name, value)
            stored = [TensorInfo(at.data_type, tuple(at.dims)).num_bytes for at in (sparse.values, sparse.indices)]
            self.parameters[name] = (value, sum(stored))
        own = {*inputs, *(item.name for item in self.graph.initializer), *self.parameters}
        self.guessed: set[str] = set()  # names with a guessed shape
        nodes = _sorted(self.graph, own, self.values)
        self.used = {name for node in nodes for name in reads(node)} | {item.name for item in self.graph.output}
        for node in nodes:
            self._visit(node)
        for item in self.graph.output:
            if item.name not in self.values:
                raise InputError(f"output {item.name!r}: nothing makes it; export the model again")

    def root(self, name: str) -> str:
        """Returns the name that owns the memory of `name`."""
        return self.roots.get(name, name)

    def is_constant(self, name: str) -> bool:
        """Returns whether `name` is part of the ops that read it, and made by none."""
        return self.constants.get(name, False)

    def _define(
        self, name: str, value: TensorInfo, content: Content | None = None, *, is_constant: bool = False
    ) -> None:
        """Defines a name, which hides the same name around this graph."""
        if not name:
            raise InputError("an input or initializer has no name; the file is damaged, export it again")
        self.values[name] = checked(name, value)
        self.contents[name], self.constants[name], self.roots[name] = content, is_constant, name

    def _add_initializer(self, name: str, tensor: Any) -> None:
        value, content = TensorInfo(tensor.data_type, tuple(tensor.dims)), None
        if value.numel <= SMALL and value.code in _CONTENT_CODES:
            # its content may be elsewhere, or not as long as its shape says
            with contextlib.suppress(Exception):
                content = numpy_helper.to_array(tensor)
        self._add_held(name, value, content)

    def _add_held(self, name: str, value: TensorInfo, content: Content | None = None) -> None:
        """Defines a name that no op of a step makes: a parameter, or if it is small a part of the ops that read it."""
        self._define(name, value, content, is_constant=is_constant(value))
        if not is_constant(value):
            self.parameters[name] = (value, value.num_bytes)

    def _visit(self, node: NodeProto) -> None:
        kind = kind_of(node.domain, node.op_type)
        label = f"node {node.name or node.output[0] if node.output else node.name!r} ({kind})"
        self.context.check(node, label)
        attributes = _attributes(node)
        if kind == "Constant":
            self._add_constant(node, attributes)
            return
        inputs = tuple(self.values[name] if name else None for name in node.input)
        contents = tuple(self.contents.get(name) if name else None for name in node.input)
        call = OnnxCall(kind, inputs, (), attributes, contents)
        _check_numbers(node, call, label)
        context, reads_guesses = self.context, not self.guessed.isdisjoint(node.input)
        known = control_flow_outputs(node, call, self)
        declared = context.ir_version, self.declared, context.dims, reads_guesses
        results, cost = known or (infer(node, call, context.opsets, *declared), None)
        if cost is None and self._fold(node, call, results):
            return
        for name, value in zip(node.output, results.values, strict=True):
            if value is not None:
                self._define(name, value)
        self.guessed |= results.guessed
        if not results.guessed.isdisjoint(self.used):
            self.context.estimated.append(f"{node.name or node.output[0]} ({kind})")
        if kind in _ALIASES and inputs and inputs[0] is not None and self._is_alias(node, call):
            self.roots[node.output[0]] = self.root(node.input[0])
            self.constants[node.output[0]] = self.is_constant(node.input[0])
        elif cost is None and self._is_computed_once(node, call, results):
            for name, value in zip(node.output, results.values, strict=True):
                if value is not None:
                    self._add_held(name, value)
        else:
            self._add_step(node, call, results, cost)

    def _fold(self, node: NodeProto, call: OnnxCall, results: NodeOutputs) -> bool:
        """Computes the node here if its inputs are constants; Shape and Size need no content."""
        if call.kind not in ("Shape", "Size"):
            if not all(self.is_constant(name) and self.contents[name] is not None for name in node.input if name):
                return False
            if results.guessed and call.kind != "NonZero":  # it may be large
                return False
        arrays = fold(node, call, results.values, self.context.opsets)
        for name, array, value in zip(node.output, arrays, results.values, strict=False):
            if value is not None:
                self._define(name, TensorInfo(value.code, array.shape), array, is_constant=True)
        return bool(arrays)

    def _is_computed_once(self, node: NodeProto, call: OnnxCall, results: NodeOutputs) -> bool:
        """Returns whether ONNX Runtime computes a node when it loads the file: one of ONNX that reads weights and
        constants alone. In graphs of other nodes, which own their weights, all are taken to run."""
        is_inside = len(self.values.maps) > 1
        if is_inside or "::" in call.kind or call.kind in _EACH_TIME or results.guessed:
            return False
        roots = [self.root(name) for name in node.input if name]
        is_known = all(self.is_constant(name) or name in self.parameters for name in roots)
        return bool(roots) and is_known and not any(value is not None and value.is_sequence for value in results.values)

    def _is_alias(self, node: NodeProto, call: OnnxCall) -> bool:
        if call.kind == "Dropout" and call.has(2):
            is_training = call.contents[2]
            if is_training is None or is_training.any():
                return False
        return not any(name in self.used for name in node.output[1:])

    def _add_constant(self, node: NodeProto, attributes: Mapping[str, Any]) -> None:
        """Adds a Constant node, which is an initializer under another name."""
        if len(node.output) != 1 or not attributes:
            raise InputError(f"node {node.name!r} (Constant): has no value; the file is damaged, export it again")
        value = next(iter(attributes.values()))
        if isinstance(value, TensorProto):
            self._add_initializer(node.output[0], value)
            return
        try:
            if hasattr(value, "indices"):  # sparse
                tensor = TensorProto(data_type=value.values.data_type, dims=value.dims)
            elif isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
                tensor = TensorProto(data_type=8, dims=[] if isinstance(value, str) else [len(value)])
            else:
                is_float = isinstance(value, float) or next(iter(attributes)) == "value_floats"
                tensor = numpy_helper.from_array(np.array(value, np.float32 if is_float else np.int64))
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(f"node {node.name!r} (Constant): bad value ({first_line(error)}); export again") from None
        self._add_initializer(node.output[0], tensor)

    def _add_step(self, node: NodeProto, call: OnnxCall, results: NodeOutputs, cost: ExecutionCost | None) -> None:
        skipped = _NOT_TENSORS.get(call.kind, ())
        names = [name for place, name in enumerate(node.input) if name and place not in skipped]
        for graph in subgraphs(node):
            names += [name for name in captured(graph) if name in self.values]
        distinct = list(dict.fromkeys(names))
        whole = OnnxCall(call.kind, call.inputs, results.values, call.attributes, call.contents)
        shapes = ""
        if cost is None:
            flops, how = count_flops(whole)
            if how == UNKNOWN:
                self.context.unknown[call.kind] += 1
            read = list(dict.fromkeys(name for name in node.input if name))
            num_bytes = count_bytes(whole, [self.values[name] for name in read])
            cost = ExecutionCost(flops, num_bytes, 0, dtype_of(whole))
            shapes = product_shapes(whole, flops, cost.dtype) if how == FORMULA else ""
            if shapes and cost.dtype == "float32":  # ONNX Runtime lets cards round (`use_tf32`, 1 by default)
                cost = replace(cost, dtype="tf32")
        outputs = {name: value for name, value in zip(node.output, results.values, strict=True) if value is not None}
        inputs = list(dict.fromkeys(self.root(name) for name in distinct if not self.is_constant(name)))
        first = call.inputs[0] if call.inputs else None
        self.steps.append(
            OnnxOp(
                node,
                call.kind,
                inputs,
                outputs,
                cost.flops,
                cost.num_bytes,
                cost.dtype,
                cost.resident_bytes,
                tuple(self.root(name) if name else "" for name in node.input),
                "" if first is None else first.dtype,
                shapes,
            )
        )


def _sorted(graph: GraphProto, own: set[str], values: Mapping[str, TensorInfo]) -> list[NodeProto]:
    """Returns the nodes in a topological order, the file's if possible; `values` has the names around the graph too."""
    maker: dict[str, int] = {}
    for number, node in enumerate(graph.node):
        for name in node.output:
            if name and (name in maker or name in own):
                raise InputError(f"node {node.name!r} ({node.op_type}): makes {name!r}, as something else does")
            maker[name] = number
    makers = []
    for node in graph.node:
        names = reads(node)
        for name in names:
            if name not in maker and name not in values:
                raise InputError(
                    f"node {node.name!r} ({node.op_type}): reads {name!r}, which nothing makes; export the model again"
                )
        makers.append({maker[name] for name in names if name in maker})
    order = topological_order(makers)
    if len(order) < len(graph.node):
        stuck = graph.node[min(set(range(len(graph.node))).difference(order))]
        raise InputError(f"node {stuck.name!r} ({stuck.op_type}): waits for its own result, a cycle; unroll it")
    return [graph.node[number] for number in order]


def _check_numbers(node: NodeProto, call: OnnxCall, label: str) -> None:
    """Raises InputError for an impossible axis or number of outputs, for which onnx's inference goes out of bounds."""
    if call.kind == "Split" and call.attributes.get("num_outputs", len(node.output)) != len(node.output):
        raise InputError(f"{label}: num_outputs is not the number of its outputs; export the model again")
    rank = max((len(value.shape) for value in call.inputs if value is not None), default=0)
    for name in _AXES:
        value = call.attributes.get(name, [])
        axes = value if isinstance(value, list) else [value]
        limit = rank + len(axes)  # Unsqueeze adds as many
        for axis in axes:
            if isinstance(axis, int) and not -limit <= axis <= limit:
                raise InputError(f"{label}: {name} is {axis} for {rank} dimensions; export the model again")


def _attributes(node: NodeProto) -> dict[str, Any]:
    """Returns values by name, strings decoded, graphs left out."""
    values: dict[str, Any] = {}
    for attribute in node.attribute:
        if subgraphs(attribute) or attribute.ref_attr_name:
            continue
        try:
            value = helper.get_attribute_value(attribute)
        except ValueError:
            continue  # of no type
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        elif not isinstance(value, (int, float)) and attribute.type == attribute.STRINGS:
            value = [item.decode(errors="replace") for item in value]
        elif attribute.type in (attribute.INTS, attribute.FLOATS):
            value = list(value)
        values[attribute.name] = value
    return values
