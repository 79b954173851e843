"""Local search: multi-start restricted V-cycles, the plain search that everything else is measured against.

A cycle groups the incumbent's units, anneals the groups' devices, and repeats with more, smaller groups:

    incumbent --group--> 60 groups --anneal--> 200 groups --anneal--> 800 groups --anneal--> incumbent
                (only what the incumbent has on one device joins, so it is never lost)

Several islands do this side by side from different starts; after each round an island that has fallen behind takes over the
best. What is random comes from one generator per island, and with a budget in simulations a round's shares are fixed in
advance, so the answer does not depend on the number of threads.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdp.budget import Clock
from gdp.graph import I64
from gdp.grouping import Units, group_units
from gdp.levels import longest_paths
from gdp.placers import annealing
from gdp.priorities import communication_levels
from gdp.problem import Placement, Problem
from gdp.simulate import NEVER, Workspace, default_threads, ranks_of

_CHUNK = 32  # moves between two looks at the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Tunables of the local search; the defaults were chosen on half of the workloads (docs/method.md)."""

    levels: tuple[int, ...] = (60, 200, 800)  # number of groups at each level of a cycle
    moves_per_group: float = 12.0  # annealing moves at each level, for each group, where there is time for them
    num_cycles: int = 6  # cycles that an island should at least have time for: shorter ones on large graphs
    hot: float = 0.01  # relative temperature at the start of a level
    cold: float = 0.0003  # and at its end
    guided: float = 0.5  # share of the moves that take a group with an op on the critical path
    score_spread: float = 1.0  # standard deviation of the noise on the logarithm of a pair's score
    slack: float = 3.0  # how much heavier than average a group may be
    keep_up: float = 1.02  # an island further behind the best takes it over
    num_islands: int | None = None  # None: one per thread, or 4 with a budget in simulations

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1 or self.hot < self.cold or self.cold <= 0:
            raise ValueError(f"{self}: levels of at least 1 group and temperatures hot >= cold > 0 are expected")


@dataclass(frozen=True, eq=False)
class Incumbent:
    """A placement with its figures; `priority` None is the b-level."""

    placement: Placement  # [N]
    step_time_ns: int
    excess_bytes: int = 0  # over the memory limits, summed over devices
    priority: I64 | None = None  # [N]

    @property
    def key(self) -> tuple[int, int]:
        """What is compared: fit first, then be fast."""
        return self.excess_bytes, self.step_time_ns


OnProgress = Callable[[Incumbent, int], None]


class _Island:
    """One thread's search state."""

    def __init__(
        self, problem: Problem, op_times_ns: I64, units: Units, config: SearchConfig, seed: np.random.SeedSequence
    ) -> None:
        self.problem, self.op_times_ns, self.units, self.config = problem, op_times_ns, units, config
        fastest_ns = np.where(op_times_ns >= 0, op_times_ns, NEVER).min(axis=(0, 2))
        self.arrays = problem.arrays._replace(tail_ns=longest_paths(problem.graph, fastest_ns))
        self.floor_ns = int(self.arrays.tail_ns.max())
        self.rng = np.random.default_rng(seed)
        self.workspace = Workspace(problem)
        self.workspace.memory.limit_bytes[:] = problem.memory_limit_bytes
        self.record = self.workspace.new_record()
        self.previous = np.zeros(problem.num_ops, np.int32)
        self.arrival_ns = np.zeros((problem.graph.num_tensors, problem.num_devices), np.int64)
        self.path = np.zeros(problem.num_ops, np.int64)
        self.memory_binds = _memory_can_bind(problem)
        self.num_simulations = 0
        self.incumbent: Incumbent | None = None

    def measure(self, placement: Placement, priority: I64 | None) -> Incumbent:
        """`placement` with its figures."""
        rank, op_of_rank = ranks_of(self.problem.b_level_ns if priority is None else priority)
        devices = placement.astype(np.uint8)
        excess = annealing.excess_bytes(
            self.arrays, self.problem.time_table_ns, devices, rank, op_of_rank, self.workspace.scratch, self.workspace.memory
        )
        step_time_ns = annealing.mean_step_time(
            self.arrays, self.op_times_ns, devices, rank, op_of_rank, NEVER, self.floor_ns, self.workspace.scratch
        )
        self.num_simulations += 1
        return Incumbent(placement, int(step_time_ns), int(excess), priority)

    def cycle(self, start: Incumbent, num_moves: int, clock: Clock) -> None:
        """One V-cycle of at most `num_moves` moves from `start`."""
        self.incumbent = start
        levels = _levels(self.config, self.units.num_units)
        for level in levels:
            self._anneal(level, max(num_moves * level // sum(levels), 1), clock)
        self._retune(clock)

    def _anneal(self, num_groups: int, num_moves: int, clock: Clock) -> None:
        assert self.incumbent is not None
        config, incumbent = self.config, self.incumbent
        noise = np.exp(self.rng.normal(0.0, config.score_spread, len(self.units.first)))
        score = noise * self.units.transfer_ns if self.rng.random() < 0.7 else noise
        grouping = group_units(self.units, incumbent.placement, num_groups, score, config.slack)
        rank, op_of_rank = ranks_of(self.problem.b_level_ns if incumbent.priority is None else incumbent.priority)
        placement = incumbent.placement.astype(np.uint8)
        best = placement.copy()
        figures = (incumbent.step_time_ns, incumbent.excess_bytes)
        state = np.array([figures[0], figures[0], figures[1], figures[1], 0], np.int64)
        for first in range(0, num_moves, _CHUNK):
            if clock.stop.is_set() or clock.seconds_left == 0.0:
                break
            temperature = config.hot * (config.cold / config.hot) ** (first / num_moves)
            annealing.anneal(
                self.arrays, self.problem.time_table_ns, self.op_times_ns, self.floor_ns, rank, op_of_rank,
                self.workspace.scratch, self.workspace.memory, self.memory_binds,
                grouping.offsets, grouping.members, grouping.allowed, grouping.neighbour_offsets, grouping.neighbours,
                grouping.group_of_op, self.record, self.previous, self.arrival_ns, self.path,
                placement, best, state, self.rng, min(_CHUNK, num_moves - first), temperature, config.guided,
            )  # fmt: skip
        self.num_simulations += int(state[annealing.NUM_SIMULATIONS])
        found = (int(state[annealing.BEST_EXCESS]), int(state[annealing.BEST_NS]))
        if found < incumbent.key:
            self.incumbent = replace(
                incumbent, placement=best.astype(np.int64), step_time_ns=found[1], excess_bytes=found[0]
            )

    def _retune(self, clock: Clock) -> None:
        """Adopt priorities that know this placement's transfers, if they are better."""
        assert self.incumbent is not None
        if clock.stop.is_set():
            return
        priority = communication_levels(self.problem, self.incumbent.placement)
        tuned = self.measure(self.incumbent.placement, priority)
        if tuned.key < self.incumbent.key:
            self.incumbent = tuned


def local_search(
    problem: Problem,
    starts: Sequence[Placement],
    clock: Clock,
    *,
    seed: int = 0,
    config: SearchConfig | None = None,
    op_times_ns: I64 | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Incumbent, int]:
    """(the best incumbent found from `starts`, number of simulations) within the clock's budget.

    `starts` are placements [N] that obey groups and allowed devices; they need not fit in memory. With `op_times_ns`
    [K, N, D] an incumbent's step time is the mean over these tables instead of that under the problem's own times.
    """
    config = config or SearchConfig()
    num_threads = num_threads or default_threads()
    limit = clock.budget.simulations
    num_islands = config.num_islands or (num_threads if limit is None else 4)
    units = Units.of(problem)
    if op_times_ns is None:
        op_times_ns = problem.time_table_ns[None]
    seeds = np.random.SeedSequence(seed).spawn(num_islands)
    islands = [_Island(problem, op_times_ns, units, config, child) for child in seeds]
    began = clock.seconds
    pool_of_starts = sorted((islands[0].measure(np.asarray(start, np.int64), None) for start in starts), key=lambda x: x.key)
    best = pool_of_starts[0]
    if limit is None:  # moves that an island has time for: a stopped simulation takes about two thirds of a full one
        seconds_per_move = 0.67 * (clock.seconds - began) / len(starts)
        total_moves = int((clock.seconds_left or 0.0) / max(seconds_per_move, 1e-6))
    else:
        total_moves = limit // num_islands
    levels = _levels(config, units.num_units)
    num_moves = max(min(int(sum(levels) * config.moves_per_group), total_moves // config.num_cycles), 1)
    if problem.num_devices == 1 or units.num_units == 0:
        return best, islands[0].num_simulations
    if on_progress:
        on_progress(best, islands[0].num_simulations)
    num_rounds = 0
    with ThreadPoolExecutor(num_threads) as pool:
        while not clock.stop.is_set() and clock.seconds_left != 0.0:
            spent = sum(island.num_simulations for island in islands)
            if limit is not None:
                num_moves = min(num_moves, (limit - spent) // num_islands - 1)  # 1 to measure the retuned priorities
                if num_moves < 1:
                    break
            begins = [
                _choose_start(island, number, num_rounds, pool_of_starts, best) for number, island in enumerate(islands)
            ]
            cycles = [
                pool.submit(island.cycle, begin, num_moves, clock) for island, begin in zip(islands, begins, strict=True)
            ]
            try:
                for cycle in cycles:
                    cycle.result()
            except KeyboardInterrupt:
                clock.stop.set()
                for cycle in cycles:
                    cycle.result()
            best = min([best, *(island.incumbent for island in islands if island.incumbent)], key=lambda x: x.key)
            num_rounds += 1
            if on_progress:
                on_progress(best, sum(island.num_simulations for island in islands))
    return best, sum(island.num_simulations for island in islands)


def _levels(config: SearchConfig, num_units: int) -> list[int]:
    return [level for level in config.levels if level < num_units] or [num_units]


def _choose_start(
    island: _Island, number: int, num_rounds: int, starts: Sequence[Incumbent], best: Incumbent
) -> Incumbent:
    """The start of an island's next cycle: the given starts in turn at first, then its own, or the best when it lags."""
    if island.incumbent is None or num_rounds == 0:
        return starts[number % len(starts)]
    own = island.incumbent
    behind = own.excess_bytes > best.excess_bytes or own.step_time_ns > best.step_time_ns * island.config.keep_up
    return best if behind else own


def _memory_can_bind(problem: Problem) -> bool:
    """Whether any placement could pass a limit: not if everything at once, with a copy of all tensors, fits on each device."""
    graph = problem.graph
    everything = int(graph.resident_bytes.sum()) + int(graph.tensor_bytes.sum())
    return bool((problem.memory_limit_bytes < everything).any())
