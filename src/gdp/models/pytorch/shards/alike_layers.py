"""Layers of a module that are alike: what one of them does, all do."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gdp.models.pytorch.shards.given_styles import STYLES

_FEWEST = 3  # layers of a list from which one stands for the others


class AlikeLayers:
    """The layers of the lists of a module, by kind: of the same classes, with weights of the same sizes."""

    def __init__(self, model: nn.Module) -> None:
        self._first: dict[str, str] = {}  # path of a layer -> of the first one of its kind, where they differ
        self.counts: dict[nn.Module, int] = {}  # first layer of its kind -> their number
        self._kept: dict[nn.Module, dict[str, nn.Module]] = {}
        for path, module in model.named_modules():
            children = dict(module._modules)
            is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and None not in children.values()
            if not is_list or len(children) < _FEWEST or not all(map(_is_block, children.values())):
                continue
            first: dict[Any, str] = {}
            for name, child in children.items():
                kept = first.setdefault(_kind(child), name)
                self.counts[children[kept]] = self.counts.get(children[kept], 0) + 1
                if kept != name:
                    self._first[f"{path}.{name}.".lstrip(".")] = f"{path}.{kept}.".lstrip(".")
            named = [(name, children[name]) for name in first.values()]
            is_numbered = isinstance(module, nn.ModuleList)
            self._kept[module] = {str(at) if is_numbered else name: child for at, (name, child) in enumerate(named)}

    @classmethod
    def of(cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "AlikeLayers":
        """Returns the layers of a model that runs with one of each kind; of another one none."""
        layers, have_run = cls(model), set[nn.Module]()
        hooks = [layer.register_forward_pre_hook(lambda layer, _: have_run.add(layer)) for layer in layers.counts]
        try:
            with torch.no_grad():
                with layers.shortened():
                    model(*args, **kwargs)
                if missing := layers.counts.keys() - have_run:  # behind every fourth layer, or not in use at all
                    model(*args, **kwargs)
        except Exception:  # whatever the model's code raises that counts on all of its layers
            return cls(nn.Module())
        finally:
            for hook in hooks:
                hook.remove()
        return cls(nn.Module()) if missing & have_run else layers

    def representative(self, path: str) -> str:
        """Returns the path of a weight of the first layer of its kind."""
        prefix = ""
        for name in path.split("."):
            prefix += f"{name}."
            prefix = self._first.get(prefix, prefix)
        return prefix[:-1]

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        """Leaves the first layer of each kind in its list inside."""
        whole = {module: module._modules for module in self._kept}
        for module, kept in self._kept.items():
            module._modules = dict(kept)
        try:
            yield
        finally:
            for module, modules in whole.items():
                module._modules = modules


def _is_block(module: nn.Module | None) -> bool:
    """Returns whether a module has several weights of its own to cut: columns of one and rows of another."""
    return module is not None and sum(weight.dim() > 1 for weight in module.parameters()) > 1


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (
            path,
            type(module),
            tuple((key, tuple(weight.shape)) for key, weight in module.named_parameters(recurse=False)),
            repr(module.__dict__.get(STYLES)),
        )
        for path, module in layer.named_modules()
    )
