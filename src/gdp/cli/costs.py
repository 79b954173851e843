"""Parses, calls and prints: `gdp costs`."""

from typing import Annotated

import typer

from gdp.cli.options import DevicesOption, JsonOption, ModelArgument, ReadingOptions, RuntimeOption, with_options
from gdp.cli.shared import OK, print_json, show
from gdp.errors import InputError


@with_options
def costs(
    model: ModelArgument,
    devices: DevicesOption = None,
    runtime: RuntimeOption = None,
    parallel: Annotated[
        str | None,
        typer.Option(metavar="DEGREES", help="One rank of a group: tensor=8[,sequence=on,expert=8,context=2]."),
    ] = None,
    top: Annotated[int, typer.Option(min=0, max=1000, help="Equal ops that take longest.")] = 20,
    *,
    model_options: ReadingOptions,
    json: JsonOption = False,
) -> int:
    """Show where the time of one step of MODEL goes on each kind of device: kernels by class, ops, what limits them."""
    from gdp.cli.inputs import read_graph
    from gdp.cluster import Cluster
    from gdp.costs.breakdown import Breakdown
    from gdp.costs.op_times import ranks_of
    from gdp.models.shards import WHOLE
    from gdp.models.source import ModelSource
    from gdp.parallel.layout import Layout
    from gdp.planning.options import run_by
    from gdp.report.costs_answer import costs_document, costs_report

    if devices is None:
        raise InputError("--devices: name the devices that it runs on, such as rtx4090-24g")
    reading = model_options.reading()
    cluster = Cluster.parse(run_by(devices, runtime, reading.serving))
    if not any(device.achieved for device in cluster.devices):
        raise InputError(f"--devices {devices}: tells nothing of kernels (achieved); name GPUs of a built-in kind")
    source = ModelSource(model, reading)
    if parallel is not None:
        layout = Layout.parse(parallel)
        if layout.shards == WHOLE or layout.shards.shares or not layout.of_groups.is_whole:
            raise InputError(
                f"--parallel {parallel}: costs are of one rank of equal ones; give degrees of its group alone: tensor=8"
            )
        source = source.sharded(layout.shards)
    graph = read_graph(source).graph
    if (num_ranks := int(ranks_of(graph).max())) > 1:
        cluster = cluster.grouped(num_ranks)
    kinds = {device.kind: device for device in cluster.devices if device.achieved}
    found = [Breakdown(graph, device) for device in kinds.values()]
    if json:
        print_json(costs_document(found, top))
    else:
        show(costs_report(found, top))
    return OK
