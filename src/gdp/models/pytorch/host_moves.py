"""Tensors that a model sends to the host and fetches: `.cpu()`, `.to("cpu")`, `.to(card)`, hooks of saved tensors. All
tensors of a capture are on the CPU, so a recorder knows which memories the model means to be on the host. A send and a
fetch are ops there, of role "host copy". The ops that follow wait for a send to end, and a fetch waits for the ops
before it, as copies do that a card runs in turn with its kernels."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from gdp.models.pytorch.fused_attention import note, recorders
from gdp.models.pytorch.memories import HAS_HOST_TENSORS

CARD, HOST = torch.device("cpu"), torch.device("cpu")
"""The devices that tensors of a capture have: equal, but `x.to(y.device)` tells them apart as objects."""

NOTE = "tensors that the model sends to the host wait on a CPU where DEVICES has one, else on the card"


def is_on_host(tensor: Tensor) -> bool:
    """Returns whether the model being captured has sent a tensor to the host."""
    return any(recorder.memories.is_on_host(tensor) for recorder in recorders())


def moved(tensor: Any, *, to_host: bool) -> Any:
    """Returns a tensor sent to the host or fetched; itself if it is there, or if nothing is recorded."""
    is_plain = isinstance(tensor, FakeTensor) and not isinstance(tensor, nn.Parameter)
    if not is_plain or not recorders() or is_on_host(tensor) == to_host:
        return tensor
    note(NOTE)
    return _Move.apply(tensor, to_host)  # type: ignore[no-untyped-call]


class _Move(torch.autograd.Function):
    """A copy to the host or back, whose gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_host: bool) -> Tensor:
        ctx.to_host = to_host
        return _copied(tensor, to_host=to_host)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _copied(gradient, to_host=not ctx.to_host), None


def _copied(tensor: Tensor, *, to_host: bool) -> Tensor:
    (recorder,) = recorders()[:1]
    recorder.is_moving = True
    try:
        copy = tensor.clone()
    finally:
        recorder.is_moving = False
    recorder.memories.set_on_host(copy, to_host)
    return copy


@contextlib.contextmanager
def hooks_move(inside: Callable[[bool], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Has hooks of saved tensors run `inside(is_packing)`, and return fetched tensors; devices of tensors are known."""
    init: Any = saved_tensors_hooks.__init__

    def init_moving(self: Any, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        def packed(tensor: Tensor) -> Any:
            with inside(True):
                return pack(tensor)

        def unpacked(item: Any) -> Tensor:
            with inside(False):
                tensor: Tensor = moved(unpack(item), to_host=False)
                return tensor

        init(self, packed, unpacked)

    plain: Any = FakeTensor.device

    def device(self: FakeTensor) -> torch.device:
        own: torch.device = plain.fget(self)
        if own.type != "cpu":
            return own
        return HOST if HAS_HOST_TENSORS in vars(self.fake_mode) and is_on_host(self) else CARD

    with (
        patch.object(saved_tensors_hooks, "__init__", init_moving),
        patch.object(FakeTensor, "device", property(device, plain.fset)),
    ):
        yield
