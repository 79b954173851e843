"""Parses, calls and prints: `gdp train`."""

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.options import JsonOption, ThreadsOption, with_options
from gdp.cli.shared import INTERRUPTED, OK, print_json, print_text, warm_up


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Says what is trained, on what and for how long; None stands for a default, which may depend on others."""

    graphs: Annotated[
        list[str],
        typer.Argument(metavar="GRAPH...", help="gdp-graph files, MODELs, or training-set: all built-in graphs."),
    ]
    out: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="The file to write, such as my.safetensors.")]
    devices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICES",
            help="Every graph is placed on every one. Default: the usual devices of a workload. Repeatable.",
        ),
    ] = None
    hold_out: Annotated[
        list[str] | None,
        typer.Option(metavar="FAMILY", help="Leave out this family of models and similar ones. Repeatable."),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue CHECKPOINT, with the same arguments.")] = False
    start: Annotated[
        Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Start from the parameters in this file.")
    ] = None
    updates: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of updates, over which the learning rate falls.")
    ] = 500
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Stop earlier, such as after 10m or 2h.")] = None
    samples: Annotated[int, typer.Option(metavar="S", min=2, help="Placements of a graph in an update.")] = 16
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate of Adam. Default: the policy's.")] = None
    randomize: Annotated[bool, typer.Option("--randomize", help="Vary devices, links, memory and batch size.")] = False
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the training.")] = 0
    threads: ThreadsOption = None


@with_options
def train(*, options: TrainOptions, json: JsonOption = False) -> int:
    """Train a policy on graphs; Ctrl-C saves."""
    from gdp.cli.training import run

    trained = run(options, shlex.join(["gdp", *sys.argv[1:]]), partial(warm_up, ("gdp-zero-shot",)))
    if json:
        print_json(trained.to_document())
    else:
        print_text(trained.to_text())
    return INTERRUPTED if trained.interrupted else OK
