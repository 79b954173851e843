"""Names of ops that are made unique."""

from collections import Counter


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
