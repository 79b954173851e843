"""What a trained policy answers at once: few placements, simulated; nothing is trained.

    draw      placements in styles that differ widely            |
    vary      styles near to those that did best                 |  a fixed, small number of simulations
    refine    units of the best placement choose again           |

The simulator scores what the policy draws; the best placement that fits is the answer. N ops of the problem given (best
a reduced one), S samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gdp.budget import Clock
from gdp.graph import I64
from gdp.placers.island import Incumbent
from gdp.placers.memory_repair import excess_bytes, fit_memory
from gdp.placers.refinement import NUM_CANDIDATES, NUM_UNITS, Refiner, candidates_of
from gdp.placers.screening import Screen
from gdp.policy.construction import Constructor
from gdp.policy.styles import Style, draw_style, vary
from gdp.problem import Placement, Problem
from gdp.simulate import evaluate, evaluate_many

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from gdp.policy.base import Policy

OnProgress = Callable[[Incumbent, int], None]

_PARENT = 0.4  # probability that the best style is varied, then the next, and so on


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShotConfig:
    """How the simulations are spent; repairing what does not fit comes on top."""

    num_simulations: int = 64
    num_drawn: int = 16  # of them on styles drawn at random
    num_varied: int = 16  # and on variations of the best ones; what is left refines the best placement
    per_round: int = 4  # what is found goes into the next round
    num_candidates: int = NUM_CANDIDATES  # drawn for each that is simulated, fewer on large graphs
    refinement_units: tuple[int, ...] = NUM_UNITS  # in turn

    def __post_init__(self) -> None:
        if min(self.num_drawn, self.per_round) < 1 or self.num_varied < 0:
            raise ValueError(f"{self}: counts of at least 1 are expected")
        if self.num_drawn + self.num_varied > self.num_simulations:
            raise ValueError(f"{self}: num_simulations is lower than num_drawn and num_varied together")
        if not self.refinement_units:
            raise ValueError(f"{self}: some numbers of units are expected")


@dataclass(frozen=True, eq=False)
class Answer:
    """What a learned placer found."""

    incumbent: Incumbent
    num_simulations: int
    num_updates: int = 0
    curve: tuple[tuple[float, int, int], ...] = ()  # (seconds, simulations, step time in ns) at each gain that fits


@dataclass(eq=False)
class Best:
    """The best placement so far, and how it came."""

    problem: Problem
    clock: Clock
    on_progress: OnProgress | None = None
    num_threads: int | None = None
    num_simulations: int = 0
    curve: list[tuple[float, int, int]] = field(default_factory=list)
    incumbent: Incumbent | None = None
    screen: Screen = field(init=False)

    def __post_init__(self) -> None:
        self.screen = Screen(self.problem)

    @property
    def placement(self) -> Placement:
        """The best one [N]."""
        assert self.incumbent is not None
        return self.incumbent.placement

    @property
    def left(self) -> bool:
        """Whether there is time, and a simulation to spend."""
        return self.at_most(1) > 0 and not self.clock.stop.is_set() and self.clock.seconds_left != 0.0

    def at_most(self, count: int) -> int:
        """`count`, or the simulations that the budget still has if they are fewer."""
        limit = self.clock.budget.simulations
        return count if limit is None else min(count, max(limit - self.num_simulations, 0))

    def try_out(self, placements: I64) -> list[tuple[int, int]]:
        """Simulate `placements` [S, N] and keep the best; what each is compared by."""
        step_time_ns, peaks = evaluate_many(self.problem, placements, num_threads=self.num_threads)
        return self.look(placements, step_time_ns, peaks)

    def look(self, placements: I64, step_time_ns: I64, peak_memory_bytes: I64) -> list[tuple[int, int]]:
        """Count simulated `placements` [S, N], and keep the best; what each is compared by."""
        self.num_simulations += len(placements)
        self.screen.learn(placements, peak_memory_bytes)
        excess = excess_bytes(self.problem, peak_memory_bytes)
        first = int(np.lexsort((step_time_ns, excess))[0])
        found = Incumbent(placements[first], int(step_time_ns[first]), int(excess[first]))
        if self.incumbent is None or found.key < self.incumbent.key:
            self.incumbent = found
            if found.excess_bytes == 0:
                self.curve.append((self.clock.seconds, self.num_simulations, found.step_time_ns))
            if self.on_progress:
                self.on_progress(found, self.num_simulations)
        return list(zip(excess.tolist(), step_time_ns.tolist(), strict=True))

    def answer(self, num_updates: int = 0) -> Answer:
        """What was found; repaired if nothing fitted."""
        assert self.incumbent is not None
        if self.incumbent.excess_bytes > 0:
            placement = fit_memory(self.problem, self.incumbent.placement)
            step_time_ns, peaks = evaluate(self.problem, placement)
            self.look(placement[None], np.array([step_time_ns]), peaks[None])
        return Answer(self.incumbent, self.num_simulations, num_updates, tuple(self.curve))


@dataclass(eq=False)
class Styles:
    """The styles that were tried on a problem, the best first."""

    constructor: Constructor
    problem: Problem
    rng: np.random.Generator
    num_candidates: int
    tried: list[tuple[tuple[int, int], Style]] = field(default_factory=list)

    def draw(self, best: Best, count: int) -> None:
        """Construct in styles at random, and simulate the `count` placements that promise most."""
        self._try_out([draw_style(self.rng) for _ in range(count * self.num_candidates)], best, count)

    def vary(self, best: Best, count: int) -> None:
        """The same in styles near to the best."""
        ranks = np.minimum(self.rng.geometric(_PARENT, count * self.num_candidates) - 1, len(self.tried) - 1)
        self._try_out([vary(self.tried[rank][1], self.rng) for rank in ranks], best, count)

    def _try_out(self, styles: list[Style], best: Best, count: int) -> None:
        placements = np.stack([self._construct(style) for style in styles])
        chosen = best.screen.most_promising(placements, count)
        keys = best.try_out(placements[chosen])
        tried = [(key, styles[number]) for key, number in zip(keys, chosen.tolist(), strict=True)]
        self.tried = sorted([*self.tried, *tried], key=lambda tried: tried[0])

    def _construct(self, style: Style) -> Placement:
        """A placement [N], in a grouping of its own."""
        instance = self.constructor.grouped(self.problem, style.num_units, self.rng, following=style.following)
        placement: Placement = self.constructor.place(instance, [style], self.rng)[0]
        return placement


def zero_shot(
    problem: Problem,
    policy: "Policy | Constructor",
    clock: Clock,
    *,
    seed: int = 0,
    config: ZeroShotConfig | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Answer:
    """The best of a few placements that `policy` draws; it is not changed. Ends early when the clock is up."""
    best = Best(problem, clock, on_progress, num_threads)
    rng, config = np.random.default_rng(seed), config or ZeroShotConfig()
    if isinstance(policy, Constructor):
        construct_at_once(best, policy, rng, config)
    elif policy.constructor is not None:
        construct_at_once(best, policy.constructor, rng, config)
    else:
        sample_at_once(best, policy, rng, config)
    return best.answer()


def construct_at_once(best: Best, constructor: Constructor, rng: np.random.Generator, config: ZeroShotConfig) -> Styles:
    """Let `best` look at what is drawn, varied and refined; the styles that were tried."""
    problem = best.problem
    styles = Styles(constructor, problem, rng, candidates_of(problem, config.num_candidates))
    for count, propose in ((config.num_drawn, styles.draw), (config.num_varied, styles.vary)):
        for begin in range(0, count, config.per_round):
            if best.incumbent is not None and not best.left:
                return styles
            propose(best, max(best.at_most(min(config.per_round, count - begin)), 1))
    refiner = Refiner(problem, constructor, best.screen, config.num_candidates, config.refinement_units)
    while best.left and best.num_simulations < config.num_simulations:
        count = best.at_most(min(config.per_round, config.num_simulations - best.num_simulations))
        best.try_out(refiner.propose(best.placement, count, rng))
    return styles


def sample_at_once(best: Best, policy: "Policy", rng: np.random.Generator, config: ZeroShotConfig) -> None:
    """Let `best` look at the likeliest placement of a policy that knows no styles, and at what it samples."""
    instance = policy.instance(best.problem, rng)
    best.try_out(policy.sample(instance, 1, rng, temperature=0.0).placements)
    while best.left and best.num_simulations < config.num_simulations:
        count = best.at_most(min(config.per_round, config.num_simulations - best.num_simulations))
        best.try_out(policy.sample(instance, count, rng).placements)
