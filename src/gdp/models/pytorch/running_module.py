"""The module that each operator belongs to, in forward and in backward."""

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor, nn


class RunningModule:
    """Knows the module that runs; `last` is its path, or that of the operator before. An operator of a backward pass
    belongs to the module of its autograd node."""

    def __init__(self) -> None:
        self.last = ""
        self._stack: list[str] = []
        self._modules_by_node: dict[int, str] = {}  # by autograd sequence number
        self._nodes: list[int] = []
        self._last_node = -1
        self._parameter_modules: dict[int, str] = {}

    def watch(self, module: nn.Module, prefix: str = "") -> list[Any]:
        """Tracks the running module, its paths behind `prefix`; returns the hooks' handles. With hooks,
        nn.TransformerEncoderLayer and nn.MultiheadAttention do not use their fused kernels for inference."""
        handles: list[Any] = []
        for path, part in module.named_modules(prefix=prefix):

            def enter(_part: nn.Module, _args: Any, path: str = path) -> None:
                self._stack.append(path)

            def leave(_part: nn.Module, _args: Any, _result: Any) -> None:
                self._stack.pop()

            handles.append(part.register_forward_pre_hook(enter, prepend=True))
            handles.append(part.register_forward_hook(leave, always_call=True))
            for _, parameter in part.named_parameters(recurse=False):
                self._parameter_modules.setdefault(id(parameter), path)
        return handles

    @property
    def current(self) -> str:
        """The path of the module whose forward pass runs, "" outside of all."""
        return self._stack[-1] if self._stack else ""

    def of_parameter(self, parameter: Tensor) -> str:
        """Returns the module of a parameter, "" if none was watched that has it."""
        return self._parameter_modules.get(id(parameter), "")

    def locate(self, *, is_forward: bool) -> str:
        """Returns the module of the operator being dispatched; a forward one passes it to its autograd node."""
        if self._stack or is_forward:
            module = self.last = self.current
            node = torch._C._autograd._get_sequence_nr() - 1
            if node != self._last_node:
                self._last_node = node
                if node not in self._modules_by_node:
                    self._modules_by_node[node] = module
                    self._nodes.append(node)
            return module
        current = torch._C._current_autograd_node()
        if current is None:
            return self.last
        parameter = getattr(current, "variable", None)
        if parameter is not None:
            module = self._parameter_modules.get(id(parameter), self.last)
        else:
            node = current._sequence_nr()
            if node not in self._modules_by_node:  # numbers have gaps: the nearest earlier node
                nearest = bisect_right(self._nodes, node) - 1
                node = self._nodes[nearest] if nearest >= 0 else -1
            module = self._modules_by_node.get(node, "")
        self.last = module
        return module
