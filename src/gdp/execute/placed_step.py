"""The program of a step that is to be trained: of the whole batch, or of one that the plan's layout cuts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gdp.errors import InputError
from gdp.execute.executable import CaptureOptions, PlannedCut, check_executable
from gdp.execute.layouts.step_program import StepProgram
from gdp.execute.run import check_belongs
from gdp.graph import Graph
from gdp.models.pytorch import Capture, Program, capture
from gdp.models.pytorch.program import named_inputs
from gdp.models.pytorch.recorded_calls import Call
from gdp.parallel.batches import in_flight
from gdp.simulator.plan import Plan


def placed_program(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    graph: Graph | None,
    learning_rate: float | None,
    options: CaptureOptions,
) -> Program:
    """Captures the step of `model` on a whole batch, and cuts it as the plan does.

    `graph` is the placed one, where it has measured times. InputError unless it is the step that was placed, and can be
    executed.
    """
    if in_flight(plan.layout):
        raise InputError("the plan serves batches in flight, and gdp.placed runs one; place without --batches")

    def captured(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Capture:
        part = capture(model, args, kwargs, name=type(model).__name__, **options)
        check_executable(part.program)
        program = part.program
        return part if learning_rate is None else replace(part, program=_with_learning_rate(program, learning_rate))

    cut = PlannedCut.of(plan, graph)
    program = captured(args, kwargs).program if cut is None else cut.program(captured, args, kwargs)
    check_belongs(plan, graph, program.graph)
    return program


def bound_inputs(program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Tensor]:
    """Copies the inputs. InputError names the remedy where a batch is smaller than the captured one."""
    try:
        return program.bind_inputs(args, kwargs)
    except InputError:
        if isinstance(program, StepProgram):  # its parts have sizes of their own
            raise
        views = [source.views for source in program.sources.values() if source.kind == "input"]
        captured = {name: view.size[0] for named in views for name, view in named.items() if view.size}
        for name, tensor in named_inputs(args, kwargs):
            if tensor.dim() and tensor.shape[0] < captured.get(name, 0):
                raise InputError(
                    f"{name!r} has {tensor.shape[0]} samples, and steps of {captured[name]} are placed: give the "
                    "DataLoader drop_last=True, or skip or pad the last batch"
                ) from None
        raise


def _with_learning_rate(program: Program, learning_rate: float) -> Program:
    def changed(call: Call) -> Call:
        return replace(call, kwargs={**call.kwargs, "lr": learning_rate}) if "lr" in call.kwargs else call

    calls = [
        tuple(map(changed, calls)) if phase == "update" else calls
        for calls, phase in zip(program.calls, program.graph.phases, strict=True)
    ]
    return replace(program, calls=tuple(calls))
