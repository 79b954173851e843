"""Trains a policy with the options of `gdp train`."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gdp import files
from gdp.budget import Budget
from gdp.cli.shared import check_writable, log
from gdp.cli.train import TrainOptions
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.models import source
from gdp.models.papers import PAPERS
from gdp.policy import checkpoint
from gdp.policy.scheduler import Policy, SchedulerPolicy
from gdp.policy.training.pretrain import Provenance, TrainingConfig, TrainingProgress, TrainingRun, train
from gdp.policy.training.tasks import TaskConfig, Tasks, TaskSource
from gdp.report.progress import StatusLine, live, stop_on_interrupt, training_sentence

RANDOM_SHARE = 0.75  # of tasks with --randomize; the others stay as given, as they are at the end
MAX_GRAPHS_PER_UPDATE = 8
TRAINING_SET = "training-set"  # the GRAPH that stands for `PAPERS.training_set`


@dataclass(frozen=True, slots=True)
class Trained:
    """Holds the trained policy and the course of the training."""

    policy: Policy
    progress: TrainingProgress
    options: TrainOptions
    interrupted: bool

    @property
    def is_done(self) -> bool:
        """True after the last update."""
        return self.progress.update == self.progress.updates

    def to_document(self) -> dict[str, Any]:
        """Returns the answer of `gdp train --json`."""
        progress, out = self.progress, self.options.out
        return {
            "checkpoint": str(out),
            "policy": self.policy.name,
            "num_parameters": self.policy.num_parameters(),
            "updates": progress.update,
            "done": self.is_done,
            "interrupted": self.interrupted,
            "seconds": progress.seconds,
            "cpu_hours": progress.cpu_hours,
            "statistics": None if progress.statistics is None else asdict(progress.statistics),
        }

    def to_text(self) -> str:
        """Returns the answer for people."""
        progress = self.progress
        lines = [
            f"{self.policy.name} ({self.policy.num_parameters():,} parameters), {training_sentence(progress)}",
            f"{progress.seconds:.1f} s, {progress.cpu_hours:.3g} CPU hours in all",
            f"Checkpoint written to {self.options.out}",
        ]
        if not self.is_done:
            lines.append("Go on with the same command and --resume")
        return "\n".join(lines)


def run(options: TrainOptions, command: str, warm_up: Callable[[], object]) -> Trained:
    """Trains with `options`, which stood in `command`; `warm_up` compiles after all input is read.

    Raises InputError for bad ones."""
    limit = None if options.budget is None else Budget.parse_time(options.budget)
    check_writable(options.out)
    if options.out.exists() and not options.resume:
        raise InputError(f"{options.out}: exists; go on with it by --resume, or choose another --out")
    clusters = [Cluster.parse(text) for text in options.devices or ()]
    held_out = PAPERS.hold_out(options.hold_out or ())
    _check_held_out(options.graphs, held_out)
    policy, origin = _policy(options, held_out)
    pairs = _pairs(options.graphs, clusters, held_out)
    config = TrainingConfig(
        seed=options.seed,
        updates=options.updates,
        graphs_per_update=MAX_GRAPHS_PER_UPDATE if options.randomize else min(len(pairs), MAX_GRAPHS_PER_UPDATE),
        samples=options.samples,
        learning_rate=policy.learning_rate if options.learning_rate is None else options.learning_rate,
    )
    tasks = Tasks(pairs, TaskConfig(random_share=RANDOM_SHARE if options.randomize else 0.0), options.seed)
    seconds = None if limit is None else limit.seconds
    line = StatusLine(f"training {policy.name}")
    warm_up()

    def report(progress: TrainingProgress) -> None:
        line.say(f"training {policy.name}: {training_sentence(progress)}", progress.seconds_left)

    with stop_on_interrupt() as stop:
        if options.resume and not options.out.exists():
            log(f"gdp: {options.out}: no such file yet, training starts anew")
        with live(line):
            training_run = TrainingRun(
                resume=options.resume, seconds=seconds, stop=stop, num_threads=options.threads, on_update=report
            )
            provenance = Provenance(origin=origin, held_out=held_out, command=command)
            progress = train(policy, tasks, config, options.out, provenance=provenance, run=training_run)
        return Trained(policy, progress, options, stop.is_set())


def _policy(options: TrainOptions, held_out: Sequence[str]) -> tuple[SchedulerPolicy, str]:
    """Returns (the policy to start with, the origin of its parameters)."""
    if options.start is None:
        return checkpoint.new_policy("default", seed=options.seed), ""
    policy = checkpoint.load_checkpoint(options.start)
    held_out_before = checkpoint.read_checkpoint(options.start).manifest.get("held_out", ())
    for family in held_out:
        if family not in held_out_before:
            raise InputError(
                f"{options.start}: was trained without holding {family} out; start from another checkpoint"
            )
    return policy, hashlib.sha256(files.read_bytes(options.start)).hexdigest()


def _pairs(texts: Sequence[str], clusters: Sequence[Cluster], held_out: Sequence[str]) -> list[TaskSource]:
    """Returns each graph on each of `clusters`, or by default on the usual cluster of the graph. Raises InputError for
    a graph without a usual cluster, and for one of a family that is `held_out`."""
    training_set = [workload.name for workload in PAPERS.training_set(held_out)]
    names = [name for text in texts for name in (training_set if text == TRAINING_SET else (text,))]
    pairs: list[TaskSource] = []
    line = StatusLine("reading graphs")
    with live(line):
        for number, name in enumerate(names, 1):
            line.say(f"reading {name} ({number} of {len(names)})")
            graph = source.load(name)
            _check_held_out((graph.name,), held_out, name)
            workload = PAPERS.find(graph.name)
            if workload is None and not clusters:
                raise InputError(f"{name}: is no built-in workload with devices of its own; name them with --devices")
            usual = [Cluster.parse(workload.cluster)] if workload is not None else []
            pairs += [TaskSource(graph, cluster) for cluster in clusters or usual]
    return pairs


def _check_held_out(names: Sequence[str], held_out: Sequence[str], text: str | None = None) -> None:
    """Raises InputError for a built-in workload of a family that is `held_out`; `text` is what users wrote."""
    for name in names:
        workload = PAPERS.find(name)
        if workload is not None and workload.family in held_out:
            raise InputError(
                f"{text or name}: is of family {workload.family}, which is held out; leave one of both out"
            )
