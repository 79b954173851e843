"""Runs of methods on workloads: each is made once, its plan stored and replayed, and found again by a rerun.

graph, cluster, seed --method, clock--> outcome --save plan, read it back, replay--> run --> a row in a file
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gdp.bench.graphs import workload_inputs
from gdp.bench.rows import Rows
from gdp.bounds import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.coarsen import Reduction, reduce
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.place import plan_of
from gdp.plan import Baseline, Plan
from gdp.problem import Problem
from gdp.simulate import Simulation, verify


@dataclass(eq=False)
class CpuClock(Clock):
    """Counts the processor time of all threads: fair whatever else runs on the machine."""

    started: float = field(default_factory=time.process_time)

    @property
    def seconds(self) -> float:
        """Processor seconds since the start."""
        return time.process_time() - self.started


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a method found."""

    best: Simulation | None  # of the original problem; None: no placement at all
    simulations: int
    updates: int = 0  # of a policy
    baselines: Mapping[str, Baseline] = field(default_factory=dict)  # of the classical placers, if it ran them


@dataclass(frozen=True, eq=False)
class Method:
    """A way to place a problem with a budget, given a seed."""

    name: str
    run: Callable[[Reduction, Clock, int], Outcome]
    budget: Budget
    counts_cpu: bool = False  # the budget's seconds are processor time, of all threads
    settings: Mapping[str, str | int | float] = field(default_factory=dict)  # all else that its answer depends on


@dataclass(frozen=True)
class Run:
    """How a method did with one seed."""

    status: str  # "ok", "infeasible" (does not fit) or "failed" (found no placement)
    step_time_ns: int | None
    seconds: float  # from graph to placement
    cpu_seconds: float  # of all threads
    simulations: int
    updates: int
    baselines: Mapping[str, Baseline]

    def to_document(self) -> dict[str, Any]:
        """The run as JSON values."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Run":
        """The run of `to_document`."""
        baselines = {name: Baseline(**baseline) for name, baseline in document["baselines"].items()}
        return cls(**{**document, "baselines": baselines})


class WorkloadRuns:
    """The runs on one workload. `directory` gets its graph and cluster, each run's plan, and, to `resume`, its row.

    `inputs` are the graph and cluster of a name that is not built in.
    """

    def __init__(
        self, name: str, directory: Path, *, resume: bool, inputs: tuple[Graph, Cluster] | None = None
    ) -> None:
        self.name = name
        self.graph, self.cluster = workload_inputs(name) if inputs is None else inputs
        self._directory = directory
        self._rows = Rows(directory if resume else None)
        self._stored = stored_problem(name, self.graph, self.cluster, directory)
        self.lower_bound_ns = lower_bound(self._stored)

    def run(self, method: Method, seed: int) -> Run:
        """The run of `method` with `seed`: the one stored by the same settings, else a new one.

        RuntimeError if its plan does not give its figures again. InputError for a stored one with other settings.
        """
        name = f"{self.name}-{method.name}-seed{seed}"
        settings = {
            "graph": self.graph.fingerprint, "cluster": self.cluster.fingerprint, "gdp_version": _version(),
            "budget": str(method.budget), "counts_cpu": method.counts_cpu, **method.settings,
        }  # fmt: skip
        path = self.plan_path(method, seed)
        row = self._rows.row(name, settings, lambda: self._make(method, seed, path).to_document())
        run = Run.from_document(row)
        if run.status == "ok":
            require_verified(path, self._stored, run.step_time_ns)
        return run

    def plan_path(self, method: Method, seed: int) -> Path:
        """Where the plan of that run is, if it has one."""
        return self._directory / f"{self.name}-{method.name}-seed{seed}.plan.json.gz"

    @property
    def problem(self) -> Problem:
        """The problem as it is read back from the directory."""
        return self._stored

    def _make(self, method: Method, seed: int, path: Path) -> Run:
        clock = (CpuClock if method.counts_cpu else Clock)(method.budget)
        began, cpu_began = time.monotonic(), time.process_time()
        reduction = reduce(Problem.build(self.graph, self.cluster))
        outcome = method.run(reduction, clock, seed)
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
        if clock.stop.is_set():  # a search that was interrupted hands in what it has
            raise KeyboardInterrupt
        status, best = "failed", outcome.best
        if best is not None:
            status = "ok" if best.feasible else "infeasible"
            if best.feasible:
                plan_of(best, self.lower_bound_ns, method.name, seed).save(path)
        step_time_ns = None if best is None else best.step_time_ns
        return Run(
            status, step_time_ns, seconds, cpu_seconds, outcome.simulations, outcome.updates, dict(outcome.baselines)
        )


def stored_problem(name: str, graph: Graph, cluster: Cluster, directory: Path) -> Problem:
    """The problem of the graph and cluster as they are read back from `directory`, where they are saved."""
    graph_path, cluster_path = directory / f"{name}.graph.json.gz", directory / f"{name}.cluster.json"
    graph.save(graph_path)
    cluster.save(cluster_path)
    return Problem.build(Graph.load(graph_path), Cluster.load(cluster_path))


def require_verified(path: Path, problem: Problem, step_time_ns: int | None) -> None:
    """RuntimeError unless the plan in `path` takes that long, fits, and gives all its figures again."""
    try:
        plan = Plan.load(path)
        wrong = verify(problem, plan)
    except InputError as error:
        raise RuntimeError(f"{path.name}: {error}") from None
    if plan.step_time_ns != step_time_ns:
        wrong.append(f"step_time_ns is {plan.step_time_ns}; the run's is {step_time_ns}")
    if wrong:
        raise RuntimeError(f"the plan in {path.name} does not hold: {'; '.join(wrong)}")


def _version() -> str:
    return version("gdp-placement")
