"""Stacks, the arrays that unrolled scans go over part by part: which arguments are some, what puts them together."""

from typing import Any

from gdp.capture import jax_costs as costs
from gdp.capture.jax_calls import called_jaxpr, is_identity, opened


def part_aval(aval: Any) -> Any:
    """Of what a stack has parts of."""
    from jax.core import ShapedArray

    return ShapedArray(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)


def stacked_arguments(jaxpr: Any, unroll_limit: int) -> list[bool]:
    """Which arguments are read by an unrolled scan part by part, or element by element together with such."""
    leader: dict[Any, Any] = {}
    stacked: list[Any] = []

    def find(item: Any) -> Any:
        while leader.get(item, item) is not item:
            item = leader[item]
        return item

    def join(first: Any, second: Any) -> None:
        if not (hasattr(first, "val") or hasattr(second, "val")):
            leader[find(first)] = find(second)

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
            elif name in costs.POINTWISE_PRIMITIVES or name in costs.CONVERSIONS or is_identity(name):
                for item in equation.invars:
                    if item.aval.shape == equation.outvars[0].aval.shape and item.aval.shape:
                        join(item, equation.outvars[0])

    visit(jaxpr)
    classes = {find(item) for item in stacked if not hasattr(item, "val")}
    return [bool(argument.aval.shape) and find(argument) in classes for argument in jaxpr.invars]


def index_jaxpr(aval: Any, index: int) -> Any:
    """Of a function that gives the part there of such an array."""
    from jax import lax, make_jaxpr

    return make_jaxpr(lambda x: lax.index_in_dim(x, index, keepdims=False))(_example(aval)).jaxpr


def stack_jaxpr(aval: Any, count: int) -> Any:
    """Of a function that makes one array of so many parts like this."""
    from jax import lax, make_jaxpr, numpy

    def stack(*xs: Any) -> Any:
        return lax.concatenate([numpy.expand_dims(x, 0) for x in xs], 0)

    return make_jaxpr(stack)(*[_example(aval)] * count).jaxpr


def _example(aval: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)  # type: ignore[no-untyped-call]
