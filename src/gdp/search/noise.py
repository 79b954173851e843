"""Noise: op times vary, and a plan should be fast on average. Tables of perturbed op times to average over. N ops, M
reduced ops, D devices, K tables of op times."""

import time
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64
from gdp.budget import Clock, has_time
from gdp.simulator.plan import NoisyTimes
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, mean_step_time_ns
from gdp.units.reduction import Reduction

_NUM_REPLAYS, _FEWEST_REPLAYS = 100, 20  # of an answer, for its mean and 95th percentile; below 20 there is none
_REPLAYED_OPS = 1_000_000  # replays times ops: a second


@dataclass(frozen=True, eq=False)
class Noise:
    """Perturbed op times to average step times over, of the original ops [K, N, D] and of the reduced [K, M, D]."""

    original_ns: I64
    reduced_ns: I64

    @classmethod
    def draw(cls, reduction: Reduction, spread: float, num_tables: int, seed: int) -> "Noise":
        """Draws tables with a relative normal noise of deviation `spread` on each original op."""
        original = perturbed_times(reduction.original, spread, num_tables, seed)
        reduced = np.add.reduceat(np.maximum(original, 0)[:, reduction.members], reduction.member_offsets[:-1], axis=1)
        reduced = np.where(reduction.problem.simulator.time_table_ns < 0, -1, reduced)
        reduced.setflags(write=False)
        return cls(original, reduced)


def step_times_under_noise(
    simulation: Simulation, spread: float, seed: int, clock: Clock | None = None
) -> NoisyTimes | None:
    """Replays the order of `simulation` under op times with a relative noise of deviation `spread`. None where `clock`
    is up before there were a few replays."""
    num_ops = simulation.problem.num_ops
    num_draws = max(min(_NUM_REPLAYS, _REPLAYED_OPS // num_ops), _FEWEST_REPLAYS)
    times_ns: list[int] = []
    slowest_s = 0.0
    while len(times_ns) < num_draws and has_time(clock, slowest_s):
        began = time.perf_counter()
        table = perturbed_times(simulation.problem, spread, 1, seed + len(times_ns))
        times_ns.append(mean_step_time_ns(simulation, table))
        slowest_s = max(slowest_s, time.perf_counter() - began)
    if len(times_ns) < _FEWEST_REPLAYS:
        return None
    return NoisyTimes(spread, int(np.mean(times_ns)), int(np.percentile(times_ns, 95, method="higher")), len(times_ns))


def perturbed_times(problem: Problem, spread: float, num_tables: int, seed: int) -> I64:
    """Draws op times [K, N, D] with a relative normal noise of deviation `spread`, the same on all devices of an op.
    Where all devices are alike, they are [K, N, 1]."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x0B057]))
    factors = np.maximum(1.0 + spread * rng.standard_normal((num_tables, problem.num_ops, 1)), 0.1)
    times = problem.simulator.time_table_ns[None]
    tables = np.where(times > 0, np.rint(times * factors).astype(np.int64), times)
    tables.setflags(write=False)  # see `Simulator.time_table_ns`
    return tables
