"""Options that commands of `gdp bench` have in common, lists of names, and the answer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.shared import log, print_json, print_text

if TYPE_CHECKING:
    from gdp.bench.benchmark import Benchmark

CheckpointsOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Checkpoints of `gdp train training-set --hold-out FAMILY`.")
]
CpuBudgetOption = Annotated[str, typer.Option(metavar="TIME", help="Of processor, for each search.")]
FineTuneOption = Annotated[str, typer.Option(metavar="TIME", help="Training on a workload.")]
MachinesOption = Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all.")]
OutOption = Annotated[
    Path | None, typer.Option(metavar="PAGE|DIR", help="Write the page (.md) there; into a directory, all figures too.")
]
RowsOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep runs there; those found there are not made again.")
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Runs of each workload.")]
WorkloadsOption = Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: the papers' fourteen.")]


def names_in(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names in `A,B,...`."""
    return default if text is None else tuple(name.strip() for name in text.split(","))


def workloads_in(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the workloads in `A,B,...`. InputError for an unknown one."""
    from gdp.models import workloads

    return tuple(workloads.get(name).name for name in names_in(text, default))


def show_page(benchmark: "Benchmark", out: Path | None, rows: Path | None, json: bool) -> int:
    """Runs a benchmark, writes what was asked for and prints the page. Returns the exit status."""
    from gdp.cli.values import check_writable

    if rows is not None:
        check_writable(rows / "row.json")
    if out is not None:
        check_writable(out if out.suffix == ".md" else out / "rows" / "row.json")
    figures = benchmark.run(out=out, rows=rows, say=log)
    if json:
        print_json(figures)
    else:
        print_text(figures["markdown"].rstrip())
    return 0
