"""Shapes of the tensors of an ONNX model: values of symbolic dimensions, shapes of one node's results, constants. Nodes
are read in order, so all earlier shapes are known. Values computed from shapes (Shape, Gather, Concat into a Reshape,
...) are computed here too, by the reference implementation of the `onnx` package."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TypeProto, defs, helper, numpy_helper
from onnx.shape_inference import infer_node_outputs

from gdp.arrays import Content
from gdp.errors import InputError
from gdp.models.names import listed
from gdp.models.onnx.node_costs import POINTWISE_KINDS, OnnxCall, table_name
from gdp.models.onnx.onnx_file import BOOL, DEFAULT_DOMAINS, FLOAT, INT32, INT64, SMALL, TensorInfo
from gdp.models.onnx.runtime_shapes import EQUIVALENTS, Inferred, as_equivalent, by_rule

_MOST_BYTES = 2**62  # of one tensor

# Symbolic dimensions


@dataclass
class Dims:
    """Values of symbolic dimensions; those that are not given are 1 until `not_given` is asked for."""

    given: Mapping[str, int]
    names: dict[str, None] = field(default_factory=dict)  # the symbols of the inputs, in order

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            if type(value) is not int or not 0 <= value < 2**40:
                raise InputError(f"dimension {name!r} is {value!r}; an integer of at least 0 is expected")

    def of_input(self, symbol: str, where: str) -> int:
        """Returns the value of a dimension of an input: a symbol, or a sum or product of symbols and numbers."""
        tree = None if symbol in self.given else _expression(symbol)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} if tree is not None else {symbol}
        self.names.update(dict.fromkeys(sorted(names)))
        value = _evaluated(tree, lambda name: self.given.get(name, 1)) if tree else self.given.get(symbol, 1)
        if value is None or value < 0:
            raise InputError(f"{where} has dimension {symbol!r} = {value}; give its symbols other values")
        return value

    def of_symbol(self, symbol: str) -> int | None:
        """Returns the value of a dimension elsewhere; None if it has symbols that no input has."""
        if symbol in self.names:
            return self.given.get(symbol, 1)
        tree = _expression(symbol)
        if tree is None:
            return None
        return _evaluated(tree, lambda name: self.given.get(name, 1) if name in self.names else None)

    def check_names(self) -> None:
        """Raises InputError for a given name that is no symbol of any input."""
        for name in self.given:
            if name not in self.names:
                symbols = ", ".join(self.names)
                remedy = f"those of its inputs are {symbols}" if symbols else "all its inputs are fixed"
                raise InputError(f"has no symbolic dimension {name!r}; {remedy}")

    @property
    def not_given(self) -> list[str]:
        return [name for name in self.names if name not in self.given]


_OPERATORS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub}
_OPERATORS |= {ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv}


def _expression(symbol: str) -> ast.expr | None:
    """Parses `past + sequence`, `2*s0`; None for a single symbol."""
    if len(symbol) > 200 or not re.fullmatch(r"[\w\s+*/()-]+", symbol) or not re.search(r"[+*/-]|^\d+$", symbol):
        return None
    try:
        tree = ast.parse(symbol.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    node_types = (ast.BinOp, ast.Name, ast.Load, ast.Constant, *_OPERATORS)
    return tree if all(isinstance(node, node_types) for node in ast.walk(tree)) else None


def _evaluated(tree: ast.expr, value_of: Callable[[str], int | None]) -> int | None:
    if isinstance(tree, ast.Name):
        return value_of(tree.id)
    if isinstance(tree, ast.Constant):
        return tree.value if type(tree.value) is int else None
    assert isinstance(tree, ast.BinOp)
    left, right = _evaluated(tree.left, value_of), _evaluated(tree.right, value_of)
    if left is None or right is None or (right == 0 and isinstance(tree.op, (ast.Div, ast.FloorDiv))):
        return None
    return _OPERATORS[type(tree.op)](left, right)


# Types as protobuf has them


def dims_of(kind: TypeProto) -> list[int | str | None] | None:
    """Returns the dimensions of a tensor: sizes, symbols, or None for no name; None if the rank is unknown."""
    shape = kind.tensor_type.shape if kind.tensor_type.HasField("shape") else None
    if shape is None:
        return None
    return [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else (d.dim_param or None) for d in shape.dim]


def known_value(kind: TypeProto, dims: Dims) -> tuple[int, list[int | None] | None, bool]:
    """Returns (element type, shape with None for unknown sizes, is it a sequence) of a type."""
    if kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        inner = kind.sequence_type if kind.HasField("sequence_type") else kind.optional_type
        code = inner.elem_type.tensor_type.elem_type
        return code or FLOAT, None, True
    if kind.WhichOneof("value") != "tensor_type":
        return FLOAT, None, False
    sizes = dims_of(kind)
    if sizes is None:
        return kind.tensor_type.elem_type, None, False
    shape = [dim if isinstance(dim, int) else None if dim is None else dims.of_symbol(dim) for dim in sizes]
    return kind.tensor_type.elem_type, shape, False


def checked(name: str, value: TensorInfo) -> TensorInfo:
    """Returns `value`; InputError if it does not fit in 63 bits."""
    if value.num_bytes >= _MOST_BYTES:
        raise InputError(f"tensor {name!r} has shape {list(value.shape)}, too large for any memory; check the file")
    return value


# One node


@dataclass(frozen=True)
class NodeOutputs:
    """The outputs of a node, and the names of outputs with a guessed shape."""

    values: tuple[TensorInfo | None, ...]
    guessed: frozenset[str] = frozenset()


def infer(
    node: NodeProto,
    call: OnnxCall,
    opsets: Mapping[str, int],
    ir_version: int,
    declared: Mapping[str, TypeProto],
    dims: Dims,
    reads_guesses: bool,
) -> NodeOutputs:
    """Returns types and shapes of the outputs of `node`; `call` has its inputs and no outputs. They come from the
    operator's own inference; else from a table for ONNX Runtime's operators; else, or if the shape of an input is
    itself a guess, from the file's declarations. Remaining unknowns are taken from the largest input."""
    inferred = _inferred(node, call, opsets, ir_version, dims) or by_rule(call, len(node.output))
    largest = max((value for value in call.inputs if value is not None), key=lambda value: value.numel, default=None)
    values: list[TensorInfo | None] = []
    guessed: set[str] = set()
    for place, name in enumerate(node.output):
        if not name:
            values.append(None)
            continue
        code, shape, is_sequence = inferred[place] if place < len(inferred) else (0, None, False)
        if name in declared and (not code or shape is None or None in shape or reads_guesses):
            other_code, other, is_other = known_value(declared[name], dims)
            if reads_guesses and other is not None and None not in other:
                shape = other
            code, is_sequence = code or other_code, is_sequence or is_other
            if other is not None and (shape is None or len(shape) == len(other)):
                shape = [a if a is not None else b for a, b in zip(shape or [None] * len(other), other, strict=True)]
        if shape is None and table_name(call.kind) in POINTWISE_KINDS:
            shape = _broadcast([value.shape for value in call.inputs if value is not None])
        if shape is None or None in shape:
            guessed.add(name)
            guess = largest.shape if largest is not None else ()
            if shape is None:
                shape = list(guess)
            elif len(shape) == len(guess):
                shape = [a if a is not None else b for a, b in zip(shape, guess, strict=True)]
        code = code or (largest.code if largest is not None else FLOAT)
        whole = tuple(1 if dim is None else dim for dim in shape)
        values.append(checked(name, TensorInfo(code, whole, is_sequence)))
    return NodeOutputs(tuple(values), frozenset(guessed))


def _inferred(node: NodeProto, call: OnnxCall, opsets: Mapping[str, int], ir_version: int, dims: Dims) -> Inferred:
    """Returns the inferred outputs; (0, None, False) for an output that the operator says nothing about."""
    try:
        if call.kind in EQUIVALENTS:
            node, call, schema = as_equivalent(node, call)
        else:
            domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
            schema = defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
        types, contents = {}, {}
        for place, (name, value) in enumerate(zip(node.input, call.inputs, strict=True)):
            if value is None:
                continue
            types[name] = _type_of(value)
            content = call.contents[place]
            if content is not None:
                contents[name] = numpy_helper.from_array(content)
        versions = [helper.make_opsetid(key, version) for key, version in opsets.items()]
        outputs = infer_node_outputs(schema, node, types, contents, opset_imports=versions, ir_version=ir_version)
    except Exception:  # onnx's own exception types, and any from an operator's code
        return []
    return [known_value(outputs[name], dims) if name in outputs else (0, None, False) for name in node.output]


def _type_of(value: TensorInfo) -> TypeProto:
    if value.is_sequence:
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(value.code, None))
    return helper.make_tensor_type_proto(value.code, value.shape)


def _broadcast(shapes: Iterable[tuple[int, ...]]) -> list[int | None] | None:
    try:
        return list(np.broadcast_shapes(*shapes))
    except ValueError:
        return None


# Constants

_FOLDED = listed("onnx", "folded")


def fold(
    node: NodeProto, call: OnnxCall, outputs: Sequence[TensorInfo | None], opsets: Mapping[str, int]
) -> list[Content]:
    """Returns the computed outputs of a node, as inferred in `outputs`; [] where not known, or large."""
    if call.kind not in _FOLDED or not call.has(0) or sum(x.numel for x in outputs if x is not None) > SMALL:
        return []
    if call.kind in ("Shape", "Size"):
        shape = call.input(0).shape
        if call.kind == "Size":
            return [np.array(call.input(0).numel, np.int64)]
        start, end = call.attributes.get("start", 0), call.attributes.get("end", len(shape))
        return [np.array(shape[start:end], np.int64)]
    from onnx.reference import ReferenceEvaluator

    inputs = {name: content for name, content in zip(node.input, call.contents, strict=True) if name}
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(node, opsets=dict(opsets)).run(None, inputs)
    except Exception:  # any exception from an operator's code
        return []
    arrays = [np.asarray(array) for array in results]
    return arrays if all(array.size <= SMALL for array in arrays) and len(arrays) == len(node.output) else []


def is_constant(value: TensorInfo) -> bool:
    """Returns whether a tensor with known content is part of the ops that read it: a shape, an index, a number."""
    return value.numel <= 1 or (value.code in (INT32, INT64, BOOL) and value.numel <= SMALL)
