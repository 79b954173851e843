"""The format of checkpoint files, and the reading of configurations in their headers."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

from gdp import files
from gdp.errors import InputError
from gdp.tensor_file import TensorFormat

TRAINING = "optimizer/"  # prefix of the names of tensors of a training's state


def _is_mapping(value: object) -> bool:
    """a mapping"""
    return type(value) is dict


CHECKPOINT = TensorFormat(
    name="gdp-checkpoint",
    version=4,
    oldest=2,
    fields=MappingProxyType({"policy": files.is_string, "config": _is_mapping, "manifest": _is_mapping}),
    writer="`gdp train`",
    remedy="copy or train it again",
)


_ADDED_IN_4 = {"default": {"style_scorer": 0}}  # to configurations, by policy: what older files mean
_GONE_IN_4 = ("scorer",)  # fields of older configurations that were 0 in all files of use


def config_in(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the configuration in a header, in the terms of the present version."""
    config: Mapping[str, Any] = header["config"]
    if header["version"] > 3:
        return config
    kept = {name: value for name, value in config.items() if name not in _GONE_IN_4 or value != 0}
    return {**_ADDED_IN_4.get(header["policy"], {}), **kept}


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
