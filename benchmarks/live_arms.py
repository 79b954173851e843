"""The arms of benchmark `live`: each says which plan is measured next, and keeps what it has measured.

    tune, order of predictions, random   candidates of `gdp tune`; each is measured once for all arms
    HDP, GDP                             a device for each module, drawn by a policy that learns from measured steps

A policy has a control that draws as it does and learns nothing.
"""

import time
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gdp_batch import train_on_batch
from benchmarks.gdp_policy.paper_policy import paper_policy
from benchmarks.gdp_policy.training import PPO, paper_rewards
from benchmarks.hdp import HdpConfig, hdp
from benchmarks.own_steps import MeasuredSubject, OwnSteps
from gdp.arrays import I64
from gdp.budget import Budget, Clock
from gdp.errors import InputError, first_line
from gdp.execute.measurement import Order, PlacedProgram, measure_programs
from gdp.execute.plan_executor import ExecutionError
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.policy.scheduler import Policy, one_thread
from gdp.policy.training.ppo import Trials, improve
from gdp.search.candidate import Candidate
from gdp.search.ops.good_order import in_program_order
from gdp.search.question import Question
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER
from gdp.tune.candidates import OWN
from gdp.tune.measuring import FAILED, OK, Measured, noise_of_median
from gdp.tune.placing import Placing
from gdp.tune.tuning import Tuning

TUNE, ORDER, RANDOM = "tune", "order of predictions", "random"
HDP, HDP_CONTROL = "HDP", "HDP, learning nothing"
GDP, TUNED, TUNED_CONTROL = "GDP", "GDP, pre-trained", "GDP, pre-trained, learning nothing"
LEARNED = HDP, HDP_CONTROL, GDP, TUNED, TUNED_CONTROL

NUM_SAMPLES = 4  # placements of an update, as in HDP's paper
_NUM_PRETRAINED = 16  # the same in simulation
_NOTHING = 1e-12  # a learning rate
_SEED = 0


class LiveTrial(NamedTuple):
    """A measurement of an arm."""

    plan: str  # its name
    step_ns: float  # infinite where it failed
    seconds: float  # that choosing and measuring it took


@dataclass(eq=False)
class LiveRun:
    """The measurements of an arm, and its answer: the fastest measured plan unless it says otherwise."""

    trials: list[LiveTrial] = field(default_factory=list)
    num_updates: int = 0
    own_answer: str = ""
    ended: str = ""  # why, in words

    def fastest(self, count: int | None = None, *, seconds: float = inf) -> LiveTrial | None:
        """Returns the fastest of the first `count` trials that were done in `seconds`; None where none ran."""
        ends = np.cumsum([trial.seconds for trial in self.trials])
        done = [trial for trial, end in zip(self.trials[:count], ends, strict=False) if end <= seconds]
        return min((trial for trial in done if trial.step_ns < inf), key=lambda trial: trial.step_ns, default=None)

    @property
    def answer(self) -> str:
        """The name of the plan; "" where none ran."""
        fastest = self.fastest()
        return self.own_answer or ("" if fastest is None else fastest.plan)

    @property
    def seconds(self) -> float:
        """The time of all trials."""
        return sum(trial.seconds for trial in self.trials)


class LivePlan(NamedTuple):
    """A plan as it is run."""

    layout: Mapping[str, Any] | None  # None: the step is not cut
    order: Order

    def document(self) -> dict[str, Any]:
        """Returns the plan for a row."""
        return {"layout": self.layout, "order": [np.asarray(ops).tolist() for ops in self.order]}


@dataclass(eq=False)
class LivePlans:
    """Plans of a subject by name, which are run on this host: programs are made when they are."""

    subject: MeasuredSubject
    num_steps: int  # of a measurement, after one that warms up
    by_name: dict[str, LivePlan] = field(default_factory=dict)
    _known: dict[tuple[str, int], tuple[Measured, float]] = field(default_factory=dict)

    def own_steps(self, name: str) -> OwnSteps:
        """Returns the steps of a plan, in processes of their own. InputError where it cannot be run."""
        layout, order = self.by_name[name]
        step = Step.of_document(self.subject.parts.exact, layout or Layout().document())
        program = self.subject.program(step)
        return OwnSteps(program, order, self.subject.content(program), self.subject.targets)

    def measure(self, name: str) -> tuple[Measured, float]:
        """Measures a plan; returns the seconds that it took, too."""
        began = time.monotonic()
        try:
            own = self.own_steps(name)
            placed = {name: PlacedProgram(own.program, own.content, own.order)}
            found = measure_programs(placed, own.targets, steps=self.num_steps, warm_up_steps=1)[name]
            (low, high), median = found.step_quartiles_ns, found.median_step_ns
            measured = Measured(OK, median, noise_of_median(low, median, high, self.num_steps))
        except (ExecutionError, InputError, MemoryError) as error:
            measured = Measured(FAILED, reason=first_line(error))
        return measured, time.monotonic() - began

    def measured(self, name: str, earlier: int = 0) -> tuple[Measured, float]:
        """Returns a measurement that all arms share, after `earlier` ones of the plan."""
        if (name, earlier) not in self._known:
            self._known[name, earlier] = self.measure(name)
        return self._known[name, earlier]


class TunedPlans(NamedTuple):
    """The runs of arms that measure candidates, by arm, and the predicted times in ns of all candidates, by name."""

    runs: dict[str, LiveRun]
    predicted_ns: dict[str, int]
    own: str  # the name of the plan of `place`


def run_on_candidates(plans: LivePlans, placing: Placing, most: int) -> TunedPlans:
    """Returns the runs of the arms that measure candidates of `gdp tune`, `most` at most. They are measured in random
    order first, so that a machine whose pace drifts favours none. All arms but `tune` answer after as many as it took,
    of the candidates that were there at first."""
    pool = placing.candidates({})
    tuning = Tuning.begin(placing.directory, {}, pool, placing.numbers)

    def name_of(number: int) -> str:
        name = f"{number}: {tuning.candidates[number].name}"
        if name not in plans.by_name:
            plan = Plan.load(placing.directory / str(number) / "plan.json")
            plans.by_name[name] = LivePlan(plan.layout, plan.order)
        return name

    def trial(number: int) -> LiveTrial:
        measured, seconds = plans.measured(name_of(number))
        return LiveTrial(name_of(number), measured.step_ns, seconds)

    shuffled = np.random.default_rng(_SEED).permutation(len(pool))[:most]
    runs = {RANDOM: LiveRun([trial(number) for number in shuffled.tolist()]), TUNE: LiveRun()}
    counts = Counter[int]()

    def measure(path: Path) -> Measured:
        number = int(path.name)
        measured, seconds = plans.measured(name_of(number), counts[number])
        counts[number] += 1
        runs[TUNE].trials.append(LiveTrial(name_of(number), measured.step_ns, seconds))
        return measured

    tuning.run(measure, most=most, ends_s=inf, on_measured=lambda _: None, placing=placing)
    runs[TUNE].own_answer = "" if tuning.answer is None else name_of(tuning.answer)
    runs[TUNE].ended = tuning.ended
    runs[ORDER] = LiveRun([trial(number) for number in range(min(len(pool), most))])
    for arm in (RANDOM, ORDER):
        fastest = runs[arm].fastest(len(runs[TUNE].trials))
        runs[arm].own_answer = "" if fastest is None else fastest.plan
    predicted_ns = {name_of(number): row.predicted_ns for number, row in enumerate(tuning.candidates)}
    return TunedPlans(runs, predicted_ns, next(name_of(n) for n, row in enumerate(pool) if row.name == OWN))


@dataclass(eq=False)
class MeasuredRewards:
    """Measures placements of a reduced problem in place of the simulator, and keeps the trials of an arm."""

    plans: LivePlans
    question: Question
    name: str
    run: LiveRun = field(default_factory=LiveRun)
    _since: float = field(default_factory=time.monotonic)

    def __call__(self, problem: Problem, placements: I64) -> tuple[I64, I64]:
        """Returns (step times [S], peaks [S, D]); a placement that fails is beyond all limits."""
        times, peaks = np.full(len(placements), NEVER), np.zeros((len(placements), problem.num_devices), np.int64)
        for row, placement in enumerate(placements):
            name = f"{self.name} {len(self.run.trials)}"
            self.plans.by_name[name] = LivePlan(None, self._order(problem, placement))
            measured, _ = self.plans.measure(name)
            now = time.monotonic()
            self.run.trials.append(LiveTrial(name, measured.step_ns, now - self._since))
            self._since = now
            if measured.status == OK:
                times[row] = round(measured.step_ns)
            else:
                peaks[row] = problem.memory_limit_bytes + 1
        return times, peaks

    def _order(self, problem: Problem, placement: I64) -> Order:
        return in_program_order(self.question.replay(Candidate(placement, order=problem.order)).replay).order


def run_hdp(rewards: MeasuredRewards, most: int, *, learns: bool) -> LiveRun:
    """Returns the run of HDP from scratch on measured rewards."""
    config = HdpConfig() if learns else HdpConfig(learning_rate=_NOTHING)
    with one_thread():
        clock = Clock(Budget(simulations=most))
        rewards.run.num_updates = hdp(rewards.question, clock, config=config, evaluate=rewards).num_updates
    return rewards.run


@one_thread()
def run_gdp(rewards: MeasuredRewards, policy: Policy, most: int, *, learns: bool) -> LiveRun:
    """Returns the run of GDP's policy as published on measured rewards: its likeliest placement, then updates, each
    after placements that it draws. A copy of `policy` learns."""
    policy, question = deepcopy(policy), rewards.question
    rng = np.random.default_rng(np.random.SeedSequence([question.seed, 0x11FE]))
    problem = question.reduction.problem
    instance = policy.instance(problem, rng)
    optimizer = torch.optim.Adam(policy.parameters(), lr=policy.learning_rate if learns else _NOTHING)
    rewards(problem, policy.sample(instance, 1, rng, temperature=0.0).placements)
    earlier = list[float]()  # mean reward of each update
    while (left := most - len(rewards.run.trials)) > 0:
        rollouts = policy.sample(instance, min(NUM_SAMPLES, left), rng)
        times, peaks = rewards(problem, rollouts.placements)
        fits = np.all(peaks <= problem.memory_limit_bytes, axis=1)
        trials = Trials(instance, rollouts, times, peaks, fits, paper_rewards(times, fits), 1)
        improve(policy, optimizer, [trials], PPO, baselines=[float(np.mean(earlier)) if earlier else None])
        earlier.append(float(trials.rewards.mean()))
    rewards.run.num_updates = len(earlier)
    return rewards.run


def new_policy() -> Policy:
    """Returns GDP's policy as published, untrained."""
    return paper_policy(_SEED, initial="glorot")


def pretrained(questions: Mapping[str, Question], num_updates: int) -> Policy:
    """Returns GDP's policy as published, trained in simulation on a batch of graphs."""
    policy = new_policy()
    if questions:
        train_on_batch(policy, questions, num_updates=num_updates, num_samples=_NUM_PRETRAINED, seed=_SEED)
    return policy
