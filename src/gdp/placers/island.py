"""An island of the local search: one thread's state, and the cycles that it makes from an incumbent.

    incumbent --group--> 30 groups --anneal--> 100 groups --anneal--> 300 groups --anneal--> incumbent
                (only what the incumbent has on one device joins, so it is never lost)

N ops, P pairs of units, K tables of op times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdp.budget import Clock
from gdp.graph import I64
from gdp.grouping import Units, group_units
from gdp.levels import longest_paths, ranks_of
from gdp.pipelines import B_LEVEL
from gdp.placers import annealing
from gdp.placers.refinement import Refiner
from gdp.placers.screening import Screen
from gdp.policy.construction import Constructor
from gdp.priorities import communication_levels
from gdp.problem import Placement, Problem
from gdp.simulate import NEVER, Workspace

_CHUNK = 32  # moves between two looks at the clock
_FORGET = 0.3  # weight of the last cycle in what a kind of cycle gains


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Tunables of the local search. They were chosen on seven of the workloads (docs/results.md)."""

    levels: tuple[int, ...] = (30, 100, 300)  # number of groups at each level of a cycle
    moves_per_group: float = 24.0  # annealing moves at each level, for each group, where there is time for them
    num_cycles: int = 6  # cycles that an island should at least have time for: shorter ones on large graphs
    hot: float = 0.015  # relative temperature at the start of a level
    cold: float = 0.0003  # and at its end
    weighted: float = 0.7  # share of the levels on which large transfers join first; noise alone decides on the others
    following: float = 0.5  # share of the levels on which backward ops first join their forward ops
    mating: float = 0.5  # share of the cycles whose groups respect another good placement too
    guided: float = 0.7  # share of the moves that take a group with an op on the critical path
    score_spread: float = 0.5  # standard deviation of the noise on the logarithm of a pair's score
    slack: float = 8.0  # how much heavier than average a group may be
    num_starts: int = 64  # partitions made as further starts
    start_share: float = 0.1  # of the time at most for them
    num_tried: int = 8  # best starts, given and made, that get a cycle each, in at most half of the cycles
    num_elites: int = 6  # incumbents that further cycles start from
    num_islands: int | None = None  # None: one per thread, or 4 with a budget in simulations
    refining: tuple[float, float] = (0.1, 0.9)  # least and most share of the cycles that refine, if there is a policy
    per_refinement: int = 4  # placements that are simulated of each
    moves_per_refined: float = 4.0  # annealing moves that take as long as one of them

    def __post_init__(self) -> None:
        shares = (self.guided, self.mating, self.following, self.weighted, self.start_share, *self.refining)
        counts = (*self.levels, self.num_cycles, self.num_tried, self.num_elites, self.per_refinement)
        if not self.levels or min(counts) < 1 or self.hot < self.cold or self.cold <= 0:
            raise ValueError(f"{self}: counts of at least 1 and temperatures hot >= cold > 0 are expected")
        if min(shares) < 0 or max(shares) > 1:
            raise ValueError(f"{self}: shares from 0 to 1 are expected")


@dataclass(frozen=True, eq=False)
class Incumbent:
    """A placement with its figures; `priority` None is the problem's own, in its order."""

    placement: Placement  # [N]
    step_time_ns: int
    excess_bytes: int = 0  # over the memory limits, summed over devices
    priority: I64 | None = None  # [N]
    order: str = B_LEVEL

    @property
    def key(self) -> tuple[int, int]:
        """What is compared: fit first, then be fast."""
        return self.excess_bytes, self.step_time_ns


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The pairs of units that may join: those that share tensors, and backward ops with their forward ops."""

    units: Units
    follows: npt.NDArray[np.bool_]  # [P] a unit of backward ops and the one that it follows

    @classmethod
    def of(cls, problem: Problem, followers: I64) -> "Neighbourhood":
        """`followers` [N] are the units in which backward ops follow their forward ops."""
        units = Units.of(problem)
        _, first_op = np.unique(units.index, return_index=True)
        _, leader_op = np.unique(followers, return_index=True)
        leader = units.index[leader_op][followers[first_op]]
        unit = np.arange(units.num_units)
        joined = leader != unit
        pairs = np.minimum(unit, leader)[joined] * units.num_units + np.maximum(unit, leader)[joined]
        known = units.first * units.num_units + units.second
        added = np.setdiff1d(pairs, known)
        keys = np.concatenate((known, added))
        more = replace(
            units,
            first=keys // units.num_units,
            second=keys % units.num_units,
            transfer_ns=np.concatenate((units.transfer_ns, np.ones(len(added), np.int64))),
        )
        return cls(more, np.isin(keys, pairs))


class Island:
    """One thread's search state."""

    def __init__(
        self,
        problem: Problem,
        neighbourhood: Neighbourhood,
        config: SearchConfig,
        seed: np.random.SeedSequence,
        constructor: Constructor | None,
    ) -> None:
        self.problem, self.config = problem, config
        self.nominal_ns = problem.time_table_ns[None]
        self.score_under(self.nominal_ns)
        self.neighbourhood, self.units = neighbourhood, neighbourhood.units
        self.rng = np.random.default_rng(seed)
        self.workspace = Workspace(problem)
        self.previous = np.zeros(problem.num_ops, np.int32)
        self.arrival_ns = np.zeros((problem.graph.num_tensors, problem.num_devices), np.int64)
        self.path = np.zeros(problem.num_ops, np.int64)
        self.memory_binds = _memory_can_bind(problem)
        self.num_simulations = 0
        self.incumbent: Incumbent | None = None  # of the cycle under way
        self.refiner = None if constructor is None else Refiner(problem, constructor, Screen(problem))
        self.gains = {"anneal": 0.0, "refine": 0.0}  # relative, for the time spent, of late
        self.cycle_seconds = 0.1  # that the last cycle of annealing took

    def score_under(self, op_times_ns: I64) -> None:
        """From now on a step time is the mean over these tables [K, N, D]."""
        self.op_times_ns = op_times_ns
        tables = (self.nominal_ns, op_times_ns)
        fastest_ns = np.minimum(*(np.where(table >= 0, table, NEVER).min(axis=(0, 2)) for table in tables))
        self.arrays = self.problem.arrays._replace(tail_ns=longest_paths(self.problem.graph, fastest_ns))
        self.floor_ns = int(self.arrays.tail_ns.max())

    def measure(self, placement: Placement, priority: I64 | None, order: str | None = None) -> Incumbent:
        """`placement` with its figures; `order` is what `priority` is called."""
        rank, op_of_rank = self.problem.ranks if priority is None else ranks_of(priority)
        devices, workspace = placement.astype(np.uint8), self.workspace

        def mean_ns(op_times_ns: I64) -> int:
            return int(
                annealing.mean_step_time(
                    self.arrays, op_times_ns, devices, rank, op_of_rank, NEVER, self.floor_ns,
                    workspace.scratch, workspace.schedule, workspace.by_rank,
                )
            )  # fmt: skip

        nominal_ns = mean_ns(self.nominal_ns)
        excess = annealing.excess_bytes(
            self.arrays, self.nominal_ns[0], devices, workspace.schedule, workspace.memory,
            self.problem.memory_limit_bytes,
        )  # fmt: skip
        step_time_ns = nominal_ns if len(self.op_times_ns) == 1 else mean_ns(self.op_times_ns)
        self.num_simulations += 1
        return Incumbent(placement, step_time_ns, int(excess), priority, order or self.problem.order)

    def cycle(self, start: Incumbent, mates: Sequence[Placement], num_moves: int, clock: Clock) -> Incumbent:
        """The best of one V-cycle of at most `num_moves` moves from `start`, perhaps with one of `mates`."""
        self.incumbent = start
        mate = None
        if mates and self.rng.random() < self.config.mating:
            mate = mates[int(self.rng.integers(len(mates)))]
        levels, left = levels_of(self.config, self.units.num_units), num_moves
        for level in levels:
            share = min(max(num_moves * level // sum(levels), 1), left)
            self._anneal(level, mate, share, clock)
            left -= share
        self._retune(clock)
        return self.incumbent

    def refine(self, start: Incumbent, num_moves: int, clock: Clock) -> Incumbent:
        """The best of some refinements of `start`, which take as long as a cycle of annealing, or, where simulations
        are counted, as `num_moves` moves are thought to take."""
        assert self.refiner is not None
        self.incumbent = start
        end, left = clock.seconds + self.cycle_seconds, max(round(num_moves / self.config.moves_per_refined), 1)
        while not clock.stop.is_set() and clock.seconds_left != 0.0:
            count = (
                self.config.per_refinement if clock.seconds_left is not None else min(left, self.config.per_refinement)
            )
            placements = self.refiner.propose(self.incumbent.placement, count, self.rng)
            for placement in placements:
                found = self.measure(placement, self.incumbent.priority, self.incumbent.order)
                self.refiner.screen.learn(placement[None], self.workspace.memory.peak_bytes[None])
                if found.key < self.incumbent.key:
                    self.incumbent = found
            left -= len(placements)
            if clock.seconds >= end if clock.seconds_left is not None else left <= 0:
                break
        self._retune(clock)
        return self.incumbent

    def turn(self, start: Incumbent, mates: Sequence[Placement], num_moves: int, clock: Clock) -> Incumbent:
        """A cycle of the kind that has gained more of late, at times of the other."""
        gains, total = self.gains, sum(self.gains.values())
        share = 0.0
        if self.refiner is not None:
            share = float(np.clip(gains["refine"] / total if total > 0 else 0.5, *self.config.refining))
        refines, began = self.rng.random() < share, clock.seconds
        if refines:
            ended = self.refine(start, num_moves, clock)
        else:
            ended = self.cycle(start, mates, num_moves, clock)
            self.cycle_seconds = clock.seconds - began
        before, after = start.step_time_ns, ended.step_time_ns
        if start.excess_bytes > 0:
            before, after = start.excess_bytes, ended.excess_bytes
        gain = max(1.0 - after / max(before, 1), 0.0)
        spent = 1.0 if clock.seconds_left is None else max(clock.seconds - began, 1e-6)
        kind = "refine" if refines else "anneal"
        gains[kind] += _FORGET * (gain / spent - gains[kind])
        return ended

    def _anneal(self, num_groups: int, mate: Placement | None, num_moves: int, clock: Clock) -> None:
        assert self.incumbent is not None
        config, incumbent, workspace = self.config, self.incumbent, self.workspace
        noise = np.exp(self.rng.normal(0.0, config.score_spread, len(self.units.first)))
        score: npt.NDArray[np.float64] = noise
        if self.rng.random() < self.config.weighted:
            score = noise * self.units.transfer_ns
        if self.rng.random() < config.following:
            score = np.where(self.neighbourhood.follows, np.inf, score)
        parents = [incumbent.placement] if mate is None else [incumbent.placement, mate]
        grouping = group_units(self.units, parents, num_groups, score, config.slack)
        rank, op_of_rank = self.problem.ranks if incumbent.priority is None else ranks_of(incumbent.priority)
        placement = incumbent.placement.astype(np.uint8)
        best = placement.copy()
        figures = (incumbent.step_time_ns, incumbent.excess_bytes)
        state = np.array([figures[0], figures[0], figures[1], figures[1], 0], np.int64)
        for first in range(0, num_moves, _CHUNK):
            if clock.stop.is_set() or clock.seconds_left == 0.0:
                break
            temperature = config.hot * (config.cold / config.hot) ** (first / num_moves)
            annealing.anneal(
                self.arrays, self.nominal_ns, self.op_times_ns, self.floor_ns, rank, op_of_rank,
                workspace.scratch, workspace.schedule, workspace.by_rank, workspace.memory,
                self.problem.memory_limit_bytes, self.memory_binds,
                grouping.offsets, grouping.members, grouping.allowed, grouping.neighbour_offsets, grouping.neighbours,
                grouping.group_of_op, self.previous, self.arrival_ns, self.path,
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
        levels_ns = communication_levels(self.problem, self.incumbent.placement)
        for order in self.problem.orders:
            tuned = self.measure(self.incumbent.placement, self.problem.priority(order, levels_ns), order)
            if tuned.key < self.incumbent.key:
                self.incumbent = tuned


def levels_of(config: SearchConfig, num_units: int) -> list[int]:
    """The numbers of groups that a cycle goes through."""
    return [level for level in config.levels if level < num_units] or [num_units]


def _memory_can_bind(problem: Problem) -> bool:
    """Whether a placement could pass a limit: not if everything at once, all tensors with it, fits on each device."""
    graph = problem.graph
    everything = int(graph.resident_bytes.sum()) + int(graph.tensor_bytes.sum())
    return bool((problem.memory_limit_bytes < everything).any())
