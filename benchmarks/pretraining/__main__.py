"""`python -m benchmarks.pretraining --out CHECKPOINT`: trains the weights of a policy on the built-in workloads."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.pretraining.pool import PoolConfig
from benchmarks.pretraining.pretrain import PretrainingProgress, TrainingConfig, train
from benchmarks.workloads import workloads
from gdp.cli import main as run_commands
from gdp.cli.shared import INTERRUPTED, OK, check_writable, print_text, warm_up
from gdp.cli.training import RANDOM_SHARE, task_sources
from gdp.errors import InputError
from gdp.models.papers import PAPERS
from gdp.policy.checkpoint import new_policy
from gdp.policy.training.run import Provenance, TrainingRun
from gdp.policy.training.tasks import TaskConfig, Tasks
from gdp.report.progress import StatusLine, live, stop_on_interrupt

GRAPHS_PER_UPDATE = 8
MOST_PROBLEMS = 128  # of the pool; each takes about a megabyte

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line `args` (default: the process's own) and returns its exit status."""
    return run_commands(args, commands=app, name="pretraining")


@app.command()
def pretraining(
    out: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="The file to write.")],
    graphs: Annotated[
        list[str] | None, typer.Argument(metavar="WORKLOAD...", help="Default: all small ones and all variants.")
    ] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(metavar="FAMILY", help="Leave out this family of models and similar ones. Repeatable."),
    ] = None,
    updates: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of updates, over which the learning rate falls.")
    ] = 500,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 0.05,
    randomize: Annotated[bool, typer.Option("--randomize", help="Vary devices, links, memory and batch size.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the training.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue CHECKPOINT, with the same arguments.")] = False,
) -> int:
    """Train the weights of a policy by PPO, on one thread; Ctrl-C saves."""
    check_writable(out)
    if out.exists() and not resume:
        raise InputError(f"{out}: exists; go on with it by --resume, or choose another --out")
    held_out = workloads.hold_out(hold_out or ())
    names = graphs or [workload.name for workload in PAPERS.training_set(held_out)]
    for name in names:
        if PAPERS.get(name).family in held_out:
            raise InputError(
                f"{name}: is of family {PAPERS.get(name).family}, which is held out; leave one of both out"
            )
    sources = task_sources(names, ())
    share = RANDOM_SHARE if randomize else 0.0
    count = GRAPHS_PER_UPDATE if randomize else min(len(sources), GRAPHS_PER_UPDATE)
    config = TrainingConfig(
        seed=seed,
        updates=updates,
        graphs_per_update=count,
        learning_rate=learning_rate,
        pool=PoolConfig(size=MOST_PROBLEMS if randomize else 0),
    )
    warm_up(("gdp-zero-shot",))
    line = StatusLine("training")

    def report(progress: PretrainingProgress) -> None:
        line.say(f"training: {progress}")

    with live(line), stop_on_interrupt() as stop:
        progress = train(
            new_policy("default", seed=seed),
            Tasks(sources, TaskConfig(random_share=share), seed),
            config,
            out,
            provenance=Provenance(
                held_out=held_out, command=shlex.join(["python -m benchmarks.pretraining", *sys.argv[1:]])
            ),
            run=TrainingRun(resume=resume, stop=stop, on_update=report),
            num_threads=1,
        )
    print_text(f"{progress}, {progress.cpu_hours:.3g} CPU hours\nCheckpoint written to {out}")
    return INTERRUPTED if stop.is_set() else OK


if __name__ == "__main__":
    sys.exit(main())
