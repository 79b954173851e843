"""Equations of a jaxpr that stand for others: calls, which are looked into, and what hands its operands on."""

from collections.abc import Mapping, Sequence
from typing import Any

_CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "core_closed_call", "call", "named_call", "remat", "remat2",
    "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "custom_vmap_call",
    "xla_call", "mlir_call", "run_state_call", "composite",
})  # fmt: skip
_IDENTITIES = frozenset({
    "stop_gradient", "name", "optimization_barrier", "sharding_constraint", "pvary", "pbroadcast", "device_put",
    "layout_constraint", "reshard", "mesh_cast", "copy_to_host_async",
})  # fmt: skip


def called_jaxpr(name: str, params: Mapping[str, Any]) -> Any:
    """The jaxpr that a call stands for, closed or not; None if the primitive is no plain call."""
    if name not in _CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        found = params.get(key)
        if hasattr(found, "eqns") or hasattr(getattr(found, "jaxpr", None), "eqns"):
            return found
    return None


def opened(callee: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, constants) of a jaxpr that is closed or not."""
    return (callee.jaxpr, callee.consts) if hasattr(callee, "consts") else (callee, ())


def is_identity(name: str) -> bool:
    """Whether the results are the operands."""
    return name in _IDENTITIES
