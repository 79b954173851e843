"""`gdp run`: execute a plan."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdp.cli.shared import JsonOption, fail, log, print_json, show, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdp.cluster import Cluster
    from gdp.execute.run import Executable, Run
    from gdp.graph import Graph
    from gdp.plan import Plan

OK, FAILED, OUT_OF_MEMORY = 0, 1, 3


ExecutableArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A built-in workload, hf:DIR, or package.module:function with a PyTorch module."
    ),
]


def run(
    model: ExecutableArgument,
    plan: Annotated[Path, typer.Option(metavar="PLAN", help="A gdp-plan file, as `gdp place` writes it.")],
    steps: Annotated[int, typer.Option(min=1, help="Measured, after two to warm up.")] = 20,
    on: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Where devices are: cpu:0, cpu:0-3, cuda:0. Default: by name."),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="What was placed for. Default: cluster.json beside PLAN.")
    ] = None,
    times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Store measured op times there, for `gdp place --times`.")
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="The plan is of a forward pass.")] = False,
    optimizer: Annotated[str, typer.Option(help="adam or sgd.")] = "adam",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the model's initial parameters and inputs.")] = 0,
    json: JsonOption = False,
) -> int:
    """Execute a plan of MODEL, check its results, and compare with one device and with the prediction."""
    if _is_rank():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or PyTorch adds stack traces to the line of an error
    from gdp.plan import Plan

    read = Plan.load(plan)
    cluster, graph = _cluster(read, plan, devices), _graph(read, plan)
    if times is not None:
        _check_times(times, cluster)

    from gdp.execute.worker import ExecutionError
    from gdp.user_functions import printing_to_stderr

    def build() -> "Executable":
        from gdp.execute.models import read_executable

        with live(f"building {model}"):
            return read_executable(model, training=not inference, optimizer=optimizer, seed=seed)

    from gdp.report.progress import live

    places = None if on is None else on.split(",")
    try:
        with printing_to_stderr():  # the model runs
            executable, made = _execute(build, read, places, graph=graph, cluster=cluster, steps=steps)
    except ExecutionError as error:
        status = OUT_OF_MEMORY if error.is_out_of_memory else FAILED
        return fail(f"error: {error}", status) if getattr(error, "is_first_told", True) else status
    if made is None:
        return OK
    from gdp.report import execution

    if json:
        print_json(execution.run_document(made))
    else:
        show(execution.run_report(made))
    if times is not None and cluster is not None:
        from gdp.capture.signature import LIBRARY
        from gdp.execute.run import op_times
        from gdp.measured_times import MeasuredTimes

        known, arms = MeasuredTimes(times, create=True), [arm for arm in (made.placed, made.one_device) if arm]
        for kind, found in op_times(executable, arms, [device.kind for device in cluster.devices]).items():
            known.store(kind, LIBRARY, found)
        log(f"gdp: measured op times are in {times}; use them with gdp place --times {times}")
    if not made.is_equal:
        return fail(f"error: the results are not those of {made.reference}; this is a fault of gdp", FAILED)
    return OK


def _execute(
    build: "Callable[[], Executable]", plan: "Plan", on: "list[str] | None", **options: Any
) -> "tuple[Executable, Run | None]":
    """The model, and what running it showed: on threads, or under torchrun with a process for each device."""
    from gdp.execute.run import run_on_ranks, run_on_threads
    from gdp.report.progress import live

    if not _is_rank():
        from gdp.execute.targets import find_targets

        targets = find_targets(plan.devices, on)
        warm_up()
        executable = build()
        with live(f"running on {', '.join(target.place for target in targets)}"):
            return executable, run_on_threads(executable, plan, targets, **options)
    from gdp.execute.ranks import join_or_leave

    with join_or_leave(plan.devices, on) as ranks, ranks.saying_once():
        executable = build()
        return executable, run_on_ranks(executable, plan, ranks, **options)


def _check_times(path: Path, cluster: "Cluster | None") -> None:
    """InputError if measured times cannot be stored there; nothing is written."""
    from gdp import options
    from gdp.measured_times import MeasuredTimes

    if cluster is None:
        raise InputError(f"--times {path}: times are stored by kind of device; say them with --devices")
    if path.exists():
        MeasuredTimes(path)
    else:
        options.check_writable(path)


def _is_rank() -> bool:
    """Is this one of the processes that torchrun starts?"""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _cluster(plan: "Plan", path: Path, devices: str | None) -> "Cluster | None":
    """What the plan was made for: --devices, or the file that `gdp place --out` puts beside it."""
    from gdp.cluster import Cluster

    beside = path.with_name("cluster.json")
    if devices is None and not beside.is_file():
        return None
    cluster = Cluster.parse(devices or str(beside))
    if cluster.fingerprint == plan.cluster:
        return cluster
    if devices is None:
        log(f"gdp: note: {beside} is of another plan, so nothing is compared op by op; give --devices")
        return None
    raise InputError(
        f"{path}: the plan is for cluster {plan.cluster[:12]}, not for {devices} ({cluster.fingerprint[:12]}); "
        "place for this cluster anew"
    )


def _graph(plan: "Plan", path: Path) -> "Graph | None":
    """What was placed, if it lies beside the plan: it may have measured times, which the model alone has not."""
    from gdp.graph import Graph
    from gdp.microbatches import count_microbatches

    beside = path.with_name("graph.json.gz")
    if not beside.is_file():
        return None
    graph = Graph.load(beside)
    if graph.fingerprint == plan.graph:
        if (count := count_microbatches(graph)) > 1:
            raise InputError(
                f"{path}: has {count} micro-batches, gdp run executes one batch; place without --microbatches"
            )
        return graph
    log(f"gdp: note: {beside} is of another plan")
    return None
