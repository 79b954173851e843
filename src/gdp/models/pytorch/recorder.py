"""Recording: a dispatch mode that records every operator of a step, with its memory, its module and its order.

Tensors are known by their memory (storage) alone, so views need no record: a tensor is a value plus a layout. Each
write to a memory starts a new value. In-place operators fall in three cases:

- The memory belongs to a parameter or buffer. The writer joins the owner's group, since it can only run on the memory's
  device. Its new value is a `resident` tensor of the writer: nothing is allocated, and later readers read this tensor.
- No op has read the old value. The writer becomes one more call of the op that made it (conv and relu_ are one op), if
  all its other inputs exist by then; an op without inputs (zeros, empty) moves to the writer's place instead.
- Otherwise (`x += late`, writes to a tensor that was read) the writer is an op with a tensor of its own. The old one is
  freed when the writer is done, so the model counts both during that one op.

Writers of the first and third kind follow all readers of the old value, so that overwriting is safe.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gdp.errors import InputError
from gdp.models.pytorch.bytes_accessed import StoredMemories, bytes_accessed, is_grouped_product
from gdp.models.pytorch.flops import FORMULA, UNKNOWN, count_flops
from gdp.models.pytorch.op_records import (
    PENDING,
    OpRecord,
    ValueRecord,
    dtype_name,
    experts_per_token,
    joined,
    layout_of,
    maker_to_join,
)
from gdp.models.pytorch.optimizers import Rule, StatePart
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.replacements import LSTM, workspace_bytes
from gdp.models.pytorch.routine import leaves
from gdp.models.pytorch.running_module import RunningModule
from gdp.models.pytorch.strides import StridedLayout
from gdp.models.pytorch.traits import LIFTS, MATERIALISED, Traits, traits_of
from gdp.models.stored_weights import StoredWeight

aten = torch.ops.aten
# types of grouped products that PyTorch computes and has no shapes for
_UNKNOWN_TO_GROUPS = (torch.float32, torch.float16)
_DEVICE_QUERY = torch.ops.prim.device.default
_LISTS = "aten::_foreach_"  # of tensors, all treated alike


@dataclass(eq=False, slots=True)
class _Memory:
    storage: torch.UntypedStorage  # held, so that its address stays its own
    value: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators dispatched inside `with fake_mode, recorder:`.

    The caller sets `phase`, or `finds_phases`: then an operator that autograd calls is backward, one that works on
    gradients or an optimizer's state without recording gradients is update, and all others are forward.
    """

    def __init__(self, fake_mode: FakeTensorMode, stored: Mapping[str, StoredWeight] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self.stored = stored or {}  # by parameter name: weights that are stored in fewer bits
        self._stored_memories = StoredMemories()
        self.phase = "forward"
        self.records: list[OpRecord] = []
        self.values: list[ValueRecord] = []
        self.covered: Counter[str] = Counter()
        self.uncovered: Counter[str] = Counter()
        self.notes: dict[str, None] = {}  # approximations, a sentence each
        self.running = RunningModule()
        self._memories: dict[int, _Memory] = {}
        self._names: dict[int, tuple[str, Tensor]] = {}  # by memory: plain attributes of modules, adopted when used
        self.state_parts: dict[int, tuple[str, Ref | None]] = {}  # by value: key, the parameter that it starts as
        self.refusals: dict[str, None] = {}  # reasons why the step cannot be executed
        self.finds_phases = False  # else the caller sets `phase`
        self.is_backward = False  # if it finds them: inside `backward`
        self._homes: dict[int, str] = {}  # by memory: the module of a gradient, of optimizer state, or made of those
        self._is_updating = False
        self._update_states: dict[tuple[int, str], list[int]] = {}  # by parameter and optimizer: values
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a real tensor met on the way, its fake
        self._traits: dict[OpOverload, Traits] = {}
        self._num_draws = 0
        self._seeds: dict[int, int] = {}  # by value: of the call that drew random numbers for it
        self._num_constants = 0

    # -- sources ---------------------------------------------------------------------------------------------------

    def add_source(self, kind: str, name: str, tensor: Tensor, constant: Tensor | None = None) -> None:
        """Adds `tensor` as the memory, or part of it, of a parameter, buffer or input, under one of its names."""
        storage = tensor.untyped_storage()
        layout = layout_of(tensor)
        memory = self._memories.get(storage._cdata)
        if memory is None:
            num_bytes = storage.nbytes()
            itemsize = tensor.element_size()
            whole = layout
            if tensor.numel() * itemsize != num_bytes or layout.offset:
                whole = StridedLayout((num_bytes // itemsize,), (1,), 0, tensor.dtype)
            elif name in self.stored:
                self._stored_memories.add(storage, self.stored[name])
                num_bytes = self.stored[name].num_bytes
            module = name.rpartition(".")[0] if kind != "input" else ""
            record = OpRecord(len(self.records), kind, module, "forward", name, source=kind, constant=constant)
            record.dtype = dtype_name([tensor])
            record.resident_bytes = num_bytes if kind != "input" else 0
            self.records.append(record)
            memory = self._new_value(
                storage, ValueRecord(record, whole, num_bytes, record if kind != "input" else None)
            )
        self.values[memory.value].producer.views[name] = layout

    def name_attribute(self, name: str, tensor: Tensor) -> None:
        """Notes that `tensor` is a plain attribute of a module: a buffer if an operator reads it."""
        self._names.setdefault(tensor.untyped_storage()._cdata, (name, tensor))

    def add_gradient(self, parameter: Tensor) -> None:
        """Notes that the memory of a parameter's gradient belongs to the update of the parameter."""
        assert parameter.grad is not None
        home = self.running.of_parameter(parameter)
        self._homes[parameter.grad.untyped_storage()._cdata] = home

    def add_state(self, tensor: Tensor, parameter: Tensor) -> None:
        """Adds memory that an optimizer keeps beside a parameter; single numbers count no bytes."""
        storage, owner = tensor.untyped_storage(), self.values[self.ref(parameter).value].owner
        if storage._cdata in self._memories or owner is None:
            return
        num_bytes = storage.nbytes() if tensor.dim() else 0
        self._new_value(storage, ValueRecord(owner, layout_of(tensor), num_bytes, owner))
        owner.resident_bytes += num_bytes
        self._homes[storage._cdata] = self.running.of_parameter(parameter)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Makes all operators meanwhile update ones."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    # -- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_QUERY:
            return args[0].device
        kwargs = kwargs or {}
        if func in LIFTS and type(args[0]) is not FakeTensor:
            return self._record_constant(func, args[0])
        if func._schema.name.startswith(_LISTS) and any(len(item) > 1 for item in args if isinstance(item, list)):
            return self._one_by_one(func, types, args, kwargs)
        if self.finds_phases:
            self.phase = self._current_phase(func, args)
        func = MATERIALISED.get(func, func)
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = traits_of(func)
        args = self._all_fake(args)
        if kwargs:
            kwargs = dict(zip(kwargs, self._all_fake(tuple(kwargs.values())), strict=True))
        module = self._locate(args)
        if traits.is_view:
            return func(*args, **kwargs)

        read: list[tuple[Ref, Tensor]] = []
        template = self._template(args, read)
        keyword_template = {key: self._template(value, read) for key, value in kwargs.items()} if kwargs else kwargs
        written = traits.written(args, kwargs)
        if func is aten._grouped_mm.default and args[0].dtype in _UNKNOWN_TO_GROUPS:
            halves = [item.to(torch.bfloat16) for item in args[:2]]
            result = func(*halves, *args[2:], **kwargs).to(args[0].dtype)
        else:
            with _plain_types():
                result = func(*args, **kwargs)
        if func is LSTM and torch.is_grad_enabled():  # without a kernel, the workspace has no size
            workspace = result[3].new_empty(workspace_bytes(args[0], hidden_size=args[10]))
            result = *result[:3], workspace

        returned: list[int] = []
        fresh: dict[int, Tensor] = {}
        for tensor in leaves(result):
            if tensor is None:
                returned.append(-1)
                continue
            if tensor.layout is not torch.strided:
                where = f" in module {module!r}" if module else ""
                raise InputError(f"{traits.kind}{where}: makes a {tensor.layout} tensor; have it dense (sparse=False)")
            storage = tensor.untyped_storage()
            if storage._cdata not in self._memories:
                self._new_value(storage, ValueRecord(PENDING, layout_of(tensor), storage.nbytes(), None))
                fresh[storage._cdata] = tensor
            returned.append(self._memories[storage._cdata].value if storage._cdata in fresh else -1)
        made = list(fresh.values())
        if not fresh and not written:
            return result

        seed = -1
        if traits.draws(args, kwargs):
            seed = self._num_draws
            self._num_draws += 1
            self._seeds.update(dict.fromkeys(returned, seed))
        elif traits.draws_again(args, kwargs):
            seed = next((self._seeds[ref.value] for ref in reversed(template) if _is_in(ref, self._seeds)), -1)
        if traits.reads_shape_only and made:
            calls, read = self._filled(traits, args, made[0], returned[0], seed), []
        else:
            calls = [Call(func, template, keyword_template, tuple(returned), (), seed, torch.is_grad_enabled())]
        flops, how = count_flops(func, args, kwargs, made or written)
        if how == UNKNOWN:
            self.uncovered[traits.kind] += 1
        else:
            self.covered[how] += 1
        record = OpRecord(len(self.records), traits.kind, module, self.phase, calls=calls, flops=flops)
        distinct: dict[tuple[int, StridedLayout | None], Tensor] = {}
        for ref, tensor in read:
            distinct.setdefault((ref.value, ref.layout), tensor)
            record.reads.setdefault(ref.value, {})[ref.layout] = None
        record.dtype = dtype_name((*made, *written, *distinct.values()))
        if how == FORMULA:
            record.dtype = self._stored_memories.arithmetic(distinct.values()) or record.dtype
        per_token = experts_per_token(self.values, record) if is_grouped_product(func) else None
        record.bytes_accessed = bytes_accessed(
            func,
            args,
            list(distinct.values()),
            made,
            written,
            stored_bytes=self._stored_memories.num_bytes,
            per_token=per_token,
        )
        record.outputs = [value for value in dict.fromkeys(returned) if value >= 0]
        if self.phase == "update":
            self._homes.update(dict.fromkeys(fresh, module))
        self._commit(record, written)
        return result

    def record_update(self, name: str, parameter: Tensor, rule: Rule) -> Ref:
        """Records the update of one parameter, in its memory, by its present gradient; returns that gradient.

        The optimizer's state is made with the first update of the parameter by `rule` and kept for further ones.
        """
        assert parameter.grad is not None
        weight, gradient = self.ref(parameter), self.ref(parameter.grad)
        owner = self.values[weight.value].owner
        assert owner is not None, "a parameter's memory is resident"
        module = self.running.of_parameter(parameter)
        record = OpRecord(len(self.records), rule.kind, module, "update", f"{name}.update")
        record.dtype = dtype_name([parameter])
        layout = layout_of(parameter)
        key = id(parameter), rule.name
        if key not in self._update_states:
            self._update_states[key] = self._new_state(rule.state(layout), weight, owner)
        record.private = self._update_states[key]

        def widened() -> int:
            copy = layout._replace(offset=0, dtype=torch.float32)
            self.values.append(ValueRecord(record, copy, 4 * parameter.numel(), None))
            return len(self.values) - 1

        record.calls = rule.calls(weight, gradient, [Ref(value) for value in record.private], widened)
        record.flops = rule.flops(layout)
        record.bytes_accessed = rule.bytes_accessed(layout, layout_of(parameter.grad))
        record.reads = {weight.value: {None: None}}
        record.reads.setdefault(gradient.value, {})[gradient.layout] = None
        self._commit(record, [parameter])
        self.covered[FORMULA] += 1
        if rule.refusal:
            self.refusals[rule.refusal] = None
        return gradient

    def _new_state(self, parts: Sequence[StatePart], weight: Ref, owner: OpRecord) -> list[int]:
        """Adds the memory that an optimizer keeps beside a parameter; returns its values."""
        values: list[int] = []
        for part in parts:
            values.append(len(self.values))
            self.values.append(ValueRecord(owner, part.layout, part.num_bytes, owner))
            self.state_parts[values[-1]] = part.key, weight if part.is_copy else None
            owner.resident_bytes += part.num_bytes
        return values

    def ref(self, tensor: Tensor) -> Ref:
        """Returns the value and layout of `tensor` at present."""
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        if memory is None:
            memory = self._adopt(tensor)
        layout = layout_of(tensor)
        return Ref(memory.value, None if layout == self.values[memory.value].layout else layout)

    def _current_phase(self, func: OpOverload, args: tuple[Any, ...]) -> str:
        if (self.is_backward or torch._C._current_autograd_node() is not None) and not self._is_updating:
            return "backward"
        is_late = not torch.is_grad_enabled() and self._home(args) is not None
        is_average = func._schema.is_mutable and not torch.is_grad_enabled() and self._reads_updated(args)
        return "update" if is_late or is_average or self._is_updating else "forward"

    def _reads_updated(self, args: tuple[Any, ...]) -> bool:
        """Returns whether an argument is a parameter that was updated in this step, as for an average of weights."""
        tensors = [tensor for item in args for tensor in leaves(item) if tensor is not None]
        memories = (self._memories.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        values = [self.values[memory.value] for memory in memories if memory is not None]
        return any(value.owner is not None and value.producer.phase == "update" for value in values)

    def _home(self, item: Any) -> str | None:
        """Returns the module of the first gradient, or piece of optimizer state, among the arguments; None: no such."""
        if isinstance(item, Tensor):
            return self._homes.get(item.untyped_storage()._cdata)
        if isinstance(item, (tuple, list)):
            return next((home for part in item if (home := self._home(part)) is not None), None)
        return None

    def _one_by_one(self, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records an operator on lists as one op for each tensor: they may be on different devices."""
        count = max(len(item) for item in args if isinstance(item, list))
        results: list[Any] = []
        for number in range(count):
            one = tuple(item[number : number + 1] if isinstance(item, (list, tuple)) else item for item in args)
            result = self.__torch_dispatch__(func, types, one, kwargs)
            results += result if isinstance(result, (list, tuple)) else []
        return results or None

    # -- parts of the above ----------------------------------------------------------------------------------------

    def _commit(self, record: OpRecord, written: Sequence[Tensor]) -> None:
        """Appends `record`, or joins it with the maker of the memory that it writes (see the module's docstring)."""
        layouts = {tensor.untyped_storage()._cdata: layout_of(tensor) for tensor in written}
        overwritten = list(layouts)
        maker = maker_to_join(self.values, record, [self._memories[address].value for address in overwritten])
        new_values: list[tuple[int, int]] = []
        for address in overwritten:
            memory = self._memories[address]
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
            record = joined(self.values, self.records, maker, record)
        else:
            self.records.append(record)
        for value in record.outputs:
            self.values[value].producer = record
        for value in record.reads:
            readers = self.values[value].readers
            if not readers or readers[-1] is not record:
                readers.append(record)

    def _new_value(self, storage: torch.UntypedStorage, value: ValueRecord) -> _Memory:
        self.values.append(value)
        memory = self._memories[storage._cdata] = _Memory(storage, len(self.values) - 1)
        if value.producer is not PENDING:
            value.producer.outputs.append(memory.value)
        return memory

    def _adopt(self, tensor: Tensor, constant: Tensor | None = None) -> _Memory:
        """Adds memory that is no parameter, registered buffer or input: a module's attribute, or a constant in its
        code.
        """
        address = tensor.untyped_storage()._cdata
        if address in self._names:
            name, tensor = self._names[address]
        else:
            name = f"constant_{self._num_constants}"
            self._num_constants += 1
        self.add_source("buffer", name, tensor, constant)
        return self._memories[address]

    def _template(self, item: Any, read: list[tuple[Ref, Tensor]]) -> Any:
        if isinstance(item, Tensor):
            ref = self.ref(item)
            read.append((ref, item))
            return ref
        if isinstance(item, (tuple, list)):
            return type(item)([self._template(part, read) for part in item]) if item else item
        return item

    def _all_fake(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
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

    def _filled(self, traits: Traits, args: tuple[Any, ...], made: Tensor, value: int, seed: int) -> list[Call]:
        """Returns calls that replace `zeros_like` and its kin, which read only the shape of their argument."""
        layout = layout_of(made)
        options = {"dtype": made.dtype, "device": made.device}
        calls = [Call(aten.empty_strided.default, (layout.size, layout.stride), options, (value,))]
        if traits.fill is not None:
            content = () if seed >= 0 else (args[-1] if traits.content is None else traits.content,)
            calls.append(Call(traits.fill, (Ref(value), *content), {}, (-1,), (), seed))
        return calls

    def _record_constant(self, func: OpOverload, content: Tensor) -> Any:
        """Records `torch.tensor([...])`: an op that copies a known constant."""
        result = func(content)
        storage = result.untyped_storage()
        if storage._cdata not in self._memories:
            record = OpRecord(len(self.records), "aten.lift_fresh", self._locate(), self.phase)
            self._new_value(storage, ValueRecord(record, layout_of(result), storage.nbytes(), None))
            with _disable_current_modes():
                copy = content.detach().clone()  # its own: fake tensors may compute on `content` in place
            record.calls = [Call(aten.clone.default, (copy,), {}, (len(self.values) - 1,))]
            record.dtype, record.bytes_accessed = dtype_name([result]), storage.nbytes()
            self.records.append(record)
        return result

    def _locate(self, args: tuple[Any, ...] = ()) -> str:
        """Returns the module of the operator being dispatched."""
        if self.phase == "update" and (home := self._home(args)) is not None:
            return home
        return self.running.locate(is_forward=self.phase == "forward")


def _plain_types() -> contextlib.AbstractContextManager[Any]:
    """Returns a region without autocast, which has cast what the operator reads: its fake parts are no operators."""
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else contextlib.nullcontext()


def _is_in(item: Any, values: Mapping[int, Any]) -> bool:
    return isinstance(item, Ref) and item.value in values


def _has_real(item: Any) -> bool:
    if isinstance(item, Tensor):
        return not isinstance(item, FakeTensor)
    return isinstance(item, (list, tuple)) and any(map(_has_real, item))
