"""A plan on a machine that has the plan's devices too: what it takes there, its further devices idle."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gdp.bounds.lower_bound import lower_bound
from gdp.cluster import Cluster, changes
from gdp.search.noise import step_times_under_noise
from gdp.search.question import plan_of
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate


def carried(
    plan: Plan, cluster: Cluster, constraints: Constraints, numbers: Sequence[int] | None = None
) -> Simulation | None:
    """Returns the step of `plan` on `cluster`, where its devices are those with these `numbers`.

    Without numbers each is the first free one with its figures. None where there is none, or constraints forbid it.
    """
    problem = plan.problem
    assert problem is not None
    numbers = changes.same_devices(problem.cluster, cluster) if numbers is None else numbers
    if numbers is None:
        return None
    larger = Problem.build(problem.graph, cluster, constraints)
    placement = np.asarray(numbers)[plan.placement]
    if larger.broken_constraints(placement):
        return None
    order: list[Placement] = [np.zeros(0, np.int64) for _ in range(cluster.num_devices)]
    for number, ops in zip(numbers, plan.order, strict=True):
        order[number] = ops
    return simulate(larger, placement, order=order)


def plan_on(step: Simulation, plan: Plan, noise_share: float = 0.0) -> Plan:
    """Returns `plan`, which `step` is on another machine, as a plan for that; with its times under noise, if any."""
    assert plan.search is not None
    noisy = step_times_under_noise(step, noise_share, plan.seed + 1) if noise_share else plan.search.under_noise
    search = replace(plan.search, busy_fraction=step.busy_fraction, missing_bytes=step.missing_bytes, under_noise=noisy)
    bound_ns = min(lower_bound(step.problem), step.step_time_ns)
    return replace(plan_of(step, bound_ns, plan.placer, plan.seed, search), layout=plan.layout)
