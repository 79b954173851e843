"""Records for the capture of a JAX function: equations, the values that they make, ops, and stacks. Stacks are the
arrays that unrolled scans read part by part."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gdp.graph.builder import find
from gdp.models.jax import primitive_costs as costs
from gdp.models.names import names

Scope = tuple[str, bool]
"""A name, and whether it is that of a transformation (`jvp`, `transpose`) rather than of a part of the model."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A known operand: a number or an array."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """An application of a primitive: `outputs` are numbers of values, `inputs` numbers of values or constants. Equal to
    itself alone: parameters need not be hashable."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple["int | Constant", ...]
    outputs: tuple[int, ...]

    def apply(self, values: Mapping[int, Any]) -> list[Any]:
        """Computes the results with JAX, from `values` by number."""
        operands = [item.value if isinstance(item, Constant) else values[item] for item in self.inputs]
        result = self.primitive.bind(*operands, **self.params)
        return list(result) if self.primitive.multiple_results else [result]


@dataclass(eq=False, slots=True)
class JaxValue:
    """An array of the step. `op` made it; else it is lazy, in parts, or a constant."""

    number: int
    aval: Any
    op: "JaxOp | None" = None
    base: "JaxValue | None" = None  # of a lazy value: the first input of its equations
    equations: tuple[Equation, ...] = ()
    is_repeated: bool = False  # larger than its source
    constant: Constant | None = None
    parts: "tuple[JaxValue, ...] | None" = None  # [L] of a stack

    @property
    def source(self) -> "JaxValue | None":
        """The value that an op makes for this one: itself, or the one it is a view of."""
        return self if self.op is not None else self.base

    @property
    def operand(self) -> "int | Constant":
        return self.number if self.constant is None else self.constant

    @property
    def is_known(self) -> bool:
        """True if the value follows from constants alone."""
        return self.op is None and self.base is None and self.parts is None


@dataclass(eq=False, slots=True)
class JaxOp:
    """An op being recorded."""

    kind: str
    module: str = ""
    phase: str = "forward"
    name: str = ""
    dtype: str = "float32"
    flops: int = 0
    bytes_accessed: int = 0
    source: str = ""  # parameter, input or constant
    origin: tuple[int, int] = (-1, -1)  # of a source: the number of its array among the arguments, and its part
    constant: Any = None
    reads: dict[JaxValue, None] = field(default_factory=dict)  # values that ops made
    outputs: list[JaxValue] = field(default_factory=list)
    equations: dict[Equation, None] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    open_loops: Counter[str] = field(default_factory=Counter)
    shapes: str = ""  # of a product


_CALLS = names("jit pjit closed_call core_call core_closed_call call named_call remat remat2 checkpoint composite")
_CALLS |= names("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_lin custom_vmap_call xla_call mlir_call")
_CALLS |= names("run_state_call")
UNSHARDED = "shardings are left out: the graph is the unsharded program, with the arrays' whole sizes"
ON_CARD = "arrays that are sent to the host (memory kind pinned_host) stay on the card in this graph, in its memory"

IDENTITIES = names(
    """
    stop_gradient name optimization_barrier sharding_constraint pvary pbroadcast device_put layout_constraint
    reshard mesh_cast copy_to_host_async
    """
)  # primitives whose results are their operands


def called_jaxpr(name: str, params: Mapping[str, Any]) -> Any:
    """Returns the jaxpr of a call, closed or not; None if the primitive is not a plain call."""
    if name not in _CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        callee = params.get(key)
        if hasattr(callee, "eqns") or hasattr(getattr(callee, "jaxpr", None), "eqns"):
            return callee
    return None


def opened(callee: Any) -> tuple[Any, Sequence[Any]]:
    """Returns (jaxpr, constants) of a jaxpr that is closed or not."""
    return (callee.jaxpr, callee.consts) if hasattr(callee, "consts") else (callee, ())


def has_sharding(name: str, params: Mapping[str, Any]) -> bool:
    """Returns whether an equation says which devices hold parts of its arrays: constraints, a jit with shardings."""
    if name in ("sharding_constraint", "reshard"):
        return True
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(is_sharded(sharding) for sharding in shardings)


def is_sent_to_host(params: Mapping[str, Any]) -> bool:
    """Returns whether a `device_put` names the host's memory, by a sharding or a space; a CPU's own is unpinned."""
    places = params.get("devices", ())
    return any(getattr(place, "memory_kind", "") == "pinned_host" or str(place).endswith("Host") for place in places)


def is_sharded(sharding: Any) -> bool:
    """Returns whether a JAX sharding, or None, splits an array over devices."""
    return any(axis is not None for axis in getattr(sharding, "spec", None) or ())


def part_aval(aval: Any) -> Any:
    """Returns the abstract value of a part of a stack."""
    from jax.core import ShapedArray

    return ShapedArray(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)


def stacked_arguments(jaxpr: Any, unroll_limit: int) -> list[bool]:
    """Returns, for each argument, whether an unrolled scan reads it by parts, directly or through element-wise ops."""
    leader: dict[Any, Any] = {}
    stacked: list[Any] = []

    def join(first: Any, second: Any) -> None:
        if not (hasattr(first, "val") or hasattr(second, "val")):
            leader[find(leader, first)] = find(leader, second)

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            callee = called_jaxpr(name, params)
            if callee is not None:
                inner, _ = opened(callee)
                if len(inner.invars) == len(equation.invars):
                    visit(inner)
                    for pairs in ((equation.invars, inner.invars), (equation.outvars, inner.outvars)):
                        for first, second in zip(*pairs, strict=True):
                            join(first, second)
            elif name == "scan" and 0 < int(params["length"]) <= unroll_limit:
                visit(opened(params["jaxpr"])[0])
                stacked.extend(equation.invars[params["num_consts"] + params["num_carry"] :])
                stacked.extend(equation.outvars[params["num_carry"] :])
            elif name in costs.POINTWISE_PRIMITIVES or name in costs.CONVERSIONS or name in IDENTITIES:
                for item in equation.invars:
                    if item.aval.shape == equation.outvars[0].aval.shape and item.aval.shape:
                        join(item, equation.outvars[0])

    visit(jaxpr)
    classes = {find(leader, item) for item in stacked if not hasattr(item, "val")}
    return [bool(argument.aval.shape) and find(leader, argument) in classes for argument in jaxpr.invars]


@cache
def index_jaxpr(shape: tuple[int, ...], dtype: Any, index: int) -> Any:
    """Returns the jaxpr of a function that takes part `index` of an array."""
    from jax import ShapeDtypeStruct, lax, make_jaxpr

    example = ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    return make_jaxpr(lambda x: lax.index_in_dim(x, index, keepdims=False))(example).jaxpr


@cache
def stack_jaxpr(shape: tuple[int, ...], dtype: Any, count: int) -> Any:
    """Returns the jaxpr of a function that joins `count` parts into one array."""
    from jax import ShapeDtypeStruct, lax, make_jaxpr, numpy

    def stack(*xs: Any) -> Any:
        return lax.concatenate([numpy.expand_dims(x, 0) for x in xs], 0)

    return make_jaxpr(stack)(*[ShapeDtypeStruct(shape, dtype)] * count).jaxpr  # type: ignore[no-untyped-call]
