"""`gdp bench simulator`: how many placements a second the machine model scores, and how that grows with the graph.

Placements are as varied as those that a search looks at, in three families of equal weight: what the classical placers
give; groups of ops (few or many) on random devices; the fastest classical one with one to ten groups moved.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from gdp import files
from gdp.bench.graphs import lstm_training_graph, lstm_training_graph_of, workload_inputs
from gdp.bench.tables import machine, machine_line, markdown_table, spread
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.coarsen import reduce
from gdp.graph import I64
from gdp.grouping import Units, group_units
from gdp.place import place
from gdp.placers import CLASSICAL
from gdp.placers.annealing import mean_step_time
from gdp.problem import Problem
from gdp.simulate import NEVER, Workspace, evaluate_many, simulate

TARGET_PER_SECOND, AIM_PER_SECOND, TARGET_RATIO, TARGET_SLOPE = 1000, 2000, 100, 1.1
COMMAND = "gdp bench simulator"
NUM_GROUPS = (60, 200, 800)  # the levels of the local search

OnRow = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorBenchConfig:
    """How much is measured; the defaults are those of docs/results.md."""

    workload: str = "gnmt-4"
    placements_per_family: int = 12
    repeats: int = 7
    seconds_per_repeat: float = 0.3
    num_reference_placements: int = 1  # the reference takes minutes for one of gnmt-4
    sizes: tuple[int, ...] = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
    small_size: int = 1_000  # a graph on which the reference takes seconds
    with_compilation: bool = True

    def __post_init__(self) -> None:
        if min(self.placements_per_family, self.repeats, self.num_reference_placements, len(self.sizes) - 1) < 1:
            raise ValueError(f"{self}: at least one placement and repeat, and two sizes, are expected")


def run(*, out: Path | None, on_row: OnRow, config: SimulatorBenchConfig | None = None) -> dict[str, Any]:
    """The figures as a dictionary, with `markdown` made of them; both are written to the directory `out` if given.

    `on_row` is called with a line as each part ends. RuntimeError if two ways to simulate disagree.
    """
    config = config or SimulatorBenchConfig()
    graph, cluster = workload_inputs(config.workload)
    problem = reduce(Problem.build(graph, cluster)).problem
    families = placement_families(problem, config.placements_per_family, seed=0)
    figures: dict[str, Any] = {
        "command": COMMAND,
        "machine": machine(),
        "config": asdict(config),
        "graph": {"name": graph.name, "num_ops": graph.num_ops, "num_reduced_ops": problem.num_ops},
        "cluster": cluster.name,
    }
    figures["speed"] = _speed(problem, families, config, on_row)
    small = Problem.build(lstm_training_graph_of(config.small_size), cluster)
    small_families = placement_families(small, config.num_reference_placements, seed=0)
    figures["reference"] = [
        _against_reference(small, small_families, config, on_row),
        _against_reference(problem, families, config, on_row),
    ]
    figures["compilation"] = _compilation(on_row) if config.with_compilation else None
    figures["scaling"] = _scaling(cluster, config, on_row)
    figures["markdown"] = _markdown(figures)
    if out is not None:
        files.write_json(out / "simulator.json", {key: value for key, value in figures.items() if key != "markdown"})
        files.write_bytes(out / "simulator.md", figures["markdown"].encode())
    return figures


def placement_families(problem: Problem, num_placements: int, seed: int) -> dict[str, I64]:
    """[num_placements, N] varied placements by family; fewer classical ones where placers agree or find none."""
    rng = np.random.default_rng(seed)
    found = [placement for placer in CLASSICAL.values() if (placement := placer(problem, seed)) is not None]
    classical = np.unique(np.array(found, np.int64), axis=0)
    times, _ = evaluate_many(problem, classical)
    fastest = classical[np.argmin(times)]
    order = np.argsort(times, kind="stable")[:num_placements]
    units = Units.of(problem)
    anywhere, search = [], []
    for number in range(num_placements):
        num_groups = NUM_GROUPS[number % len(NUM_GROUPS)]
        anywhere.append(_move(problem, units, np.zeros(problem.num_ops, np.int64), num_groups, None, rng))
        search.append(_move(problem, units, fastest, num_groups, 1 + number % 10, rng))
    return {"classical": classical[order], "random by group": np.array(anywhere), "search-like": np.array(search)}


def _move(
    problem: Problem, units: Units, start: I64, num_groups: int, num_moves: int | None, rng: np.random.Generator
) -> I64:
    """`start` with `num_moves` of its groups (None: all) on random devices that are allowed them."""
    score = np.exp(rng.normal(0.0, 1.0, len(units.first))) * units.transfer_ns.astype(np.float64)
    grouping = group_units(units, [start], num_groups, score, slack=3.0)
    moved = np.arange(grouping.num_groups) if num_moves is None else rng.integers(0, grouping.num_groups, num_moves)
    placement = start.copy()
    for group in moved.tolist():
        members = grouping.members[grouping.offsets[group] : grouping.offsets[group + 1]]
        placement[members] = rng.choice(np.flatnonzero(grouping.allowed[group]))
    return placement


def _speed(
    problem: Problem, families: Mapping[str, I64], config: SimulatorBenchConfig, on_row: OnRow
) -> list[dict[str, Any]]:
    """Simulations per second: in full by family, all families in each mode, and over two threads."""
    # equal weight: as many placements of each family, repeated where there are fewer
    each = max(len(placements) for placements in families.values())
    batch = np.concatenate([placements[np.arange(each) % len(placements)] for placements in families.values()])
    times, _ = evaluate_many(problem, batch, num_threads=1)
    fast_times, run_fast = _without_memory(problem, batch)
    recorded = [simulate(problem, placement).step_time_ns for placement in families["search-like"]]
    _require_equal("without memory", times, fast_times)
    _require_equal("recorded", evaluate_many(problem, families["search-like"])[0], np.array(recorded))
    _require_equal("two threads", times, evaluate_many(problem, batch, num_threads=2)[0])

    rows = []

    def add(what: str, clock: str, num_placements: int, rates: Sequence[float]) -> None:
        rows.append({"what": what, "clock": clock, "placements": num_placements, "per_second": sorted(rates)})
        on_row(f"{what}: {_rate(rows[-1])} simulations per {clock}")

    core = "core-second"
    everything = _rates(partial(evaluate_many, problem, batch, num_threads=1), len(batch), config)
    add("step time and peaks, all placements", core, len(batch), everything)
    for name, some in families.items():
        each_rate = _rates(partial(evaluate_many, problem, some, num_threads=1), len(some), config)
        add(f"step time and peaks, {name}", core, len(some), each_rate)
    add("step time only, all placements", core, len(batch), _rates(run_fast, len(batch), config))
    recording = families["search-like"]
    recorded_rates = _rates(lambda: [simulate(problem, placement) for placement in recording], len(recording), config)
    add("every start, finish and transfer, search-like", core, len(recording), recorded_rates)
    once = replace(config, repeats=1)
    one, two = (partial(evaluate_many, problem, batch, num_threads=num_threads) for num_threads in (1, 2))
    wall: tuple[list[float], list[float]] = [], []
    shared: list[float] = []
    for _ in range(config.repeats):  # in turn, so that all see the same machine
        wall[0].extend(_rates(one, len(batch), once, time.perf_counter))
        wall[1].extend(_rates(two, len(batch), once, time.perf_counter))
        shared.extend(_rates(two, len(batch), once, time.process_time))
    add("step time and peaks, all placements, one thread", "second", len(batch), wall[0])
    add("step time and peaks, all placements, two threads", "second", len(batch), wall[1])
    add("step time and peaks, all placements, two threads", core, len(batch), shared)
    return rows


def _without_memory(problem: Problem, batch: I64) -> tuple[I64, Callable[[], I64]]:
    """Step times [B] of the mode that searches use, and the function that computes them anew."""
    rank, op_of_rank = problem.ranks
    workspace = Workspace(problem)
    devices = np.stack([problem.check_placement(placement) for placement in batch])

    def work() -> I64:
        times = np.zeros(len(devices), np.int64)
        _run_all(
            problem.arrays, problem.time_table_ns[None], devices, rank, op_of_rank, NEVER,
            workspace.scratch, workspace.schedule, workspace.by_rank, times,
        )  # fmt: skip
        return times

    return work(), work


@njit(cache=True, nogil=True)
def _run_all(  # type: ignore[no-untyped-def]
    arrays, op_times_ns, placements, rank, op_of_rank, stop_ns, scratch, schedule, order, times
):  # fmt: skip
    for index in range(len(placements)):
        times[index] = mean_step_time(
            arrays, op_times_ns, placements[index], rank, op_of_rank, stop_ns, 0, scratch, schedule, order
        )


def _rates(
    work: Callable[[], object], count: int, config: SimulatorBenchConfig, clock: Callable[[], float] = time.thread_time
) -> list[float]:
    """Simulations per second of `clock` (default: this thread's processor time) by repeat; `work` does `count`."""
    started = clock()
    work()  # also warms caches
    num_calls = max(1, round(config.seconds_per_repeat / max(clock() - started, 1e-6)))
    rates = []
    for _ in range(config.repeats):
        started = clock()
        for _ in range(num_calls):
            work()
        rates.append(num_calls * count / (clock() - started))
    return rates


def _against_reference(
    problem: Problem, families: Mapping[str, I64], config: SimulatorBenchConfig, on_row: OnRow
) -> dict[str, Any] | None:
    """Seconds of the reference and of the compiled code on the same placements; None without a checkout."""
    reference = _load_reference()
    if reference is None:
        return None
    placements = families["search-like"][: config.num_reference_placements]
    rates = _rates(partial(evaluate_many, problem, placements, num_threads=1), len(placements), config)
    seconds = []
    for placement in placements:
        started = time.thread_time()
        schedule = reference.run(
            problem.graph, problem.cluster, problem.op_time_ns, placement, priority=problem.b_level_ns
        )
        seconds.append(time.thread_time() - started)
        fast = simulate(problem, placement)
        _require_equal("reference, step time", np.array([schedule.step_time_ns]), np.array([fast.step_time_ns]))
        _require_equal("reference, starts", np.array(schedule.op_start_ns), fast.op_start_ns)
        _require_equal("reference, peaks", np.array(schedule.peak_memory_bytes), fast.peak_memory_bytes)
    reference_seconds, compiled_seconds = float(np.mean(seconds)), 1.0 / float(np.median(rates))
    ratio = reference_seconds / compiled_seconds
    on_row(f"plain-Python reference, {problem.num_ops} ops: {ratio:,.0f} times as long, equal figures")
    return {
        "graph": problem.graph.name,
        "num_ops": problem.num_ops,
        "placements": len(placements),
        "reference_seconds": reference_seconds,
        "seconds": compiled_seconds,
        "ratio": ratio,
    }


def _load_reference() -> ModuleType | None:
    """tests/reference_simulator.py of the checkout that this package runs from; None when it is installed elsewhere."""
    path = Path(__file__).parents[3] / "tests" / "reference_simulator.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_calls() -> dict[str, float]:
    """Seconds of this process's first simulation and first search, on a graph so small that only compilation counts,
    and the processor time of both together."""
    started, processor_started = time.perf_counter(), time.process_time()
    graph, cluster = lstm_training_graph(2), Cluster.parse("4xp100-pcie-16g")
    problem = Problem.build(graph, cluster)
    placement = np.zeros(graph.num_ops, np.int64)
    evaluate_many(problem, placement[None])
    simulate(problem, placement)
    simulated = time.perf_counter()
    place(graph, cluster, budget=Budget(simulations=200))
    ended, processor_ended = time.perf_counter(), time.process_time()
    return {
        "simulate": simulated - started,
        "place": ended - simulated,
        "processor": processor_ended - processor_started,
    }


def _compilation(on_row: OnRow) -> dict[str, dict[str, float]]:
    """`first_calls` in fresh processes: with an empty cache of compiled code, then with the one that it left."""
    code = "import json; from gdp.bench.simulator import first_calls; print(json.dumps(first_calls()))"
    results = {}
    with tempfile.TemporaryDirectory(prefix="gdp-numba-") as cache:
        for name in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "NUMBA_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            results[name] = json.loads(done.stdout.splitlines()[-1])
            on_row(f"first calls, {name}: " + ", ".join(f"{what} {took:.2f} s" for what, took in results[name].items()))
    return results


def _scaling(cluster: Cluster, config: SimulatorBenchConfig, on_row: OnRow) -> dict[str, Any]:
    """Time of a full simulation against the size of unreduced LSTM graphs, and the slope of the line through it."""
    points = []
    for size in config.sizes:
        problem = Problem.build(lstm_training_graph_of(size), cluster)
        units, rng = Units.of(problem), np.random.default_rng(0)
        start = np.zeros(problem.num_ops, np.int64)
        batch = np.array([_move(problem, units, start, num_groups, None, rng) for num_groups in 4 * NUM_GROUPS])
        rates = _rates(partial(evaluate_many, problem, batch, num_threads=1), len(batch), config)
        seconds = 1.0 / float(np.median(rates))
        points.append({"num_ops": problem.num_ops, "num_edges": len(problem.graph.consumers), "seconds": seconds})
        on_row(f"{problem.num_ops} ops: {seconds * 1e3:.3f} ms, {seconds * 1e9 / problem.num_ops:.0f} ns an op")
    slope = log_log_slope([point["num_ops"] for point in points], [point["seconds"] for point in points])
    on_row(f"slope on a log-log scale: {slope:.3f}")
    return {"points": points, "slope": slope}


def log_log_slope(sizes: npt.ArrayLike, costs: npt.ArrayLike) -> float:
    """Slope of the least-squares line through (log size, log cost): the power of the size with which cost grows."""
    return float(np.polyfit(np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(costs, np.float64)), 1)[0])


def _require_equal(what: str, expected: npt.ArrayLike, found: npt.ArrayLike) -> None:
    if not np.array_equal(expected, found):
        raise RuntimeError(f"bench simulator: {what}: figures differ from those of the compiled simulation")


def _rate(row: Mapping[str, Any]) -> str:
    return f"{float(np.median(row['per_second'])):,.0f}"


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _markdown(figures: Mapping[str, Any]) -> str:
    speed, scaling, graph = figures["speed"], figures["scaling"], figures["graph"]
    headline = float(np.median(speed[0]["per_second"]))
    wall = [float(np.median(row["per_second"])) for row in speed if row["clock"] == "second"]
    ratios = [row for row in figures["reference"] if row is not None]
    parts = [
        "## Simulator",
        f"    {COMMAND}",
        f"{machine_line()}.",
        f"{graph['name']} on {figures['cluster']}: {graph['num_ops']:,} ops, {graph['num_reduced_ops']:,} after exact "
        f"reduction. Median of {figures['config']['repeats']} repeats, lowest and highest beside it. Placements: those "
        "of the classical placers; groups (60, 200 or 800) on random devices; the fastest classical one with 1 to 10 "
        "groups moved. All three in equal shares unless a family is named. A core-second is processor time, summed "
        "over threads. The modes agree on every step time.",
        markdown_table(
            ("simulations", "per", "median", "spread"),
            [
                (row["what"], row["clock"], _rate(row), spread([f"{row['per_second'][i]:,.0f}" for i in (0, -1)]))
                for row in speed
            ],
        ),
        f"In full: **{headline:,.0f} per core-second** (target at least {TARGET_PER_SECOND:,}: "
        f"{_verdict(headline >= TARGET_PER_SECOND)}; aim {AIM_PER_SECOND:,}: {_verdict(headline >= AIM_PER_SECOND)}). "
        f"Two threads: {wall[1] / wall[0]:.2f}x the rate of one (with what else ran on the machine).",
        "### Against the plain-Python reference",
    ]
    if ratios:
        parts += [
            "`tests/reference_simulator.py` on the same search-like placements in the same run; every start, step "
            "time and peak is equal. It is written to be read and looks every op up anew: its time grows with the "
            "square of the graph, so the ratio grows with the graph.",
            markdown_table(
                ("graph", "ops", "placements", "reference, s", "compiled, ms", "ratio"),
                [
                    (
                        row["graph"], f"{row['num_ops']:,}", str(row["placements"]), f"{row['reference_seconds']:.2f}",
                        f"{row['seconds'] * 1e3:.3f}", f"{row['ratio']:,.0f}x",
                    )
                    for row in ratios
                ],
            ),
            f"Target at least {TARGET_RATIO}x: {_verdict(all(row['ratio'] >= TARGET_RATIO for row in ratios))}.",
        ]  # fmt: skip
    else:
        parts.append("The ratio needs a checkout: `tests/reference_simulator.py` is not part of the installed package.")
    if figures["compilation"] is not None:
        rows = [
            (name, *(f"{row[what]:.2f}" for what in ("simulate", "place", "processor")))
            for name, row in figures["compilation"].items()
        ]
        parts += [
            "### Compilation",
            "Seconds of a fresh process's first simulation, of its first `place` after that (200 simulations, two LSTM "
            "steps), and of processor time for both; imports left out. Cold: with an empty cache of compiled code; "
            "warm: with the one that this left.",
            markdown_table(("cache", "simulate", "place", "processor"), rows),
        ]
    parts += [
        "### Cost against size",
        "Full simulations of synthetic LSTM training graphs (`gdp.bench.graphs`, 4 layers, ever more steps, not "
        "reduced), 60, 200 and 800 groups on random devices. What no longer fits in the processor's caches costs more "
        "an op.",
        markdown_table(
            ("ops", "edges", "ms", "ns an op"),
            [
                (
                    f"{point['num_ops']:,}", f"{point['num_edges']:,}", f"{point['seconds'] * 1e3:.3f}",
                    f"{point['seconds'] * 1e9 / point['num_ops']:.0f}",
                )
                for point in scaling["points"]
            ],
        ),
        f"Slope of the least-squares line on a log-log scale: **{scaling['slope']:.3f}** (target at most "
        f"{TARGET_SLOPE}: {_verdict(scaling['slope'] <= TARGET_SLOPE)}).",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"
