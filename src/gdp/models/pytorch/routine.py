"""Routine: an op of a Program prepared for repeated execution on one device. The memory and the view of each argument
are determined once, and become code that a run executes: the overhead of an op counts where ops are small."""

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.replacements import function_for
from gdp.models.pytorch.strides import StridedLayout, as_recorded, compact_strides, empty, part_layout, view_of

if TYPE_CHECKING:
    from gdp.models.pytorch.program import Program

set_grad_enabled = torch._C._set_grad_enabled  # of which `torch.set_grad_enabled` makes an object each time
_default_generator_lock = threading.Lock()  # for operators that draw from PyTorch's global generator only


class OpRoutine(Protocol):
    """An op prepared for repeated execution on one device."""

    def run(
        self, inputs: MutableMapping[int, Any], private: MutableMapping[int, Tensor], seed: int = 0
    ) -> dict[int, Any]:
        """Executes the op on the tensors `inputs`, by number; returns its tensors by number."""

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes an argument, such as the learning rate, of the calls that have it."""


class Routine:
    """The op `op` of `program` on `device` (None: the CPU, as captured).

    It is a function of a few lines, such as

        s0 = inputs[n0]
        s1 = f1(s0, view_of(s0, n2, n3))
        return {n4: s1}

    Numbers, layouts and constants have names, so that routines of like ops share their code."""

    def __init__(self, program: "Program", op: int, device: torch.device | None = None) -> None:
        self.program, self.device = program, device
        self._values: dict[int, str] = {}  # the name of each value that is whole
        self._parts: dict[int, dict[StridedLayout | None, str]] = {}  # the name of each part of a value
        self._num_slots = 0
        self._names: dict[str, Any] = dict(_HELPERS)
        self._keywords: dict[str, list[str]] = {}  # names of constant arguments
        calls = program.calls[op]
        self._grad_modes = [call.is_grad_enabled for call in calls] or [False]
        lines = [f"{self._add_input(tensor)} = inputs[{self._name(tensor)}]" for tensor in program.inputs_of[op]]
        private = [(value, self._new_slot(value)) for value in program.private.get(op, ())]
        copies = {value: ref for value, ref in program.state_copies.items() if ref.value in self._values}
        for value, slot in private:
            key, layout = self._name(value), self._name(program.layouts[value])
            copied = self._read(copies[value]) if value in copies else "None"
            lines.append(f"{slot} = private.get({key})")
            device_name = self._name(device)
            lines.append(f"if {slot} is None: {slot} = private[{key}] = begun({layout}, {copied}, {device_name})")
        for call in calls:
            lines += self._call_lines(in_place(program, op, call) if device is None else call)
        outputs = [f"{self._name(tensor)}: {self._read(program.ref_of(tensor))}" for tensor in program.outputs_of[op]]
        exec(_compiled("\n    ".join((*lines, f"return {{{', '.join(outputs)}}}"))), self._names)
        self._function = self._names["function"]
        self._grad_mode = self._grad_modes[0] if len(set(self._grad_modes)) == 1 else None  # None: changes inside

    def run(self, inputs: Mapping[int, Tensor], private: MutableMapping[int, Tensor], seed: int = 0) -> dict[int, Any]:
        """Executes the op; see `Program.run`."""
        before = torch.is_grad_enabled()
        if before is not self._grad_mode:
            set_grad_enabled(self._grad_modes[0])
        try:
            outputs: dict[int, Any] = self._function(inputs, private, seed)
        finally:
            if before is not self._grad_mode:
                set_grad_enabled(before)
        return outputs

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes an argument, such as the learning rate, of the calls that have it."""
        for name in self._keywords.get(key, ()):
            self._names[name] = value

    # -- names -----------------------------------------------------------------------------------------------------

    def _name(self, item: Any) -> str:
        """Returns a name for a number, a layout or a constant."""
        name = f"n{len(self._names)}"
        self._names[name] = item
        return name

    def _slot(self) -> str:
        self._num_slots += 1
        return f"s{self._num_slots}"

    def _add_input(self, tensor: int) -> str:
        value, part = self.program.tensor_values[tensor], self.program.tensor_layouts[tensor]
        if part is None:
            return self._new_slot(value)
        slot = self._parts.setdefault(value, {})[part] = self._slot()
        return slot

    def _new_slot(self, value: int) -> str:
        slot = self._values[value] = self._slot()
        return slot

    # -- code ------------------------------------------------------------------------------------------------------

    def _call_lines(self, call: Call) -> list[str]:
        """Returns the lines that make a call and name its results."""
        args = [self._argument(item) for item in call.args]
        kwargs = dict(call.kwargs)
        if self.device is not None and "device" in kwargs:
            kwargs["device"] = self.device
        pairs = {key: self._argument(item) for key, item in kwargs.items()}
        for key, name in pairs.items():
            if name in self._names:
                self._keywords.setdefault(key, []).append(name)
        results = self._made_by(call)
        function = self._name(function_for(call.func, self.device))
        lines = [f"set_grad_enabled({call.is_grad_enabled})"] if len(set(self._grad_modes)) > 1 else []
        if call.seed >= 0:
            keywords = ", ".join(f"{key!r}: {name}" for key, name in pairs.items())
            constants = f"{self._name(call)}, [{', '.join(args)}], {{{keywords}}}, {self._name(self.device)}"
            result = f"seeded({function}, {constants}, {self._name(call.seed)} + seed)"
        else:
            result = f"{function}({', '.join((*args, *(f'{key}={name}' for key, name in pairs.items())))})"
        if not any(results):
            return [*lines, result]
        if len(results) > 1:
            slots = ", ".join("_" if item is None else item[0] for item in results)
            layouts = self._name([None if item is None else item[1] for item in results])
            return [*lines, f"{slots}, = recorded({result}, {layouts}, {self._name(self.device)})"]
        assert results[0] is not None
        slot, layout = results[0]
        strides, recorded = self._name(layout.stride), self._name(layout)
        is_one = f"if not isinstance({slot}, Tensor): {slot} = {slot}[0]"
        strided = f"if {slot}.stride() != {strides}: {slot} = as_recorded({slot}, {recorded})"
        return [*lines, f"{slot} = {result}", is_one, strided]

    def _made_by(self, call: Call) -> list[tuple[str, StridedLayout] | None]:
        """Returns, for each tensor that `call` returns, its name and its layout, or None."""
        for old, new in call.writes:
            self._values[new] = self._values[old]
        results: list[tuple[str, StridedLayout] | None] = []
        for value in call.outputs:
            is_new = value >= 0 and value not in self._values
            results.append((self._new_slot(value), self.program.layouts[value]) if is_new else None)
        return results

    def _argument(self, item: Any) -> str:
        """Returns the code of an argument."""
        if type(item) is Ref:
            return self._read(item)
        if type(item) in (tuple, list) and _has_ref(item):
            parts = ", ".join(self._argument(part) for part in item)
            return f"[{parts}]" if type(item) is list else f"({parts},)"
        if isinstance(item, Tensor) and self.device is not None:
            item = item.to(self.device)
        return self._name(item)

    def _read(self, ref: Ref) -> str:
        """Returns the code of a value, or of a view of it."""
        layout, view = self.program.layouts[ref.value], ref.layout
        slot = self._values.get(ref.value)
        if slot is not None:
            if view is None or view == layout:
                return slot
            if view.dtype != layout.dtype:
                return f"view_of({slot}, {self._name(layout)}, {self._name(view)})"
            offset = self._name(view.offset - layout.offset)
            size, stride = self._name(view.size), self._name(view.stride)
            return f"{slot}.as_strided({size}, {stride}, {slot}.storage_offset() + {offset})"
        assert view is not None, "the graph gives an op that reads a whole value the whole value"
        part = part_layout(view)
        assert part is not None, "and one that reads views which overlap themselves, too"
        slot = self._parts[ref.value][part]  # as `part_view`, with strides computed once
        size, stride, compact = (self._name(item) for item in (view.size, view.stride, compact_strides(view, part)))
        strides = f"{stride} if {slot}.stride() == {self._name(part.stride)} else {compact}"
        return f"{slot}.as_strided({size}, {strides}, {slot}.storage_offset())"


@lru_cache(maxsize=4096)
def _compiled(body: str) -> CodeType:
    return compile(f"def function(inputs, private, seed):\n    {body}\n", "<op>", "exec")


def _has_ref(item: Any) -> bool:
    return type(item) is Ref or (type(item) in (tuple, list) and any(map(_has_ref, item)))


def _begun(layout: StridedLayout, copied: Tensor | None, device: torch.device | None) -> Tensor:
    """Returns new optimizer state: zeros, or a copy of a parameter."""
    state = torch.zeros_like(empty(layout, device))
    return state if copied is None else state.copy_(copied)


def _recorded(
    result: Any, layouts: Sequence[StridedLayout | None], device: torch.device | None
) -> Iterator[Tensor | None]:
    """Yields the tensors of a result in the layouts of the capture; None for a tensor that nothing reads."""
    for layout, tensor in zip(layouts, leaves(result), strict=True):
        if layout is None:
            yield None
        else:  # kernels omit tensors that only a backward pass would read, and no op reads
            yield empty(layout, device) if tensor is None else as_recorded(tensor, layout)


def in_place(program: "Program", op: int, call: Call) -> Call:
    """Returns the call; a sum of gradients is made in the memory of a term that nothing else reads. Autograd does so; a
    capture holds on to all tensors, so that it sees a sum in new memory. The bits are the same."""
    if call.func is not torch.ops.aten.add.Tensor or len(call.args) != 2 or call.kwargs or len(call.outputs) != 1:
        return call
    (value,) = call.outputs
    for term, other in (call.args, call.args[::-1]):
        if is_alone(program, op, term) and term != other and program.layouts[term.value] == program.layouts.get(value):
            return replace(call, func=torch.ops.aten.add_.Tensor, args=(term, other), outputs=(value,))
    return call


def is_alone(program: "Program", op: int, ref: Any) -> bool:
    """Returns whether `op` alone reads the memory of a whole value, which another op has made anew."""
    if type(ref) is not Ref or ref.layout is not None:
        return False
    graph = program.graph
    for tensor in program.inputs_of[op]:
        if program.tensor_values[tensor] == ref.value and program.tensor_layouts[tensor] is None:
            producer = int(graph.producers[tensor])
            tensors = [other for other in program.outputs_of[producer] if program.tensor_values[other] == ref.value]
            return (
                tensors == [tensor]
                and graph.consumers_of(tensor).tolist() == [op]
                and not graph.is_kept[tensor]
                and tensor not in program.result_tensors
                and any(ref.value in call.outputs for call in program.calls[producer])
            )
    return False


def leaves(result: Any) -> list[Tensor | None]:
    """Returns the tensors of an operator's result, in order, with None for omitted ones; numbers are left out."""
    if isinstance(result, (list, tuple)):
        return [leaf for item in result for leaf in leaves(item)]
    return [result] if result is None or isinstance(result, Tensor) else []


def _seeded(
    func: Callable[..., Any], call: Call, args: Any, kwargs: dict[str, Any], device: torch.device | None, seed: int
) -> Any:
    if any(argument.name == "generator" for argument in call.func._schema.arguments):
        own = torch.Generator(device or "cpu").manual_seed(seed)
        return func(*args, **(kwargs | {"generator": own}))
    generator = torch.default_generator
    if device is not None and device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    with _default_generator_lock:  # `torch.manual_seed` would seed, and queue for later, much more than this one
        state = generator.get_state()
        try:
            generator.manual_seed(seed)
            return func(*args, **kwargs)
        finally:
            generator.set_state(state)


_HELPERS: Mapping[str, Any] = {
    "Tensor": Tensor,
    "as_recorded": as_recorded,
    "begun": _begun,
    "recorded": _recorded,
    "seeded": _seeded,
    "set_grad_enabled": set_grad_enabled,
    "view_of": view_of,
}
