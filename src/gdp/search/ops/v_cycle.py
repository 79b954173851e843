"""V-cycles of the local search, restricted to a candidate, and an island: one thread's state to make them with.

    candidate --group--> 30 groups --anneal--> 100 groups --anneal--> 300 groups --anneal--> candidate
                (only ops that the candidate has on one device join, so it is never lost)

N ops, P pairs of units, K tables of op times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.budget import ORDERS_LATE_S, Clock
from gdp.placers.memory_repair import excess_bytes
from gdp.search.candidate import Candidate, Figures
from gdp.search.ops import annealing
from gdp.search.settings import LocalSearchSettings
from gdp.simulator.levels import communication_levels
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import NEVER, run_batch
from gdp.units.units import Pairs, Units, group_units, move_arrays


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
