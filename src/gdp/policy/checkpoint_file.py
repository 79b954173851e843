"""The format of checkpoint files, and the reading of configurations in their headers."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, cast

from gdp import files
from gdp.errors import InputError
from gdp.tensor_file import TensorFormat

TRAINING = "optimizer/"  # prefix of the names of tensors of a training's state


CHECKPOINT = TensorFormat(
    name="gdp-checkpoint",
    version=5,
    oldest=2,
    fields=MappingProxyType({"policy": files.is_string, "config": files.is_mapping, "manifest": files.is_mapping}),
    writer="`gdp train`",
    remedy="copy or train it again",
)

_ADDED: Mapping[str, Mapping[str, Any]] = MappingProxyType({"default": {"style_scorer": 0}})
"""Fields that configurations of versions 2 to 4 lack, by policy, with their values there."""
_GONE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {
            "scorer": 0,
            "network": False,
            "device_features": True,
            "hidden": None,
            "num_graph_layers": None,
            **dict.fromkeys(("num_placer_layers", "num_heads", "segment", "attention", "superposition", "position")),
        },
        "paper": {"graph": {"pool": "sigmoid", "residual": False, "normalise": False}, "placer": {"norm": "post"}},
    }
)
"""Fields that they had besides, with the one value that can still be read; None: any value, it meant nothing."""


def config_in(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the configuration in a header, in the terms of the present version; InputError for a part of a policy
    that there is no longer."""
    if header["version"] > 4:
        return cast("Mapping[str, Any]", header["config"])
    return {**_ADDED.get(header["policy"], {}), **_without(header["config"], _GONE.get(header["policy"], {}))}


def _without(config: Mapping[str, Any], gone: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `config` without the fields `gone`; InputError for one with another value."""
    kept = {}
    for name, value in config.items():
        if name not in gone:
            kept[name] = value
        elif isinstance(gone[name], Mapping) and isinstance(value, Mapping):
            kept[name] = _without(value, gone[name])
        elif gone[name] is not None and value != gone[name]:
            raise InputError(f"config: {name} is {value!r}; this gdp has no such policy any more, train it again")
    return kept


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
