"""`gdp bench machines`: `auto` on machines as users have them, against every classical placer.

Equal cards, one fast card beside two slow ones, a card that is too small beside a processor, two hosts that share a
network, pairs of cards with NVLink. Where there are slow cards the same search runs without them, too: a plan that uses
them should not be slower than the one without.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from gdp import cluster_changes, workloads
from gdp.bench import methods
from gdp.bench.comparison import BEST_CLASSICAL, MethodsRow, best_baselines, compare, mean_cell
from gdp.bench.graphs import workload_inputs
from gdp.bench.runs import Run, WorkloadRuns
from gdp.bench.tables import (
    counted,
    geometric_mean,
    machine,
    machine_line,
    markdown_table,
    mean_sentence,
    milliseconds,
    write_figures,
)
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.devices import LINKS, suggest
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.placers.single import single
from gdp.plan import Plan
from gdp.problem import Problem
from gdp.simulate import evaluate

NAMES = (*workloads.paper_names(), "llama-1b", "bert-large", "moe", "resnet-101", "unet-256", "dlrm")
TARGET = 0.90  # of the best classical placer's step time, geometric mean
AUTO = "auto"
_HARM = 1.01  # without slow devices faster by more than the search's own spread
_GPU_SHARE = 0.6  # of what the step takes on one device: the memory of a card that is too small


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of machine: the cluster for a graph, and which devices are slow."""

    name: str
    text: str  # what the table calls it
    cluster: Callable[[Graph], Cluster]
    slow: tuple[int, ...] = ()


def _preset(name: str, preset: str, slow: tuple[int, ...] = ()) -> Machine:
    return Machine(name, preset, lambda graph: Cluster.parse(preset), slow)


def small_gpus(graph: Graph, share: float = _GPU_SHARE, count: int = 1) -> Cluster:
    """Cards that each hold only a `share` of what the step takes on one device, and a processor that holds all."""
    preset = "p100-pcie-16g" if count == 1 else f"{count}xp100-pcie-16g"
    cluster = Cluster.parse(f"{preset}+cpu-16core")
    *gpus, cpu = cluster.devices
    routes = cluster_changes.routes_of(cluster)
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
    """Four cards on PCIe, the first two and the last two linked by NVLink."""
    cluster = Cluster.parse("4xrtx3090-24g:pcie4")
    link = LINKS["nvlink3"]
    routes = cluster_changes.routes_of(cluster)
    for a, b in ((0, 1), (1, 0), (2, 3), (3, 2)):
        names = cluster.devices[a].name, cluster.devices[b].name
        rate = link.bytes_per_second * 4 // 12  # an RTX 3090 has 4 of the links of which an A100 has 12
        routes[a, b] = replace(routes[a, b], bytes_per_second=rate, channels=("->".join(names),))
    return Cluster.build("4xrtx3090-24g, NVLink in pairs", cluster.devices, routes)


MACHINES = (
    _preset("2-equal", "2xv100-sxm-32g"),
    _preset("4-equal", "4xp100-pcie-16g"),
    _preset("fast-and-slow", "rtx4090-24g+2xl4-24g", slow=(1, 2)),
    Machine("gpu-and-cpu", "p100 of 60 % of the memory + cpu-16core", small_gpus),
    _preset("hosts-10gbit", "2x(4xp100-pcie-16g)@10gbit"),
    _preset("hosts-100gbit", "2x(4xp100-pcie-16g)@100gbit"),
    Machine("nvlink-pairs", "4xrtx3090-24g, NVLink in pairs", _nvlink_pairs),
)

OnRow = Callable[[str], None]
Named = TypeVar("Named", bound="HasName")


class HasName(Protocol):
    """A machine of some benchmark."""

    @property
    def name(self) -> str: ...


def choose(bench: str, machines: Sequence[Named], names: Sequence[str] | None) -> list[Named]:
    """Those of `machines` that are named, all for None. InputError for an unknown one."""
    known = [item.name for item in machines]
    for name in names or ():
        if name not in known:
            raise InputError(f"bench {bench}: no machine {name!r}; {suggest(name, known)}")
    return [item for item in machines if names is None or item.name in names]


def require_time(bench: str, budget: Budget, seeds: int) -> float:
    """The seconds of `budget`. InputError if it is none in time, or without seeds."""
    if budget.seconds is None or seeds < 1:
        raise InputError(f"bench {bench}: {seeds} seeds and a budget of {budget}; seeds and a time are expected")
    return budget.seconds


@dataclass(frozen=True, kw_only=True)
class Row(MethodsRow):
    """A workload on a machine."""

    machine: str
    model: str
    used: tuple[int, ...]  # devices that hold ops, by seed
    without: Mapping[str, tuple[Run, ...]]  # runs of `auto` without slow devices, by which are gone

    def harm(self) -> list[float]:
        """By removal, the geometric mean over seeds of the step time with all devices over that without: above 1 they
        did harm. A removal that leaves a seed without a plan that fits has no ratio."""
        mine = self.times_ns(AUTO)
        others = [
            [run.step_time_ns for run in runs if run.status == "ok" and run.step_time_ns is not None]
            for runs in self.without.values()
        ]
        if mine is None:
            return []
        return [geometric_mean(np.array(mine) / other) for other in others if len(other) == len(mine)]


def run(
    *,
    names: Sequence[str] | None = None,
    machines: Sequence[str] | None = None,
    budget: Budget,
    seeds: int,
    out: Path | None,
    on_row: OnRow,
) -> dict[str, Any]:
    """Place the workloads `names` on `machines` (None: all) with `seeds` seeds, each within `budget` of processor time.

    Returns the figures with `markdown` made of them, as the other benchmarks do. RuntimeError if a plan does not fit or
    does not give its figures again.
    """
    chosen = choose("machines", MACHINES, machines)
    seconds = require_time("machines", budget, seeds)
    methods.warm_up()
    rows = []
    with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
        directory = out / "runs" if out else Path(scratch)
        for item in chosen:
            for name in NAMES if names is None else names:
                rows.append(_place(item, name, seconds, seeds, directory, resume=out is not None))
                on_row(_line(rows[-1]))
    command = f"gdp bench machines --budget {budget} --seeds {seeds}"
    command += "" if names is None else f" --workloads {','.join(names)}"
    command += "" if machines is None else f" --machines {','.join(machines)}"
    figures: dict[str, Any] = {
        "command": command,
        "machine": machine(),
        "budget": str(budget),
        "seeds": seeds,
        "rows": [row.to_document() for row in rows],
        "means": {item.name: compare(_of(rows, item.name), AUTO, BEST_CLASSICAL) for item in chosen},
        "mean": compare(rows, AUTO, BEST_CLASSICAL),
        "harm": {row.workload: row.harm() for row in rows if row.without},
    }
    figures["markdown"] = _markdown(figures, rows, chosen)
    if out is not None:
        write_figures(out, "machines", figures)
    return figures


def _place(item: Machine, name: str, seconds: float, seeds: int, directory: Path, *, resume: bool) -> Row:
    graph, _ = workload_inputs(name)
    cluster = item.cluster(graph)
    runs = WorkloadRuns(f"{name}-on-{item.name}", directory, resume=resume, inputs=(graph, cluster))
    search = methods.auto(seconds)
    found = tuple(runs.run(search, seed) for seed in range(seeds))
    without: dict[str, tuple[Run, ...]] = {}
    for gone in _removals(item.slow):
        left = [number for number in range(cluster.num_devices) if number not in gone]
        inputs = graph, cluster_changes.only(cluster, left)
        part = WorkloadRuns(f"{runs.name}-without-{'-'.join(map(str, gone))}", directory, resume=resume, inputs=inputs)
        without[", ".join(cluster.devices[number].name for number in gone)] = tuple(
            part.run(search, seed) for seed in range(seeds)
        )
    plans = [Plan.load(runs.plan_path(search, seed)) for seed, one in enumerate(found) if one.status == "ok"]
    return Row(
        workload=runs.name,
        model=name,
        machine=item.name,
        cluster=cluster.name,
        num_ops=graph.num_ops,
        lower_bound_ns=runs.lower_bound_ns,
        baselines=best_baselines([runs.run(methods.classical(), seed).baselines for seed in range(seeds)]),
        runs={AUTO: found},
        used=tuple(len(np.unique(plan.placement)) for plan in plans),
        without=without,
    )


def _removals(slow: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One slow device, and all of them."""
    return [] if not slow else [slow[-1:], slow] if len(slow) > 1 else [slow]


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row.machine == name]


def _line(row: Row) -> str:
    harm = f", with slow devices / without {max(row.harm()):.3f} at most" if row.harm() else ""
    ratio = row.ratio_cell(AUTO, BEST_CLASSICAL)
    return f"{row.workload}: auto {row.time_cell(AUTO)} ms, {ratio}x the best classical ({row.best_classical}){harm}"


def _markdown(figures: Mapping[str, Any], rows: Sequence[Row], chosen: Sequence[Machine]) -> str:
    harms = [ratio for row in rows for ratio in row.harm()]
    worse = sum(ratio > _HARM for ratio in harms)
    sentences = [mean_sentence("`auto`", figures["mean"], "the best classical plan", TARGET)]
    if harms:
        sentences.append(
            f"With slow devices `auto` takes {np.exp(np.mean(np.log(harms))):.3f}x the step time of the same search "
            f"without one or all of them (means over seeds, at most {max(harms):.3f}x); it is more than 1 % slower in "
            f"{worse} of {len(harms)} comparisons."
        )
    overview = markdown_table(
        ("machine", "devices", "to best classical", "workloads"),
        [
            (item.name, item.text, mean_cell(mean), f"{mean['num_workloads']} of {mean['num_rows']}")
            for item in chosen
            for mean in [figures["means"][item.name]]
        ],
    )
    main = markdown_table(
        ("workload", "machine", "auto", "bound", "best classical", "ratio", "devices used", "without slow devices"),
        [
            (
                row.model, row.machine, row.time_cell(AUTO), milliseconds(row.lower_bound_ns),
                "OOM" if row.best_classical is None
                else f"{milliseconds(row.baseline_ns(row.best_classical) or 0)} ({row.best_classical})",
                row.ratio_cell(AUTO, BEST_CLASSICAL), "-" if not row.used else f"{max(row.used)}",
                f"{max(row.harm()):.3f}" if row.harm() else "-",
            )
            for row in rows
        ],
    )  # fmt: skip
    parts = (
        "## Machines", f"    {figures['command']}", f"{machine_line()}.",
        f"Step times in ms; {counted(figures['seeds'], 'seed')}, {figures['budget']} of processor time each, on one "
        "thread; op times vary by 2 % while `auto` searches, as by default, and do not in the step times given. Memory "
        "is enforced: OOM is a placer without a plan that fits. Every plan was saved, read back and derived anew. The "
        "last column is the step time over that of the same search without slow devices: above 1 they did harm.",
        "\n".join(f"- {sentence}" for sentence in sentences), overview, main,
    )  # fmt: skip
    return "\n\n".join(parts) + "\n"
