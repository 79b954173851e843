"""Temporary changes to Transformers and Diffusers while a model is built and captured."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_NO_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"  # of `transformers.utils.import_utils.torch_compilable_check`


def capturable(model: Any) -> Any:
    """Returns `model` with a forward pass that is offline and replaces two functions of PyTorch. `isfinite`, which
    models with clamping call, says yes. Grouped products of other types than bfloat16, which have no fake
    implementation, are Transformers' own. The model becomes an instance of a subclass of the same name, for
    Transformers reads names of classes, and models are copied."""
    return run_inside(model, _capturing)


def run_inside(model: Any, contexts: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    """Returns `model`, whose forward pass enters new `contexts` each time."""
    kind = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contexts():
            return kind.forward(self, *args, **kwargs)

    forward.__wrapped__ = kind.forward  # type: ignore[attr-defined]
    return with_forward(model, forward)


def with_forward(model: Any, forward: Callable[..., Any]) -> Any:
    """Returns `model` as an instance of a subclass of the same name with another forward pass; it can be copied."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return model


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """Enters the changes that `capturable` names, and stops Transformers from looking at the content of inputs. Under
    fake tensors it would find several sequences in a row, mask all pairs, and count image tokens."""
    no_packing = _replaced("transformers.masking_utils", "find_packed_sequence_indices", lambda *args, **kwargs: None)
    with _Capturable(), quiet(), no_packing, patch.dict(os.environ, {_NO_CHECKS: "1"}), routed_experts():
        yield


class _Capturable(TorchFunctionMode):
    """Replaces the two functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.isfinite:
            return SimpleNamespace(all=lambda: True)
        if func is torch._grouped_mm and args[0].dtype != torch.bfloat16:
            return torch.ops.transformers.grouped_mm_fallback(*args[:2], (kwargs or {})["offs"])
        return func(*args, **(kwargs or {}))


def _replaced(module_name: str, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """Replaces a name in a module, if the module is imported and has it."""
    module = sys.modules.get(module_name)
    return patch.object(module, name, value) if hasattr(module, name) else contextlib.nullcontext()


class HostNumbers(TorchFunctionMode):
    """Computes real numbers where a model that is built under fake tensors asks for them with `device="cpu"`. Models
    compute rates of stochastic depth and widths of layers so, and read the content."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        is_made = func in (torch.linspace, torch.arange, torch.tensor) and str(options.get("device")) == "cpu"
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if is_made or (tensors and not fakes):
            with unset_fake_temporarily():
                return func(*args, **options)
        if len(fakes) < len(tensors):  # a copy to a buffer
            with unset_fake_temporarily():
                args, options = tree_map_only(torch.Tensor, fakes[0].fake_mode.from_tensor, (args, options))
        return func(*args, **options)


class FullMasks(TorchFunctionMode):
    """Answers models of Diffusers that read or count a mask of their text as one of ones does: all tokens count."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nonzero:
            return torch.arange(args[0].numel()).unsqueeze(1)
        if func.__name__ == "item" and args[0].dtype is torch.long:
            return self.length
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes float tensors of this type inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the libraries and disables downloads and kernels from the hub."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("transformers", "diffusers", "timm"))}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        with (
            _replaced("huggingface_hub.constants", "HF_HUB_OFFLINE", True),
            _replaced("transformers.integrations.hub_kernels", "_kernels_enabled", False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def routed_experts() -> contextlib.AbstractContextManager[Any]:
    """Lets Llama 4 multiply each token with the experts that it is sent to alone. Transformers 5 multiplies all tokens
    with all experts, those that are not chosen by zero: 16 to 128 times the work, which no engine that serves the model
    does. The results are the same up to rounding."""
    layer = getattr(sys.modules.get("transformers.models.llama4.modeling_llama4"), "Llama4TextMoe", None)
    return contextlib.nullcontext() if layer is None else patch.object(layer, "forward", _llama4_forward)


def _llama4_forward(layer: Any, hidden_states: Any) -> tuple[Any, Any]:
    """Returns (the sum of the routed and the shared expert, router logits), as `Llama4TextMoe.forward` does. A token's
    score scales the input of an expert, not its result."""
    rows = hidden_states.reshape(-1, layer.hidden_dim)
    scores, logits = layer.router(rows)  # 0 for experts that are not chosen
    top, choices = scores.topk(layer.top_k, dim=1)
    experts, order = choices.flatten().sort()
    sizes = torch.histc(experts.float(), bins=layer.num_experts, min=0, max=layer.num_experts - 1)
    ends = sizes.cumsum(0, dtype=torch.int32)
    grouped = (rows.repeat_interleave(layer.top_k, dim=0) * top.reshape(-1, 1))[order]
    gate, up = torch._grouped_mm(grouped, layer.experts.gate_up_proj, offs=ends).chunk(2, dim=-1)
    results = torch._grouped_mm(up * layer.experts.act_fn(gate), layer.experts.down_proj, offs=ends)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    routed = results[places].view(len(rows), layer.top_k, -1).sum(dim=1)
    return layer.shared_expert(rows) + routed, logits
