"""Routine: an op of a Program prepared for repeated execution on one device.

The memory and the view of each argument are determined once; a run fills in the tensors and calls the kernels. An op
works on a list of slots: its inputs, its optimizer state, and the results of its calls.
"""

import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gdp.models.pytorch.replacements import function_for
from gdp.models.pytorch.strides import StridedLayout, as_recorded, compact_strides, empty, part_layout, view_of

if TYPE_CHECKING:
    from gdp.models.pytorch.program import Call, Program, Ref

Slots = list[Any]
Reader = Callable[[Slots], Any]

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
    """The op `op` of `program` on `device` (None: the CPU, as captured)."""

    def __init__(self, program: "Program", op: int, device: torch.device | None = None) -> None:
        self.program, self.device = program, device
        self._values: dict[int, int] = {}  # slot of each value that is whole
        self._parts: dict[int, dict[StridedLayout | None, int]] = {}  # slot of each part of a value
        self._num_slots = 0
        self._inputs = [(tensor, self._add_input(tensor)) for tensor in program.inputs_of[op]]
        self._private = [(value, self._new_slot(value)) for value in program.private.get(op, ())]
        copies = {value: ref for value, ref in program.state_copies.items() if ref.value in self._values}
        self._copied = {value: self._reader(copies[value]) for value, _ in self._private if value in copies}
        self._calls = [_BoundCall(call, self) for call in program.calls[op]]
        self._outputs = [(tensor, self._reader(program.ref_of(tensor))) for tensor in program.outputs_of[op]]

    def run(self, inputs: Mapping[int, Tensor], private: MutableMapping[int, Tensor], seed: int = 0) -> dict[int, Any]:
        """Executes the op; see `Program.run`."""
        slots: Slots = [None] * self._num_slots
        for tensor, slot in self._inputs:
            slots[slot] = inputs[tensor]
        for value, slot in self._private:
            if value not in private:
                private[value] = torch.zeros_like(empty(self.program.layouts[value], self.device))
                if value in self._copied:
                    private[value].copy_(self._copied[value](slots))
            slots[slot] = private[value]
        is_grad_enabled = torch.is_grad_enabled()
        try:
            for call in self._calls:
                call.run(slots, seed)
        finally:
            torch.set_grad_enabled(is_grad_enabled)
        return {tensor: read(slots) for tensor, read in self._outputs}

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes an argument, such as the learning rate, of the calls that have it."""
        for call in self._calls:
            call.set_keyword(key, value)

    # -- slots -----------------------------------------------------------------------------------------------------

    def _add_input(self, tensor: int) -> int:
        value, part = self.program.tensor_values[tensor], self.program.tensor_layouts[tensor]
        if part is None:
            return self._new_slot(value)
        slot = self._parts.setdefault(value, {})[part] = self._num_slots
        self._num_slots += 1
        return slot

    def _new_slot(self, value: int) -> int:
        slot = self._values[value] = self._num_slots
        self._num_slots += 1
        return slot

    def made_by(self, call: "Call") -> list[tuple[int, StridedLayout] | None]:
        """Returns, for each tensor that `call` returns, the slot to keep it in and its layout, or None."""
        for old, new in call.writes:
            self._values[new] = self._values[old]
        made: list[tuple[int, StridedLayout] | None] = []
        for value in call.outputs:
            is_new = value >= 0 and value not in self._values
            made.append((self._new_slot(value), self.program.layouts[value]) if is_new else None)
        return made

    def reader(self, item: Any) -> Reader | None:
        """Returns a function that makes an argument from the slots; None if the argument is constant."""
        from gdp.models.pytorch.program import Ref

        if type(item) is Ref:
            return self._reader(item)
        if type(item) is tuple or type(item) is list:
            kind, readers = type(item), [self.reader(part) for part in item]
            if any(readers):
                return lambda slots: kind(
                    [part if read is None else read(slots) for part, read in zip(item, readers, strict=True)]
                )
        elif isinstance(item, Tensor) and self.device is not None:
            moved = item.to(self.device)
            return lambda _slots: moved
        return None

    def _reader(self, ref: "Ref") -> Reader:
        made, view = self.program.layouts[ref.value], ref.layout
        slot = self._values.get(ref.value)
        if slot is not None:
            whole = slot
            if view is None or view == made:
                return lambda slots: slots[whole]
            return lambda slots: view_of(slots[whole], made, view)
        assert view is not None, "the graph gives an op that reads a whole value the whole value"
        part = part_layout(view)
        assert part is not None, "and one that reads views which overlap themselves, too"
        at, (size, stride), compact = self._parts[ref.value][part], view[:2], compact_strides(view, part)

        def read_part(slots: Slots) -> Tensor:  # as `part_view`, with strides computed once
            content: Tensor = slots[at]
            return content.as_strided(
                size, stride if content.stride() == part.stride else compact, content.storage_offset()
            )

        return read_part


class _BoundCall:
    """A call with the slots of its arguments and results."""

    __slots__ = ("_args", "_call", "_device", "_func", "_kwargs", "_made", "_read_args", "_read_kwargs", "_results")

    def __init__(self, call: "Call", routine: Routine) -> None:
        self._call, self._func, self._device = call, function_for(call.func, routine.device), routine.device
        self._args, self._kwargs = list(call.args), dict(call.kwargs)
        if routine.device is not None and "device" in call.kwargs:
            self._kwargs["device"] = routine.device
        args = [(at, routine.reader(item)) for at, item in enumerate(call.args)]
        kwargs = [(key, routine.reader(item)) for key, item in call.kwargs.items()]
        self._read_args = [(at, read) for at, read in args if read is not None]
        self._read_kwargs = [(key, read) for key, read in kwargs if read is not None]
        self._made = routine.made_by(call)

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes a constant argument, if the call has one of that name."""
        if key in self._kwargs:
            self._kwargs = {**self._kwargs, key: value}

    def run(self, slots: Slots, seed: int) -> None:
        args, kwargs, call = self._args.copy(), self._kwargs, self._call
        for at, read in self._read_args:
            args[at] = read(slots)
        if self._read_kwargs:
            kwargs = kwargs | {key: read(slots) for key, read in self._read_kwargs}
        if torch.is_grad_enabled() != call.is_grad_enabled:
            torch.set_grad_enabled(call.is_grad_enabled)
        if call.seed >= 0:
            result = _seeded(self._func, call, args, kwargs, self._device, call.seed + seed)
        else:
            result = self._func(*args, **kwargs)
        made = self._made
        if len(made) == 1:
            if made[0] is not None:
                slots[made[0][0]] = as_recorded(result if isinstance(result, Tensor) else result[0], made[0][1])
            return
        for target, tensor in zip(made, leaves(result), strict=True):
            if target is not None:
                slot, layout = target
                # kernels omit tensors that only a backward pass would read, and no op reads
                slots[slot] = empty(layout, self._device) if tensor is None else as_recorded(tensor, layout)


def leaves(result: Any) -> list[Tensor | None]:
    """Returns the tensors of an operator's result, in order, with None for omitted ones; numbers are left out."""
    if isinstance(result, (list, tuple)):
        return [leaf for item in result for leaf in leaves(item)]
    return [result] if result is None or isinstance(result, Tensor) else []


def _seeded(
    func: Callable[..., Any], call: "Call", args: Any, kwargs: dict[str, Any], device: torch.device | None, seed: int
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
