"""The state of a training: the optimizer's by parameter, a file to go on from, and before and after the first step.

Optimizer state is read from all updates of a program, and dealt out to them. Replicas of a model have an update of each
parameter. With ZeRO each of them keeps the state of a piece:

    update     exp_avg [0:6]  --.                         .-- a replica of another layout
    update#1   exp_avg [6:11] --+--> exp_avg [11] --------+-- ...

A file is NAME.safetensors, with format, version, num_steps and seed in its metadata, and the tensors "state/NAME" of
parameters and buffers, "optimizer/NAME/KEY" of the optimizer, "scaler/KEY" of a GradScaler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from gdp import files
from gdp.errors import InputError
from gdp.execute.layouts.sharded_program import ShardedProgram
from gdp.execute.layouts.step_program import gradient_spans, micro_batch_of
from gdp.execute.plan_executor import PlanExecutor
from gdp.models.pytorch import Program
from gdp.models.pytorch.optimizers import MASTER
from gdp.models.pytorch.strides import StridedLayout, empty, memory_order
from gdp.tensor_file import TensorFormat

Span = tuple[int, int] | None
"""The elements of a parameter, in the order of memory: the first and the one behind the last; None: all."""
StateByName = Mapping[str, Mapping[str, Tensor]]  # optimizer state by parameter and key of `torch.optim`


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """The updates of one parameter, one for each replica, and the state that they keep."""

    ops: dict[int, Span]
    state: Mapping[str, int]  # values by key


class OptimizerState:
    """The optimizer state of `program`, whose workers keep it by update and value."""

    @classmethod
    def of(cls, program: Program) -> "OptimizerState":
        """Returns the state of a program of one rank, or of all."""
        return StateOfRanks(program) if isinstance(program, ShardedProgram) else cls(program)

    def __init__(self, program: Program) -> None:
        part, origins = micro_batch_of(program)
        spans = {program.keepers[tensor]: span for tensor, span in gradient_spans(program).items()}
        self._layouts, self._copied_values = program.layouts, program.state_copies.keys()
        self.updates: dict[str, ParameterUpdate] = {}
        for op, origin in enumerate(origins):
            if (name := part.updated.get(origin)) is not None:
                state = {program.state_keys[value]: value for value in part.private.get(origin, ())}
                self.updates.setdefault(name, ParameterUpdate({}, state)).ops[op] = spans.get(op)

    def joined(self, private: Mapping[int, Mapping[int, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Returns copies on the CPU of the whole state, from that of each update."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, update in self.updates.items():
            held = [(span, private[op]) for op, span in update.ops.items() if private.get(op)]
            if held:
                states[name] = {
                    key: self._whole(value, [(span, tensors[value]) for span, tensors in held])
                    for key, value in update.state.items()
                }
        return states

    def cut(self, state: StateByName) -> dict[int, dict[int, Tensor]]:
        """Returns the state of each update by value. InputError for other names, keys or shapes than `joined` has."""
        for name, tensors in state.items():
            values = self.updates[name].state if name in self.updates else {}
            if not values or tensors.keys() != values.keys():
                expected = ", ".join(values or {key: 0 for update in self.updates.values() for key in update.state})
                raise InputError(f"optimizer state of {name!r}: {expected} of a trained parameter are expected")
            for key, value in values.items():
                here, size = list(tensors[key].shape), list(self._size(name, value))
                if here != size:
                    raise InputError(f"optimizer state {key} of {name!r} is {here}; {size} is expected")
        return self._dealt_out(state)

    def check_complete(self, state: StateByName) -> None:
        """Raises InputError unless `state` has that of every parameter that is updated and has elements."""
        for name, update in self.updates.items():
            is_kept = any(0 not in self._layouts[value].size for value in update.state.values())
            if is_kept and name not in state:
                raise InputError(
                    f"optimizer state of {name!r} is missing; go on with the optimizer that the training began with"
                )

    def cut_copies(self, parameters: Mapping[str, Tensor]) -> dict[int, dict[int, Tensor]]:
        """Returns the state of each update that is a copy of its parameter, by value."""
        copies = {
            name: {key: parameters[name] for key, value in update.state.items() if value in self._copied_values}
            for name, update in self.updates.items()
        }
        return self._dealt_out({name: by_key for name, by_key in copies.items() if by_key})

    def _size(self, name: str, value: int) -> Sequence[int]:
        return self._layouts[value].size

    def _dealt_out(self, state: StateByName) -> dict[int, dict[int, Tensor]]:
        content: dict[int, dict[int, Tensor]] = {}
        for name, tensors in state.items():
            update = self.updates[name]
            wholes = {
                update.state[key]: empty(self._layouts[update.state[key]]).copy_(tensor.detach())
                for key, tensor in tensors.items()
            }
            for op, span in update.ops.items():
                if span is None or span[1] > span[0]:
                    content[op] = {value: _piece(whole, self._layouts[value], span) for value, whole in wholes.items()}
        return content

    def _whole(self, value: int, pieces: Sequence[tuple[Span, Tensor]]) -> Tensor:
        layout = self._layouts[value]
        spans = [(span, content) for span, content in pieces if span is not None]
        if not spans or not layout.size:  # a number, such as the count of steps, is the same in all pieces
            return pieces[0][1].detach().to("cpu", copy=True).reshape(layout.size)
        spans.sort(key=lambda piece: piece[0])
        row = torch.cat([content.detach().to("cpu").reshape(-1) for _, content in spans])
        return row.as_strided(layout.size, layout.stride)


class StateOfRanks(OptimizerState):
    """The optimizer state of all ranks, each of which keeps that of its parts."""

    def __init__(self, program: ShardedProgram) -> None:
        super().__init__(program.ranks[0])
        self._program, self._of_ranks = program, [OptimizerState(rank) for rank in program.ranks]
        for name, update in self.updates.items():
            ops = program.numbered([of_rank.updates[name].ops for of_rank in self._of_ranks])
            self.updates[name] = ParameterUpdate(ops, update.state)

    def joined(self, private: Mapping[int, Mapping[int, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Returns copies on the CPU of the whole state, from that of each update."""
        own = zip(self._of_ranks, self._program.of_ranks(private), strict=True)
        states = [of_rank.joined(held) for of_rank, held in own]
        return {
            name: {key: self._program.whole_of(name, [state[name][key] for state in states]) for key in by_key}
            for name, by_key in states[0].items()
        }

    def _size(self, name: str, value: int) -> Sequence[int]:
        size, cut = super()._size(name, value), self._program.cuts.get(name)
        return cut.shape if size and cut is not None else size

    def _dealt_out(self, state: StateByName) -> dict[int, dict[int, Tensor]]:
        found = []
        for rank, own in enumerate(self._of_ranks):
            part_of = partial(self._program.part_of, rank=rank)
            parts = {name: {key: part_of(name, by_key[key]) for key in by_key} for name, by_key in state.items()}
            found.append(own._dealt_out(parts))
        return self._program.numbered(found)


def _piece(whole: Tensor, layout: StridedLayout, span: Span) -> Tensor:
    return whole if span is None or not layout.size else memory_order(whole, layout)[span[0] : span[1]]


SUFFIX = ".safetensors"
_STATE, _OPTIMIZER, _SCALER = "state/", "optimizer/", "scaler/"
_TRAINING = TensorFormat(
    name="gdp-training",
    version=1,
    fields=MappingProxyType({"num_steps": files.is_size, "seed": files.is_size}),
    writer="Placed.save",
    remedy="copy it again or go on from another",
)


@dataclass(frozen=True, eq=False)
class SavedTraining:
    """The state of a training after `num_steps` steps, whatever its layout; tensors are on the CPU."""

    state: Mapping[str, Tensor]  # parameters and buffers by name
    optimizer: StateByName
    scaler: Mapping[str, Tensor]  # of the loss, by key; {} without one
    num_steps: int
    seed: int

    def write(self, path: str | Path) -> None:
        """Writes the file. InputError if its name does not end in .safetensors, or it cannot be written."""
        path = Path(path)
        if path.suffix != SUFFIX:
            raise InputError(f"{path}: a name that ends in {SUFFIX} is expected, such as training{SUFFIX}")
        tensors = {_STATE + name: tensor for name, tensor in self.state.items()}
        tensors |= {
            f"{_OPTIMIZER}{name}/{key}": tensor
            for name, by_key in self.optimizer.items()
            for key, tensor in by_key.items()
        }
        tensors |= {_SCALER + key: tensor for key, tensor in self.scaler.items()}
        content = save(
            {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()},
            _TRAINING.header(num_steps=self.num_steps, seed=self.seed),
        )
        files.write_bytes(path, content)

    @classmethod
    def read(cls, path: str | Path) -> "SavedTraining":
        """Reads the file."""
        with _TRAINING.opened(path, "pt") as (header, file):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(_OPTIMIZER):
                parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
                optimizer.setdefault(parameter, {})[key] = tensor
        state = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name.startswith(_STATE)}
        scaler = {name.removeprefix(_SCALER): item for name, item in tensors.items() if name.startswith(_SCALER)}
        return cls(state, optimizer, scaler, header["num_steps"], header["seed"])


@dataclass(slots=True, eq=False)
class Unstarted:
    """A training before its first step, with the state that was loaded."""

    state: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    is_resumed: bool = False  # after steps that have made optimizer state

    def tensors(self, *, everywhere: bool = True) -> Mapping[str, Tensor]:
        """Returns the parameters and buffers that are not the model's own any more."""
        return self.state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Loads parameters and buffers, and the optimizer's copies of them."""
        self.state |= {name: tensor.detach().clone() for name, tensor in state.items()}
        for name, tensors in self.optimizer_state.items():
            if MASTER in tensors and name in state:
                tensors[MASTER] = state[name].detach().float()

    def optimizer(self, *, everywhere: bool = True) -> dict[str, dict[str, Tensor]]:
        """Returns copies of the optimizer's state."""
        return _copies(self.optimizer_state)

    def load_optimizer(self, state: StateByName) -> None:
        """Loads the optimizer's state, which the first step checks."""
        self.optimizer_state = _copies(state)


@dataclass(slots=True, eq=False)
class Running:
    """A training whose step is captured, with its state on the devices of `executor`."""

    executor: PlanExecutor
    optimizer_state: OptimizerState
    constants: tuple[Any, ...]  # of the arguments at capture: all but tensors' content
    modes: tuple[Any, ...]  # of the model, and of its parameters, at capture
    hyperparameters: Mapping[str, Mapping[str, Any]]  # by parameter, that a user's optimizer has had last
    unused: dict[str, Tensor]  # state that was loaded and is not in the step
    is_first: bool  # the process that writes

    def placed(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers that are on the devices."""
        return self.executor.program.state_by_name(self.executor.state())

    def tensors(self, *, everywhere: bool = True) -> Mapping[str, Tensor]:
        """Returns the parameters and buffers that are not the model's own any more; `everywhere`, or on one rank."""
        held = self.executor.state(everywhere=everywhere)
        is_here = everywhere or self.is_first
        return self.unused | self.executor.program.state_by_name(held) if is_here else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Loads parameters and buffers, and the optimizer's copies of them."""
        placed = self.placed()
        whole = {**placed, **state}
        self.executor.load(self.executor.program.bind_state(whole))
        self.unused |= {name: tensor.clone() for name, tensor in state.items() if name not in placed}
        self.executor.load_private(self.optimizer_state.cut_copies(whole))

    def optimizer(self, *, everywhere: bool = True) -> dict[str, dict[str, Tensor]]:
        """Returns copies of the optimizer's state; `everywhere`, or on one rank."""
        private = self.executor.private(everywhere=everywhere)
        return self.optimizer_state.joined(private) if everywhere or self.is_first else {}

    def load_optimizer(self, state: StateByName) -> None:
        """Loads the optimizer's state. InputError, with nothing changed, for other names or shapes."""
        self.executor.load_private(self.optimizer_state.cut(state))

    def follow(self, hyperparameters: Mapping[str, Mapping[str, Any]]) -> None:
        """Passes on the learning rates, and other hyperparameters, that schedulers have changed."""
        updates = self.optimizer_state.updates
        for name in hyperparameters.keys() & updates.keys() & self.hyperparameters.keys():
            for key, value in hyperparameters[name].items():
                if value != self.hyperparameters[name].get(key):
                    for op in updates[name].ops:
                        self.executor.program.set_keyword(op, key, value)
        self.hyperparameters = hyperparameters


def _copies(state: StateByName) -> dict[str, dict[str, Tensor]]:
    """Returns copies of optimizer state on the CPU."""
    return {
        name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        for name, tensors in state.items()
    }
