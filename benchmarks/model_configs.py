"""Published models as Transformers and Diffusers configs, from `model_configs.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from benchmarks.workloads import model_of
from gdp import files
from gdp.errors import InputError, suggest


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A published model: its `config.json`, its parameters, the sizes that it is captured with (`hf:DIR?SIZES`)."""

    config: Mapping[str, Any]
    num_parameters: int
    sizes: str = ""  # "": a batch of 8, as many tokens as the model has positions, at most 512


def names() -> tuple[str, ...]:
    """Returns the models that have a config."""
    return tuple(_configs())


def get(name: str) -> ModelConfig:
    """Returns the model of that name. InputError if there is none."""
    if name not in _configs():
        raise InputError(f"model {name!r}: no published config of that name; {suggest(name, names())}")
    return _configs()[name]


def write_config(name: str, directory: str | Path) -> Path:
    """Writes `config.json` of that model to `directory`/`name`, which is made if need be; returns that directory."""
    path = Path(directory) / name
    path.mkdir(parents=True, exist_ok=True)
    files.write_json(path / "config.json", get(name).config)
    return path


def write_model(text: str, directory: str | Path) -> str:
    """Writes the config of NAME or NAME?SIZES; returns the MODEL that stands for it: `hf:DIR?SIZES`."""
    name, _, sizes = text.partition("?")
    path, sizes = write_config(name, directory), sizes or get(name).sizes
    return f"hf:{path}?{sizes}" if sizes else f"hf:{path}"


def asked_model(name: str, directory: str | Path) -> str:
    """Returns the MODEL of a published config or workload `name`; a config is written to `directory`."""
    return write_model(name, directory) if name.partition("?")[0] in _configs() else model_of(name)


@cache
def _configs() -> Mapping[str, ModelConfig]:
    document = yaml.safe_load(files.read_bytes(Path(__file__).with_suffix(".yaml")))
    return MappingProxyType({name: ModelConfig(**model) for name, model in document.items()})
