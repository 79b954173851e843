"""Clipping by the norm of all gradients, and loss scales, added to the program of a step and the order of a plan.

    gradient --+--> norm ----> scale ----> update       an update reads its gradient times min(1, max_norm / norm)
               |                 ^           ^
               +-----------------|-----------+
    gradients of other updates --+

With a loss scale (a `torch.amp.GradScaler`, for float16) the gradients are those of a multiple of the loss: updates
read them divided by it. P. Micikevicius et al., "Mixed Precision Training", ICLR 2018.

    scale -> gradient of the loss -> gradients -> norms --+--> finite: updates by gradients over the scale
      ^                                                   +--> not finite: all updates are left out, on all ranks
      +---- grows, or backs off --------------------------+

All updates wait for the last gradient. So on each device they come after the ops that do not need them, otherwise in
the order of the plan. N ops and T tensors of the program, U updates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gdp.errors import InputError
from gdp.execute.layouts.exchange_routines import Device, Held
from gdp.execute.layouts.exchanges import made
from gdp.execute.layouts.sharded_program import ShardedProgram
from gdp.execute.layouts.step_program import StepProgram, gradient_spans, micro_batch_of
from gdp.execute.layouts.updates import FUSED, UpdateOfPiece, refs
from gdp.execute.plan_executor import PlanExecutor
from gdp.graph import Graph
from gdp.graph.builder import GraphBuilder
from gdp.graph.microbatches import reached
from gdp.models.pytorch import Program
from gdp.models.pytorch.optimizers import HALF
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.strides import StridedLayout

aten = torch.ops.aten
_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_
_NORM = "aten.linalg_vector_norm"


@dataclass(frozen=True, slots=True)
class ReadGradient:
    """The gradient that an update reads."""

    update: int
    tensor: int
    ref: Ref  # as the update reads it
    layout: StridedLayout  # of what it reads
    norm_dtype: torch.dtype
    is_counted: bool  # in the norm: has elements; of equal gradients of replicas one is


def with_clipping(
    program: Program, order: Sequence[npt.ArrayLike], max_norm: float
) -> tuple[Program, tuple[list[int], ...]]:
    """Returns the program and its order [D] with gradients clipped as `torch.nn.utils.clip_grad_norm_` does. The norm
    is that of the gradients of the mean loss of the whole batch, whatever the layout: to the bit where they are whole
    and of one type, to rounding of the norm where they are in pieces, or of several types, whose order is PyTorch's
    own. InputError where an update reads several gradients."""
    return Clipping(program, gradients_of_updates(program, "clip_norm"), max_norm, None).build(order)


def factor_of(
    norms: Sequence[Tensor], max_norm: float | None, *, inverse_scale: float | None = None
) -> tuple[Tensor | None, Tensor]:
    """Returns the factor of gradients with these norms, and 1 if the norm of all is not finite, else 0. The factor is
    min(1, max_norm / norm), times the inverse of the loss scale; the norms are those of scaled gradients."""
    norm = torch.linalg.vector_norm(torch.stack(list(norms)), _degree(max_norm))
    overflow = norm.isfinite().logical_not().float()
    inverse = None if inverse_scale is None else torch.full_like(norm, inverse_scale)
    if max_norm is None:
        return inverse, overflow
    factor = torch.clamp(max_norm / ((norm if inverse is None else norm * inverse) + _EPSILON), max=1.0)
    return factor if inverse is None else factor * inverse, overflow


def _norm_of_piece(piece: int, degree: float, dtype: torch.dtype, result: int, held: Held, device: Device) -> Any:
    return {result: torch.linalg.vector_norm(held[piece], degree, dtype=dtype)}


def _degree(max_norm: float | None) -> float:
    return math.inf if max_norm is None else 2


class Clipping:
    """The program under construction: ops are numbered early ops, norms, scale, late ops."""

    def __init__(
        self, program: Program, gradients: Sequence[ReadGradient], max_norm: float | None, loss_scale: float | None
    ) -> None:
        self.program, self.gradients, self.max_norm, self.loss_scale = program, gradients, max_norm, loss_scale
        self._counted = [gradient for gradient in gradients if gradient.is_counted]
        graph, count, num_ops = program.graph, len(self._counted), program.graph.num_ops
        is_update = np.isin(np.arange(num_ops), [gradient.update for gradient in gradients])
        self._is_late = reached(is_update, graph.producers[graph.edge_tensors], graph.consumers)
        self._position = np.concatenate((np.where(self._is_late, 3, 0), np.full(count, 1), [2]))
        self._old = np.argsort(self._position, kind="stable").tolist()  # in their new order: ops, norms, the scale
        self.number = np.argsort(self._old)
        self._norms: list[int] = self.number[num_ops:-1].tolist()
        self.scale = int(self.number[-1])
        self._layouts = dict(program.layouts)
        self._next_value = max(self._layouts, default=-1) + 1

    def build(self, order: Sequence[npt.ArrayLike]) -> tuple[Program, tuple[list[int], ...]]:
        program = self.program
        dtypes = [gradient.norm_dtype for gradient in self._counted]
        dtype = dtypes[0] if len(set(dtypes)) == 1 else torch.float32
        norms = [self._value(StridedLayout((), (), 0, own)) for own in dtypes]
        results = [self._value(StridedLayout((), (), 0, own)) for own in (dtype, torch.float32)]  # factor, overflow
        if self.loss_scale is None:
            del results[1]
        inverse = {} if self.loss_scale is None else {"inverse_scale": 1.0 / self.loss_scale}
        args = [Ref(value) for value in norms], self.max_norm
        added = [
            (Call(aten.linalg_vector_norm.default, (gradient.ref, _degree(self.max_norm)), {"dtype": own}, (value,)),)
            for gradient, own, value in zip(self._counted, dtypes, norms, strict=True)
        ]
        added.append((Call(factor_of, args, inverse, tuple(results)),))  # type: ignore[arg-type]  # no operator
        tensors = [program.graph.num_tensors + len(norms) + place for place in range(len(results))]
        calls, makers = list(program.calls), dict(program.made) if isinstance(program, StepProgram) else {}
        for gradient in self.gradients:
            maker = makers.get(gradient.update)
            if isinstance(maker, UpdateOfPiece):
                scale, overflow = (*tensors, None)[:2]
                makers[gradient.update] = replace(maker, scale=scale, overflow=overflow)
            else:
                calls[gradient.update] = self._scaled_calls(gradient, *map(Ref, results))
        for number, (gradient, own) in enumerate(zip(self._counted, dtypes, strict=True)):
            if isinstance(makers.get(gradient.update), UpdateOfPiece):  # a row, whatever the whole is a part of
                tensor = program.graph.num_tensors + number
                norm = partial(_norm_of_piece, gradient.tensor, _degree(self.max_norm), own, tensor)
                makers[program.graph.num_ops + number] = made(norm)
        changed: dict[str, Any] = {
            "graph": self._graph(dtypes, len(results)),
            "calls": self._column(calls, added),
            "tensor_values": (*program.tensor_values, *norms, *results),
            "tensor_layouts": (*program.tensor_layouts, *[None] * (len(norms) + len(results))),
            "layouts": self._layouts,
            "sources": self._renumbered(program.sources),
            "private": self._renumbered(program.private),
            "updated": self._renumbered(program.updated),
        }
        if isinstance(program, StepProgram):
            changed |= {
                "part_of": self._column(program.part_of, [0] * len(added)),
                "origin": self._column(program.origin, [-1] * len(added)),
                "made": self._renumbered(makers),
            }
        return replace(program, **changed), self._order(order)

    def _scaled_calls(self, gradient: ReadGradient, factor: Ref, overflow: Ref | None = None) -> tuple[Call, ...]:
        """Returns the calls of an update with a scaled gradient, which change nothing after an overflow."""
        value = gradient.ref.value
        scaled = self._value(gradient.layout._replace(offset=0))

        def changed(item: Any) -> Any:
            return Ref(scaled) if isinstance(item, Ref) and item.value == value else item

        calls = [Call(aten.mul.Tensor, (gradient.ref, factor), {}, (scaled,))]
        for call in self.program.calls[gradient.update]:
            writes = tuple((scaled if old == value else old, new) for old, new in call.writes)
            own = replace(
                call, args=tree_map(changed, call.args), kwargs=tree_map(changed, dict(call.kwargs)), writes=writes
            )
            calls += [own] if overflow is None or own.func not in FUSED else _left_out(own, overflow)
        return tuple(calls)

    def _value(self, layout: StridedLayout) -> int:
        value, self._next_value = self._next_value, self._next_value + 1
        self._layouts[value] = layout
        return value

    def _column(self, column: Sequence[Any], added: Sequence[Any]) -> tuple[Any, ...]:
        """Returns a column of ops in their new order."""
        extended = [*column, *added]
        return tuple(extended[op] for op in self._old)

    def _renumbered(self, by_op: Mapping[int, Any]) -> dict[int, Any]:
        return {int(self.number[op]): item for op, item in by_op.items()}

    def _graph(self, dtypes: Sequence[torch.dtype], num_results: int) -> Graph:
        graph = self.program.graph
        builder = GraphBuilder.of(graph)
        norms = builder.add_ops([f"{graph.op_names[gradient.update]}.norm" for gradient in self._counted], _NORM)
        scale = builder.add_ops(["clip_norm"], _NORM)
        sizes = [dtype.itemsize for dtype in dtypes]
        builder.add_edges(np.array([gradient.tensor for gradient in self._counted]), norms)
        builder.add_edges(builder.add_tensors(norms, sizes), np.repeat(scale, len(norms)))
        results = builder.add_tensors(np.repeat(scale, num_results), [max(sizes), 4][:num_results])
        updates = np.unique([gradient.update for gradient in self.gradients])
        builder.add_edges(np.repeat(results, len(updates)), np.tile(updates, num_results))
        built = builder.build(graph.name, self._position)
        is_kept = built.is_kept.copy()
        is_kept[-1] = self.loss_scale is not None  # what tells of an overflow
        return replace(built, is_kept=is_kept)

    def _order(self, order: Sequence[npt.ArrayLike]) -> tuple[list[int], ...]:
        """Returns the order [D]: norms are computed where their updates are, the scale where the first one is."""
        norm_of = {gradient.update: op for op, gradient in zip(self._norms, self._counted, strict=True)}
        result = []
        for ops in order:
            here = np.asarray(ops, np.int64)
            late, early = here[self._is_late[here]], here[~self._is_late[here]]
            norms = [norm_of[op] for op in late.tolist() if op in norm_of]
            scale = [self.scale] if self._norms[0] in norms else []
            result.append([*self.number[early].tolist(), *norms, *scale, *self.number[late].tolist()])
        return tuple(result)


def gradients_of_updates(program: Program, option: str) -> list[ReadGradient]:
    """Returns the gradients that updates read, in the order of parameters; InputError names the option."""
    (part, origins), spans = micro_batch_of(program), gradient_spans(program)
    empty = {tensor for tensor, (first, last) in spans.items() if first == last}
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
        if not spans:
            read = (ref for call in program.calls[op] for ref in refs((call.args, call.kwargs)))
            ref = next(other for other in read if other.value == ref.value)
        layout = ref.layout or program.layouts[ref.value]
        # rounded norms of many pieces would add up to a wrong one
        dtype = torch.float32 if spans and layout.dtype in HALF else layout.dtype
        is_counted = tensor not in empty and 0 not in layout.size and (bool(spans) or origin not in counted)
        gradients.append((place[name], ReadGradient(op, tensor, ref, layout, dtype, is_counted)))
        counted.add(origin)
    if not gradients:
        raise InputError(f"{option} is for training steps, and this step updates nothing; leave {option} out")
    return [gradient for _, gradient in sorted(gradients, key=lambda item: (item[0], item[1].update))]


def _left_out(call: Call, overflow: Ref) -> list[Call]:
    """Returns the call of a fused update that changes nothing, and counts no step, where `overflow` is not 0."""
    counts = call.args[5] if call.func is not aten._fused_sgd_.default else ()
    fused = replace(call, kwargs={**call.kwargs, "found_inf": overflow})
    return [fused, *(Call(aten.sub_.Tensor, (count, overflow), {}, (-1,)) for count in counts)]


_LEFT_OUT = FUSED | {aten.add_.Tensor, aten._to_copy.default, aten.copy_.default}
"""Calls of updates that leave parameters as they are if the fused kernel does nothing."""


@dataclass(frozen=True, slots=True)
class ScaledProgram:
    """A program whose loss is scaled, and its order [D]."""

    program: Program
    order: tuple[list[int], ...]
    loss_ops: Mapping[int, float]  # that make the gradient of the loss, and their share of it
    scale_op: int
    overflow: int  # a tensor of one number: 0 where all gradients are finite

    def set_scale(self, scale: float) -> None:
        """Changes the scale of the following steps; the first one has that of the program."""
        for op, share in self.loss_ops.items():
            self.program.set_keyword(op, "value", share * scale)
        self.program.set_keyword(self.scale_op, "inverse_scale", 1.0 / scale)


def with_loss_scale(
    program: Program, order: Sequence[npt.ArrayLike], scale: float, max_norm: float | None = None
) -> ScaledProgram:
    """Returns the program and its order [D] with the loss times `scale`, and gradients divided by it and clipped.
    Clipped as by `with_clipping`, unless `max_norm` is None. InputError where an update cannot be left out."""
    gradients = gradients_of_updates(program, "scaler")
    part, origins = micro_batch_of(program)
    calls = [
        call for calls, phase in zip(part.calls, part.graph.phases, strict=True) if phase == "update" for call in calls
    ]
    refused = next((call.func for call in calls if call.func not in _LEFT_OUT), None)
    if refused is not None:
        raise InputError(
            f"scaler: an optimizer with {refused} cannot leave a step out; give Adam, AdamW or SGD, or no scaler"
        )
    if any(part.layouts[ref.value].dtype == torch.float16 for ref in part.gradients.values()):
        raise InputError(
            "scaler: gradients of float16 parameters cannot be unscaled; keep parameters in float32, with autocast"
        )
    shares = _loss_shares(program, part, origins)
    scaled = list(program.calls)
    for op, share in shares.items():
        scaled[op] = tuple(
            replace(call, args=call.args[:1], kwargs={"value": share * scale}) if _fills(call) else call
            for call in program.calls[op]
        )
    clipping = Clipping(replace(program, calls=tuple(scaled)), gradients, max_norm, scale)
    scaled_program, new_order = clipping.build(order)
    ops = {int(clipping.number[op]): share for op, share in shares.items()}
    return ScaledProgram(scaled_program, new_order, ops, clipping.scale, scaled_program.graph.num_tensors - 1)


def _loss_shares(program: Program, part: Program, origins: Sequence[int]) -> dict[int, float]:
    """Returns by op that makes the gradient of the loss the number that it is filled with."""
    first = next((op for op, phase in enumerate(part.graph.phases) if phase == "backward"), -1)
    shares = {
        op: float(call.args[1])
        for op, origin in enumerate(origins)
        if origin == first
        for call in program.calls[op]
        if _fills(call)
    }
    if not shares:
        raise InputError(
            f"scaler: the backward pass of {program.graph.name} does not begin with the gradient of one loss; leave "
            "the scaler out"
        )
    return shares


def _fills(call: Call) -> bool:
    return call.func is aten.fill_.Scalar


class LossScaler:
    """A user's `torch.amp.GradScaler`, which follows the steps of a placed model; None scales nothing."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise InputError(f"scaler is a {type(scaler).__name__}; a torch.amp.GradScaler is expected")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scaled: ScaledProgram | None = None

    def state(self) -> dict[str, float]:
        """Returns the state of the scaler by key, {} without one."""
        return {} if self._scaler is None else dict(self._scaler.state_dict())

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state to resume from: the scale and the count of steps since it changed."""
        state = self.state()
        return {key: torch.tensor(float(state[key]), dtype=torch.float64) for key in _SAVED if key in state}

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Loads the answer of `tensors`; a scaler keeps its state where the saved training had none."""
        if tensors and self._scaler is None:
            raise InputError(f"{where}: the training scales its loss; give scaler=torch.amp.GradScaler(...)")
        if tensors.keys() == set(_SAVED) and self._scaler is not None:
            scale, tracker = (float(tensors[key]) for key in _SAVED)
            self._scaler.load_state_dict(self.state() | {"scale": scale, "_growth_tracker": int(tracker)})

    def built(
        self, program: Program, order: Sequence[npt.ArrayLike], clip_norm: float | None
    ) -> tuple[Program, Sequence[npt.ArrayLike]]:
        """Returns the program and its order with the loss scaled and gradients clipped, if they are to be."""
        if isinstance(program, ShardedProgram) and (self._scaler is not None or clip_norm is not None):
            raise InputError("clip_norm and scaler read whole gradients, and ranks have parts; place without tensor")
        if self._scaler is not None:
            self._scaled = with_loss_scale(program, order, self._scaler.get_scale(), clip_norm)
            return self._scaled.program, self._scaled.order
        return (program, order) if clip_norm is None else with_clipping(program, order, clip_norm)

    def begin(self) -> None:
        """Begins a step, with the scale as it is now."""
        if self._scaled is not None and self._scaler is not None:
            self._scaled.set_scale(self._scaler.get_scale())

    def end(self, executor: PlanExecutor, record: Any) -> None:
        """Ends a step: the scale grows or backs off, by PyTorch's own kernel."""
        if self._scaled is None or self._scaler is None:
            return
        overflow, state = executor.kept(record, self._scaled.overflow), self.state()
        scale, tracker = torch.tensor(state["scale"]), torch.tensor(state["_growth_tracker"], dtype=torch.int32)
        grow, back_off, interval = (state[key] for key in ("growth_factor", "backoff_factor", "growth_interval"))
        torch._amp_update_scale_(scale, tracker, overflow, grow, back_off, int(interval))
        self._scaler.load_state_dict(state | {"scale": float(scale), "_growth_tracker": int(tracker)})


_SAVED = ("scale", "_growth_tracker")
