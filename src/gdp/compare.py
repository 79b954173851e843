"""Several placers on one problem, with several seeds: the table of `gdp compare`."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gdp import notebook
from gdp.bounds import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.coarsen import reduce
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.placers import CLASSICAL
from gdp.placers.portfolio import PLACERS, find, prepare
from gdp.problem import Problem
from gdp.simulate import Simulation

DEFAULT_PLACERS = (*CLASSICAL, "auto")

Rival = Callable[[Problem], Simulation | None]
"""What another tool does with a problem; None: it has no answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """How a placer did."""

    placer: str
    status: str  # the worst of its seeds': "ok", "infeasible" (does not fit) or "failed" (found no placement)
    step_time_ns_by_seed: tuple[int | None, ...]  # None where it is not "ok"
    seconds: float  # mean over seeds
    simulations: int  # mean over seeds

    @property
    def step_time_ns(self) -> int | None:
        """The median over the seeds that have an answer, the lower one of two; None if none has."""
        times = sorted(time_ns for time_ns in self.step_time_ns_by_seed if time_ns is not None)
        return times[(len(times) - 1) // 2] if times else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of all placers, as given."""

    rows: tuple[Row, ...]
    lower_bound_ns: int
    interrupted: bool = False

    def _repr_html_(self) -> str:
        """What Jupyter shows."""
        rows = []
        for row in self.rows:
            times = [time_ns for time_ns in row.step_time_ns_by_seed if time_ns is not None]
            shown = (row.step_time_ns, min(times, default=None), max(times, default=None))
            rows.append([row.placer, row.status, *map(notebook.milliseconds, shown), f"{row.seconds:.2f}"])
        bound = f"Lower bound {notebook.milliseconds(self.lower_bound_ns)}. Step times are medians over seeds."
        return notebook.table(
            "Placers", ["placer", "status", "step time", "best seed", "worst seed", "seconds"], rows, bound
        )


def compare(
    graph: Graph,
    cluster: Cluster,
    *,
    placers: Sequence[str] = DEFAULT_PLACERS,
    budget: Budget | str = "30s",
    num_seeds: int = 3,
    pins: Sequence[tuple[str, str]] = (),
    forbid: Sequence[tuple[str, str]] = (),
    max_memory_bytes: Mapping[str, int] | None = None,
    reserve: float = 0.0,
    checkpoint: str | None = None,
    rivals: Mapping[str, Rival] = MappingProxyType({}),
    num_threads: int | None = None,
    on_start: Callable[[str, int], None] | None = None,
    stop: threading.Event | None = None,
) -> Comparison:
    """Run each of `placers` with seeds 0 to `num_seeds` - 1, each with the whole `budget`.

    `on_start(placer, seed)` is called before each run. After `stop` only the rows that are complete are returned.
    Constraints are those of `Problem.build`; `checkpoint` is the file of a policy to use instead of the one that comes
    with gdp. `rivals` are what other tools do, by name; they have no seeds and come first. Raises InputError for
    unknown placers and numbers that make no sense.
    """
    for name in placers:
        if name not in PLACERS:
            raise InputError(f"placer {name!r} is unknown; one of {', '.join(PLACERS)} is expected")
    if not (placers or rivals) or len(set(placers)) < len(placers):
        raise InputError(f"placers are {', '.join(placers) or 'none'}; name at least one, each once")
    if num_seeds < 1:
        raise InputError(f"seeds is {num_seeds}; at least 1 is expected")
    limit = Budget.parse(budget) if isinstance(budget, str) else budget
    stop = stop or threading.Event()
    problem = Problem.build(
        graph, cluster, pins=pins, forbid=forbid, max_memory_bytes=max_memory_bytes, reserve=reserve
    )
    bound_ns = lower_bound(problem)
    reduction = reduce(problem)
    rows = [_rival_row(name, rival, problem) for name, rival in rivals.items()]
    for name in placers:
        prepare(name)
        times_ns: list[int | None] = []
        statuses, seconds, simulations = set(), 0.0, 0
        for seed in range(num_seeds):
            if on_start is not None:
                on_start(name, seed)
            clock = Clock(limit, stop=stop)
            found = find(reduction, name, clock, seed=seed, checkpoint=checkpoint, num_threads=num_threads)
            if stop.is_set():
                return Comparison(tuple(rows), bound_ns, interrupted=True)
            best = found.best
            statuses.add("failed" if best is None else "ok" if best.feasible else "infeasible")
            times_ns.append(best.step_time_ns if best is not None and best.feasible else None)
            seconds += clock.seconds / num_seeds
            simulations += found.simulations
        status = next(status for status in ("failed", "infeasible", "ok") if status in statuses)
        rows.append(Row(name, status, tuple(times_ns), seconds, simulations // num_seeds))
    return Comparison(tuple(rows), bound_ns)


def _rival_row(name: str, rival: Rival, problem: Problem) -> Row:
    began = time.perf_counter()
    found = rival(problem)
    seconds = time.perf_counter() - began
    if found is None:
        return Row(name, "failed", (None,), seconds, 0)
    if not found.feasible:
        return Row(name, "infeasible", (None,), seconds, 1)
    return Row(name, "ok", (found.step_time_ns,), seconds, 1)
