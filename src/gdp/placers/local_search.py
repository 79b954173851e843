"""Local search: multi-start restricted V-cycles, the plain search that everything else is measured against.

A cycle groups the incumbent's units, anneals the groups' devices, and repeats with more, smaller groups (`island.py`).
The best starts get a cycle each; what comes out are the elites, from which all further cycles begin, each perhaps with
groups that respect a second placement too, so that it can combine both. Several islands work side by side. What is
random comes from one generator per island, and with a budget in simulations a round's shares are fixed in advance, so
the answer does not depend on the number of threads.

With a policy the search is guided: some cycles refine the incumbent by it (`refinement.py`) instead of annealing, the
more often the more that gains.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from gdp.budget import Budget, Clock
from gdp.forward_units import forward_units
from gdp.graph import I64
from gdp.placers.island import Incumbent, Island, Neighbourhood, SearchConfig, levels_of
from gdp.placers.starts import diverse_starts
from gdp.policy.construction import Constructor
from gdp.problem import Placement, Problem
from gdp.simulate import default_threads

OnProgress = Callable[[Incumbent, int], None]


class LocalSearch:
    """A search under way: `start` it, then `run` it, once or in parts; `best` is its answer."""

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        *,
        seed: int = 0,
        config: SearchConfig | None = None,
        num_spent: int = 0,
        bound_ns: int = 0,
        constructor: Constructor | None = None,
        num_threads: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """`num_spent` simulations of the clock's budget are used up already. A feasible incumbent as fast as `bound_ns`
        ends the search. With a `constructor` it is guided."""
        self.problem, self.clock, self.seed, self.bound_ns = problem, clock, seed, bound_ns
        self.config, self.on_progress = config or SearchConfig(), on_progress
        self.num_threads = num_threads or default_threads()
        self.num_spent = self._spent_before = num_spent
        self._began_s, self._seconds = clock.seconds, clock.seconds_left or 0.0
        num_islands = self.config.num_islands or (self.num_threads if self._limit is None else 4)
        self._followers = forward_units(problem)
        neighbourhood = Neighbourhood.of(problem, self._followers)
        self.num_units = neighbourhood.units.num_units
        control, *seeds = np.random.SeedSequence(seed).spawn(num_islands + 1)
        self._rng = np.random.default_rng(control)
        self._islands = [Island(problem, neighbourhood, self.config, child, constructor) for child in seeds]
        self._queue: list[Incumbent] = []  # starts that wait for their cycle
        self._elites: list[Incumbent] = []
        self._num_moves = 1  # of a cycle

    @property
    def best(self) -> Incumbent:
        """The best incumbent so far; ValueError before there is a start."""
        return min((*self._elites, *self._queue), key=lambda incumbent: incumbent.key)

    @property
    def elites(self) -> Sequence[Incumbent]:
        """The best incumbents, all different; before any cycle the best start alone."""
        return self._elites or [self.best]

    @property
    def num_simulations(self) -> int:
        """Simulations made by this search itself."""
        return sum(island.num_simulations for island in self._islands)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be done: the bound is reached, there is one placement only, or time is up."""
        return (
            self.problem.num_devices == 1
            or self.num_units < 2
            or self.best.key <= (0, self.bound_ns)
            or self.clock.stop.is_set()
            or self.clock.seconds_left == 0.0
        )

    @property
    def _limit(self) -> int | None:
        """Simulations that this search may make in all."""
        budget = self.clock.budget.simulations
        return None if budget is None else budget - self.num_spent

    @property
    def spent(self) -> int:
        """Simulations of the clock's budget that are used up, by whomever."""
        return self.num_spent + self.num_simulations

    @property
    def share_spent(self) -> float:
        """Of the budget that there was at the beginning."""
        if self.clock.budget.simulations is not None:
            return (self.spent - self._spent_before) / max(self.clock.budget.simulations - self._spent_before, 1)
        return (self.clock.seconds - self._began_s) / max(self._seconds, 1e-9)

    def clock_until(self, share: float) -> Clock:
        """A clock with the same start that ends when a `share` of the budget that there was at the beginning is spent;
        its simulations are those of this search and of others together."""
        if (budget := self.clock.budget.simulations) is not None:
            most = self._spent_before + int(share * (budget - self._spent_before))
            return replace(self.clock, budget=Budget(simulations=max(most, 0)))
        return replace(self.clock, budget=Budget(seconds=self._began_s + share * self._seconds))

    def start(
        self, starts: Sequence[Placement], known: Sequence[Incumbent] = (), *, num_more: int | None = None
    ) -> None:
        """Begin from `starts`, placements [N] that obey groups and allowed devices and need not fit in memory, from
        `known` incumbents with their priorities, and from further ones of its own, at most `num_more`."""
        first, config, limit, clock = self._islands[0], self.config, self._limit, self.clock
        began = clock.seconds
        self._queue = [first.measure(np.asarray(start, np.int64), None) for start in starts]
        self._queue += [first.measure(x.placement, x.priority, x.order) for x in known]
        measured_s = clock.seconds - began
        if self.is_over:
            return
        self._tell()
        wanted_more = config.num_starts if num_more is None else num_more
        num_more = wanted_more if limit is None else min(wanted_more, limit // 20)
        seconds = None if clock.seconds_left is None else config.start_share * clock.seconds_left
        more = diverse_starts(self.problem, self._followers, num_more, self.seed, clock, seconds)
        began = clock.seconds
        self._queue += [first.measure(start, None) for start in more]
        num_islands = len(self._islands)
        if limit is None:  # most simulations of a search stop early: half of a full one on average
            seconds_per_move = (clock.seconds - began + measured_s) / len(self._queue) / 2
            affordable = int((clock.seconds_left or 0.0) / max(seconds_per_move, 1e-6))
        else:
            affordable = max(limit, 0) // num_islands
        wanted = int(sum(levels_of(config, self.num_units)) * config.moves_per_group)
        self._num_moves = max(min(wanted, affordable // config.num_cycles), 1)
        num_cycles = num_islands * affordable // self._num_moves
        self._queue = _best_distinct(self._queue, max(min(config.num_tried, num_cycles // 2), 1))

    def adopt(self, incumbent: Incumbent, num_simulations: int = 0) -> None:
        """Take in what was found elsewhere, with `num_simulations` of this search's budget."""
        self.num_spent += num_simulations
        found = self._islands[0].measure(incumbent.placement, incumbent.priority, incumbent.order)
        self._elites = _best_distinct([*self._elites, found], self.config.num_elites)

    def score_under(self, op_times_ns: I64) -> None:
        """From now on an incumbent's step time is the mean over these tables [K, N, D]."""
        elites = self._elites or [self.best]
        for island in self._islands:
            island.score_under(op_times_ns)
        measured = [self._islands[0].measure(x.placement, x.priority, x.order) for x in elites]
        self._elites, self._queue = _best_distinct(measured, self.config.num_elites), []

    def run(self, until: float = 1.0) -> None:
        """Begin cycles until a share `until` of the budget that there was at the beginning is over.

        One that has begun is cut short by the end of the whole budget alone: it is best when it has cooled down.
        """
        clock = self.clock_until(until)
        limit = None if clock.budget.simulations is None else clock.budget.simulations - self.num_spent
        num_islands, num_moves = len(self._islands), self._num_moves
        with ThreadPoolExecutor(self.num_threads) as pool:
            while not self.is_over and clock.seconds_left != 0.0:
                if limit is not None:
                    left = (limit - self.num_simulations) // num_islands
                    num_moves = min(num_moves, left - len(self.problem.orders))  # those measure retuned priorities
                    if num_moves < 1:
                        break
                parents = self._elites or [self.best]
                mates = [incumbent.placement for incumbent in (*self._elites, *self._queue)]
                begins = [self._queue.pop(0) if self._queue else self._choose(parents) for _ in self._islands]
                cycles = [
                    pool.submit(island.turn, begin, mates, num_moves, self.clock)
                    for island, begin in zip(self._islands, begins, strict=True)
                ]
                try:
                    ended = [cycle.result() for cycle in cycles]
                except KeyboardInterrupt:
                    clock.stop.set()
                    ended = [cycle.result() for cycle in cycles]
                begun = {id(begin) for begin in begins}
                kept = [incumbent for incumbent in self._elites if id(incumbent) not in begun]
                self._elites = _best_distinct([*kept, *ended], self.config.num_elites)
                self._tell()

    def _choose(self, parents: Sequence[Incumbent]) -> Incumbent:
        """One of `parents`, each half as likely as the one before it."""
        return parents[min(int(self._rng.geometric(0.5)) - 1, len(parents) - 1)]

    def _tell(self) -> None:
        if self.on_progress:
            self.on_progress(self.best, self.num_simulations)


def _best_distinct(incumbents: Sequence[Incumbent], count: int) -> list[Incumbent]:
    """The best `count`, one for each pair of figures: equal figures are nearly always one placement found twice."""
    by_figures = {incumbent.key: incumbent for incumbent in reversed(incumbents)}
    return sorted(by_figures.values(), key=lambda x: x.key)[:count]
