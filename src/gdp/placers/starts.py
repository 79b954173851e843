"""Starts for a search: interleaved stages, where a step has micro-batches, and grids of layers and calls.

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
N ops, U units, D devices.
"""

import numpy as np

from gdp.arrays import F64, I64
from gdp.graph.layers import NO_CALL
from gdp.placers.base import allowed_work, device_subsets, inherit
from gdp.placers.contiguous import module_chain, stages
from gdp.placers.settings import INTERLEAVED
from gdp.simulator.problem import Placement, Problem
from gdp.units.forward_units import forward_units
from gdp.units.units import Units


def interleaved_stages(problem: Problem) -> list[Placement]:
    """Returns placements [N] with 2, 3 and 4 stages a device, in the order of modules; none without micro-batches."""
    if problem.microbatch.max() < 1:
        return []
    units = Units.of(problem, forward_units(problem))
    devices = device_subsets(problem, smallest=problem.num_devices)[0]
    chains = [module_chain(problem, units, whole_layers=whole) for whole in (False, True)]
    return [
        units.place_allowed(stages(problem, units, chain, np.tile(devices, count)))
        for chain in chains
        for count in INTERLEAVED.stages_per_device
    ]


def call_grids(problem: Problem) -> list[Placement]:
    """Returns placements [N], one for each way to lay all devices out as a grid with several columns of calls.

    There are none where the forward pass does not call its layers several times, or a step has micro-batches or
    replicas, which are calls of another kind.
    """
    if problem.num_devices < 2 or problem.microbatch.max() >= 1 or problem.graph.replicas.any():
        return []
    if (call := problem.simulator.order_traits.call) is None:
        return []
    units = Units.of(problem, forward_units(problem))
    layers = _Layers(problem, units, np.where(problem.graph.is_in_phase("backward"), NO_CALL, call))
    return [
        units.place_allowed(layers.on_grid(problem.num_devices // num_columns, num_columns))
        for num_columns in range(2, problem.num_devices + 1)
        if problem.num_devices % num_columns == 0
    ]


class _Layers:
    """The units along the layers, their calls, and what devices can do."""

    def __init__(self, problem: Problem, units: Units, call: I64) -> None:
        work_ns, _ = allowed_work(problem)
        speed = 1.0 / np.maximum(work_ns, 1)
        self.share = speed / speed.sum()  # [D]
        self.order = module_chain(problem, units, whole_layers=False).order
        self.work = units.work_ns.astype(np.float64)
        known = np.full(units.num_units, -1)
        np.maximum.at(known, units.index, call)
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
