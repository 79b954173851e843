"""The program of a step that is to be trained: of the whole batch, or of one that the plan's layout cuts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gdp.errors import InputError
from gdp.execute.executable import CaptureOptions, PlannedCut, check_executable, cut_step
from gdp.execute.layouts.batch import first_part, part_sizes
from gdp.execute.layouts.step_program import StepProgram
from gdp.execute.run import check_belongs
from gdp.graph import Graph
from gdp.models.pytorch import Capture, Program, capture
from gdp.models.pytorch.program import named_inputs
from gdp.models.pytorch.recorded_calls import Call
from gdp.parallel.batches import in_flight
from gdp.parallel.layout import Layout
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
    if cut is None:
        whole = captured(args, kwargs)
        check_belongs(plan, graph, whole.graph)
        return whole.program
    layout = cut.layout
    num_parts = Layout.of_document(layout).num_parts
    sizes = part_sizes(args, kwargs, num_parts, layout.get("batch"))
    try:
        part = captured(*first_part(args, kwargs, num_parts, sizes))
    except InputError as error:
        if sizes is None:
            raise
        shape = next(list(tensor.shape) for _, tensor in named_inputs(args, kwargs) if tensor.dim())
        raise InputError(
            f"the plan is of batches of {layout['batch']} samples, and the first input is {shape}; give a whole batch "
            f"(drop_last=True with a DataLoader). Cut along another dimension than the first: {error}"
        ) from error
    program = cut_step(part, cut)
    check_belongs(plan, graph, program.graph)
    return program


def bound_inputs(program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Tensor]:
    """Copies the inputs. InputError names the remedy where a batch is smaller than the captured one."""
    try:
        return program.bind_inputs(args, kwargs)
    except InputError as error:
        captured = _input_sizes(program)
        sizes = {name: tensor.shape[0] for name, tensor in named_inputs(args, kwargs) if tensor.dim()}
        for name, size in captured.items():
            if name in sizes and sizes[name] < size:
                raise InputError(
                    f"{name!r} has {sizes[name]} samples, and steps of {size} are placed: give the DataLoader "
                    "drop_last=True, or skip or pad the last batch"
                ) from None
        raise error


def _input_sizes(program: Program) -> dict[str, int]:
    """Returns the first dimension of each input of a step of the whole batch; nothing for one that is cut."""
    if isinstance(program, StepProgram):
        return {}
    views = [source.views for source in program.sources.values() if source.kind == "input"]
    return {name: view.size[0] for named in views for name, view in named.items() if view.size}


def _with_learning_rate(program: Program, learning_rate: float) -> Program:
    def changed(call: Call) -> Call:
        return replace(call, kwargs={**call.kwargs, "lr": learning_rate}) if "lr" in call.kwargs else call

    calls = [
        tuple(map(changed, calls)) if phase == "update" else calls
        for calls, phase in zip(program.calls, program.graph.phases, strict=True)
    ]
    return replace(program, calls=tuple(calls))
