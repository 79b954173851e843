"""Runs of methods on workloads: each is made once, its plan stored and replayed, and found again by a rerun.

graph, cluster, seed --method, clock--> solution --save plan, read it back, replay--> run --> a row in a file
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import graphs
from benchmarks.rows import Rows
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.search.question import Question, Solution, plan_of
from gdp.simulator.plan import Baseline, Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import verify


@dataclass(frozen=True, eq=False)
class Method:
    """A way to place a problem with a budget, given a seed."""

    name: str
    run: Callable[[Question, Clock], Solution]
    budget: Budget
    counts_cpu: bool = False  # the budget's seconds are processor time, of all threads
    num_threads: int | None = None  # None: as many as there are processors
    settings: Mapping[str, Any] = field(default_factory=dict)  # all else that its answer depends on


@dataclass(frozen=True)
class Run:
    """The result of a method with one seed."""

    status: str  # "ok", "infeasible" (does not fit) or "failed" (found no placement)
    step_time_ns: int | None
    seconds: float  # from graph to placement
    cpu_seconds: float  # of all threads
    simulations: int
    updates: int
    baselines: Mapping[str, Baseline]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Run":
        """Returns the run that `asdict` made `document` of."""
        baselines = {name: Baseline(**baseline) for name, baseline in document["baselines"].items()}
        return cls(**{**document, "baselines": baselines})


class WorkloadRuns:
    """The runs on one workload. The directory of `rows` gets its graph and cluster, and each run's plan.

    `inputs` are the graph and cluster of a name that is not built in.
    """

    def __init__(self, name: str, rows: Rows, inputs: tuple[Graph, Cluster] | None = None) -> None:
        self.name = name
        self.graph, self.cluster = graphs.workload_inputs(name) if inputs is None else inputs
        self._rows = rows
        graph_path, cluster_path = rows.directory / f"{name}.graph.json.gz", rows.directory / f"{name}.cluster.json"
        self.graph.save(graph_path)
        self.cluster.save(cluster_path)
        self.problem = Problem.build(Graph.load(graph_path), Cluster.load(cluster_path))
        self.lower_bound_ns = lower_bound(self.problem)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a row that describe the workload."""
        return {
            "workload": self.name,
            "cluster": self.cluster.name,
            "num_ops": self.graph.num_ops,
            "lower_bound_ns": self.lower_bound_ns,
        }

    def run(self, method: Method, seed: int) -> Run:
        """Returns the run of `method` with `seed`: the one stored by the same settings, else a new one.

        RuntimeError if its plan does not give its figures again. InputError for a stored one with other settings.
        """
        settings = {
            "graph": self.graph.fingerprint,
            "cluster": self.cluster.fingerprint,
            "gdp_version": version("gdp-placement"),
            "budget": str(method.budget),
            "counts_cpu": method.counts_cpu,
            **method.settings,
        }
        name, path = f"{self.name}-{method.name}-seed{seed}", self._plan_path(method, seed)
        run = Run.from_document(self._rows.row(name, settings, lambda: asdict(self._make(method, seed, path))))
        if run.status == "ok":
            require_verified(path, self.problem, run.step_time_ns)
        return run

    def of_seeds(self, method: Method, num_seeds: int) -> tuple[Run, ...]:
        """Returns the runs of `method` with the first seeds."""
        return tuple(self.run(method, seed) for seed in range(num_seeds))

    def plan(self, method: Method, seed: int) -> Plan:
        """Returns the plan of a run whose status is "ok"."""
        return Plan.load(self._plan_path(method, seed))

    def _plan_path(self, method: Method, seed: int) -> Path:
        return self._rows.directory / f"{self.name}-{method.name}-seed{seed}.plan.json.gz"

    def _make(self, method: Method, seed: int, path: Path) -> Run:
        clock = Clock(method.budget, timer=time.process_time if method.counts_cpu else time.monotonic)
        began, cpu_began = time.monotonic(), time.process_time()
        question = Question.about(Problem.build(self.graph, self.cluster), seed=seed, num_threads=method.num_threads)
        solution = method.run(question, clock)
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
        if clock.stop.is_set():  # a search that was interrupted returns its best so far
            raise KeyboardInterrupt
        status, best = "failed", None if solution.best is None else solution.best.replay
        if best is not None:
            status = "ok" if best.feasible else "infeasible"
            if best.feasible:
                plan_of(best, self.lower_bound_ns, method.name, seed).save(path)
        return Run(
            status,
            None if best is None else best.step_time_ns,
            seconds,
            cpu_seconds,
            clock.simulations,
            solution.num_updates,
            dict(solution.baselines),
        )


def require_verified(path: Path, problem: Problem, step_time_ns: int | None) -> None:
    """Raises RuntimeError unless the plan in `path` takes that long, fits, and gives all its figures again."""
    try:
        plan = Plan.load(path)
        wrong = verify(problem, plan)
    except InputError as error:
        raise RuntimeError(f"{path.name}: {error}") from None
    if plan.step_time_ns != step_time_ns:
        wrong.append(f"step_time_ns is {plan.step_time_ns}; the run's is {step_time_ns}")
    if wrong:
        raise RuntimeError(f"the plan in {path.name} does not hold: {'; '.join(wrong)}")
