"""Program: what every op of a captured graph executes, in terms of the graph's own tensors; and a replay.

A *value* is the content of one piece of memory between two writes to it; an in-place operator makes a new value in
the same memory. A call's arguments are `Ref`s to values; views are no calls but are made again, from size, stride and
offset, where they are read. The memory of a value is safe to overwrite when the writer's op is ready: the graph's
write-after-read tensors have put every earlier reader before it.
"""

import threading
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from gdp.errors import InputError
from gdp.graph import Graph


class Layout(NamedTuple):
    """Where a tensor lies in its memory, in elements of `dtype`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument: a value as its op made it (`layout` None), or a view of it."""

    value: int
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call of an operator; tensors in `args` and `kwargs` are `Ref`s, also inside lists and tuples."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...] = ()  # the value of each tensor returned; -1: none, or memory that is known already
    writes: tuple[tuple[int, int], ...] = ()  # (value overwritten, value that its memory holds from then on)
    seed: int = -1  # of the random generator; -1: draws nothing
    is_grad_enabled: bool = False  # some kernels save what their backward reads only then (mkldnn_rnn_layer)


@dataclass(frozen=True, slots=True)
class Source:
    """Memory that a step starts from: a parameter, a buffer or an input, under each of its names."""

    kind: str  # parameter, buffer, input
    tensor: int
    views: Mapping[str, Layout]  # by name: tied parameters are several names of one memory
    constant: Tensor | None = None  # content of a buffer that no module holds


@dataclass(frozen=True, slots=True)
class Replay:
    """What one step gave: tensors by name."""

    loss: Tensor | None
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]  # parameters and buffers after the step


_default_generator_lock = threading.Lock()  # for operators that draw from PyTorch's global generator only


@dataclass(frozen=True, eq=False)
class Program:
    """The executable side of a captured `Graph`: N ops and T tensors, numbered as there.

    `run` executes one op. Whatever gives it the tensors that the graph says it consumes, in an order that the graph
    allows, computes exactly what PyTorch would have computed with the same seeds.
    """

    graph: Graph
    calls: tuple[tuple[Call, ...], ...]  # [N] empty for sources
    inputs_of: tuple[tuple[int, ...], ...]  # [N] tensors with content that the op consumes
    outputs_of: tuple[tuple[int, ...], ...]  # [N] tensors with content that the op produces
    tensor_values: tuple[int, ...]  # [T] -1: a control tensor, nothing to ship
    tensor_layouts: tuple[Layout | None, ...]  # [T] None: the whole value; else the part that a view covers
    layouts: Mapping[int, Layout]  # of each value, as it was made
    sources: Mapping[int, Source]  # by op
    private: Mapping[int, tuple[int, ...]]  # by op: optimizer state, zero before the first step, kept between steps
    outputs: Mapping[str, Ref]  # the model's, by name
    loss: Ref | None
    gradients: Mapping[str, Ref]  # by parameter name, as the update reads them

    def run(
        self,
        op: int,
        inputs: Mapping[int, Tensor],
        private: MutableMapping[int, Tensor],
        device: torch.device | None = None,
    ) -> dict[int, Tensor]:
        """Execute `op` and return its tensors by number.

        inputs: the tensors that it consumes, by number; a part may be a view of its base or a contiguous copy.
        private: its device's optimizer state, by value; filled when first needed, then updated in place.
        device: where tensors created from nothing are to be; default: where they were at capture, on the CPU.
        """
        memory = _Memory(self, device, {}, {})
        for tensor in self.inputs_of[op]:
            memory.add(tensor, inputs[tensor])
        for value in self.private.get(op, ()):
            if value not in private:
                layout = self.layouts[value]
                private[value] = torch.zeros_like(empty(layout, device))
            memory.values[value] = private[value]
        for call in self.calls[op]:
            with torch.set_grad_enabled(call.is_grad_enabled):
                memory.run(call)
        return {tensor: memory.tensor(tensor) for tensor in self.outputs_of[op]}

    def bind(
        self, state: nn.Module | Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[int, Tensor]:
        """Copies of parameters, buffers and inputs, by the number of the tensor that each is in the graph.

        InputError names what is missing or of another shape or type.
        """
        given_state = dict(named_state(state)) if isinstance(state, nn.Module) else state
        given_inputs = dict(named_inputs(args, kwargs))
        bound: dict[int, Tensor] = {}
        for source in self.sources.values():
            made = self.layouts[self.tensor_values[source.tensor]]
            memory = torch.zeros_like(empty(made))
            for name, view in source.views.items():
                given = source.constant
                if given is None:
                    given = (given_inputs if source.kind == "input" else given_state).get(name)
                where = f"{source.kind} {name!r}"
                if given is None:
                    raise InputError(f"{where}: is missing; give the model's {source.kind}s as they were at capture")
                if tuple(given.shape) != view.size or given.dtype != view.dtype:
                    raise InputError(
                        f"{where}: is {list(given.shape)} {given.dtype}; {list(view.size)} {view.dtype} was captured, "
                        "give that or capture again"
                    )
                view_of(memory, made, view).copy_(given.detach())
            bound[source.tensor] = memory
        return bound

    def replay(
        self,
        state: nn.Module | Mapping[str, Tensor],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        order: Iterable[int] | None = None,
    ) -> Replay:
        """One step on copies of `state` and the inputs, ops in `order` (default: as numbered); `state` is unchanged.

        Each op sees only the tensors that the graph says it consumes. InputError if a name or a shape does not fit.
        """
        held = self.bind(state, args, kwargs or {})
        private: dict[int, Tensor] = {}
        for op in range(self.graph.num_ops) if order is None else order:
            if op in self.sources:
                held.update(self.parts(op, held[self.sources[op].tensor]))
            else:
                held.update(self.run(op, {tensor: held[tensor] for tensor in self.inputs_of[op]}, private))
        return self.results(held)

    def parts(self, op: int, content: Tensor) -> dict[int, Tensor]:
        """The tensors, by number, of the source `op`, whose memory is `content`."""
        memory = _Memory(self, None, {self.tensor_values[self.sources[op].tensor]: content}, {})
        return {tensor: memory.tensor(tensor) for tensor in self.outputs_of[op]}

    def results(self, held: Mapping[int, Tensor]) -> Replay:
        """What a step gave, from the tensors by number that `parts` and `run` made; more of them do no harm."""
        wholes = {
            value: held[tensor]
            for tensor, value in enumerate(self.tensor_values)
            if value >= 0 and self.tensor_layouts[tensor] is None and tensor in held
        }

        def read(ref: Ref) -> Tensor:
            return view_of(wholes[ref.value], self.layouts[ref.value], ref.layout)

        return Replay(
            None if self.loss is None else read(self.loss),
            {name: read(ref) for name, ref in self.outputs.items()},
            {name: read(ref) for name, ref in self.gradients.items()},
            {
                name: read(Ref(self.tensor_values[source.tensor], view))
                for source in self.sources.values()
                if source.kind != "input"
                for name, view in source.views.items()
            },
        )


@dataclass(slots=True)
class _Memory:
    """What one op has at hand while it runs: whole values, and parts of values that it was given without the rest."""

    program: Program
    device: torch.device | None
    values: dict[int, Tensor]
    parts: dict[int, list[tuple[Layout, Tensor]]]

    def add(self, tensor: int, content: Tensor) -> None:
        value, part = self.program.tensor_values[tensor], self.program.tensor_layouts[tensor]
        if part is None:
            self.values[value] = content
        else:
            self.parts.setdefault(value, []).append((part, content))

    def tensor(self, tensor: int) -> Tensor:
        value = self.program.tensor_values[tensor]
        return view_of(self.values[value], self.program.layouts[value], self.program.tensor_layouts[tensor])

    def run(self, call: Call) -> None:
        args, kwargs = self._fill(call.args), {key: self._fill(value) for key, value in call.kwargs.items()}
        if self.device is not None and "device" in kwargs:
            kwargs["device"] = self.device
        result = _seeded(call, args, kwargs, self.device) if call.seed >= 0 else call.func(*args, **kwargs)
        for old, new in call.writes:
            self.values[new] = self.values[old]
        for value, tensor in zip(call.outputs, leaves(result), strict=True):
            if value >= 0 and value not in self.values:
                layout = self.program.layouts[value]
                # kernels leave out what only a backward pass would read; nothing here reads it then
                self.values[value] = empty(layout, self.device) if tensor is None else _as_recorded(tensor, layout)

    def _fill(self, item: Any) -> Any:
        if type(item) is Ref:
            return self._read(item)
        if type(item) is tuple or type(item) is list:
            return type(item)([self._fill(part) for part in item])
        return item.to(self.device) if isinstance(item, Tensor) and self.device is not None else item

    def _read(self, ref: Ref) -> Tensor:
        whole = self.values.get(ref.value)
        if whole is not None:
            return view_of(whole, self.program.layouts[ref.value], ref.layout)
        assert ref.layout is not None, "the graph gives an op that reads a whole value the whole value"
        key = part_layout(ref.layout)
        part, content = next(entry for entry in self.parts[ref.value] if entry[0] == key)
        if content.stride() == part.stride:
            return content.as_strided(ref.layout.size, ref.layout.stride, content.storage_offset())
        return content.as_strided(ref.layout.size, _compact_strides(ref.layout, part), content.storage_offset())


def named_state(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """(name, tensor) of every parameter, buffer and plain tensor attribute of `module`, under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, part in module.named_modules(remove_duplicate=False):
        for key, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"{path}.{key}" if path else key, value


def named_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in the arguments: `input.0`, `input.tokens`, `input.batch.mask`."""
    for number, item in enumerate(args):
        yield from named_tensors(item, f"input.{number}")
    for key, item in kwargs.items():
        yield from named_tensors(item, f"input.{key}")


def named_tensors(item: Any, name: str) -> Iterable[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in nested lists, tuples, mappings and dataclasses; all else is passed over."""
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


def leaves(result: Any) -> list[Tensor | None]:
    """The tensors of an operator's result, in order, with None for those it left out; numbers are passed over."""
    if isinstance(result, (list, tuple)):
        return [leaf for item in result for leaf in leaves(item)]
    return [result] if result is None or isinstance(result, Tensor) else []


def empty(layout: Layout, device: torch.device | None = None) -> Tensor:
    """Uninitialised memory of this layout."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
    memory = torch.empty(layout.offset + (span if 0 not in layout.size else 0), dtype=layout.dtype, device=device)
    return memory.as_strided(layout.size, layout.stride, layout.offset)


def view_of(whole: Tensor, made: Layout, view: Layout | None) -> Tensor:
    """The part `view` of the memory of `whole`, which was made with the layout `made`; None is all of it."""
    if view is None or view == made:
        return whole
    if view.dtype == whole.dtype:
        return whole.as_strided(view.size, view.stride, view.offset + whole.storage_offset() - made.offset)
    empty_view = torch.empty(0, dtype=view.dtype, device=whole.device)
    return empty_view.set_(whole.untyped_storage(), view.offset, view.size, view.stride)


def part_layout(view: Layout) -> Layout | None:
    """The memory that `view` covers, in the fewest dimensions, outermost first; None if it overlaps itself.

    Views of one part with different shapes (a chunk, the chunk split into heads) have the same `part_layout`.
    """
    strides = zip(view.stride, view.size, strict=True)
    dims = sorted(((stride, size) for stride, size in strides if size != 1 and stride != 0), reverse=True)
    merged: list[tuple[int, int]] = []
    for stride, size in dims:
        if merged and merged[-1][0] < stride * size:
            return None
        if merged and merged[-1][0] == stride * size:
            merged[-1] = (stride, merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return Layout(tuple(size for _, size in merged), tuple(stride for stride, _ in merged), view.offset, view.dtype)


def _compact_strides(view: Layout, part: Layout) -> tuple[int, ...]:
    """The strides of `view` in a contiguous copy of the `part` that it covers."""
    compact, step = {}, 1
    for size, stride in zip(reversed(part.size), reversed(part.stride), strict=True):
        compact[stride] = step
        step *= size

    def stride_in_copy(size: int, stride: int) -> int:
        if size == 1 or stride == 0:
            return 0 if stride == 0 else 1
        unit = max(known for known in compact if known <= stride)
        return stride // unit * compact[unit]

    return tuple(stride_in_copy(size, stride) for size, stride in zip(view.size, view.stride, strict=True))


def _as_recorded(tensor: Tensor, layout: Layout) -> Tensor:
    """`tensor` in the layout that the capture saw, since views are made from it; other kernels may differ."""
    if tensor.stride() == layout.stride or tuple(tensor.shape) != layout.size:
        return tensor
    return empty(layout, tensor.device).copy_(tensor)


def _seeded(call: Call, args: Any, kwargs: dict[str, Any], device: torch.device | None) -> Any:
    if any(argument.name == "generator" for argument in call.func._schema.arguments):
        kwargs["generator"] = torch.Generator(device or "cpu").manual_seed(call.seed)
        return call.func(*args, **kwargs)
    kind = "cuda" if device is None or device.type == "cpu" else device.type
    others = [] if device is None or device.type == "cpu" else [device]
    with _default_generator_lock, torch.random.fork_rng(others, device_type=kind):
        torch.manual_seed(call.seed)
        return call.func(*args, **kwargs)
