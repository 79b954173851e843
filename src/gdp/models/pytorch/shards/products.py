"""Products of tensors, each dimension of an operand with a letter: equal ones are of equal size, as in einsum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gdp.models.names import names
from gdp.models.pytorch.shards.cuts import cut_of

_GROUPED = names("_grouped_mm grouped_mm grouped_mm_fallback")
_PLAIN = names("matmul __matmul__ __rmatmul__ mm bmm mv")
_ADDED = names("addmm baddbmm addbmm")
_KEYS = {  # of operands
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
}
NAMES = frozenset({"linear", "einsum"}) | _GROUPED | _PLAIN | _ADDED
_REST = "..."  # of the dimensions, in einsum
_ANY = "."  # a dimension of size 1, which is broadcast


@dataclass(frozen=True, eq=False)
class Product:
    """A product of operands; its bias, one of them, is added."""

    name: str
    operands: Sequence[Tensor]
    letters: Sequence[str]
    result: str
    rest: Mapping[str, Any]
    bias: int | None = None
    is_scaled: bool = False

    def call(self, func: Any, operands: Sequence[Tensor], *, with_bias: bool = True) -> Any:
        """Returns the product of these operands by `func`; of addmm and its kin without bias, the plain product."""
        if self.name == "einsum":
            return func(self.rest["equation"], *operands)
        if self.bias is None or with_bias:
            return func(*operands, **self.rest)
        factors = [operand for place, operand in enumerate(operands) if place != self.bias]
        return (functional.linear if self.name == "linear" else torch.matmul)(*factors)


def read(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    """Returns a call of a function in NAMES as a product; None for a form that is not known."""
    rest = dict(kwargs)
    if name == "einsum":
        equation, *operands = args
        operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
        letters, result = _spelled(str(equation), operands)
        if any(len(set(text)) < len(text) for text in letters):
            return None
        letters = [_seen(text, operand) for text, operand in zip(letters, operands, strict=True)]
        return Product(name, operands, letters, result, {"equation": equation})
    keys = _KEYS.get(name, ())
    operands = [*args, *(rest.pop(key) for key in keys[len(args) :] if key in rest)]
    count = 3 if name in _ADDED or (name == "linear" and len(operands) == 3 and operands[2] is not None) else 2
    if name in _GROUPED:
        rest |= dict(zip(("offs", "bias", "out_dtype"), operands[2:], strict=False))
    operands = operands[:count]
    if not all(isinstance(operand, Tensor) for operand in operands) or len(operands) < count:
        return None
    if name == "linear":
        x, weight = operands[:2]
        batch = _batch(x.dim() - 1)
        out = "n" if weight.dim() == 2 else ""
        return Product(
            name, operands, [batch + "k", out + "k", out][:count], batch + out, rest, 2 if count > 2 else None
        )
    if name in _GROUPED:
        if [operand.dim() for operand in operands] != [2, 3] or rest.get("bias") is not None:
            return None
        return Product(name, operands, ["rk", "ekn"], "rn", rest)
    factors = operands[1:] if name in _ADDED else operands
    first, second = reversed(factors) if name == "__rmatmul__" else factors
    left = _batch(first.dim() - 2) + ("mk" if first.dim() > 1 else "k")
    right = _batch(second.dim() - 2) + ("kn" if second.dim() > 1 else "k")
    longest = max(left[:-2], right[:-2], key=len)
    result = longest + "m" * (first.dim() > 1) + "n" * (second.dim() > 1)
    if name == "addbmm":
        return None
    letters = [_seen(left, first), _seen(right, second)]
    letters = letters[::-1] if name == "__rmatmul__" else letters
    if name not in _ADDED:
        return Product(name, operands, letters, result, rest)
    bias = operands[0]
    is_scaled = any(rest.get(key, 1) != 1 for key in ("alpha", "beta"))
    return Product(
        name, operands, [_seen(result[len(result) - bias.dim() :], bias), *letters], result, rest, 0, is_scaled
    )


def _spelled(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Returns the letters of each operand of `einsum` and of its result, those of `...` among them."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    texts = inputs.split(",")
    if not arrow:
        seen = inputs.replace(",", "").replace(".", "")
        result = _REST * (_REST in inputs) + "".join(sorted(letter for letter in set(seen) if seen.count(letter) == 1))
    free = [letter for letter in ascii_letters if letter not in equation]
    counts = [
        operand.dim() - len(text) + len(_REST) if _REST in text else 0
        for text, operand in zip(texts, operands, strict=True)
    ]
    rest = "".join(free[: max(counts)])
    texts = [text.replace(_REST, rest[len(rest) - count :]) for text, count in zip(texts, counts, strict=True)]
    return texts, result.replace(_REST, rest)


def _batch(count: int) -> str:
    """Returns the letters of leading dimensions, which are aligned from the right."""
    return "".join(chr(ord("A") + place) for place in reversed(range(max(count, 0))))


def _seen(letters: str, operand: Tensor) -> str:
    """Returns the letters of an operand, without those of dimensions that are broadcast."""
    cut = cut_of(operand)
    shape = operand.shape if cut is None else cut.shape
    return "".join(letter if size > 1 else _ANY for letter, size in zip(letters, shape, strict=True))
