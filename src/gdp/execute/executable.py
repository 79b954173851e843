"""Executable: a model with parameters and inputs, and its captured step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from gdp.execute.worker import ExecutionError
from gdp.models.model import check_optimizer
from gdp.models.pytorch import Capture, capture
from gdp.models.pytorch.step import Loss, OptimizerName
from gdp.models.read import builder_of, check_runnable
from gdp.models.user_function import printing_to_stderr


class CaptureOptions(TypedDict, total=False):
    """The options of `capture` that say which step of a model is run; its defaults hold."""

    training: bool
    optimizer: OptimizerName
    loss: Loss | None


@dataclass(frozen=True, eq=False)
class Executable:
    """A model with example inputs, and its captured step."""

    capture: Capture
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None = None  # as `capture` takes it

    def content(self) -> dict[int, Tensor]:
        """Copies parameters, buffers and inputs, by tensor number. ExecutionError if there is no memory for them."""
        try:
            return self.capture.program.bind(self.model, self.args, self.kwargs)
        except RuntimeError as error:
            raise ExecutionError("cpu", "copying parameters and inputs", error) from error


def read_executable(text: str, *, training: bool = True, optimizer: str = "adam", seed: int = 0) -> Executable:
    """Builds the model that MODEL names, with parameters and inputs drawn by `seed` on the CPU, and captures its step.

    InputError as for `sources.read_model`; a `gdp-graph` file has no model.
    """
    check_optimizer(optimizer)
    check_runnable(text, "executed")
    build = builder_of(text, training=training)
    with printing_to_stderr():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = build()
        model, args, kwargs = built if len(built) == 3 else (*built, {})
        captured = capture(model, args, kwargs, name=text, training=training, optimizer=cast(OptimizerName, optimizer))
    return Executable(captured, model, args, kwargs)
