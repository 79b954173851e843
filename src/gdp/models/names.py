"""Names of operators and types: tables of them, and the size that a type's name tells."""

import re


def names(text: str) -> frozenset[str]:
    """Returns the names in `text`, which white space separates."""
    return frozenset(text.split())


def element_bits(dtype: str) -> int | None:
    """Returns the bits of an element: 16 for `bfloat16`; None if the type's name does not tell."""
    match = re.search(r"[0-9]+", "bool8" if dtype == "bool" else dtype)
    return int(match[0]) or None if match else None
