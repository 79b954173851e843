"""CUDA's automatic mixed precision for tensors on the CPU: the lists of which operator runs in which type.

A step is captured on the CPU, and PyTorch casts only the arguments of tensors on the device of `torch.autocast`. So
while a model runs, the kernels of `torch.autocast("cuda")` are replaced by functions that do the same with tensors on
the CPU. PyTorch's own state says whether they apply: regions, nesting, `enabled=False`, types, the cache of weights.
In such a region, code that asks for the device of a tensor means the card; elsewhere `torch.autocast("cpu")` is left as
it is.

The lists and the rules are those of `aten/src/ATen/autocast_mode.h` and `.cpp` of PyTorch 2.13; the names are read from
the installed PyTorch, which has a kernel for each, and a name in no list here is one to run in the lower type."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from gdp.models.names import listed

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

FLOAT32 = listed("pytorch", "autocast_float32")

FLOAT32_RESULT = listed("pytorch", "autocast_float32_result")
"""Operators that make float32 unless the call says otherwise: `AT_FORALL_FP32_SET_OPT_DTYPE`."""

WIDEST = listed("pytorch", "autocast_widest")
"""Operators that run in the widest type of their arguments: `AT_FORALL_PROMOTE`."""

_ADDED_DTYPE = {"aten::norm.Scalar": "ScalarOpt_dtype", "aten::norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Operators that make float32 by another overload, with one more argument."""

_REFUSED = "aten::binary_cross_entropy"
_LSTM = "aten::mkldnn_rnn_layer"  # stands for cuDNN's, which is on CUDA's list as `_cudnn_rnn`

_weights: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}  # a cache: by id, a weight and its cast


@contextlib.contextmanager
def cuda_autocast_on_cpu() -> Iterator[None]:
    """Makes `torch.autocast("cuda")` cast tensors on the CPU; the process has one such region at a time."""
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        _weights.clear()
        clear()

    operators = (*torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"), _LSTM)
    with contextlib.ExitStack() as undo:
        undo.callback(_weights.clear)
        undo.enter_context(patch.object(torch, "clear_autocast_cache", clear_all))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            undo.enter_context(patch.object(torch, name, _of_card(getattr(torch, name))))
        undo.enter_context(patch.object(torch.autocast, "__init__", _of_card(torch.autocast.__init__, place=1)))
        undo.enter_context(kernels([(name, _kernel(name), "AutocastCUDA") for name in operators]))
        # every call looks for these kernels, but none finds them outside of `torch.autocast("cuda")`
        undo.enter_context(torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCUDA))
        yield


def _of_card(function: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
    """Returns `function` for code that gives it the device of a tensor: in a region of CUDA's, a card for the CPU."""
    is_enabled = torch.is_autocast_enabled

    def asked(*args: Any, **options: Any) -> Any:
        names = (*args[:place], "cuda", *args[place + 1 :])
        if args[place:] and args[place] == "cpu" and is_enabled("cuda"):
            return function(*names, **options)
        if options.get("device_type") == "cpu" and is_enabled("cuda"):
            return function(*args, **{**options, "device_type": "cuda"})
        return function(*args, **options)

    return asked


@contextlib.contextmanager
def kernels(functions: Iterable[tuple[str, Callable[..., Any], str]]) -> Iterator[None]:
    """Makes functions the kernels of operators, each for a dispatch key, in place of others."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name, function, key in functions:
                library.impl(name.removeprefix("aten::"), function, key, allow_override=True)
        yield
    finally:
        library._destroy()


def _kernel(name: str) -> Callable[..., Any]:
    """Returns the function that runs the operator `name` under `torch.autocast("cuda")`."""
    short, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, short)
    func: OpOverload = getattr(packet, overload or "default")
    if name == _REFUSED:
        rule: Callable[..., Any] = _refuse
    elif name in _ADDED_DTYPE:
        rule = _float32_by(getattr(packet, _ADDED_DTYPE[name]))
    elif short in FLOAT32:
        rule = _in_float32
    elif short in FLOAT32_RESULT:
        rule = _float32_result([argument.name for argument in func._schema.arguments].index("dtype"))
    elif short in WIDEST:
        rule = _in_widest
    else:
        rule = _in_lower

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return rule(func, args, kwargs)

    return kernel


def _in_lower(func: OpOverload, args: Any, kwargs: Any) -> Any:
    lower = torch.get_autocast_dtype("cuda")
    return func(*_cast(args, lower), **_cast(kwargs, lower))


def _in_float32(func: OpOverload, args: Any, kwargs: Any) -> Any:
    return func(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _float32_result(position: int) -> Callable[..., Any]:
    """Returns the rule of an operator with the argument `dtype` at `position`."""

    def rule(func: OpOverload, args: Any, kwargs: Any) -> Any:
        dtype = args[position] if position < len(args) else kwargs.get("dtype")
        if dtype is not None or not _is_eligible(args[0]):
            return func(*args, **kwargs)
        if position < len(args):
            return func(*args[:position], torch.float32, *args[position + 1 :], **kwargs)
        return func(*args, **(kwargs | {"dtype": torch.float32}))

    return rule


def _float32_by(typed: OpOverload) -> Callable[..., Any]:
    """Returns the rule of an operator that the overload `typed` replaces; its further arguments have defaults."""
    schema = [argument.name for argument in typed._schema.arguments if not argument.kwarg_only]

    def rule(func: OpOverload, args: Any, kwargs: Any) -> Any:
        if not _is_eligible(args[0]):
            return func(*args, **kwargs)
        arguments = {argument.name: argument.default_value for argument in func._schema.arguments}
        arguments |= dict(zip(arguments, args, strict=False)) | kwargs
        return typed(*[arguments[name] for name in schema], dtype=torch.float32)

    return rule


def _in_widest(func: OpOverload, args: Any, kwargs: Any) -> Any:
    types = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_eligible(leaf)]
    widest = torch.float32 if torch.float32 in types else torch.get_autocast_dtype("cuda")
    return func(*_cast(args, widest), **_cast(kwargs, widest))


def _refuse(func: OpOverload, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is unsafe under torch.autocast: use binary_cross_entropy_with_logits, or leave autocast"
    )


def _is_eligible(item: Any) -> bool:
    """Returns whether autocast may cast `item`; tensors of FakeTensorMode's own computations are on meta."""
    is_cast = isinstance(item, Tensor) and item.is_floating_point() and item.dtype is not torch.float64
    return is_cast and item.device.type != "meta"


def _cast(item: Any, dtype: torch.dtype) -> Any:
    """Casts what is eligible in `item`; a weight once in a region of autocast, as PyTorch does."""
    if isinstance(item, (tuple, list)):
        return type(item)([_cast(part, dtype) for part in item])
    if isinstance(item, dict):
        return {key: _cast(part, dtype) for key, part in item.items()}
    if not _is_eligible(item) or item.dtype is dtype:
        return item
    is_weight = item.dtype is torch.float32 and item.requires_grad and item.is_leaf and not item._is_view()
    if not is_weight or dtype is torch.float32 or not torch.is_autocast_cache_enabled():
        return item.to(dtype)
    if (id(item), dtype) not in _weights:
        _weights[id(item), dtype] = item, item.to(dtype)
    return _weights[id(item), dtype][1]
