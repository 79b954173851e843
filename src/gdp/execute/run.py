"""Execute a plan beside a single device, check what it computes, and compare with the prediction."""

import gc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from gdp.capture import Capture, Program, Replay
from gdp.capture.signature import signatures
from gdp.capture.step import Loss
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.execute.arms import Arm, Order, on_one_device, run_arms
from gdp.execute.equality import (
    Equality,
    compare,
    eager_step,
    full_precision,
    on_cpu,
    rounded_anew,
    updated_outputs,
    without_parameters,
)
from gdp.execute.prediction import Prediction, predict
from gdp.execute.processes import ProcessExecutor
from gdp.execute.ranks import Ranks
from gdp.execute.targets import CPU, Target
from gdp.execute.threads import ThreadExecutor
from gdp.execute.worker import ExecutionError
from gdp.graph import I64, Graph
from gdp.measured_times import OpTime
from gdp.op_costs import without_costs
from gdp.plan import Plan
from gdp.problem import Problem
from gdp.simulate import Simulation, replay

PLACED, ONE_DEVICE = "plan", "one device"
OTHER_SUMS_TOLERANCE = 1e-3  # relative; kernels of other devices, and on more threads, add in another order


@dataclass(frozen=True, eq=False)
class Executable:
    """A model with example inputs, and its captured step."""

    capture: Capture
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None = None  # as `capture` takes it

    def content(self) -> dict[int, Tensor]:
        """Copies of parameters, buffers and inputs, by tensor number. ExecutionError if there is no memory for them."""
        try:
            return self.capture.program.bind(self.model, self.args, self.kwargs)
        except RuntimeError as error:
            raise ExecutionError("cpu", "copying parameters and inputs", error) from error


@dataclass(frozen=True, eq=False)
class Run:
    """What running a plan showed. `one_device` is None where the model does not fit on one, or processes ran."""

    plan: Plan
    graph_name: str
    targets: tuple[Target, ...]
    placed: Arm
    one_device: Arm | None
    one_device_name: str
    equality: Equality
    reference: str  # what the results were compared with
    prediction: Prediction | None  # None if the cluster of the plan is not known

    @property
    def speedup(self) -> float | None:
        """Step time on one device over that of the plan, medians."""
        return self.one_device.median_step_ns / self.placed.median_step_ns if self.one_device else None

    @property
    def is_equal(self) -> bool:
        """Are the results those of the reference: bit for bit on single cores, else as near as other sums come?"""
        return self.equality.is_exact if add_alike(self.targets) else self.equality.is_close(OTHER_SUMS_TOLERANCE)

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.plan.step_time_ns / self.placed.median_step_ns - 1.0


def check_belongs(plan: Plan, placed: Graph, captured: Graph) -> None:
    """InputError unless `plan` is one of `placed`, which is `captured` but for its costs."""
    if plan.graph != placed.fingerprint or without_costs(placed).fingerprint != without_costs(captured).fingerprint:
        raise InputError(
            f"the plan is of graph {plan.graph[:12]}, which is not the step of {captured.name!r} "
            f"({captured.fingerprint[:12]}): the model, its sizes, --inference, --optimizer, measured times or the "
            "version of gdp or PyTorch differ; place it anew"
        )


def run_on_threads(
    executable: Executable,
    plan: Plan,
    targets: Sequence[Target],
    *,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    steps: int = 20,
    warm_up_steps: int = 2,
) -> Run:
    """`steps` steps of the plan, in turn with as many on the device that is fastest alone, and one that is checked.

    `graph` is the one that was placed, where it has measured times; `cluster` allows to compare op by op. The results
    of the first step are compared with PyTorch's own step, or, where the model draws random numbers, with the same
    program on one core. Raises ExecutionError if an op fails, InputError if the plan is of another model or cluster.
    """
    program, simulation = executable.capture.program, _simulation(executable, plan, graph, cluster)
    content = executable.content()
    first = _fastest_device(simulation)
    alone = on_one_device(program.graph.num_ops, first, len(targets))
    found = first_step(program, plan.order, targets, content)
    equality, reference = check_results(executable, content, found, plan.order, targets)
    orders: dict[str, Order] = {PLACED: plan.order, ONE_DEVICE: alone}
    measured: dict[str, Arm] = {}
    while not measured:
        try:
            measured = run_arms(program, content, orders, targets, steps=steps, warm_up_steps=warm_up_steps)
        except ExecutionError as error:
            if not error.is_out_of_memory or ONE_DEVICE not in orders:
                raise
            del orders[ONE_DEVICE]
        gc.collect()  # what the error holds on to
    return Run(
        plan=plan,
        graph_name=program.graph.name,
        targets=tuple(targets),
        placed=measured[PLACED],
        one_device=measured.get(ONE_DEVICE),
        one_device_name=targets[first].name,
        equality=equality,
        reference=reference,
        prediction=None if simulation is None else predict(program, simulation, measured[PLACED]),
    )


def run_on_ranks(
    executable: Executable,
    plan: Plan,
    ranks: Ranks,
    *,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    steps: int = 20,
    warm_up_steps: int = 2,
) -> Run | None:
    """As `run_on_threads`, with a process for each device and nothing beside it; None on all ranks but the first.

    All ranks make this call with the same model and plan.
    """
    program, simulation = executable.capture.program, _simulation(executable, plan, graph, cluster)
    content = executable.content()
    arm = Arm(PLACED, plan.order)
    with ProcessExecutor(program, plan.order, ranks) as executor:
        executor.load(content)
        with full_precision():
            found = executor.results(executor.step(content, retain=True))
        for number in range(-warm_up_steps, steps):
            record = executor.step(content, is_timed=True)
            if number >= 0 and ranks.is_first:
                arm.add(record, program.graph.num_ops)
    if found is None:
        return None
    gpu = next((target.device for target in (ranks.target, *ranks.targets) if target.device.type == "cuda"), CPU)
    here = [replace(target, device=gpu if target.device.type == "cuda" else CPU, cores=()) for target in ranks.targets]
    equality, reference = check_results(executable, content, found, plan.order, here)
    return Run(
        plan=plan,
        graph_name=program.graph.name,
        targets=ranks.targets,
        placed=arm,
        one_device=None,
        one_device_name="",
        equality=equality,
        reference=reference,
        prediction=None if simulation is None else predict(program, simulation, arm),
    )


def op_times(executable: Executable, arms: Sequence[Arm], kinds: Sequence[str]) -> dict[str, list[OpTime]]:
    """By kind of device ([D] `kinds`), what the ops of these arms took there: ops of one signature count as one."""
    names = signatures(executable.capture.program)
    samples: dict[str, dict[str, list[int]]] = {kind: defaultdict(list) for kind in kinds}
    for arm in arms:
        for record in arm.records:
            for kind, device in zip(kinds, record.devices, strict=True):
                for op, start, finish in zip(device.ops, device.start_ns, device.finish_ns, strict=True):
                    samples[kind][names[op]].append(finish - start)
    found: dict[str, list[OpTime]] = {}
    for kind, by_signature in samples.items():
        found[kind] = []
        for signature, times in by_signature.items():
            low, middle, high = np.percentile(times, (25, 50, 75))
            found[kind].append(OpTime(signature, int(middle), int(high - low) // 2, len(times)))
    return found


def first_step(program: Program, order: Order, targets: Sequence[Target], content: Mapping[int, Tensor]) -> Replay:
    """What a step gives, in full precision and on the CPU, so that no memory elsewhere is held by it."""
    with full_precision(), ThreadExecutor(program, order, targets) as executor:
        executor.load(content)
        return on_cpu(executor.results(executor.step(content, retain=True)))


def check_results(
    executable: Executable, content: Mapping[int, Tensor], found: Replay, order: Order, targets: Sequence[Target]
) -> tuple[Equality, str]:
    """How what a step of `order` gave compares, and with what: PyTorch's own step on one core, or, where random numbers
    are drawn, the same program on one core. Kernels that add in another order may differ by the noise of rounding."""
    program, devices = executable.capture.program, [*targets, Target("host", CPU)]
    alone = drawing_alike(program, order, targets)
    noisy = None if add_alike(targets) else first_step(program, alone, devices, rounded_anew(content))
    if not program.num_draws:
        expected = eager_step(program, executable.model, executable.args, executable.kwargs, executable.loss)
        return compare(found, expected, updated_outputs(program), noisy), "PyTorch's own step"
    expected = first_step(program, alone, devices, content)
    if noisy is not None:
        found, expected = without_parameters(found, program), without_parameters(expected, program)
    return compare(found, expected, (), noisy), "the same step on one core (the model draws random numbers)"


def add_alike(targets: Sequence[Target]) -> bool:
    """Do all of them add in the same order, single cores as they are?"""
    return all(target.device.type == "cpu" and target.num_threads == 1 for target in targets)


def drawing_alike(program: Program, order: Order, targets: Sequence[Target]) -> list[I64]:
    """[D + 1] all ops on one device more, the host, but for those that draw random numbers on GPUs in `order`, which
    draw others by the same seed. Ops of a group stay together."""
    groups = program.graph.groups
    home = np.full(program.graph.num_ops, len(targets))
    for number, (ops, target) in enumerate(zip(order, targets, strict=True)):
        if target.device.type != "cpu":
            drawing = [op for op in np.asarray(ops).tolist() if any(call.seed >= 0 for call in program.calls[op])]
            home[drawing] = number
            home[np.isin(groups, groups[drawing]) & (groups >= 0)] = number
    return [np.flatnonzero(home == number) for number in range(len(targets) + 1)]


def _simulation(executable: Executable, plan: Plan, graph: Graph | None, cluster: Cluster | None) -> Simulation | None:
    placed = graph or executable.capture.graph
    check_belongs(plan, placed, executable.capture.graph)
    return None if cluster is None else replay(Problem.build(placed, cluster), plan)


def _fastest_device(simulation: Simulation | None) -> int:
    """The device that would be the fastest with all ops on it; the first if that is not known."""
    if simulation is None:
        return 0
    times = simulation.problem.op_time_ns
    return int(np.argmin(np.where((times < 0).any(axis=0), np.inf, times.sum(axis=0, dtype=np.float64))))
