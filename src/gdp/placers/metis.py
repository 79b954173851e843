"""METIS: multilevel graph partitioning (G. Karypis, V. Kumar, SIAM Journal on Scientific Computing 20, 1998), by
PyMetis. Units are vertices, op times their weights, the times to transfer tensors the weights of edges. PyMetis takes
one weight a vertex, so memory is a share of that weight, and by repair. U units, P pairs that share tensors."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from itertools import islice, product

import numpy as np
import numpy.typing as npt
import pymetis

from gdp.arrays import I64
from gdp.budget import Clock, has_time
from gdp.placers.base import NoTimeError, best_of, device_subsets
from gdp.placers.settings import METIS
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units

_REDIRECTING = threading.Lock()  # standard output is the whole process's


def metis(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Returns the best partition over numbers of parts, imbalances, METIS' two algorithms and seeds, made to fit."""
    if problem.num_devices == 1:
        return np.zeros(problem.num_ops, np.int64)
    if not has_time(clock, partition_s(problem, problem.num_devices)):
        raise NoTimeError
    parts = Partitioner(problem)
    size = len(parts.units.index) + len(parts.edge_weights)
    num_runs = min(max(METIS.work // size, 2 * len(METIS.imbalances)), METIS.max_runs)
    settings = list(islice(_settings(problem, seed), num_runs))

    def balanced_in_memory() -> Iterator[Placement]:
        for setting in settings[: max(num_runs // 4, 2)]:
            for share in METIS.memory_shares:
                yield parts.partition(*setting, memory_share=share)

    return best_of(problem, (parts.partition(*setting) for setting in settings), balanced_in_memory, clock)


def partition_s(problem: Problem, num_parts: int) -> float:
    """Returns about how many seconds it takes to prepare METIS for `problem` and to run it once, without a pause."""
    num_units = int(problem.graph.group_index.max()) + 1
    prepared_ns = METIS.prepared_ns * (problem.num_ops + len(problem.graph.consumers))
    return 1e-9 * (prepared_ns + METIS.partitioned_ns * num_units * (1 + num_parts / 8))


def _settings(problem: Problem, seed: int) -> Iterator[tuple[I64, int, bool, int]]:
    """Yields (devices, imbalance, True for recursive bisection, seed) without end, the most promising first."""
    subsets = device_subsets(problem, smallest=min(2, problem.num_devices))
    repeats = 1 if problem.num_devices == 1 else 64
    for repeat, devices, imbalance, recursive in product(range(repeats), subsets, METIS.imbalances, (False, True)):
        yield devices, imbalance, recursive, seed * repeats + repeat


class Partitioner:
    """Partitions the graph of a problem's units with METIS."""

    def __init__(
        self,
        problem: Problem,
        index: I64 | None = None,
        max_consumers: int | None = None,
        noise: np.random.Generator | None = None,
    ) -> None:
        """`index` and `max_consumers` are those of `Units`; `noise` perturbs the weights of edges (lognormal)."""
        self.problem = problem
        self.units = Units.of(problem, index)
        pairs = self.units.pairs(max_consumers)
        transfer_ns = pairs.transfer_ns.astype(np.float64)
        if noise is not None:
            transfer_ns *= np.exp(noise.normal(size=len(transfer_ns)))
        sources = np.concatenate((pairs.first, pairs.second))
        order = np.argsort(sources, kind="stable")
        scale = max(float(transfer_ns.sum()) / METIS.total_weight, 1.0)
        offsets = np.concatenate(([0], np.cumsum(np.bincount(sources, minlength=self.units.num_units))))
        neighbours = np.concatenate((pairs.second, pairs.first))[order]  # [2P]
        self.adjacency = pymetis.CSRAdjacency(offsets, neighbours)
        self.edge_weights = np.tile(np.maximum(transfer_ns / scale, 1).astype(np.int64), 2)[order]  # [2P]

    def partition(
        self, devices: I64, imbalance: int, recursive: bool, seed: int, memory_share: float = 0.0
    ) -> Placement:
        """Returns a placement [N] with one part for each of `devices`, in proportion to its speed."""
        units = self.units
        work_ns = np.maximum(np.where(units.allowed, units.time_ns, 0).sum(axis=0)[devices], 1)
        covered_ns = (units.mean_time_ns[:, None] * units.allowed[:, devices]).sum(axis=0)
        speed = np.maximum(covered_ns, 1) / work_ns  # relative, over the units that may go there
        room = self.problem.memory_limit_bytes[devices]
        target = (1 - memory_share) * _shares(speed) + memory_share * _shares(room)
        wanted = np.argsort(-target, kind="stable")[: max(units.num_units // METIS.vertices_per_part, 1)]
        wanted = np.sort(wanted[target[wanted] >= METIS.smallest_target / len(devices)])
        devices, target = devices[wanted], _shares(target[wanted])
        if len(devices) == 1:
            return units.place_allowed(np.repeat(devices, units.num_units))
        held = units.resident_bytes + units.tensor_bytes
        weights = (1 - memory_share) * _shares(units.mean_time_ns) + memory_share * _shares(held)
        weights = np.clip(
            weights, METIS.smallest_weight / units.num_units, 1 / len(devices)
        )  # heavier units fill a part anyway
        options = pymetis.Options(ufactor=imbalance, seed=seed % 2**31)
        with _without_complaints():
            found = pymetis.part_graph(
                len(devices),
                self.adjacency,
                vweights=np.rint(weights * METIS.total_weight).astype(np.int64),
                eweights=self.edge_weights,
                tpwgts=target.tolist(),
                recursive=recursive,
                options=options,
            )
        part_of_unit = np.asarray(found.vertex_part, np.int64)
        return units.place_allowed(devices[self._assign(part_of_unit, devices)][part_of_unit])

    def _assign(self, part_of_unit: I64, devices: I64) -> npt.NDArray[np.intp]:
        """Returns [parts] positions in `devices`, so that parts go where their ops may run and run fast."""
        cost = np.zeros((len(devices), len(devices)))
        np.add.at(cost, part_of_unit, self.units.time_ns[:, devices])
        misplaced = np.zeros_like(cost)
        np.add.at(misplaced, part_of_unit, ~self.units.allowed[:, devices])
        if (cost == cost[:, :1]).all() and not misplaced.any():
            return np.arange(len(devices))
        from scipy.optimize import linear_sum_assignment  # half a second, which devices that are alike never need

        return np.asarray(linear_sum_assignment(cost + misplaced * max(float(cost.max()), 1.0))[1])


@contextlib.contextmanager
def _without_complaints() -> Iterator[None]:
    """Silences METIS, which prints complaints of empty parts to standard output with C's printf."""
    with _REDIRECTING:
        try:
            kept = os.dup(1)
        except OSError:  # no standard output at all
            yield
            return
        sys.stdout.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)


def _shares(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Scales weights to fractions that sum to 1; equal ones if all are 0."""
    array = np.asarray(values, np.float64)
    total = array.sum()
    return array / total if total > 0 else np.full(len(array), 1 / max(len(array), 1))
