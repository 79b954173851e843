"""A model's code that asks for a card runs as if there were one: its tensors stay on the CPU.

`.to("cuda")`, `.cuda()`, `device="cuda"`, `pin_memory()`, `torch.set_default_device("cuda")` and `torch.autocast` of any
device work without a GPU, so that one step serves both the capture and `gdp run` on CPUs. The costs of an op do not
depend on the place where it was captured.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import autocast
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from gdp.models.pytorch.autocast import cuda_autocast_on_cpu

CARDS = frozenset({"cuda", "xpu", "mps", "hpu", "npu", "xla", "mtia", "maia"})
"""Types of devices that stand for a card; autocast has CUDA's lists for each."""

_CPU = torch.device("cpu")
_STAYS = frozenset(
    getattr(Tensor, name) for name in ("cuda", "xpu", "hpu", "mtia", "pin_memory") if hasattr(Tensor, name)
)


@contextlib.contextmanager
def as_if_on_a_card() -> Iterator[None]:
    """Makes code that asks for a card use the CPU, under fake tensors or with real ones, and casts as on a card."""
    if any(isinstance(mode, _OnCpu) for mode in _get_current_function_mode_stack()):
        yield
        return
    with contextlib.ExitStack() as undo:
        undo.enter_context(cuda_autocast_on_cpu())
        undo.enter_context(patch.object(autocast, "__init__", _init_autocast))
        undo.enter_context(patch.object(DeviceContext, "__init__", _init_device_context))
        undo.enter_context(patch.object(torch.cuda, "is_bf16_supported", lambda *args, **options: True))
        undo.enter_context(patch.object(torch.utils, "swap_tensors", _swap_tensors))
        undo.callback(_restore_default_device, _default_device())
        undo.enter_context(_OnCpu())
        yield


class _OnCpu(TorchFunctionMode):
    """Replaces cards by the CPU in the arguments of PyTorch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _STAYS:
            return args[0]
        if "device" in kwargs:
            kwargs = kwargs | {"device": _without_card(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _without_card(args[1]), *args[2:])
        return func(*args, **kwargs)


def _without_card(device: Any) -> Any:
    """Returns the CPU in place of a card; a number is the card of that number. Anything else is returned as it is."""
    if isinstance(device, torch.device):
        return _CPU if device.type in CARDS else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] in CARDS else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


_plain_init_autocast = autocast.__init__
_plain_init_device_context = DeviceContext.__init__
_plain_swap_tensors = torch.utils.swap_tensors


def _init_autocast(
    self: autocast, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: Any = None
) -> None:
    """Initialises `torch.autocast` as on a card that is there."""
    device_type = "cuda" if device_type in CARDS else device_type
    with patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False):
        _plain_init_autocast(self, device_type, dtype, enabled, cache_enabled)


def _init_device_context(self: DeviceContext, device: Any) -> None:
    _plain_init_device_context(self, _without_card(device))


def _swap_tensors(first: Tensor, second: Tensor) -> None:
    """Gives the content of `second` to `first`, which `nn.Module.to` keeps: weights that are tied stay tied.

    PyTorch's own function refuses fake tensors, as their mode refers to them.
    """
    if isinstance(first, FakeTensor):
        first.data = second
    else:
        _plain_swap_tensors(first, second)


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _restore_default_device(before: Any) -> None:
    """Sets the default device again, if the model's code has set another one."""
    if _default_device() != before:
        torch.set_default_device(before)
