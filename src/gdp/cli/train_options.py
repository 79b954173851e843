"""The options of `gdp train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Says what is trained, on what and for how long; None stands for a default, which may depend on others."""

    graphs: Annotated[list[str], typer.Argument(metavar="GRAPH...", help="gdp-graph files and MODELs.")]
    out: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="The file to write, such as my.safetensors.")]
    devices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICES",
            help="Every graph is placed on every one. Default: the usual devices of a workload. Repeatable.",
        ),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue CHECKPOINT, with the same arguments.")] = False
    start: Annotated[
        Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Start from the parameters in this file.")
    ] = None
    styles: Annotated[
        int | None, typer.Option(metavar="H", min=1, help="Numbers a layer of the network. Default: 48.")
    ] = None
    updates: Annotated[int, typer.Option(metavar="N", min=1, help="Number of problems to try styles on.")] = 500
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Stop earlier, such as after 10m or 2h.")] = None
    samples: Annotated[
        int | None, typer.Option(metavar="S", min=8, help="Placements of each problem, a multiple of 8. Default: 192.")
    ] = None
    randomize: Annotated[bool, typer.Option("--randomize", help="Vary devices, links, memory and batch size.")] = False
    validation: Annotated[
        list[str] | None,
        typer.Option(metavar="GRAPH", help="Tell how well styles of this graph are ranked. Repeatable."),
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the training.")] = 0
