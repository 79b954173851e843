"""Benchmark `placers`: placers of anybody on fixed problems, budgets and seeds, with ours beside them.

`FILE.py:FUNCTION` or `module:FUNCTION` names a placer: `place(problem, seconds, seed)` returns the number of the device
of each op, or its name by the name of the op. `gdp.simulate` scores all alike, with memory enforced. Time is that of
the processor, on one thread; an answer that takes more than one and a half times its budget, and a second, is late.
"""

import csv
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from benchmarks import methods
from benchmarks.benchmark import Benchmark, Say, pick, require_seconds
from benchmarks.graphs import workload_inputs
from benchmarks.page import geometric_mean
from benchmarks.rows import Rows
from benchmarks.runs import Method, Run, WorkloadRuns
from gdp import files
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.errors import InputError, first_line, suggest
from gdp.models.papers import PAPERS
from gdp.models.user_function import named
from gdp.placers import CLASSICAL
from gdp.planning.warm_up import warm_up
from gdp.search.ops.classical import ClassicalRuns
from gdp.search.question import Question, Solution
from gdp.search.solvers import solve
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate

Placer = Callable[[Problem, float, int], Any]
"""From a problem, seconds of the processor and a seed to a placement."""

_UNEQUAL = "rtx4090-24g+2xl4-24g"
_ON_UNEQUAL = ("rnnlm-4", "gnmt-4", "transformer-xl-4", "inception-v3-b64", "amoebanet", "wavenet-2x9")
PROBLEMS: Mapping[str, str] = {
    **{f"{name} on {PAPERS.get(name).cluster}": name for name in PAPERS.names()},
    **{f"{name} on {_UNEQUAL}": name for name in _ON_UNEQUAL},
}
"""The workload of each problem."""


def _classical(name: str, budget: Budget) -> Method:
    def run(question: Question, clock: Clock) -> Solution:
        runs = ClassicalRuns(question)
        runs.run((name,), clock)
        return Solution(runs.best, runs.baselines)

    return Method(name, run, budget, counts_cpu=True, num_threads=1)


def _zero_shot(question: Question, clock: Clock) -> Solution:
    return solve("gdp-zero-shot", question, clock)


OURS: Mapping[str, Callable[[Budget], Method]] = {
    **{name: partial(_classical, name) for name in CLASSICAL},
    "gdp-zero-shot": lambda budget: Method("gdp-zero-shot", _zero_shot, budget, counts_cpu=True, num_threads=1),
    "gdp-published": methods.published,
    "hdp": methods.hdp,
    "auto": methods.auto,
}
"""Our placers and those of papers, from a budget."""
_LATE, _GRACE_S = 1.5, 1.0
_OK, _IS_LATE = "ok", "late"


@dataclass(frozen=True)
class Score:
    """A placer on a problem, with one seed."""

    placer: str
    problem: str
    seed: int
    status: str  # "ok", "infeasible", "failed" or "late"
    step_time_ns: int | None  # of a placement that fits
    lower_bound_ns: int
    cpu_seconds: float

    @classmethod
    def of(cls, placer: str, runs: WorkloadRuns, seed: int, run: Run, seconds: float) -> "Score":
        """Returns the score of a run, which may be late."""
        is_late = run.status == _OK and run.cpu_seconds > _LATE * seconds + _GRACE_S
        status = _IS_LATE if is_late else run.status
        time_ns = run.step_time_ns if status == _OK else None
        return cls(placer, runs.name, seed, status, time_ns, runs.lower_bound_ns, run.cpu_seconds)


@dataclass(frozen=True)
class Rank:
    """A line of the leaderboard."""

    placer: str
    num_solved: int  # problems with an answer in time that fits, for each seed
    to_bound: float | None  # geometric mean over these problems: the median seed's step time over the lower bound
    to_best: float | None  # the same over the best of all placers here
    cpu_seconds: float  # mean

    @classmethod
    def of(cls, placer: str, scores: Sequence[Score]) -> "Rank":
        """Returns the line of `placer` among the `scores` of all."""
        own = [score for score in scores if score.placer == placer]
        times = {name: _median_ns(own, name) for name in dict.fromkeys(score.problem for score in own)}
        solved = {name: time_ns for name, time_ns in times.items() if time_ns is not None}
        bounds = {score.problem: score.lower_bound_ns for score in own}
        placers = dict.fromkeys(score.placer for score in scores)
        of_placer = {other: [score for score in scores if score.placer == other] for other in placers}
        best = {name: min(filter(None, (_median_ns(of_placer[other], name) for other in placers))) for name in solved}
        means = [
            geometric_mean([time_ns / least[name] for name, time_ns in solved.items()]) if solved else None
            for least in (bounds, best)
        ]
        to_bound, to_best = means
        return cls(placer, len(solved), to_bound, to_best, float(np.mean([score.cpu_seconds for score in own])))


def _median_ns(scores: Sequence[Score], problem: str) -> int | None:
    """Returns the median step time of a placer's seeds on a problem; None if one of them has none."""
    times = [score.step_time_ns for score in scores if score.problem == problem]
    return median_low(times) if None not in times else None  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class PlacersBenchmark(Benchmark):
    """Each placer on each problem with each seed, within `budget`."""

    name = "placers"
    budget: Budget = field(default_factory=lambda: Budget(seconds=10.0))
    seeds: int = 3
    placers: tuple[str, ...] = tuple(OURS)
    problems: tuple[str, ...] = tuple(PROBLEMS)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        seconds = require_seconds(self.name, self.budget, "10s")
        pick(self.name, "problem", self.problems, list(PROBLEMS))
        chosen = {name: _method(name, self.budget) for name in self.placers}
        warm_up(("auto", "gdp-zero-shot"))
        scores: list[Score] = []
        for problem in self.problems:
            graph = workload_inputs(PROBLEMS[problem])[0]
            cluster = Cluster.parse(problem.rpartition(" on ")[2])
            runs = WorkloadRuns(problem, rows, (graph, cluster))
            for name, method in chosen.items():
                for seed in range(self.seeds):
                    scores.append(Score.of(name, runs, seed, runs.run(method, seed), seconds))
                say(f"{problem}, {name}: {', '.join(map(_shown, scores[-self.seeds :]))}")
        ranks = [Rank.of(name, scores) for name in chosen]
        ranks.sort(key=lambda rank: (-rank.num_solved, rank.to_bound or np.inf))
        return {"ranks": ranks, "scores": scores}

    def run(self, *, out: Path | None = None, rows: Path | None = None, say: Say = lambda _: None) -> dict[str, Any]:
        """Returns the figures; a directory `out` gets `placers.csv` too, a line for each score."""
        document = super().run(out=out, rows=rows, say=say)
        if out is not None and out.suffix != ".md":
            text = io.StringIO()
            writer = csv.DictWriter(text, fieldnames=list(document["scores"][0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(document["scores"])
            files.write_bytes(out / "placers.csv", text.getvalue().encode())
        return document


def _shown(score: Score) -> str:
    return score.status if score.step_time_ns is None else f"{score.step_time_ns / 1e6:,.4g} ms"


def _method(name: str, budget: Budget) -> Method:
    """Returns one of our placers, or the function that `name` names. InputError for neither."""
    if name in OURS:
        return OURS[name](budget)
    module, colon, function = name.rpartition(":")
    if not colon:
        raise InputError(f"placers: no placer {name!r}; FILE.py:FUNCTION, or one of ours: {suggest(name, list(OURS))}")
    path = Path(module)
    is_file = path.suffix == ".py"
    own = named(f"{path.stem if is_file else module}:{function}", path.parent if is_file else None)
    return foreign(name, own, budget)


def foreign(name: str, placer: Placer, budget: Budget) -> Method:
    """Returns the method that asks a placer of somebody else's."""
    if not callable(placer):
        raise InputError(f"{name}: is no function; place(problem, seconds, seed) is expected")
    source = inspect.getsourcefile(placer)
    seconds = require_seconds("placers", budget, "10s")

    def run(question: Question, clock: Clock) -> Solution:
        try:
            answer = placer(question.problem, seconds, question.seed)
        except Exception as error:
            raise InputError(f"{name}: failed ({type(error).__name__}: {first_line(error)})") from error
        clock.spend(1)
        return Solution(None if answer is None else question.judge(_simulated(name, question.problem, answer)))

    settings = {} if source is None else {"source": files.digest(source)}
    return Method(name.replace("/", "."), run, budget, counts_cpu=True, num_threads=1, settings=settings)


def _simulated(name: str, problem: Problem, answer: Any) -> Simulation:
    """Simulates what a placer returned. InputError for what is no placement."""
    if isinstance(answer, Simulation):
        answer = answer.placement
    try:
        if isinstance(answer, Mapping):
            answer = [problem.cluster.device_number(answer[op]) for op in problem.graph.op_names]
        return simulate(problem, answer)
    except KeyError as error:
        raise InputError(f"{name}: op {error} has no device; name one for each op") from None
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
