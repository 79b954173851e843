"""Benchmark `trained`: a trained policy against itself before training, in the same pipeline.

    trained     parameters of the checkpoint                     |  zero-shot, with equal numbers of simulations
    untrained   weights set by hand, random styles               |  and in equal processor time
    random      parameters of the checkpoint in random order     |

On workloads, none of which it was trained on, and on drawn architectures of the families that it was trained on.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import graphs, methods
from benchmarks.architectures.drawn_tasks import DrawnTasks
from benchmarks.architectures.graph_set import GraphSet
from benchmarks.benchmark import Benchmark, Say, require_seconds
from benchmarks.figures import dot_plot
from benchmarks.rows import Rows
from benchmarks.workloads import workloads
from gdp import files
from gdp.arrays import Bool
from gdp.budget import Budget, Clock
from gdp.errors import InputError
from gdp.policy.checkpoint import load_checkpoint, read_checkpoint
from gdp.policy.construction import Constructor
from gdp.policy.features import INITIAL_WEIGHTS
from gdp.policy.scheduler import Policy, one_thread
from gdp.policy.training.tasks import TaskConfig, Tasks
from gdp.search.candidate import Candidate
from gdp.search.ops.zero_shot import ZeroShotConfig, zero_shot
from gdp.search.question import Question
from gdp.simulator.problem import Problem

TRAINED, UNTRAINED, RANDOM = "trained", "untrained", "random"
WORKLOADS, DRAWN = "workloads", "drawn graphs"
SIMULATIONS = (1, 4, 16, 64)
TIMES = (0.1, 1 / 3, 1.0)  # shares of the budget
_EVEN = 0.002  # ratios nearer to 1 are neither better nor worse
_SEED = 1  # of the clusters of drawn graphs; training has 0
_ENDLESS = ZeroShotConfig(num_simulations=10**9)


@dataclass(frozen=True, slots=True)
class TransferMean:
    """Two arms compared over the problems of a part, with the same simulations or time."""

    part: str
    limit: str  # "16 simulations", "1 s"
    arm: str
    ratio: float  # to the untrained arm: geometric mean over problems
    error: float  # standard error of the mean logarithm
    median: float
    num_better: int
    num_worse: int
    num_problems: int  # where both fit with every seed


@dataclass(frozen=True, eq=False)
class MeasuredPolicy:
    """A policy that is measured."""

    name: str
    constructor: Constructor
    digest: str | None = None  # of its checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainedBenchmark(Benchmark):
    """Each problem with each seed and arm."""

    name = "trained"
    checkpoint: tuple[Path, ...]  # others than the first: trained with other seeds
    drawn: Path | None = None  # `benchmarks.architectures` of another seed than the graphs trained on
    graphs: int = 26  # of it
    budget: Budget = field(default_factory=lambda: Budget(seconds=3.0))
    seeds: int = 2
    workloads: tuple[str, ...] = workloads.names()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seconds(self.name, self.budget, "3s")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        manifests = {path: read_checkpoint(path).manifest for path in self.checkpoint}
        problems = {WORKLOADS: self._workloads(manifests), **({DRAWN: self._drawn(manifests)} if self.drawn else {})}
        arms = _arms(self.checkpoint)
        methods.warm_up()
        step_times: dict[str, dict[str, list[list[list[float]]]]] = {}  # by part and arm: [problem][seed][limit]
        for part, some in problems.items():
            step_times[part] = {arm.name: [] for arm in arms}
            for name, make in some.items():
                made = cache(make)  # once for all arms and seeds, and not if all rows are there
                for arm in arms:
                    runs = [self._row(rows, (name, made), arm, seed) for seed in range(self.seeds)]
                    step_times[part][arm.name].append(runs)
                say(f"{part}: {name}")
        means = [mean for part in problems for mean in self._means(part, step_times[part])]
        return {
            "means": means,
            "trainings": {arm.name: _training(manifests[path]) for arm, path in zip(arms, manifests, strict=False)},
            "ratios": {part: _ratios(step_times[part][TRAINED], step_times[part][UNTRAINED]) for part in problems},
            "names": {part: list(some) for part, some in problems.items()},
            "limits": self.limits,
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        last = len(self.limits) - 1
        dots = {part: [row[last] for row in rows if row[last] is not None] for part, rows in measured["ratios"].items()}
        label = f"step time after {self.limits[last]}, trained over untrained; a dot for each problem"
        return dot_plot("Trained and untrained", label, dots)

    @property
    def limits(self) -> list[str]:
        """The numbers of simulations and the times, in words."""
        seconds = [f"{share * (self.budget.seconds or 0.0):.2g} s" for share in TIMES]
        return [*(f"{count} simulation{'s' if count > 1 else ''}" for count in SIMULATIONS), *seconds]

    def _workloads(self, manifests: Mapping[Path, Mapping[str, Any]]) -> dict[str, Callable[[], Problem]]:
        for path, manifest in manifests.items():
            if seen := {graph["name"] for graph in manifest["graphs"]} & set(self.workloads):
                raise InputError(f"{path}: was trained on {min(seen)}; leave it out of --workloads")
        return {name: partial(_workload, name) for name in self.workloads}

    def _drawn(self, manifests: Mapping[Path, Mapping[str, Any]]) -> dict[str, Callable[[], Problem]]:
        assert self.drawn is not None
        stored = GraphSet.open(self.drawn).graphs[: self.graphs]
        for path, manifest in manifests.items():
            seen = {graph["fingerprint"] for graph in manifest["graphs"]}
            if graph := next((graph for graph in stored if graph.fingerprint in seen), None):
                remedy = "draw graphs with another --seed"
                raise InputError(f"{self.drawn}: {path} was trained on {graph.name}; {remedy}")
        tasks = DrawnTasks(stored, TaskConfig(), _SEED)
        return {graph.name: partial(_drawn, tasks, number) for number, graph in enumerate(stored)}

    def _row(
        self, rows: Rows, problem: tuple[str, Callable[[], Problem]], policy: MeasuredPolicy, seed: int
    ) -> list[float]:
        """Returns the step time in ns within each of `limits`; 0 where nothing fits."""
        name, make = problem
        settings = {
            "checkpoint": policy.digest,
            "budget": str(self.budget),
            "drawn": None if self.drawn is None else str(self.drawn),
        }

        def place() -> dict[str, Any]:
            question = Question.about(make(), seed=seed, num_threads=1)
            counted = [_after(question, policy.constructor, count) for count in SIMULATIONS]
            seconds = self.budget.seconds or 0.0
            timed = _within(question, policy.constructor, seconds) if policy.name != RANDOM else [0] * len(TIMES)
            return {"step_time_ns": [*counted, *timed]}

        times: list[float] = rows.row(f"{name}-{policy.name}-seed{seed}", settings, place)["step_time_ns"]
        return times

    def _means(self, part: str, times: Mapping[str, list[list[list[float]]]]) -> list[TransferMean]:
        means = []
        for arm in times:
            if arm == UNTRAINED:
                continue
            ratios = _ratios(times[arm], times[UNTRAINED])
            for number, limit in enumerate(self.limits):
                logs = np.log([ratio for row in ratios if (ratio := row[number]) is not None])
                if not len(logs):
                    continue
                means.append(
                    TransferMean(
                        part=part,
                        limit=limit,
                        arm=arm,
                        ratio=float(np.exp(logs.mean())),
                        error=float(logs.std() / np.sqrt(len(logs))),
                        median=float(np.exp(np.median(logs))),
                        num_better=int((logs < -_EVEN).sum()),
                        num_worse=int((logs > _EVEN).sum()),
                        num_problems=len(logs),
                    )
                )
        return means


def _workload(name: str) -> Problem:
    return Problem.build(*graphs.workload_inputs(name))


def _drawn(tasks: Tasks, number: int) -> Problem:
    return tasks.unvaried(number).problem


def _arms(checkpoints: Sequence[Path]) -> list[MeasuredPolicy]:
    """Returns the arms; a row of the untrained one serves all checkpoints."""
    first, *others = checkpoints
    names = [TRAINED, *(f"{TRAINED}, {path.stem}" for path in others)]
    if len(set(names)) < len(names):
        raise InputError("--checkpoint: two files have one name; give each a name of its own")
    trained = [
        MeasuredPolicy(name, load_checkpoint(path).constructor, files.digest(path))
        for name, path in zip(names, checkpoints, strict=True)
    ]
    shuffled = load_checkpoint(first)
    _shuffle(shuffled)
    untrained = Constructor.of(np.array(INITIAL_WEIGHTS, np.float32))
    return [
        *trained,
        MeasuredPolicy(UNTRAINED, untrained),
        MeasuredPolicy(RANDOM, shuffled.constructor, trained[0].digest),
    ]


def _training(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cost of a training and its result on the families that validate."""
    costs = {key: manifest[key] for key in ("command", "updates", "cpu_hours")}
    results = {key: manifest.get(key) for key in ("seed", "num_trials", "rank_correlation")}
    return {**costs, **results, "num_graphs": len(manifest["graphs"])}


def _shuffle(policy: Policy) -> None:
    """Puts the numbers of each tensor in random order."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))


def _after(question: Question, constructor: Constructor, count: int) -> int:
    """Returns the step time after `count` simulations, a quarter each of them drawn and varied; 0 if nothing fits."""
    config = ZeroShotConfig(num_simulations=count, num_drawn=max(count // 4, 1), num_varied=count // 4)
    with one_thread():
        best = zero_shot(question, Clock(Budget(simulations=count)), constructor=constructor, config=config).best
    return best.step_time_ns if best is not None and best.fits else 0


def _within(question: Question, constructor: Constructor, seconds: float) -> list[int]:
    """Returns the step time after each share of `seconds` of processor time, from one run; 0 where nothing fits yet."""
    clock = Clock(Budget(seconds=seconds), timer=time.process_time)
    progress: list[tuple[float, int]] = []

    def note(candidate: Candidate) -> None:
        if candidate.fits:
            progress.append((clock.seconds, candidate.step_time_ns))

    with one_thread():
        zero_shot(replace(question, on_progress=note), clock, constructor=constructor, config=_ENDLESS)
    ends = [share * seconds for share in TIMES]
    return [min((time_ns for at, time_ns in progress if at <= end), default=0) for end in ends]


def _ratios(times: Sequence[Any], others: Sequence[Any]) -> list[list[float | None]]:
    """Returns [problem][limit], geometric means over seeds; None where one of both does not fit."""
    above, below = np.array(times, np.float64), np.array(others, np.float64)  # [problem, seed, limit]
    fit: Bool = np.all((above > 0) & (below > 0), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.exp(np.log(above / below).mean(axis=1))
    return [
        [float(ratio) if fits else None for ratio, fits in zip(*row, strict=True)]
        for row in zip(ratios, fit, strict=True)
    ]
