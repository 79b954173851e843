"""Parses, calls and prints what is about a MODEL alone: `gdp capture`, `gdp costs` and `gdp workloads`."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.options import DevicesOption, JsonOption, ModelArgument, ReadingOptions, RuntimeOption, with_options
from gdp.cli.shared import OK, check_writable, print_json, print_text, show
from gdp.errors import InputError

_GRAPH_FILES = (".json", ".json.gz", ".safetensors")


@with_options
def capture(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Option(metavar="GRAPH.json.gz", help="The file to write: .json, .json.gz or .safetensors.")
    ],
    *,
    model_options: ReadingOptions,
    json: JsonOption = False,
) -> int:
    """Write the graph of one step of MODEL."""
    from gdp.cli.inputs import read_graph
    from gdp.models.source import ModelSource

    if not out.name.endswith(_GRAPH_FILES):
        raise InputError(f"--out {out}: a name that ends in .json, .json.gz or .safetensors is expected")
    model_source = ModelSource(model, model_options.reading())
    check_writable(out)
    source = read_graph(model_source)
    is_like_it = model.endswith(".safetensors") == out.name.endswith(".safetensors")  # else a file in the other form
    if model.endswith(_GRAPH_FILES) and is_like_it and model_options.microbatches == 1:
        raise InputError(f"{model}: is a gdp-graph file already; name a workload or module:function")
    from gdp.report.progress import live

    with live(f"writing {out}"):
        source.graph.save(out)
        from gdp.report import console, documents

    if json:
        unknown = dict(source.unknown_costs)
        print_json({**documents.graph_document(source.graph), "unknown_costs": unknown, "path": str(out)})
    else:
        show(console.capture_report(source.graph, source.unknown_costs, str(out)))
    return OK


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
    from gdp.parallel.layout import AUTO, NONE, Layout
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
        layout = Layout() if parallel in (AUTO, NONE) else Layout.parse(parallel)
        if layout.shards == WHOLE or layout.shards.shares or not layout.of_groups.is_whole:
            raise InputError(
                f"--parallel {parallel}: costs are of one rank of equal ones; give degrees of its group alone: tensor=8"
            )
        source = source.sharded(layout.shards)
    graph = read_graph(source).graph
    if not any(graph.shapes):
        raise InputError(f"{model}: its ops have no shapes, so nothing is known of kernels; capture the model again")
    num_ranks = int(ranks_of(graph).max()) if parallel is None else layout.shards.num_ranks
    if num_ranks > 1:
        cluster = cluster.grouped(num_ranks)
    kinds = {device.kind: device for device in cluster.devices if device.achieved}
    found = [Breakdown(graph, device) for device in kinds.values()]
    if json:
        print_json(costs_document(found, top))
    else:
        show(costs_report(found, top))
    return OK


def workloads(
    variants: Annotated[
        bool, typer.Option("--variants", help="List the variants for training policies instead.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """List the built-in models."""
    from gdp.models.papers import PAPERS

    rows = [
        {
            "name": item.name,
            "family": item.family,
            "devices": item.cluster,
            "batch": item.batch_size,
            "description": item.description,
        }
        for item in map(PAPERS.get, PAPERS.variant_names() if variants else PAPERS.names())
    ]
    if json:
        print_json({"workloads": rows})
    else:
        from gdp.report import listings

        show(listings.rows_report(rows))
        if not variants:
            count = len(PAPERS.variant_names())
            print_text(f"\nMODEL may also be one of {count} smaller and larger variants: gdp workloads --variants")
    return OK
