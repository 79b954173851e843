"""Rows of a benchmark that takes hours: each is saved as it ends, and found again when the benchmark runs once more."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from gdp import files
from gdp.errors import InputError

FORMAT, VERSION = "gdp-bench-row", 1
CAPTURE = "gdp/graph", "gdp/models", "benchmarks/models"
PREDICTION = (*CAPTURE, "gdp/cluster", "gdp/costs", "gdp/parallel", "gdp/simulator", "gdp/bounds")
SEARCH = (*PREDICTION, "gdp/units", "gdp/placers", "gdp/policy", "gdp/search")
"""Rooms that steps depend on, their predicted times, and their placements."""
_SUFFIXES = ".py", ".toml", ".yaml", ".csv", ".safetensors"


@cache
def code_of(*rooms: str) -> str:
    """Returns a digest of code and tables: rows that have it among their settings are refused where these changed.
    `rooms` are directories or files of gdp and of benchmarks, such as gdp/costs or benchmarks/live.py."""
    above, digest = {"gdp": Path(files.__file__).parents[1], "benchmarks": Path(__file__).parents[1]}, hashlib.sha256()
    for room in rooms:
        path = above[room.partition("/")[0]] / room
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in _SUFFIXES:
                digest.update(f"{room} {file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Rows:
    """A directory with one file for each row, so that several processes may fill it together.

    A row is found again only by the settings that it was made with; changes of the code are noticed where `code_of`
    what it depends on is one of them.
    """

    directory: Path  # plans and checkpoints of the rows are there too
    keep: bool = True  # False: every row is made anew
    shared: Mapping[str, Any] = field(default_factory=dict)  # settings of all rows

    def row(self, name: str, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the row `name`, of JSON values: the saved one, or else the result of `make`, which is saved.

        Raises InputError where the saved one was made with other `settings`.
        """
        if not self.keep:
            return make()
        path = self.directory / f"{re.sub(r'[^0-9A-Za-z.-]+', '_', name)}.json"
        settings = orjson.loads(orjson.dumps({**self.shared, **settings}))
        if path.exists():
            return _read(path, settings)
        row = make()
        files.write_json(path, {"format": FORMAT, "version": VERSION, "settings": settings, "row": row})
        return row


def _read(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    remedy = "delete it, or choose another --rows or --out"
    try:
        document = files.require_header(files.read_json(path), FORMAT, VERSION)
        saved, row = document.get("settings"), document.get("row")
        if not isinstance(saved, dict) or not isinstance(row, dict):
            raise InputError("settings or row is missing")
    except InputError as error:
        raise InputError(f"{path}: {error}; {remedy}") from None
    for name in sorted(settings.keys() | saved.keys()):
        if settings.get(name) != saved.get(name):
            raise InputError(f"{path}: was made with another {name}; {remedy}")
    return row
