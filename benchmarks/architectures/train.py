"""`python -m benchmarks.architectures.train DIR...`: trains the policy that comes with gdp, on drawn graphs."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.architectures.drawn_tasks import DrawnTasks
from benchmarks.architectures.graph_set import GraphSet
from benchmarks.architectures.style_training import StyleProgress, StyleTrainingConfig, train_styles
from gdp.cli import main as run_commands
from gdp.cli.shared import INTERRUPTED, OK, check_writable, print_text, warm_up
from gdp.cli.training import RANDOM_SHARE
from gdp.errors import InputError
from gdp.policy.checkpoint import new_policy
from gdp.policy.training.pretrain import Provenance
from gdp.policy.training.tasks import TaskConfig
from gdp.report.progress import StatusLine, live, stop_on_interrupt

MAX_VALIDATION_GRAPHS = 24

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line `args` (default: the process's own) and returns its exit status."""
    return run_commands(args, commands=app, name="train")


@app.command()
def train(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of drawn graphs.")],
    out: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="The file to write.")],
    updates: Annotated[int, typer.Option(metavar="N", min=1, help="Number of problems.")] = 2000,
    groupings: Annotated[int, typer.Option(metavar="G", min=1, help="Groupings of a problem, of 8 styles each.")] = 24,
    styles: Annotated[int, typer.Option(metavar="H", min=1, help="Numbers a layer of the style scorer.")] = 48,
    validation_family: Annotated[
        list[str] | None, typer.Option(metavar="FAMILY", help="Keep this family to validate on. Repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the training.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue, with the same arguments.")] = False,
) -> int:
    """Train the style scorer on drawn graphs, clusters and layouts; Ctrl-C saves."""
    check_writable(out)
    graphs = [graph for directory in directories for graph in GraphSet.open(directory).graphs]
    families = {graph.family for graph in graphs}
    kept = validation_family or []
    if unknown := set(kept) - families:
        raise InputError(f"--validation-family {min(unknown)}: one of {', '.join(sorted(families))} is expected")
    tasks = DrawnTasks(
        [graph for graph in graphs if graph.family not in kept], TaskConfig(random_share=RANDOM_SHARE), seed
    )
    if not tasks.num_sources:
        raise InputError(f"{directories[0]}: has no graphs to train on; draw more")
    of_family = [[graph for graph in graphs if graph.family == family] for family in kept]
    checks = DrawnTasks(
        [graph for some in of_family for graph in some[: MAX_VALIDATION_GRAPHS // len(kept)]], TaskConfig(), 0
    )
    warm_up(("gdp-zero-shot",))
    policy = new_policy("default", seed=seed, style_scorer=styles)
    line = StatusLine("training")

    def report(progress: StyleProgress) -> None:
        line.say(str(progress))

    with live(line), stop_on_interrupt() as stop:
        progress = train_styles(
            policy,
            tasks,
            StyleTrainingConfig(seed=seed, num_tasks=updates, num_groupings=groupings),
            out,
            validation=[checks.unvaried(number) for number in range(checks.num_sources)],
            provenance=Provenance(command=shlex.join(["python -m benchmarks.architectures.train", *sys.argv[1:]])),
            resume=resume,
            stop=stop,
            on_update=report,
        )
    print_text(f"{progress}, {progress.cpu_hours:.3g} CPU hours; {out}")
    return INTERRUPTED if stop.is_set() else OK


if __name__ == "__main__":
    sys.exit(main())
