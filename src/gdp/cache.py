"""The user's cache: captured graphs and plans that are found again. It may be deleted at any time.

An entry's name has a hash of all that its content depends on, so an entry is never wrong, only unused. What cannot be
written or read costs time, no more.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from gdp import files
from gdp.errors import InputError


def directory(kind: str) -> Path | None:
    """Where entries of this kind are kept: `$XDG_CACHE_HOME/gdp/KIND`, `~/.cache/gdp/KIND`; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "gdp" / kind
    except RuntimeError:
        return None


def entry(kind: str, label: str, depends_on: Iterable[object], code: Iterable[Path] = ()) -> Path | None:
    """The file of what follows from `depends_on`, values whose `repr` says all, and from the source files `code`."""
    where = directory(kind)
    if where is None:
        return None
    digest = hashlib.sha256(repr(tuple(depends_on)).encode())
    for source in sorted(code):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "." for letter in label)[:80]
    return where / f"{readable}-{digest.hexdigest()[:32]}.json.gz"


def read(path: Path | None, format: str, version: int) -> Mapping[str, Any] | None:
    """The document of an entry; None if there is none, or a damaged one."""
    if path is None or not os.path.isfile(path):
        return None
    with contextlib.suppress(InputError, ValueError):
        return files.require_header(orjson.loads(files.read_bytes(path)), format, version)
    return None


def write(path: Path | None, document: Mapping[str, Any]) -> None:
    """Keep `document`, if that can be done."""
    if path is not None:
        with contextlib.suppress(InputError):
            files.write_json(path, document)
