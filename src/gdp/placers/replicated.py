"""Stages of each replica on devices of its own: what users run, where a step has several replicas of a model.

    2 replicas, 4 devices    gpu0, gpu1 | replica 0 in two stages
                             gpu2, gpu3 | replica 1 in two stages

They are starts for a search over steps with replicas. U units, R replicas, S devices of a replica.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gdp.arrays import F64, I64
from gdp.placers.contiguous import Chain, folded_chain, module_chain, stages
from gdp.simulator.problem import Placement, Problem
from gdp.units.forward_units import forward_units
from gdp.units.units import Units


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
        """Returns `cuts` [R, S - 1] moved on by `shares` [S - 1] of a replica's work.

        Later cuts make way to one that moves on, and one that moves back stops at an earlier one.
        """
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
    """Yields chains to cut stages along: by layers, by modules, folded; none without replicas with ops of their own.

    A replica on one device needs no choice.
    """
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
