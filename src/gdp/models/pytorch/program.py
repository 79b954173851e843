"""Program: the calls that every op of a captured graph executes, in terms of the graph's tensors; and a replay. A
*value* is the content of one piece of memory between two writes to it; an in-place operator makes a new value in the
same memory. A call's arguments are `Ref`s to values. Views are not calls: each reader makes them again, from size,
stride and offset. When an op is ready, the memory that it overwrites is no longer read: the graph's write-after-read
tensors order every earlier reader before it."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.replacements import ATTENTION_BACKWARD
from gdp.models.pytorch.routine import OpRoutine, Routine
from gdp.models.pytorch.strides import StridedLayout, empty, view_of


@dataclass(frozen=True, slots=True)
class StepSource:
    """Memory that a step starts from: a parameter, a buffer or an input, under each of its names."""

    kind: str  # parameter, buffer, input
    tensor: int
    views: Mapping[str, StridedLayout]  # by name: tied parameters are several names of one memory
    constant: Tensor | None = None  # content of a buffer that no module holds


@dataclass(frozen=True, slots=True)
class Replay:
    """The results of one step: tensors by name."""

    loss: Tensor | None
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]  # parameters and buffers after the step


@dataclass(frozen=True, eq=False)
class Program:
    """The executable side of a captured `Graph`: N ops and T tensors, numbered as there. `run` executes one op. A
    caller that gives each op the tensors that the graph lists, in an order that the graph allows, computes exactly the
    results of PyTorch with the same seeds."""

    graph: Graph
    calls: tuple[tuple[Call, ...], ...]  # [N] empty for sources
    tensor_values: tuple[int, ...]  # [T] -1: a control tensor, nothing to ship
    tensor_layouts: tuple[StridedLayout | None, ...]  # [T] None: the whole value; else the part that a view covers
    layouts: Mapping[int, StridedLayout]  # of each value, as it was made
    sources: Mapping[int, StepSource]  # by op
    private: Mapping[int, tuple[int, ...]]  # by op: optimizer state, kept between steps
    updated: Mapping[int, str]  # by op: the parameter that it updates by an optimizer's rule
    outputs: Mapping[str, Ref]  # the model's, by name
    loss: Ref | None
    gradients: Mapping[str, Ref]  # by parameter name, as the update reads them
    state_keys: Mapping[int, str]  # of optimizer state, by value, as `torch.optim` calls it
    state_copies: Mapping[int, Ref]  # by value: the parameter that it is a copy of; others are zero before a step
    refusal: str = ""  # why the step cannot be executed

    def run(
        self,
        op: int,
        inputs: Mapping[int, Tensor],
        private: MutableMapping[int, Tensor],
        device: torch.device | None = None,
        seed: int = 0,
    ) -> dict[int, Tensor]:
        """Executes `op` and returns its tensors by number. inputs: the tensors that it consumes, by number; a part may
        be a view of its base or a contiguous copy. private: its device's optimizer state, by value; filled when first
        needed, then updated in place. device: the device for tensors created from nothing; default: their device at
        capture, the CPU. seed: added to those of random numbers; `num_draws` more for every step gives each its own."""
        return self.routine(op, device).run(dict(inputs), private, seed)

    def routine(self, op: int, device: torch.device | None = None) -> OpRoutine:
        """Returns `op` prepared for `device`; kept for the next time."""
        key = op, device
        if key not in self._routines:
            self._routines[key] = Routine(self, op, device)
        return self._routines[key]

    @cached_property
    def _routines(self) -> dict[tuple[int, torch.device | None], OpRoutine]:
        return {}

    @cached_property
    def inputs_of(self) -> list[list[int]]:
        """[N] The tensors with content that each op consumes."""
        graph, found = self.graph, [list[int]() for _ in self.calls]
        for tensor, value in enumerate(self.tensor_values):
            for op in graph.consumers_of(tensor).tolist() if value >= 0 else ():
                found[op].append(tensor)
        return found

    @cached_property
    def outputs_of(self) -> list[list[int]]:
        """[N] The tensors with content that each op produces."""
        found = [list[int]() for _ in self.calls]
        for tensor, op in enumerate(self.graph.producers.tolist()):
            if self.tensor_values[tensor] >= 0:
                found[op].append(tensor)
        return found

    def set_keyword(self, op: int, key: str, value: Any) -> None:
        """Changes an argument, such as the learning rate, of `op` on every device that it is prepared for."""
        self.changed_keywords[op, key] = value
        for (prepared, _), routine in self._routines.items():
            if prepared == op:
                routine.set_keyword(key, value)

    @cached_property
    def changed_keywords(self) -> dict[tuple[int, str], Any]:
        """The arguments that `set_keyword` has changed, by op and keyword."""
        return {}

    @cached_property
    def num_draws(self) -> int:
        """The number of calls that draw random numbers: their seeds are below it."""
        return max((call.seed for calls in self.calls for call in calls), default=-1) + 1

    def redrawn_attention(self) -> Iterator[tuple[int, int]]:
        """Yields (op of a backward pass of attention with dropout, the op whose random numbers it draws again)."""
        for op, calls in enumerate(self.calls):
            sums = {call.args[5].value for call in calls if call.func is ATTENTION_BACKWARD and call.seed >= 0}
            for tensor in self.inputs_of[op]:
                if self.tensor_values[tensor] in sums:
                    yield op, int(self.graph.producers[tensor])

    @cached_property
    def result_tensors(self) -> frozenset[int]:
        """The tensors that `results` reads the loss, outputs and gradients from."""
        refs = [*self.outputs.values(), *self.gradients.values(), *([] if self.loss is None else [self.loss])]
        values = {ref.value for ref in refs}
        return frozenset(
            tensor
            for tensor, (value, part) in enumerate(zip(self.tensor_values, self.tensor_layouts, strict=True))
            if value in values and part is None
        )

    @property
    def adds_in_order(self) -> bool:
        """True if sums are made in the order of PyTorch's own step."""
        return True

    @property
    def piece_tensors(self) -> frozenset[int]:
        """The result tensors that a device holds a piece of after a step."""
        return frozenset()

    @property
    def keepers(self) -> Mapping[int, int]:
        """Ops by tensor: where results are held after a step, if that is not where they are made."""
        return {}

    @property
    def completed_by(self) -> Mapping[int, int]:
        """Ops by tensor: where its content is complete, if that is not the op that makes it."""
        return {}

    @cached_property
    def state_tensors(self) -> frozenset[int]:
        """The tensors of parameters and buffers, which `state_by_name` reads."""
        return frozenset(source.tensor for source in self.sources.values() if source.kind != "input")

    def memory_for(self, tensor: int, device: torch.device | None = None, *, is_pinned: bool = False) -> Tensor:
        """Returns uninitialised memory on `device` for a copy of that tensor, as `run` takes it."""
        part = self.tensor_layouts[tensor]
        if part is None:
            return empty(self.layouts[self.tensor_values[tensor]], device, is_pinned=is_pinned)
        return torch.empty(part.size, dtype=part.dtype, device=device, pin_memory=is_pinned)

    def ref_of(self, tensor: int) -> Ref:
        """Returns the value, or the part of one, that a tensor with content is."""
        return Ref(self.tensor_values[tensor], self.tensor_layouts[tensor])

    def bind(
        self, state: nn.Module | Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[int, Tensor]:
        """Copies parameters, buffers and inputs; returns them by the number of their tensors in the graph. InputError
        names an item that is missing or of another shape or type."""
        return self.bind_state(state) | self.bind_inputs(args, kwargs)

    def bind_state(self, state: nn.Module | Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Copies parameters and buffers alone; see `bind`."""
        return self._bind(dict(named_state(state)) if isinstance(state, nn.Module) else state, is_input=False)

    def bind_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Tensor]:
        """Copies inputs alone; see `bind`."""
        return self._bind(dict(named_inputs(args, kwargs)), is_input=True)

    def _bind(self, tensors: Mapping[str, Tensor], *, is_input: bool) -> dict[int, Tensor]:
        sources = [source for source in self.sources.values() if (source.kind == "input") == is_input]
        return {source.tensor: self._filled(source, tensors) for source in sources}

    def _filled(self, source: StepSource, tensors: Mapping[str, Tensor]) -> Tensor:
        layout = self.layouts[self.tensor_values[source.tensor]]
        memory = torch.zeros_like(empty(layout))
        for name, view in source.views.items():
            tensor = tensors.get(name) if source.constant is None else source.constant
            where = f"{source.kind} {name!r}"
            if tensor is None:
                raise InputError(f"{where}: is missing; give the model's {source.kind}s as they were at capture")
            if tuple(tensor.shape) != view.size or tensor.dtype != view.dtype:
                raise InputError(
                    f"{where}: is {list(tensor.shape)} {tensor.dtype}; {list(view.size)} {view.dtype} was captured, "
                    "give that or capture again"
                )
            view_of(memory, layout, view).copy_(tensor.detach())
        return memory

    def state_by_name(self, held: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Returns parameters and buffers under each of their names, from tensors by number."""
        return {
            name: view_of(held[source.tensor], self.layouts[self.tensor_values[source.tensor]], view)
            for source in self.sources.values()
            if source.kind != "input"
            for name, view in source.views.items()
        }

    @cached_property
    def state_names(self) -> frozenset[str]:
        """The names that `state_by_name` has."""
        return frozenset(name for source in self.sources.values() if source.kind != "input" for name in source.views)

    @cached_property
    def loss_tensors(self) -> frozenset[int]:
        """The tensors that `loss_of` reads."""
        if self.loss is None:
            return frozenset()
        kept = np.flatnonzero(self.graph.is_kept).tolist()
        return frozenset(tensor for tensor in kept if self.tensor_values[tensor] == self.loss.value)

    def loss_of(self, held: Mapping[int, Tensor]) -> Tensor | None:
        """Returns the loss, from the tensors by number that the graph keeps."""
        if self.loss is None:
            return None
        for tensor, content in held.items():
            if self.tensor_values[tensor] == self.loss.value and self.graph.is_kept[tensor]:
                if self.tensor_layouts[tensor] is not None:  # any part of one element is all of it
                    return content.reshape(self.loss.layout.size if self.loss.layout is not None else ())
                return view_of(content, self.layouts[self.loss.value], self.loss.layout)
        raise AssertionError("the graph keeps the loss")

    def replay(
        self,
        state: nn.Module | Mapping[str, Tensor],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        order: Iterable[int] | None = None,
    ) -> Replay:
        """Runs one step on copies of `state` and the inputs, ops in `order` (default: as numbered); `state` is
        unchanged. Each op gets only the tensors that it consumes. InputError if a name or a shape does not fit."""
        held = self.bind(state, args, kwargs or {})
        private: dict[int, Tensor] = {}
        for op in range(self.graph.num_ops) if order is None else order:
            if op in self.sources:
                held.update(self.parts(op, held[self.sources[op].tensor]))
            else:
                held.update(self.run(op, {tensor: held[tensor] for tensor in self.inputs_of[op]}, private))
        return self.results(held)

    def parts(self, op: int, content: Tensor) -> dict[int, Tensor]:
        """Returns the tensors, by number, of the source `op` with the memory `content`."""
        layout = self.layouts[self.tensor_values[self.sources[op].tensor]]
        return {tensor: view_of(content, layout, self.tensor_layouts[tensor]) for tensor in self.outputs_of[op]}

    def results(self, held: Mapping[int, Tensor]) -> Replay:
        """Returns the results of a step, from the tensors by number of `parts` and `run`; others are ignored."""
        loss = {} if self.loss is None else self._read({"": self.loss}, held)
        gradients = self._read(self.gradients, held)
        return Replay(loss.get(""), self.named_outputs(held), gradients, self.state_by_name(held))

    def named_outputs(self, held: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs of a step by name, as `results` does."""
        return self._read(self.outputs, held)

    def _read(self, refs: Mapping[str, Ref], held: Mapping[int, Tensor]) -> dict[str, Tensor]:
        wholes = {
            value: held[tensor]
            for tensor, value in enumerate(self.tensor_values)
            if value >= 0 and self.tensor_layouts[tensor] is None and tensor in held
        }
        return {name: view_of(wholes[ref.value], self.layouts[ref.value], ref.layout) for name, ref in refs.items()}


def named_state(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yields (name, tensor) of every parameter, buffer and plain tensor attribute, under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, part in module.named_modules(remove_duplicate=False):
        for key, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"{path}.{key}" if path else key, value


def named_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Yields (name, tensor) of every tensor in the arguments: `input.0`, `input.tokens`, `input.batch.mask`."""
    for number, item in enumerate(args):
        yield from named_tensors(item, f"input.{number}")
    for key, item in kwargs.items():
        yield from named_tensors(item, f"input.{key}")


def named_tensors(item: Any, name: str) -> Iterable[tuple[str, Tensor]]:
    """Yields (name, tensor) of every tensor in nested lists, tuples, mappings and dataclasses, and nothing else."""
    children: Iterable[tuple[Any, Any]]
    if isinstance(item, Tensor):
        yield name, item
        return
    if isinstance(item, Mapping):
        children = item.items()
    elif hasattr(item, "_fields") or not isinstance(item, (list, tuple)):
        fields = getattr(item, "_fields", None) or getattr(type(item), "__dataclass_fields__", {})
        children = ((field, getattr(item, field)) for field in fields)
    else:
        children = enumerate(item)
    for key, child in children:
        yield from named_tensors(child, f"{name}.{key}" if name else str(key))
