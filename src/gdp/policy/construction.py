"""Constructing placements by weighing features of devices: what the default policy does, without PyTorch.

    problem --grouped()--> UnitInstance --place(styles)--> placements

Searches ask for many placements and import no more than this; `scheduler.py` trains the weights.
S samples, P passes, U units, D devices, N ops, K features of a unit on a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from gdp.errors import InputError
from gdp.graph import I64
from gdp.policy.instance import Instance
from gdp.policy.rollout import Orders, Record, RolloutArrays, roll_out
from gdp.policy.styles import Style, orders_of
from gdp.policy.unit_features import unit_features
from gdp.policy.units import UnitGraph, UnitSource
from gdp.problem import Placement, Problem

F32 = npt.NDArray[np.float32]

_LARGEST_WEIGHT = 1e6  # scores of larger ones could overflow; trained ones are below 10
_FREED = (0.08, 0.6)  # share of the units that choose again when an incumbent is refined


@dataclass(frozen=True, eq=False)
class UnitInstance(Instance):
    """A problem in units."""

    units: UnitGraph
    arrays: RolloutArrays

    @cached_property
    def features(self) -> F32:
        """[U, F] what a network sees of each unit."""
        return unit_features(self.problem, self.units)

    @property
    def refines(self) -> bool:
        """Whether there is an incumbent."""
        return int(self.units.incumbent[0]) >= 0


@dataclass(eq=False)
class _Sources:
    """The last problems seen, so that drawing another grouping of one is cheap."""

    limit: int = 256
    known: dict[int, tuple[Problem, UnitSource]] = field(default_factory=dict)

    def of(self, problem: Problem) -> UnitSource:
        if id(problem) not in self.known:
            while len(self.known) >= self.limit:
                self.known.pop(next(iter(self.known)))
            self.known[id(problem)] = (problem, UnitSource.of(problem))
        return self.known[id(problem)][1]


def check_weights(base: F32) -> None:
    """InputError for weights that are finite and yet too large to add up."""
    if np.abs(base).max() > _LARGEST_WEIGHT:
        raise InputError(f"tensor 'base' has weights beyond {_LARGEST_WEIGHT:g}; the file is damaged, train it again")


class Constructor:
    """Draws placements; `weights` gives [2, U, K] how each unit of an instance weighs the features of devices: one
    that sees what came before it, or one that sees all others."""

    def __init__(self, weights: Callable[[UnitInstance], F32]) -> None:
        self.weights = weights
        self._sources = _Sources()

    @classmethod
    def alike(cls, base: F32) -> "Constructor":
        """All units weigh by `base` [2, K]."""
        return cls(lambda instance: np.repeat(base[:, None], instance.units.num_units, axis=1))

    def grouped(
        self,
        problem: Problem,
        num_units: int,
        rng: np.random.Generator,
        *,
        following: bool | None = None,
        incumbent: Placement | None = None,
    ) -> UnitInstance:
        """About `num_units` units, to place or, with `incumbent` [N], to refine; see `UnitSource.draw`."""
        source = self._sources.of(problem)
        units = source.draw(num_units, rng, following=following, incumbent=incumbent)
        return UnitInstance(problem, units, RolloutArrays.of(problem, units, source.equal_before))

    def place(self, instance: UnitInstance, styles: Sequence[Style], rng: np.random.Generator) -> I64:
        """[S, N] a placement in each of `styles`, in the units of `instance`; nothing is recorded to learn from."""
        return self.roll_out(instance, styles, rng, num_recorded=0)[0]

    def roll_out(
        self, instance: UnitInstance, styles: Sequence[Style], rng: np.random.Generator, *, num_recorded: int
    ) -> tuple[I64, F32, Orders, Record]:
        """(placements [S, N], weights, what was asked for, the record of the first `num_recorded` samples)."""
        num_units, num_devices = instance.units.num_units, instance.problem.num_devices
        weights = self.weights(instance)
        orders = orders_of(styles, num_devices, refines=instance.refines)
        num_passes = int(orders.passes.max())
        record = Record.empty(num_recorded, num_passes, num_units, num_devices)
        devices = np.empty((len(styles), num_units), np.int64)
        roll_out(
            instance.arrays,
            weights,
            orders,
            _fixed(instance, len(styles), rng),
            instance.units.incumbent,
            rng.random((len(styles), num_passes, num_units)),
            devices,
            record,
        )
        return devices[:, instance.units.unit_of_op], weights, orders, record


def _fixed(instance: UnitInstance, num_samples: int, rng: np.random.Generator) -> I64:
    """[S, U] the device of each unit that stays, -1 for those that choose: all, or, to refine an incumbent, a part.

    The part is drawn for each sample: units alone, a stretch of the step, or a unit with those nearest to it.
    """
    incumbent, near = instance.units.incumbent, instance.arrays.near
    num_units = len(incumbent)
    fixed = np.repeat(incumbent[None], num_samples, axis=0)
    if not instance.refines:
        return fixed
    received = csr_array((near.shares, near.units, near.offsets), shape=(num_units, num_units)).T
    for sample in range(num_samples):
        share = rng.uniform(*_FREED)
        count = max(round(share * num_units), 1)
        kind = rng.integers(3)
        if kind == 0:
            freed = rng.choice(num_units, count, replace=False)
        elif kind == 1:
            freed = (rng.integers(num_units) + np.arange(count)) % num_units
        else:
            closeness = np.zeros(num_units)
            closeness[rng.integers(num_units)] = 1.0
            for _ in range(3):  # its neighbours, theirs, and so on
                closeness = closeness + received @ closeness
            freed = np.argsort(-closeness, kind="stable")[:count]
        fixed[sample, freed] = -1
    return fixed
