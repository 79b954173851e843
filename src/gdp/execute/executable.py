"""Executable: a model with parameters and inputs, and its captured step, as a plan cuts it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from gdp.arrays import I64, position_in
from gdp.errors import InputError
from gdp.execute.layouts.batch import Sizes, first_part, part_sizes
from gdp.execute.layouts.sharded_program import ShardedProgram, is_among_ranks, ranks_of
from gdp.execute.layouts.step_program import StepProgram, step_program, stream_program
from gdp.execute.measurement import Order
from gdp.execute.plan_executor import ExecutionError
from gdp.graph import Graph
from gdp.graph.builder import topological_order
from gdp.graph.copies import EXCHANGE_START, HOPS, exchange_of
from gdp.graph.fingerprint import difference
from gdp.models.op_costs import without_costs
from gdp.models.pytorch import Capture, Program
from gdp.models.pytorch.capture_step import OptimizerChoice, StepOptions, capture_step, rule_choice
from gdp.models.pytorch.loss import Loss
from gdp.models.pytorch.notes import unwrapped
from gdp.models.pytorch.program import named_inputs
from gdp.models.pytorch.recorded_calls import Call
from gdp.models.pytorch.signature import signatures
from gdp.models.shards import WHOLE
from gdp.models.source import ModelSource
from gdp.models.user_function import printing_to_stderr
from gdp.parallel.layout import Layout
from gdp.parallel.step import BatchStream, Step, in_flight
from gdp.simulator.plan import Plan, microbatching_of


class CaptureOptions(TypedDict, total=False):
    """The options of `capture` that say which step of a model is run; its defaults hold."""

    training: bool
    optimizer: OptimizerChoice
    precision: str
    loss: Loss | None


@dataclass(frozen=True, eq=False)
class Executable:
    """A model with example inputs, and its captured step, which may be cut into parts of the batch."""

    capture: Capture  # of the whole batch
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None = None  # as `capture` takes it
    cut: Program | None = None

    @property
    def program(self) -> Program:
        """The program of the step as it is run."""
        return self.cut or self.capture.program

    @property
    def parts(self) -> StepProgram | None:
        """The program of a step that is cut into parts of the batch, of the first rank."""
        program = ranks_of(self.program)[0]
        return program if isinstance(program, StepProgram) else None

    def content(self, program: Program | None = None) -> dict[int, Tensor]:
        """Copies parameters, buffers and inputs, by tensor number. ExecutionError if there is no memory for them.
        `program` is by default the one that is run."""
        try:
            return (program or self.program).bind(self.model, self.args, self.kwargs)
        except RuntimeError as error:
            raise ExecutionError("cpu", "copying parameters and inputs", error) from error

    def inputs_of_parts(self) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
        """Returns the inputs of each part of the batch, in order; the whole ones of a step that is not cut."""
        return [(self.args, self.kwargs)] if self.parts is None else [*self.parts.split(self.args, self.kwargs)]

    def signatures(self, program: Program | None = None) -> Sequence[str]:
        """Returns the signatures of the ops of `program`, by default the one that is run; "" for those that a layout
        makes or changes."""
        program, *others = ranks_of(program or self.program)
        num_ranks, cut = 1 + len(others), program if isinstance(program, StepProgram) else None
        found: Sequence[str] = signatures(program if cut is None else cut.part)
        if cut is not None:
            found = ["" if op in cut.made else found[origin] for op, origin in enumerate(cut.origin)]
        is_exchange = is_among_ranks(program.graph).tolist()
        return ["" if is_exchange[op] else name for op, name in enumerate(found) for _ in range(num_ranks)]


def read_executable(
    source: ModelSource, *, plan: Plan | None = None, placed: Graph | None = None, seed: int = 0
) -> Executable:
    """Builds the model of MODEL, with parameters and inputs drawn by `seed` on the CPU, and captures its step. The step
    is cut as `plan` says, whose graph is `placed` where it is known. InputError where MODEL cannot be read."""
    text, reading = source.text, source.reading
    source.check_runnable("executed")

    options = StepOptions(reading.training, reading.optimizer, precision=reading.precision)

    def captured(args: Any, kwargs: Any, **of_rank: Any) -> Capture:
        return capture_step(model, args, kwargs, replace(options, **of_rank), text)

    with printing_to_stderr():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = source.build()
        model, args, kwargs = built if len(built) == 3 else (*built, {})
        whole = captured(args, kwargs)
        check_executable(whole.program)
        executable = Executable(whole, unwrapped(model), args, kwargs)
        if plan is None:
            return executable
        return as_planned(executable, plan, captured, source.sizes_of_part, placed)


def as_planned(
    executable: Executable,
    plan: Plan,
    captured: Callable[..., Capture],
    sizes: Callable[[int], Sizes | None] | None = None,
    placed: Graph | None = None,
) -> Executable:
    """Returns `executable`, of the whole batch, cut as the layout of `plan` says, or as a stream of batches.
    `captured(args, kwargs)` captures a part, with `shards` and `rank` that of a rank; `sizes(K)` are those of its
    inputs for K parts, by default found by the batch size in the plan. `placed` is the graph of the plan, where it is
    known."""
    whole, args, kwargs = executable.capture, executable.args, executable.kwargs
    cut = PlannedCut.of(plan, placed)
    if cut is None:
        return executable
    if in_flight(cut.layout):
        stream = BatchStream.of_document(whole.graph, cut.layout)
        return replace(executable, cut=stream_program(whole.program, stream))
    return replace(executable, cut=cut.program(captured, args, kwargs, sizes))


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """The way in which the step of a plan is cut."""

    layout: Mapping[str, Any]  # as in the plan

    @classmethod
    def of(cls, plan: Plan, placed: Graph | None = None) -> "PlannedCut | None":
        """Returns how the step of `plan` is cut: by its layout, or into micro-batches alone. None: it is not. `placed`
        is the graph of the plan, where it is known."""
        if plan.layout is not None:
            return cls(plan.layout)
        options = plan.question.options if placed is None else microbatching_of(placed)
        count = options.get("microbatches", 1)
        return None if count == 1 else cls(Layout((count,)).document())

    def program(
        self,
        captured: Callable[..., Capture],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Callable[[int], Sizes | None] | None = None,
    ) -> Program:
        """Captures the first part of the batch, for each rank, and returns the program of the step that is made of it.
        `captured` and `sizes` are those of `as_planned`. InputError for a batch of another size, and for a layout that
        is not executed."""
        layout, batch = Layout.of_document(self.layout), self.layout.get("batch")
        if layout.of_groups.is_whole:
            return self._of_ranks(captured, args, kwargs)
        num_parts = layout.num_parts
        shape = next((list(tensor.shape) for _, tensor in named_inputs(args, kwargs) if tensor.dim()), [])
        found = part_sizes(args, kwargs, num_parts, batch) if sizes is None else sizes(num_parts)
        try:
            return self._of_ranks(captured, *first_part(args, kwargs, num_parts, found))
        except InputError as error:
            if sizes is not None or batch not in shape[1:] or batch == shape[0]:
                raise
            raise InputError(
                f"the plan is of batches of {batch} samples, and the first input is {shape}; give a whole batch "
                f"(drop_last=True with a DataLoader). Cut along another dimension than the first: {error}"
            ) from error

    def _of_ranks(self, captured: Callable[..., Capture], *inputs: Any) -> Program:
        """Returns the program of a part of the batch, or of the whole one, of all ranks."""
        layout = Layout.of_document(self.layout)
        shards = layout.shards
        if shards == WHOLE:
            return self._step(captured(*inputs))
        if shards.expert > 1 or shards.shares:
            why = "no rank has a program of its own size" if shards.shares else "it takes rows for balanced"
            raise InputError(f"{shards} is placed, not executed: {why}; place with tensor={shards.tensor} alone")
        ranks = [captured(*inputs, shards=shards, rank=rank) for rank in range(shards.num_ranks)]
        programs = [part.program if layout.of_groups.is_whole else self._step(part) for part in ranks]
        return ShardedProgram.of(programs, ranks[0].cuts, shards)

    def _step(self, part: Capture) -> StepProgram:
        step = Step.of_document(lambda _parts: part.graph, self.layout, in_hops=True)
        program = step_program(part.program, step)
        if step.times is None:
            return program
        return replace(program, placed=Step.of_document(lambda _parts: part.graph, self.layout).graph)


def graph_in_plans(program: Program) -> Graph:
    """Returns the graph that a plan of `program` is of."""
    program = ranks_of(program)[0]
    placed = program.placed if isinstance(program, StepProgram) else None
    return program.graph if placed is None else placed


def order_of(program: Program, plan: Plan) -> Order:
    """Returns the ops of `program` on each device in the order of `plan`; hops come when all replicas are ready."""
    if isinstance(program, ShardedProgram):
        count = len(program.ranks)
        return [np.asarray(ops) * count + rank for ops in order_of(program.ranks[0], plan) for rank in range(count)]
    placed, step = graph_in_plans(program), program.graph
    if placed is step:
        return plan.order
    kept = np.flatnonzero(~placed.is_in_role(*HOPS))  # pieces of exchanges at once are hops of no ring
    own = np.array([step.op_numbers[placed.op_names[op]] for op in kept.tolist()], np.int64)
    turn, device = np.full((2, step.num_ops), -1)
    turn[own] = np.argsort(_in_turn(placed, np.arange(placed.num_ops), plan.order))[kept]
    device[own] = plan.placement[kept]
    exchange = np.unique(np.stack((exchange_of(step), step.microbatches)), axis=1, return_inverse=True)[1].reshape(-1)
    starts, hops = np.flatnonzero(step.is_in_role(EXCHANGE_START)), np.flatnonzero(turn < 0)
    ready, where = np.zeros(exchange.max() + 1, np.int64), np.zeros((exchange.max() + 1, step.replicas.max() + 1), int)
    np.maximum.at(ready, exchange[starts], turn[starts])
    where[exchange[starts], step.replicas[starts]] = device[starts]
    turn[hops], device[hops] = ready[exchange[hops]], where[exchange[hops], step.replicas[hops]]
    order = _in_turn(step, turn)
    return [order[device[order] == number] for number in range(len(plan.order))]


def _in_turn(graph: Graph, turn: I64, chains: Order = ()) -> I64:
    """Returns all ops, each after what it consumes and after those before it in `chains`, else by `turn` [N]."""
    by_turn = np.argsort(turn, kind="stable")
    number = position_in(by_turn, graph.num_ops)
    rows = [np.asarray(chain, np.int64) for chain in chains]
    sources = np.concatenate([graph.producers[graph.edge_tensors], *(row[:-1] for row in rows)])
    targets = np.concatenate([graph.consumers, *(row[1:] for row in rows)])
    makers: list[set[int]] = [set() for _ in number]
    for source, target in zip(number[sources].tolist(), number[targets].tolist(), strict=True):
        makers[target].add(source)
    return np.asarray(by_turn[topological_order(makers)], np.int64)


def check_executable(program: Program) -> None:
    """Raises InputError for a step that can be placed, but not executed."""
    if program.refusal:
        raise InputError(f"{program.graph.name}: the step is placed, not executed: {program.refusal}")


def check_choice(options: CaptureOptions, model: nn.Module) -> None:
    """Raises InputError for an optimizer that no step of `model` can be captured with, before there is a step."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; gdp.placed takes a module, and its optimizer")
    rule_choice(StepOptions(**options), model, type(model).__name__)


def check_belongs(plan: Plan, placed: Graph | None, captured: Graph) -> None:
    """Raises InputError, with what differs, unless `plan` is one of `captured` but for its costs. `placed` is the graph
    of the plan; None: `captured` itself."""
    if placed is None and plan.problem is not None:
        placed = plan.problem.graph
    if plan.graph == (placed or captured).fingerprint and not (
        what := "" if placed is None else difference(without_costs(captured), without_costs(placed))
    ):
        return
    if placed is None or plan.graph != placed.fingerprint:
        what = "costs, names or edges differ"
        if captured.num_ops != len(plan.placement):
            what = f"it has {captured.num_ops:,} ops, not {len(plan.placement):,}"
    raise InputError(
        f"the plan is not one of the step of {captured.name!r}: {what}; the model, its sizes, inference or training, "
        "the optimizer, the dtype or the version of gdp or PyTorch differ; place it anew"
    )


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
    """Captures the step of `model` on a whole batch, and cuts it as the plan does. `graph` is the placed one, where it
    has measured times. InputError unless it is the step that was placed, and can be executed."""
    if in_flight(plan.layout):
        raise InputError("the plan serves batches in flight, and gdp.placed runs one; place without --batches")

    def captured(args: Sequence[Any], kwargs: Mapping[str, Any], **of_rank: Any) -> Capture:
        part = capture_step(model, args, kwargs, StepOptions(**options, **of_rank))
        check_executable(part.program)
        program = part.program
        return part if learning_rate is None else replace(part, program=_with_learning_rate(program, learning_rate))

    cut = PlannedCut.of(plan, graph)
    program = captured(args, kwargs).program if cut is None else cut.program(captured, args, kwargs)
    check_belongs(plan, graph, graph_in_plans(program))
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
