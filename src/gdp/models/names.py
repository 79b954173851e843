"""Names of operators and types: tables of them, and the size that a type's name tells."""

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import TypeVar

_Value = TypeVar("_Value")
_OPERATORS = tomllib.loads(files("gdp.models").joinpath("operators.toml").read_text(encoding="utf-8"))


def names(text: str) -> frozenset[str]:
    """Returns the names in `text`, which white space separates."""
    return frozenset(text.split())


def by_name(table: Mapping[str, _Value]) -> dict[str, _Value]:
    """Returns the value of each name, from a table whose keys are names that white space separates."""
    return {name: value for text, value in table.items() for name in text.split()}


def listed(framework: str, table: str) -> frozenset[str]:
    """Returns the operators of a `table` of operators.toml."""
    return names(_OPERATORS[framework][table])


def counts(framework: str, table: str) -> dict[str, int]:
    """Returns the number of each operator in a `table` of operators.toml."""
    return by_name(_OPERATORS[framework][table])


def element_bits(dtype: str) -> int | None:
    """Returns the bits of an element: 16 for `bfloat16`; None if the type's name does not tell."""
    match = re.search(r"[0-9]+", "bool8" if dtype == "bool" else dtype)
    return int(match[0]) or None if match else None
