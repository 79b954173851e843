"""`gdp bench convergence`: the best step time that fits against processor time, learned placers beside searches.

All run on one thread by a clock that counts the processor time of the whole process, so a busy machine changes little,
and all in one process, taking turns seed by seed. Learned placers do at each moment what they would do with any budget:
one run is looked at on the way. A search plans by its budget: it has a run of its own for each time.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gdp import files, workloads
from gdp.bench.graphs import lstm_training_graph, workload_inputs
from gdp.bench.held_out import HeldOut, checkpoints_in, choose
from gdp.bench.plot import Series, line_plot
from gdp.bench.rows import Rows
from gdp.bench.runs import CpuClock
from gdp.bench.tables import (
    geometric_mean,
    machine,
    machine_line,
    markdown_table,
    milliseconds,
    spread,
    verdict,
)
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.coarsen import reduce
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.placers.island import Incumbent
from gdp.placers.learned import one_thread, shipped
from gdp.placers.portfolio import find
from gdp.problem import Problem

WORKLOADS = ("rnnlm-4", "gnmt-4", "transformer-xl-4", "inception-v3-b32", "amoebanet", "wavenet-4x9")
TIMES = (1.0, 3.0, 10.0, 30.0, 60.0)  # CPU seconds
TARGET_GUIDED = 0.97  # times the plain search's step time, at the times below
GUIDED_TIMES = (1.0, 10.0)
_GRACE = 1.1  # an answer counts for a time if it came by this much later: searches look at the clock between moves
_POINTS = 25  # of a plotted line

OnRow = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Method:
    """What is compared."""

    name: str
    placer: str  # of `portfolio.find`
    asks_policy: bool = False  # the trained one
    plans: bool = False  # by its budget


GUIDED, PLAIN = "guided search", "plain search"
METHODS = (
    Method("gdp", "gdp-finetune", asks_policy=True),
    Method("gdp-one", "gdp-one"),
    Method("hdp", "hdp"),
    Method(PLAIN, "auto", plans=True),
    Method(GUIDED, "guided", asks_policy=True, plans=True),
)


@dataclass(eq=False)
class Curve:
    """Placements that fit and are faster than all before, and when they were found."""

    clock: Clock
    points: list[tuple[float, int]] = field(default_factory=list)  # (CPU seconds, step time in ns)

    def __call__(self, incumbent: Incumbent, _num_simulations: int) -> None:
        if incumbent.excess_bytes == 0:
            self.add(incumbent.step_time_ns)

    def add(self, step_time_ns: int) -> None:
        """A placement of that step time was found just now."""
        if not self.points or step_time_ns < self.points[-1][1]:
            self.points.append((self.clock.seconds, step_time_ns))


@dataclass(frozen=True, eq=False)
class Results:
    """All runs: the curve of each (workload, method, seed, budget in seconds)."""

    methods: Sequence[Method]
    workloads: Sequence[str]
    seeds: int
    times: Sequence[float]
    curves: Mapping[tuple[str, str, int, float], Sequence[Sequence[float]]]

    def best_ns(self, workload: str, method: Method, seed: int, at: float) -> float | None:
        """The step time that `method` had after `at` CPU seconds; None before its first placement that fits."""
        curve = self.curves[workload, method.name, seed, at if method.plans else self.times[-1]]
        return min((step_ns for seconds, step_ns in curve if seconds <= at * _GRACE), default=None)

    def best_known_ns(self, workload: str) -> float | None:
        """The best of all runs."""
        found = [step_ns for key, curve in self.curves.items() if key[0] == workload for _, step_ns in curve]
        return min(found, default=None)

    def ratios(self, method: Method, at: float, other: Method | None = None) -> tuple[list[float], int]:
        """(by seed, the geometric mean over workloads of step times over those of `other` at that time, by default the
        best known; number of workloads where there is an answer with every seed)."""
        logs = []
        for workload in self.workloads:
            best = self.best_known_ns(workload)
            mine = [self.best_ns(workload, method, seed, at) for seed in range(self.seeds)]
            theirs = [best if other is None else self.best_ns(workload, other, seed, at) for seed in range(self.seeds)]
            pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None]
            if len(pairs) == self.seeds:
                logs.append([math.log(a / b) for a, b in pairs])
        return [math.exp(value) for value in np.mean(logs, axis=0)] if logs else [], len(logs)


def run(
    *,
    names: Sequence[str] | None = None,
    budget: Budget,
    seeds: int,
    checkpoints: Path | None = None,
    checkpoint: Path | None = None,
    out: Path | None,
    on_row: OnRow,
    methods: Sequence[Method] = METHODS,
) -> dict[str, Any]:
    """Run every method on each of the workloads `names` with `seeds` seeds for `budget` of CPU time.

    The trained policy is, of the directory `checkpoints`, one that holds the workload's family out, or the file
    `checkpoint`, or the one that comes with gdp. Returns the figures as a dictionary, with `markdown` made of them;
    they, a plot and the rows are written to the directory `out` if there is one, from where a run that was stopped goes
    on.
    """
    names = WORKLOADS if names is None else names
    if budget.seconds is None or budget.seconds <= 0:
        raise InputError(f"bench convergence: budget is {budget}; a time such as 60s is expected")
    if seeds < 1 or not names:
        raise InputError(f"bench convergence: {seeds} seeds, {len(names)} workloads; at least one of each is expected")
    if checkpoints is not None and checkpoint is not None:
        raise InputError(f"--checkpoints {checkpoints}, --checkpoint {checkpoint}: give one of both")
    times = (*(moment for moment in TIMES if moment < budget.seconds), budget.seconds)
    policies = {name: policy_for(name, checkpoints, checkpoint) for name in names}
    digests = {name: hashlib.sha256(files.read_bytes(policy.path)).hexdigest() for name, policy in policies.items()}
    rows = Rows(out / "rows" if out else None)
    _warm_up(methods, policies[names[0]].path)
    curves = {}
    for name in names:
        graph, cluster = workload_inputs(name)
        for seed in range(seeds):
            for method in methods:
                settings = {
                    "method": asdict(method),
                    "policy": digests[name] if method.asks_policy else None,
                    "graph": graph.fingerprint,
                    "cluster": cluster.fingerprint,
                }
                for seconds in times if method.plans else times[-1:]:
                    row = rows.row(
                        f"{name}-{method.name}-{seconds:g}s-seed{seed}",
                        settings | {"seconds": seconds},
                        partial(_follow, method, graph, cluster, Budget(seconds=seconds), seed, policies[name].path),
                    )
                    curves[name, method.name, seed, seconds] = row["curve"]
            on_row(_line(Results(methods, [name], seed + 1, times, curves), name, seed))
    results = Results(methods, names, seeds, times, curves)
    figures: dict[str, Any] = {
        "command": f"gdp bench convergence --budget {budget} --seeds {seeds}",
        "machine": machine(),
        "budget": str(budget),
        "seeds": seeds,
        "policies": {
            name: {"file": policy.path.name, "is_held_out": workloads.get(name).family in policy.families}
            for name, policy in policies.items()
        },
        "best_known_ns": {name: results.best_known_ns(name) for name in names},
        "curves": [
            {"workload": name, "method": method, "seed": seed, "seconds": seconds, "curve": curve}
            for (name, method, seed, seconds), curve in curves.items()
        ],
        "ratios_to_best_known": {
            method.name: {f"{at:g}": results.ratios(method, at)[0] for at in times} for method in methods
        },
    }
    if tuple(names) != WORKLOADS:
        figures["command"] += f" --workloads {','.join(names)}"
    for option, path in (("--checkpoints", checkpoints), ("--checkpoint", checkpoint)):
        figures["command"] += "" if path is None else f" {option} {path}"
    figures["markdown"] = _markdown(figures, results)
    if out is not None:
        files.write_json(out / "convergence.json", {key: value for key, value in figures.items() if key != "markdown"})
        files.write_bytes(out / "convergence.md", figures["markdown"].encode())
        files.write_bytes(out / "convergence.svg", _plot(results).encode())
    return figures


def policy_for(name: str, checkpoints: Path | None, checkpoint: Path | None) -> HeldOut:
    """What to place the workload `name` with; see `run`. InputError if no policy there never saw its family."""
    if checkpoints is not None:
        return choose(checkpoints_in(checkpoints), name, checkpoints)
    return HeldOut.read(checkpoint or Path(shipped()))


def _follow(method: Method, graph: Graph, cluster: Cluster, budget: Budget, seed: int, policy: Path) -> dict[str, Any]:
    """The row of one run. Graph and problem are there before the clock starts, for each run anew."""
    reduction = reduce(Problem.build(graph, cluster))
    clock = CpuClock(budget)
    curve = Curve(clock)
    with one_thread():
        found = find(
            reduction, method.placer, clock, seed=seed, checkpoint=str(policy) if method.asks_policy else None,
            num_threads=1, on_progress=curve,
        )  # fmt: skip
    if clock.stop.is_set():  # Ctrl-C, which a search takes for the end of its budget
        raise KeyboardInterrupt
    if found.best is not None and found.best.feasible:
        curve.add(found.best.step_time_ns)
    return {"curve": curve.points, "cpu_seconds": clock.seconds, "simulations": found.simulations}


def _warm_up(methods: Sequence[Method], policy: Path) -> None:
    """Compile and import what the methods need: the clock is not to count that."""
    graph, cluster = lstm_training_graph(2), Cluster.parse("2xp100-pcie-16g")
    for method in methods:
        _follow(method, graph, cluster, Budget(simulations=100), 0, policy)


def _line(results: Results, name: str, seed: int) -> str:
    """What the methods have at the end."""
    parts = []
    for method in results.methods:
        step_ns = results.best_ns(name, method, seed, results.times[-1])
        parts.append(f"{method.name} {'nothing fits' if step_ns is None else f'{milliseconds(step_ns)} ms'}")
    return f"{name}, seed {seed}: {', '.join(parts)}"


def _ratio_cell(ratios: Sequence[float], num_workloads: int, out_of: int) -> str:
    if not ratios:
        return "-"
    text = f"{geometric_mean(ratios):.3f} ({spread([f'{min(ratios):.3f}', f'{max(ratios):.3f}'])})"
    return text if num_workloads == out_of else f"{text}, {num_workloads} of {out_of}"


def _guided_sentences(results: Results) -> list[str]:
    """The guided search beside the plain one, if both are there."""
    by_name = {method.name: method for method in results.methods}
    if GUIDED not in by_name or PLAIN not in by_name:
        return []
    sentences = []
    for at in results.times:
        ratios, num_workloads = results.ratios(by_name[GUIDED], at, by_name[PLAIN])
        if not ratios:
            continue
        judged = f"; {verdict(geometric_mean(ratios), TARGET_GUIDED)}" if at in GUIDED_TIMES else ""
        sentences.append(
            f"- At {at:g} s the guided search takes **{geometric_mean(ratios):.3f}x** the step time of the plain one "
            f"({spread([f'{min(ratios):.3f}', f'{max(ratios):.3f}'])} by seed, {num_workloads} workloads{judged})."
        )
    return sentences


def _plot(results: Results) -> str:
    """Lines of the geometric mean over workloads, where a method has an answer for each; searches at their budgets."""
    series = []
    fine = np.geomspace(results.times[0], results.times[-1], _POINTS).tolist()
    for method in results.methods:
        points, spreads = [], []
        for at in results.times if method.plans else fine:
            ratios, num_workloads = results.ratios(method, at)
            if num_workloads == len(results.workloads):
                points.append((at, geometric_mean(ratios)))
                spreads.append((min(ratios), max(ratios)))
        series.append(Series(method.name, points, spreads))
    return line_plot("Best step time found", "CPU seconds", "step time over the best known", series, results.times)


def _markdown(figures: Mapping[str, Any], results: Results) -> str:
    seeds, names, times = figures["seeds"], results.workloads, results.times
    means = [
        (method.name, *(_ratio_cell(*results.ratios(method, at), len(names)) for at in times))
        for method in results.methods
    ]
    seen = [name for name, policy in figures["policies"].items() if not policy["is_held_out"]]
    ends = []
    for name in names:
        cells = []
        for method in results.methods:
            found = [results.best_ns(name, method, seed, times[-1]) for seed in range(seeds)]
            fitting = [step_ns for step_ns in found if step_ns is not None]
            cells.append(milliseconds(geometric_mean(fitting)) if len(fitting) == seeds else "OOM")
        best = results.best_known_ns(name)
        ends.append((name, "OOM" if best is None else milliseconds(best), *cells))
    parts = (
        "## Convergence",
        f"    {figures['command']}",
        f"{machine_line()}.",
        f"The best step time that fits, by CPU seconds of the whole process; {seeds} seeds, methods in turn, one "
        "thread each. The clock starts with the reduced graph and counts features, networks and simulations; reading "
        "the graph and compiling come before. gdp is the trained policy: at once, then fine-tuned on the graph. "
        "gdp-one and hdp train from scratch. A search plans by its budget, so it has a run of its own for each time; "
        "of the others one run is looked at on the way. "
        + (
            f"The policy was trained on the families of {', '.join(seen)} too."
            if seen
            else "The policy was trained without each workload's family."
        ),
        "Step time over the best that any run found, geometric means over workloads (lowest and highest seed):",
        markdown_table(("method", *(f"{at:g} s" for at in times)), means),
        *_section(_guided_sentences(results)),
        "![Convergence](convergence.svg)",
        f"Step times in ms after {times[-1]:g} CPU seconds, geometric means over the seeds:",
        markdown_table(("workload", "best known", *(method.name for method in results.methods)), ends),
    )
    return "\n\n".join(parts) + "\n"


def _section(lines: Sequence[str]) -> list[str]:
    return ["\n".join(lines)] if lines else []
