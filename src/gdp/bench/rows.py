"""Rows of a benchmark that takes hours: each is saved as it ends, and found again when the benchmark runs once more."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gdp import files
from gdp.errors import InputError

FORMAT, VERSION = "gdp-bench-row", 1


@dataclass(frozen=True, eq=False)
class Rows:
    """One file for each row, so that several processes may fill a directory together. Without one, nothing is kept.

    A row is found again only by the settings that it was made with; changes of the code are not noticed.
    """

    directory: Path | None

    def row(self, name: str, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row `name`, of JSON values: the saved one, or else what `make` returns, which is saved.

        Raises InputError where the saved one was made with other `settings`.
        """
        if self.directory is None:
            return make()
        path = self.directory / f"{re.sub(r'[^0-9A-Za-z.-]+', '_', name)}.json"
        given = orjson.loads(orjson.dumps(dict(settings)))
        if path.exists():
            return _read(path, given)
        row = make()
        files.write_json(path, {"format": FORMAT, "version": VERSION, "settings": given, "row": row})
        return row


def _read(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        document = files.require_header(files.read_json(path), FORMAT, VERSION)
        found, row = document.get("settings"), document.get("row")
        if not isinstance(found, dict) or not isinstance(row, dict):
            raise InputError("settings or row is missing")
    except InputError as error:
        raise InputError(f"{path}: {error}; delete it, or choose another --out") from None
    for name in sorted(settings.keys() | found.keys()):
        if settings.get(name) != found.get(name):
            raise InputError(f"{path}: was made with another {name}; delete it, or choose another --out")
    return row
