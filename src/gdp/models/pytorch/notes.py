"""Notes on a captured module: what its code does that a graph does not show."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from gdp.models.pytorch.replacements import LSTM

COMPILED = "fusion under torch.compile is not modelled: each operator is a kernel of its own, with its launch"
DATA_PARALLEL = "nn.DataParallel is left out: the plain module is captured, with the whole batch"
LSTM_LAYERS = "an nn.LSTM layer is one op, oneDNN's of CPUs; its time on a GPU, where cuDNN runs it, is an estimate"

_LSTM_KIND = LSTM._schema.name.replace("::", ".")


def notes_of(model: nn.Module, kinds: Iterable[str]) -> list[str]:
    """Returns notes on a captured `model`, whose ops are of these kinds."""
    notes = [COMPILED] if _is_compiled(model) else []
    notes += [DATA_PARALLEL] if any(isinstance(part, nn.DataParallel) for part in model.modules()) else []
    return notes + ([LSTM_LAYERS] if _LSTM_KIND in kinds else [])


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
