"""Benchmark `ablation`: the policy with its network, and with one part removed, trained equally long, held out.

    full, without attention, without ... --train (equal CPU time)--> zero-shot on held-out workloads --> ratios
    untrained, random, constant          ---------------------------------^

The controls show what simulations alone achieve: as many of them, with a policy that has learnt nothing.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import methods
from benchmarks.benchmark import Benchmark, Say, require_seconds
from benchmarks.comparison import BEST_CLASSICAL, MeanRatio, WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.graphs import workload_inputs
from benchmarks.rows import Rows
from benchmarks.runs import Method, Run, WorkloadRuns
from benchmarks.workloads import workloads
from gdp.budget import Budget, Clock
from gdp.errors import InputError
from gdp.policy.base import Policy, one_thread
from gdp.policy.checkpoint import read_manifest
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.scheduler_config import SchedulerConfig
from gdp.policy.training.pretrain import Provenance, TrainingConfig, TrainingProgress, TrainingRun, train
from gdp.policy.training.tasks import TaskConfig, Tasks, TaskSource
from gdp.search.ops.zero_shot import ZeroShotConfig, zero_shot
from gdp.search.question import Question
from gdp.search.solution import Solution

FULL, WITHOUT = "full", "without-"
PARTS = ("attention", "superposition", "position", "device_features", "network")  # switches of SchedulerConfig
CONTROLS = ("untrained", "random", "constant")
HOLD_OUT = ("gnmt", "wavenet", "inception", "nasnet", "bert", "hrnet", "dlrm")  # of every kind; relatives go with them


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationConfig:
    """The variants, their training and their questions.

    Each training has its own seed, and the learning rate of its policy.
    """

    parts: tuple[str, ...] = PARTS
    policy: SchedulerConfig = field(default_factory=partial(SchedulerConfig, network=True))
    # no run comes near that many updates, so the learning rate stays what it is: CPU time ends training
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(updates=2**31 - 1))
    tasks: TaskConfig = field(default_factory=lambda: TaskConfig(random_share=0.75))  # as `gdp train --randomize`
    zero_shot: ZeroShotConfig = field(default_factory=ZeroShotConfig)

    def __post_init__(self) -> None:
        for part in self.parts:
            if getattr(self.policy, part, None) is not True:
                raise ValueError(f"part {part!r}: a switch of SchedulerConfig that is on is expected")

    @property
    def variants(self) -> tuple[str, ...]:
        """The policies that are compared: the full one first."""
        return (FULL, *(WITHOUT + part for part in self.parts), *CONTROLS)

    def policy_of(self, variant: str) -> SchedulerConfig:
        """The configuration of a variant; the controls have the full policy's."""
        changes: dict[str, Any] = {variant.removeprefix(WITHOUT): False} if variant.startswith(WITHOUT) else {}
        return replace(self.policy, **changes)


@dataclass(frozen=True)
class VariantSummary:
    """A variant beside the full policy, over the workloads that both placed within memory with every seed."""

    variant: str
    to_classical: MeanRatio
    to_full: MeanRatio
    num_full_better: int  # workloads where the full policy is faster
    updates: tuple[int, ...]  # by seed, of training

    @classmethod
    def of(cls, variant: str, rows: Sequence[WorkloadRow]) -> "VariantSummary":
        """Returns the summary of `variant` in `rows`."""
        names = (variant, FULL, BEST_CLASSICAL)
        both = [row for row in rows if all(row.times_ns(name) is not None for name in names)]
        return cls(
            variant=variant,
            to_classical=compare(both, variant, BEST_CLASSICAL),
            to_full=compare(both, variant, FULL),
            num_full_better=sum(ratio > 1.0 for ratio in ratio_dots(both, variant, FULL)),
            updates=tuple(run.updates for run in rows[0].runs[variant]),
        )


@dataclass(frozen=True, kw_only=True)
class AblationBenchmark(Benchmark):
    """Every variant with each seed, trained for `budget` of CPU time and asked about workloads it has not seen."""

    name = "ablation"
    budget: Budget = field(default_factory=lambda: Budget(seconds=600.0))
    seeds: int = 3
    hold_out: tuple[str, ...] = HOLD_OUT  # families; their relatives go with them
    config: AblationConfig = field(default_factory=AblationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seconds(self.name, self.budget, "10m")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        held_out = workloads.hold_out(self.hold_out)
        trained_on = [item.name for item in workloads.training_set(held_out)]
        names = [name for name in workloads.names() if workloads.get(name).family in held_out]
        if not names or not trained_on:
            raise InputError("ablation: hold out at least one family, and leave some to train on")
        methods.warm_up()
        study = _Study(self.config, self.budget.seconds or 0.0, held_out, trained_on, rows.directory)
        all_runs = [WorkloadRuns(name, rows, workload_inputs(name)) for name in names]
        found: dict[tuple[str, str], list[Run]] = {}
        for seed in range(self.seeds):
            for variant in self.config.variants:
                method = study.method(variant, seed)
                for runs in all_runs:
                    found.setdefault((runs.name, variant), []).append(runs.run(method, seed))
                say(f"seed {seed}, {variant}: {found[names[0], variant][-1].updates} updates")
        placed = [
            WorkloadRow(
                **runs.facts,
                baselines=methods.classical_baselines(runs, 1),
                runs={variant: tuple(found[runs.name, variant]) for variant in self.config.variants},
            )
            for runs in all_runs
        ]
        return {
            "held_out": held_out,
            "trained_on": trained_on,
            "rows": placed,
            "summaries": [VariantSummary.of(variant, placed) for variant in self.config.variants],
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {summary.variant: summary.to_classical.by_seed for summary in measured["summaries"]}
        label = "step time over the best classical placer's; a dot for each training seed"
        return dot_plot("Zero-shot on held-out families", label, dots)


class _Study:
    """Trains and places, and keeps policies in a directory."""

    def __init__(
        self,
        config: AblationConfig,
        cpu_seconds: float,
        held_out: Sequence[str],
        trained_on: Sequence[str],
        directory: Path,
    ) -> None:
        self.config, self.cpu_seconds, self.directory = config, cpu_seconds, directory
        self.held_out, self.trained_on = held_out, trained_on

    @cached_property
    def sources(self) -> list[TaskSource]:
        """The graphs to train on, read when the first policy is trained."""
        return [TaskSource(*workload_inputs(name)) for name in self.trained_on]

    def method(self, variant: str, seed: int) -> Method:
        """Returns the method that asks `variant` of that training seed, which is trained when it first runs."""
        config = self.config
        policies: list[tuple[Policy, int]] = []

        def run(question: Question, clock: Clock) -> Solution:
            if not policies:
                policies.append(self.policy(variant, seed))
            policy, updates = policies[0]
            with one_thread():
                solution = zero_shot(question, clock, policy=policy, config=config.zero_shot)
            return solution._replace(num_updates=updates)

        settings = {
            "training_seconds": self.cpu_seconds,
            "hold_out": list(self.held_out),
            "policy": asdict(config.policy_of(variant)),
            "training": asdict(config.training),
            "tasks": asdict(config.tasks),
            "zero_shot": asdict(config.zero_shot),
        }
        return Method(variant, run, Budget(simulations=config.zero_shot.num_simulations), settings=settings)

    def policy(self, variant: str, seed: int) -> tuple[Policy, int]:
        """Returns the policy of a variant, and the number of updates that it was trained for."""
        policy: Policy = _initial(self.config.policy_of(variant), seed)
        if variant == "untrained":
            return policy, 0
        if variant == "constant":  # all scores equal: a unit goes anywhere
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.zero_()
            return policy, 0
        if variant == "random":  # as large as the trained weights, which is how far from uniform it is
            policy, _ = self.policy(FULL, seed)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in policy.parameters():
                    order = torch.randperm(parameter.numel(), generator=generator)
                    parameter.copy_(parameter.flatten()[order].view_as(parameter))
            return policy, 0
        return policy, self._train(policy, variant, seed)

    def _train(self, policy: Policy, variant: str, seed: int) -> int:
        """Trains `policy` in place, or reads the one that was trained before; returns the number of updates."""
        path = self.directory / f"{variant}-seed{seed}.safetensors"
        stop = threading.Event()

        def watch(progress: TrainingProgress) -> None:
            if 3600 * progress.cpu_hours >= self.cpu_seconds:
                stop.set()

        if path.exists() and 3600 * read_manifest(path)["cpu_hours"] >= self.cpu_seconds:
            stop.set()
        tasks = Tasks(self.sources, self.config.tasks, seed)
        training = replace(self.config.training, seed=seed, learning_rate=policy.learning_rate)
        provenance = Provenance(held_out=self.held_out)
        run = TrainingRun(resume=True, stop=stop, on_update=watch)
        return train(policy, tasks, training, path, provenance=provenance, run=run).update


def _initial(config: SchedulerConfig, seed: int) -> SchedulerPolicy:
    with torch.random.fork_rng(devices=[]):  # layers draw initial values from PyTorch's own generator
        torch.manual_seed(seed)
        return SchedulerPolicy(config)
