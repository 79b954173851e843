"""Benchmark `simulator`: simulations per second, against the plain-Python reference and the size of the graph.

Placements are as varied as those of a search, in three families of equal weight: the classical placers'; groups of ops
(few or many) on random devices; the fastest classical one with one to ten groups moved.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import graphs
from benchmarks.benchmark import Benchmark, Say
from benchmarks.figures import dot_plot
from benchmarks.graphs import lstm_training_graph_of
from benchmarks.rows import Rows
from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.placers import CLASSICAL
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER, evaluate_many, run_batch, simulate
from gdp.units.reduction import reduce
from gdp.units.units import Pairs, Units, group_units

NUM_GROUPS = (60, 200, 800)  # the levels of the local search
ISSUE_NS = 11_000  # of built-in GPUs


@dataclass(frozen=True, kw_only=True)
class SimulatorBenchmark(Benchmark):
    """The speed of the machine model."""

    name = "simulator"
    workload: str = "gnmt-4"
    placements_per_family: int = 12
    repeats: int = 7
    seconds_per_repeat: float = 0.3
    num_reference_placements: int = 1  # the reference takes minutes for one of gnmt-4
    sizes: tuple[int, ...] = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
    small_size: int = 1_000  # a graph on which the reference takes seconds

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns all figures by name. RuntimeError if two ways to simulate disagree."""
        graph, cluster = graphs.workload_inputs(self.workload)
        problem = reduce(Problem.build(graph, cluster)).problem
        families = placement_families(problem, self.placements_per_family, seed=0)
        small = Problem.build(lstm_training_graph_of(self.small_size), cluster)
        small_families = placement_families(small, self.num_reference_placements, seed=0)
        return {
            "graph": {"name": graph.name, "num_ops": graph.num_ops, "num_reduced_ops": problem.num_ops},
            "cluster": cluster.name,
            "speed": _speed(problem, families, self, say),
            "reference": [
                _against_reference(small, small_families, self, say),
                _against_reference(problem, families, self, say),
            ],
            "scaling": _scaling(cluster, self, say),
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes | None:
        rates = {f"{row['what']}, per {row['clock']}": row["per_second"] for row in measured["speed"]}
        return dot_plot("Simulations per second", "simulations; a dot for each repeat", rates)


def placement_families(problem: Problem, num_placements: int, seed: int) -> dict[str, I64]:
    """Returns [num_placements, N] varied placements by family, fewer classical ones where placers agree or fail."""
    rng = np.random.default_rng(seed)
    found = [placement for placer in CLASSICAL.values() if (placement := placer(problem, seed)) is not None]
    classical = np.unique(np.array(found, np.int64), axis=0)
    times, _ = evaluate_many(problem, classical)
    fastest = classical[np.argmin(times)]
    order = np.argsort(times, kind="stable")[:num_placements]
    units = Units.of(problem)
    pairs = units.pairs()
    anywhere, search = [], []
    for number in range(num_placements):
        num_groups = NUM_GROUPS[number % len(NUM_GROUPS)]
        anywhere.append(_move(units, pairs, np.zeros(problem.num_ops, np.int64), num_groups, None, rng))
        search.append(_move(units, pairs, fastest, num_groups, 1 + number % 10, rng))
    return {"classical": classical[order], "random by group": np.array(anywhere), "search-like": np.array(search)}


def _move(
    units: Units, pairs: Pairs, start: I64, num_groups: int, num_moves: int | None, rng: np.random.Generator
) -> I64:
    """Returns `start` with `num_moves` of its groups (None: all) on random devices that are allowed them."""
    score = np.exp(rng.normal(0.0, 1.0, len(pairs.first))) * pairs.transfer_ns.astype(np.float64)
    groups = group_units(units, pairs, [start], num_groups, score, slack=3.0)
    moved = np.arange(groups.num_units) if num_moves is None else rng.integers(0, groups.num_units, num_moves)
    placement = start.copy()
    for group in moved.tolist():
        ops = groups.ops[groups.offsets[group] : groups.offsets[group + 1]]
        placement[ops] = rng.choice(np.flatnonzero(groups.allowed[group]))
    return placement


def _speed(problem: Problem, families: Mapping[str, I64], config: SimulatorBenchmark, say: Say) -> list[dict[str, Any]]:
    """Returns simulations per second: in full by family, all families in each mode, and over two threads."""
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
        say(f"{what}: {np.median(rates):,.0f} simulations per {clock}")

    core = "core-second"
    everything = simulation_rates(partial(evaluate_many, problem, batch, num_threads=1), len(batch), config)
    add("step time and peaks, all placements", core, len(batch), everything)
    for name, some in families.items():
        each_rate = simulation_rates(partial(evaluate_many, problem, some, num_threads=1), len(some), config)
        add(f"step time and peaks, {name}", core, len(some), each_rate)
    add("step time only, all placements", core, len(batch), simulation_rates(run_fast, len(batch), config))
    recording = families["search-like"]
    recorded_rates = simulation_rates(
        lambda: [simulate(problem, placement) for placement in recording], len(recording), config
    )
    add("every start, finish and transfer, search-like", core, len(recording), recorded_rates)
    once = replace(config, repeats=1)
    issues_ns = {"without hosts": 0, "with hosts": ISSUE_NS}
    problems = {
        name: replace(problem, host_time_ns=issue_ns * (problem.op_time_ns > 0)) for name, issue_ns in issues_ns.items()
    }
    beside: dict[str, list[float]] = {name: [] for name in problems}
    for _ in range(config.repeats):  # in turn, so that both see the same machine
        for name, of in problems.items():
            beside[name] += simulation_rates(partial(evaluate_many, of, batch, num_threads=1), len(batch), once)
    for name, rates in beside.items():
        add(f"step time and peaks, all placements, {name}", core, len(batch), rates)
    one, two = (partial(evaluate_many, problem, batch, num_threads=num_threads) for num_threads in (1, 2))
    wall: tuple[list[float], list[float]] = [], []
    shared: list[float] = []
    for _ in range(config.repeats):  # in turn, so that all see the same machine
        wall[0].extend(simulation_rates(one, len(batch), once, time.perf_counter))
        wall[1].extend(simulation_rates(two, len(batch), once, time.perf_counter))
        shared.extend(simulation_rates(two, len(batch), once, time.process_time))
    add("step time and peaks, all placements, one thread", "second", len(batch), wall[0])
    add("step time and peaks, all placements, two threads", "second", len(batch), wall[1])
    add("step time and peaks, all placements, two threads", core, len(batch), shared)
    return rows


def _without_memory(problem: Problem, batch: I64) -> tuple[I64, Callable[[], I64]]:
    """Step times [B] of the mode that searches use, and the function that computes them anew."""
    dispatch = problem.simulator.dispatch(problem.order)
    workspace = problem.simulator.new_workspace()
    devices = np.stack([problem.check_placement(placement) for placement in batch])

    def work() -> I64:
        times, no_peaks = np.zeros(len(devices), np.int64), np.zeros((len(devices), 0), np.int64)
        run_batch(
            problem.simulator.arrays,
            problem.simulator.time_table_ns[None],
            devices,
            dispatch,
            NEVER,
            0,
            workspace,
            times,
            no_peaks,
        )
        return times

    return work(), work


def simulation_rates(
    work: Callable[[], object], count: int, config: SimulatorBenchmark, clock: Callable[[], float] = time.thread_time
) -> list[float]:
    """Returns simulations per second of `clock` (default: this thread's processor time); `work` makes `count`."""
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
    problem: Problem, families: Mapping[str, I64], config: SimulatorBenchmark, say: Say
) -> dict[str, Any] | None:
    """Returns seconds of the reference and of the compiled code on the same placements; None without a checkout."""
    reference = _load_reference()
    if reference is None:
        return None
    placements = families["search-like"][: config.num_reference_placements]
    rates = simulation_rates(partial(evaluate_many, problem, placements, num_threads=1), len(placements), config)
    seconds = []
    for placement in placements:
        started = time.thread_time()
        schedule = reference.run(
            problem.graph,
            problem.cluster,
            problem.op_time_ns,
            placement,
            priority=problem.b_level_ns,
            host_time_ns=problem.host_time_ns,
        )
        seconds.append(time.thread_time() - started)
        fast = simulate(problem, placement)
        _require_equal("reference, step time", np.array([schedule.step_time_ns]), np.array([fast.step_time_ns]))
        _require_equal("reference, starts", np.array(schedule.op_start_ns), fast.op_start_ns)
        _require_equal("reference, peaks", np.array(schedule.peak_memory_bytes), fast.peak_memory_bytes)
    reference_seconds, compiled_seconds = float(np.mean(seconds)), 1.0 / float(np.median(rates))
    ratio = reference_seconds / compiled_seconds
    say(f"plain-Python reference, {problem.num_ops} ops: {ratio:,.0f} times as long, equal figures")
    return {
        "graph": problem.graph.name,
        "num_ops": problem.num_ops,
        "placements": len(placements),
        "reference_seconds": reference_seconds,
        "seconds": compiled_seconds,
        "ratio": ratio,
    }


def _load_reference() -> ModuleType | None:
    """Returns tests/reference_simulator.py of the checkout of this package; None when it is installed elsewhere."""
    path = Path(__file__).parents[1] / "tests" / "reference_simulator.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _scaling(cluster: Cluster, config: SimulatorBenchmark, say: Say) -> dict[str, Any]:
    """Returns the time of a full simulation of unreduced LSTM graphs by size, and the slope of the line through it."""
    points = []
    for size in config.sizes:
        problem = Problem.build(lstm_training_graph_of(size), cluster)
        units, rng = Units.of(problem), np.random.default_rng(0)
        start = np.zeros(problem.num_ops, np.int64)
        pairs = units.pairs()
        batch = np.array([_move(units, pairs, start, num_groups, None, rng) for num_groups in 4 * NUM_GROUPS])
        rates = simulation_rates(partial(evaluate_many, problem, batch, num_threads=1), len(batch), config)
        seconds = 1.0 / float(np.median(rates))
        points.append({"num_ops": problem.num_ops, "num_edges": len(problem.graph.consumers), "seconds": seconds})
        say(f"{problem.num_ops} ops: {seconds * 1e3:.3f} ms, {seconds * 1e9 / problem.num_ops:.0f} ns an op")
    slope = log_log_slope([point["num_ops"] for point in points], [point["seconds"] for point in points])
    say(f"slope on a log-log scale: {slope:.3f}")
    return {"points": points, "slope": slope}


def log_log_slope(sizes: npt.ArrayLike, costs: npt.ArrayLike) -> float:
    """Returns the slope of the least-squares line through (log size, log cost): cost grows with that power of size."""
    return float(np.polyfit(np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(costs, np.float64)), 1)[0])


def _require_equal(what: str, expected: npt.ArrayLike, found: npt.ArrayLike) -> None:
    if not np.array_equal(expected, found):
        raise RuntimeError(f"simulator: {what}: figures differ from those of the compiled simulation")
