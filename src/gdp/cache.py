"""The user's cache of captured graphs and plans. It may be deleted at any time. Names have a hash of all that the
content depends on, so no entry is wrong. One that cannot be written or read costs time, no more."""

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
    """Returns the directory of such entries: `$XDG_CACHE_HOME/gdp/KIND`, `~/.cache/gdp/KIND`; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "gdp" / kind
    except RuntimeError:
        return None


def entry(kind: str, label: str, depends_on: Iterable[object], code: Iterable[Path] = ()) -> Path | None:
    """Returns the file of the entry that depends on `depends_on` and on the source files `code`. Values in `depends_on`
    are told apart by their `repr`; `label` makes the file's name readable."""
    where = directory(kind)
    if where is None:
        return None
    digest = hashlib.sha256(repr(tuple(depends_on)).encode())
    for source in sorted(code):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "." for letter in label)[:80]
    return where / f"{readable}-{digest.hexdigest()[:32]}.json.gz"


def read(path: Path | None, format: str, version: int) -> Mapping[str, Any] | None:
    """Returns the document of an entry; None if there is none, or a damaged one."""
    if path is None or not os.path.isfile(path):
        return None
    with contextlib.suppress(InputError, ValueError):
        digest, _, content = files.read_bytes(path).partition(b"\n")
        if digest == _digest(content):
            return files.require_header(orjson.loads(content), format, version)
    return None


def write(path: Path | None, document: Mapping[str, Any]) -> None:
    """Writes `document` to the entry `path`, if that is possible."""
    if path is not None:
        with contextlib.suppress(InputError):
            content = files.json_bytes(document)
            files.write_bytes(path, _digest(content) + b"\n" + content)


def _digest(content: bytes) -> bytes:
    """Returns the SHA-256 of an entry, which goes before it: readers trust what is in one that is whole."""
    return hashlib.sha256(content).hexdigest().encode()
