"""Notes on a captured module: what its code does that a graph does not show."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from gdp.models.pytorch.program import Program
from gdp.models.pytorch.replacements import ATTENTION, LSTM

COMPILED = "torch.compile's module is priced as it steps eagerly; --runtime compile prices its fused kernels"
DATA_PARALLEL = "nn.{kind} is left out: the plain module is captured, with the whole batch"
LSTM_LAYERS = (
    "a layer of nn.LSTM, nn.GRU or nn.RNN is one op, oneDNN's of CPUs; its time on a GPU, where cuDNN runs it, is an "
    "estimate"
)

DISTRIBUTED = nn.parallel.DistributedDataParallel
_LSTM_KIND, _ATTENTION_KIND = (func._schema.name.replace("::", ".") for func in (LSTM, ATTENTION))
_DROPOUTS = ("aten.native_dropout", "aten.bernoulli_", _ATTENTION_KIND)
_BATCH_NORMS = ("aten.native_batch_norm", "aten.cudnn_batch_norm")


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module in wrappers of `torch.compile` and DDP."""
    inner = getattr(model, "_orig_mod", model.module if isinstance(model, DISTRIBUTED) else None)
    return model if inner is None else unwrapped(inner)


def notes_of(model: nn.Module, program: Program, *, is_training: bool) -> list[str]:
    """Returns notes on a captured `model`."""
    notes = wrapper_notes(model)
    notes += [LSTM_LAYERS] if _LSTM_KIND in program.graph.kinds else []
    return notes if is_training else notes + _left_in_training(model, program)


def wrapper_notes(model: nn.Module) -> list[str]:
    """Returns notes on the wrappers of a module that a capture leaves out."""
    notes = [COMPILED] if _is_compiled(model) else []
    wrapper = next((part for part in model.modules() if isinstance(part, (nn.DataParallel, DISTRIBUTED))), None)
    return notes + ([DATA_PARALLEL.format(kind=type(wrapper).__name__)] if wrapper is not None else [])


def _left_in_training(model: nn.Module, program: Program) -> list[str]:
    """Returns a note if modules of an inference are in training mode and compute more for it."""
    graph, parts = program.graph, dict(getattr(model, "_orig_mod", model).named_modules())
    effects: dict[str, None] = {}
    for op, (kind, path) in enumerate(zip(graph.kinds, graph.modules, strict=True)):
        if not getattr(parts.get(path), "training", False):
            continue
        if kind in _DROPOUTS and any(call.seed >= 0 for call in program.calls[op]):
            effects["dropout is drawn"] = None
        elif kind in _BATCH_NORMS:
            effects["batch norms take the batch's statistics"] = None
    return [f"the model is in training mode: {', '.join(effects)}; call .eval()"] if effects else []


def _is_compiled(model: nn.Module) -> bool:
    """Returns whether torch.compile was applied to a part of `model`, or to a function that its code may call."""
    for part in model.modules():
        if isinstance(part, OptimizedModule) or getattr(part, "_compiled_call_impl", None) is not None:
            return True
        if any(hasattr(value, "_torchdynamo_orig_callable") for value in _reachable(part)):
            return True
    return False


def _reachable(part: nn.Module) -> Iterator[Any]:
    """Yields the attributes of a module and of its class, and the globals that the class's functions name."""
    yield from vars(part).values()
    for value in vars(type(part)).values():
        yield value
        code, globals_ = getattr(value, "__code__", None), getattr(value, "__globals__", {})
        yield from (globals_[name] for name in (code.co_names if code else ()) if name in globals_)
