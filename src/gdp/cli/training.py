"""Trains a policy with the options of `gdp train`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdp.budget import Budget
from gdp.cli.shared import check_writable, log
from gdp.cli.train_options import TrainOptions
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.models import source
from gdp.models.papers import PAPERS
from gdp.policy import checkpoint
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.training.run import Provenance, TrainingProgress, TrainingRun
from gdp.policy.training.style_training import StyleTrainingConfig, outcomes_path, train_styles
from gdp.policy.training.tasks import TaskConfig, Tasks, TaskSource, TrainingTask
from gdp.report.progress import StatusLine, live, stop_on_interrupt, training_sentence

RANDOM_SHARE = 0.75  # of tasks with --randomize; the others stay as given, as they are at the end
STYLES = 48  # numbers a layer


@dataclass(frozen=True, slots=True)
class Trained:
    """Holds the trained policy and the course of the training."""

    policy: SchedulerPolicy
    progress: TrainingProgress
    options: TrainOptions
    interrupted: bool

    @property
    def is_done(self) -> bool:
        """True after the last update."""
        return self.progress.update == self.progress.updates

    def to_document(self) -> dict[str, Any]:
        """Returns the answer of `gdp train --json`."""
        progress = self.progress
        return {
            "checkpoint": str(self.options.out),
            "num_parameters": self.policy.num_parameters(),
            "updates": progress.update,
            "done": self.is_done,
            "interrupted": self.interrupted,
            "seconds": progress.seconds,
            "cpu_hours": progress.cpu_hours,
            "rank_correlation": progress.rank_correlation,
        }

    def to_text(self) -> str:
        """Returns the answer for people."""
        progress, out = self.progress, self.options.out
        lines = [
            f"{self.policy.num_parameters():,} parameters, {training_sentence(progress)}",
            f"{progress.seconds:.1f} s, {progress.cpu_hours:.3g} CPU hours in all",
        ]
        if self.is_done:
            return "\n".join([*lines, f"Checkpoint written to {out}"])
        kept = f"Outcomes of {progress.update} problems are kept in {outcomes_path(out)}"
        return "\n".join([*lines, kept, "Go on with the same command and --resume"])


def run(options: TrainOptions, command: str, warm_up: Callable[[], object]) -> Trained:
    """Trains with `options`, which stood in `command`; `warm_up` compiles after all input is read.

    Raises InputError for bad ones.
    """
    limit = None if options.budget is None else Budget.parse_time(options.budget)
    config = _config(options)
    check_writable(options.out)
    outcomes = outcomes_path(options.out)
    if existing := [path for path in (options.out, outcomes) if path.exists() and not options.resume]:
        raise InputError(f"{existing[0]}: exists; go on with it by --resume, or choose another --out")
    policy = _policy(options)
    if options.resume and options.out.exists():
        _check_resumed(options.out, policy.config.style_scorer)
    clusters = [Cluster.parse(text) for text in options.devices or ()]
    task_config = TaskConfig(random_share=RANDOM_SHARE if options.randomize else 0.0)
    tasks = Tasks(task_sources(options.graphs, clusters), task_config, options.seed)
    validation = _validation(task_sources(options.validation or (), clusters))
    line = StatusLine("training")
    warm_up()

    def report(progress: TrainingProgress) -> None:
        line.say(f"training: {training_sentence(progress)}", progress.seconds_left)

    with stop_on_interrupt() as stop:
        if options.resume and not outcomes.exists():
            log(f"gdp: {outcomes}: no such file yet, training starts anew")
        with live(line):
            progress = train_styles(
                policy,
                tasks,
                config,
                options.out,
                validation=validation,
                provenance=Provenance(origin=checkpoint.digest(options.start), command=command),
                run=TrainingRun(
                    resume=options.resume, seconds=None if limit is None else limit.seconds, stop=stop, on_update=report
                ),
            )
        return Trained(policy, progress, options, stop.is_set())


def _config(options: TrainOptions) -> StyleTrainingConfig:
    config = StyleTrainingConfig(seed=options.seed, num_tasks=options.updates)
    if options.samples is None:
        return config
    if options.samples % config.num_styles:
        raise InputError(f"--samples is {options.samples}; a multiple of {config.num_styles} is expected")
    return replace(config, num_groupings=options.samples // config.num_styles)


def _policy(options: TrainOptions) -> SchedulerPolicy:
    """Returns the policy to start with."""
    if options.start is None:
        return checkpoint.new_policy("default", seed=options.seed, style_scorer=options.styles or STYLES)
    policy = checkpoint.load_checkpoint(options.start)
    if policy.styles is None:
        raise InputError(f"{options.start}: has no style scorer to train; leave --from out")
    if options.styles not in (None, policy.config.style_scorer):
        raise InputError(f"{options.start}: has {policy.config.style_scorer} numbers a layer; leave --styles out")
    return policy


def _check_resumed(out: Path, styles: int) -> None:
    """Raises InputError unless `out` is a checkpoint with as many numbers a layer, and with outcomes to go on from."""
    before = checkpoint.read_checkpoint(out).config.get("style_scorer", 0)
    if before != styles:
        raise InputError(f"{out}: was trained with --styles {before}, not {styles}; resume with the same --styles")
    if not outcomes_path(out).exists():
        raise InputError(f"{out}: its outcomes are not in {outcomes_path(out)}; choose another --out")


def task_sources(texts: Sequence[str], clusters: Sequence[Cluster]) -> list[TaskSource]:
    """Returns each graph on each of `clusters`, or by default on the usual cluster of the graph.

    Raises InputError for a graph without a usual cluster.
    """
    pairs: list[TaskSource] = []
    line = StatusLine("reading graphs")
    with live(line):
        for number, name in enumerate(texts, 1):
            line.say(f"reading {name} ({number} of {len(texts)})")
            graph = source.load(name)
            workload = PAPERS.find(graph.name)
            if workload is None and not clusters:
                raise InputError(f"{name}: is no built-in workload with devices of its own; name them with --devices")
            usual = [Cluster.parse(workload.cluster)] if workload is not None else []
            pairs += [TaskSource(graph, cluster) for cluster in clusters or usual]
    return pairs


def _validation(pairs: Sequence[TaskSource]) -> list[TrainingTask]:
    """Returns the task of each validation graph as it is."""
    tasks = Tasks(pairs, TaskConfig(), seed=0) if pairs else None
    return [tasks.unvaried(number) for number in range(len(pairs))] if tasks else []
