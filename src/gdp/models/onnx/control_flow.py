"""ONNX nodes that contain graphs: If, Loop and Scan are one op each, with the summed costs of their bodies."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnx import GraphProto, NodeProto

from gdp.errors import InputError
from gdp.models.onnx.node_costs import OnnxCall
from gdp.models.onnx.onnx_file import BOOL, INT64, TensorInfo
from gdp.models.onnx.shapes import NodeOutputs

if TYPE_CHECKING:
    from gdp.models.onnx.nodes import GraphScope

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
