"""Opening of checkpoint files: the header, and errors of one line with the file, the fault and the remedy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
from safetensors import SafetensorError, safe_open

from gdp import files
from gdp.errors import InputError

FORMAT, VERSION = "gdp-checkpoint", 2
TRAINING = "optimizer/"  # prefix of the names of tensors of a training's state


def _is_mapping(value: object) -> bool:
    """a mapping"""
    return type(value) is dict


_HEADER_FIELDS = MappingProxyType(
    {
        "format": files.is_string,
        "version": files.is_size,
        "policy": files.is_string,
        "config": _is_mapping,
        "manifest": _is_mapping,
    }
)


@contextmanager
def opened(path: str | Path, framework: str) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Yields (header, the open file), with tensors of `framework`, "pt" or "numpy".

    Raises InputError for a bad file, and adds the file's name to an InputError raised meanwhile.
    """
    if Path(path).is_dir():
        raise InputError(f"{path}: is a directory; name a file")
    try:
        with safe_open(path, framework=framework) as file:
            yield _read_header(file.metadata()), file
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    except SafetensorError:
        raise InputError(f"{path}: truncated, or no safetensors file; copy or train it again") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read_header(metadata: Mapping[str, str] | None) -> Mapping[str, Any]:
    text = (metadata or {}).get("gdp")
    if text is None:
        raise InputError("has no gdp header; name a file that `gdp train` wrote")
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InputError("its gdp header is not JSON; copy or train it again") from None
    header = files.require_header(document, FORMAT, VERSION)
    files.require_keys(header, "header", _HEADER_FIELDS, set(_HEADER_FIELDS))
    return header


def read_config(config_class: Any, document: object, where: str) -> Any:
    """Reads a configuration that `config_document` wrote: every field, each of the type of its default."""
    default = config_class()
    names = [field.name for field in fields(config_class)]
    if not isinstance(document, dict):
        raise InputError(f"{where} is a {type(document).__name__}; a mapping is expected")
    for name in sorted(set(names) ^ document.keys()):
        raise InputError(f"{where}: {name} is {'missing' if name in names else 'unknown'}; the file is of another gdp")
    values = {}
    for name in names:
        value, like = document[name], getattr(default, name)
        if is_dataclass(like):
            value = read_config(type(like), value, f"{where}: {name}")
        elif type(value) is list:
            value = tuple(value)
        elif type(value) is int and type(like) is float:
            value = float(value)
        if like is not None and type(value) is not type(like):
            raise InputError(f"{where}: {name} is {value!r}; {type(like).__name__} is expected")
        values[name] = value
    try:
        return config_class(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None
