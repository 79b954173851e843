"""Solution: the answer to a question, of whatever kind, and the plan of its best candidate."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

from gdp.budget import Clock
from gdp.search.candidate import Candidate
from gdp.simulator.plan import Baseline, Plan, Search
from gdp.simulator.simulate import Simulation


class Solution(NamedTuple):
    """The best candidate, of the problem as given, and what else was looked at."""

    best: Candidate | None  # None: there is none at all
    baselines: Mapping[str, Baseline] = {}
    num_updates: int = 0  # of a policy that was trained
    looked_at: tuple[Candidate, ...] = ()  # of layouts, the best first
    bound_ns: int = 0  # no layout of the batch takes less
    plan: Plan | None = None  # of the best, where that is asked for


def plan_of(simulation: Simulation, bound_ns: int, placer: str, seed: int, search: Search | None = None) -> Plan:
    """Returns the plan that `simulation` runs."""
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
        problem=problem,
    )


def search_record(simulation: Simulation, clock: Clock, order: str, baselines: Mapping[str, Baseline]) -> Search:
    """Returns how the plan that `simulation` runs was found, its ops started in `order`."""
    return Search(
        seconds=clock.seconds,
        simulations=clock.simulations,
        baselines=baselines,
        busy_fraction=simulation.busy_fraction,
        missing_bytes=simulation.missing_bytes,
        interrupted=clock.stop.is_set(),
        order=order,
    )
