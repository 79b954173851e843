"""timm without torchvision: timm imports it for data sets, transforms and one norm, which no captured model runs.

torchvision for CPUs alone is not among the usual packages, and the usual one brings gigabytes of CUDA.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

_MODES = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")


class _StandIn(ModuleType):
    """A module in which every name is a module of PyTorch without content."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Enum(name, _MODES) if name == "InterpolationMode" else type(name, (nn.Module,), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """Lets timm be imported inside, where torchvision is not installed; nothing of it is left afterwards."""
    if find_spec("torchvision") is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
