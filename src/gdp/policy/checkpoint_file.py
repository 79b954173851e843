"""The format of checkpoint files, and the reading of configurations in their headers."""

from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

from gdp import files
from gdp.errors import InputError
from gdp.tensor_file import TensorFormat

TRAINING = "optimizer/"  # prefix of the names of tensors of a training's state


_FIELDS = MappingProxyType({"policy": files.is_string, "config": files.is_mapping, "manifest": files.is_mapping})
CHECKPOINT = TensorFormat("gdp-checkpoint", 5, _FIELDS, "`gdp train`", "copy or train it again")


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
            raise InputError(f"{where}: {name} is {files.brief(value)}; {type(like).__name__} is expected")
        values[name] = value
    try:
        return config_class(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None
