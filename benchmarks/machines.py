"""Benchmark `machines`: `auto` on machines as users have them, against every classical placer.

Equal cards, one fast card beside two slow ones, a card that is too small beside a processor, two hosts that share a
network, pairs of cards with NVLink. Where there are slow cards the same search runs without them, too: a plan that uses
them should not be slower than the one without.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks import graphs, methods
from benchmarks.benchmark import Benchmark, Say, pick, require_seconds
from benchmarks.comparison import BEST_CLASSICAL, MeanRatio, WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.rows import Rows
from benchmarks.runs import Run, WorkloadRuns
from gdp.budget import Budget
from gdp.cluster import Cluster, changes
from gdp.cluster.catalogue import LINKS
from gdp.graph import Graph
from gdp.models.papers import PAPERS
from gdp.placers.base import single
from gdp.planning.warm_up import warm_up
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate

NAMES = (*PAPERS.names(), "llama-1b", "bert-large", "moe", "resnet-101", "unet-256", "dlrm")
AUTO = "auto"
INFERENCE, TRAINING = "inference", "training"
_GPU_SHARE = 0.6  # of the step's memory on one device: that of a card that is too small


@dataclass(frozen=True, slots=True)
class BenchMachine:
    """A kind of machine: a cluster for each graph."""

    name: str
    devices: str  # in words
    cluster: Callable[[Graph], Cluster]
    slow: tuple[int, ...] = ()  # devices that the search runs without, too
    steps: tuple[str, ...] = (INFERENCE, TRAINING)


def preset(name: str, devices: str, slow: tuple[int, ...] = ()) -> BenchMachine:
    """Returns a machine with the same `devices` for all graphs."""
    return BenchMachine(name, devices, lambda graph: Cluster.parse(devices), slow)


def small_gpus(graph: Graph, share: float = _GPU_SHARE, count: int = 1) -> Cluster:
    """Returns cards that each hold only a `share` of the step's memory on one device, and a processor for all."""
    preset = "p100-pcie-16g" if count == 1 else f"{count}xp100-pcie-16g"
    cluster = Cluster.parse(f"{preset}+cpu-16core")
    *gpus, cpu = cluster.devices
    routes = changes.routes_of(cluster)
    roomy = Cluster.build("roomy", [*(replace(gpu, memory_bytes=2**45) for gpu in gpus), cpu], routes)
    problem = Problem.build(graph, roomy)
    placement = single(problem)
    assert placement is not None, "a card without limits holds every workload"
    _, peaks = evaluate(problem, np.zeros_like(placement))
    memory_bytes = min(gpus[0].memory_bytes, int(share * int(peaks[0])))
    devices = [*(replace(gpu, memory_bytes=memory_bytes) for gpu in gpus), replace(cpu, memory_bytes=2**40)]
    name = "p100 that is too small" if count == 1 else f"{count} p100 that are too small"
    return Cluster.build(f"{name} + cpu-16core", devices, routes)


def _nvlink_pairs(graph: Graph) -> Cluster:
    """Returns four cards on PCIe, the first two and the last two linked by NVLink."""
    cluster = Cluster.parse("4xrtx3090-24g:pcie4")
    link = LINKS["nvlink3"]
    routes = changes.routes_of(cluster)
    for a, b in ((0, 1), (1, 0), (2, 3), (3, 2)):
        names = cluster.devices[a].name, cluster.devices[b].name
        rate = link.bytes_per_second * 4 // 12  # an RTX 3090 has 4 of the links of which an A100 has 12
        routes[a, b] = replace(routes[a, b], bytes_per_second=rate, channels=("->".join(names),))
    return Cluster.build("4xrtx3090-24g, NVLink in pairs", cluster.devices, routes)


MACHINES = (
    preset("2-equal", "2xv100-sxm-32g"),
    preset("4-equal", "4xp100-pcie-16g"),
    preset("fast-and-slow", "rtx4090-24g+2xl4-24g", slow=(1, 2)),
    BenchMachine("gpu-and-cpu", "p100 of 60 % of the memory + cpu-16core", small_gpus),
    preset("hosts-10gbit", "2x(4xp100-pcie-16g)@10gbit"),
    preset("hosts-100gbit", "2x(4xp100-pcie-16g)@100gbit"),
    BenchMachine("nvlink-pairs", "4xrtx3090-24g, NVLink in pairs", _nvlink_pairs),
)


@dataclass(frozen=True, kw_only=True)
class MachineRow(WorkloadRow):
    """A workload on a machine; `auto` also runs without slow devices."""

    machine: str
    model: str
    removals: tuple[str, ...]  # names of the methods without slow devices
    num_used: int | None  # devices that hold ops, at most over the seeds; None: nothing fits

    @property
    def harm(self) -> list[float]:
        """The step time with all devices over that without slow ones, by removal: above 1 they did harm.

        A removal that leaves a seed without a plan that fits has no ratio.
        """
        return [ratio for removal in self.removals if (ratio := self.ratio(AUTO, removal)) is not None]


@dataclass(frozen=True, kw_only=True)
class MachinesBenchmark(Benchmark):
    """Each workload on each machine with each seed, within `budget` of processor time."""

    name = "machines"
    budget: Budget = field(default_factory=lambda: Budget(seconds=10.0))
    seeds: int = 1
    workloads: tuple[str, ...] = NAMES
    machines: tuple[str, ...] = tuple(machine.name for machine in MACHINES)

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "machine", self.machines, [machine.name for machine in MACHINES])
        require_seconds(self.name, self.budget, "10s")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        warm_up()
        chosen = [machine for machine in MACHINES if machine.name in self.machines]
        placed = []
        for machine in chosen:
            for name in self.workloads:
                placed.append(self._place(machine, name, rows))
                say(str(placed[-1]))
        return {
            "rows": placed,
            "kinds": [{"name": machine.name, "devices": machine.devices} for machine in chosen],
            "means": {
                machine.name: compare([row for row in placed if row.machine == machine.name], AUTO, BEST_CLASSICAL)
                for machine in chosen
            },
            "mean": compare(placed, AUTO, BEST_CLASSICAL),
            "harm": {row.workload: row.harm for row in placed if row.removals},
            "mean_harm": MeanRatio.of([[ratio] for row in placed for ratio in row.harm]),
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        rows = measured["rows"]
        dots = {
            name: ratio_dots([row for row in rows if row.machine == name], AUTO, BEST_CLASSICAL)
            for name in self.machines
        }
        return dot_plot("Machines", "step time over the best classical placer's; a dot for each workload", dots)

    def _place(self, machine: BenchMachine, name: str, rows: Rows) -> MachineRow:
        graph, _ = graphs.workload_inputs(name)
        cluster, method = machine.cluster(graph), methods.auto(self.budget)
        runs = WorkloadRuns(f"{name}-on-{machine.name}", rows, (graph, cluster))
        by_method: dict[str, tuple[Run, ...]] = {AUTO: self._run(runs)}
        for removed in _removals(machine.slow):
            rest = changes.only(cluster, [number for number in range(cluster.num_devices) if number not in removed])
            without = f"without-{'-'.join(map(str, removed))}"
            by_method[without] = self._run(WorkloadRuns(f"{runs.name}-{without}", rows, (graph, rest)))
        plans = [runs.plan(method, seed) for seed, run in enumerate(by_method[AUTO]) if run.status == "ok"]
        return MachineRow(
            **runs.facts,
            baselines=methods.classical_baselines(runs, self.seeds),
            runs=by_method,
            machine=machine.name,
            model=name,
            removals=tuple(method for method in by_method if method != AUTO),
            num_used=max((len(np.unique(plan.placement)) for plan in plans), default=None),
        )

    def _run(self, runs: WorkloadRuns) -> tuple[Run, ...]:
        return runs.of_seeds(methods.auto(self.budget), self.seeds)


def _removals(slow: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns one slow device, and all of them."""
    return [] if not slow else [slow[-1:], slow] if len(slow) > 1 else [slow]
