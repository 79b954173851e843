"""Errors of a model while it is captured, as InputErrors with the running module and the remedy."""

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from gdp.errors import InputError, first_line, user_line
from gdp.models.model import HUGGING_FACE, TIMM
from gdp.models.pytorch.recorder import Recorder
from gdp.models.unsupported import unsupported


@contextlib.contextmanager
def explained(name: str, recorder: Recorder | None = None, remedy: str = "") -> Iterator[None]:
    """Turns errors of the model into InputErrors with the running module and a remedy, by default what may help."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = _reason(error, recorder, remedy or _remedy(name))
        raise InputError(f"{name}: {_place(recorder)}{reason}") from error


def _reason(error: Exception, recorder: Recorder | None, remedy: str) -> str:
    if kind := unsupported(error):
        return kind
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            f"{error.func} depends on a tensor's content, which a capture does not have{user_line(error)}; "
            f"{_decision_remedy(recorder)}"
        )
    if isinstance(error, (UnsupportedOperatorException, UnsupportedFakeTensorException)):
        return f"{first_line(error)} has no fake implementation; register one with torch.library.register_fake"
    return f"the model failed ({type(error).__name__}: {first_line(error)}{user_line(error)}); {remedy}"


def _remedy(name: str) -> str:
    if name.startswith(TIMM):
        return "leave image out, or give the model with inputs of yours as package.module:function"
    if name.startswith(HUGGING_FACE):  # its inputs are not the user's
        return "correct config.json, try ?batch=1, or give the model with inputs of yours as package.module:function"
    return "check its arguments, and that it uses tensors' shapes only, not their content"


def _decision_remedy(recorder: Recorder | None) -> str:
    if recorder is not None and recorder.running.last.endswith("experts"):  # a loop over the experts that were hit
        return "multiply groups of rows instead (Transformers: experts_implementation='grouped_mm')"
    return "take that decision outside the model or from shapes"


def _place(recorder: Recorder | None) -> str:
    where = recorder.running.last if recorder is not None else ""
    return f"in module {where!r}, " if where else ""
