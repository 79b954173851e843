"""Starts for a search: interleaved stages for micro-batches, grids of layers and calls, stages of each replica.

Interleaved stages: each device gets several shorter stages in turn, so that it waits less at the ends of a pipeline,
for more transfers. D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM", SC 2021, section 2.2.

    2 devices, 2 stages each    gpu0 | stage 0 |         | stage 2 |
                                gpu1 |         | stage 1 |         | stage 3 |

Grids: a model that runs its layers several times is cut along layers and calls.

    4 devices         calls 0, 1    calls 2, 3
    first layers         gpu0          gpu2
    last layers          gpu1          gpu3

A recurrent net calls its layers at each time step, Transformer-XL at each segment of the text. Stages of layers wait
for each other at both ends of a step. Where calls depend little on each other, as in the backward pass of
Transformer-XL, devices that share calls out wait less, and take copies of weights for it.

Replicas: stages of each replica on devices of its own, which is what users run.

    2 replicas, 4 devices    gpu0, gpu1 | replica 0 in two stages
                             gpu2, gpu3 | replica 1 in two stages
N ops, U units, D devices, R replicas, S devices of a replica."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gdp.arrays import F64, I64, combined
from gdp.graph.layers import NO_CALL
from gdp.placers.base import allowed_work, device_subsets, inherit
from gdp.placers.contiguous import Chain, folded_chain, module_chain, stages
from gdp.placers.settings import INTERLEAVED
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units, forward_units


def interleaved_stages(problem: Problem) -> list[Placement]:
    """Returns placements [N] with 2, 3 and 4 stages a device, in the order of modules; none without micro-batches."""
    if problem.microbatch.max() < 1:
        return []
    units = Units.of(problem, forward_units(problem))
    devices = device_subsets(problem, smallest=problem.num_devices)[0]
    chains = [module_chain(problem, units, whole_layers=whole) for whole in (False, True)]
    counts = INTERLEAVED.stages_per_device
    return [units.place_allowed(stages(problem, units, x, np.tile(devices, n))) for x in chains for n in counts]


def call_grids(problem: Problem) -> list[Placement]:
    """Returns placements [N], one for each way to lay all devices out as a grid with several columns of calls. There
    are none where the forward pass does not call its layers several times, or a step has micro-batches or replicas,
    which are calls of another kind."""
    if problem.num_devices < 2 or problem.microbatch.max() >= 1 or problem.graph.replicas.any():
        return []
    if (call := problem.simulator.order_traits.call) is None:
        return []
    units = Units.of(problem, forward_units(problem))
    layers = _Layers(problem, units, np.where(problem.graph.is_in_phase("backward"), NO_CALL, call))
    widths = [width for width in range(2, problem.num_devices + 1) if problem.num_devices % width == 0]
    return [units.place_allowed(layers.on_grid(problem.num_devices // width, width)) for width in widths]


class _Layers:
    """The units along the layers, their calls, and what devices can do."""

    def __init__(self, problem: Problem, units: Units, call: I64) -> None:
        work_ns, _ = allowed_work(problem)
        speed = 1.0 / np.maximum(work_ns, 1)
        self.share = speed / speed.sum()  # [D]
        self.order = module_chain(problem, units, whole_layers=False).order
        self.work = units.work_ns.astype(np.float64)
        known = combined(np.maximum, units.index, call, units.num_units, -1)
        self.is_spread = (known < 0) & (units.resident_bytes > 0)  # parameters, which all calls use
        self.call = np.where(known >= 0, known, inherit(problem, call)[units.first_op])

    def on_grid(self, num_rows: int, num_columns: int) -> I64:
        """Returns devices [U]: a column for some calls, in which each row has some layers."""
        share = self.share.reshape(num_columns, num_rows)
        column = self._columns(share.sum(axis=1))
        row = np.zeros(len(self.call), np.int64)
        for number in range(num_columns):
            own = self.order[(column == number)[self.order]]
            row[own] = _cut(self.work[own], share[number])
        spread = self.is_spread[self.order]
        called = np.flatnonzero(~spread)
        beside = called[np.minimum(np.searchsorted(called, np.flatnonzero(spread)), len(called) - 1)]
        row[self.order[spread]] = row[self.order[beside]]
        for number in range(num_rows):
            own = self.order[spread & (row[self.order] == number)]
            column[own] = _cut(self.work[own] + 1.0, share[:, number])  # an update may take no time
        return column * num_rows + row

    def _columns(self, share: F64) -> I64:
        """Returns the column [U] of each unit: calls in turn, each whole, with work in these shares."""
        calls, index = np.unique(self.call, return_inverse=True)
        work = np.bincount(index, np.where(self.is_spread, 0.0, self.work), len(calls)).astype(np.float64)
        return np.where(self.is_spread, -1, _cut(work, share)[index])


def _cut(amounts: F64, share: F64) -> I64:
    """Returns the part of each of `amounts`, which are cut in turn into parts of these shares of their sum."""
    ends = np.cumsum(share)[:-1] / max(float(share.sum()), 1e-300)
    middle = np.cumsum(amounts) - amounts / 2
    return np.searchsorted(ends, middle / max(float(amounts.sum()), 1e-300), side="right")


@dataclass(frozen=True, eq=False)
class ReplicatedChain:
    """The same chain of units in each replica, to be cut into stages."""

    units: Units
    chains: tuple[Chain, ...]  # [R]
    devices: I64  # [R, S]

    def balanced_cuts(self) -> I64:
        """Returns cuts [R, S - 1] so that the longest stage is short: where, along a chain, another stage begins."""
        if self.devices.shape[1] == 1:
            return np.empty((len(self.chains), 0), np.int64)
        cuts = []
        for chain, devices in zip(self.chains, self.devices, strict=True):
            chosen = stages(self.units.problem, self.units, chain, devices)[chain.order]
            cuts.append(np.searchsorted(chosen, devices[1:]))
        return np.array(cuts, np.int64)

    def even_cuts(self) -> I64:
        """Returns cuts [R, S - 1] into stages of about equal work."""
        size = self.devices.shape[1]
        return self._at(np.broadcast_to(np.arange(1, size) / size, (len(self.chains), size - 1)))

    def shifted(self, cuts: I64, shares: F64) -> I64:
        """Returns `cuts` [R, S - 1] moved on by `shares` [S - 1] of a replica's work. Later cuts make way to one that
        moves on, and one that moves back stops at an earlier one."""
        passed = [np.concatenate(([0.0], done))[own] for done, own in zip(self._done, cuts, strict=True)]
        moved = np.where(shares == 0, cuts, self._at(np.array(passed) + shares))
        return np.maximum.accumulate(moved, axis=1)

    def place(self, cuts: I64) -> Placement:
        """Returns the placement [N] with stages that begin at `cuts` [R, S - 1]."""
        chosen = np.empty(self.units.num_units, np.int64)
        for chain, devices, own in zip(self.chains, self.devices, cuts, strict=True):
            chosen[chain.order] = devices[np.searchsorted(own, np.arange(len(chain.order)), side="right")]
        return self.units.place_allowed(chosen)

    @cached_property
    def _done(self) -> list[F64]:
        """The share of a replica's work that is done with each of its units, for each of R replicas."""
        sums = [np.cumsum(self.units.work_ns[chain.order], dtype=np.float64) for chain in self.chains]
        return [each / max(float(each[-1]), 1.0) for each in sums]

    def _at(self, shares: F64) -> I64:
        """Returns the cuts [R, S - 1] nearest to `shares` [R, S - 1] of a replica's work."""
        middles = [(done + np.concatenate(([0.0], done[:-1]))) / 2 for done in self._done]
        return np.array([np.searchsorted(middle, own) for middle, own in zip(middles, shares, strict=True)], np.int64)


def replicated_chains(problem: Problem) -> Iterator[ReplicatedChain]:
    """Yields chains to cut stages along: by layers, by modules, folded; none without replicas with ops of their own. A
    replica on one device needs no choice."""
    replica = problem.graph.replicas
    num_replicas = int(replica.max()) + 1
    size = problem.num_devices // num_replicas
    if num_replicas < 2 or size < 1:
        return
    units = Units.of(problem, forward_units(problem))
    replica_of_unit = replica[units.first_op]
    devices = np.arange(num_replicas * size).reshape(num_replicas, size)
    for chain in _chains(problem, units, size):
        numbers = replica_of_unit[chain.order]
        own = [replace(chain, order=chain.order[numbers == number]) for number in range(num_replicas)]
        if not all(len(each.order) for each in own):
            return
        yield ReplicatedChain(units, tuple(own), devices)


def replicated_stages(problem: Problem) -> Iterator[tuple[ReplicatedChain, I64]]:
    """Yields chains with cuts [R, S - 1] into stages: balanced ones, and of equal work."""
    for chain in replicated_chains(problem):
        yield chain, chain.balanced_cuts()
        if chain.devices.shape[1] > 1:
            yield chain, chain.even_cuts()


def _chains(problem: Problem, units: Units, size: int) -> Iterator[Chain]:
    if size > 1 and any(problem.graph.modules):
        yield from (module_chain(problem, units, whole_layers=whole) for whole in (True, False))
    yield folded_chain(problem, units)
