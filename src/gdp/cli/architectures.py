"""Parses, calls and prints: `gdp architectures`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.options import JsonOption
from gdp.cli.shared import INTERRUPTED, OK, print_json, print_text
from gdp.errors import InputError, suggest

if TYPE_CHECKING:
    from gdp.policy.training.graph_set import GraphSet


def architectures(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the graphs; gdp train reads it.")],
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Number of graphs, those that are there included.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    family: Annotated[
        list[str] | None, typer.Option(metavar="FAMILY", help="Draw from this family alone. Repeatable. Default: all.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Draw architectures and keep the graphs of their training steps, to train policies on; Ctrl-C saves."""
    from gdp.policy.training.architectures.draw import FAMILIES
    from gdp.policy.training.architectures.likeness import BuiltIns
    from gdp.policy.training.graph_set import make_set
    from gdp.report.progress import StatusLine, live, stop_on_interrupt

    families = tuple(dict.fromkeys(family or FAMILIES))
    for name in families:
        if name not in FAMILIES:
            raise InputError(f"--family: {name!r} is unknown; {suggest(name, FAMILIES)}")
    line = StatusLine("reading built-in workloads")
    with live(line), stop_on_interrupt() as stop:
        made = make_set(
            directory,
            count,
            seed=seed,
            families=families,
            built_ins=BuiltIns.read,
            on_graph=lambda number: line.say(f"drawing graph {number + 1} of {count}"),
            must_stop=stop.is_set,
        )
    if json:
        print_json(made.to_document())
    else:
        print_text(_text(made))
    return INTERRUPTED if stop.is_set() else OK


def _text(made: "GraphSet") -> str:
    answer = made.to_document()
    families = ", ".join(f"{name} {number}" for name, number in answer["num_by_family"].items())
    rejected = ", ".join(f"{reason} {number}" for reason, number in answer["rejected"].items())
    lines = [f"{answer['num_graphs']:,} graphs of {answer['num_structures']:,} structures in {made.directory}"]
    if made.graphs:
        lines.append("ops: " + " / ".join(f"{ops:,}" for ops in answer["num_ops_quartiles"]) + " (quartiles)")
        lines += [f"families: {families}", f"rejected draws: {rejected or 'none'}"]
    return "\n".join(lines)
