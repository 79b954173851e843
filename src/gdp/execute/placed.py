"""`placed`: train a model with its ops on the devices of a plan.

trained = gdp.placed(model, plan)
for batch in batches:
    loss = trained(*batch)          # forward, backward and update, each op where the plan has it
model.load_state_dict(trained.state_dict())
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from gdp.errors import InputError
from gdp.execute.executable import CaptureOptions, check_choice, check_executable
from gdp.execute.run import check_belongs
from gdp.execute.targets import find_targets
from gdp.execute.threads import ThreadExecutor
from gdp.execute.worker import ExecutionError
from gdp.graph import Graph
from gdp.models.pytorch import Program, capture
from gdp.models.pytorch.program import Call, named_inputs, named_state
from gdp.simulator.plan import Plan


class Placed:
    """A model that runs its steps as a plan says; parameters, buffers and optimizer state stay on their devices.

    Make one with `placed`. A call takes the model's own arguments, of the shapes that were placed, and returns the loss
    (without a loss: the outputs by name), a copy on the CPU. Close it, or use it in a `with` statement, to end its
    threads. After a step that failed or was interrupted, its parameters are those of half a step: it takes no more
    calls, and the model stays as it was.

    `num_steps` counts the calls and sets the random numbers of the next one: set it to go on after a saved state.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        graph: Graph | None,
        on: Sequence[str] | None,
        learning_rate: float | None,
        seed: int,
        options: CaptureOptions,
    ) -> None:
        if learning_rate is not None and not 0 < learning_rate < float("inf"):
            raise InputError(f"learning_rate is {learning_rate}; a number above 0 is expected")
        optimizer = options.get("optimizer", "adam")
        self._optimizer = optimizer if isinstance(optimizer, Optimizer) else None
        if self._optimizer is not None and learning_rate is not None:
            raise InputError("learning_rate is that of the optimizer; leave learning_rate out")
        check_choice(options, model)
        self.model, self.plan, self.num_steps = model, plan, 0
        self._graph, self._targets = graph, find_targets(plan.devices, on)
        self._options, self._learning_rate, self._seed = options, learning_rate, seed
        self._executor: ThreadExecutor | None = None
        self._loaded_state: dict[str, Tensor] = {}
        self._learning_rates: dict[int, float] = {}  # of the updates, by op, that a user's optimizer has had last
        self._constants: tuple[Any, ...] = ()  # of the arguments at capture: all but tensors' content
        self._is_closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step on these inputs. InputError if the plan is not of this step; ExecutionError if an op fails."""
        executor = self._running()
        if executor is None:
            executor = self._start(args, kwargs)
        elif _constants(args, kwargs) != self._constants:
            raise InputError(
                "arguments that are no tensors differ from those of the first call, which captured the step; "
                "make another placed model for them"
            )
        program = executor.program
        self._follow_learning_rates(program)
        inputs = self._bound_inputs(program, args, kwargs)
        seed = int(np.random.SeedSequence((self._seed, self.num_steps)).generate_state(1)[0])
        record = executor.step(inputs, retain=program.loss is None, seed=seed)
        self.num_steps += 1
        if program.loss is not None:
            return executor.loss(record)
        outputs = executor.results(record).outputs
        return {name: tensor.to("cpu", copy=True) for name, tensor in outputs.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the model's `state_dict`, with parameters and buffers as they are now; copies, on the CPU.

        ExecutionError after a step that failed.
        """
        current = {**self.model.state_dict(), **self._loaded_state}
        executor = self._running()
        placed = executor.program.state_by_name(executor.state()) if executor is not None else {}
        return {name: placed.get(name, tensor).detach().to("cpu", copy=True) for name, tensor in current.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads parameters and buffers; optimizer state stays.

        InputError, with nothing changed, unless the names, shapes and types are those of the model's `state_dict`.
        """
        expected = self.model.state_dict()
        if state.keys() != expected.keys():
            odd = min(state.keys() ^ expected.keys())
            raise InputError(
                f"state {odd!r} is {'unknown' if odd in state else 'missing'}; give the model's state_dict"
            )
        for name, tensor in state.items():
            here, there = (f"{list(item.shape)} {item.dtype}" for item in (tensor, expected[name]))
            if here != there:
                raise InputError(f"state {name!r} is {here}; {there} is expected")
        executor = self._running()
        if executor is None:
            self._loaded_state = {name: tensor.detach().clone() for name, tensor in state.items()}
        else:
            program = executor.program
            whole = {**program.state_by_name(executor.state()), **state}
            executor.load(program.bind_state(whole))
            copies = {
                op: {value: whole[name] for value in program.private[op] if value in program.state_copies}
                for name, op in _updates(program).items()
                if op in program.private
            }
            executor.load_private({op: values for op, values in copies.items() if values})

    def optimizer_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns by parameter the optimizer's state; copies, on the CPU.

        The keys are those of `torch.optim`: Adam has `exp_avg`, `exp_avg_sq` and `step`, plain SGD none. `master` is a
        float32 copy of the parameter.
        """
        executor = self._running()
        if executor is None:
            return {}
        private, keys = executor.private(), executor.program.state_keys
        return {
            name: {keys[value]: tensor.detach().to("cpu", copy=True) for value, tensor in private[op].items()}
            for name, op in _updates(executor.program).items()
            if op in private
        }

    def load_optimizer_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Loads the state that `optimizer_state_dict` returned.

        InputError, with nothing changed, before the first step and for other names or shapes.
        """
        executor = self._running()
        if executor is None:
            raise InputError("the optimizer's state is made with the first step; load it after one")
        program = executor.program
        updates, content = _updates(program), {}
        states = {name: program.private[op] for name, op in updates.items() if op in program.private}
        for name, tensors in state.items():
            keys = {program.state_keys[value]: value for value in states.get(name, ())}
            if not keys or tensors.keys() != keys.keys():
                expected = ", ".join(
                    keys or {program.state_keys[value]: 0 for values in states.values() for value in values}
                )
                raise InputError(f"optimizer state of {name!r}: {expected} of a trained parameter are expected")
            for key, value in keys.items():
                size = program.layouts[value].size
                if tuple(tensors[key].shape) != size:
                    here = list(tensors[key].shape)
                    raise InputError(f"optimizer state {key} of {name!r} is {here}; {list(size)} is expected")
            content[updates[name]] = {value: tensors[key] for key, value in keys.items()}
        executor.load_private(content)

    def close(self) -> None:
        """Ends the worker threads and writes parameters and buffers back to the model, unless the last step failed."""
        self._is_closed = True
        executor, self._executor = self._executor, None
        if executor is None or executor.is_closed:
            return
        placed = executor.program.state_by_name(executor.state())
        executor.close()
        with torch.no_grad():
            for name, tensor in named_state(self.model):
                if name in placed:
                    tensor.data.copy_(placed[name])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _running(self) -> ThreadExecutor | None:
        """Returns the executor, None before the first step; ExecutionError if it cannot go on."""
        if self._is_closed:
            raise ExecutionError("all", "the placed model is closed; make another")
        if self._executor is not None and self._executor.is_closed:
            raise ExecutionError(
                "all", "a step failed, so parameters are those of half a step; go on from a saved state"
            )
        return self._executor

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ThreadExecutor:
        captured = capture(self.model, args, kwargs, name=type(self.model).__name__, **self._options)
        check_belongs(self.plan, self._graph or captured.graph, captured.graph)
        check_executable(captured.program)
        program = captured.program
        if self._learning_rate is not None:
            program = _with_learning_rate(program, self._learning_rate)
        executor = ThreadExecutor(program, self.plan.order, self._targets)
        try:
            executor.load(program.bind_state({**dict(named_state(self.model)), **self._loaded_state}))
        except BaseException:
            executor.close()
            raise
        self._executor, self._constants = executor, _constants(args, kwargs)
        self._learning_rates = self._current_learning_rates(program)
        return executor

    def _current_learning_rates(self, program: Program) -> dict[int, float]:
        """Returns the learning rate of each update, by op, as a user's optimizer has it now."""
        if self._optimizer is None:
            return {}
        paths = {id(parameter): path for path, parameter in self.model.named_parameters()}
        rates = {
            paths[id(parameter)]: float(group["lr"])
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        return {op: rates[path] for path, op in _updates(program).items()}

    def _follow_learning_rates(self, program: Program) -> None:
        """Passes on the learning rates that a scheduler has changed."""
        current = self._current_learning_rates(program)
        for op, rate in current.items():
            if rate != self._learning_rates[op]:
                program.set_learning_rate(op, rate)
        self._learning_rates = current

    def _bound_inputs(self, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
        """Copies the inputs. InputError names the remedy where a batch is smaller than the captured one."""
        try:
            return program.bind_inputs(args, kwargs)
        except InputError as error:
            captured = _batch_sizes(program)
            given = {name: tensor.shape[0] for name, tensor in named_inputs(args, kwargs) if tensor.dim()}
            for name, size in captured.items():
                if name in given and given[name] < size:
                    raise InputError(
                        f"{name!r} has {given[name]} samples, and steps of {size} are placed: give the DataLoader "
                        "drop_last=True, or skip or pad the last batch"
                    ) from None
            raise error


def placed(
    model: nn.Module,
    plan: Plan,
    *,
    graph: Graph | None = None,
    on: Sequence[str] | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
    **options: Unpack[CaptureOptions],
) -> Placed:
    """Places `model` on the devices of `plan`; the answer takes the model's arguments and does one step a call.

    The first call captures the step, which must be the one that was placed: the same shapes and the same `options`
    (`training`, `optimizer`, `master_weights`, `loss`, as in `gdp.capture`). An optimizer of `torch.optim` gives its
    hyperparameters, not its state; a learning rate that a scheduler changes is that of the next step. `learning_rate`
    is for an optimizer given by name; default: that of `torch.optim`. `graph` is the placed graph, if it has measured
    times. `on` says where each device of the plan is (see `gdp.execute.targets.find_targets`); default: by name. `seed`
    sets dropout and the like apart from other runs. The model itself is left as it is until `close`, which writes
    parameters and buffers back.
    """
    return Placed(model, plan, graph=graph, on=on, learning_rate=learning_rate, seed=seed, options=options)


def _with_learning_rate(program: Program, learning_rate: float) -> Program:
    def changed(call: Call) -> Call:
        return replace(call, kwargs={**call.kwargs, "lr": learning_rate}) if "lr" in call.kwargs else call

    phases = program.graph.phases
    calls = [
        tuple(map(changed, calls)) if phase == "update" else calls
        for calls, phase in zip(program.calls, phases, strict=True)
    ]
    return replace(program, calls=tuple(calls))


def _updates(program: Program) -> dict[str, int]:
    """Returns the op that updates each parameter."""
    graph = program.graph
    updates = [op for op, phase in enumerate(graph.phases) if phase == "update"]
    return {graph.op_names[op].removesuffix(".update"): op for op in updates}


def _batch_sizes(program: Program) -> dict[str, int]:
    """Returns the first dimension of each input."""
    views = [source.views for source in program.sources.values() if source.kind == "input"]
    return {name: view.size[0] for named in views for name, view in named.items() if view.size}


def _constants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the structure of the arguments, and those that are no tensors."""
    leaves, structure = tree_flatten((args, kwargs))
    return structure, *(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
