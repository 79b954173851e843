"""`gdp bench ablation`: the policy with its network, and with one part removed, trained equally long, held out.

    full, without attention, without ... --train (equal CPU time)--> zero-shot on held-out workloads --> ratios
    untrained, random, constant          ---------------------------------^

A part earns its place if every training seed with it does better than every seed without it. The controls tell what
simulations alone achieve: the same number of them, asked of a policy that has learnt nothing.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from gdp import files, workloads
from gdp.bench.graphs import workload_inputs
from gdp.bench.methods import warm_up
from gdp.bench.plot import dot_plot
from gdp.bench.rows import Rows
from gdp.bench.tables import geometric_mean, machine, machine_line, markdown_table, milliseconds
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.coarsen import reduce
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.placers import CLASSICAL
from gdp.placers.learned import ZeroShotConfig, one_thread, zero_shot
from gdp.placers.portfolio import find
from gdp.policy.base import Policy
from gdp.policy.checkpoint import read_manifest
from gdp.policy.pretraining import Progress, TrainingConfig, train
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.scheduler_config import SchedulerConfig
from gdp.policy.tasks import Source, TaskConfig, Tasks
from gdp.problem import Problem

FULL, WITHOUT = "full", "without-"
PARTS = ("attention", "superposition", "position", "device_features", "network")  # switches of SchedulerConfig
CONTROLS = ("untrained", "random", "constant")
HOLD_OUT = ("gnmt", "wavenet", "inception", "nasnet", "bert", "hrnet", "dlrm")  # of every kind; relatives go with them

OnRow = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationConfig:
    """What is trained, on what, and how it is asked; the seed of `training` is replaced, and its learning rate by the
    policy's."""

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
        """All that are compared: the full policy first."""
        return (FULL, *(WITHOUT + part for part in self.parts), *CONTROLS)

    def policy_of(self, variant: str) -> SchedulerConfig:
        """The configuration of a variant; the controls have the full policy's."""
        changes: dict[str, Any] = {variant.removeprefix(WITHOUT): False} if variant.startswith(WITHOUT) else {}
        return replace(self.policy, **changes)


@dataclass(frozen=True)
class Summary:
    """A variant beside the full policy, over the held-out workloads that both placed within memory with every seed."""

    variant: str
    to_classical: tuple[float, ...]  # by seed: step time over the best classical placer's, geometric mean
    full_to_classical: tuple[float, ...]  # the full policy's, over the same workloads
    to_full: Mapping[str, float]  # by workload, geometric mean over seeds
    updates: tuple[int, ...]  # by seed, of training

    @property
    def ratio(self) -> float:
        """Step time over the full policy's."""
        return geometric_mean(self.to_classical) / geometric_mean(self.full_to_classical)

    @property
    def num_full_better(self) -> int:
        """Workloads where the full policy is faster."""
        return sum(ratio > 1.0 for ratio in self.to_full.values())

    @property
    def full_is(self) -> str:
        """`better` or `worse` than the variant with every seed, else `alike`."""
        if max(self.full_to_classical) < min(self.to_classical):
            return "better"
        return "worse" if min(self.full_to_classical) > max(self.to_classical) else "alike"

    def to_document(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ratio_to_full": self.ratio if self.to_full else None,
            "full_is": self.full_is if self.to_full else None,
        }


def run(
    *,
    budget: Budget,
    seeds: int,
    hold_out: Sequence[str] = HOLD_OUT,
    out: Path | None,
    on_row: OnRow,
    config: AblationConfig | None = None,
) -> dict[str, Any]:
    """Train every variant with `seeds` seeds for `budget` of CPU time each, then place the workloads of the families
    `hold_out` and of their relatives, which it has not seen.

    Returns the figures as a dictionary, with `markdown` made of them. They, a plot, the checkpoints and the rows are
    written to the directory `out` if there is one; a run that was stopped goes on from there.
    """
    config = config or AblationConfig()
    if budget.seconds is None or budget.seconds <= 0:
        raise InputError(f"bench ablation: budget is {budget}; a time such as 10m is expected")
    if seeds < 1:
        raise InputError(f"bench ablation: {seeds} seeds; at least one is expected")
    held_out = workloads.hold_out(hold_out)
    trained_on = [item.name for item in workloads.training_set(held_out)]
    names = [name for name in workloads.names() if workloads.get(name).family in held_out]
    if not names or not trained_on:
        raise InputError("bench ablation: hold out at least one family, and leave some to train on")
    warm_up()
    with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
        study = _Study(config, budget.seconds, held_out, trained_on, out or Path(scratch))
        inputs = {name: workload_inputs(name) for name in names}
        classical = {name: study.place_classically(name, *inputs[name]) for name in names}
        found: dict[str, list[dict[str, dict[str, Any]]]] = {variant: [] for variant in config.variants}
        for seed in range(seeds):
            for variant in config.variants:
                found[variant].append(study.place(variant, seed, inputs))
                on_row(_line(variant, seed, found[variant][-1], classical))
    summaries = [summarize(variant, found, classical) for variant in config.variants]
    figures: dict[str, Any] = {
        "command": f"gdp bench ablation --budget {budget} --seeds {seeds}",
        "machine": machine(),
        "budget": str(budget),
        "seeds": seeds,
        "hold_out": held_out,
        "trained_on": trained_on,
        "classical": classical,
        "rows": found,
        "summaries": [summary.to_document() for summary in summaries],
    }
    if tuple(hold_out) != HOLD_OUT:
        figures["command"] += "".join(f" --hold-out {family}" for family in hold_out)
    figures["markdown"] = _markdown(figures, summaries, config)
    if out is not None:
        files.write_json(out / "ablation.json", {key: value for key, value in figures.items() if key != "markdown"})
        files.write_bytes(out / "ablation.md", figures["markdown"].encode())
        rows = [(_label(summary.variant), summary.to_classical) for summary in summaries]
        label = "step time over the best classical placer's; a dot for each training seed"
        files.write_bytes(out / "ablation.svg", dot_plot("Zero-shot on held-out families", label, rows).encode())
    return figures


def summarize(
    variant: str, found: Mapping[str, Sequence[Mapping[str, Any]]], classical: Mapping[str, Mapping[str, Any]]
) -> Summary:
    """What became of `variant`; `found` has each variant's rows by workload, seed by seed."""

    def fits(name: str) -> bool:
        runs = [*found[variant], *found[FULL]]
        return classical[name]["best_ns"] is not None and all(run[name]["step_time_ns"] is not None for run in runs)

    names = [name for name in classical if fits(name)]

    def ratios(run: Mapping[str, Any]) -> list[float]:
        return [run[name]["step_time_ns"] / classical[name]["best_ns"] for name in names]

    mine, full = [ratios(run) for run in found[variant]], [ratios(run) for run in found[FULL]]
    return Summary(
        variant=variant,
        to_classical=tuple(geometric_mean(run) for run in mine if run),
        full_to_classical=tuple(geometric_mean(run) for run in full if run),
        to_full={
            name: geometric_mean([run[at] for run in mine]) / geometric_mean([run[at] for run in full])
            for at, name in enumerate(names)
        },
        updates=tuple(next(iter(run.values()))["updates"] for run in found[variant]),
    )


class _Study:
    """Trains and places, and keeps what is done in a directory."""

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
        self.rows = Rows(directory / "rows")

    @cached_property
    def sources(self) -> list[Source]:
        """What is trained on, read when the first policy is trained."""
        return [Source(*workload_inputs(name)) for name in self.trained_on]

    def place_classically(self, name: str, graph: Graph, cluster: Cluster) -> dict[str, Any]:
        """Step time of every classical placer, None where it has no plan that fits, and the best."""

        def make() -> dict[str, Any]:
            reduction = reduce(Problem.build(graph, cluster))
            clock = Clock(Budget(simulations=len(CLASSICAL)))
            plans = {placer: find(reduction, placer, clock).best for placer in CLASSICAL}
            times = {
                placer: plan.step_time_ns if plan is not None and plan.feasible else None
                for placer, plan in plans.items()
            }
            return {"best_ns": min((time_ns for time_ns in times.values() if time_ns), default=None), "placers": times}

        return self.rows.row(f"classical-{name}", _fingerprints(graph, cluster), make)

    def place(self, variant: str, seed: int, inputs: Mapping[str, tuple[Graph, Cluster]]) -> dict[str, dict[str, Any]]:
        """What `variant` of that training seed answers for each workload."""
        config = self.config
        settings = {
            "budget": self.cpu_seconds,
            "hold_out": list(self.held_out),
            "policy": asdict(config.policy_of(variant)),
            "training": asdict(config.training),
            "tasks": asdict(config.tasks),
            "zero_shot": asdict(config.zero_shot),
        }
        ready: list[tuple[Policy, int]] = []  # trained when the first row is missing

        def make(graph: Graph, cluster: Cluster) -> dict[str, Any]:
            if not ready:
                ready.append(self.policy(variant, seed))
            policy, updates = ready[0]
            problem = reduce(Problem.build(graph, cluster)).problem
            clock = Clock(Budget(simulations=config.zero_shot.num_simulations))
            began = time.process_time()
            with one_thread():
                answer = zero_shot(problem, policy, clock, seed=seed, config=config.zero_shot)
            best = answer.incumbent
            return {
                "step_time_ns": best.step_time_ns if best.excess_bytes == 0 else None,
                "simulations": answer.num_simulations,
                "cpu_seconds": time.process_time() - began,
                "updates": updates,
            }

        return {
            name: self.rows.row(f"{variant}-seed{seed}-{name}", settings | _fingerprints(*pair), partial(make, *pair))
            for name, pair in inputs.items()
        }

    def policy(self, variant: str, seed: int) -> tuple[Policy, int]:
        """(the policy of a variant, number of updates that it was trained for)."""
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
        """Train `policy` in place, or read what was trained before; number of updates."""
        path = self.directory / f"{variant}-seed{seed}.safetensors"
        stop = threading.Event()

        def watch(progress: Progress) -> None:
            if 3600 * progress.cpu_hours >= self.cpu_seconds:
                stop.set()

        if path.exists() and 3600 * read_manifest(path)["cpu_hours"] >= self.cpu_seconds:
            stop.set()
        tasks = Tasks(self.sources, self.config.tasks, seed)
        training = replace(self.config.training, seed=seed, learning_rate=policy.learning_rate)
        return train(
            policy, tasks, training, path, resume=True, held_out=self.held_out, stop=stop, on_update=watch
        ).update


def _initial(config: SchedulerConfig, seed: int) -> SchedulerPolicy:
    with torch.random.fork_rng(devices=[]):  # layers draw initial values from PyTorch's own generator
        torch.manual_seed(seed)
        return SchedulerPolicy(config)


def _fingerprints(graph: Graph, cluster: Cluster) -> dict[str, str]:
    return {"graph": graph.fingerprint, "cluster": cluster.fingerprint}


def _label(variant: str) -> str:
    return variant.replace("-", " ").replace("_", " ")


def _line(variant: str, seed: int, rows: Mapping[str, Any], classical: Mapping[str, Any]) -> str:
    ratios = [
        row["step_time_ns"] / classical[name]["best_ns"]
        for name, row in rows.items()
        if row["step_time_ns"] is not None and classical[name]["best_ns"] is not None
    ]
    ratio = f"{geometric_mean(ratios):.3f}x the best classical placer" if ratios else "nothing fits"
    updates = next(iter(rows.values()))["updates"]
    return f"seed {seed}, {_label(variant)}: {ratio} on {len(ratios)} of {len(rows)} workloads, {updates} updates"


def _sentence(summary: Summary, seeds: int) -> str:
    name = _label(summary.variant)
    if not summary.to_full:
        return f"{name}: nothing fits."
    over = f"over {len(summary.to_full)} workloads, the full policy better on {summary.num_full_better}"
    text = f"{name}: **{summary.ratio:.3f}x** the full policy's step time ({over})"
    if seeds == 1:
        return f"{text}; one seed tells nothing about the spread."
    if summary.variant in CONTROLS:
        than = {"better": "worse than it with every seed", "worse": "better than it with every seed"}
        return f"{text}; {than.get(summary.full_is, 'no further from it than the seeds spread')}."
    part = name.removeprefix(_label(WITHOUT))
    verdict = {
        "better": f"{part}: earns its place",
        "worse": f"{part}: does harm, better without it with every seed",
        "alike": f"{part}: within the spread of the seeds, does not earn its place",
    }[summary.full_is]
    return f"{text}; {verdict}."


def _summary_row(summary: Summary) -> tuple[str, ...]:
    counts = summary.updates
    updates = "-" if not any(counts) else f"{sum(counts) / len(counts):,.0f}"
    if not summary.to_full:
        return (_label(summary.variant), updates, "0", "OOM", "-", "-", "-", "-")
    ratios = summary.to_classical
    return (
        _label(summary.variant), updates, f"{len(summary.to_full)}", f"{geometric_mean(ratios):.3f}",
        f"{min(ratios):.3f}", f"{max(ratios):.3f}", f"{summary.ratio:.3f}",
        "-" if summary.variant == FULL else f"{summary.num_full_better}",
    )  # fmt: skip


def _workload_row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    best_ns = figures["classical"][name]["best_ns"]
    cells = []
    for runs in figures["rows"].values():
        times = [run[name]["step_time_ns"] for run in runs]
        fits = best_ns is not None and all(time_ns is not None for time_ns in times)
        cells.append(f"{geometric_mean([time_ns / best_ns for time_ns in times]):.3f}" if fits else "OOM")
    return name, "OOM" if best_ns is None else milliseconds(best_ns), *cells


def _markdown(figures: Mapping[str, Any], summaries: Sequence[Summary], config: AblationConfig) -> str:
    seeds, names = figures["seeds"], list(figures["classical"])
    header = (
        "variant", "updates", "workloads", "to the best classical", "lowest seed", "highest seed", "to full",
        "full better on",
    )  # fmt: skip
    parts = (
        "## Ablation",
        f"    {figures['command']}",
        f"{machine_line()}.",
        f"The default policy with its network, and with one part removed (without network: one weight vector for all "
        f"units, which is the policy that comes with gdp), "
        f"each trained with {seeds} seeds for {figures['budget']} of CPU time on {len(figures['trained_on'])} graphs "
        f"of all families but {', '.join(figures['hold_out'])}, with drawn devices, memory and batch sizes. Then each "
        f"places the "
        f"{len(names)} workloads of the held-out families at once, best of {config.zero_shot.num_simulations} "
        "simulations. Ratios of step times, geometric means; the best classical plan is chosen for each workload with "
        "hindsight. A variant is compared with the full policy over the workloads that both place within memory with "
        "every seed. A part earns its place if the full policy is better with every seed than without it with any.",
        markdown_table(header, map(_summary_row, summaries)),
        "Controls, with the same simulations: the untrained policy; a random one, the trained weights in random order; "
        "a constant one, to which all devices are alike.",
        "\n".join(f"- {_sentence(summary, seeds)}" for summary in summaries if summary.variant != FULL),
        "![Ablation](ablation.svg)",
        "Step time over that of the best classical placer, geometric means over the seeds:",
        markdown_table(
            ("workload", "best classical, ms", *map(_label, config.variants)),
            [_workload_row(name, figures) for name in names],
        ),
    )
    return "\n\n".join(parts) + "\n"
