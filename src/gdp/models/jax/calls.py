"""Equations of a jaxpr that stand for others: calls, which are inlined, and identities, which return their operands."""

from collections.abc import Mapping, Sequence
from typing import Any

from gdp.models.names import names

_CALLS = names(
    """
    jit pjit closed_call core_call core_closed_call call named_call remat remat2 checkpoint custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr custom_lin custom_vmap_call xla_call mlir_call run_state_call composite
    """
)
UNSHARDED = "shardings are left out: the graph is the unsharded program, with the arrays' whole sizes"

_IDENTITIES = names(
    """
    stop_gradient name optimization_barrier sharding_constraint pvary pbroadcast device_put layout_constraint
    reshard mesh_cast copy_to_host_async
    """
)


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


def is_identity(name: str) -> bool:
    """Returns whether the results of a primitive are its operands."""
    return name in _IDENTITIES
