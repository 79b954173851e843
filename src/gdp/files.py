"""Reading and writing files: strict JSON, transparent gzip, atomic replacement. Every reader raises `InputError` with
one line that names the file, the place in it and the remedy. Every writer writes to a temporary name beside the target
and renames it, so a file is whole or absent."""

import contextlib
import gc
import gzip
import hashlib
import io
import json
import os
import re
import reprlib
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from gdp.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
_MOST_UNZIPPED = 2**29  # bytes: JSON of a million ops; larger graphs are written in columns


def read_bytes(path: str | Path) -> bytes:
    """Returns the content of `path`, unzipped if its name ends in `.gz`."""
    path = Path(path)
    with explained(path):
        content = path.read_bytes()
    if path.suffix != ".gz":
        if content.startswith(GZIP_MAGIC):
            raise InputError(f"{path}: is gzip but its name does not end in .gz; rename it to {path.name}.gz")
        return content
    if not content.startswith(GZIP_MAGIC):
        raise InputError(f"{path}: its name ends in .gz but it is not gzip; rename it without .gz")
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unzipped = file.read(_MOST_UNZIPPED + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise InputError(f"{path}: truncated or damaged gzip; write or copy the file again") from None
    if len(unzipped) > _MOST_UNZIPPED:
        raise InputError(f"{path}: is more than {_MOST_UNZIPPED >> 20} MiB unzipped; unzip it if that is right")
    return unzipped


def digest(path: str | Path) -> str:
    """Returns the SHA-256 of the content of `path`, which is read in small parts."""
    with explained(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Turns the errors of reading a file into InputErrors of one line."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; name a file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collects no garbage meanwhile: among millions of new objects, looking for cycles takes most of the time."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def read_json(path: str | Path) -> Any:
    """Reads the JSON document in `path` (gzip if it ends in `.gz`). A key that a mapping has twice is an error."""
    content = read_bytes(path)
    if not content or content.isspace():
        raise InputError(f"{path}: is empty; a JSON document is expected")
    try:
        with without_collection():
            document = orjson.loads(content)
            num_keys = _num_keys(document)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InputError(f"{path}: {where}: not valid JSON ({error.msg}); mend or rewrite the file") from None
    # quick for what gdp writes: as many keys as `":` means no duplicates, unless there is white space before a colon
    if re.search(rb'"\s+:', content) or content.count(b'":') != num_keys:
        try:
            json.loads(content, object_pairs_hook=_refuse_duplicates)
        except _DuplicateKeyError as error:
            raise InputError(f"{path}: key {str(error)!r} stands twice in one mapping; keep one") from None
    return document


def format_of(path: str | Path) -> str:
    """Returns the `format` that a JSON file begins with; "" for anything else."""
    path = Path(path)
    try:
        if not path.is_file():
            return ""
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            found = re.search(rb'"format"\s*:\s*"([^"]*)"', file.read(1000))
    except (OSError, EOFError, zlib.error):
        return ""
    return "" if found is None else found[1].decode("utf-8", "replace")


class _DuplicateKeyError(Exception):
    pass


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    keys = set()
    for key, _ in pairs:
        if key in keys:
            raise _DuplicateKeyError(key)
        keys.add(key)


def _num_keys(document: object) -> int:
    """Returns the number of keys of all mappings in `document`, level by level."""
    count, level = 0, [document]
    while level:
        mappings = [value for value in level if type(value) is dict]
        lists = [value for value in level if type(value) is list]
        count += sum(map(len, mappings))
        values = chain(chain.from_iterable(map(dict.values, mappings)), chain.from_iterable(lists))
        level = [value for value in values if type(value) is dict or type(value) is list]
    return count


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes `content` to `path`, gzip if it ends in `.gz`, through a temporary name and a rename."""
    path = Path(path)
    if path.suffix == ".gz":
        content = gzip.compress(content, compresslevel=6, mtime=0)  # mtime 0: equal content, equal file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.", suffix=".tmp")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
        raise


def write_json(path: str | Path, document: object) -> None:
    """Writes `document` as JSON (gzip if `path` ends in `.gz`), atomically."""
    write_bytes(path, json_bytes(document))


def json_bytes(document: object) -> bytes:
    """Returns `document` as JSON, on one line."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def fingerprint(document: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of `document` as compact JSON with sorted keys, its `name` left out."""
    content = {key: value for key, value in document.items() if key != "name"}
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def require_header(
    document: object, expected_format: str, version: int, oldest: int | None = None
) -> Mapping[str, Any]:
    """Checks `format` and `version` of a document; messages name neither file nor op, the caller adds the file.
    Versions from `oldest` (None: `version`) to `version` are read."""
    oldest = version if oldest is None else oldest
    if not isinstance(document, dict):
        raise InputError(f"the document is a {type(document).__name__}; a {expected_format} mapping is expected")
    format = document.get("format")
    if format != expected_format:
        raise InputError(f"format is {brief(format)}; {expected_format!r} is expected")
    check_version(document.get("version"), expected_format, version, oldest)
    return document


def check_version(found: object, what: str, version: int, oldest: int) -> None:
    """Raises InputError unless a file's version is one from `oldest` to `version`."""
    if type(found) is int and oldest <= found <= version:
        return
    versions = f"version {version}" if oldest == version else f"versions {oldest} to {version}"
    newer = type(found) is int and found > version
    remedy = "; a newer gdp wrote it: upgrade this one" if newer else ""
    raise InputError(f"version is {brief(found)}; this gdp reads {what} {versions}{remedy}")


def require_keys(
    record: object, where: str, fields: Mapping[str, Callable[[object], bool]], required: set[str]
) -> None:
    """Checks that `record` is a mapping with all `required` keys, no unknown keys, and values of the right types."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: is a {type(record).__name__}; a mapping is expected")
    for key, value in record.items():
        is_valid = fields.get(key)
        if is_valid is None:
            raise InputError(f"{where}: unknown key {key!r}; known keys: {', '.join(fields)}")
        if not is_valid(value):
            raise InputError(f"{where}: {key} is {brief(value)}; {is_valid.__doc__} is expected")
    for key in sorted(required - record.keys()):
        raise InputError(f"{where}: {key} is missing; add it")


def is_string(value: object) -> bool:
    """a string"""
    return type(value) is str


def is_flag(value: object) -> bool:
    """true or false"""
    return type(value) is bool


def is_size(value: object) -> bool:
    """an integer from 0 to 2^63 - 1"""
    return type(value) is int and 0 <= value < 2**63


def is_index(value: object) -> bool:
    """an integer from -1 to 2^63 - 1"""
    return type(value) is int and -1 <= value < 2**63


def is_list(value: object) -> bool:
    """a list"""
    return type(value) is list


def is_mapping(value: object) -> bool:
    """a mapping"""
    return type(value) is dict


def is_number_list(value: object) -> bool:
    """a list of integers"""
    return type(value) is list and all(type(item) is int and -(2**63) <= item < 2**63 for item in value)


_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother, _brief.maxlong = 2, 60, 60, 60


def brief(value: object) -> str:
    """Returns the `repr` of a value in a file, shortened to 60 characters, however deep or long the value is."""
    text = _brief.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
