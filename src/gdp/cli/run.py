"""Executes a plan: `gdp run`."""

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdp.cli import options
from gdp.cli.shared import INTERRUPTED, check_times_file, fail, log, print_json, show, warm_up
from gdp.errors import InputError, prefixed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from gdp.cluster import Cluster
    from gdp.execute.executable import Executable
    from gdp.execute.run import RunResult
    from gdp.models.source import ModelSource
    from gdp.planning.plan_source import PlanSource
    from gdp.simulator.plan import Plan

OK, FAILED, OUT_OF_MEMORY = 0, 1, 3


@options.with_options
def run(
    plan_or_model: options.PlanOrModelArgument,
    plan: options.PlanOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps, after two to warm up.")] = 20,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="The place of each device of the plan, such as cpu:0, cpu:0-3, cuda:0. Default: by name.",
        ),
    ] = None,
    devices: options.PlacedDevicesOption = None,
    times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Store measured op times there, for `gdp place --times`.")
    ] = None,
    inference: options.InferenceOption = False,
    dtype: options.DtypeOption = "",
    optimizer: options.OptimizerOption = "adam",
    precision: options.PrecisionOption = "",
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the model's initial parameters and inputs.")
    ] = 0,
    *,
    given: options.Given,
    json: options.JsonOption = False,
) -> int:
    """Execute a plan, check its results, and compare with one device and with the prediction."""
    from gdp.cli.inputs import open_plan

    if _is_rank():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or PyTorch adds stack traces to the line of an error
    path = Path(plan_or_model) if plan is None else plan
    planned = open_plan(path, given, None if plan is None else plan_or_model, devices)
    read = planned.plan
    with prefixed(path):
        source = planned.model
    source.check_runnable("executed")
    cluster, graph = _cluster(planned, path, devices), planned.placed
    if times is not None:
        if cluster is None:
            raise InputError(f"--times {times}: times are stored by kind of device; say them with --devices")
        check_times_file(times)
    with _live("loading PyTorch"):
        from gdp.execute.executable import graph_in_plans, read_executable
        from gdp.execute.plan_executor import ExecutionError
        from gdp.models.user_function import printing_to_stderr

    def build() -> "Executable":
        with _live(f"building {source.text}"):
            executable = read_executable(source, plan=read, placed=graph, seed=seed)
        with prefixed(path):
            planned.check_executes(graph_in_plans(executable.program))
        return executable

    places = None if on is None else on.split(",")
    interrupted = threading.Event()
    try:
        with printing_to_stderr():  # the model runs
            executable, result = _execute(
                source, build, read, places, interrupted, times is not None, graph=graph, cluster=cluster, steps=steps
            )
    except ExecutionError as error:
        status = OUT_OF_MEMORY if error.is_out_of_memory else FAILED
        return fail(f"error: {error}", status) if getattr(error, "is_reporter", True) else status
    if result is None:
        return OK
    from gdp.report import run_answer

    if json:
        print_json(run_answer.run_document(result))
    else:
        show(run_answer.run_report(result))
    if times is not None and cluster is not None:
        from gdp.execute.run import op_times
        from gdp.models.measured_times import MeasuredTimes
        from gdp.models.pytorch.signature import LIBRARY

        stored = MeasuredTimes(times, create=True)
        kinds = [device.kind for device in cluster.devices for _ in range(read.num_ranks)]
        found = op_times(executable, result, kinds)
        for kind, times_ns in found.items():
            stored.store(kind, LIBRARY, times_ns)
        has_times = any(found.values())
        if has_times and (samples := source.batch_size) is not None:
            cut = executable.parts
            stored.note_samples(source.text, samples if cut is None or cut.is_stream else samples // cut.num_parts)
            if result.one_device is not None:
                stored.note_samples(source.text, samples)
        if has_times:
            log(f"gdp: measured op times are in {times}; use them with gdp place --times {times}")
        else:
            log(f"gdp: no op times are stored in {times}: devices waited for the host before each op of the model")
    if not result.is_equal:
        return fail(f"error: the results are not those of {result.reference}; this is a fault of gdp", FAILED)
    if interrupted.is_set():
        log(f"gdp: {len(result.placed.records):,} of {steps:,} steps were run")
        return INTERRUPTED
    return OK


def _execute(
    source: "ModelSource",
    build: "Callable[[], Executable]",
    plan: "Plan",
    on: "list[str] | None",
    interrupted: threading.Event,
    stores_times: bool,
    **measured: Any,
) -> "tuple[Executable, RunResult | None]":
    """Runs the model on this host, or under torchrun as one of its processes. On this host, Ctrl-C ends the measurement
    after the step that runs, and sets `interrupted`. InputError where `stores_times` and the devices are of other kinds
    than the plan's."""
    from gdp.execute.run import check_kinds, run_on_host, run_on_ranks

    if not _is_rank():
        from gdp.execute.backends import find_targets
        from gdp.report.progress import stop_on_interrupt

        try:
            targets = find_targets(plan.cards, on, option="--on")
        except InputError:
            _check_kind(source)  # a JAX function has no use for the devices
            raise
        if stores_times:
            check_kinds(targets, measured["cluster"])
        warm_up(())
        executable = build()
        places = ", ".join(target.place for target in targets)
        with _live(f"running on {places}"), stop_on_interrupt("ends after this step; Ctrl-C again ends now") as stop:
            result = run_on_host(executable, plan, targets, **measured, stop=stop)
        if stop.is_set():
            interrupted.set()
        return executable, result
    from gdp.execute.ranks.ranks import join_or_leave

    with join_or_leave(plan.cards, on, option="--on") as ranks, ranks.reporting_once():
        if stores_times:
            check_kinds(ranks.targets, measured["cluster"], is_named=False)
        executable = build()
        with _live(f"running on {len(plan.cards)} processes"):
            return executable, run_on_ranks(executable, plan, ranks, **measured)


def _check_kind(source: "ModelSource") -> None:
    """Raises InputError if MODEL is no PyTorch model, which is known once its function was called."""
    from gdp.models.pytorch.capture_step import Built

    Built.by(source.build, source.text)


def _live(text: str) -> "AbstractContextManager[None]":
    """Shows `text` during a stage, once: in the first process under torchrun."""
    from gdp.report.progress import live

    return live(text) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext()


def _is_rank() -> bool:
    """True in a process that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _cluster(planned: "PlanSource", path: Path, devices: str | None) -> "Cluster | None":
    """Returns the devices of the plan; None where they are not known any more, as those of a machine that changed."""
    try:
        with prefixed(path):
            return planned.cluster
    except InputError as error:
        if devices is not None:
            raise
        log(f"gdp: note: {error}; nothing is compared op by op")
        return None
