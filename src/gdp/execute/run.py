"""Execute a plan beside a single device, check its results, and compare with the prediction."""

import gc
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from gdp.arrays import I64
from gdp.cluster import Cluster, Device
from gdp.cluster.catalogue import KINDS
from gdp.cluster.detect import host
from gdp.cluster.detect.gpu_figures import kind_of
from gdp.cluster.detect.nvml import Gpu
from gdp.errors import InputError
from gdp.execute.backends import CPU, Target, find_targets
from gdp.execute.equality import (
    Equality,
    compare,
    eager_parts,
    full_precision,
    noisy_inputs,
    on_cpu,
    updated_outputs,
    without_parameters,
)
from gdp.execute.executable import (
    CaptureOptions,
    Executable,
    PlannedCut,
    as_planned,
    check_belongs,
    check_executable,
    graph_in_plans,
    order_of,
)
from gdp.execute.host_executor import host_executor
from gdp.execute.layouts.sharded_program import ranks_of
from gdp.execute.measurement import Measurement, Order, PlacedProgram, measure_programs, one_device_order
from gdp.execute.plan_executor import ExecutionError
from gdp.execute.prediction import Prediction, predict
from gdp.execute.ranks.rank_executor import ProcessExecutor
from gdp.execute.ranks.ranks import Ranks
from gdp.graph import Graph
from gdp.models.measured_times import OpTime
from gdp.models.pytorch import Program, Replay, capture
from gdp.models.pytorch.capture_step import StepOptions, capture_step
from gdp.models.pytorch.notes import unwrapped
from gdp.parallel.layout import Layout
from gdp.parallel.step import layout_in_flight
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, replay
from gdp.simulator.throughput import Throughput

PLACED, ONE_DEVICE = "plan", "one device"
_BUSY = 0.5  # of the cores, as load average before the run: a device would wait for other work
OTHER_SUMS_TOLERANCE = 1e-3  # relative; kernels of other devices, and on more threads, add in another order


@dataclass(frozen=True, slots=True)
class Served:
    """The steady state of a stream of batches: predicted, and medians of what was measured; in ns."""

    predicted_batch_ns: int
    batch_ns: int  # from the end of a batch to that of the next
    predicted_latency_ns: int
    latency_ns: int

    @classmethod
    def of(cls, simulation: Simulation, layout: Layout, measurement: Measurement) -> "Served":
        """Reads the ends of batches off the measured steps as off the simulation."""
        predicted, found = Throughput.of(simulation, layout), []
        for record in measurement.records:
            start, finish, _ = record.op_times_ns(measurement.num_ops)
            found.append(Throughput.of(replace(simulation, op_begin_ns=start, op_finish_ns=finish), layout))
        times, latencies = ([getattr(one, key) for one in found] for key in ("time_per_batch_ns", "latency_ns"))
        return cls(predicted.time_per_batch_ns, int(np.median(times)), predicted.latency_ns, int(np.median(latencies)))


@dataclass(frozen=True, eq=False)
class RunResult:
    """The measured steps of a plan. `one_device` is None where the model does not fit on one, or processes ran."""

    plan: Plan
    graph_name: str
    targets: tuple[Target, ...]
    placed: Measurement
    equality: Equality
    reference: str  # with which the results were compared
    prediction: Prediction | None  # None if the cluster of the plan is not known
    one_device: Measurement | None = None
    one_device_name: str = ""
    notes: tuple[str, ...] = ()  # what is odd about the machine, in sentences
    layout: str = ""  # in words; "" for a step that is not cut
    sums_alike: bool = True  # gradients are summed in the order of the reference
    whole_batch: Equality | None = None  # of a step that is cut: loss and gradients beside those of the whole batch
    served: Served | None = None  # of a stream of batches

    @property
    def speedup(self) -> float | None:
        """Step time on one device over that of the plan, medians."""
        return self.one_device.median_step_ns / self.placed.median_step_ns if self.one_device else None

    @property
    def is_equal(self) -> bool:
        """Returns whether the results are those of the reference: exactly on single cores, else within tolerance."""
        is_exact = self.sums_alike and add_alike(self.targets)
        return self.equality.is_exact if is_exact else self.equality.is_close(OTHER_SUMS_TOLERANCE)

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.plan.step_time_ns / self.placed.median_step_ns - 1.0


def run(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    on: str | Sequence[str] | None = None,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    steps: int = 20,
    **options: Unpack[CaptureOptions],
) -> RunResult:
    """Executes `plan` of a step of `model(*args, **kwargs)` on this machine: `gdp run` in Python.

    `options` (`training`, `optimizer`, `precision`, `loss`) are those of the capture that was placed; the inputs
    are those of the whole batch. `on` says where devices are, as in `gdp.execute.backends.find_targets`; see
    `gdp.execute.run.run_on_host` for the others and for errors. The model is left as it is."""
    captured = capture(model, args, kwargs, name=type(model).__name__, **options)
    check_executable(captured.program)
    executable = Executable(captured, unwrapped(model), tuple(args), dict(kwargs or {}), options.get("loss"))
    executable = as_planned(
        executable,
        plan,
        lambda args, kwargs, **of_rank: capture_step(model, args, kwargs, StepOptions(**options, **of_rank)),
        placed=graph,
    )
    return run_on_host(executable, plan, find_targets(plan.cards, on), graph=graph, cluster=cluster, steps=steps)


def run_on_host(
    executable: Executable,
    plan: Plan,
    targets: Sequence[Target],
    *,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    steps: int = 20,
    warm_up_steps: int = 2,
    stop: threading.Event | None = None,
) -> RunResult:
    """Measures `steps` steps of the plan, and as many on the device that is fastest alone, and checks one: in turn, or
    on GPUs one after the other. Fewer steps, at least one, when `stop` is set. `graph` is the one that was placed, if
    it has measured times; `cluster` allows to compare op by op. The results of the first step are compared with
    PyTorch's own step, or, where the model draws random numbers, with the same program on the CPU. ExecutionError if an
    op fails, InputError if the plan is of another model or cluster."""
    program, simulation = executable.program, _simulation(executable, plan, graph, cluster)
    notes = tuple(machine_notes(targets, cluster))
    content = executable.content()
    fastest = _fastest_device(simulation) * len(ranks_of(program))
    whole = executable.capture.program
    alone = one_device_order(whole.graph.num_ops, fastest, len(targets))
    order = order_of(program, plan)
    results = first_step(program, order, targets, content)
    check = check_results(executable, content, results, order, targets)
    programs = {
        PLACED: PlacedProgram(program, content, order),
        ONE_DEVICE: PlacedProgram(whole, content if whole is program else executable.content(whole), alone),
    }
    measured: dict[str, Measurement] = {}
    while not measured:
        try:
            measured = measure_programs(programs, targets, steps=steps, warm_up_steps=warm_up_steps, stop=stop)
        except ExecutionError as error:
            if not error.is_out_of_memory or ONE_DEVICE not in programs:
                raise
            del programs[ONE_DEVICE]
        if not measured:
            gc.collect()  # of tensors that the error holds
    placed = _result(executable, plan, targets, results, check, simulation, measured[PLACED])
    return replace(placed, one_device=measured.get(ONE_DEVICE), one_device_name=targets[fastest].name, notes=notes)


def run_on_ranks(
    executable: Executable,
    plan: Plan,
    ranks: Ranks,
    *,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    steps: int = 20,
    warm_up_steps: int = 2,
) -> RunResult | None:
    """Measures and checks as `run_on_host`, with a process for each device and no run on one device. All ranks make
    this call with the same model and plan. None on all ranks but the first."""
    program, simulation = executable.program, _simulation(executable, plan, graph, cluster)
    content = executable.content()
    order = order_of(program, plan)
    measurement = Measurement(order, program.graph.num_ops)
    with ProcessExecutor(program, order, ranks) as executor:
        executor.load(content)
        with full_precision():
            results = executor.results(executor.step(content, retain=True))
        for number in range(-warm_up_steps, steps):
            record = executor.step(content, is_timed=True)
            if number >= 0 and ranks.is_first:
                measurement.add(record)
    if results is None:
        return None
    gpu = next((target.device for target in (ranks.target, *ranks.targets) if target.device.type == "cuda"), CPU)
    here = [replace(target, device=gpu if target.device.type == "cuda" else CPU, cores=()) for target in ranks.targets]
    check = check_results(executable, content, results, order, here)
    return _result(executable, plan, ranks.targets, results, check, simulation, measurement)


def op_times(executable: Executable, run: RunResult, kinds: Sequence[str]) -> dict[str, list[OpTime]]:
    """Returns by kind of device ([D] `kinds`) the times of ops there; ops of one signature count as one. An op that a
    GPU came to before its host had launched all of it has no time: the GPU waited."""
    samples: dict[str, dict[str, list[int]]] = {kind: defaultdict(list) for kind in kinds}
    runs = [(executable.signatures(), run.placed)]
    if run.one_device is not None:  # it runs the whole batch
        runs.append((executable.signatures(executable.capture.program), run.one_device))
    for names, record in ((names, record) for names, measured in runs for record in measured.records):
        for kind, device in zip(kinds, record.devices, strict=True):
            issued_ns = device.issued_ns or device.start_ns
            for op, issued, start, finish in zip(device.ops, issued_ns, device.start_ns, device.finish_ns, strict=True):
                if names[op] and issued <= start:
                    samples[kind][names[op]].append(finish - start)
    pairs = samples.items()
    return {kind: [OpTime.of(signature, times) for signature, times in by.items()] for kind, by in pairs}


def first_step(program: Program, order: Order, targets: Sequence[Target], content: Mapping[int, Tensor]) -> Replay:
    """Returns the results of a step in full precision, on the CPU, so that they hold no memory elsewhere."""
    with full_precision(), host_executor(program, order, targets) as executor:
        executor.load(content)
        results = executor.results(executor.step(content, retain=True))
        assert results is not None, "this process is the first"
        return on_cpu(results)


def check_results(
    executable: Executable, content: Mapping[int, Tensor], results: Replay, order: Order, targets: Sequence[Target]
) -> tuple[Equality, str]:
    """Compares the results of a step of `order`, and names the reference that they are compared with. It is PyTorch's
    own step on the CPU, part by part of the batch where the step is cut, or, where random numbers are drawn, the same
    program there. Where kernels and replicas add in the same order, it computes on one core; else results may differ by
    the noise of rounding."""
    program = executable.program
    is_alike = add_alike(targets) and program.adds_in_order
    aside = Target("host", CPU, () if is_alike else host.all_cores())
    devices, alone = [*targets, aside], drawing_alike(program, order, targets)
    noisy = None if is_alike else first_step(program, alone, devices, noisy_inputs(content))
    if not program.num_draws:
        parts = executable.inputs_of_parts()
        num_first = 1 if executable.parts is None else executable.parts.num_first_parts
        expected = eager_parts(
            program, executable.model, parts, executable.loss, num_first=num_first, num_threads=aside.num_threads
        )
        of_parts = f" on {len(parts)} parts of the batch, one after the other" if len(parts) > 1 else ""
        ends = ["", *(f"@{part}" for part in range(len(parts)))]
        ignored = {output + end for output in updated_outputs(program) for end in ends}
        return compare(results, expected, ignored, noisy), f"PyTorch's own step{of_parts}"
    expected = first_step(program, alone, devices, content)
    if noisy is not None:
        results, expected = without_parameters(results, program), without_parameters(expected, program)
    where = "one core" if is_alike else "the CPU"
    return compare(results, expected, (), noisy), f"the same step on {where} (the model draws random numbers)"


def _result(
    executable: Executable,
    plan: Plan,
    targets: Sequence[Target],
    results: Replay,
    check: tuple[Equality, str],
    simulation: Simulation | None,
    placed: Measurement,
) -> RunResult:
    """Returns the result of measured steps, with what there is to tell of a step that is cut, or of a stream."""
    executed, cut, (equality, reference) = executable.program, executable.parts, check
    program, measured = ranks_of(executed)[0], placed.of_first_rank(len(ranks_of(executed)))
    is_as_placed = simulation is not None and simulation.problem.num_ops == program.graph.num_ops
    prediction = predict(program, simulation, measured) if simulation is not None and is_as_placed else None
    result = RunResult(plan, program.graph.name, tuple(targets), placed, equality, reference, prediction)
    if cut is None:
        words = "" if plan.layout is None else str(Layout.of_document(plan.layout))
        return replace(result, layout=words, sums_alike=executed.adds_in_order)
    how = PlannedCut.of(plan, cut.graph)
    assert how is not None
    if cut.is_stream:
        layout = layout_in_flight(how.layout)
        words = f"{layout.num_parts} batches in flight, replicas of the model: {layout.data}"
        served = None if simulation is None else Served.of(simulation, layout, placed)
        return replace(result, layout=words, served=served)
    result = replace(result, layout=str(Layout.of_document(how.layout)), sums_alike=executed.adds_in_order)
    if cut.num_draws or results.loss is None:
        return result
    batch = executable.args, executable.kwargs
    expected = eager_parts(executable.capture.program, executable.model, [batch], executable.loss)
    whole = compare(replace(results, outputs={}, state={}), replace(expected, outputs={}, state={}))
    return replace(result, whole_batch=whole)


def add_alike(targets: Sequence[Target]) -> bool:
    """Returns whether all targets are single cores, which add in the same order."""
    return all(target.device.type == "cpu" and target.num_threads == 1 for target in targets)


def drawing_alike(program: Program, order: Order, targets: Sequence[Target]) -> list[I64]:
    """[D + 1] Returns the order of all ops on one device more, the host, except ops that draw random numbers on GPUs.
    GPUs draw other numbers by the same seed, so these ops stay on the GPU of `order`, with their groups."""
    groups = program.graph.groups
    home = np.full(program.graph.num_ops, len(targets))
    for number, (ops, target) in enumerate(zip(order, targets, strict=True)):
        if target.device.type != "cpu":
            drawing = [op for op in np.asarray(ops).tolist() if any(call.seed >= 0 for call in program.calls[op])]
            home[drawing] = number
            home[np.isin(groups, groups[drawing]) & (groups >= 0)] = number
    return [np.flatnonzero(home == number) for number in range(len(targets) + 1)]


def _simulation(executable: Executable, plan: Plan, graph: Graph | None, cluster: Cluster | None) -> Simulation | None:
    captured = graph_in_plans(executable.program)
    check_belongs(plan, graph, captured)
    return None if cluster is None else replay(Problem.build(graph or captured, cluster), plan)


def _fastest_device(simulation: Simulation | None) -> int:
    """Returns the device that would be the fastest with all ops on it; the first if that is not known."""
    if simulation is None:
        return 0
    times = simulation.problem.op_time_ns
    return int(np.argmin(np.where((times < 0).any(axis=0), np.inf, times.sum(axis=0, dtype=np.float64))))


def machine_notes(targets: Sequence[Target], cluster: Cluster | None) -> Iterator[str]:
    """Yields sentences for the user, before the plan runs."""
    for first, second in combinations(targets, 2):
        shared = sorted(set(first.cores) & set(second.cores))
        if shared:
            common = "core " + str(shared[0]) if len(shared) == 1 else f"cores {shared[0]}-{shared[-1]}"
            yield (
                f"{first.name} and {second.name} share {common}: they compute in turn, so times are not those of two "
                "devices."
            )
        elif first.device == second.device and first.device.type == "cuda":
            yield f"{first.name} and {second.name} share {first.place}, so times are not those of two devices."
    for target, device in _with_devices(targets, cluster):
        here = host.cpu_kind(target.num_threads)
        if target.device.type == "cpu" and device.kind in KINDS and device.kind != here:
            yield (
                f"{target.name} runs on {target.place} ({here}), which is not a {device.kind}: the prediction is for "
                "another machine; gdp devices measure and --devices local are for this one."
            )
    num_cores = len(host.all_cores())
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > _BUSY * num_cores:
        yield (
            f"The machine was busy before the run (load average {load:.1f} on {num_cores} cores): times are longer "
            "than they would be."
        )


def check_kinds(targets: Sequence[Target], cluster: Cluster, *, is_named: bool = True) -> None:
    """Raises InputError where another kind of device than the plan's runs, under whose name times would be stored. Own
    kinds are what their user says, and any processor stands for one of the catalogue. `is_named` says that GPUs are
    those of this host, whose names the driver knows."""
    for target, device in _with_devices(targets, cluster):
        if target.device.type == "cpu":
            here = device.kind if device.is_cpu else host.cpu_kind(target.num_threads)
        elif is_named:
            here = kind_of(Gpu(torch.cuda.get_device_name(target.device)))
        else:
            here = "cuda" if device.is_cpu else device.kind
        if device.kind in KINDS and here != device.kind:
            raise InputError(
                f"--times: {target.name} of the plan is a {device.kind}, and runs on {target.place} ({here}); place "
                "it with --devices local, or leave --times out"
            )


def _with_devices(targets: Sequence[Target], cluster: Cluster | None) -> Iterator[tuple[Target, Device]]:
    """Yields each target, of the ranks in turn, with the device of the plan that it stands for."""
    devices = () if cluster is None else cluster.devices
    num_ranks = len(targets) // max(len(devices), 1)
    yield from zip(targets, (each for each in devices for _ in range(num_ranks)), strict=False)
