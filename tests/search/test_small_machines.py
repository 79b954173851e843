"""`auto` against brute force on random small machines, where few placements fit or none does.

Brute force tries every device of every op with the plain-Python simulator, and reads pins, forbidden kinds, groups and
times by itself: nothing of gdp decides what is allowed or what fits.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

import reference_simulator as reference
from gdp.cluster import Cluster, Device, Route
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.search.place import place
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import verify

Rules = list[tuple[str, str]]

KINDS = ("mm", "relu", "add")
BUDGET = "2000sims"


@dataclass(frozen=True)
class Case:
    """A graph, a cluster whose memory is tight, and what a user asks for."""

    graph: Graph
    cluster: Cluster
    op_time_ns: list[list[int]]  # [N][D]
    pins: Rules
    forbid: Rules

    @property
    def limits_bytes(self) -> list[int]:
        """[D]"""
        return [device.memory_bytes for device in self.cluster.devices]

    def placements(self) -> list[tuple[int, ...]]:
        """All that obey times, pins, forbidden kinds and groups."""
        choices = [
            [device for device in range(self.cluster.num_devices) if self._may_go(op, device)]
            for op in range(self.graph.num_ops)
        ]
        groups = self.graph.groups.tolist()
        return [
            placement
            for placement in product(*choices)
            if all(placement[op] == placement[groups.index(group)] for op, group in enumerate(groups) if group >= 0)
        ]

    def _may_go(self, op: int, device: int) -> bool:
        place, graph = self.cluster.devices[device], self.graph
        pinned = [where for pattern, where in self.pins if re.search(pattern, graph.op_names[op])]
        kept_off = [where for pattern, where in self.forbid if re.search(pattern, graph.kinds[op])]
        return (
            self.op_time_ns[op][device] >= 0
            and all(where == place.name for where in pinned)
            and not {place.name, place.kind} & set(kept_off)
        )

    def run(self, placement: tuple[int, ...]) -> reference.Schedule:
        """The step by the default priority."""
        return reference.run(self.graph, self.cluster, self.op_time_ns, placement)

    def fits(self, peaks: list[int]) -> bool:
        return all(peak <= limit for peak, limit in zip(peaks, self.limits_bytes, strict=True))


def draw_case(seed: int, max_ops: int) -> Case:
    """A case of 3 to `max_ops` ops on 1 to 4 devices; each holds about what it needs in some random placement."""
    rng = random.Random(seed)
    cluster = draw_cluster(rng)
    graph, op_time_ns = draw_graph(rng, cluster, rng.randint(3, max_ops))
    names, kinds = ([getattr(device, field) for device in cluster.devices] for field in ("name", "kind"))
    pins = [(f"op{rng.randrange(graph.num_ops)}$", rng.choice(names)) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    forbid = [(rng.choice(graph.kinds), rng.choice(names + kinds)) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    case = Case(graph, cluster, op_time_ns, pins, forbid)
    while not case.placements() and rng.random() < 0.8:  # most of what contradicts itself asks for less
        case = replace(case, pins=case.pins[1:], forbid=case.forbid[1:])
    placements = case.placements()
    if placements:
        peaks = [case.run(rng.choice(placements)).peak_memory_bytes for _ in range(rng.choice((1, 1, 2)))]
        limits = [max(0, max(column) + rng.choice((-3, -1, 0, 0, 0, 1, 4))) for column in zip(*peaks, strict=True)]
        devices = [replace(device, memory_bytes=limit) for device, limit in zip(cluster.devices, limits, strict=True)]
        case = replace(case, cluster=replace(cluster, devices=tuple(devices)))
    return case


def draw_cluster(rng: random.Random) -> Cluster:
    num_devices = rng.randint(1, 4)
    devices = [
        Device(f"d{number}", rng.choice(("fast", "slow")), 2**40, {"float32": 10**9}, 10**9, 0)
        for number in range(num_devices)
    ]
    is_shared, latencies, rates = rng.random() < 0.5, (0, 0, 1, 5), (10**9, 10**9, 3 * 10**8)
    routes = {
        (source, target): Route(
            rng.choice(latencies), rng.choice(rates), (rng.choice("ab") if is_shared else f"{source}-{target}",)
        )
        for source, target in permutations(range(num_devices), 2)
    }
    return Cluster.build("test", devices, routes)


def draw_graph(rng: random.Random, cluster: Cluster, num_ops: int) -> tuple[Graph, list[list[int]]]:
    """Ops with times by kind of device, some by name instead; -1 on some, but not on all."""
    window, density = rng.choice(((1, 0.9), (2, 0.5), (7, 0.2), (7, 0.6)))  # from chains to bushes
    keep_share, hold_share = rng.choice((0, 0.2)), rng.choice((0, 0.3))
    group_share, cannot_share = rng.choice((0, 0, 0.5)), rng.choice((0, 0, 0.15))
    ops: list[Op] = []
    op_time_ns: list[list[int]] = []
    tensors: list[Tensor] = []
    for op in range(num_ops):
        while True:
            times = {"fast": rng.randint(0, 6), "slow": rng.randint(0, 20)}
            times = {kind: -1 if rng.random() < cannot_share else time for kind, time in times.items()}
            for device in cluster.devices:
                if rng.random() < 0.2:
                    times[device.name] = -1 if rng.random() < cannot_share else rng.randint(0, 20)
            row = [times.get(device.name, times[device.kind]) for device in cluster.devices]
            if max(row) >= 0:
                break
        op_time_ns.append(row)
        resident = rng.randint(0, 8) if rng.random() < hold_share else 0
        group = rng.randrange(2) if rng.random() < group_share else -1
        ops.append(Op(f"op{op}", rng.choice(KINDS), resident_bytes=resident, group=group, time_ns=times))
        for _ in range(rng.choice((1, 1, 1, 2))):
            base = len(tensors)
            for view_of in (-1, *[base] * rng.choice((0, 0, 0, 1, 2))):
                consumers = tuple(
                    later for later in range(op + 1, min(op + window + 1, num_ops)) if rng.random() < density
                )
                is_resident = view_of < 0 and rng.random() < hold_share
                keep = rng.random() < keep_share
                tensors.append(Tensor(op, consumers, rng.randint(0, 9), is_resident, keep, view_of))
    return Graph.build("test", ops, tensors), op_time_ns


def assert_finds_what_fits(seed: int, max_ops: int) -> str:
    """What became of the case: the plan obeys and verifies, fits if a placement does, and is no slower than any."""
    case = draw_case(seed, max_ops)
    graph, cluster = case.graph, case.cluster
    placements = case.placements()
    steps = [case.run(placement) for placement in placements]
    fitting = [step.step_time_ns for step in steps if case.fits(step.peak_memory_bytes)]
    constraints: dict[str, Any] = {"pins": case.pins, "forbid": case.forbid}
    try:
        plan = place(graph, cluster, budget=BUDGET, seed=seed, num_threads=1, **constraints)
    except InputError:
        assert not fitting
        return "refused"
    placement = tuple(plan.placement.tolist())
    assert placement in set(placements)
    replayed = reference.replay(graph, cluster, case.op_time_ns, placement, [ops.tolist() for ops in plan.order])
    assert (plan.step_time_ns, plan.peak_memory_bytes.tolist()) == (replayed.step_time_ns, replayed.peak_memory_bytes)
    assert plan.search is not None
    missing = np.maximum(plan.peak_memory_bytes - case.limits_bytes, 0)
    assert plan.search.missing_bytes.tolist() == missing.tolist()
    if plan.status == "infeasible":
        assert not fitting
        assert missing.any()
        return "nothing fits"
    assert verify(Problem.build(graph, cluster, **constraints), plan) == []
    assert not fitting or plan.step_time_ns <= min(fitting)
    return f"{min(len(fitting), 3)} fit" if fitting else "another order fits"


def test_on_small_machines_nothing_that_fits_is_missed_and_no_placement_is_faster() -> None:
    """On 60 small cases `place` finds a plan wherever a placement fits, and no placement is faster."""
    found = Counter(assert_finds_what_fits(seed, max_ops=5) for seed in range(60))
    assert set(found) >= {"refused", "nothing fits", "1 fit", "2 fit", "3 fit"}, found


@pytest.mark.long
def test_on_1000_small_machines_nothing_that_fits_is_missed_and_no_placement_is_faster() -> None:
    """On 1000 small cases `place` finds a plan wherever a placement fits, and no placement is faster."""
    for seed in range(1000):
        assert_finds_what_fits(seed, max_ops=7)
