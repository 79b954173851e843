"""Hypothesis strategies for small random steps: every feature of the machine model, and ties wherever possible.

An example is a few drawn parameters, which shrink, and a seed that fills in the rest, which is quick. Fewer ops under
the same seed make a graph that is the beginning of the larger one, up to the numbering of tensors.
"""

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from gdp.cluster import Cluster, Device, Route
from gdp.graph import Graph, Op, Tensor

I64 = npt.NDArray[np.int64]

FEATURES = (
    "large figures",  # times to 1 s, sizes to 1 TB; without: figures of at most 4, so that nearly everything ties
    "several tensors",  # 0 to 3 for each op; without: one
    "shuffled tensors",  # tensor numbers do not follow op numbers
    "views",
    "resident",  # ops hold memory for the whole step, tensors may be part of it
    "keep",
    "groups",
    "forbidden",  # ops that some devices cannot run
    "latencies",
    "shared channels",  # a route has 0 to 3 channels out of a few; without: one of its own
    "tight memory",  # devices hold 0 to 8 bytes
    "priorities",  # random, with ties; without: None, the default
    "hosts",  # ops take time on hosts, which wait for some; without: none does
)


@dataclass(frozen=True, eq=False)
class Instance:
    """A step to simulate. Its times equal those that `graph`, by device name, and `cluster` give."""

    graph: Graph
    cluster: Cluster
    op_time_ns: I64  # [N, D]
    host_time_ns: I64  # [N, D]
    placements: I64  # [B, N] every op where it can run
    priority: I64 | None  # [N]

    @property
    def placement(self) -> I64:
        """[N] the first placement."""
        placement: I64 = self.placements[0]
        return placement


@st.composite
def instances(
    draw: st.DrawFn,
    max_ops: int = 41,
    max_devices: int = 5,
    min_devices: int = 1,
    num_placements: int = 1,
    keep_groups: bool = False,
    features: Set[str] = frozenset(FEATURES),
    always: Set[str] = frozenset(),
) -> Instance:
    """Steps of 1 to `max_ops` ops on `min_devices` to `max_devices` devices: some of `features` and all of `always`.

    Each group has a device that can run all its ops; only with `keep_groups` do the placements put them on one.
    """
    num_ops = draw(st.sampled_from(range(1, max_ops + 1)))  # drawn evenly, where `integers` favours the least
    num_devices = draw(st.sampled_from(range(min_devices, max_devices + 1)))
    chosen = draw(st.sets(st.sampled_from([feature for feature in FEATURES if feature in features]))) | always
    seed = draw(st.integers(0, 2**32 - 1))
    graph, op_time_ns = _graph(seed, num_ops, num_devices, chosen)
    rng = random.Random(seed)
    cluster = _cluster(seed, num_devices, chosen)
    issue_ns = np.array([device.issue_ns for device in cluster.devices])
    return Instance(
        graph=graph,
        cluster=cluster,
        op_time_ns=op_time_ns,
        host_time_ns=(op_time_ns > 0) * graph.kernels[:, None] * issue_ns + graph.host_ns[:, None],
        placements=np.array([_placement(rng, graph, op_time_ns, keep_groups) for _ in range(num_placements)], np.int64),
        priority=np.array(rng.choices(range(-1, 3), k=num_ops), np.int64) if "priorities" in chosen else None,
    )


def _graph(seed: int, num_ops: int, num_devices: int, features: Set[str]) -> tuple[Graph, I64]:
    rng, time_rng, host_rng = (random.Random(f"{name} {seed}") for name in ("graph", "times", "hosts"))
    sizes = (0, 1, 2**20, 10**9 + 7, 10**12) if "large figures" in features else (0, 0, 1, 2, 3, 4)
    times = (0, 1, 10**6, 10**9) if "large figures" in features else (0, 0, 1, 1, 2, 3)
    window = rng.choice((2, 4, 40))  # how many tensors back an op looks for inputs: from chains to bushes
    keep_share = 0.2 if "keep" in features else 0.0
    homes = [time_rng.randrange(num_devices) for _ in range(3)]  # where all ops of a group can run
    ops: list[Op] = []
    tensors: list[Tensor] = []
    consumers: list[list[int]] = []  # of each tensor
    for op in range(num_ops):
        for inputs in rng.sample(consumers[-window:], min(rng.choice((0, 1, 1, 2, 3)), len(consumers[-window:]))):
            inputs.append(op)
        for _ in range(rng.choice((0, 1, 2, 3)) if "several tensors" in features else 1):
            base = len(tensors)
            is_resident = "resident" in features and rng.random() < 0.3
            tensors.append(Tensor(op, (), rng.choice(sizes), resident=is_resident, keep=rng.random() < keep_share))
            for _ in range(rng.choice((0, 0, 1, 2)) if "views" in features else 0):
                tensors.append(Tensor(op, (), rng.choice(sizes), keep=rng.random() < keep_share, view_of=base))
        consumers += ([] for _ in range(len(consumers), len(tensors)))
        group = rng.choice((-1, -1, -1, 0, 1, 2)) if "groups" in features else -1
        home = homes[group] if group >= 0 else time_rng.randrange(num_devices)
        row = time_rng.choices(times, k=num_devices)
        if "forbidden" in features:
            row = [-1 if device != home and time_rng.random() < 0.4 else time for device, time in enumerate(row)]
        ops.append(
            Op(
                name=f"op{op}",
                resident_bytes=rng.choice(sizes) if "resident" in features else 0,
                group=group,
                time_ns={f"d{device}": time for device, time in enumerate(row)},
                **_host_fields(host_rng, times) if "hosts" in features else {},
            )
        )
    numbers = list(range(len(tensors)))  # new number of each tensor
    if "shuffled tensors" in features:
        rng.shuffle(numbers)
        for users in consumers:
            rng.shuffle(users)
    renumbered = list(tensors)
    for number, tensor, users in zip(numbers, tensors, consumers, strict=True):
        base = -1 if tensor.view_of == -1 else numbers[tensor.view_of]
        renumbered[number] = replace(tensor, consumers=tuple(users), view_of=base)
    op_time_ns = np.array([list(op.time_ns.values()) for op in ops], np.int64)
    return Graph.build("test", ops, renumbered), op_time_ns


def _host_fields(rng: random.Random, times: Sequence[int]) -> dict[str, Any]:
    host_ns = rng.choice((0, 0, *times))
    return {"kernels": rng.choice((0, 1, 1, 2)), "host_ns": host_ns, "host_waits": rng.random() < 0.2}


def _cluster(seed: int, num_devices: int, features: Set[str]) -> Cluster:
    rng, host_rng = random.Random(f"cluster {seed}"), random.Random(f"issues {seed}")
    issues = (0, 1, 2, 10**6) if "large figures" in features else (0, 0, 1, 1, 2)
    latencies = (0, 0, 1, 2, 5000) if "latencies" in features else (0,)
    rates = (12 * 10**9, 732_000_001) if "large figures" in features else (10**9, 10**9, 2 * 10**9, 3 * 10**8)
    shared = [f"c{number}" for number in range(rng.choice((1, 2, 4)))]
    routes = {}
    for source, target in permutations(range(num_devices), 2):
        channels = [f"d{source}-d{target}"]
        if "shared channels" in features:
            channels = rng.sample(shared, min(rng.choice((0, 1, 1, 2, 3)), len(shared)))
        routes[source, target] = Route(rng.choice(latencies), rng.choice(rates), tuple(channels))
    devices = [
        Device(
            name=f"d{number}",
            kind="test-device",
            memory_bytes=rng.randrange(9) if "tight memory" in features else 2**50,
            flops_per_second={"float32": 10**9},
            memory_bytes_per_second=10**9,
            launch_ns=0,
            issue_ns=host_rng.choice(issues) if "hosts" in features else 0,
        )
        for number in range(num_devices)
    ]
    return Cluster.build("test", devices, routes)


def _placement(rng: random.Random, graph: Graph, op_time_ns: I64, keep_groups: bool) -> list[int]:
    """Devices drawn with random weights, some of them 0: placements on one device, on few and on all."""
    num_devices = op_time_ns.shape[1]
    weights = [rng.choice((0.0, 0.3, 1.0, 1.0)) + 1e-9 for _ in range(num_devices)]
    groups = graph.groups.tolist() if keep_groups else [-1] * graph.num_ops
    chosen: dict[int, int] = {}  # the device of each group
    placement = []
    for op, group in enumerate(groups):
        members = [op] if group == -1 else [other for other in range(graph.num_ops) if groups[other] == group]
        allowed = np.flatnonzero((op_time_ns[members] >= 0).all(axis=0)).tolist()
        device = rng.choices(allowed, [weights[device] for device in allowed])[0]
        placement.append(device if group == -1 else chosen.setdefault(group, device))
    return placement
