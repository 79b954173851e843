"""Recording: a dispatch mode that records every operator of a step, with its memory, its module and its order."""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gdp.errors import InputError
from gdp.graph.copies import HOST_COPY
from gdp.models.pytorch.bytes_accessed import bytes_accessed, is_grouped_product
from gdp.models.pytorch.card_kernels import FAKE_RESULTS, LOG_SIGMOID
from gdp.models.pytorch.flops import FORMULA, UNKNOWN, count_flops, product_operand
from gdp.models.pytorch.memories import Memories
from gdp.models.pytorch.op_records import (
    PENDING,
    OpRecord,
    ValueRecord,
    dtype_name,
    experts_per_token,
    layout_of,
    product_dtype,
    rounded,
    shapes_of,
)
from gdp.models.pytorch.optimizers import StatePart, UpdateRule
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.replacements import LSTM, workspace_bytes
from gdp.models.pytorch.routine import leaves
from gdp.models.pytorch.running_module import RunningModule
from gdp.models.pytorch.shards.exchanges import drawn_part
from gdp.models.pytorch.strides import StridedLayout
from gdp.models.pytorch.traits import BLANKS, LIFTS, MATERIALISED, Traits, traits_of
from gdp.models.stored_weights import StoredWeight

aten = torch.ops.aten
# types of grouped products that PyTorch computes and has no shapes for
_UNKNOWN_TO_GROUPS = (torch.float32, torch.float16)
_DEVICE_QUERY = torch.ops.prim.device.default
_WRITERS: Mapping[OpOverload, OpOverload] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.put.default: aten.put_.default,
}
HOST_MOVE = "host.move"
_LISTS = "aten::_foreach_"  # of tensors, all treated alike


class Phases:
    """The phase of the operator that is dispatched: `current`, which the caller sets unless phases `are_found`. Then an
    operator that autograd calls is backward, one that works on gradients or an optimizer's state without recording
    gradients is update, and all others are forward."""

    def __init__(self, memories: Memories) -> None:
        self.current = "forward"
        self.are_found = False
        self.is_backward = False  # if they are found: inside `backward`
        self.is_updating = False  # if they are found: inside the code of an optimizer without a rule
        self._memories = memories
        self._homes: dict[int, str] = {}  # by memory: the module of a gradient, of optimizer state, or made of those

    def find(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        """Sets the phase of a call, if phases are found."""
        if not self.are_found:
            return
        if (self.is_backward or torch._C._current_autograd_node() is not None) and not self.is_updating:
            self.current = "backward"
            return
        is_late = not torch.is_grad_enabled() and self.home(args) is not None
        is_average = func._schema.is_mutable and not torch.is_grad_enabled() and self._reads_updated(args)
        self.current = "update" if is_late or is_average or self.is_updating else "forward"

    def set_home(self, tensors: Sequence[Tensor], module: str) -> None:
        """Notes that the memories of these tensors belong to the update of the parameters of `module`."""
        self._homes.update((tensor.untyped_storage()._cdata, module) for tensor in tensors)

    def home(self, item: Any) -> str | None:
        """Returns the module of the first gradient, or piece of optimizer state, among the arguments, or None."""
        if isinstance(item, Tensor):
            return self._homes.get(item.untyped_storage()._cdata)
        if isinstance(item, (tuple, list)):
            return next((home for part in item if (home := self.home(part)) is not None), None)
        return None

    def _reads_updated(self, args: tuple[Any, ...]) -> bool:
        """Returns whether an argument is a parameter that was updated in this step, as for an average of weights."""
        numbers = (self._memories.value_of(tensor) for item in args for tensor in leaves(item) if tensor is not None)
        values = [self._memories.values[number] for number in numbers if number is not None]
        return any(value.owner is not None and value.producer.phase == "update" for value in values)


class Randomness:
    """The seeds of the calls that draw random numbers, and of the backward passes that draw them again."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # of draws, by the seed of PyTorch's generator
        self._drawn: dict[int, tuple[int, int]] = {}  # by value: the seed, and the part, of the call that drew for it

    def seed(
        self, traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any], refs: Sequence[Any], made: Sequence[int]
    ) -> tuple[int, int]:
        """Returns the seed of a call with the arguments `refs`, which has `made` these values, and the part of a cut
        tensor that it draws for; -1: it draws nothing."""
        if traits.draws(args, kwargs):
            before = torch.default_generator.initial_seed()  # a checkpoint that runs again restores it
            torch.default_generator.manual_seed((before + 1) % 2**63)
            drawn = self._numbers.setdefault(before, len(self._numbers)), drawn_part()
            self._drawn.update(dict.fromkeys(made, drawn))
            return drawn
        if traits.draws_again(args, kwargs):
            values = (ref.value for ref in reversed(refs) if isinstance(ref, Ref))
            return next((self._drawn[value] for value in values if value in self._drawn), (-1, 0))
        return -1, 0


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators dispatched inside `with fake_mode, recorder:`."""

    def __init__(self, fake_mode: FakeTensorMode, stored: Mapping[str, StoredWeight] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories = Memories(fake_mode, stored or {})
        self.phases = Phases(self.memories)
        self.running = RunningModule()
        self.uncovered: Counter[str] = Counter()
        self.notes: dict[str, None] = {}  # approximations, a sentence each
        self.refusals: dict[str, None] = {}  # reasons why the step cannot be executed
        self.state_parts: dict[int, tuple[str, Ref | None]] = {}  # by value: key, the parameter that it starts as
        self._update_states: dict[tuple[int, str], list[int]] = {}  # by parameter and optimizer: values
        self._randomness = Randomness()
        self.is_moving = False  # the next copy is one to the host, or back
        self._sent: list[OpRecord] = []  # to the host, since the last op
        self._since_fetch: list[OpRecord] = []  # ops before the next fetch, after the one before it
        self._has_fetched = False  # since the last op
        self._gradients: list[OpRecord] = []  # the last op of the backward pass that a checkpoint does not run again

    def add_gradient(self, parameter: Tensor) -> None:
        """Notes that the memory of a parameter's gradient belongs to the update of the parameter."""
        assert parameter.grad is not None
        self.phases.set_home([parameter.grad], self.running.of_parameter(parameter))

    def add_state(self, tensor: Tensor, parameter: Tensor) -> None:
        """Adds memory that an optimizer keeps beside a parameter."""
        if self.memories.add_state(tensor, parameter):
            self.phases.set_home([tensor], self.running.of_parameter(parameter))

    def find_constant(self, tensor: Any) -> None:
        """Gives a fake tensor its content, where that is one number which follows from the code alone."""
        if isinstance(tensor, FakeTensor) and tensor.constant is None:
            constant = self.memories.constant_of(tensor)
            if constant is not None:
                tensor.constant = constant
                tensor.fake_mode.fake_tensor_converter.add_constant_storage_mapping(tensor)

    # -- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_QUERY:
            return args[0].device
        if func in LIFTS and type(args[0]) is not FakeTensor:
            return self._record_constant(func, args[0])
        if func._schema.name.startswith(_LISTS) and any(len(item) > 1 for item in args if isinstance(item, list)):
            return self._one_by_one(func, types, args, kwargs)
        self.phases.find(func, args)
        func = self._in_place(MATERIALISED.get(func, func), args)
        traits = traits_of(func)
        args = self.memories.faked(args)
        if kwargs:
            kwargs = dict(zip(kwargs, self.memories.faked(tuple(kwargs.values())), strict=True))
        module = self._locate(args)
        if traits.is_view:
            return func(*args, **kwargs)

        read: list[tuple[Ref, Tensor]] = []
        refs = self.memories.refs(args, read)
        keyword_refs = {key: self.memories.refs(value, read) for key, value in kwargs.items()} if kwargs else kwargs
        written = traits.written(args, kwargs)
        result = _run(func, args, kwargs)
        returned, made = self._new_values(result, traits.kind, module)
        if not made and not written:
            return result

        seed, part = self._randomness.seed(traits, args, kwargs, refs, returned)
        if traits.reads_shape_only and made:
            calls, read = _filled(traits, args, made[0], returned[0], seed, part), []
        else:
            calls = [Call(func, refs, keyword_refs, tuple(returned), (), seed, part, torch.is_grad_enabled())]
        record = OpRecord(len(self.memories.records), traits.kind, module, self.phases.current, calls=calls)
        record.outputs = [value for value in dict.fromkeys(returned) if value >= 0]
        distinct: dict[tuple[int, StridedLayout | None], Tensor] = {}
        for ref, tensor in read:
            distinct.setdefault((ref.value, ref.layout), tensor)
            record.reads.setdefault(ref.value, {})[ref.layout] = None
        source = self._moved_tensor(func, args)
        if source is not None:
            record.kind, record.role, record.dtype = HOST_MOVE, HOST_COPY, dtype_name(distinct.values())
        else:
            self._add_costs(record, func, args, kwargs, list(distinct.values()), made, written)
        inputs = [tensor for tensor in distinct.values() if tensor.dim()]
        if inputs and all(map(self.memories.is_on_host, inputs)):
            for tensor in made:
                self.memories.set_on_host(tensor)
        if record.phase == "update":
            self.phases.set_home(made, module)
        self.memories.commit(record, written)
        last = self.memories.records[-1]
        if last is record or (source is not None and last.role):  # it has not joined an earlier op
            self._put_in_turn(last, source)
        return result

    def _in_place(self, func: OpOverload, args: tuple[Any, ...]) -> OpOverload:
        """Returns the operator that writes to the zeros that a backward pass has made for it. PyTorch writes to them
        unless tensors are of classes of their own, as fake ones are; these it copies."""
        writer = _WRITERS.get(func)
        node = torch._C._current_autograd_node() if writer is not None else None
        if writer is None or node is None or torch.is_grad_enabled() or isinstance(node, BackwardCFunction):
            return func
        number = self.memories.value_of(args[0])
        if number is None:
            return func
        value = self.memories.values[number]
        return writer if value.producer.kind in BLANKS and not value.readers else func

    def _moved_tensor(self, func: OpOverload, args: tuple[Any, ...]) -> Tensor | None:
        """Returns the tensor that a call copies between the host and the card; None for other calls."""
        if func is aten.copy_.default and self.memories.is_on_host(args[0]) != self.memories.is_on_host(args[1]):
            return cast(Tensor, args[1])
        return cast(Tensor, args[0]) if self.is_moving and func is aten.clone.default else None

    def _put_in_turn(self, record: OpRecord, source: Tensor | None) -> None:
        """Has an op wait for what was sent to the host before it, and a fetch for all ops before; see cards.py."""
        if source is not None and self.memories.is_on_host(source):
            record.after, self._has_fetched = list(self._since_fetch), True
        elif source is not None:
            self._sent.append(record)
        elif record.flops or record.bytes_accessed:
            record.after, self._sent = self._sent, []
            self._since_fetch = [] if self._has_fetched else self._since_fetch
            self._since_fetch.append(record)
            self._has_fetched = False
        if record.phase != "backward" or source is not None:
            return
        if not (torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0):
            self._gradients = [record]
        elif all(self.memories.values[value].producer.phase != "backward" for value in record.reads):
            record.after = [*record.after, *self._gradients]  # a checkpoint runs again when its gradient is there

    def _new_values(self, result: Any, kind: str, module: str) -> tuple[list[int], list[Tensor]]:
        """Returns the value of each tensor of a result, -1 for memory that is known already, and the new tensors."""
        returned: list[int] = []
        made: dict[int, tuple[int, Tensor]] = {}
        for tensor in leaves(result):
            if tensor is None:
                returned.append(-1)
                continue
            if tensor.layout is not torch.strided:
                where = f" in module {module!r}" if module else ""
                raise InputError(f"{kind}{where}: makes a {tensor.layout} tensor; have it dense (sparse=False)")
            storage = tensor.untyped_storage()
            if self.memories.value_of(tensor) is None:
                value = ValueRecord(PENDING, layout_of(tensor), storage.nbytes(), None)
                made[storage._cdata] = self.memories.new_value(storage, value).value, tensor
            returned.append(made[storage._cdata][0] if storage._cdata in made else -1)
        return returned, [tensor for _, tensor in made.values()]

    def _add_costs(
        self,
        record: OpRecord,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        read: list[Tensor],
        made: list[Tensor],
        written: list[Tensor],
    ) -> None:
        """Sets the shapes, the type, the FLOPs and the bytes of a call."""
        stored = self.memories.stored
        record.shapes = shapes_of(record.kind, args, kwargs, (*made, *written))
        record.flops, how = count_flops(func, args, kwargs, made or written)
        if how == UNKNOWN:
            self.uncovered[record.kind] += 1
        record.dtype = dtype_name((*made, *written, *read))
        if how == FORMULA:
            operand = product_operand(func, args)
            record.dtype = stored.arithmetic(read) or (record.dtype if operand is None else product_dtype(operand))
            name = func._schema.name.partition("::")[2]
            record.dtype = rounded(record.dtype, name, is_product=operand is not None)
        per_token = None
        if is_grouped_product(func) and args[1].dim() == 3:
            per_token = experts_per_token(self.memories.values, record, int(args[1].shape[0]))
        held = stored.num_bytes
        record.bytes_accessed = bytes_accessed(func, args, read, made, written, stored_bytes=held, per_token=per_token)

    def record_update(self, name: str, parameter: Tensor, rule: UpdateRule) -> Ref:
        """Records the update of one parameter, in its memory, by its present gradient; returns that gradient. The
        optimizer's state is made with the first update of the parameter by `rule` and kept for further ones."""
        assert parameter.grad is not None
        weight, gradient = self.memories.ref(parameter), self.memories.ref(parameter.grad)
        owner = self.memories.values[weight.value].owner
        assert owner is not None, "a parameter's memory is resident"
        module = self.running.of_parameter(parameter)
        record = OpRecord(len(self.memories.records), rule.kind, module, "update", f"{name}.update", updates=name)
        record.dtype = dtype_name([parameter])
        layout = layout_of(parameter)
        key = id(parameter), rule.name
        if key not in self._update_states:
            self._update_states[key] = self._new_state(rule.state(layout), weight, owner)
        record.private = self._update_states[key]

        def widened() -> int:
            copy = layout._replace(offset=0, dtype=torch.float32)
            self.memories.values.append(ValueRecord(record, copy, 4 * parameter.numel(), None))
            return len(self.memories.values) - 1

        record.calls = rule.calls(weight, gradient, [Ref(value) for value in record.private], widened)
        record.flops = rule.flops(layout)
        record.bytes_accessed = rule.bytes_accessed(layout, layout_of(parameter.grad))
        record.shapes = rule.shapes(layout, layout_of(parameter.grad))
        record.reads = {weight.value: {None: None}}
        record.reads.setdefault(gradient.value, {})[gradient.layout] = None
        self.memories.commit(record, [parameter])
        if rule.refusal:
            self.refusals[rule.refusal] = None
        return gradient

    def _new_state(self, parts: Sequence[StatePart], weight: Ref, owner: OpRecord) -> list[int]:
        """Adds the memory that an optimizer keeps beside a parameter; returns its values."""
        values: list[int] = []
        for part in parts:
            values.append(len(self.memories.values))
            self.memories.values.append(ValueRecord(owner, part.layout, part.num_bytes, owner))
            self.state_parts[values[-1]] = part.key, weight if part.is_copy else None
            owner.resident_bytes += part.num_bytes
        return values

    def _one_by_one(self, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records an operator on lists as one op for each tensor: they may be on different devices."""
        count = max(len(item) for item in args if isinstance(item, list))
        results: list[Any] = []
        for number in range(count):
            one = tuple(item[number : number + 1] if isinstance(item, (list, tuple)) else item for item in args)
            result = self.__torch_dispatch__(func, types, one, kwargs)
            results += result if isinstance(result, (list, tuple)) else []
        return results or None

    def _record_constant(self, func: OpOverload, content: Tensor) -> Any:
        """Records `torch.tensor([...])`: an op that copies a known constant."""
        result = func(content)
        storage = result.untyped_storage()
        if self.memories.value_of(result) is None:
            record = OpRecord(len(self.memories.records), "aten.lift_fresh", self._locate(), self.phases.current)
            value = self.memories.new_value(storage, ValueRecord(record, layout_of(result), storage.nbytes(), None))
            with _disable_current_modes():
                copy = content.detach().clone()  # its own: fake tensors may compute on `content` in place
            record.calls = [Call(aten.clone.default, (copy,), {}, (value.value,))]
            record.dtype, record.bytes_accessed = dtype_name([result]), storage.nbytes()
            self.memories.records.append(record)
        return result

    def _locate(self, args: tuple[Any, ...] = ()) -> str:
        """Returns the module of the operator being dispatched."""
        if self.phases.current == "update" and (home := self.phases.home(args)) is not None:
            return home
        return self.running.locate(is_forward=self.phases.current == "forward")


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator on fake tensors, without autocast, which has cast its arguments already."""
    if func in FAKE_RESULTS:
        return FAKE_RESULTS[func](*args, **kwargs)
    if func is aten._grouped_mm.default and args[0].dtype in _UNKNOWN_TO_GROUPS:
        halves = [item.to(torch.bfloat16) for item in args[:2]]
        return func(*halves, *args[2:], **kwargs).to(args[0].dtype)
    with torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else contextlib.nullcontext():
        result = func(*args, **kwargs)
    if func is LSTM and torch.is_grad_enabled():  # without a kernel, the workspace has no size
        workspace = result[3].new_empty(workspace_bytes(args[0], hidden_size=args[10], mode=args[9]))
        return *result[:3], workspace
    if func is LOG_SIGMOID:  # only CPUs fill the buffer
        return result[0], result[1].new_empty(0)
    return result


def _filled(traits: Traits, args: tuple[Any, ...], made: Tensor, value: int, seed: int, part: int) -> list[Call]:
    """Returns calls that replace `zeros_like` and its kin, which read only the shape of their argument."""
    layout = layout_of(made)
    options = {"dtype": made.dtype, "device": made.device}
    calls = [Call(aten.empty_strided.default, (layout.size, layout.stride), options, (value,))]
    if traits.fill is not None:
        content = () if seed >= 0 else (args[-1] if traits.content is None else traits.content,)
        calls.append(Call(traits.fill, (Ref(value), *content), {}, (-1,), (), seed, part))
    return calls
