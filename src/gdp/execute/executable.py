"""Executable: a model with parameters and inputs, and its captured step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from gdp.errors import InputError
from gdp.execute.worker import ExecutionError
from gdp.models.model import Reading
from gdp.models.pytorch import Capture, Program, capture
from gdp.models.pytorch.loss import Loss
from gdp.models.pytorch.step import OptimizerChoice, StepOptions, rule_choice
from gdp.models.read import builder_of, check_runnable
from gdp.models.user_function import printing_to_stderr


class CaptureOptions(TypedDict, total=False):
    """The options of `capture` that say which step of a model is run; its defaults hold."""

    training: bool
    optimizer: OptimizerChoice
    master_weights: bool
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


def read_executable(text: str, reading: Reading | None = None, *, seed: int = 0) -> Executable:
    """Builds the model that MODEL names, with parameters and inputs drawn by `seed` on the CPU, and captures its step.

    InputError as for `sources.read_model`; a `gdp-graph` file has no model.
    """
    reading = reading or Reading()
    check_runnable(text, "executed")
    build = builder_of(text, training=reading.training, dtype=reading.dtype)
    with printing_to_stderr():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = build()
        model, args, kwargs = built if len(built) == 3 else (*built, {})
        captured = capture(
            model,
            args,
            kwargs,
            name=text,
            training=reading.training,
            optimizer=reading.optimizer,
            master_weights=reading.master_weights,
        )
    check_executable(captured.program)
    return Executable(captured, model, args, kwargs)


def check_executable(program: Program) -> None:
    """Raises InputError for a step that can be placed, but not executed."""
    if program.refusal:
        raise InputError(f"{program.graph.name}: the step is placed, not executed: {program.refusal}")


def check_choice(options: CaptureOptions, model: nn.Module) -> None:
    """Raises InputError for an optimizer that no step of `model` can be captured with, before there is a step."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; gdp.placed takes a module, and its optimizer")
    rule_choice(StepOptions(**options), model, type(model).__name__)
