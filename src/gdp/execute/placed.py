"""`placed`: train a model with its ops on the devices of a plan.

trained = gdp.placed(model, plan)
for batch in batches:
    loss = trained(*batch)          # forward, backward and update, each op where the plan has it
model.load_state_dict(trained.state_dict())
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from gdp.capture import Program, capture
from gdp.capture.program import Call
from gdp.capture.step import Loss, OptimizerName
from gdp.errors import InputError
from gdp.execute.run import check_belongs
from gdp.execute.targets import find_targets
from gdp.execute.threads import ThreadExecutor
from gdp.graph import Graph
from gdp.plan import Plan


class Placed:
    """A model whose steps run as a plan says; parameters, buffers and optimizer state stay on their devices.

    Make one with `placed`. A call takes the model's own arguments, of the shapes that were placed, and returns the loss
    (without a loss: the outputs by name), a copy on the CPU. Close it, or use it in a `with` statement, to end its
    threads.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, *, graph: Graph | None, on: Sequence[str] | None, training: bool,
        optimizer: OptimizerName, learning_rate: float, loss: Loss | None, seed: int,
    ) -> None:  # fmt: skip
        if not learning_rate > 0:
            raise InputError(f"learning_rate is {learning_rate}; a number above 0 is expected")
        self.model, self.plan, self.num_steps = model, plan, 0
        self._graph, self._targets = graph, find_targets(plan.devices, on)
        self._options: dict[str, Any] = {"training": training, "optimizer": optimizer, "loss": loss}
        self._learning_rate, self._seed = learning_rate, seed
        self._executor: ThreadExecutor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step on these inputs. InputError if the plan is not of this step; ExecutionError if an op fails."""
        executor = self._executor
        if executor is None:
            executor = self._executor = self._start(args, kwargs)
        program = executor.program
        inputs = program.bind_inputs(args, kwargs)
        seed = (self._seed + self.num_steps) * program.num_draws
        record = executor.step(inputs, retain=program.loss is None, seed=seed)
        self.num_steps += 1
        if program.loss is not None:
            return executor.loss(record)
        outputs = executor.results(record).outputs
        return {name: tensor.to("cpu", copy=True) for name, tensor in outputs.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`, with parameters and buffers as they are now; copies, on the CPU."""
        current = self.model.state_dict()
        if self._executor is None:
            return {name: tensor.detach().clone() for name, tensor in current.items()}
        placed = self._executor.program.state_by_name(self._executor.state())
        return {name: placed.get(name, tensor).detach().cpu().clone() for name, tensor in current.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from these parameters and buffers, as `nn.Module.load_state_dict`; optimizer state stays."""
        self.model.load_state_dict(dict(state))
        if self._executor is not None:
            self._executor.load(self._executor.program.bind_state(self.model))

    def optimizer_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """By parameter, Adam's `exp_avg`, `exp_avg_sq` and `step` (SGD has none); copies, on the CPU."""
        if self._executor is None:
            return {}
        private, found = self._executor.private(), {}
        for op, values in self._executor.program.private.items():
            name = self._executor.program.graph.op_names[op].removesuffix(".update")
            if all(value in private for value in values):
                found[name] = {
                    key: private[value].detach().cpu().clone() for key, value in zip(_ADAM, values, strict=True)
                }
        return found

    def load_optimizer_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `optimizer_state_dict` gave. InputError before the first step, and for unknown parameters."""
        if self._executor is None:
            raise InputError("the optimizer's state is made with the first step; load it after one")
        self._executor.load_private(self._private_values(self._executor.program, state))

    def close(self) -> None:
        """End the worker threads and write parameters and buffers back to the model."""
        if self._executor is not None:
            state = self.state_dict()
            self._executor.close()
            self._executor = None
            self.model.load_state_dict(state)

    def __enter__(self) -> "Placed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ThreadExecutor:
        made = capture(self.model, args, kwargs, name=type(self.model).__name__, **self._options)
        check_belongs(self.plan, self._graph or made.graph, made.graph)
        program = _with_learning_rate(made.program, self._learning_rate)
        executor = ThreadExecutor(program, self.plan.order, self._targets)
        executor.load(program.bind_state(self.model))
        return executor

    def _private_values(self, program: Program, state: Mapping[str, Mapping[str, Tensor]]) -> dict[int, Tensor]:
        ops = {program.graph.op_names[op].removesuffix(".update"): op for op in program.private}
        if unknown := state.keys() - ops.keys():
            raise InputError(f"optimizer state of {min(unknown)!r}: the model has no such trained parameter")
        return {
            value: tensors[key]
            for name, tensors in state.items()
            for key, value in zip(_ADAM, program.private[ops[name]], strict=True)
        }


_ADAM = ("exp_avg", "exp_avg_sq", "step")  # the order of `capture.optimizers`


def placed(
    model: nn.Module,
    plan: Plan,
    *,
    graph: Graph | None = None,
    on: Sequence[str] | None = None,
    training: bool = True,
    optimizer: OptimizerName = "adam",
    learning_rate: float = 1e-3,
    loss: Loss | None = None,
    seed: int = 0,
) -> Placed:
    """`model` on the devices of `plan`: what it returns takes the model's arguments and does one step.

    The first call captures the step, which must be the one that was placed: the same shapes, `training`, `optimizer`
    and `loss`. `graph` is what was placed, if it has measured times. `on` says where each device of the plan is (see
    `gdp.execute.targets.find_targets`); default: by name. `seed` sets dropout and the like apart from other runs.
    The model itself is left as it is until `close`, which writes the trained parameters back.
    """
    return Placed(
        model, plan, graph=graph, on=on, training=training, optimizer=optimizer, learning_rate=learning_rate,
        loss=loss, seed=seed,
    )  # fmt: skip


def _with_learning_rate(program: Program, learning_rate: float) -> Program:
    def changed(call: Call) -> Call:
        return replace(call, kwargs={**call.kwargs, "lr": learning_rate}) if "lr" in call.kwargs else call

    phases = program.graph.phases
    calls = [
        tuple(map(changed, calls)) if phase == "update" else calls
        for calls, phase in zip(program.calls, phases, strict=True)
    ]
    return replace(program, calls=tuple(calls))
