"""Trip counts of `while` loops of JAX that follow from numbers alone: a counter, its step and its bound.

`fori_loop` with bounds that are Python numbers is a `scan` of known length. With bounds that are arrays, and in loops
written by hand, it is a `while` with a condition that compares integers, which each turn changes by a fixed step:

    while (i, n, x):  i < n          i = 2, n = 10 known, i -> i + 1, n -> n      8 turns
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdp.models.jax.equations import IDENTITIES, called_jaxpr, opened

_RELATIONS = ("lt", "le", "gt", "ge", "eq", "ne")


@dataclass(frozen=True, slots=True)
class _Term:
    """A number, added to the value carried at `place` unless that is None."""

    place: int | None
    number: int


@dataclass(frozen=True, slots=True)
class _Comparison:
    relation: str
    left: _Term
    right: _Term


_Known = _Term | _Comparison | None


def known_number(content: Any) -> int | None:
    """Returns the integer of a literal or constant; None for anything else."""
    try:
        array = np.asarray(content)
    except (TypeError, ValueError):  # a random key, a token
        return None
    return int(array) if array.ndim == 0 and array.dtype.kind in "iu" else None


def trip_count(params: Mapping[str, Any], inputs: Sequence[int | None]) -> int | None:
    """Returns the turns of a `while` with these operands, known numbers or None; None if it cannot be told."""
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    first = inputs[num_cond + num_body :]
    carried: list[_Known] = [_Term(place, 0) for place in range(len(first))]
    (condition,) = _evaluate(params["cond_jaxpr"], [*map(_constant, inputs[:num_cond]), *carried])
    if not isinstance(condition, _Comparison):
        return None
    constants = inputs[num_cond : num_cond + num_body]
    after = _evaluate(params["body_jaxpr"], [*map(_constant, constants), *carried])
    left, right = _line(condition.left, first, after), _line(condition.right, first, after)
    if left is None or right is None:
        return None
    return _turns(condition.relation, left[0] - right[0], left[1] - right[1])


def _constant(number: int | None) -> _Known:
    return None if number is None else _Term(None, number)


def _line(term: _Term, first: Sequence[int | None], after: Sequence[_Known]) -> tuple[int, int] | None:
    """Returns (value in the first turn, increment of each turn) of a term."""
    if term.place is None:
        return term.number, 0
    start, then = first[term.place], after[term.place]
    if start is None or not isinstance(then, _Term) or then.place != term.place:
        return None
    return start + term.number, then.number


def _turns(relation: str, difference: int, step: int) -> int | None:
    """Returns the number of turns until `difference`, plus `step` in each turn, no longer has this relation to 0."""
    if relation in ("gt", "ge"):
        relation, difference, step = {"gt": "lt", "ge": "le"}[relation], -difference, -step
    if relation == "le":  # of integers
        relation, difference = "lt", difference - 1
    if relation == "lt":
        return 0 if difference >= 0 else None if step <= 0 else -(difference // step)
    if relation == "eq":
        return 0 if difference else 1 if step else None
    if difference == 0:
        return 0
    return -difference // step if step and difference % step == 0 and -difference // step > 0 else None


def _evaluate(callee: Any, arguments: Sequence[_Known]) -> list[_Known]:
    """Returns the results of a jaxpr, each a term, a comparison of two terms, or None."""
    jaxpr, constants = opened(callee)
    terms: dict[Any, _Known] = dict(zip(jaxpr.invars, arguments, strict=True))
    terms.update(zip(jaxpr.constvars, (_constant(known_number(content)) for content in constants), strict=False))

    def read(item: Any) -> _Known:
        return _constant(known_number(item.val)) if hasattr(item, "val") else terms.get(item)

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [read(item) for item in equation.invars]
        inner = called_jaxpr(name, equation.params)
        if inner is not None and len(opened(inner)[0].invars) == len(inputs):
            results = _evaluate(inner, inputs)
        else:
            results = [_applied(name, inputs, equation.outvars[0].aval)]
        terms.update(zip(equation.outvars, results, strict=False))
    return [read(item) for item in jaxpr.outvars]


def _applied(name: str, inputs: Sequence[_Known], aval: Any) -> _Known:
    """Returns the first result of a primitive."""
    if name in ("add", "sub", *_RELATIONS) and len(inputs) == 2:
        left, right = inputs
        if not isinstance(left, _Term) or not isinstance(right, _Term):
            return None
        if name in _RELATIONS:
            return _Comparison(name, left, right)
        if name == "add" and (left.place is None or right.place is None):
            return _Term(right.place if left.place is None else left.place, left.number + right.number)
        if name == "sub" and right.place is None:
            return _Term(left.place, left.number - right.number)
        return None
    is_integer = getattr(getattr(aval, "dtype", None), "kind", "") in ("i", "u")
    is_same = name in IDENTITIES or name in ("copy", "copy_p") or (name == "convert_element_type" and is_integer)
    return inputs[0] if is_same and inputs else None
