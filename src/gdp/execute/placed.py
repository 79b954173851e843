"""`placed`: train a model with its ops on the devices of a plan.

trained = gdp.placed(model, plan)
for batch in batches:
    loss = trained(*batch)          # forward, backward and update, each op where the plan has it
model.load_state_dict(trained.state_dict())"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gdp.errors import InputError
from gdp.execute.clipping import LossScaler
from gdp.execute.executable import CaptureOptions, bound_inputs, check_choice, order_of, placed_program
from gdp.execute.host_executor import HostRunner
from gdp.execute.layouts.batch import mapped_tensors
from gdp.execute.plan_executor import ExecutionError, PlanExecutor
from gdp.execute.ranks.rank_executor import RankRunner
from gdp.execute.ranks.ranks import is_rank
from gdp.execute.training_state import OptimizerState, Running, SavedTraining, StateByName, Unstarted
from gdp.graph import Graph
from gdp.models.pytorch.notes import unwrapped
from gdp.models.pytorch.optimizers import UpdateRule, rule_of
from gdp.models.pytorch.program import named_inputs, named_state
from gdp.simulator.plan import Plan

Runner = HostRunner | RankRunner  # makes the executor of a training, and ends it with the script


class PlacedOptions(CaptureOptions, total=False):
    """The further options of `placed`."""

    scaler: torch.amp.GradScaler | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The options of `placed` that say how a model is trained."""

    learning_rate: float | None = None
    seed: int = 0
    clip_norm: float | None = None
    stop_at_nan: bool = False
    resume: str | Path | None = None
    scaler: torch.amp.GradScaler | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise InputError(f"{name} is {value!r}; a number above 0 is expected")
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed!r}; an integer from 0 to 2^63 - 1 is expected")
        if self.resume is not None and not isinstance(self.resume, str | Path):
            raise InputError(f"resume is a {type(self.resume).__name__}; the path of a saved training is expected")


class Placed:
    """A model that runs its steps as a plan says; parameters, buffers and optimizer state stay on their devices.

    Make one with `placed`. A call takes the model's own arguments, of the shapes that were placed, and returns the loss
    (without a loss: the outputs by name), a copy on the CPU. Close it, or use it in a `with` statement, to end its
    workers. After a step that failed or was interrupted, its parameters are those of half a step: it takes no more
    calls, and the model stays as it was.

    With a layout a call takes the whole batch and returns the mean of the losses of all micro-batches. States have the
    same form for all layouts: all replicas get what is loaded, ZeRO's pieces are put together and cut again, and
    buffers such as running statistics are those of the first replica.

    `num_steps` counts the calls and sets the random numbers of the next one: set it to go on after a saved state.

    Under torchrun each device has a process. All make the same calls, with the same whole batch, and get the same
    answers; an error on one of them ends all."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        options: CaptureOptions,
        training: TrainingOptions,
        *,
        graph: Graph | None,
        runner: Callable[[], Runner],
    ) -> None:
        optimizer = options.get("optimizer", "adam")
        self._optimizer = optimizer if isinstance(optimizer, Optimizer) else None
        if self._optimizer is not None and training.learning_rate is not None:
            raise InputError("learning_rate is that of the optimizer; leave learning_rate out")
        self.model, self.plan, self.num_steps = unwrapped(model), plan, 0
        check_choice(options, self.model)
        self._scaler = LossScaler(training.scaler)
        self._graph, self._runner = graph, runner()
        self._options, self._training, self._seed = options, training, int(training.seed)
        self._state: Unstarted | Running | None = Unstarted()  # None: it has ended
        if training.resume is not None:
            try:
                self._state = self._resumed(training.resume)
            except BaseException as error:
                self._runner.leave(error)
                raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step on these inputs, a whole batch.

        InputError if the plan is not of this step; ExecutionError if an op fails, or by `stop_at_nan`."""
        state = self._open()
        if isinstance(state, Unstarted):
            state = self._state = self._started(state, args, kwargs)
        elif _constants(args, kwargs) != state.constants:
            raise InputError(
                "arguments that are no tensors differ from those of the first call, which captured the step; "
                "make another placed model for them"
            )
        elif self._modes() != state.modes:
            raise InputError(
                "train() or eval(), requires_grad or the optimizer's parameters have changed since the first call, "
                "which captured the step; set them back and evaluate a copy of the model, or make another placed model"
            )
        executor, program = state.executor, state.executor.program
        state.follow(self._current_hyperparameters())
        self._scaler.begin()
        inputs = bound_inputs(program, args, kwargs)
        seed = int(np.random.SeedSequence((self._seed, self.num_steps)).generate_state(1)[0])
        record = executor.step(inputs, retain=program.loss is None, seed=seed)
        self.num_steps += 1
        self._scaler.end(executor, record)
        if program.loss is not None:
            return self._checked(executor, executor.loss(record))
        outputs = executor.outputs(record)
        return {name: tensor.to("cpu", copy=True) for name, tensor in outputs.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the model's `state_dict`, with parameters and buffers as they are now; copies, on the CPU.

        ExecutionError after a step that failed."""
        whole = self._whole(self._open().tensors())
        return {name: whole[name] for name in self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads parameters and buffers; optimizer state stays, but for float32 copies of parameters.

        InputError, with nothing changed, unless the names, shapes and types are those of the model's `state_dict`."""
        _check_state(state, self.model.state_dict(), "give the model's state_dict")
        self._open().load(state)

    def optimizer_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns by parameter the optimizer's state; copies, on the CPU.

        The keys are those of `torch.optim`: Adam has `exp_avg`, `exp_avg_sq` and `step`, plain SGD none. `master` is a
        float32 copy of the parameter. Empty before the first step, unless a state was loaded."""
        return self._open().optimizer()

    def load_optimizer_state_dict(self, state: StateByName) -> None:
        """Loads the state that `optimizer_state_dict` returned, in this layout or another.

        InputError, with nothing changed, for other names or shapes; before the first step, which captures the
        optimizer, the first step raises it."""
        self._open().load_optimizer(state)

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file to go on from, by `placed(..., resume=path)`; it is whole or not written at all.

        It has parameters, buffers, optimizer state, number of steps and seed. Under torchrun the first rank writes it,
        the others return when it is there. InputError if it is not written, ExecutionError after a step that failed."""
        state = self._open()
        tensors, optimizer = state.tensors(everywhere=False), state.optimizer(everywhere=False)

        def write() -> None:
            tied, whole = _tied_names(self.model), self._whole(tensors)
            alone = {name: tensor for name, tensor in whole.items() if tied.get(name, name) == name}
            SavedTraining(alone, optimizer, self._scaler.tensors(), self.num_steps, self._seed).write(path)

        self._runner.write_once(write)

    def close(self) -> None:
        """Ends the workers and writes parameters and buffers back to the model, unless the last step failed."""
        state, self._state = self._state, None
        placed: Mapping[str, Tensor] = {}
        try:
            if isinstance(state, Unstarted) or (state is not None and not state.executor.is_closed):
                placed = state.tensors()
        finally:
            self._runner.close()
        with torch.no_grad():
            for name, tensor in named_state(self.model):
                if name in placed:
                    tensor.data.copy_(placed[name])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or self._runner.is_alone:
            self.close()
        else:
            self._state = None
            self._runner.leave(error)

    def _open(self) -> Unstarted | Running:
        """Returns the state; ExecutionError if it cannot go on."""
        if self._state is None:
            raise ExecutionError("all", "the placed model is closed; make another")
        if isinstance(self._state, Running) and self._state.executor.is_closed:
            raise ExecutionError(
                "all", "a step failed, so parameters are those of half a step; go on from a saved state"
            )
        return self._state

    def _started(self, loaded: Unstarted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Running:
        """Captures the step, and starts the workers with the model's state and the loaded one."""
        program = placed_program(
            self.model,
            self.plan,
            args,
            kwargs,
            graph=self._graph,
            learning_rate=self._training.learning_rate,
            options=self._options,
        )
        program, order = self._scaler.built(program, order_of(program, self.plan), self._training.clip_norm)
        optimizer_state = OptimizerState.of(program)
        hyperparameters = self._current_hyperparameters()
        state = {**dict(named_state(self.model)), **loaded.state}
        content = program.bind_state(state)
        private = optimizer_state.cut(loaded.optimizer_state)
        if loaded.is_resumed:
            optimizer_state.check_complete(loaded.optimizer_state)
        moments = {f"{name} {key}": item for name, by in loaded.optimizer_state.items() for key, item in by.items()}
        options = replace(self._training, resume=None, scaler=None), sorted(self._scaler.state().items())
        settings = options, self.num_steps, self._seed, sorted(hyperparameters.items())
        executor = self._runner.start(program, order, state | moments | dict(named_inputs(args, kwargs)), settings)
        try:
            executor.load(content)
            executor.load_private(private)
        except BaseException as error:
            executor.leave(error)
            raise
        unused = {name: tensor for name, tensor in loaded.state.items() if name not in program.state_names}
        is_first = self._runner.is_first
        constants = _constants(args, kwargs)
        return Running(executor, optimizer_state, constants, self._modes(), hyperparameters, unused, is_first)

    def _resumed(self, path: str | Path) -> Unstarted:
        saved = SavedTraining.read(path)
        tied = _tied_names(self.model)
        expected = {**dict(named_state(self.model)), **self.model.state_dict()}
        state = {name: saved.state[tied[name]] for name in tied if tied[name] in saved.state} | dict(saved.state)
        _check_state(state, expected, "give the model that was saved", f"{path}: ")
        self._scaler.load(saved.scaler, str(path))
        self.num_steps, self._seed = saved.num_steps, saved.seed
        optimizer_state = {name: dict(tensors) for name, tensors in saved.optimizer.items()}
        return Unstarted(state, optimizer_state, is_resumed=saved.num_steps > 0)

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies on the CPU of all parameters, buffers and plain tensors, under each of their names.

        `tensors` are those that are not the model's own any more."""
        current = {**dict(named_state(self.model)), **self.model.state_dict(), **tensors}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in current.items()}

    def _checked(self, executor: PlanExecutor, loss: Tensor | None) -> Tensor | None:
        """Returns the loss; ExecutionError, after which no step is taken, if it ends the training."""
        if self._training.stop_at_nan and loss is not None and not bool(torch.isfinite(loss)):
            executor.close()
            raise self._runner.error_of_all(
                f"step {self.num_steps}: the loss is {float(loss)}",
                "; go on from a saved state with a lower learning rate, or clip_norm",
            )
        return loss

    def _modes(self) -> tuple[list[bool], list[bool], list[int]]:
        """Returns what a captured step does not follow: modes of modules, and which parameters are trained."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return (
            [module.training for module in self.model.modules()],
            [parameter.requires_grad for parameter in self.model.parameters()],
            [id(parameter) for group in groups for parameter in group["params"]],
        )

    def _current_hyperparameters(self) -> dict[str, Mapping[str, Any]]:
        """Returns the hyperparameters of each update, by parameter, as a user's optimizer has them now."""
        if self._optimizer is None:
            return {}
        paths = {id(parameter): path for path, parameter in self.model.named_parameters()}
        options: dict[str, Mapping[str, Any]] = {}
        for group in self._optimizer.param_groups:
            rule = rule_of(self._optimizer, group)
            if isinstance(rule, UpdateRule):
                options |= {
                    paths[id(parameter)]: rule.options for parameter in group["params"] if id(parameter) in paths
                }
        return options


def placed(
    model: nn.Module,
    plan: Plan,
    *,
    graph: Graph | None = None,
    on: Sequence[str] | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
    clip_norm: float | None = None,
    stop_at_nan: bool = False,
    resume: str | Path | None = None,
    **options: Unpack[PlacedOptions],
) -> Placed:
    """Places `model` on the devices of `plan`; the answer takes the model's arguments and does one step a call.

    Single cores are processes that are forked from this one, other devices threads; if torchrun has started this
    process, it is one of the devices.

    The first call captures the step, which must be the one that was placed: the same shapes and the same `options`
    (`training`, `optimizer`, `precision`, `loss`, as in `gdp.capture`). A plan with a layout takes the whole
    batch and cuts it. An optimizer of `torch.optim` gives its hyperparameters, not its state; a learning rate or
    momentum that a scheduler changes is that of the next step. `learning_rate` is for an optimizer given by name;
    default: that of `torch.optim`. `clip_norm` clips gradients as `torch.nn.utils.clip_grad_norm_` does. `graph` is
    the placed graph, if it has measured times. `on` says where each device of the plan is (see
    `gdp.execute.backends.find_targets`); default: by name. `seed` sets dropout and the like apart from other runs.
    `stop_at_nan` ends the training at a loss that is not finite. `scaler` scales the loss of a step of float16
    autocast, as `scaler.scale(loss).backward()`, `scaler.step(optimizer)` and `scaler.update()` do: it leaves out
    updates after an overflow, grows and backs off. `resume` is a file that `Placed.save` wrote, with any layout:
    parameters, buffers, the optimizer's state, that of the scaler, the number of steps and the seed are those of
    the file. The model itself is left as it is until `close`, which writes parameters and buffers back."""
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}; a gdp.Plan is expected, as gdp.Plan.load(path) returns")
    training = TrainingOptions(
        learning_rate=learning_rate,
        seed=seed,
        clip_norm=clip_norm,
        stop_at_nan=stop_at_nan,
        resume=resume,
        scaler=options.pop("scaler", None),
    )

    def runner() -> Runner:
        return RankRunner(plan.cards, on) if is_rank() else HostRunner(plan.cards, on)

    return Placed(model, plan, options, training, graph=graph, runner=runner)


def _check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], remedy: str, where: str = "") -> None:
    if state.keys() != expected.keys():
        difference = min(state.keys() ^ expected.keys())
        raise InputError(f"{where}state {difference!r} is {'unknown' if difference in state else 'missing'}; {remedy}")
    for name, tensor in state.items():
        here, there = (f"{list(item.shape)} {item.dtype}" for item in (tensor, expected[name]))
        if here != there:
            raise InputError(f"{where}state {name!r} is {here}; {there} is expected")


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Returns by name of a parameter or buffer the first name that it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_state(model)}


def _constants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments with `Tensor` in place of each tensor."""
    constants: tuple[Any, ...] = mapped_tensors((args, kwargs), lambda _: Tensor)
    return constants
