"""Records for the capture of a JAX function: equations, the values that they make, and ops."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdp.models.names import names

Scope = tuple[str, bool]
"""A name, and whether it is that of a transformation (`jvp`, `transpose`) rather than of a part of the model."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A known operand: a number or an array."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """An application of a primitive: `outputs` are numbers of values, `inputs` numbers of values or constants.

    Equal to itself alone: parameters need not be hashable.
    """

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
    how: str = ""


_CALLS = names(
    """
    jit pjit closed_call core_call core_closed_call call named_call remat remat2 checkpoint custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr custom_lin custom_vmap_call xla_call mlir_call run_state_call composite
    """
)
UNSHARDED = "shardings are left out: the graph is the unsharded program, with the arrays' whole sizes"

IDENTITIES = names(
    """
    stop_gradient name optimization_barrier sharding_constraint pvary pbroadcast device_put layout_constraint
    reshard mesh_cast copy_to_host_async
    """
)
"""Primitives whose results are their operands."""


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


def is_sharded(sharding: Any) -> bool:
    """Returns whether a JAX sharding, or None, splits an array over devices."""
    return any(axis is not None for axis in getattr(sharding, "spec", None) or ())
