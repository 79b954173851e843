"""What placements are compared by, under the problem's op times or averaged over perturbed ones.

N ops, M reduced ops, D devices, K tables of op times.
"""

from dataclasses import dataclass

import numpy as np

from gdp.coarsen import Reduction
from gdp.graph import I64
from gdp.problem import Problem
from gdp.simulate import Simulation, simulate


@dataclass(frozen=True, eq=False)
class Noise:
    """Perturbed op times to average step times over, of the original ops [K, N, D] and of the reduced [K, M, D]."""

    original_ns: I64
    reduced_ns: I64

    @classmethod
    def draw(cls, reduction: Reduction, spread: float, num_tables: int, seed: int) -> "Noise":
        """Tables with a relative normal noise of deviation `spread` on each original op."""
        original = perturbed_times(reduction.original, spread, num_tables, seed)
        reduced = np.add.reduceat(np.maximum(original, 0)[:, reduction.members], reduction.member_offsets[:-1], axis=1)
        reduced = np.where(reduction.problem.op_time_ns < 0, -1, reduced)
        reduced.setflags(write=False)
        return cls(original, reduced)


def key_of(simulation: Simulation, noise: Noise | None) -> tuple[int, int]:
    """What placements are compared by: bytes missing, then step time."""
    if noise is None:
        return int(simulation.missing_bytes.sum()), simulation.step_time_ns
    return int(simulation.missing_bytes.sum()), mean_step_time_ns(simulation, noise.original_ns)


def mean_step_time_ns(simulation: Simulation, op_times_ns: I64) -> int:
    """Mean step time when the order of `simulation` is replayed under each of `op_times_ns` [K, N, D], rounded down."""
    problem, placement, order = simulation.problem, simulation.placement, simulation.order
    times = [simulate(problem, placement, order=order, op_time_ns=table).step_time_ns for table in op_times_ns]
    return sum(times) // len(times)


def perturbed_times(problem: Problem, spread: float, num_tables: int, seed: int) -> I64:
    """[K, N, D] op times with a relative normal noise of deviation `spread`, the same on all devices of an op."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x0B057]))
    factors = np.maximum(1.0 + spread * rng.standard_normal((num_tables, problem.num_ops, 1)), 0.1)
    times = problem.op_time_ns[None]
    tables = np.where(times > 0, np.rint(times * factors).astype(np.int64), times)
    tables.setflags(write=False)  # see `Problem.time_table_ns`
    return tables
