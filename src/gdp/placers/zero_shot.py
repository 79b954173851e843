"""What a trained policy answers at once: few placements, simulated; nothing is trained.

    draw      placements in styles that differ widely            |
    vary      styles near to those that did best                 |  a fixed, small number of simulations
    refine    units of the best placement choose again           |

The simulator scores what the policy draws; the best placement that fits is the answer. N ops of the problem given (best
a reduced one), S samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gdp.budget import Clock
from gdp.graph import I64
from gdp.placement_bounds import placement_bounds
from gdp.placers.local_search import Incumbent
from gdp.placers.memory_repair import excess_bytes, fit_memory
from gdp.policy.base import Policy
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.styles import Style, draw_refinement, draw_style, vary
from gdp.problem import Placement, Problem
from gdp.simulate import Simulation, evaluate, evaluate_many, simulate

F64 = npt.NDArray[np.float64]
OnProgress = Callable[[Incumbent, int], None]

_LARGE = 30_000  # ops; beyond, drawing takes longer than an answer may
_PARENT = 0.4  # probability that the best style is varied, then the next, and so on


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShotConfig:
    """How the simulations are spent; repairing what does not fit comes on top."""

    num_simulations: int = 64
    num_drawn: int = 16  # of them on styles drawn at random
    num_varied: int = 16  # and on variations of the best ones; what is left refines the best placement
    per_round: int = 4  # what is found goes into the next round
    num_candidates: int = 4  # drawn for each that is simulated, fewer on large graphs; the lowest bounds are simulated
    refinement_units: tuple[int, ...] = (100, 200, 400, 800)  # in turn

    def __post_init__(self) -> None:
        if min(self.num_drawn, self.per_round) < 1 or self.num_varied < 0:
            raise ValueError(f"{self}: counts of at least 1 are expected")
        if self.num_drawn + self.num_varied > self.num_simulations:
            raise ValueError(f"{self}: num_simulations is lower than num_drawn and num_varied together")
        if not self.refinement_units:
            raise ValueError(f"{self}: some numbers of units are expected")

    def candidates(self, problem: Problem) -> int:
        """Placements to draw for each that is simulated."""
        return max(min(self.num_candidates, self.num_candidates * _LARGE // problem.num_ops), 1)


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
    _simulation: Simulation | None = None
    _seen: list[float] = field(default_factory=list)  # peaks over what would be filled, of all that was simulated

    @property
    def _peak_per_filled(self) -> float:
        return float(np.median(self._seen)) if self._seen else 0.0

    @property
    def simulation(self) -> Simulation:
        """The best placement's, in full."""
        assert self.incumbent is not None
        if self._simulation is None:
            self._simulation = simulate(self.problem, self.incumbent.placement)
            self.num_simulations += 1
        return self._simulation

    @property
    def left(self) -> bool:
        """Whether there is time, and a simulation to spend."""
        limit = self.clock.budget.simulations
        within = limit is None or self.num_simulations < limit
        return within and not self.clock.stop.is_set() and self.clock.seconds_left != 0.0

    def most_promising(self, placements: I64, count: int) -> I64:
        """[at most count] numbers of those of `placements` [S, N] that should fit and have the lowest bounds on their
        step times, each placement once."""
        first = {placement.tobytes(): number for number, placement in reversed(list(enumerate(placements)))}
        once = np.sort(np.fromiter(first.values(), np.int64, len(first)))
        if len(once) > count:
            is_full = self._filled(placements[once]) * self._peak_per_filled > 1.0
            once = once[np.lexsort((placement_bounds(self.problem, placements[once]), is_full))]
        return once[:count]

    def _filled(self, placements: I64) -> F64:
        """[S] how full the fullest device is if everything that is ever allocated there is alive at once."""
        held = self.problem.graph.resident_bytes + self.problem.arrays.memory.alloc_bytes
        devices = self.problem.num_devices
        filled = np.stack([np.bincount(placement, held, devices) for placement in placements])
        return np.asarray((filled / np.maximum(self.problem.memory_limit_bytes, 1)).max(axis=1), np.float64)

    def try_out(self, placements: I64) -> list[tuple[int, int]]:
        """Simulate `placements` [S, N] and keep the best; what each is compared by."""
        step_time_ns, peaks = evaluate_many(self.problem, placements, num_threads=self.num_threads)
        return self.look(placements, step_time_ns, peaks)

    def look(self, placements: I64, step_time_ns: I64, peak_memory_bytes: I64) -> list[tuple[int, int]]:
        """Count simulated `placements` [S, N], and keep the best; what each is compared by."""
        self.num_simulations += len(placements)
        excess = excess_bytes(self.problem, peak_memory_bytes)
        full = (peak_memory_bytes / np.maximum(self.problem.memory_limit_bytes, 1)).max(axis=1)
        self._seen.extend((full / np.maximum(self._filled(placements), 1e-9)).tolist())
        first = int(np.lexsort((step_time_ns, excess))[0])
        found = Incumbent(placements[first], int(step_time_ns[first]), int(excess[first]))
        if self.incumbent is None or found.key < self.incumbent.key:
            self.incumbent, self._simulation = found, None
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

    policy: SchedulerPolicy
    problem: Problem
    rng: np.random.Generator
    tried: list[tuple[tuple[int, int], Style]] = field(default_factory=list)

    def draw(self, count: int) -> list[Style]:
        """`count` styles at random."""
        return [draw_style(self.rng) for _ in range(count)]

    def vary(self, count: int) -> list[Style]:
        """`count` styles near to the best."""
        ranks = np.minimum(self.rng.geometric(_PARENT, count) - 1, len(self.tried) - 1)
        return [vary(self.tried[rank][1], self.rng) for rank in ranks]

    def construct(self, style: Style) -> Placement:
        """A placement [N], in a grouping of its own."""
        instance = self.policy.grouped(self.problem, style.num_units, self.rng, following=style.following)
        placement: Placement = self.policy.place(instance, [style], self.rng)[0]
        return placement

    def try_out(self, styles: list[Style], best: Best, count: int) -> None:
        """Construct with each of `styles`, and simulate the `count` that promise most."""
        placements = np.stack([self.construct(style) for style in styles])
        chosen = best.most_promising(placements, count)
        keys = best.try_out(placements[chosen])
        tried = [(key, styles[number]) for key, number in zip(keys, chosen.tolist(), strict=True)]
        self.tried = sorted([*self.tried, *tried], key=lambda tried: tried[0])


def zero_shot(
    problem: Problem,
    policy: Policy,
    clock: Clock,
    *,
    seed: int = 0,
    config: ZeroShotConfig | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Answer:
    """The best of a few placements that `policy` draws; it is not changed. Ends early when the clock is up."""
    best = Best(problem, clock, on_progress, num_threads)
    ask_at_once(best, policy, np.random.default_rng(seed), config or ZeroShotConfig())
    return best.answer()


def ask_at_once(best: Best, policy: Policy, rng: np.random.Generator, config: ZeroShotConfig) -> Styles | None:
    """Let `best` look at what `policy` draws; the styles that were tried, if it has any."""
    problem = best.problem
    if not isinstance(policy, SchedulerPolicy):
        instance = policy.instance(problem, rng)
        best.try_out(policy.sample(instance, 1, rng, temperature=0.0).placements)
        while best.left and best.num_simulations < config.num_simulations:
            count = min(config.per_round, config.num_simulations - best.num_simulations)
            best.try_out(policy.sample(instance, count, rng).placements)
        return None
    styles = Styles(policy, problem, rng)
    for count, propose in ((config.num_drawn, styles.draw), (config.num_varied, styles.vary)):
        for begin in range(0, count, config.per_round):
            if best.incumbent is not None and not best.left:
                return styles
            number = min(config.per_round, count - begin)
            styles.try_out(propose(number * config.candidates(problem)), best, number)
    number = 0
    while best.left and best.num_simulations < config.num_simulations:
        num_units = config.refinement_units[number % len(config.refinement_units)]
        best.try_out(refinements(best, policy, num_units, config, rng))
        number += 1
    return styles


def refinements(
    best: Best, policy: SchedulerPolicy, num_units: int, config: ZeroShotConfig, rng: np.random.Generator
) -> I64:
    """[S, N] the best placement refined, each differently; as many as simulations are left, at least one."""
    instance = policy.grouped(best.problem, num_units, rng, incumbent=best.simulation)
    count = max(min(config.per_round, config.num_simulations - best.num_simulations), 1)
    drawn = policy.place(instance, [draw_refinement(rng) for _ in range(count * config.candidates(best.problem))], rng)
    assert best.incumbent is not None
    changed = drawn[(drawn != best.incumbent.placement).any(axis=1)]
    placements = changed if len(changed) else drawn[:1]
    return placements[best.most_promising(placements, count)]
