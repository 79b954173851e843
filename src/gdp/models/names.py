"""Names of operators, types and ops: tables of them, the size that a type's name tells, and names made unique."""

import re
from collections import Counter


def names(text: str) -> frozenset[str]:
    """Returns the names in `text`, which white space separates."""
    return frozenset(text.split())


def element_bits(dtype: str) -> int | None:
    """Returns the bits of an element: 16 for `bfloat16`; None if the type's name does not tell."""
    match = re.search(r"[0-9]+", "bool8" if dtype == "bool" else dtype)
    return int(match[0]) or None if match else None


class UniqueNames:
    """Gives each op a name of its own."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._taken: set[str] = set()

    def of(self, name: str, stem: str = "") -> str:
        """Returns `name`, numbered (`name_0`, `name_1`, ...) if it is taken; `stem`, numbered, if `name` is empty."""
        stem = name or stem
        while not name or name in self._taken:
            name = f"{stem}_{self._counts[stem]}"
            self._counts[stem] += 1
        self._taken.add(name)
        return name
