"""Benchmark `published-batch`: the paper's policy trained on several workloads at once, and on workloads held out.

    trained on all workloads    judged on each of them                            |  with superposition
    trained on the others       judged on the one held out, and fine-tuned on it  |  and without
    untrained                   judged and trained alike: the control             |

Relatives of a workload's family are held out with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

from benchmarks import graphs, methods
from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.gdp_batch import best_of_random, judge, train_on_batch
from benchmarks.gdp_policy.paper_policy import paper_policy
from benchmarks.gdp_policy.training import train_published
from benchmarks.page import geometric_mean
from benchmarks.published import WORKLOADS, PatientClock, expert_ns
from benchmarks.rows import Rows
from benchmarks.workloads import with_relatives, workloads
from gdp.budget import Budget
from gdp.errors import InputError
from gdp.policy.checkpoint import read_checkpoint, save_checkpoint
from gdp.policy.scheduler import Policy
from gdp.search.question import Question
from gdp.simulator.problem import Problem

TUNING_SECONDS = 60.0  # of fine-tuning at most: the paper's "less than a minute"
NUM_SAMPLES = 64  # placements of a workload in an update, as in `fine_tune`
NUM_DRAWN = 16  # placements that a policy is judged by, the likeliest among them
CHOICES = MODULE, OP = "module", "op"
GLOROT, PYTORCH = "glorot", "pytorch"  # initial weights

RANDOM, UNTRAINED = "random", f"untrained, best of {NUM_DRAWN}"
BATCH, BATCH_DRAWN, BATCH_BEST = "batch, likeliest", f"batch, best of {NUM_DRAWN}", "batch, best in training"
HELD_OUT, HELD_OUT_DRAWN = "held out, likeliest", f"held out, best of {NUM_DRAWN}"
TUNED, ALONE = "held out, fine-tuned", "alone"
MEASURES = (RANDOM, UNTRAINED, ALONE, BATCH_BEST, BATCH, BATCH_DRAWN, HELD_OUT, HELD_OUT_DRAWN, TUNED)
PAIRS = (
    (ALONE, RANDOM),
    (BATCH_BEST, RANDOM),
    (BATCH_BEST, ALONE),
    (HELD_OUT_DRAWN, UNTRAINED),
    (TUNED, ALONE),
    (TUNED, RANDOM),
)


class Variant(NamedTuple):
    """A policy before it is trained: what it chooses a device for, its parts and the seed of its parameters."""

    choice: str  # MODULE or OP
    superposition: bool
    seed: int
    initial: str = GLOROT  # weights

    @property
    def label(self) -> str:
        """The variant without its seed."""
        weights = "" if self.initial == GLOROT else ", PyTorch's initial weights"
        return f"a choice for each {self.choice}, with{'' if self.superposition else 'out'} superposition{weights}"

    @property
    def key(self) -> str:
        """The beginning of the names of its rows."""
        return f"{self.choice}-{self.initial}-{'with' if self.superposition else 'without'}-seed{self.seed}"

    def new_policy(self) -> Policy:
        """Returns the policy, untrained."""
        return paper_policy(self.seed, superposition=self.superposition, initial=self.initial)


@dataclass(eq=False)
class _StepTimes:
    """Step times in ns by variant, measure and workload; None where no placement fits."""

    times_ns: dict[tuple[Variant, str, str], int | None] = field(default_factory=dict)

    def cell(self, label: str, measure: str, workload: str) -> dict[str, Any] | None:
        """Returns the geometric mean over seeds, None where one found nothing that fits; None if none was run."""
        times_ns = [
            time_ns
            for (variant, other, name), time_ns in self.times_ns.items()
            if (variant.label, other, name) == (label, measure, workload)
        ]
        if not times_ns:
            return None
        fitting = [time_ns for time_ns in times_ns if time_ns is not None]
        return {"ns": geometric_mean(fitting) if len(fitting) == len(times_ns) else None}

    def mean(self, label: str, measure: str, experts_ns: Mapping[str, int]) -> dict[str, Any] | None:
        """Returns the geometric means over workloads of the step times over the expert's, one a seed.

        Workloads on which a seed found nothing that fits are left out of all. None if none was run.
        """
        cells = {name: self.cell(label, measure, name) for name in experts_ns}
        fitting = [name for name, cell in cells.items() if cell is not None and cell["ns"] is not None]
        if not any(cells.values()):
            return None
        variants = dict.fromkeys(variant for variant, other, _ in self.times_ns if other == measure)
        ratios = [
            geometric_mean([(self.times_ns[variant, measure, name] or 0) / experts_ns[name] for name in fitting])
            for variant in variants
            if variant.label == label and fitting
        ]
        return {"ratio": geometric_mean(ratios) if ratios else None, "seeds": ratios, "num_workloads": len(fitting)}

    def compare(self, one: tuple[str, str], other: tuple[str, str], names: Sequence[str]) -> dict[str, Any] | None:
        """Returns the mean ratio of the step times of two (label, measure), over workloads on which both fit.

        None where there is no such workload.
        """
        ratios = []
        for name in names:
            cells = [self.cell(label, measure, name) for label, measure in (one, other)]
            own, others = (None if cell is None else cell["ns"] for cell in cells)
            if own is not None and others is not None:
                ratios.append(own / others)
        if not ratios:
            return None
        return {
            "one": one,
            "other": other,
            "ratio": geometric_mean(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "num_faster": sum(ratio < 0.995 for ratio in ratios),
            "num_slower": sum(ratio > 1.005 for ratio in ratios),
            "num_workloads": len(ratios),
        }


@dataclass(frozen=True, kw_only=True)
class PublishedBatchBenchmark(Benchmark):
    """Batches of workloads, with and without superposition."""

    name = "published-batch"
    updates: int = 20  # of each training and fine-tuning
    seeds: int = 1
    choices: tuple[str, ...] = CHOICES  # for each module, for each op
    workloads: tuple[str, ...] = WORKLOADS

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "choice", self.choices, CHOICES)
        for name in self.workloads:
            if not _unrelated(name, self.workloads):
                raise InputError(f"{self.name}: no workload is of another family than {name}; name one that is")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns the step times of each variant, measure and workload, and their means."""
        methods.warm_up()
        inputs = _BatchInputs(self.workloads)
        runs = _Runs(self, rows, say, inputs)
        for seed in range(self.seeds):
            if MODULE in self.choices:
                self._measure_modules(runs, seed)
            if OP in self.choices:
                for variant in _variants(OP, seed):
                    runs.train_on_all(variant)
        outcomes = runs.outcomes
        labels = list(dict.fromkeys(variant.label for variant, _, _ in outcomes.times_ns))
        experts = inputs.experts_ns
        return {
            "experts_ns": experts,
            "labels": labels,
            "measures": MEASURES,
            "batch_measures": (BATCH_BEST, BATCH, BATCH_DRAWN),
            "num_samples": NUM_SAMPLES,
            "num_drawn": NUM_DRAWN,
            "tuning_seconds": TUNING_SECONDS,
            "rewards": runs.rewards,
            "cpu_seconds": sum(runs.seconds),
            "means": {m: {label: outcomes.mean(label, m, experts) for label in labels} for m in MEASURES},
            "pairs": _pairs(outcomes, labels, self.workloads),
            "tables": {
                label: {name: {m: outcomes.cell(label, m, name) for m in MEASURES} for name in self.workloads}
                for label in labels
            },
            "runs": [
                {
                    "variant": variant.label,
                    "seed": variant.seed,
                    "measure": m,
                    "workload": name,
                    "step_time_ns": time_ns,
                }
                for (variant, m, name), time_ns in outcomes.times_ns.items()
            ],
        }

    def _measure_modules(self, runs: "_Runs", seed: int) -> None:
        for variant in _variants(MODULE, seed):
            runs.train_on_all(variant)
        for name in self.workloads:
            for variant in _variants(MODULE, seed):
                runs.control(variant, name)
                runs.hold_out(variant, name)
        for variant in _variants(MODULE, seed, PYTORCH):
            runs.train_on_all(variant)


class _BatchInputs:
    """The problems of the workloads, built when they are first asked for."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._questions: dict[tuple[str, str], Question] = {}

    @cached_property
    def problems(self) -> dict[str, Problem]:
        return {name: Problem.build(*graphs.workload_inputs(name)) for name in self.names}

    @cached_property
    def experts_ns(self) -> dict[str, int]:
        return {name: expert_ns(problem) for name, problem in self.problems.items()}

    def question(self, choice: str, name: str) -> Question:
        """Returns the question about a workload with a choice for each op or module."""
        if (choice, name) not in self._questions:
            problem = self.problems[name]
            problem = methods.by_module(problem) if choice == MODULE else problem
            self._questions[choice, name] = Question.about(problem, num_threads=1)
        return self._questions[choice, name]


@dataclass(eq=False)
class _Runs:
    """Makes rows, or finds them, and takes their step times into `outcomes`."""

    benchmark: PublishedBatchBenchmark
    rows: Rows
    say: Say
    inputs: _BatchInputs
    outcomes: _StepTimes = field(default_factory=_StepTimes)
    seconds: list[float] = field(default_factory=list)  # of processor, of each row
    rewards: list[dict[str, Any]] = field(default_factory=list)  # of trainings on all workloads

    def train_on_all(self, variant: Variant) -> None:
        """Trains on all workloads, and judges the policy on each."""
        row, _ = self._batch(variant, self.inputs.names, "all")
        for name, found in row["workloads"].items():
            self._take(variant, name, {BATCH: found["likeliest_ns"], BATCH_DRAWN: found["drawn_ns"]})
            self._take(variant, name, {BATCH_BEST: found["best_ns"]})
            own = {"label": variant.label, "seed": variant.seed, "workload": name}
            rewards, part = found["rewards"], max(len(found["rewards"]) // 4, 1)
            first, last = (sum(some) / part for some in (rewards[:part], rewards[-part:]))
            self.rewards.append({**own, "first": first, "last": last, "rewards": rewards})

    def hold_out(self, variant: Variant, name: str) -> None:
        """Trains on the workloads of other families, and judges and fine-tunes the policy on `name`."""
        batch, checkpoint = self._batch(variant, _unrelated(name, self.inputs.names), f"without-{name}")

        def trained() -> Policy:
            policy = variant.new_policy()
            read_checkpoint(checkpoint).fill(policy)
            return policy

        row = self._tune(variant, name, f"{variant.key}-held-out-{name}", trained, batch)
        self._take(variant, name, {HELD_OUT: row["likeliest_ns"], HELD_OUT_DRAWN: row["drawn_ns"]})
        self._take(variant, name, {TUNED: _end_ns(row["curve"])})

    def control(self, variant: Variant, name: str) -> None:
        """Trains the policy on `name` alone, and draws as many placements at random."""
        row = self._tune(variant, name, f"{variant.key}-untrained-{name}", variant.new_policy)
        question = self.inputs.question(variant.choice, name)
        count = NUM_DRAWN + self.benchmark.updates * NUM_SAMPLES
        random_ns = best_of_random(replace(question, seed=variant.seed), count)
        self._take(variant, name, {RANDOM: random_ns, UNTRAINED: row["drawn_ns"], ALONE: _end_ns(row["curve"])})

    def _batch(self, variant: Variant, names: Sequence[str], part: str) -> tuple[dict[str, Any], Path]:
        """Returns the row of a training on `names`, and the checkpoint that it left."""
        path = self.rows.directory / f"{variant.key}-{part}.safetensors"

        def train() -> dict[str, Any]:
            began, policy = process_time(), variant.new_policy()
            questions = {name: self.inputs.question(variant.choice, name) for name in names}
            found = train_on_batch(
                policy, questions, num_updates=self.benchmark.updates, num_samples=NUM_SAMPLES, seed=variant.seed
            )
            seconds = process_time() - began
            for name, question in questions.items():
                found[name] |= judge(policy, replace(question, seed=variant.seed), num_samples=NUM_DRAWN)
            save_checkpoint(path, policy, {"graphs": [{"name": name} for name in names]})
            return {"workloads": found, "cpu_seconds": seconds}

        settings = {"updates": self.benchmark.updates, "samples": NUM_SAMPLES, "graphs": self._fingerprints(names)}
        row = self._row(f"{variant.key}-{part}", settings, train)
        if not path.is_file():
            raise InputError(
                f"{path}: is gone, and its row is there; delete {path.with_suffix('.json')} to train again"
            )
        return row, path

    def _tune(
        self, variant: Variant, name: str, key: str, make: Any, batch: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the row of a policy on `name`: judged as `make` gives it, then fine-tuned."""

        def tune() -> dict[str, Any]:
            began, policy = process_time(), make()
            question = replace(self.inputs.question(variant.choice, name), seed=variant.seed)
            judged = judge(policy, question, num_samples=NUM_DRAWN)
            clock = PatientClock(Budget(seconds=TUNING_SECONDS), patience=_NEVER)
            solution = train_published(
                replace(question, on_progress=clock.note),
                clock,
                policy,
                num_drawn=NUM_DRAWN,
                at_a_time=NUM_DRAWN,
                max_updates=self.benchmark.updates,
            )
            if clock.stop.is_set():
                raise KeyboardInterrupt
            if solution.best is not None:
                clock.note(solution.best)
            points, seconds = clock.improvements.points, process_time() - began
            return {**judged, "curve": points, "updates": solution.num_updates, "cpu_seconds": seconds}

        settings = {
            "updates": self.benchmark.updates,
            "seconds": TUNING_SECONDS,
            "graphs": self._fingerprints([name]),
            "trained": dict(batch or {}),
        }
        return self._row(key, settings, tune)

    def _row(self, key: str, settings: Mapping[str, Any], make: Any) -> dict[str, Any]:
        row = self.rows.row(key, settings, make)
        self.seconds.append(row["cpu_seconds"])
        self.say(f"{key}: {row['cpu_seconds']:.0f} s")
        return row

    def _fingerprints(self, names: Sequence[str]) -> list[list[str]]:
        problems = [self.inputs.problems[name] for name in names]
        return [[problem.graph.fingerprint, problem.cluster.fingerprint] for problem in problems]

    def _take(self, variant: Variant, name: str, times_ns: Mapping[str, int | None]) -> None:
        for measure, time_ns in times_ns.items():
            self.outcomes.times_ns[variant, measure, name] = time_ns


_NEVER = 10**12  # evaluations that bring nothing


def _pairs(outcomes: _StepTimes, labels: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the comparisons that the paper's claims and the controls ask for."""
    asked = []
    for label in labels:
        asked += [((label, one), (label, other)) for one, other in PAIRS]
        without = label.replace("with superposition", "without superposition")
        if without != label:
            asked += [((label, measure), (without, measure)) for measure in MEASURES if measure != RANDOM]
    found = [outcomes.compare(one, other, names) for one, other in asked]
    return [pair for pair in found if pair is not None]


def _unrelated(name: str, names: Sequence[str]) -> list[str]:
    """Returns those of `names` that are of other families than the workload `name`, and not like it."""
    relatives = with_relatives(workloads.get(name).family)
    return [other for other in names if workloads.get(other).family not in relatives]


def _variants(choice: str, seed: int, initial: str = GLOROT) -> tuple[Variant, ...]:
    return tuple(Variant(choice, superposition, seed, initial) for superposition in (True, False))


def _end_ns(curve: Sequence[Sequence[Any]]) -> int | None:
    """Returns the last step time of a curve; None where nothing fits."""
    return int(curve[-1][2]) if curve else None
