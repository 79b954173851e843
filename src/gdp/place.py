"""START HERE: the main job on one page. A graph and a cluster go in, the best plan found in the budget comes out."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from gdp.bounds import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.coarsen import reduce
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.placers.base import Start
from gdp.placers.island import Incumbent
from gdp.placers.noise import DEFAULT_NOISE, Noise, step_times_under_noise
from gdp.placers.portfolio import SEARCHES, find, prepare
from gdp.plan import Plan, Search
from gdp.problem import Problem
from gdp.simulate import Simulation

NUM_PERTURBATIONS = 4  # tables of perturbed op times that a search averages over, the same for all it compares


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known while a search runs."""

    step_time_ns: int  # of the best placement so far
    feasible: bool
    lower_bound_ns: int
    simulations: int
    seconds: float
    seconds_left: float | None  # None with a budget in simulations


def place(
    graph: Graph,
    cluster: Cluster,
    *,
    placer: str = "auto",
    budget: Budget | str = "30s",
    seed: int = 0,
    pins: Sequence[tuple[str, str]] = (),
    forbid: Sequence[tuple[str, str]] = (),
    max_memory_bytes: Mapping[str, int] | None = None,
    reserve: float = 0.0,
    robust: float | None = None,
    checkpoint: str | None = None,
    starts: Sequence[Start] = (),
    num_threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> Plan:
    """The best plan of `graph` on `cluster` that `placer` finds within `budget`.

    `auto` runs the classical placers, slow ones if there is time, and searches in the time left; it never answers worse
    than the best of them, and never with a plan that does not fit where it found one that does. When nothing fits, the
    plan has the status "infeasible" and `plan.search.missing_bytes` says where and by how much. With a budget in
    simulations the same seed gives the same plan. `pins`, `forbid`, `max_memory_bytes` and `reserve` are those of
    `Problem.build`. `robust` is the relative deviation of op times over which searches average the step time (default:
    0.02; 0: not at all), to choose among plans that are not slower than a baseline without it. `checkpoint` is the file
    of a policy to use instead of the one that comes with gdp, by `guided` and the learned placers. Searches begin from
    `starts` too, moved where constraints do not allow them. `stop` ends the search early.
    Raises InputError for arguments that make no sense.
    """
    if robust is not None and not 0 <= robust < 0.5:
        raise InputError(f"robust is {robust}; a fraction of at least 0 and below 0.5 is expected, such as 0.02 or 2%")
    if not 0 <= seed < 2**63:
        raise InputError(f"seed is {seed}; an integer from 0 to 2^63 - 1 is expected")
    prepare(placer)
    clock = Clock(Budget.parse(budget) if isinstance(budget, str) else budget)
    if stop is not None:
        clock.stop = stop
    problem = Problem.build(
        graph, cluster, pins=pins, forbid=forbid, max_memory_bytes=max_memory_bytes, reserve=reserve
    )
    reduction = reduce(problem)
    bound_ns = lower_bound(problem)

    def report(best: Incumbent, simulations: int) -> None:
        if on_progress is not None:
            on_progress(
                Progress(
                    best.step_time_ns, best.excess_bytes == 0, bound_ns, simulations, clock.seconds, clock.seconds_left
                )
            )

    if robust is None:
        robust = DEFAULT_NOISE if placer in SEARCHES and placer != "exact" else 0.0
    noise = Noise.draw(reduction, robust, NUM_PERTURBATIONS, seed) if robust else None
    found = find(
        reduction, placer, clock, seed=seed, bound_ns=bound_ns, noise=noise, checkpoint=checkpoint,
        starts=starts, num_threads=num_threads, on_progress=report,
    )  # fmt: skip
    if found.best is None:
        raise InputError(f"placer {placer!r} found no placement of {graph.name!r} on {cluster.name!r}; use placer auto")
    return plan_of(
        found.best,
        bound_ns,
        placer,
        seed,
        Search(
            seconds=clock.seconds,
            simulations=found.simulations,
            baselines=found.baselines,
            busy_fraction=found.best.busy_fraction,
            missing_bytes=found.best.missing_bytes,
            interrupted=clock.stop.is_set(),
            under_noise=step_times_under_noise(found.best, robust, seed + 1) if robust else None,
            order=found.order,
        ),
    )


def plan_of(simulation: Simulation, bound_ns: int, placer: str, seed: int, search: Search | None = None) -> Plan:
    """The plan that `simulation` runs."""
    problem = simulation.problem
    return Plan(
        graph=problem.graph.fingerprint,
        cluster=problem.cluster.fingerprint,
        devices=tuple(device.name for device in problem.cluster.devices),
        placement=simulation.placement,
        order=simulation.order,
        step_time_ns=simulation.step_time_ns,
        peak_memory_bytes=simulation.peak_memory_bytes,
        lower_bound_ns=bound_ns,
        placer=placer,
        seed=seed,
        gdp_version=version("gdp-placement"),
        search=search,
    )
