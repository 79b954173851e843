"""Shapes: what the calls of an op read and make, as text that graph files carry.

    aten.mm bfloat16[4,8] bfloat16[8,2]{1,8} > bfloat16[4,2]; aten.add_ bfloat16[4,2] 1 > bfloat16[4,2]

A call has its kind, its arguments in order and, behind `>`, its results. Tensors have a type, sizes and, where they are
not contiguous, strides in elements. Others are integers, `(1,2)` lists of them, `-` for none and `~` for all else."""

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from gdp.errors import InputError

_INTEGERS, _SIZES = r"-?\d*(?:,-?\d+)*", r"\d*(?:,\d+)*"
_ARRAY = re.compile(rf"(\w+)\[({_INTEGERS})\](?:\{{({_INTEGERS})\}})?", re.ASCII)
_LIST, _INTEGER = re.compile(rf"\(({_INTEGERS})\)", re.ASCII), re.compile(r"-?\d+", re.ASCII)
_WORD = rf"(?:-?\d+|[-~]|\({_INTEGERS}\)|\w+\[{_SIZES}\](?:\{{{_INTEGERS}\}})?)"
_CALL = rf"[^ ;]+(?: {_WORD})* >(?: \w+\[{_SIZES}\](?:\{{{_INTEGERS}\}})?)*"
_CALLS = re.compile(rf"{_CALL}(?:; {_CALL})*", re.ASCII)
_LONGEST, _KEPT = 20_000, 10_000  # characters of a text, texts that are parsed once
_NONE, _OTHER = "-", "~"


class Array(NamedTuple):
    """A tensor as an op reads or makes it."""

    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...] = ()  # in elements; (): contiguous

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in elements, also of a contiguous tensor."""
        return self.stride or contiguous_strides(self.size)

    def __str__(self) -> str:
        """Returns `bfloat16[8,2]{1,8}`."""
        is_plain = not self.stride or self.stride == contiguous_strides(self.size)
        return f"{self.dtype}[{_joined(self.size)}]" + ("" if is_plain else f"{{{_joined(self.stride)}}}")


Argument = Array | int | tuple[int, ...] | None


class ShapedCall(NamedTuple):
    """A call of an operator; arguments that have no shape and are no integers are None."""

    kind: str
    arguments: tuple[Argument, ...]
    results: tuple[Array, ...]

    @property
    def arrays(self) -> list[Array]:
        """The tensors among the arguments."""
        return [argument for argument in self.arguments if isinstance(argument, Array)]


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, as PyTorch has them."""
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def call_text(kind: str, arguments: Iterable[Argument | str], results: Iterable[Array]) -> str:
    """Returns the text of a call; an argument that is a text stands for itself."""
    return " ".join([kind, *map(_argument_text, arguments), ">", *map(str, results)])


def product_text(dtype: str, parts: int, m: int, n: int, k: int) -> str:
    """Returns the text of `parts` products [m, k] x [k, n]: PyTorch's call, for captures of other sources."""
    operands = Array(dtype, (parts, m, k)), Array(dtype, (parts, k, n))
    return call_text("aten.bmm", operands, [Array(dtype, (parts, m, n))])


def check_calls(text: str) -> None:
    """Raises InputError where `text` is not that of calls."""
    if len(text) > _LONGEST or _CALLS.fullmatch(text) is None:
        parsed_calls(text)


@lru_cache(_KEPT)
def parsed_calls(text: str) -> tuple[ShapedCall, ...]:
    """Returns the calls of a text; InputError where it is none."""
    if len(text) > _LONGEST:
        raise InputError(f"has {len(text):,} characters; up to {_LONGEST:,} are expected")
    return tuple(map(_parsed, text.split("; "))) if text else ()


def interpolated_shapes(one: str, one_samples: int, other: str, other_samples: int, samples: int) -> str:
    """Returns the text at `samples` on the line through two others, rounded up; "" if they are not alike."""
    if one == other:
        return one
    here, there = _INTEGER.findall(one), _INTEGER.findall(other)
    if _INTEGER.sub("#", one) != _INTEGER.sub("#", other):
        return ""
    width, away = other_samples - one_samples, samples - one_samples
    values = iter([int(a) - (int(a) - int(b)) * away // width for a, b in zip(here, there, strict=True)])
    return _INTEGER.sub(lambda _: str(next(values)), one)


def _parsed(text: str) -> ShapedCall:
    kind, *words = text.split(" ")
    if words.count(">") != 1 or not kind:
        raise InputError(f"has {text[:60]!r}; a kind, arguments, '>' and results are expected")
    middle = words.index(">")
    results = list(map(_argument, words[middle + 1 :]))
    arrays = tuple(result for result in results if isinstance(result, Array))
    if len(arrays) != len(results):
        raise InputError(f"has {text[:60]!r}; results are tensors, such as float32[4,8]")
    return ShapedCall(kind, tuple(map(_argument, words[:middle])), arrays)


def _argument(word: str) -> Argument:
    if word in (_NONE, _OTHER):
        return None
    if _INTEGER.fullmatch(word):
        return int(word)
    if found := _LIST.fullmatch(word):
        return _numbers(found[1])
    found = _ARRAY.fullmatch(word)
    if found is None:
        raise InputError(f"has {word[:60]!r}; a tensor such as float32[4,8], an integer, (1,2), - or ~ is expected")
    size, stride = _numbers(found[2]), _numbers(found[3] or "")
    if (stride and len(stride) != len(size)) or min(size, default=0) < 0:
        raise InputError(f"has {word[:60]!r}; sizes of at least 0, and as many strides, are expected")
    return Array(found[1], size, stride)


def _argument_text(argument: Argument | str) -> str:
    if isinstance(argument, tuple) and not isinstance(argument, Array):
        return f"({_joined(argument)})"
    return _NONE if argument is None else str(argument)


def _joined(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
