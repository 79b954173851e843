"""`python -m benchmarks.architectures DIR --count N`: draws graphs of training steps, to train policies on."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.architectures.draw import DEFAULT, FAMILIES
from benchmarks.architectures.drawn_set import make_set, summary
from benchmarks.architectures.graph_set import INDEX
from benchmarks.architectures.likeness import BuiltIns
from gdp.cli import main as run_commands
from gdp.cli.options import JsonOption
from gdp.cli.shared import INTERRUPTED, OK, check_writable, print_json, print_text
from gdp.errors import InputError
from gdp.report.progress import StatusLine, live, stop_on_interrupt

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line `args` (default: the process's own) and returns its exit status."""
    return run_commands(args, commands=app, name="architectures")


@app.command()
def architectures(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the graphs.")],
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Number of graphs, those that are there included.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the draws.")] = 0,
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="FAMILY", help="Draw from this family alone. Repeatable. Default: all but unrolled."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Draw architectures and keep the graphs of their training steps, to train policies on; Ctrl-C saves."""
    check_writable(directory / INDEX)
    families = tuple(dict.fromkeys(family or DEFAULT))
    for name in families:
        if name not in FAMILIES:
            raise InputError(f"--family: {name!r} is unknown; one of {', '.join(FAMILIES)} is expected")
    line = StatusLine("reading built-in workloads")
    drawn, began = list[int](), time.process_time()

    def on_graph(number: int) -> None:
        drawn.append(number)
        line.say(f"drawing graph {number + 1} of {count}")

    with live(line), stop_on_interrupt() as stop:
        made = make_set(
            directory,
            count,
            seed=seed,
            families=families,
            built_ins=BuiltIns.read,
            on_graph=on_graph,
            must_stop=stop.is_set,
        )
    answer = summary(made) | {"num_drawn": len(drawn), "cpu_seconds": time.process_time() - began}
    if json:
        print_json(answer)
    else:
        print_text(_text(answer))
    return INTERRUPTED if stop.is_set() else OK


def _text(answer: Mapping[str, Any]) -> str:
    lines = [
        f"{answer['num_graphs']:,} graphs of {answer['num_structures']:,} structures in {answer['directory']}",
        f"drawn now: {answer['num_drawn']:,} in {answer['cpu_seconds']:.0f} processor seconds",
    ]
    if answer["num_graphs"]:
        sizes = answer["quartiles"]
        families = ", ".join(f"{name} {number}" for name, number in answer["num_by_family"].items())
        rejected = ", ".join(f"{reason} {number}" for reason, number in answer["rejected"].items())
        lines += [
            f"families: {families}",
            f"rejected draws: {rejected or 'none'}",
            "least, quartiles, most",
            f"  ops: {' / '.join(f'{value:,}' for value in sizes['num_ops'])}",
            f"  GFLOP: {' / '.join(f'{value / 1e9:,.3g}' for value in sizes['flops'])}",
            f"  GiB of parameters and optimizer: {_gib(sizes['held_bytes'])}",
            f"  GiB made by the forward pass: {_gib(sizes['forward_bytes'])}",
        ]
    return "\n".join(lines)


def _gib(sizes: Sequence[int]) -> str:
    return " / ".join(f"{size / 2**30:.3g}" for size in sizes)


if __name__ == "__main__":
    sys.exit(main())
