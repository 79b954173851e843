"""A model's code that asks for a card runs as if there were one: its tensors stay on the CPU. `.to("cuda")`, `.cuda()`,
`device="cuda"`, `pin_memory()`, `torch.set_default_device("cuda")` and `torch.autocast` of any device work without a
GPU, so that one step serves both the capture and `gdp run` on CPUs. The costs of an op do not depend on the place where
it was captured. Once the code has named a card, `torch.autocast("cpu")` is CUDA's as well:
`torch.autocast(x.device.type)` means the card.

`nn.LSTM`, `nn.GRU` and `nn.RNN` are captured with one op for each layer and direction. Cards run them by cuDNN, in all
types. CPUs have an operator of a whole layer for LSTMs in float32 alone, oneDNN's, and compute all others step by step;
PyTorch's decomposition, which fake tensors take, does so for an LSTM whose input requires a gradient too. So while a
step is captured, all are oneDNN's operator, whose argument `mode` says which layer it is; `replacements.py` executes
it. Layers whose states are projected stay as CPUs compute them.

Tensors that a model sends to the host and fetches (`.cpu()`, `.to("cpu")`, `.to(card)`, hooks of saved tensors) are on
the CPU like all others, so a recorder knows which memories the model means to be on the host. A send and a fetch are
ops there, of role "host copy". The ops that follow wait for a send to end, and a fetch waits for the ops before it, as
copies do that a card runs in turn with its kernels."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import autocast
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import transformer
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._device import DeviceContext

from gdp.models.pytorch.autocast import cuda_autocast_on_cpu, kernels
from gdp.models.pytorch.card_kernels import kernels_of_cards
from gdp.models.pytorch.control_flow import control_flow_in_python, run_operator
from gdp.models.pytorch.fused_attention import (
    attention_as_on_a_card,
    flex_attention_as_operators,
    is_causal_mask,
    note,
    recorders,
)
from gdp.models.pytorch.memories import HAS_HOST_TENSORS
from gdp.models.pytorch.replacements import (
    GRU_MODE,
    LSTM,
    LSTM_BACKWARD,
    LSTM_MODE,
    NUM_LSTM_TENSORS,
    RELU_MODE,
    TANH_MODE,
)
from gdp.models.unsupported import MKLDNN, QUANTISED, SPARSE, UnsupportedError

CARDS = frozenset({"cuda", "xpu", "mps", "hpu", "npu", "xla", "mtia", "maia"})
"""Types of devices that stand for a card; autocast has CUDA's lists for each."""

_CPU = torch.device("cpu")
_STAYS = frozenset(getattr(Tensor, x) for x in ("cuda", "xpu", "hpu", "mtia", "pin_memory") if hasattr(Tensor, x))

_FACTORIES = frozenset({torch.empty, torch.empty_like, torch.zeros, torch.empty_strided, Tensor.new_empty})
_MAKERS = {  # functions whose tensors are no plain memory
    getattr(owner, name): kind
    for owner, names, kind in (
        (torch, "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor", SPARSE),
        (torch, "sparse_compressed_tensor", SPARSE),
        (Tensor, "to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc", SPARSE),
        (torch, "quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic", QUANTISED),
        (Tensor, "to_mkldnn", MKLDNN),
    )
    for name in names.split()
}
_DEVICE_POSITIONS = {Tensor.to: 1, torch._C._nn._parse_to: 0}  # the latter for `nn.Module.to`
_MODES = {"lstm": LSTM_MODE, "gru": GRU_MODE, "rnn_tanh": TANH_MODE, "rnn_relu": RELU_MODE}
CARD, HOST = torch.device("cpu"), torch.device("cpu")
"""The devices that tensors of a capture have: equal, but `x.to(y.device)` tells them apart as objects."""

NOTE = "tensors that the model sends to the host wait on a CPU where DEVICES has one, else on the card"


def layers_as_on_a_card() -> contextlib.AbstractContextManager[None]:
    """Makes each layer of a recurrent net an operator; the process has one such region at a time."""
    networks: list[tuple[str, Callable[..., Any], str]] = [
        (f"{name}.input", _network(name), "AutogradCPU") for name in _MODES
    ]
    return kernels([*networks, (LSTM_BACKWARD._schema.name, _gradient_shapes, "Meta")])


def _network(name: str) -> Callable[..., tuple[Tensor, ...]]:
    composed: Callable[..., tuple[Tensor, ...]] = getattr(torch.ops.aten, name).input.decompose
    mode = _MODES[name]

    def run(input: Tensor, state: Any, params: Sequence[Tensor], has_biases: bool, *options: Any) -> tuple[Tensor, ...]:
        states = state if mode == LSTM_MODE else [state]
        num_tensors = 4 if has_biases else 2
        is_projected = states[0].shape[-1] != params[1].shape[-1] or len(params) % num_tensors
        if not isinstance(input, FakeTensor) or is_projected:
            return composed(input, state, params, has_biases, *options)
        layers = [list(params[start : start + num_tensors]) for start in range(0, len(params), num_tensors)]
        output, *after = _layers(input, states, layers, mode, *options)
        return (output, *after) if mode == LSTM_MODE else (output, after[0])

    return run


def _gradient_shapes(*args: Any) -> tuple[Tensor, ...]:
    """Returns gradients without content; PyTorch's own takes all layers for LSTMs with biases."""
    return tuple(torch.empty_like(tensor) for tensor in args[:NUM_LSTM_TENSORS])


def _layers(
    input: Tensor,
    states: Sequence[Tensor],
    layers: Sequence[Sequence[Tensor]],
    mode: int,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output and the states after all layers, given the weights of each layer and direction."""
    steps = (input.transpose(0, 1) if batch_first else input).contiguous()  # as cuDNN and oneDNN read them
    num_directions = 2 if bidirectional else 1
    hidden, cells = list[Tensor](), list[Tensor]()
    for layer in range(num_layers):
        outputs = list[Tensor]()
        for direction in range(num_directions):
            number = layer * num_directions + direction
            weights = layers[number]
            has_biases = len(weights) == 4
            biases = weights[2:] if has_biases else [weight.detach() for weight in weights]  # not read
            hx = states[0][number]
            cx = states[1][number] if mode == LSTM_MODE else hx.detach()  # there is no cell
            tensors = steps, *weights[:2], *biases, hx, cx
            options: tuple[Any, ...] = [], mode, hx.shape[-1], 1, has_biases, False, False, train
            output, hy, cy, _ = LSTM(*tensors, direction == 1, *options)
            outputs.append(output)
            hidden.append(hy)
            cells.append(cy)
        steps = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            steps = torch.dropout(steps, dropout, train)
    cell = torch.stack(cells) if mode == LSTM_MODE else hidden[0]
    return steps.transpose(0, 1) if batch_first else steps, torch.stack(hidden), cell


@contextlib.contextmanager
def as_if_on_a_card(*, has_card: bool = False) -> Iterator["OnCpu"]:
    """Makes code that asks for a card use the CPU, and cast as on a card; `has_card`: it has named one before."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    outer = next((mode for mode in stack if isinstance(mode, OnCpu)), None)
    if outer is not None:
        yield outer
        return
    mode = OnCpu()
    mode.has_card = has_card
    init_autocast: Any = autocast.__init__
    init_device_context: Any = DeviceContext.__init__
    autocast_options: Any = checkpoint._get_autocast_kwargs

    def init_autocast_as_on_a_card(self: autocast, device_type: str, *args: Any, **options: Any) -> None:
        device_type = mode.autocast_device(device_type)
        with patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False):
            init_autocast(self, device_type, *args, **options)

    def init_device_context_on_cpu(self: DeviceContext, device: Any) -> None:
        init_device_context(self, mode.without_card(device))

    def autocast_options_of_checkpoint(device_type: str = "cuda") -> Any:
        on_card, on_cpu = autocast_options(device_type)
        return on_card, on_card if mode.has_card else on_cpu  # a part runs again under autocast of both

    replacements = (
        (autocast, "__init__", init_autocast_as_on_a_card),
        (DeviceContext, "__init__", init_device_context_on_cpu),
        (checkpoint, "_get_autocast_kwargs", autocast_options_of_checkpoint),
        (checkpoint, "_VersionWrapper", _Kept),
        (checkpoint, "check_backward_validity", partial(_check_and_note, checkpoint.check_backward_validity)),
        (checkpoint.DefaultDeviceType, "_default_device_type", "cuda"),
        (torch.inference_mode, "__enter__", _set_gradients),
        (torch.inference_mode, "__exit__", lambda region, *error: region._gradients.__exit__(*error)),
        (torch.utils, "swap_tensors", _swap_tensors),
        (transformer, "_detect_is_causal_mask", is_causal_mask),
        (DistributedDataParallel, "__init__", _init_plain),
        (DistributedDataParallel, "forward", lambda self, *args, **options: self.module(*args, **options)),
        (torch.cuda, "is_bf16_supported", lambda *args, **options: True),
        (torch.cuda, "synchronize", lambda *args: None),
        (torch.cuda, "set_device", lambda *args: None),
    )
    with contextlib.ExitStack() as undo:
        undo.enter_context(cuda_autocast_on_cpu())
        undo.enter_context(flex_attention_as_operators())
        undo.enter_context(attention_as_on_a_card())
        undo.enter_context(kernels_of_cards())
        undo.enter_context(layers_as_on_a_card())
        undo.enter_context(hooks_move(mode.in_hook))
        undo.enter_context(control_flow_in_python())
        for owner, name, replacement in replacements:
            undo.enter_context(patch.object(owner, name, replacement))
        undo.callback(torch.set_default_device, _default_device())
        torch.set_default_device(_CPU)
        undo.enter_context(mode)
        yield mode


def _set_gradients(region: Any) -> None:
    """Enters a region of `torch.inference_mode` as one of no gradients. The mode itself hides from a recorder which
    tensors are views of which, and gives it operators that autograd takes apart otherwise."""
    region._gradients = torch.set_grad_enabled(not region.mode)


class _Kept(checkpoint._VersionWrapper):
    """A result that a selective checkpoint keeps; where it does not ask for it, to the end of its backward pass."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._ends = [
            weakref.finalize(self, recorder.memories.release, recorder.memories.value_of(value))
            for recorder in (recorders() if isinstance(value, Tensor) else ())
        ]

    def get_val(self, *args: Any) -> Any:
        for end in self._ends:
            end.detach()
        return super().get_val(*args)  # type: ignore[no-untyped-call]


class OnCpu(TorchFunctionMode):
    """Replaces cards by the CPU in the arguments of PyTorch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.has_card = False  # the code has named one
        self.is_packing = False  # a hook of saved tensors stores one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return run_operator(func, args, kwargs, self)
        if func in _MAKERS:
            raise UnsupportedError(_MAKERS[func])
        if func is Tensor.to and "meta" in (str(kwargs.get("device")), *map(str, args[1:2])):
            return func(*args, **kwargs)  # by accelerate, which makes a fake tensor from it
        if func in _STAYS:
            self.has_card = self.has_card or func is not Tensor.pin_memory
            return args[0] if func is Tensor.pin_memory else moved(args[0], to_host=False)
        to_host = self._goes_to_host(func, args, kwargs)
        is_pinned = kwargs.get("pin_memory") or (self.is_packing and "device" not in kwargs)
        makes_on_host = func in _FACTORIES and is_pinned
        if "device" in kwargs:
            kwargs = kwargs | {"device": self.without_card(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        position = _DEVICE_POSITIONS.get(func)
        if position is not None and len(args) > position:
            args = (*args[:position], self.without_card(args[position]), *args[position + 1 :])
        result = func(*args, **kwargs)
        if makes_on_host:
            for recorder in recorders():
                recorder.memories.set_on_host(result)
        return result if to_host is None else moved(result, to_host=to_host)

    def _goes_to_host(self, func: Any, args: Any, kwargs: Any) -> bool | None:
        """Returns whether a call sends a tensor to the host (True) or to a card (False); None: neither. The CPU is the
        host for code that has named a card and in hooks of saved tensors, else what there is."""
        if func is Tensor.cpu:
            return True
        if func is not Tensor.to:
            return None
        target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
        if isinstance(target, Tensor):
            target = target.device
        if target is CARD or target is HOST:
            return target is HOST
        if isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu":
            return True if self.has_card or self.is_packing else None
        return False if target is not None and self.without_card(target) is not target else None

    @contextlib.contextmanager
    def in_hook(self, is_packing: bool) -> Iterator[None]:
        """Is in force inside a hook of saved tensors, which PyTorch calls from one of its functions."""
        before, self.is_packing = self.is_packing, is_packing
        try:
            with self:
                yield
        finally:
            self.is_packing = before

    def without_card(self, device: Any) -> Any:
        """Returns the CPU in place of a card; a number is the card of that number. Returns anything else as it is."""
        if isinstance(device, torch.device):
            is_card = device.type in CARDS
        elif isinstance(device, str):
            is_card = device.partition(":")[0] in CARDS
        else:
            is_card = isinstance(device, int) and not isinstance(device, bool)
        if str(device) == "meta" and _are_fake():
            return _CPU
        self.has_card = self.has_card or is_card
        return _CPU if is_card else device

    def autocast_device(self, device_type: str) -> str:
        """Returns the device whose lists `torch.autocast(device_type)` takes."""
        self.has_card = self.has_card or device_type in CARDS
        return "cuda" if self.has_card and device_type in CARDS | {"cpu"} else device_type


def _are_fake() -> bool:
    """Returns whether new tensors are fake: then one on the meta device is like any other."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_plain_swap_tensors: Any = torch.utils.swap_tensors


def _swap_tensors(first: Tensor, second: Tensor) -> None:
    """Gives the content of `second` to `first`, which `nn.Module.to` keeps: weights that are tied stay tied. PyTorch's
    own function refuses fake tensors, as their mode refers to them."""
    if isinstance(first, FakeTensor):
        first.data = second
    else:
        _plain_swap_tensors(first, second)


def _init_plain(self: DistributedDataParallel, module: nn.Module, *_args: Any, **_options: Any) -> None:
    """Makes a wrapper that only calls its module: there is one process, and gdp chooses the layout."""
    nn.Module.__init__(self)
    self.module, self.require_backward_grad_sync = module, True


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


NO_GRADIENT = (
    "torch.utils.checkpoint(use_reentrant=True) gets no input that requires a gradient, so the parameters behind it "
    "get none; give it use_reentrant=False"
)


def _check_and_note(check: Callable[[Any], None], inputs: Any) -> None:
    """Notes a checkpoint without an input that requires a gradient, of which PyTorch warns outside of captures."""
    if not recorders():
        check(inputs)
    elif not any(isinstance(item, Tensor) and item.requires_grad for item in inputs):
        note(NO_GRADIENT)


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
