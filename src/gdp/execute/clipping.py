"""Clipping by the norm of all gradients, added to the program of a step and the order of a plan.

    gradient --+--> norm ----> scale ----> update       an update reads its gradient times min(1, max_norm / norm)
               |                 ^           ^
               +-----------------|-----------+
    gradients of other updates --+

With a loss scale the gradients are those of a multiple of the loss: updates read them divided by it, and leave their
parameters as they are where a norm is not finite. P. Micikevicius et al., "Mixed Precision Training", ICLR 2018.

All updates wait for the last gradient. So on each device they come after the ops that do not need them, otherwise in
the order of the plan. N ops and T tensors of the program, U updates.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.execute.layouts.step_program import StepProgram
from gdp.execute.layouts.updates import refs
from gdp.graph import Graph
from gdp.models.pytorch import Program
from gdp.models.pytorch.optimizers import HALF
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.strides import StridedLayout

aten = torch.ops.aten
_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_
FUSED = frozenset({aten._fused_adam_.default, aten._fused_adamw_.default, aten._fused_sgd_.default})
"""Kernels of updates that do nothing if they are told of an overflow."""


@dataclass(frozen=True, slots=True)
class ReadGradient:
    """The gradient that an update reads."""

    update: int
    tensor: int
    ref: Ref  # as the update reads it
    norm_dtype: torch.dtype
    is_counted: bool  # in the norm: has elements; of equal gradients of replicas one is


@dataclass(frozen=True, slots=True)
class ScaledUpdate:
    """An update of a piece of a parameter, whose gradient is scaled; left out where gradients are not finite."""

    routine: Any  # a PieceUpdate
    gradient: int
    scale: int
    overflow: int | None  # the tensor that tells

    def run(self, held: MutableMapping[int, Any], private: MutableMapping[int, Any], seed: int = 0) -> dict[int, Any]:
        """Executes the update on a scaled copy of its gradient."""
        if self.overflow is not None and bool(held[self.overflow]):
            left: dict[int, Any] = self.routine.leave_out(held, private)
            return left
        scaled = {**held, self.gradient: held[self.gradient] * held[self.scale]}
        outputs: dict[int, Any] = self.routine.run(scaled, private, seed)
        return outputs

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes a constant argument of the update."""
        self.routine.set_keyword(key, value)


def with_clipping(
    program: Program, order: Sequence[npt.ArrayLike], max_norm: float
) -> tuple[Program, tuple[list[int], ...]]:
    """Returns the program and its order [D] with gradients clipped as `torch.nn.utils.clip_grad_norm_` does.

    The norm is that of the gradients of the mean loss of the whole batch, whatever the layout: to the bit where they
    are whole and of one type, to rounding of the norm where they are in pieces, or of several types, whose order is
    PyTorch's own. InputError where an update reads several gradients.
    """
    if not 0 < max_norm < float("inf"):
        raise InputError(f"clip_norm is {max_norm}; a number above 0 is expected")
    return Clipping(program, gradients_of_updates(program, "clip_norm"), max_norm, None).build(order)


class Clipping:
    """The program under construction: ops are numbered early ops, norms, scale, late ops."""

    def __init__(
        self, program: Program, gradients: Sequence[ReadGradient], max_norm: float | None, loss_scale: float | None
    ) -> None:
        self.program, self.gradients, self.max_norm, self.loss_scale = program, gradients, max_norm, loss_scale
        self.counted = [gradient for gradient in gradients if gradient.is_counted]
        graph = program.graph
        self.is_late = _following(graph, [gradient.update for gradient in gradients])
        early, late = np.flatnonzero(~self.is_late), np.flatnonzero(self.is_late)
        num_added = len(self.counted) + 1
        self.number = np.empty(graph.num_ops, np.int64)
        self.number[early] = np.arange(len(early))
        self.number[late] = np.arange(len(late)) + len(early) + num_added
        self.norms = [len(early) + place for place in range(len(self.counted))]
        self.scale = len(early) + len(self.counted)
        self.old = np.concatenate((early, np.full(num_added, -1), late))  # by new number
        first = max(program.layouts, default=-1) + 1
        self.norm_values = [first + place for place in range(len(self.counted))]
        self._next_value = first + len(self.counted)
        self.layouts = dict(program.layouts)

    def build(self, order: Sequence[npt.ArrayLike]) -> tuple[Program, tuple[list[int], ...]]:
        program, num_tensors = self.program, self.program.graph.num_tensors
        norm_tensors = [num_tensors + place for place in range(len(self.counted))]
        scale_tensor = num_tensors + len(self.counted)
        for value, gradient in zip(self.norm_values, self.counted, strict=True):
            self.layouts[value] = StridedLayout((), (), 0, gradient.norm_dtype)
        scale_calls, scale_value, overflow_value = self._scale_calls()
        values_of_scale = [scale_value] if overflow_value is None else [scale_value, overflow_value]
        made_by_scale = [scale_tensor + place for place in range(len(values_of_scale))]
        makers = dict(getattr(program, "made", {}))
        calls = list(program.calls)
        for gradient in self.gradients:
            if gradient.update in makers:
                makers[gradient.update] = _scaled_maker(makers[gradient.update], gradient.tensor, *made_by_scale)
            else:
                calls[gradient.update] = self._clipped_calls(gradient, Ref(scale_value), overflow_value)
        degree = float("inf") if self.max_norm is None else 2
        of_norms = [
            (Call(aten.linalg_vector_norm.default, (gradient.ref, degree), {"dtype": gradient.norm_dtype}, (value,)),)
            for gradient, value in zip(self.counted, self.norm_values, strict=True)
        ]
        inputs, outputs = self._columns(program.inputs_of, ()), self._columns(program.outputs_of, ())
        for op, gradient, tensor in zip(self.norms, self.counted, norm_tensors, strict=True):
            inputs[op], outputs[op] = (gradient.tensor,), (tensor,)
        inputs[self.scale], outputs[self.scale] = tuple(norm_tensors), tuple(made_by_scale)
        for update in {gradient.update for gradient in self.gradients}:
            new = int(self.number[update])
            inputs[new] = (*inputs[new], *made_by_scale)
        all_calls = self._columns(calls, ())
        all_calls[self.norms[0] : self.scale + 1] = [*of_norms, scale_calls]
        changed: dict[str, Any] = {
            "graph": self._graph(),
            "calls": tuple(all_calls),
            "inputs_of": tuple(inputs),
            "outputs_of": tuple(outputs),
            "tensor_values": (*program.tensor_values, *self.norm_values, *values_of_scale),
            "tensor_layouts": (*program.tensor_layouts, *[None] * (len(self.counted) + len(made_by_scale))),
            "layouts": self.layouts,
            "sources": self._renumbered(program.sources),
            "private": self._renumbered(program.private),
            "updated": self._renumbered(program.updated),
        }
        if isinstance(program, StepProgram):
            changed |= {
                "part_of": self._columns(program.part_of, 0),
                "origin": self._columns(program.origin, -1),
                "made": self._renumbered(makers),
            }
        return replace(program, **changed), self._order(order)

    def _scale_calls(self) -> tuple[tuple[Call, ...], int, int | None]:
        """Returns the calls that make the factor of the gradients, its value, and the value that tells of an overflow.

        It is min(1, max_norm / norm), divided by the loss scale; the norms are those of scaled gradients.
        """
        norms = [Ref(value) for value in self.norm_values]
        dtypes = {gradient.norm_dtype for gradient in self.counted}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        row = self._value(StridedLayout((len(norms),), (1,), 0, dtype))
        whole, norm, shifted, reciprocal, quotient, factor = self._numbers(6, dtype)
        degree = float("inf") if self.max_norm is None else 2
        calls = [
            Call(aten.stack.default, (norms,), {}, (row,)),
            Call(aten.linalg_vector_norm.default, (Ref(row), degree), {}, (whole,)),
        ]
        if self.loss_scale is not None:
            inverse, product, is_finite, is_infinite = self._numbers(4, dtype)
            (overflow,) = self._numbers(1, torch.float32)
            for value in (is_finite, is_infinite):
                self.layouts[value] = StridedLayout((), (), 0, torch.bool)
            calls += [
                Call(aten.full_like.default, (Ref(whole),), {"fill_value": 1.0 / self.loss_scale}, (inverse,)),
                Call(aten.isfinite.default, (Ref(whole),), {}, (is_finite,)),
                Call(aten.logical_not.default, (Ref(is_finite),), {}, (is_infinite,)),
                Call(aten._to_copy.default, (Ref(is_infinite),), {"dtype": torch.float32}, (overflow,)),
            ]
        if self.max_norm is not None:
            of_loss = whole
            if self.loss_scale is not None:
                of_loss = norm
                calls.append(Call(aten.mul.Tensor, (Ref(whole), Ref(inverse)), {}, (norm,)))
            calls += [
                Call(aten.add.Tensor, (Ref(of_loss), _EPSILON), {}, (shifted,)),
                Call(aten.reciprocal.default, (Ref(shifted),), {}, (reciprocal,)),
                Call(aten.mul.Tensor, (Ref(reciprocal), self.max_norm), {}, (quotient,)),
                Call(aten.clamp.default, (Ref(quotient), None, 1.0), {}, (factor,)),
            ]
        if self.loss_scale is None:
            return tuple(calls), factor, None
        if self.max_norm is None:
            return tuple(calls), inverse, overflow
        calls.append(Call(aten.mul.Tensor, (Ref(factor), Ref(inverse)), {}, (product,)))
        return tuple(calls), product, overflow

    def _numbers(self, count: int, dtype: torch.dtype) -> list[int]:
        """Returns new values of one number each."""
        return [self._value(StridedLayout((), (), 0, dtype)) for _ in range(count)]

    def _clipped_calls(self, gradient: ReadGradient, scale: Ref, overflow: int | None) -> tuple[Call, ...]:
        view = gradient.ref.layout or self.program.layouts[gradient.ref.value]
        scaled = self._value(view._replace(offset=0))

        def changed(item: Any) -> Any:
            if type(item) is Ref:
                return Ref(scaled) if item.value == gradient.ref.value else item
            if type(item) in (tuple, list):
                return type(item)(map(changed, item))
            return {key: changed(part) for key, part in item.items()} if type(item) is dict else item

        calls = [
            replace(
                call,
                args=changed(call.args),
                kwargs=changed(dict(call.kwargs)),
                writes=tuple((scaled if old == gradient.ref.value else old, new) for old, new in call.writes),
            )
            for call in self.program.calls[gradient.update]
        ]
        if overflow is not None:
            calls = [call for own in calls for call in _left_out(own, Ref(overflow))]
        return (Call(aten.mul.Tensor, (gradient.ref, scale), {}, (scaled,)), *calls)

    def _value(self, layout: StridedLayout) -> int:
        value, self._next_value = self._next_value, self._next_value + 1
        self.layouts[value] = layout
        return value

    def _columns(self, column: Sequence[Any], added: Any) -> list[Any]:
        """Returns a column of ops in their new order."""
        return [column[op] if op >= 0 else added for op in self.old.tolist()]

    def _renumbered(self, by_op: Mapping[int, Any]) -> dict[int, Any]:
        return {int(self.number[op]): item for op, item in by_op.items()}

    def _graph(self) -> Graph:
        graph, count = self.program.graph, len(self.counted)
        norms, scale = np.array(self.norms), self.scale
        num_scales = 1 if self.loss_scale is None else 2
        updates = sorted({int(self.number[gradient.update]) for gradient in self.gradients})
        readers = [self.number[graph.consumers_of(tensor)] for tensor in range(graph.num_tensors)]
        for op, gradient in zip(self.norms, self.counted, strict=True):
            readers[gradient.tensor] = np.append(readers[gradient.tensor], op)
        readers += [np.array([scale])] * count + [np.array(updates)] * num_scales
        consumers = [np.sort(each) for each in readers]
        names = [f"{graph.op_names[gradient.update]}.norm" for gradient in self.counted] + ["clip_norm"]
        added = iter(names)
        zeros, nothing = np.zeros(count + num_scales, np.int64), np.zeros(count + num_scales, np.bool_)

        def texts(column: Sequence[str], value: str) -> tuple[str, ...]:
            return tuple(self._columns(column, value))

        def figures(column: I64, value: int) -> I64:
            return np.array(self._columns(column.tolist(), value), np.int64)

        sizes = [gradient.norm_dtype.itemsize for gradient in self.counted]
        return replace(
            graph,
            op_names=tuple(graph.op_names[op] if op >= 0 else next(added) for op in self.old.tolist()),
            kinds=texts(graph.kinds, "aten.linalg_vector_norm"),
            dtypes=texts(graph.dtypes, "float32"),
            phases=texts(graph.phases, ""),
            modules=texts(graph.modules, ""),
            times_ns=tuple(self._columns(graph.times_ns, {})),
            flops=figures(graph.flops, 0),
            bytes_accessed=figures(graph.bytes_accessed, 0),
            resident_bytes=figures(graph.resident_bytes, 0),
            groups=figures(graph.groups, -1),
            origins=np.where(figures(graph.origins, -1) >= 0, self.number[figures(graph.origins, -1)], -1),
            microbatches=figures(graph.microbatches, 0),
            replicas=figures(graph.replicas, 0),
            roles=texts(graph.roles, ""),
            producers=np.concatenate((self.number[graph.producers], norms, [scale] * num_scales)),
            tensor_bytes=np.concatenate((graph.tensor_bytes, sizes, [max(sizes), 4][:num_scales])),
            is_resident=np.concatenate((graph.is_resident, nothing)),
            is_kept=np.concatenate((graph.is_kept, nothing[1:], [self.loss_scale is not None])),
            view_of=np.concatenate((graph.view_of, zeros - 1)),
            consumer_offsets=np.concatenate(([0], np.cumsum([len(each) for each in consumers]))),
            consumers=np.concatenate(consumers),
        )

    def _order(self, order: Sequence[npt.ArrayLike]) -> tuple[list[int], ...]:
        """Returns the order [D]: norms are computed where their updates are, the scale where the first one is."""
        norm_of = {gradient.update: op for op, gradient in zip(self.norms, self.counted, strict=True)}
        result = []
        for ops in order:
            here = np.asarray(ops, np.int64)
            late = here[self.is_late[here]]
            norms = [norm_of[op] for op in late.tolist() if op in norm_of]
            scale = [self.scale] if self.norms[0] in norms else []
            early = here[~self.is_late[here]]
            result.append([*self.number[early].tolist(), *norms, *scale, *self.number[late].tolist()])
        return tuple(result)


def gradients_of_updates(program: Program, option: str) -> list[ReadGradient]:
    """Returns the gradients that updates read, in the order of parameters; InputError names the option."""
    part, origins = program, list(range(program.graph.num_ops))
    is_cut, empty = False, set[int]()
    if isinstance(program, StepProgram):
        part, origins, is_cut = program.part, list(program.origin), bool(program.gradient_pieces)
        for pieces in program.gradient_pieces.values():
            empty |= {
                tensor for tensor, (first, last) in zip(pieces.tensors, pieces.spans, strict=True) if first == last
            }
    place = {name: number for number, name in enumerate(program.gradients)}
    gradients: list[tuple[int, ReadGradient]] = []
    counted: set[int] = set()
    for op, origin in enumerate(origins):
        if origin < 0 or part.graph.phases[origin] != "update":
            continue
        name = part.updated.get(origin)
        tensors = [t for t in program.inputs_of[op] if int(program.graph.producers[t]) not in program.sources]
        if len(tensors) != 1 or name not in place:
            raise InputError(
                f"{option}: {program.graph.op_names[op]!r} is no update of one parameter by one gradient; leave "
                f"{option} out"
            )
        (tensor,) = tensors
        ref = program.ref_of(tensor)
        if not is_cut:
            read = (ref for call in program.calls[op] for ref in refs((call.args, call.kwargs)))
            ref = next(other for other in read if other.value == ref.value)
        dtype = program.layouts[ref.value].dtype if ref.layout is None else ref.layout.dtype
        if is_cut and dtype in HALF:  # rounded norms of many pieces would add up to a wrong one
            dtype = torch.float32
        layout = program.layouts[ref.value] if ref.layout is None else ref.layout
        is_empty = tensor in empty or 0 in layout.size
        is_counted = not is_empty and (is_cut or origin not in counted)
        gradients.append((place[name], ReadGradient(op, tensor, ref, dtype, is_counted)))
        counted.add(origin)
    if not gradients:
        raise InputError(f"{option} is for training steps, and this step updates nothing; leave {option} out")
    return [gradient for _, gradient in sorted(gradients, key=lambda item: (item[0], item[1].update))]


def _following(graph: Graph, ops: Sequence[int]) -> Bool:
    """Returns [N] whether each op is among `ops` or follows from one of them."""
    is_late = np.zeros(graph.num_ops, np.bool_)
    is_late[list(ops)] = True
    order = np.argsort(graph.producers[graph.edge_tensors], kind="stable")
    sources, targets = graph.producers[graph.edge_tensors][order], graph.consumers[order]
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):  # ops are in topological order
        if is_late[source]:
            is_late[target] = True
    return is_late


def _scaled_maker(make: Any, gradient: int, scale: int, overflow: int | None = None) -> Any:
    return lambda device: ScaledUpdate(make(device), gradient, scale, overflow)


def _left_out(call: Call, overflow: Ref) -> list[Call]:
    """Returns the call of an update that changes nothing where `overflow` is not 0; steps are counted back then."""
    if call.func not in FUSED:
        return [call]
    counts = call.args[5] if call.func is not aten._fused_sgd_.default else ()
    fused = replace(call, kwargs={**call.kwargs, "found_inf": overflow})
    return [fused, *(Call(aten.sub_.Tensor, (count, overflow), {}, (-1,)) for count in counts)]
