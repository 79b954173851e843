"""Benchmark `live`: `gdp tune` and learned placement where an evaluation is a measured step, on two processor cores.

measure devices -> candidates of `gdp tune`, and a policy pre-trained in simulation on the other models
                -> each arm of `live_arms` measures as many plans
                -> the answers of all arms, DDP and FSDP take steps in turn
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.execution_against import rival_setting, two_cores
from benchmarks.figures import dot_plot
from benchmarks.live_arms import (
    GDP,
    HDP,
    HDP_CONTROL,
    LEARNED,
    NUM_SAMPLES,
    ORDER,
    RANDOM,
    TUNE,
    TUNED,
    TUNED_CONTROL,
    LivePlan,
    LivePlans,
    LiveRun,
    LiveTrial,
    MeasuredRewards,
    new_policy,
    pretrained,
    run_gdp,
    run_hdp,
    run_on_candidates,
)
from benchmarks.methods import by_module
from benchmarks.own_steps import MeasuredSubject, OwnSteps
from benchmarks.page import geometric_mean
from benchmarks.rival_processes import RivalError, RivalProcesses, TrainedStep
from benchmarks.rival_steps import ARMS, DDP, FSDP, RivalSetting
from benchmarks.rows import SEARCH, Rows, code_of
from benchmarks.training_subjects import SUBJECTS as FULL_SUBJECTS
from benchmarks.training_subjects import Subject
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.execute.backends import Target, target_of
from gdp.execute.calibrate.calibrate import calibrate
from gdp.execute.plan_executor import ExecutionError
from gdp.graph import Graph
from gdp.models.pytorch import capture
from gdp.models.source import ModelSource
from gdp.planning.warm_up import warm_up
from gdp.policy.scheduler import Policy
from gdp.search.place import place
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.search.question import Question
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Asked
from gdp.simulator.problem import Problem
from gdp.tune.candidates import OWN
from gdp.tune.placing import Placing

_EIGHT = "resnet-50", "vit", "bert", "gpt2", "deep-speech", "moe", "unet", "clip"
# with half of the batch of `execution-against`: a step takes 0.1 to 0.3 s
SUBJECTS = {name: replace(FULL_SUBJECTS[name], batch_size=FULL_SUBJECTS[name].batch_size // 2) for name in _EIGHT}
COUNTS = 1, 2, 3, 5, 10, 25, 50  # of measurements
BY_LAYER, SINGLE, EXPERT = "expert's placement", "one device", "expert"
RIVALS = DDP, FSDP
_MEASURED = TUNE, ORDER, RANDOM, *LEARNED
ARM_NAMES = OWN, TUNE, ORDER, RANDOM, BY_LAYER, SINGLE, DDP, FSDP, *LEARNED
_QUICK: dict[str, Any] = {"measurements": 4, "repeats": 3, "steps": 2, "pretraining": 1, "budget": Budget(seconds=3.0)}
_WARM_UP = 2  # steps
_FILES = "live", "live_arms", "methods", "hdp", "gdp_batch", "own_steps", "op_times"
_RIVALS_BY = "training_subjects", "rival_steps", "rival_stages", "rival_processes"
_RUN_BY = "gdp/execute", "gdp/tune", "benchmarks/gdp_policy", *(f"benchmarks/{name}.py" for name in _FILES + _RIVALS_BY)
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class LiveBenchmark(Benchmark):
    """Eight models, whose steps are measured as the arms ask for them."""

    name = "live"
    budget: Budget = field(default_factory=lambda: Budget(seconds=20.0))
    workloads: tuple[str, ...] = _EIGHT
    measurements: int = 50  # of each arm
    steps: int = 5  # of a measurement
    repeats: int = 15  # steps of each answer
    pretraining: int = 20  # updates
    quick: bool = False

    def check_workloads(self) -> None:
        pick(self.name, "workload", self.workloads, tuple(SUBJECTS))

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        rows = replace(rows, shared={"code": code_of(*SEARCH, *_RUN_BY)})
        config = replace(self, **_QUICK) if self.quick else self
        devices = two_cores(self.name)
        kept = asdict(config) | {"budget": str(config.budget), "workloads": None}
        settings = {"config": kept, "kinds": [device.kind for device in devices]}
        whole = cache(_whole_graph)
        measured = []
        for name in self.workloads:

            def keep(part: str, make: Callable[[], dict[str, Any]], name: str = name) -> dict[str, Any]:
                say(f"{name}: {part}")
                return rows.row(f"{name}-{part}", settings, partial(_timed, make))

            def measure() -> dict[str, Any]:
                return {"cluster": calibrate(devices, quick=True).cluster.to_document()}

            cluster = Cluster.from_document(keep("devices", measure)["cluster"])
            targets = tuple(map(target_of, devices))
            row = _LiveModel(config, SUBJECTS[name], cluster, targets, whole, keep).row()
            measured.append(row)
            ratio, taken = ratio_of(row, OWN, TUNE), len(row["arms"][TUNE]["trials"])
            say(f"{name}: place's plan takes {ratio:.2f} of the answer after {taken} measurements")
        return {
            "rows": measured,
            "config": kept,
            "num_samples": NUM_SAMPLES,
            "arms": ARM_NAMES,
            "means": {arm: mean_ratio(measured, arm, TUNE) for arm in (*ARM_NAMES, EXPERT)},
            "counts": [count for count in COUNTS if count <= config.measurements],
            "curves": _curves(measured, [count for count in COUNTS if count <= config.measurements]),
            "claims": _claims(measured),
            "minutes": sum(row["seconds"] for row in measured) / 60,
            "load": max(row["load"] for row in measured),
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        names = [arm for arm in ARM_NAMES if arm != TUNE]
        dots = {arm: [ratio for row in measured["rows"] if (ratio := ratio_of(row, arm, TUNE))] for arm in names}
        return dot_plot("Measured steps", "step time over that of tune's answer; a dot for each model", dots)


def _whole_graph(name: str) -> Graph:
    """Returns the step of the whole batch of a subject."""
    subject = SUBJECTS[name]
    args, kwargs = subject.inputs()[0]
    return capture(subject.module(), args, kwargs, name=name).graph


def _timed(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `make` returns, with the seconds that it took, and the load of the machine before and after."""
    began, load = time.monotonic(), os.getloadavg()[0]
    return {**make(), "seconds": time.monotonic() - began, "load": max(load, os.getloadavg()[0])}


@dataclass(frozen=True, eq=False)
class _LiveModel:
    """A model on two cores, whose devices were measured."""

    config: LiveBenchmark
    subject: Subject
    cluster: Cluster
    targets: Sequence[Target]
    graph_of: Callable[[str], Graph]  # other models, whose placement the policy is pre-trained on
    keep: Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]  # makes a part of a row, or finds it

    def row(self) -> dict[str, Any]:
        """Returns what all arms measured, and the steps of their answers in turn."""
        candidates = self.keep("candidates", self._candidates)
        arms, plans, answers = (dict(candidates[key]) for key in ("arms", "plans", "answers"))
        parts = [candidates]
        for arm in LEARNED:
            parts.append(self.keep(arm, partial(self._learned, arm)))
            arms[arm] = parts[-1]["run"]
            plans |= parts[-1]["plans"]
            answers |= zip([arm], parts[-1]["plans"], strict=False)  # none where no placement ran
        parts.append(self.keep("answers", partial(self._in_turn, plans, answers)))
        return {
            **candidates,
            "workload": self.subject.name,
            "kind": self.subject.kind,
            "batch_size": self.subject.batch_size,
            "arms": arms,
            "answers": answers,
            "final": parts[-1]["final"],
            "load": max(part["load"] for part in parts),
            "seconds": sum(part["seconds"] for part in parts),
        }

    @cached_property
    def _plans(self) -> LivePlans:
        measured = MeasuredSubject(self.subject, self.cluster, self.targets, num_steps=0)
        return LivePlans(measured, self.config.steps)

    def _candidates(self) -> dict[str, Any]:
        """Returns the runs of the arms that measure candidates, and the plans that they and others answer with."""
        config, plans = self.config, self._plans
        warm_up(("auto",))
        with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
            placing = Placing(
                question=self._placed,
                cluster=self.cluster,
                source=ModelSource(self.subject.name),  # which only exports read
                asked=Asked(self.subject.name),
                directory=Path(scratch),
                budget=config.budget,
                has_orders=True,
            )
            tuned = run_on_candidates(plans, placing, config.measurements)
        answers = {arm: run.answer for arm, run in tuned.runs.items() if run.answer} | {OWN: tuned.own}
        graph = plans.subject.parts.exact(1)
        for arm, placer in ((BY_LAYER, "expert"), (SINGLE, "single")):
            with suppress(InputError):  # it finds no placement
                plan = place(graph, self.cluster, placer=placer, budget="1sims", robust=0.0)
                plans.by_name[arm] = LivePlan(None, plan.order)
                answers[arm] = arm
        return {
            "num_ops": graph.num_ops,
            "predicted_ns": tuned.predicted_ns,
            "arms": {arm: _document(run) for arm, run in tuned.runs.items()},
            "answers": answers,
            "plans": {name: plans.by_name[name].document() for name in answers.values()},
        }

    def _placed(self, cluster: Cluster) -> PlaceQuestion:
        options = SearchOptions(seed=_SEED, robust=0.0)
        question = PlaceQuestion.of(self._plans.subject.parts, cluster, Constraints(), None, None, options)
        question.prepare()
        return question

    def _learned(self, arm: str) -> dict[str, Any]:
        """Returns the run of a policy on measured rewards, with a choice for each module."""
        most, asked = self.config.measurements, self._question(self._plans.subject.parts.exact(1))
        policy = self._policy if arm in (TUNED, TUNED_CONTROL) else new_policy()
        rewards = MeasuredRewards(self._plans, asked, arm)
        if arm in (HDP, HDP_CONTROL):
            run = run_hdp(rewards, most, learns=arm == HDP)
        else:
            run = run_gdp(rewards, policy, most, learns=arm != TUNED_CONTROL)
        names = [run.answer] if run.answer else []
        return {"run": _document(run), "plans": {name: self._plans.by_name[name].document() for name in names}}

    @cached_property
    def _policy(self) -> Policy:
        """GDP's policy, trained in simulation on the other models."""
        others = [name for name in SUBJECTS if name != self.subject.name]
        questions = {name: self._question(self.graph_of(name)) for name in others}
        return pretrained(questions, self.config.pretraining)

    def _question(self, graph: Graph) -> Question:
        return Question.about(by_module(Problem.build(graph, self.cluster)), seed=_SEED, num_threads=1)

    def _in_turn(self, plans: Mapping[str, Mapping[str, Any]], answers: Mapping[str, str]) -> dict[str, Any]:
        """Returns the step times of all answers and rivals, by arm."""
        self._plans.by_name |= {name: LivePlan(**document) for name, document in plans.items()}
        own = {name: self._plans.own_steps(name) for name in dict.fromkeys(answers.values())}
        cores = [target.cores for target in self.targets]
        times = steps_in_turn(own, rival_setting(self._plans.subject), RIVALS, cores, self.config.repeats)
        final = {arm: times[name] for arm, name in answers.items() if name in times}
        return {"final": final | {arm: times[arm] for arm in RIVALS if arm in times}}


def steps_in_turn(
    own: Mapping[str, OwnSteps],
    setting: RivalSetting,
    rivals: Iterable[str],
    cores: Sequence[Sequence[int]],
    repeats: int,
) -> dict[str, list[int]]:
    """Returns the times in ns of `repeats` steps of each plan and rival, of a rival those of its fastest variant. All
    take a step in each turn, in an order drawn anew; one that fails is left out."""
    times: dict[tuple[str, str], list[int]] = {}
    random = np.random.default_rng(_SEED)
    with ExitStack() as stack:
        turns: dict[tuple[str, str], Callable[[], TrainedStep]] = {
            (name, ""): stack.enter_context(steps).step for name, steps in own.items()
        }
        for rival in rivals:
            processes = stack.enter_context(RivalProcesses(rival, setting, cores))
            turns |= {(rival, variant): partial(processes.step, variant) for variant in ARMS[rival].variants}
        if gc.isenabled():  # garbage is collected between steps, as the other processes do
            stack.callback(gc.enable)
        gc.disable()
        for number in range(-_WARM_UP, repeats):
            keys = list(turns)
            for place_of_key in random.permutation(len(keys)).tolist():
                key = keys[place_of_key]
                try:
                    step = turns[key]()
                except (RivalError, ExecutionError):
                    del turns[key]
                    times.pop(key, None)
                    continue
                if number >= 0:
                    times.setdefault(key, []).append(step.time_ns)
            gc.collect(0)
    fastest: dict[str, list[int]] = {}
    for (name, _), steps_ns in times.items():
        if name not in fastest or np.median(steps_ns) < np.median(fastest[name]):
            fastest[name] = steps_ns
    return fastest


def _document(run: LiveRun) -> dict[str, Any]:
    trials = [(trial.plan, None if trial.step_ns == inf else trial.step_ns, trial.seconds) for trial in run.trials]
    return {**asdict(run), "trials": trials}


def _run_of(row: Mapping[str, Any], arm: str) -> LiveRun:
    document = row["arms"][arm]
    trials = [
        LiveTrial(plan, inf if step_ns is None else step_ns, seconds) for plan, step_ns, seconds in document["trials"]
    ]
    return LiveRun(**{**document, "trials": trials})


def _steps_of(row: Mapping[str, Any], arm: str) -> list[int] | None:
    """Returns the steps of an arm in turn; the expert is the faster one of its placement and of one device."""
    final: Mapping[str, list[int]] = row["final"]
    if arm != EXPERT:
        return final.get(arm)
    found = [final[name] for name in (BY_LAYER, SINGLE) if name in final]
    return min(found, key=lambda steps_ns: float(np.median(steps_ns)), default=None)


def ratio_of(row: Mapping[str, Any], arm: str, other: str) -> float | None:
    """Returns the median over turns of the step time of `arm` over that of `other`; None where one has none."""
    one, two = _steps_of(row, arm), _steps_of(row, other)
    return None if not one or not two else float(np.median(np.divide(one, two)))


def mean_ratio(rows: Sequence[Mapping[str, Any]], arm: str, other: str) -> float | None:
    """Returns the geometric mean over models; None where no model has both."""
    ratios = [ratio for row in rows if (ratio := ratio_of(row, arm, other)) is not None]
    return geometric_mean(ratios) if ratios else None


def _curves(rows: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, list[float | None]]:
    """Returns for each arm the fastest measured step after each count, and in the seconds of `tune`, over the measured
    step of tune's answer: geometric means over models; None where an arm has measured none in some model."""

    def ratio(row: Mapping[str, Any], arm: str, count: int | None, seconds: float) -> float | None:
        tune = _run_of(row, TUNE)
        fastest = _run_of(row, arm).fastest(count, seconds=seconds)
        own = [trial.step_ns for trial in tune.trials if trial.plan == tune.answer and trial.step_ns < inf]
        return None if fastest is None or not own else fastest.step_ns / float(np.median(own))

    def mean(arm: str, count: int | None, *, is_equal_time: bool = False) -> float | None:
        limits = [_run_of(row, TUNE).seconds if is_equal_time else inf for row in rows]
        ratios = [ratio(row, arm, count, limit) for row, limit in zip(rows, limits, strict=True)]
        known = [each for each in ratios if each is not None]
        return geometric_mean(known) if len(known) == len(rows) else None

    return {
        arm: [*(mean(arm, count) for count in counts), mean(arm, None, is_equal_time=True)]
        for arm in _MEASURED
        if all(arm in row["arms"] for row in rows)
    }


def _claims(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of the paper's four claims, with their controls: ratios of step times, above 1 where the
    first is slower, and numbers of measurements until an arm is as fast as HDP is after all of its own."""

    def needed(row: Mapping[str, Any], arm: str) -> int | None:
        target = _run_of(row, HDP).fastest()
        times = [trial.step_ns for trial in _run_of(row, arm).trials]
        reached = [number for number, time_ns in enumerate(times, 1) if target and time_ns <= target.step_ns]
        return reached[0] if reached else None

    counts = {arm: [needed(row, arm) for row in rows] for arm in _MEASURED}
    fewer = {}
    for arm, own in counts.items():
        pairs = [(of_hdp, count) for of_hdp, count in zip(counts[HDP], own, strict=True) if of_hdp and count]
        fewer[arm] = geometric_mean([of_hdp / count for of_hdp, count in pairs]) if pairs else None
    return {
        "expert": {arm: mean_ratio(rows, EXPERT, arm) for arm in (TUNE, OWN, RANDOM, TUNED, GDP)},
        "hdp": {arm: mean_ratio(rows, HDP, arm) for arm in (TUNE, OWN, RANDOM, TUNED, GDP, HDP_CONTROL)},
        "needed": counts,
        "fewer": fewer,
        "updates": max(_run_of(row, TUNED).num_updates for row in rows),
        "learning": mean_ratio(rows, TUNED_CONTROL, TUNED),
        "hdp_learning": mean_ratio(rows, HDP_CONTROL, HDP),
        "residual": mean_ratio(rows, ORDER, TUNE),
        "pretraining": mean_ratio(rows, GDP, TUNED),
    }
