"""Parses, calls and prints: `gdp capture`."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.options import JsonOption, ModelArgument, ReadingOptions, with_options
from gdp.cli.shared import OK, check_writable, print_json, show
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
