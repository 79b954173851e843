"""Benchmark `large-steps`: a policy where a simulation takes long, beside the search that asks none.

Steps of 50,000 to 1.3 million ops, cut as gdp cuts them, on 8 to 512 devices. Each use of the policy (`policy_uses.py`)
has the processor time that the search has, its own work included.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import model_configs
from benchmarks.benchmark import Benchmark, Say, require_seconds
from benchmarks.figures import Series, line_plot
from benchmarks.policy_uses import SEARCH, SHARES, SIMULATIONS, TRAINED, USES, PlacedStep, PolicyUse, measured
from benchmarks.rows import SEARCH as SEARCH_CODE
from benchmarks.rows import Rows, code_of
from gdp import files
from gdp.arrays import F64
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.models.source import ModelSource
from gdp.parallel.layout import NONE, Layout
from gdp.parallel.step import Step
from gdp.placers import CLASSICAL
from gdp.planning.warm_up import warm_up
from gdp.policy.pretrained import read_policy, shipped
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

_USES = tuple(f"benchmarks/{file}" for file in ("large_steps.py", "policy_uses.py", "model_configs.yaml"))
_EVEN = 0.002  # ratios nearer to 1 are neither better nor worse
_BUDGET_OPS = 400_000  # the budget of steps with more is in proportion
_HOSTS, _PODS = "8x(8xa100-sxm-80g)@100gbit", "4x(16x(8xa100-sxm-80g)@100gbit)@400gbit"
_UNEQUAL = "4xp100-pcie-16g+4xv100-sxm-32g"


@dataclass(frozen=True, slots=True)
class LargeStep:
    """A workload in a layout, on devices."""

    model: str
    layout: str
    devices: str

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.devices}"

    def build(self) -> PlacedStep:
        """Cuts the step, and returns it with its bound."""
        layout = Layout() if self.layout == NONE else Layout.parse(self.layout)
        with tempfile.TemporaryDirectory(prefix="gdp-configs-") as directory:
            part = ModelSource(model_configs.asked_model(self.model, directory)).part(layout.num_parts).graph
        problem = Problem.build(Step.of(part, layout).graph, Cluster.parse(self.devices))
        return PlacedStep(problem, lower_bound(problem))


STEPS = (
    LargeStep("gnmt-8", NONE, "8xp100-pcie-16g"),
    LargeStep("gnmt-4", "microbatches=8", _UNEQUAL),
    LargeStep("amoebanet", "data=8,microbatches=4", _HOSTS),
    LargeStep("elmo", "data=4,microbatches=8", _HOSTS),
    LargeStep("gnmt-8", "microbatches=4", _HOSTS),
    LargeStep("rnnlm-8", "data=8,microbatches=4", _HOSTS),
    LargeStep("gnmt-8", "microbatches=4", "8xp100-pcie-16g"),
    LargeStep("gnmt-8", NONE, _HOSTS),
    LargeStep("bert-large", "data=8,microbatches=4", _PODS),
    LargeStep("gnmt-8", "data=8,microbatches=3", _HOSTS),
)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The size of a step."""

    num_ops: int
    num_devices: int
    simulation_s: float  # of processor time, of the placement by layers
    bound_ns: int

    @classmethod
    def of(cls, step: PlacedStep) -> "StepFacts":
        """Returns the facts of `step`, of which one simulation is made."""
        problem = step.problem
        placement = CLASSICAL["expert"](problem, 0)
        assert placement is not None, "all ops may go anywhere"
        simulate(problem, placement)
        began = time.process_time()
        simulate(problem, placement)
        return cls(problem.num_ops, problem.num_devices, time.process_time() - began, step.bound_ns)


@dataclass(frozen=True, slots=True)
class UseMean:
    """A use over the search: step times of the steps where both have a plan that fits with every seed."""

    use: str
    limit: str  # "16 simulations", "1/2 of the budget"
    ratio: float  # geometric mean over steps
    error: float  # standard error of the mean logarithm
    lowest: float
    highest: float
    num_better: int
    num_worse: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class LargeStepsBenchmark(Benchmark):
    """The first `num_steps` of `steps` with each use and seed.

    Another policy, `checkpoint`, runs with the first seed.
    """

    name = "large-steps"
    budget: Budget = field(default_factory=lambda: Budget(seconds=6.0))
    seeds: int = 3
    checkpoint: Path | None = None
    num_steps: int = len(STEPS)
    steps: tuple[LargeStep, ...] = STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seconds(self.name, self.budget, "6s")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        rows = replace(rows, shared={"code": code_of(*SEARCH_CODE, *_USES)})
        others = {} if self.checkpoint is None else {f"{TRAINED}, {self.checkpoint.stem}": self.checkpoint}
        facts, times = list[dict[str, Any]](), {use: list[F64]() for use in (*USES, *others)}
        for step in self.steps[: self.num_steps]:
            warm_up(("auto", "gdp-zero-shot"), num_devices=Cluster.parse(step.devices).num_devices)
            made = cache(step.build)  # once for all rows, and not if all are there
            row = rows.row(f"{step}-facts", {}, lambda made=made: asdict(StepFacts.of(made())))  # type: ignore[misc]
            facts.append({"step": str(step), **row})
            found = {use: self._times(rows, step, use, others.get(use), made, row["num_ops"]) for use in times}
            for use, own in found.items():
                times[use].append(own)
            say(f"{step}: {', '.join(f'{use} {own[0, -1] / 1e6:.1f}' for use, own in found.items())} ms")
        ratios = {use: [_ratios(*pair) for pair in zip(own, times[SEARCH], strict=True)] for use, own in times.items()}
        return {
            "facts": facts,
            "means": [mean for use in times if use != SEARCH for mean in self._means(use, ratios[use])],
            "at_end": {use: [_spread(own[:, -1]) for own in each] for use, each in ratios.items()},
            "search_ns": [float(own[:, -1].mean()) for own in times[SEARCH]],
            "limits": self.limits,
        }

    @property
    def limits(self) -> list[str]:
        """The numbers of simulations and the shares of the budget, in words."""
        counts = [f"{count} simulation{'s' if count > 1 else ''}" for count in SIMULATIONS]
        return [*counts, *("all of it" if share == 1 else f"1/{1 / share:.0f} of the budget" for share in SHARES)]

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        lines = {}
        for use in (use for use in USES if use != SEARCH):
            own = [mean for mean in measured["means"] if mean.use == use and mean.limit in self.limits[-len(SHARES) :]]
            shares = [SHARES[self.limits.index(mean.limit) - len(SIMULATIONS)] for mean in own]
            spread = [(mean.ratio * np.exp(-mean.error), mean.ratio * np.exp(mean.error)) for mean in own]
            lines[use] = Series([(share, mean.ratio) for share, mean in zip(shares, own, strict=True)], spread)
        labels = "share of the budget", "step time, to that of the search in equal time"
        return line_plot("The policy on large steps", *labels, lines, SHARES)

    def _times(
        self, rows: Rows, step: LargeStep, use: str, other: Path | None, made: Callable[[], PlacedStep], num_ops: int
    ) -> F64:
        """Returns the step times [seeds, limits] of a use in ns; 0 where nothing fits, nan where there is none."""
        seconds = (self.budget.seconds or 0.0) * max(num_ops / _BUDGET_OPS, 1.0)
        policy = files.digest(shipped() if other is None else other)
        settings = {"seconds": seconds, "policy": None if use == SEARCH else policy}
        run = USES[use] if other is None else PolicyUse(partial(read_policy, other))
        is_policy, found = isinstance(run, PolicyUse), list[list[float]]()
        for seed in range(self.seeds if other is None else 1):
            row = rows.row(f"{step}-{use}-seed{seed}", settings, lambda seed=seed: measured(made(), run, seed, seconds))  # type: ignore[misc]
            after = row["after"] if is_policy or use == SEARCH else [np.nan] * len(SIMULATIONS)
            found.append([*after, *row["within"]])
        return np.array(found, np.float64)

    def _means(self, use: str, ratios: Sequence[F64]) -> list[UseMean]:
        means = []
        for number, limit in enumerate(self.limits):
            logs = np.array([np.log(own[:, number]).mean() for own in ratios])
            logs = logs[np.isfinite(logs)]
            if len(logs):
                lowest, highest = np.exp([logs.min(), logs.max()]).tolist()
                mean = UseMean(
                    use=use,
                    limit=limit,
                    ratio=float(np.exp(logs.mean())),
                    error=float(logs.std() / np.sqrt(len(logs))),
                    lowest=lowest,
                    highest=highest,
                    num_better=int((logs < -_EVEN).sum()),
                    num_worse=int((logs > _EVEN).sum()),
                    num_steps=len(logs),
                )
                means.append(mean)
        return means


def _ratios(own: F64, search: F64) -> F64:
    """Returns the ratios [seeds, limits] of step times [seeds, limits]; nan where one of both does not fit."""
    search = search[: len(own)]
    return np.where((own > 0) & (search > 0), own / np.where(search > 0, search, 1.0), np.nan)


def _spread(ratios: F64) -> tuple[float, float, float] | None:
    """Returns the geometric mean of the ratios, the lowest and the highest; None where one is not there."""
    if not np.isfinite(ratios).all():
        return None
    return float(np.exp(np.log(ratios).mean())), float(ratios.min()), float(ratios.max())
