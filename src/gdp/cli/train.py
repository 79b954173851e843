"""`gdp train`: what its options name, the training, and what came of it.

Several processes, on one host or many, train together when torchrun starts them:

    torchrun --nproc-per-node 4 -m gdp train training-set --out CHECKPOINT
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from gdp import files, options, sources, workloads
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.policy import checkpoint, ppo
from gdp.policy.base import Policy
from gdp.policy.pretraining import Progress, TrainingConfig, best_path, train
from gdp.policy.processes import Processes
from gdp.policy.tasks import Source, Task, TaskConfig, Tasks
from gdp.report.progress import TrainingLine, live, said_if_slow, stop_on_interrupt, training_sentence

RANDOM_SHARE = 0.75  # of tasks with --randomize; the others stay as they are given: these are what counts
MAX_GRAPHS_PER_UPDATE = 8
TRAINING_SET = "training-set"  # the GRAPH that stands for `workloads.training_set`


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of `gdp train`; without a number of graphs per update, it depends on how many graphs there are."""

    graphs: Sequence[str]
    devices: Sequence[str]  # none: workloads go on the devices that they are usually placed on
    hold_out: Sequence[str]  # model families
    out: Path
    resume: bool
    start: Path | None  # --from
    policy: str | None
    updates: int
    budget: str | None
    graphs_per_update: int | None
    samples: int
    learning_rate: float | None  # None: the policy's
    randomize: bool
    validation: Sequence[str]
    save_every: int
    seed: int
    threads: int | None
    tensorboard: Path | None
    command: str


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of it."""

    policy: Policy
    progress: Progress
    options: TrainOptions
    interrupted: bool
    is_first: bool  # of the processes: the one that reports

    @property
    def is_done(self) -> bool:
        """Whether all updates have been made."""
        return self.progress.update == self.progress.updates

    def to_document(self) -> dict[str, Any]:
        """The answer of `gdp train --json`."""
        progress, out = self.progress, self.options.out
        best = best_path(out)
        return {
            "checkpoint": str(out),
            "best_checkpoint": str(best) if self.options.validation and best.exists() else None,
            "policy": self.policy.name,
            "num_parameters": self.policy.num_parameters(),
            "updates": progress.update,
            "done": self.is_done,
            "interrupted": self.interrupted,
            "seconds": progress.seconds,
            "cpu_hours": progress.cpu_hours,
            "statistics": None if progress.statistics is None else asdict(progress.statistics),
            "validation": None if progress.validation is None else asdict(progress.validation),
        }

    def to_text(self) -> str:
        """The same for people."""
        progress = self.progress
        lines = [
            f"{self.policy.name} ({self.policy.num_parameters():,} parameters), {training_sentence(progress)}",
            f"{progress.seconds:.1f} s, {progress.cpu_hours:.3g} CPU hours in all",
            f"Checkpoint written to {self.options.out}",
        ]
        if self.options.validation and best_path(self.options.out).exists():
            lines.append(f"The parameters that did best on the validation graphs: {best_path(self.options.out)}")
        if not self.is_done:
            lines.append("Go on with the same command and --resume")
        return "\n".join(lines)


def run(given: TrainOptions, warm_up: Callable[[], None]) -> Trained:
    """Train as `given`; `warm_up` compiles, once all input is read. InputError for what makes no sense."""
    limit = None if given.budget is None else Budget.parse(given.budget)
    if limit is not None and limit.seconds is None:
        raise InputError(f"--budget is {given.budget!r}; a time such as 10m is expected")
    options.check_writable(given.out)
    if given.out.exists() and not given.resume:
        raise InputError(f"{given.out}: exists; go on with it by --resume, or choose another --out")
    clusters = [Cluster.parse(text) for text in given.devices]
    held_out = workloads.hold_out(given.hold_out)
    policy, origin = _policy(given, held_out)
    pairs = _pairs(given.graphs, clusters, held_out)
    config = TrainingConfig(
        seed=given.seed,
        updates=given.updates,
        graphs_per_update=given.graphs_per_update
        or (MAX_GRAPHS_PER_UPDATE if given.randomize else min(len(pairs), MAX_GRAPHS_PER_UPDATE)),
        samples=given.samples,
        learning_rate=policy.learning_rate if given.learning_rate is None else given.learning_rate,
        ppo=ppo.PAPER if policy.name == "paper" else ppo.PPOConfig(),
    )
    tasks = Tasks(pairs, _task_config(given, policy), given.seed)
    validation = _validation(given, clusters, held_out)
    seconds = None if limit is None else limit.seconds
    line = TrainingLine(f"training {policy.name}")
    warm_up()

    def report(progress: Progress) -> None:
        line(progress)
        if not sys.stderr.isatty() and progress.update % given.save_every == 0 and processes.is_first:
            print(f"gdp: {training_sentence(progress)}", file=sys.stderr, flush=True)

    with Processes.join() as processes, stop_on_interrupt(terminate=True) as stop:
        if given.resume and not given.out.exists() and processes.is_first:
            print(f"gdp: {given.out}: no such file yet, training starts anew", file=sys.stderr, flush=True)
        policy.to(processes.device)
        with live(line):
            progress = train(
                policy, tasks, config, given.out, resume=given.resume, origin=origin, held_out=held_out,
                command=given.command, save_every=given.save_every, seconds=seconds, stop=stop, validation=validation,
                tensorboard=given.tensorboard, num_threads=given.threads, processes=processes, on_update=report,
            )  # fmt: skip
        return Trained(policy, progress, given, stop.is_set(), processes.is_first)


def _policy(given: TrainOptions, held_out: Sequence[str]) -> tuple[Policy, str]:
    """(the policy to start with, where its parameters are from)."""
    if given.start is None:
        return checkpoint.new_policy(given.policy or "default", seed=given.seed), ""
    policy = checkpoint.load_checkpoint(given.start)
    if given.policy not in (None, policy.name):
        raise InputError(f"{given.start}: holds policy {policy.name!r}, not {given.policy!r}; leave --policy out")
    held_out_before = checkpoint.read_manifest(given.start).get("held_out", ())
    for family in held_out:
        if family not in held_out_before:
            raise InputError(f"{given.start}: was trained without holding {family} out; start from another checkpoint")
    return policy, hashlib.sha256(files.read_bytes(given.start)).hexdigest()


def _pairs(texts: Sequence[str], clusters: Sequence[Cluster], held_out: Sequence[str]) -> list[Source]:
    """Each graph on each of `clusters` or, without any, on the one that it is usually placed on.

    InputError for one without such a cluster, and for one of a family that is `held_out`.
    """
    training_set = [workload.name for workload in workloads.training_set(held_out)]
    names = [name for text in texts for name in (training_set if text == TRAINING_SET else (text,))]
    pairs: list[Source] = []
    with said_if_slow("capturing graphs, once on a machine (some minutes for the training set)", seconds=10.0):
        for number, name in enumerate(names, 1):
            with live(f"reading {name} ({number} of {len(names)})"):
                graph = sources.read_model(name).graph
            workload = workloads.find(graph.name)
            if workload is not None and workload.family in held_out:
                raise InputError(f"{name}: is of family {workload.family}, which is held out; leave one of both out")
            if workload is None and not clusters:
                raise InputError(f"{name}: is no built-in workload with devices of its own; say which with --devices")
            usual = [Cluster.parse(workload.cluster)] if workload is not None else []
            pairs += [Source(graph, cluster) for cluster in clusters or usual]
    return pairs


def _task_config(given: TrainOptions, policy: Policy) -> TaskConfig:
    config = TaskConfig(random_share=RANDOM_SHARE if given.randomize else 0.0)
    most = getattr(cast("Any", policy).config, "max_devices", config.max_devices)
    return replace(config, max_devices=min(most, config.max_devices), min_devices=min(most, config.min_devices))


def _validation(given: TrainOptions, clusters: Sequence[Cluster], held_out: Sequence[str]) -> list[Task]:
    pairs = _pairs(given.validation, clusters, held_out)  # what is held out has no say in which parameters are kept
    tasks = Tasks(pairs, TaskConfig(), given.seed) if pairs else None
    return [tasks.unvaried(number) for number in range(len(pairs))] if tasks else []
