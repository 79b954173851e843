"""Zero-shot placement: a trained policy draws a few placements, which are simulated; nothing is trained.

    draw      placements in styles that differ widely            |
    vary      styles near to those that did best                 |  a number of simulations by the problem's size
    refine    units of the best placement choose again           |

The best draw of the policy that fits, by simulation, is the answer. N ops of the (reduced) problem, S samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gdp.arrays import F32, I64
from gdp.budget import Clock
from gdp.placers.memory_repair import excess_bytes, fit_memory
from gdp.policy.construction import Constructor
from gdp.policy.pretrained import read_policy
from gdp.policy.style_scorer import Style, StyleScores, draw_refinement, draw_styles, style_numbers, vary
from gdp.search.candidate import Candidate, Figures
from gdp.search.question import Question, Solution
from gdp.search.settings import DEFAULTS, PolicySettings
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import NEVER, evaluate_many


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShotConfig:
    """Numbers of simulations; repairing a placement that does not fit comes on top."""

    num_simulations: int = 512
    num_drawn: int = 96  # of them on styles drawn at random
    num_varied: int = 96  # and on variations of the best ones; the rest refines the best placement
    draw_share: float = 1.0  # of the time at most for drawing, and as much for varying
    num_styles: int = DEFAULTS.policy.num_styles  # in each grouping
    num_refined: int = 16  # in each grouping; the next one begins from the best of them

    def __post_init__(self) -> None:
        if min(self.num_drawn, self.num_styles, self.num_refined) < 1 or self.num_varied < 0:
            raise ValueError(f"{self}: counts of at least 1 are expected")
        if self.num_drawn + self.num_varied > self.num_simulations:
            raise ValueError(f"{self}: num_simulations is lower than num_drawn and num_varied together")

    @classmethod
    def sized(cls, problem: Problem, clock: Clock, settings: PolicySettings) -> "ZeroShotConfig":
        """Returns the numbers for `problem`: the fewer, the more ops it has, so that most answers take a second or two.
        They are in proportion to what `clock` has left."""
        by_size = min(
            max(settings.simulated_ops // problem.num_ops, settings.fewest_simulations), settings.most_simulations
        )
        num_simulations = max(clock.at_most(by_size), 1)
        drawn = varied = settings.drawn_share
        if by_size == settings.fewest_simulations:
            drawn, varied = settings.fewest_drawn_share, settings.fewest_varied_share
        num_drawn = min(max(int(drawn * num_simulations), settings.num_styles), num_simulations)
        return cls(
            num_simulations=num_simulations,
            num_drawn=num_drawn,
            num_varied=min(int(varied / drawn * num_drawn), num_simulations - num_drawn),
            draw_share=max(settings.least_draw_share, drawn),
            num_styles=settings.num_styles,
        )


@dataclass(eq=False)
class Evaluator:
    """Simulates placements of the reduced problem, and keeps the best; of equal ones the last, to cross plateaus."""

    question: Question
    clock: Clock
    best: Candidate | None = None

    @property
    def problem(self) -> Problem:
        """The reduced problem."""
        return self.question.reduction.problem

    @property
    def is_over(self) -> bool:
        """True when there is a placement, and it cannot be improved or the clock is up."""
        if self.best is None:
            return False
        reached = self.best.fits and self.best.step_time_ns <= self.question.bound_ns
        return reached or self.clock.is_up or self.problem.num_devices == 1

    @property
    def placement(self) -> Placement:
        """The best placement so far [N]."""
        assert self.best is not None
        return self.best.placement

    def try_out(self, placements: I64, stop_ns: int = NEVER) -> list[Figures]:
        """Simulates `placements` [S, N], each until it must take `stop_ns`; returns their figures."""
        num_threads = self.question.num_threads
        measured = evaluate_many(self.problem, placements, stop_ns=stop_ns, num_threads=num_threads)
        return self.look(placements, *measured)

    def try_to_improve(self, placements: I64) -> None:
        """Simulates `placements` [S, N] until they are known to be worse than the best one, if that fits."""
        self.try_out(placements, self.best.step_time_ns + 1 if self.best is not None and self.best.fits else NEVER)

    def look(self, placements: I64, step_time_ns: I64, peak_memory_bytes: I64) -> list[Figures]:
        """Takes in `placements` [S, N] that were simulated; returns their figures."""
        self.clock.spend(len(placements))
        excess = excess_bytes(self.problem, peak_memory_bytes)
        figures = [Figures(*pair) for pair in zip(excess.tolist(), step_time_ns.tolist(), strict=True)]
        first = min(range(len(figures)), key=figures.__getitem__)
        if self.best is None or figures[first] <= self.best.figures:
            self.best = Candidate(placements[first], figures[first], order=self.problem.order)
            self.question.tell(self.best)
        return figures

    def solution(self, num_updates: int = 0) -> Solution:
        """Returns the best placement, repaired if none fits, as one of the problem as given."""
        assert self.best is not None
        if not self.best.fits:
            self.try_out(fit_memory(self.problem, self.placement)[None])
        return Solution(self.question.replay(self.best), num_updates=num_updates)


@dataclass(eq=False)
class StylePool:
    """Random styles, of which a trained policy takes those first that it expects to suit the problem. The policy learns
    from those that were tried on the problem already."""

    scores: StyleScores
    rng: np.random.Generator
    size: int = DEFAULTS.policy.pool
    styles: list[Style] = field(default_factory=list)
    numbers: F32 = field(default_factory=lambda: np.empty((0, 0), np.float32))  # [S, F] of the styles

    def take(self, count: int, tried: Sequence[tuple[Figures, Style]]) -> list[Style]:
        """Returns `count` styles for one grouping: that of the best style, and the best styles in it. `tried` has the
        styles before them, the best first."""
        if len(self.styles) < count:
            self.styles = draw_styles(max(self.size, count), self.rng)
            self.numbers = style_numbers(self.styles, self.scores.num_devices)
        scores = self.scores
        if len(tried) > 1:
            ranks = (np.arange(len(tried)) + 0.5) / len(tried)
            scores = scores.learn(style_numbers([style for _, style in tried], scores.num_devices), ranks)
        best, order = scores.for_one_grouping(self.styles, self.numbers)
        taken = [replace(self.styles[n], num_units=best.num_units, following=best.following) for n in order[:count]]
        left = np.sort(order[count:])
        self.styles, self.numbers = [self.styles[number] for number in left], self.numbers[left]
        return taken


@dataclass(eq=False)
class Styles:
    """Styles tried on a problem, the best first."""

    constructor: Constructor
    problem: Problem
    rng: np.random.Generator
    settings: PolicySettings
    tried: list[tuple[Figures, Style]] = field(default_factory=list)

    @cached_property
    def pool(self) -> StylePool | None:
        """The pool that a trained policy takes styles from."""
        scores = self.constructor.scores(self.problem)
        return None if scores is None else StylePool(scores, self.rng, self.settings.pool)

    def draw(self, evaluator: Evaluator, count: int) -> None:
        """Simulates placements in `count` styles, random ones or those that the policy takes, in one grouping."""
        styles = draw_styles(count, self.rng) if self.pool is None else self.pool.take(count, self.tried)
        self._try_out(styles, evaluator)

    def vary(self, evaluator: Evaluator, count: int) -> None:
        """Simulates placements in `count` styles near to the best, constructed in one grouping."""
        ranks = np.minimum(self.rng.geometric(self.settings.best_parent, count) - 1, len(self.tried) - 1)
        self._try_out([vary(self.tried[rank][1], self.rng) for rank in ranks], evaluator)

    def _try_out(self, styles: list[Style], evaluator: Evaluator) -> None:
        first = styles[0]
        styles = [replace(style, num_units=first.num_units, following=first.following) for style in styles]
        instance = self.constructor.grouped(self.problem, first.num_units, self.rng, following=first.following)
        placements = self.constructor.place(instance, styles, self.rng)
        chosen = distinct(placements)
        figures = evaluator.try_out(placements[chosen])
        tried = [(found, styles[number]) for found, number in zip(figures, chosen.tolist(), strict=True)]
        self.tried = sorted([*self.tried, *tried], key=lambda tried: tried[0])


def zero_shot(
    question: Question, clock: Clock, *, constructor: Constructor | None = None, config: ZeroShotConfig | None = None
) -> Solution:
    """Returns the best of a few placements that a trained policy draws: that of `constructor`, or of the question. The
    policy does not change. It ends early when the clock is up."""
    constructor = constructor or read_policy(question.checkpoint)
    evaluator, rng = Evaluator(question, clock), np.random.default_rng(question.seed)
    config = config or ZeroShotConfig.sized(evaluator.problem, clock, question.settings.policy)
    draw_at_once(evaluator, constructor, rng, config)
    return evaluator.solution()


def draw_at_once(
    evaluator: Evaluator, constructor: Constructor, rng: np.random.Generator, config: ZeroShotConfig
) -> Styles:
    """Lets `evaluator` look at what is drawn, varied and refined; returns the styles that were tried."""
    problem, clock, spent = evaluator.problem, evaluator.clock, evaluator.clock.simulations
    styles = Styles(constructor, problem, rng, evaluator.question.settings.policy)
    for turn, (count, propose) in enumerate(((config.num_drawn, styles.draw), (config.num_varied, styles.vary)), 1):
        part = clock.until(min(config.draw_share * turn, 1.0))
        for begin in range(0, count, config.num_styles):
            if evaluator.is_over:
                return styles
            if styles.tried and part.is_up:
                break
            propose(evaluator, max(clock.at_most(min(config.num_styles, count - begin)), 1))
    refiner = Refiner(problem, constructor, evaluator.question.settings.policy.refinement_units)
    while not evaluator.is_over and (left := clock.at_most(config.num_simulations + spent - clock.simulations)) > 0:
        evaluator.try_to_improve(refiner.propose(evaluator.placement, min(config.num_refined, left), rng))
    return styles


@dataclass(eq=False)
class Refiner:
    """Refines placements of `problem`: a part of its units, regrouped in each call, chooses devices again."""

    problem: Problem
    constructor: Constructor
    num_units: tuple[int, ...]
    _turn: int = field(default=0, init=False)

    def propose(self, incumbent: Placement, count: int, rng: np.random.Generator) -> I64:
        """Returns 1 to `count` placements [S, N] that differ from `incumbent` [N], if any was found."""
        num_units = self.num_units[self._turn % len(self.num_units)]
        self._turn += 1
        instance = self.constructor.grouped(self.problem, num_units, rng, incumbent=incumbent)
        drawn = self.constructor.place(instance, [draw_refinement(rng) for _ in range(count)], rng)
        changed = drawn[(drawn != incumbent).any(axis=1)]
        return changed[distinct(changed)] if len(changed) else drawn[:1]


def distinct(placements: I64) -> I64:
    """Returns the numbers of the `placements` [S, N] that are not like an earlier one."""
    first = {placement.tobytes(): number for number, placement in reversed(list(enumerate(placements)))}
    return np.sort(np.fromiter(first.values(), np.int64, len(first)))
