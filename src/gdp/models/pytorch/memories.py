"""The memories of a step that is recorded: its sources, the values that memories hold, and the ops that write them.

Tensors are known by their memory (storage) alone, so views need no record: a tensor is a value plus a layout. Each
write to a memory starts a new value. In-place operators fall in three cases:

- The memory belongs to a parameter or buffer. The writer joins the owner's group, since it can only run on the memory's
  device. Its new value is a `resident` tensor of the writer: nothing is allocated, and later readers read this tensor.
- No op has read the old value. The writer becomes one more call of the op that made it (conv and relu_ are one op), if
  all its other inputs exist by then; an op without inputs (zeros, empty) moves to the writer's place instead.
- Otherwise (`x += late`, writes to a tensor that was read) the writer is an op with a tensor of its own. The old one is
  freed when the writer is done, so the model counts both during that one op.

Writers of the first and third kind follow all readers of the old value, so that overwriting is safe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from gdp.costs.collectives import COLLECTIVE
from gdp.models.pytorch.bytes_accessed import StoredMemories
from gdp.models.pytorch.op_records import PENDING, OpRecord, ValueRecord, dtype_name, layout_of
from gdp.models.pytorch.program import named_state
from gdp.models.pytorch.recorded_calls import Ref
from gdp.models.pytorch.strides import StridedLayout
from gdp.models.pytorch.traits import BLANKS
from gdp.models.stored_weights import StoredWeight

HAS_HOST_TENSORS = "gdp_has_host_tensors"
"""The attribute of a fake mode some of whose tensors a model has sent to the host."""


@dataclass(eq=False, slots=True)
class _Memory:
    storage: torch.UntypedStorage  # held, so that its address stays its own
    value: int
    is_on_host: bool = False  # the model has sent it there


class Memories:
    """The ops and values recorded so far, and the value that each memory holds at present."""

    def __init__(self, fake_mode: FakeTensorMode, stored: Mapping[str, StoredWeight]) -> None:
        self.records: list[OpRecord] = []
        self.values: list[ValueRecord] = []
        self.stored = StoredMemories()
        self._stored_weights = stored  # by parameter name: weights that are stored in fewer bits
        self.fake_mode = fake_mode
        self._held: dict[int, _Memory] = {}  # by address
        self._attributes: dict[int, tuple[str, Tensor]] = {}  # by address: attributes of modules, adopted when used
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: a real tensor met on the way, its fake
        self._num_constants = 0

    # -- sources ---------------------------------------------------------------------------------------------------

    def add_source(self, kind: str, name: str, tensor: Tensor, constant: Tensor | None = None) -> None:
        """Adds `tensor` as the memory, or part of it, of a parameter, buffer or input, under one of its names."""
        storage = tensor.untyped_storage()
        layout = layout_of(tensor)
        memory = self._held.get(storage._cdata)
        if memory is None:
            num_bytes = storage.nbytes()
            itemsize = tensor.element_size()
            whole = layout
            if tensor.numel() * itemsize != num_bytes or layout.offset:
                whole = StridedLayout((num_bytes // itemsize,), (1,), 0, tensor.dtype)
            elif name in self._stored_weights:
                self.stored.add(storage, self._stored_weights[name])
                num_bytes = self._stored_weights[name].num_bytes
            module = name.rpartition(".")[0] if kind != "input" else ""
            record = OpRecord(len(self.records), kind, module, "forward", name, source=kind, constant=constant)
            record.dtype = dtype_name([tensor])
            record.resident_bytes = num_bytes if kind != "input" else 0
            self.records.append(record)
            memory = self.new_value(storage, ValueRecord(record, whole, num_bytes, record if kind != "input" else None))
        self.values[memory.value].producer.views[name] = layout

    def add_module(self, module: nn.Module, prefix: str = "") -> None:
        """Adds the parameters and buffers of a module, with its path before their names; notes plain attributes."""
        registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for path, parameter in module.named_parameters(prefix, remove_duplicate=False):
            self.add_source("parameter", path, parameter)
        for path, buffer in module.named_buffers(prefix, remove_duplicate=False):
            self.add_source("buffer", path, buffer)
        for path, tensor in named_state(module):
            if id(tensor) not in registered:
                self.name_attribute(f"{prefix}.{path}" if prefix else path, tensor)

    def name_attribute(self, name: str, tensor: Tensor) -> None:
        """Notes that `tensor` is a plain attribute of a module: a buffer if an operator reads it."""
        self._attributes.setdefault(tensor.untyped_storage()._cdata, (name, tensor))

    def add_state(self, tensor: Tensor, parameter: Tensor) -> bool:
        """Adds memory that an optimizer keeps beside a parameter, unless it is known; single numbers count no bytes."""
        storage, owner = tensor.untyped_storage(), self.values[self.ref(parameter).value].owner
        if storage._cdata in self._held or owner is None:
            return False
        num_bytes = storage.nbytes() if tensor.dim() else 0
        self.new_value(storage, ValueRecord(owner, layout_of(tensor), num_bytes, owner))
        owner.resident_bytes += num_bytes
        return True

    def _adopt(self, tensor: Tensor, constant: Tensor | None = None) -> _Memory:
        """Adds memory that is no registered source: a module's attribute, or a constant in its code."""
        address = tensor.untyped_storage()._cdata
        if address in self._attributes:
            name, tensor = self._attributes[address]
        else:
            name = f"constant_{self._num_constants}"
            self._num_constants += 1
        self.add_source("buffer", name, tensor, constant)
        return self._held[address]

    # -- tensors -----------------------------------------------------------------------------------------------------

    def ref(self, tensor: Tensor) -> Ref:
        """Returns the value and layout of `tensor` at present."""
        memory = self._held.get(tensor.untyped_storage()._cdata)
        if memory is None:
            memory = self._adopt(tensor)
        layout = layout_of(tensor)
        return Ref(memory.value, None if layout == self.values[memory.value].layout else layout)

    def value_of(self, tensor: Tensor) -> int | None:
        """Returns the value in the memory of `tensor` at present; None for a memory that is not known."""
        memory = self._held.get(tensor.untyped_storage()._cdata)
        return None if memory is None else memory.value

    def is_on_host(self, tensor: Tensor) -> bool:
        """Returns whether the model has sent the memory of `tensor` to the host."""
        if HAS_HOST_TENSORS not in vars(self.fake_mode):
            return False
        memory = self._held.get(tensor.untyped_storage()._cdata)
        return memory is not None and memory.is_on_host

    def set_on_host(self, tensor: Tensor, is_on_host: bool = True) -> None:
        """Notes where the memory of `tensor` is."""
        memory = self._held.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            memory.is_on_host = is_on_host
            vars(self.fake_mode)[HAS_HOST_TENSORS] = True

    def constant_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the content of a single number that is made from nothing, as by `torch.zeros(1)`; else None."""
        value = self.value_of(tensor)
        if value is None or tensor.numel() != 1 or tensor.requires_grad:
            return None
        calls = self.values[value].producer.calls
        if len(calls) != 1 or calls[0].seed >= 0 or any(isinstance(x, (Ref, list, tuple)) for x in calls[0].args[1:]):
            return None
        with _disable_current_modes():
            return None if isinstance(calls[0].args[0], Ref) else calls[0].func(*calls[0].args, **calls[0].kwargs)

    def refs(self, item: Any, read: list[tuple[Ref, Tensor]]) -> Any:
        """Returns an argument with `Ref`s for tensors, which are added to `read`."""
        if isinstance(item, Tensor):
            ref = self.ref(item)
            read.append((ref, item))
            return ref
        if isinstance(item, (tuple, list)):
            return type(item)([self.refs(part, read) for part in item]) if item else item
        return item

    def faked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns arguments with fake tensors, known as constants, in place of real ones."""
        return tuple(self._fake(item) for item in args) if any(map(_has_real, args)) else args

    def _fake(self, item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return type(item)([self._fake(part) for part in item])
        if not isinstance(item, Tensor) or isinstance(item, FakeTensor):
            return item
        if id(item) not in self._fakes:
            with self.fake_mode:
                fake = torch.empty_strided(tuple(item.shape), item.stride(), dtype=item.dtype)
            self._fakes[id(item)] = (item, fake)
            self._adopt(fake, item)
        return self._fakes[id(item)][1]

    def release(self, value: int | None) -> None:
        """Notes that a value is there until now, since a checkpoint has kept it: the last op is to read it."""
        last = self.records[-1]
        if value is not None and last.phase == "backward" and self.values[value].producer is not last:
            last.reads.setdefault(value, {})[None] = None
            self.values[value].readers.append(last)

    # -- values ------------------------------------------------------------------------------------------------------

    def new_value(self, storage: torch.UntypedStorage, value: ValueRecord) -> _Memory:
        """Adds the first value of a memory."""
        self.values.append(value)
        memory = self._held[storage._cdata] = _Memory(storage, len(self.values) - 1)
        if value.producer is not PENDING:
            value.producer.outputs.append(memory.value)
        return memory

    def commit(self, record: OpRecord, written: Sequence[Tensor]) -> None:
        """Appends `record`, or joins it with the maker of the memory that it writes (see the module's docstring)."""
        layouts = {tensor.untyped_storage()._cdata: layout_of(tensor) for tensor in written}
        overwritten = list(layouts)
        maker = self._maker_to_join(record, [self._held[address].value for address in overwritten])
        new_values: list[tuple[int, int]] = []
        for address in overwritten:
            memory = self._held[address]
            old = self.values[memory.value]
            new_values.append((memory.value, len(self.values)))
            if maker is None:
                record.reads.setdefault(memory.value, {})[None] = None
                record.overwrites.append(memory.value)
                if old.owner is not None:
                    record.owners.append(old.owner)
            num_bytes = memory.storage.nbytes()
            layout = old.layout if num_bytes == old.num_bytes else layouts[address]  # `out=` resizes
            self.values.append(ValueRecord(record, layout, num_bytes, old.owner))
            record.outputs.append(len(self.values) - 1)
            memory.value = len(self.values) - 1
        if new_values:
            record.calls[-1] = replace(record.calls[-1], writes=tuple(new_values))
        if maker is not None:
            record = self._joined(maker, record)
        else:
            self.records.append(record)
        for value in record.outputs:
            self.values[value].producer = record
        for value in record.reads:
            readers = self.values[value].readers
            if not readers or readers[-1] is not record:
                readers.append(record)

    def _maker_to_join(self, record: OpRecord, overwritten: list[int]) -> OpRecord | None:
        """Returns the op that `record`, which overwrites these values, becomes a call of; None: an op of its own."""
        if len(overwritten) != 1 or record.outputs or record.phase == "update":
            return None
        old = self.values[overwritten[0]]
        maker = old.producer
        if old.owner is not None or maker.source or old.readers or maker.phase != record.phase:
            return None
        if maker.kind.startswith(COLLECTIVE):  # an exchange is one call, which all ranks take part in
            return None
        can_wait = not maker.reads and maker.outputs == overwritten
        return maker if can_wait or self._is_available(record, maker) else None

    def _is_available(self, record: OpRecord, maker: OpRecord) -> bool:
        """Returns whether `record` could run at the place of `maker`: all that it reads is made there or before."""
        return all(self.values[value].producer.position <= maker.position for value in record.reads)

    def _joined(self, maker: OpRecord, writer: OpRecord) -> OpRecord:
        """Joins two ops into one, at the maker's place, or at the writer's if that reads values made in between."""
        whole = maker
        old = writer.calls[-1].writes[0][0]
        if not self._is_available(writer, maker):
            whole = replace(maker, position=writer.position, reads={})
            maker.outputs, maker.calls = [], []
            self.records.append(whole)
        if maker.kind in BLANKS:
            whole.kind, whole.module, whole.dtype, whole.role = writer.kind, writer.module, writer.dtype, writer.role
        whole.calls += writer.calls
        whole.outputs = [value for value in whole.outputs if value != old] + writer.outputs
        whole.flops += writer.flops
        whole.bytes_accessed += writer.bytes_accessed
        whole.shapes = "; ".join(filter(None, (whole.shapes, writer.shapes)))
        for value, layouts in writer.reads.items():
            if self.values[value].producer is not maker:
                whole.reads.setdefault(value, {}).update(layouts)
        return whole


def _has_real(item: Any) -> bool:
    if isinstance(item, Tensor):
        return not isinstance(item, FakeTensor)
    return isinstance(item, (list, tuple)) and any(map(_has_real, item))
