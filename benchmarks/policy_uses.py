"""Uses of a policy where a simulation takes long. Each answers a question within a clock, and tells of what it finds.

search       `auto`, which asks no policy
policy       zero-shot on all ops of the step
start        the policy has half of the time that placers leave, the search the rest: `auto` with --checkpoint
part         the policy places two micro-batches of one replica, and all copies follow; then the search
one pass     one roll-out of the style with the best score, without chance; then the search
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from gdp.arrays import I64
from gdp.budget import Budget, Clock, latest_s
from gdp.policy.construction import Constructor
from gdp.policy.features import INITIAL_WEIGHTS
from gdp.policy.pretrained import read_policy, shipped
from gdp.policy.style_scorer import draw_styles, style_numbers
from gdp.search.candidate import Candidate, Figures
from gdp.search.ops.auto import OneReplica, auto
from gdp.search.ops.classical import Few
from gdp.search.ops.good_order import in_good_order
from gdp.search.ops.zero_shot import Evaluator, ZeroShotConfig, draw_at_once, zero_shot
from gdp.search.question import Question
from gdp.search.settings import DEFAULTS
from gdp.search.solvers import solve
from gdp.simulator.problem import Placement, Problem
from gdp.units.reduction import Reduction, reduce

SIMULATIONS = (1, 4, 16, 64)
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the budget
SEARCH, TRAINED, UNTRAINED, START, PART, ONE_PASS = "search", "trained", "untrained", "start", "part", "one pass"
_FEW = 2  # micro-batches that the policy sees of a replica
_ENDLESS = ZeroShotConfig(num_simulations=10**9, num_drawn=SIMULATIONS[-1] // 4, num_varied=SIMULATIONS[-1] // 4)

Use = Callable[[Question, Clock], Candidate | None]


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A step to be placed, and the lower bound that all uses are told of; it is computed before any clock begins."""

    problem: Problem
    bound_ns: int

    def question(self, seed: int) -> Question:
        """Returns the question, not reduced yet."""
        nothing = Reduction.nothing(self.problem)
        return Question(self.problem, nothing, seed=seed, num_threads=1, bound_ns=self.bound_ns)


class StepTimes:
    """The step times that a run tells of, as they become shorter."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: list[tuple[float, int, int]] = []  # seconds, simulations, ns

    def note(self, candidate: Candidate) -> None:
        """Takes in a candidate."""
        self.note_figures(candidate.figures, self._clock.simulations)

    def note_figures(self, figures: Figures, simulations: int) -> None:
        """Takes in the figures of the last one of so many `simulations`."""
        if figures.fits and (not self._told or figures.step_time_ns < self._told[-1][2]):
            self._told.append((self._clock.seconds, simulations, figures.step_time_ns))

    def after(self, count: int) -> int:
        """Returns the step time after `count` simulations; 0 where nothing fits yet."""
        return min((step_ns for _, made, step_ns in self._told if made <= count), default=0)

    def within(self, seconds: float) -> int:
        """Returns the step time within `seconds`; 0 where nothing fits yet."""
        return min((step_ns for at, _, step_ns in self._told if at <= seconds), default=0)

    def document(self, seconds: float) -> dict[str, list[int]]:
        """Returns the step times after each of `SIMULATIONS`, and within each share of `seconds`, the last with what a
        command may be late."""
        ends = [share * seconds if share < 1 else latest_s(seconds) for share in SHARES]
        return {"after": [self.after(count) for count in SIMULATIONS], "within": [self.within(end) for end in ends]}


class _Thorough(Clock):
    """A clock that is not up before as many simulations as are compared."""

    @property
    def is_up(self) -> bool:
        """True when nothing is left, or after `stop`."""
        return super().is_up and (self.stop.is_set() or self.simulations >= SIMULATIONS[-1])


def measured(step: PlacedStep, use: "Use | PolicyUse", seed: int, seconds: float) -> dict[str, list[int]]:
    """Returns the step times of a use within `seconds` of processor time, see `StepTimes.document`."""
    is_policy = isinstance(use, PolicyUse)
    clock = (_Thorough if is_policy else Clock)(Budget(seconds=seconds), timer=time.process_time)
    times = StepTimes(clock)
    question = step.question(seed)
    if use is not USES[SEARCH] or not question.is_large or question.has_time(clock, question.settings.ops.searched):
        question = replace(question, reduction=reduce(step.problem))  # which only a search needs
    if isinstance(use, PolicyUse):
        use.tell(question, clock, times)
    elif best := use(replace(question, on_progress=times.note), clock):
        times.note(best)
    return times.document(seconds)


@dataclass(eq=False)
class _Counter(Evaluator):
    """Tells of each placement by itself, in the order in which a grouping's are simulated."""

    times: StepTimes = field(kw_only=True)

    def look(self, placements: I64, step_time_ns: I64, peak_memory_bytes: I64) -> list[Figures]:
        """Takes in `placements` [S, N] that were simulated."""
        before = self.clock.simulations
        figures = super().look(placements, step_time_ns, peak_memory_bytes)
        for number, each in enumerate(figures, before + 1):
            self.times.note_figures(each, number)
        return figures


@dataclass(frozen=True, eq=False)
class PolicyUse:
    """Zero-shot on all ops of the step, in the order of micro-batches that the search takes. A quarter of the first 64
    placements is drawn, a quarter varied; the others, and all that follow, are refined."""

    make: Callable[[], Constructor]

    def tell(self, question: Question, clock: Clock, times: StepTimes) -> None:
        """Notes the placements in `times`, until the clock is up."""
        evaluator = _Counter(_ordered(question, clock), clock, times=times)
        draw_at_once(evaluator, self.make(), np.random.default_rng(question.seed), _ENDLESS)


def _ordered(question: Question, clock: Clock) -> Question:
    """Returns the question in a good order of micro-batches, without the stages that it was found with."""
    return replace(in_good_order(question, clock), known=())


def untrained() -> Constructor:
    """Returns the policy before training: weights set by hand, random styles."""
    return Constructor.of(np.array(INITIAL_WEIGHTS, np.float32))


def _search(question: Question, clock: Clock) -> Candidate | None:
    return solve("auto", question, clock).best


def _start(question: Question, clock: Clock) -> Candidate | None:
    return solve("auto", replace(question, checkpoint=shipped()), clock).best


def _part(question: Question, clock: Clock) -> Candidate | None:
    asked = in_good_order(question, clock)
    return _searched_from(asked, _placed_by_part(asked, clock.part(0.5)), clock)


def _one_pass(question: Question, clock: Clock) -> Candidate | None:
    asked, rng, policy = in_good_order(question, clock), np.random.default_rng(question.seed), read_policy()
    problem = asked.reduction.problem
    scores, styles = policy.scores(problem), draw_styles(DEFAULTS.policy.pool, rng)
    assert scores is not None, "the policy that comes with gdp has learned some"
    style, _ = scores.for_one_grouping(styles, style_numbers(styles, problem.num_devices))
    style = replace(style, temperature=0.0)
    units = policy.grouped(problem, style.num_units, rng, following=style.following)
    return _searched_from(asked, asked.reduction.expand(policy.place(units, [style], rng)[0]), clock)


def _placed_by_part(question: Question, clock: Clock) -> Placement:
    """Returns the placement [N] with all copies of an op where the policy has it in the part that is simulated."""
    one = OneReplica.of(question.problem)
    problem = question.problem if one is None else one.problem
    few = Few.of(problem, _FEW)
    part = Question.about(problem if few is None else few.problem, seed=question.seed, num_threads=1)
    found = zero_shot(part, clock, constructor=read_policy(), config=_ENDLESS).best
    assert found is not None, "it draws one placement at least"
    placement = found.placement if few is None else few.expand(found.placement)
    return placement if one is None else one.expand(placement)


def _searched_from(question: Question, placement: Placement, clock: Clock) -> Candidate | None:
    """Returns the best that `auto` finds with `placement` [N] among its starts."""
    order = question.problem.order
    found = [question.try_orders(placement, (order,)), question.judge_with_transfers(placement, order)]
    for candidate in found:
        clock.spend(1)
        question.tell(candidate)
    best = auto(replace(question, starts=(min(found),)), clock).best
    return min(filter(None, (best, *found)))


USES: Mapping[str, Use | PolicyUse] = MappingProxyType(
    {
        SEARCH: _search,
        TRAINED: PolicyUse(read_policy),
        UNTRAINED: PolicyUse(untrained),
        START: _start,
        PART: _part,
        ONE_PASS: _one_pass,
    }
)
