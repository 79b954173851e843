"""`gdp run`: execute a plan."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli_shared import JsonOption, ModelArgument, fail, print_json, show, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.cluster import Cluster
    from gdp.graph import Graph
    from gdp.plan import Plan

OK, FAILED, BAD_INPUT, OUT_OF_MEMORY = 0, 1, 2, 3


def run(
    model: ModelArgument,
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
    seed: Annotated[int, typer.Option(min=0, help="Of the model's initial parameters and inputs.")] = 0,
    json: JsonOption = False,
) -> int:
    """Execute a plan of MODEL, check its results, and compare with one device and with the prediction."""
    from gdp.execute.targets import find_targets
    from gdp.plan import Plan

    read = Plan.load(plan)
    targets = find_targets(read.devices, None if on is None else on.split(","))
    cluster = _cluster(read, plan, devices)
    graph = _graph(read, plan)
    known = None
    if times is not None:
        from gdp.measured_times import MeasuredTimes

        if cluster is None:
            raise InputError(f"--times {times}: times are stored by kind of device; say them with --devices")
        known = MeasuredTimes(times, create=True)
    warm_up()
    from gdp.capture.signature import LIBRARY
    from gdp.execute.models import read_executable
    from gdp.execute.run import op_times
    from gdp.execute.run import run as execute
    from gdp.execute.worker import ExecutionError
    from gdp.report import execution
    from gdp.report.progress import live

    with live(f"building {model}"):
        executable = read_executable(model, training=not inference, optimizer=optimizer, seed=seed)
    try:
        with live(f"running {model} on {', '.join(target.place for target in targets)}"):
            made = execute(executable, read, targets, graph=graph, cluster=cluster, steps=steps)
    except ExecutionError as error:
        return fail(f"error: {error}", OUT_OF_MEMORY if error.is_out_of_memory else FAILED)
    if known is not None and cluster is not None:
        arms = [arm for arm in (made.placed, made.one_device) if arm is not None]
        for kind, found in op_times(executable, arms, [device.kind for device in cluster.devices]).items():
            known.store(kind, LIBRARY, found)
    if json:
        print_json(execution.run_document(made))
    else:
        show(execution.run_report(made, None if times is None else str(times)))
    if not made.is_equal:
        return fail(f"error: the results are not those of {made.reference}; this is a fault of gdp", FAILED)
    sys.stdout.flush()
    return OK


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
        return None  # of another plan
    raise InputError(
        f"{path}: the plan is for cluster {plan.cluster[:12]}, not for {devices} ({cluster.fingerprint[:12]}); "
        "place for this cluster anew"
    )


def _graph(plan: "Plan", path: Path) -> "Graph | None":
    """What was placed, if it lies beside the plan: it may have measured times, which the model alone has not."""
    from gdp.graph import Graph

    beside = path.with_name("graph.json.gz")
    if not beside.is_file():
        return None
    graph = Graph.load(beside)
    return graph if graph.fingerprint == plan.graph else None
