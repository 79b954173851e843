"""START HERE: the program of a step that is cut into micro-batches and replicas, from that of one micro-batch.

    program of one micro-batch --recompute, offload, share of the loss--> its ops
    its ops and the graph of the step --copies, sums, exchanges--> program of the step

Copies of an op make its calls on the tensors of their micro-batch and replica, with random numbers of their own. P is
the number of parts of the batch: of micro-batches over all replicas. M ops of the step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.execute.layouts.assembly import Assembly
from gdp.execute.layouts.batch import split_inputs
from gdp.execute.layouts.cut import Pieces, RingPlaces
from gdp.execute.layouts.exchanges import Make
from gdp.graph import Graph
from gdp.graph.copies import HOST_COPY, RECOMPUTED, exchange_ends
from gdp.models.pytorch import Replay
from gdp.models.pytorch.program import Program, StepSource
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.routine import OpRoutine
from gdp.models.pytorch.strides import memory_order, part_view, view_of
from gdp.parallel.blocks import Blocks
from gdp.parallel.layout import NONE
from gdp.parallel.offload import KIND, Offload
from gdp.parallel.recompute import Recomputation
from gdp.parallel.rings import READY, Rings
from gdp.parallel.step import ROUNDS, BatchStream, Step

_LOSS_GRADIENT = "aten.ones_like"


@dataclass(frozen=True, eq=False, kw_only=True)
class StepProgram(Program):
    """The program of a cut step; values are those of `part`, the program of one micro-batch. `results` has the mean
    loss, the outputs of part p under `NAME@p`, gradients of the mean loss, and the state of the first replica."""

    part: Program
    part_of: Sequence[int]  # [M] the part of the batch of each op; shared ops have the first of their replica
    origin: Sequence[int]  # [M] the op of `part`; -1: the layout makes it
    microbatches: Sequence[int]  # [R] of each replica; of a stream of batches, all that it takes in turn
    is_stream: bool  # each part is a whole batch
    placed: Graph | None = None  # the graph that a plan is of, where exchanges are at once there, and in hops here
    made: Mapping[int, Make]  # of ops that the layout adds or changes
    gradient_tensors: Mapping[str, int]  # by parameter: what the update of the first replica reads
    gradient_pieces: Mapping[str, Pieces]  # by parameter, where each replica has a piece
    pieces: Mapping[int, Pieces]  # by tensor of a cut parameter in `part`
    first_tensors: Mapping[int, int]  # by tensor of a parameter or buffer in `part`: that of the first replica

    @property
    def num_parts(self) -> int:
        return sum(self.microbatches)

    @property
    def num_first_parts(self) -> int:
        """The parts of the first replica, whose buffers are those of the step."""
        return self.microbatches[0]

    @property
    def adds_in_order(self) -> bool:
        """True if gradients are added up in the order of the parts: with one replica, or two parts."""
        return len(self.microbatches) == 1 or self.num_parts == 2

    def routine(self, op: int, device: torch.device | None = None) -> OpRoutine:
        """Returns `op` prepared for `device`; kept for the next time."""
        key = op, device
        if op in self.made and key not in self._routines:
            self._routines[key] = self.made[op](device)
        return super().routine(op, device)

    @cached_property
    def piece_tensors(self) -> frozenset[int]:
        """The gradients of which a replica holds the piece that its updates read."""
        return frozenset(tensor for pieces in self.gradient_pieces.values() for tensor in pieces.spans)

    @cached_property
    def keepers(self) -> Mapping[int, int]:
        """The updates that read summed gradients: where these are, whichever device has made them."""
        tensors = {*self.gradient_tensors.values(), *self.piece_tensors}
        return {tensor: max(self.graph.consumers_of(tensor).tolist()) for tensor in tensors}

    @cached_property
    def completed_by(self) -> Mapping[int, int]:
        """The last op of a gather, by tensor of its first op that has a whole parameter: all users wait for it."""
        graph, is_exchange = self.graph, self.graph.is_collective
        found: dict[int, int] = {}
        for op, last in zip(*map(np.ndarray.tolist, exchange_ends(graph)), strict=True):
            if graph.kinds[op] != f"all_gather.{READY}":
                continue
            wholes = [tensor for tensor in self.outputs_of[op] if not is_exchange[graph.consumers_of(tensor)].any()]
            found |= dict.fromkeys(wholes, last)
        return found

    # -- inputs and state --------------------------------------------------------------------------------------------

    def bind_state(self, state: nn.Module | Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Copies parameters and buffers, once for all replicas; see `Program.bind`."""
        of_part, content = self.part.bind_state(state), {}
        for op, source in self.sources.items():
            if source.kind != "input":
                content[source.tensor] = of_part[self.part.sources[self.origin[op]].tensor]
        for tensor, pieces in self.pieces.items():
            row = memory_order(of_part[tensor], pieces.layout)
            content |= {own: row[first:last] for own, (first, last) in pieces.spans.items()}
        return content

    def bind_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Tensor]:
        """Copies the inputs of the whole batch, each micro-batch its part; InputError where it has another size."""
        parts = [self.part.bind_inputs(*inputs) for inputs in self.split(args, kwargs)]
        inputs = ((op, source) for op, source in self.sources.items() if source.kind == "input")
        return {x.tensor: parts[self.part_of[op]][self.part.sources[self.origin[op]].tensor] for op, x in inputs}

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns the inputs [P] of the parts of a batch; all batches of a stream have the same."""
        if self.is_stream:
            return [(tuple(args), dict(kwargs))] * self.num_parts
        named = [source.views for source in self.part.sources.values() if source.kind == "input"]
        sizes = {name: view.size for views in named for name, view in views.items()}
        return list(split_inputs(args, kwargs, self.num_parts, sizes))

    @cached_property
    def state_tensors(self) -> frozenset[int]:
        """The tensors of parameters and buffers that `state_by_name` reads."""
        cut = {tensor for pieces in self.pieces.values() for tensor in pieces.spans}
        return frozenset(cut | {own for tensor, own in self.first_tensors.items() if tensor not in self.pieces})

    @cached_property
    def state_names(self) -> frozenset[str]:
        """The names that `state_by_name` has."""
        return self.part.state_names

    def state_by_name(self, held: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Returns parameters and buffers of the first replica; those that are cut are put together."""
        pieces = self.pieces
        whole = {x: pieces[x].joined(held) if x in pieces else held[own] for x, own in self.first_tensors.items()}
        return self.part.state_by_name(whole)

    # -- results -----------------------------------------------------------------------------------------------------

    @cached_property
    def result_tensors(self) -> frozenset[int]:
        """The tensors that `results` reads the loss, outputs and gradients from."""
        return frozenset({*self.keepers, *self._outputs_by_part.values()})

    @cached_property
    def _outputs_by_part(self) -> dict[tuple[int, int], int]:
        """The tensor of each (value, part of the batch) that the model or the loss returns."""
        values = {ref.value for ref in self.outputs.values()} | ({self.loss.value} if self.loss else set())
        found: dict[tuple[int, int], int] = {}
        producers = self.graph.producers.tolist()
        for tensor, value in enumerate(self.tensor_values):
            if value in values and self.tensor_layouts[tensor] is None:
                op = producers[tensor]
                found.setdefault((value, self.part_of[op]), tensor)
        return found

    def loss_of(self, held: Mapping[int, Tensor]) -> Tensor | None:
        """Returns the mean of the losses of all parts, on the CPU."""
        if self.loss is None:
            return None
        losses = []
        for tensor in sorted(held):
            if tensor >= 0 and self.tensor_values[tensor] == self.loss.value and self.graph.is_kept[tensor]:
                loss = super().loss_of({tensor: held[tensor]})
                assert loss is not None, "there is one"
                losses.append(loss.detach().to("cpu"))
        assert len(losses) == self.num_parts, "the graph keeps the loss of each part"
        return torch.stack(losses).mean(0)

    def results(self, held: Mapping[int, Tensor]) -> Replay:
        """Returns the results of a step, from tensors by number; others are ignored."""
        gradients = {name: pieces.joined(held) for name, pieces in self.gradient_pieces.items()}
        for name, tensor in self.gradient_tensors.items():
            ref, own = self.gradients[name], self.tensor_layouts[tensor]
            if own is not None:
                gradients[name] = part_view(held[tensor], own, own if ref.layout is None else ref.layout)
            else:
                gradients[name] = view_of(held[tensor], self.layouts[ref.value], ref.layout)
        return Replay(self.loss_of(held), self.named_outputs(held), gradients, self.state_by_name(held))

    def named_outputs(self, held: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs of each part of a step by name, as `results` does."""
        outputs = {}
        for name, ref in self.outputs.items():
            for part in range(self.num_parts):
                tensor = self._outputs_by_part.get((ref.value, part))
                if tensor is not None and tensor in held:
                    outputs[f"{name}@{part}"] = view_of(held[tensor], self.layouts[ref.value], ref.layout)
        return outputs


def step_program(program: Program, step: Step) -> StepProgram:
    """Returns the program of `step`, of micro-batches with `program`. InputError for a layout that is not executed."""
    layout = step.layout
    part = program
    if layout.recompute != NONE:
        part = with_copies(part, Recomputation.of(Blocks.of(part.graph, layout.recompute), step.places))
    if layout.offload != NONE:
        part = with_host_copies(part, Offload.of(part.graph, layout.offload))
    part = with_share_of_loss(part, layout.num_parts)
    places = RingPlaces.of(Rings.of(layout.data, step.ring, step.hosts))
    return _of_assembly(Assembly(part, step.graph, places, layout.zero), layout.microbatches)


def stream_program(program: Program, stream: BatchStream) -> StepProgram:
    """Returns the program of a stream of batches, each one a step with `program`, a forward pass."""
    counts = [ROUNDS * count for count in stream.layout.microbatches]
    places = RingPlaces.of(Rings.of(stream.layout.data))
    return _of_assembly(Assembly(program, stream.graph, places, 0), counts, is_stream=True)


def _of_assembly(assembly: Assembly, microbatches: Sequence[int], *, is_stream: bool = False) -> StepProgram:
    part, graph = assembly.program, assembly.step
    tensors, origins = assembly.tensors, assembly.tensors.op_origin
    starts = np.array([0, *accumulate(microbatches)])
    part_of: list[int] = (starts[graph.replicas] + graph.microbatches).tolist()
    found = [(op, part.sources[origin]) for op, origin in enumerate(origins) if origin in part.sources]
    sources = {op: _copied_source(source, assembly, op) for op, source in found}
    firsts = {part.sources[origins[op]].tensor: (op, source.tensor) for op, source in reversed(sources.items())}
    whole: dict[str, int] = {}
    cut: dict[str, Pieces] = {}
    for op, update in ((op, assembly.updates.get(origin)) for op, origin in enumerate(origins)):
        replica = int(graph.replicas[op])
        if update is not None and assembly.zero:
            pieces = cut.setdefault(update.name, Pieces({}, update.layout))
            pieces.spans[assembly.gradient_of(op, update)] = assembly.owned.piece(update.weight, replica)
        elif update is not None and not replica:
            whole[update.name] = assembly.gradient_of(op, update)
    inherited = {field.name: getattr(part, field.name) for field in fields(Program)}
    return StepProgram(
        **inherited
        | {
            "graph": graph,
            "calls": tuple(_copied_calls(part, *copy) for copy in zip(origins, part_of, strict=True)),
            "tensor_values": tuple(tensors.values),
            "tensor_layouts": tuple(tensors.parts),
            "layouts": tensors.layouts,
            "sources": sources,
            "private": {op: part.private[origin] for op, origin in enumerate(origins) if origin in part.private},
            "updated": {op: part.updated[origin] for op, origin in enumerate(origins) if origin in part.updated},
        },
        part=part,
        part_of=part_of,
        origin=origins,
        microbatches=tuple(microbatches),
        is_stream=is_stream,
        made=assembly.made,
        gradient_tensors=whole,
        gradient_pieces=cut,
        pieces=assembly.parameter_pieces(),
        first_tensors={tensor: own for tensor, (op, own) in firsts.items() if sources[op].kind != "input"},
    )


def _copied_calls(part: Program, origin: int, number: int) -> tuple[Call, ...]:
    """Returns the calls of an op in part `number` of the batch, whose random numbers are its own."""
    calls, offset = part.calls[origin] if origin >= 0 else (), number * part.num_draws
    return tuple(replace(call, seed=call.seed + offset) if call.seed >= 0 else call for call in calls)


def micro_batch_of(program: Program) -> tuple[Program, Sequence[int]]:
    """Returns the program of one micro-batch of a step, and its op [M] that each op is a copy of, or -1."""
    if isinstance(program, StepProgram):
        return program.part, program.origin
    return program, range(program.graph.num_ops)


def gradient_spans(program: Program) -> dict[int, tuple[int, int]]:
    """Returns the elements of its gradient that each piece has, by tensor; {} where gradients are whole."""
    cut = program.gradient_pieces.values() if isinstance(program, StepProgram) else ()
    return {tensor: span for pieces in cut for tensor, span in pieces.spans.items()}


def _copied_source(source: StepSource, assembly: Assembly, op: int) -> StepSource:
    tensor = next(own for own in assembly.tensors.made_by[op] if assembly.tensors.origin[own] == source.tensor)
    return replace(source, tensor=tensor)


def with_share_of_loss(program: Program, num_parts: int) -> Program:
    """Returns the program of one of `num_parts` micro-batches, whose gradients are those of a share of the mean loss.
    The gradient of the loss is 1 / `num_parts`. InputError where it is not found."""
    if num_parts == 1 or program.loss is None:
        return program
    kinds, phases = program.graph.kinds, program.graph.phases
    first = next(op for op, phase in enumerate(phases) if phase == "backward")
    is_fill = [call.func is torch.ops.aten.fill_.Scalar and call.args[1] == 1 for call in program.calls[first]]
    if kinds[first] != _LOSS_GRADIENT or not any(is_fill):
        raise InputError(
            f"{program.graph.name}: its backward pass does not begin with the gradient of one loss, so parts of a "
            "batch cannot be run; place with --parallel none"
        )

    def shared(call: Call, is_changed: bool) -> Call:
        return replace(call, args=(call.args[0], 1.0 / num_parts)) if is_changed else call

    calls = list(program.calls)
    calls[first] = tuple(map(shared, program.calls[first], is_fill))
    return replace(program, calls=tuple(calls))


def with_copies(program: Program, step: Recomputation) -> Program:
    """Returns the program of the graph of `step`, a recomputation of the graph of `program`. Copies make the calls of
    their originals once more, draw the same random numbers, and write no buffers, such as running statistics."""
    is_copy = step.graph.is_in_role(RECOMPUTED).tolist()
    number = {op: new for new, op in enumerate(step.op_origin.tolist()) if not is_copy[new]}
    program = _renumbered(program, step.graph, number, step.tensor_origin)
    values = program.tensor_values
    calls = list(program.calls)
    for op, origin in enumerate(step.op_origin.tolist()):
        if is_copy[op]:
            inputs = {values[tensor] for tensor in program.inputs_of[op]}
            calls[op] = tuple(_without_state(program.calls[number[origin]], inputs))
    return replace(program, calls=tuple(calls))


def with_host_copies(program: Program, step: Offload) -> Program:
    """Returns the program of the graph of `step`, in which activations of the graph of `program` wait on the host."""
    is_new = step.graph.is_in_role(HOST_COPY) & (np.array(step.graph.kinds) == KIND)
    kept = np.flatnonzero(~is_new).tolist()  # in their order
    number = dict(enumerate(kept))
    return _renumbered(program, step.graph, number, step.tensor_origin)


def _renumbered(program: Program, graph: Graph, number: Mapping[int, int], tensor_origin: I64) -> Program:
    """Returns the program of `graph`, in which ops have another `number`, and tensors the content of others. New ops
    make no calls: they pass their input on."""
    origins = tensor_origin.tolist()
    calls: list[tuple[Call, ...]] = [()] * graph.num_ops
    for op, new in number.items():
        calls[new] = program.calls[op]
    return replace(
        program,
        graph=graph,
        calls=tuple(calls),
        tensor_values=tuple(program.tensor_values[origin] if origin >= 0 else -1 for origin in origins),
        tensor_layouts=tuple(program.tensor_layouts[origin] if origin >= 0 else None for origin in origins),
        sources={number[op]: source for op, source in program.sources.items()},
        private={number[op]: state for op, state in program.private.items()},
        updated={number[op]: name for op, name in program.updated.items()},
    )


def _without_state(calls: tuple[Call, ...], values: set[int]) -> Iterator[Call]:
    """Yields the calls of a copy, with None for buffers that only the original overwrites."""
    for call in calls:
        unknown = {old for old, _ in call.writes if old not in values}
        values |= {new for old, new in call.writes if old in values} | {value for value in call.outputs if value >= 0}
        if not unknown:
            yield call
            continue

        def given(item: Any, unknown: set[int] = unknown) -> Any:
            return None if type(item) is Ref and item.value in unknown else item

        yield replace(
            call,
            args=tuple(map(given, call.args)),
            kwargs={key: given(item) for key, item in call.kwargs.items()},
            writes=tuple((old, new) for old, new in call.writes if old not in unknown),
        )
