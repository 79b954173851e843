"""Stacks, the arrays that unrolled scans read part by part: the arguments that are stacks, and their parts."""

from functools import cache
from typing import Any

from gdp.models.jax import primitive_costs as costs
from gdp.models.jax.equations import IDENTITIES, called_jaxpr, opened


def part_aval(aval: Any) -> Any:
    """Returns the abstract value of a part of a stack."""
    from jax.core import ShapedArray

    return ShapedArray(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)


def stacked_arguments(jaxpr: Any, unroll_limit: int) -> list[bool]:
    """Returns, for each argument, whether an unrolled scan reads it by parts, directly or through element-wise ops."""
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
            elif name in costs.POINTWISE_PRIMITIVES or name in costs.CONVERSIONS or name in IDENTITIES:
                for item in equation.invars:
                    if item.aval.shape == equation.outvars[0].aval.shape and item.aval.shape:
                        join(item, equation.outvars[0])

    visit(jaxpr)
    classes = {find(item) for item in stacked if not hasattr(item, "val")}
    return [bool(argument.aval.shape) and find(argument) in classes for argument in jaxpr.invars]


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
