"""Local search: multi-start restricted V-cycles, the plain search that everything else is measured against.

A cycle groups a candidate's units, anneals the groups' devices, and repeats with more, smaller groups:

    candidate --group--> 30 groups --anneal--> 100 groups --anneal--> 300 groups --anneal--> candidate
                (only ops that the candidate has on one device join, so it is never lost)

The best starts get a cycle each; what comes out are the elites, from which all further cycles begin, each perhaps with
groups that respect a second placement too, so that it can combine both. Several islands work side by side. What is
random comes from one generator per island, and with a budget in simulations a round's shares are fixed in advance, so
the answer does not depend on the number of threads. N ops, P pairs of units, K tables of
op times."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.budget import ORDERS_LATE_S, Clock
from gdp.placers.base import device_subsets
from gdp.placers.memory_repair import excess_bytes
from gdp.placers.metis import Partitioner, partition_s
from gdp.search.candidate import Candidate, Figures
from gdp.search.ops import annealing
from gdp.search.question import OnProgress, Question
from gdp.search.settings import DEFAULTS, LocalSearchSettings
from gdp.simulator.levels import communication_levels
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.orders import B_LEVEL, BY_CALL
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import NEVER, default_threads, run_batch
from gdp.units.units import Pairs, Units, forward_units, group_units, move_arrays


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The pairs of units that may join: those that share tensors, and backward ops with their forward ops."""

    units: Units
    pairs: Pairs
    follows: npt.NDArray[np.bool_]  # [P] a unit of backward ops and the one that it follows

    @classmethod
    def of(cls, problem: Problem, followers: I64) -> "Neighbourhood":
        """`followers` [N] are the units in which backward ops follow their forward ops."""
        units = Units.of(problem)
        following = Units.of(problem, followers)
        leader = units.index[following.first_op][followers[units.first_op]]
        unit = np.arange(units.num_units)
        joined = leader != unit
        pairs = np.minimum(unit, leader)[joined] * units.num_units + np.maximum(unit, leader)[joined]
        shared = units.pairs()
        known = shared.first * units.num_units + shared.second
        added = np.setdiff1d(pairs, known)
        keys = np.concatenate((known, added))
        transfer_ns = np.concatenate((shared.transfer_ns, np.ones(len(added), np.int64)))
        return cls(units, Pairs(keys // units.num_units, keys % units.num_units, transfer_ns), np.isin(keys, pairs))


class Island:
    """One thread's search state."""

    def __init__(
        self,
        problem: Problem,
        neighbourhood: Neighbourhood,
        settings: LocalSearchSettings,
        seed: np.random.SeedSequence,
    ) -> None:
        self.problem, self.settings = problem, settings
        self.nominal_ns = problem.simulator.time_table_ns[None]
        self.score_under(self.nominal_ns)
        self.neighbourhood, self.units, self.pairs = neighbourhood, neighbourhood.units, neighbourhood.pairs
        self.rng = np.random.default_rng(seed)
        self.workspace = problem.simulator.new_workspace()
        self.state = annealing.State.empty(problem)
        self.memory_binds = _memory_can_bind(problem)
        self.num_simulations = 0

    def score_under(self, op_times_ns: I64) -> None:
        """From now on a step time is the mean over these tables [K, N, D]."""
        self.op_times_ns = op_times_ns
        tables = (self.nominal_ns, op_times_ns)
        fastest_ns = np.minimum(*(np.where(table >= 0, table, NEVER).min(axis=(0, 2)) for table in tables))
        self.arrays = self.problem.simulator.arrays._replace(tail_ns=longest_paths(self.problem.graph, fastest_ns))
        self.floor_ns = int(self.arrays.tail_ns.max())

    def measure(self, candidate: Candidate) -> Candidate:
        """Returns `candidate` with its figures."""
        priority = candidate.priority
        dispatch = self.problem.simulator.dispatch(self.problem.order, priority)
        devices = candidate.placement.astype(self.problem.simulator.placement_type)[None]
        time_ns, peaks = np.zeros(1, np.int64), np.zeros((1, self.problem.num_devices), np.int64)
        run_batch(self.arrays, self.nominal_ns, devices, dispatch, NEVER, 0, self.workspace, time_ns, peaks)
        excess = int(excess_bytes(self.problem, peaks[0]))
        if len(self.op_times_ns) > 1:
            no_peaks = peaks[:, :0]
            run_batch(self.arrays, self.op_times_ns, devices, dispatch, NEVER, 0, self.workspace, time_ns, no_peaks)
        self.num_simulations += 1
        order = self.problem.order if priority is None else candidate.order
        return Candidate(candidate.placement, Figures(excess, int(time_ns[0])), priority, order)

    def cycle(self, start: Candidate, mates: Sequence[Placement], num_moves: int, clock: Clock) -> Candidate:
        """Returns the best of one V-cycle of at most `num_moves` moves from `start`, perhaps with one of `mates`."""
        best, mate = start, None
        if mates and self.rng.random() < self.settings.mating:
            mate = mates[int(self.rng.integers(len(mates)))]
        levels, left = levels_of(self.settings, self.units.num_units), num_moves
        for level in levels:
            share = min(max(num_moves * level // sum(levels), 1), left)
            best = self._anneal(best, level, mate, share, clock)
            left -= share
        return best if clock.stop.is_set() else self._retune(best, clock.at_least(ORDERS_LATE_S))

    def _anneal(
        self, start: Candidate, num_groups: int, mate: Placement | None, num_moves: int, clock: Clock
    ) -> Candidate:
        """Returns the best candidate met while about `num_groups` groups of `start` change devices."""
        settings, workspace = self.settings, self.workspace
        if clock.is_up:
            return start
        noise = np.exp(self.rng.normal(0.0, settings.score_spread, len(self.pairs.first)))
        score: npt.NDArray[np.float64] = noise
        if self.rng.random() < self.settings.weighted:
            score = noise * self.pairs.transfer_ns
        if self.rng.random() < settings.following:
            score = np.where(self.neighbourhood.follows, np.inf, score)
        parents = [start.placement] if mate is None else [start.placement, mate]
        groups = group_units(self.units, self.pairs, parents, num_groups, score, settings.slack)
        grouping = move_arrays(groups, self.units, self.pairs)
        dispatch = self.problem.simulator.dispatch(self.problem.order, start.priority)
        limits_bytes = self.problem.memory_limit_bytes
        objective = annealing.Objective(
            self.nominal_ns, self.op_times_ns, self.floor_ns, limits_bytes, self.memory_binds
        )
        state, figures = self.state, start.figures
        state.placement[:] = state.best[:] = start.placement
        state.figures[:] = (*2 * [figures.step_time_ns], *2 * [figures.excess_bytes], 0)
        chunk = min(settings.chunk, max(settings.chunk_ops // self.problem.num_ops, 1))
        for first in range(0, num_moves, chunk):
            if clock.is_up:
                break
            temperature = settings.hot * (settings.cold / settings.hot) ** (first / num_moves)
            moves = annealing.MoveConfig(
                min(chunk, num_moves - first), temperature, settings.guided, settings.to_neighbour, settings.swapped
            )
            annealing.anneal(self.arrays, objective, dispatch, workspace, grouping, state, self.rng, moves)
        self.num_simulations += int(state.figures[annealing.NUM_SIMULATIONS])
        best = Figures(int(state.figures[annealing.BEST_EXCESS]), int(state.figures[annealing.BEST_NS]))
        return replace(start, placement=state.best.astype(np.int64), figures=best) if best < start.figures else start

    def _retune(self, best: Candidate, clock: Clock) -> Candidate:
        """Returns `best` with a priority that knows its transfers, where that is faster."""
        began = clock.seconds
        levels_ns = communication_levels(self.problem, best.placement)
        for order in self.problem.orders:
            if not clock.has(clock.seconds - began):
                break
            priority = self.problem.priority(order, levels_ns)
            best = min(best, self.measure(Candidate(best.placement, priority=priority, order=order)))
        return best


def levels_of(settings: LocalSearchSettings, num_units: int) -> list[int]:
    """The numbers of groups that a cycle goes through."""
    return [level for level in settings.levels if level < num_units] or [num_units]


def _memory_can_bind(problem: Problem) -> bool:
    """Returns True if a placement could pass a limit: some device cannot hold everything with all tensors at once."""
    graph = problem.graph
    everything = int(graph.resident_bytes.sum()) + int(graph.tensor_bytes.sum())
    return bool((problem.memory_limit_bytes < everything).any())


class LocalSearch:
    """A search under way: `start` it, then `run` it, once or in parts; `best` is its answer."""

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        *,
        seed: int = 0,
        settings: LocalSearchSettings | None = None,
        bound_ns: int = 0,
        num_threads: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """The search may spend what is left of `clock`; a candidate that fits and takes `bound_ns` ends it.
        `on_progress` is told of the best candidate, of `problem`, after each round."""
        self.problem, self.clock, self.seed, self.bound_ns = problem, clock.part(), seed, bound_ns
        self._began_s, self.prepared_s = clock.seconds, 0.0  # seconds of the clock, and those until it was started
        self.settings, self.on_progress = settings or DEFAULTS.local_search, on_progress
        self.num_threads = num_threads or default_threads()
        num_islands = self.settings.num_islands or (self.num_threads if clock.simulations_left is None else 4)
        self._followers = forward_units(problem)
        neighbourhood = Neighbourhood.of(problem, self._followers)
        self.num_units = neighbourhood.units.num_units
        control, *seeds = np.random.SeedSequence(seed).spawn(num_islands + 1)
        self._rng = np.random.default_rng(control)
        self._islands = [Island(problem, neighbourhood, self.settings, child) for child in seeds]
        self._queue: list[Candidate] = []  # starts that wait for their cycle
        self._elites: list[Candidate] = []
        self._num_moves = 1  # of a cycle
        self._num_counted = 0  # simulations of the islands that the clock was told of

    @classmethod
    def of(cls, question: Question, clock: Clock) -> "LocalSearch":
        """Returns a search for an answer to `question`, of its reduced problem."""
        return cls(
            question.reduction.problem,
            clock,
            seed=question.seed,
            settings=question.settings.local_search,
            bound_ns=question.bound_ns,
            num_threads=question.num_threads,
            on_progress=question.tell,
        )

    def part(self, problem: Problem, clock: Clock, *, bound_ns: int = 0) -> "LocalSearch":
        """Returns a search of another view of the problem, with the same settings."""
        return LocalSearch(
            problem, clock, seed=self.seed, settings=self.settings, bound_ns=bound_ns, num_threads=self.num_threads
        )

    @property
    def best(self) -> Candidate:
        """The best candidate so far; ValueError before there is a start."""
        return min((*self._elites, *self._queue))

    @property
    def elites(self) -> Sequence[Candidate]:
        """The best candidates, all different; before any cycle the best start alone."""
        return self._elites or [self.best]

    @property
    def is_over(self) -> bool:
        """True when nothing is left to do: the bound is reached, there is one placement only, or the clock is up."""
        reached = self.best.fits and self.best.step_time_ns <= self.bound_ns
        return self.problem.num_devices == 1 or self.num_units < 2 or reached or self.clock.is_up

    def start(self, starts: Sequence[Candidate], *, num_more: int | None = None) -> None:
        """Begins from `starts`, placements [N] that obey groups and allowed devices and need not fit in memory. Their
        figures are measured, those of the first one always. The search makes up to `num_more` further starts itself."""
        settings, limit, clock = self.settings, self.clock.simulations_left, self.clock
        began, slowest_s = clock.seconds, 0.0
        for start in starts:
            if self._queue and not clock.has(slowest_s):
                break
            before = clock.seconds
            self._queue.append(self._in_best_order(start))
            slowest_s = max(slowest_s, clock.seconds - before)
        measured_s = clock.seconds - began
        if self.is_over:
            return
        self._tell()
        wanted_more = settings.num_starts if num_more is None else num_more
        num_more = wanted_more if limit is None else min(wanted_more, limit // 20)
        more = diverse_starts(
            self.problem, self._followers, num_more, self.seed, clock.part(settings.start_share), settings
        )
        began = clock.seconds
        self._queue += [self._in_best_order(Candidate(start)) for start in more if clock.has(slowest_s)]
        num_islands = len(self._islands)
        if limit is None:  # most simulations of a search stop early: half of a full one on average
            seconds_per_move = (clock.seconds - began + measured_s) / len(self._queue) / 2
            affordable = int((clock.seconds_left or 0.0) / max(seconds_per_move, 1e-6))
        else:
            affordable = limit // num_islands
        wanted = int(sum(levels_of(settings, self.num_units)) * settings.moves_per_group)
        self._num_moves = max(min(wanted, affordable // settings.num_cycles), 1)
        num_cycles = num_islands * affordable // self._num_moves
        self._queue = _best_distinct(self._queue, max(min(settings.num_tried, num_cycles // 2), 1))
        self.prepared_s = clock.seconds - self._began_s

    def adopt(self, candidate: Candidate) -> None:
        """Takes in what was found elsewhere."""
        self._elites = _best_distinct([*self._elites, self._measure(candidate)], self.settings.num_elites)

    def score_under(self, op_times_ns: I64) -> None:
        """Makes a candidate's step time the mean over these tables [K, N, D] from now on."""
        elites = self.elites
        for island in self._islands:
            island.score_under(op_times_ns)
        self._elites = _best_distinct([self._measure(elite) for elite in elites], self.settings.num_elites)
        self._queue = []

    def run(self, until: float = 1.0) -> None:
        """Begins cycles until a share `until` of the search's budget is spent. A cycle under way is cut short by the
        end of the whole budget alone: it is best when it has cooled down."""
        clock, num_islands, num_moves = self.clock.until(until), len(self._islands), self._num_moves
        with ThreadPoolExecutor(self.num_threads) as pool:
            while not self.is_over and not clock.is_up:
                if (left := clock.simulations_left) is not None:
                    num_moves = min(num_moves, left // num_islands - len(self.problem.orders))  # to retune priorities
                    if num_moves < 1:
                        break
                parents = self.elites
                mates = [candidate.placement for candidate in (*self._elites, *self._queue)]
                # without starts each of the elites is half as likely as the one before it
                turns = (min(int(self._rng.geometric(0.5)), len(parents)) - 1 for _ in self._islands)
                begins = [self._queue.pop(0) if self._queue else parents[next(turns)] for _ in self._islands]
                cycles = [
                    pool.submit(island.cycle, begin, mates, num_moves, self.clock)
                    for island, begin in zip(self._islands, begins, strict=True)
                ]
                try:
                    ended = [cycle.result() for cycle in cycles]
                except KeyboardInterrupt:
                    clock.stop.set()
                    ended = [cycle.result() for cycle in cycles]
                begun = {id(begin) for begin in begins}
                kept = [candidate for candidate in self._elites if id(candidate) not in begun]
                self._elites = _best_distinct([*kept, *ended], self.settings.num_elites)
                self._count()
                self._tell()

    def _in_best_order(self, start: Candidate) -> Candidate:
        """Returns `start` with its figures; where the order goes by calls, in the b-level's order if that is faster."""
        measured, problem = self._measure(start), self.problem
        if start.priority is not None or problem.order != BY_CALL:
            return measured
        return min(measured, self._measure(Candidate(start.placement, priority=problem.b_level_ns, order=B_LEVEL)))

    def _measure(self, candidate: Candidate) -> Candidate:
        measured = self._islands[0].measure(candidate)
        self._count()
        return measured

    def _count(self) -> None:
        """Tells the clock of simulations made since the last call."""
        total = sum(island.num_simulations for island in self._islands)
        self.clock.spend(total - self._num_counted)
        self._num_counted = total

    def _tell(self) -> None:
        if self.on_progress:
            self.on_progress(self.best)


def _best_distinct(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Returns the best `count`, one for each pair of figures: equal figures are nearly always one placement."""
    by_figures = {candidate.figures: candidate for candidate in reversed(candidates)}
    return sorted(by_figures.values())[:count]


def diverse_starts(
    problem: Problem, followers: I64, num_starts: int, seed: int, clock: Clock, settings: LocalSearchSettings
) -> list[Placement]:
    """Returns up to `num_starts` METIS partitions [N] of different views of the graph, fewer when time is up. A view
    has units alone or backward ops with their forward ops; all tensors, or none with many consumers (weights shared by
    all time steps tie a layer together; without them, time steps part); exact or perturbed weights of edges; METIS' own
    settings. A partition takes milliseconds, and obeys groups and allowed devices. `followers` [N] are the units in
    which backward ops follow their forward ops (`forward_units`)."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x57A275]))
    subsets = device_subsets(problem, smallest=2)
    starts: list[Placement] = []
    seconds = partition_s(problem, problem.num_devices)
    while len(starts) < num_starts and clock.has(seconds):
        partitioner = Partitioner(
            problem,
            followers if rng.random() < 0.5 else None,
            settings.max_consumers[rng.integers(len(settings.max_consumers))],
            rng if rng.random() < 0.5 else None,
        )
        devices = subsets[0] if rng.random() < 0.7 else subsets[rng.integers(len(subsets))]
        imbalance = settings.imbalances[rng.integers(len(settings.imbalances))]
        starts.append(partitioner.partition(devices, imbalance, bool(rng.random() < 0.5), int(rng.integers(2**31))))
    return starts
