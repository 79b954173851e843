"""The modules and optimizers that a user's step works with, found by the names that its code gives them."""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_MAX_DEPTH = 6  # of objects in objects: a trainer's list of dicts of optimizers is 4


@dataclass(eq=False)
class StepParts:
    """Modules by the prefix of their paths, optimizers, and tensors that no module holds, by name."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Callable[..., Any], built: Iterable[Optimizer] = ()) -> "StepParts":
        """Searches closures, globals, attributes and containers; `built` are optimizers known already."""
        search = _PartsSearch()
        search.visit(step, "", 0)
        for optimizer in built:
            search.visit(optimizer, "optimizer", 0)
        inner = {id(part) for _, module in search.modules for part in module.modules() if part is not module}
        outer = [(name, module) for name, module in search.modules if id(module) not in inner]
        has_state = [any(True for _ in (*module.parameters(), *module.buffers())) for _, module in outer]
        parts = cls(optimizers=search.optimizers, tensors=search.tensors)
        for (name, module), is_prefixed in zip(outer, has_state, strict=True):
            prefix = "" if sum(has_state) == 1 and is_prefixed else name
            while prefix in parts.modules:
                prefix += "_"
            parts.modules[prefix] = module
        return parts

    def parameters(self) -> dict[int, tuple[str, Tensor]]:
        """Returns (path, parameter) by identity: of modules, then further ones of optimizers."""
        parameters: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in self.modules.items():
            for path, parameter in module.named_parameters():
                parameters.setdefault(id(parameter), (joined(prefix, path), parameter))
        for number, optimizer in enumerate(self.optimizers):
            others = (parameter for group in optimizer.param_groups for parameter in group["params"])
            for position, parameter in enumerate(others):
                parameters.setdefault(id(parameter), (f"optimizer_{number}.parameter_{position}", parameter))
        return parameters


def joined(prefix: str, path: str) -> str:
    """Returns a path inside the module that is called `prefix`."""
    return ".".join(filter(None, (prefix, path)))


class _PartsSearch:
    """A walk through the objects that a function can reach, each once, under its first name."""

    def __init__(self) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[Optimizer] = []
        self.tensors: dict[str, Tensor] = {}
        self._seen: dict[int, Any] = {}  # held, so that no identity is used twice

    def visit(self, item: Any, name: str, depth: int) -> None:
        if depth > _MAX_DEPTH or isinstance(item, _PLAIN) or id(item) in self._seen:
            return
        self._seen[id(item)] = item
        item = getattr(item, "_orig_mod", item) if isinstance(item, nn.Module) else item  # inside torch.compile's
        self._seen[id(item)] = item
        if isinstance(item, nn.Module):
            self.modules.append((name, item))
        elif isinstance(item, Optimizer):
            self.optimizers.append(item)
            return
        elif isinstance(item, Tensor):
            self.tensors.setdefault(name, item)
            return
        for key, child in _children(item):
            self.visit(child, joined(name, key), depth + 1)


_PLAIN = (str, bytes, int, float, complex, type(None), types.ModuleType, type)


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects inside an object, with the names that code has for them."""
    if isinstance(item, types.FunctionType):
        yield from _reached(item)
    elif isinstance(item, types.MethodType):
        yield "", item.__self__
        yield "", item.__func__
    elif isinstance(item, functools.partial):
        yield "", item.func
        yield from ((str(number), part) for number, part in enumerate(item.args))
        yield from item.keywords.items()
    elif isinstance(item, Mapping):
        yield from ((str(key), part) for key, part in item.items())
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from ((str(number), part) for number, part in enumerate(item))
    elif isinstance(item, LRScheduler):
        yield "", item.optimizer
    elif isinstance(item, nn.Module):  # its parts are its own, but it may hold optimizers
        yield from ((key, part) for key, part in vars(item).items() if not key.startswith("_"))
    elif not type(item).__module__.startswith(_LIBRARIES):
        yield from getattr(item, "__dict__", {}).items()
        if callable(item):
            yield "", vars(type(item)).get("__call__")


_LIBRARIES = ("torch.", "numpy", "builtins")


def _reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the closure, the globals and the defaults that a function uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    if (function.__module__ or "").startswith("torch"):
        return
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from ((f"default_{number}", part) for number, part in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield "", getattr(function, "__wrapped__", None)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
