"""`run`: execute a plan beside a single device, check what it computes, and compare with the prediction."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from gdp.capture import Capture
from gdp.capture.signature import signatures
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.execute.arms import Arm, Order, on_one_device, run_arms
from gdp.execute.equality import Equality, compare, eager_step
from gdp.execute.prediction import Prediction, predict
from gdp.execute.targets import Target
from gdp.execute.threads import ThreadExecutor
from gdp.execute.worker import ExecutionError
from gdp.graph import Graph
from gdp.measured_times import OpTime, without_times
from gdp.plan import Plan
from gdp.problem import Problem
from gdp.simulate import replay

PLACED, ONE_DEVICE = "plan", "one device"
CPU_TOLERANCE, MIXED_TOLERANCE = 0.0, 1e-3  # relative; kernels of other devices add in another order


@dataclass(frozen=True, eq=False)
class Executable:
    """A model with example inputs, and its captured step."""

    capture: Capture
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def content(self) -> dict[int, Tensor]:
        """Copies of parameters, buffers and inputs, by tensor number."""
        return self.capture.program.bind(self.model, self.args, self.kwargs)


@dataclass(frozen=True, eq=False)
class Run:
    """What running a plan showed. `one_device` is None where the model does not fit on one."""

    plan: Plan
    graph: Graph
    targets: tuple[Target, ...]
    placed: Arm
    one_device: Arm | None
    one_device_name: str
    equality: Equality
    reference: str  # what the results were compared with
    is_equal: bool  # within the tolerance of the devices
    prediction: Prediction | None  # None if the cluster of the plan is not known

    @property
    def speedup(self) -> float | None:
        """Step time on one device over that of the plan, medians."""
        return self.one_device.median_step_ns / self.placed.median_step_ns if self.one_device else None

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.plan.step_time_ns / self.placed.median_step_ns - 1.0


def check_belongs(plan: Plan, placed: Graph, captured: Graph) -> None:
    """InputError unless `plan` is one of `placed`, which is `captured` but for measured times."""
    if plan.graph != placed.fingerprint or without_times(placed).fingerprint != without_times(captured).fingerprint:
        raise InputError(
            f"the plan is of graph {plan.graph[:12]}, which is not the step of {captured.name!r} "
            f"({captured.fingerprint[:12]}): the model, its sizes, --inference, --optimizer, measured times or the "
            "version of gdp or PyTorch differ; place it anew"
        )


def run(
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
    program on one device. Raises ExecutionError if an op fails, InputError if the plan is of another model or cluster.
    """
    program, placed_graph = executable.capture.program, graph or executable.capture.graph
    check_belongs(plan, placed_graph, executable.capture.graph)
    problem = Problem.build(placed_graph, cluster) if cluster is not None else None
    simulation = replay(problem, plan) if problem is not None else None
    content = executable.content()
    first = _fastest_device(problem)
    alone = on_one_device(program.graph.num_ops, first, len(targets))
    equality, reference = check_results(executable, content, plan.order, alone, targets)
    arms: dict[str, Order] = {PLACED: plan.order, ONE_DEVICE: alone}
    try:
        measured = run_arms(program, content, arms, targets, steps=steps, warm_up_steps=warm_up_steps)
    except ExecutionError as error:
        if not error.is_out_of_memory:
            raise
        measured = run_arms(program, content, {PLACED: plan.order}, targets, steps=steps, warm_up_steps=warm_up_steps)
    is_mixed = any(target.device.type != "cpu" for target in targets)
    return Run(
        plan=plan,
        graph=placed_graph,
        targets=tuple(targets),
        placed=measured[PLACED],
        one_device=measured.get(ONE_DEVICE),
        one_device_name=targets[first].name,
        equality=equality,
        reference=reference,
        is_equal=equality.is_close(MIXED_TOLERANCE if is_mixed else CPU_TOLERANCE),
        prediction=None if simulation is None else predict(program, simulation, measured[PLACED]),
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


def _fastest_device(problem: Problem | None) -> int:
    if problem is None:
        return 0
    times = np.where((problem.op_time_ns < 0).any(axis=0), np.inf, problem.op_time_ns.sum(axis=0, dtype=np.float64))
    return int(np.argmin(times))


def check_results(
    executable: Executable, content: Mapping[int, Tensor], order: Order, alone: Order, targets: Sequence[Target]
) -> tuple[Equality, str]:
    """How the first step in `order` compares, and with what: PyTorch's own step, or, where random numbers are drawn,
    the same program in the order `alone` on one device."""
    program = executable.capture.program

    def first_step(order: Order) -> Any:
        with ThreadExecutor(program, order, targets) as executor:
            executor.load(content)
            return executor.results(executor.step(content, retain=True))

    found = first_step(order)
    if program.num_draws:
        return compare(found, first_step(alone)), "the same step on one device (the model draws random numbers)"
    expected = eager_step(program, executable.model, executable.args, executable.kwargs)
    return compare(found, expected), "PyTorch's own step"
