"""Construction of placements by weighing features of devices: the default policy, without PyTorch.

    problem --grouped()--> UnitInstance --place(styles)--> placements

Searches draw many placements and import no more than this; `scheduler.py` holds the weights in training.
S samples, P passes, U units, D devices, N ops, K features of a unit on a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gdp.arrays import F32, I64
from gdp.errors import InputError
from gdp.policy.rollout import roll_out
from gdp.policy.rollout_arrays import RolloutArrays, RolloutOptions, RolloutRecord
from gdp.policy.settings import GROUPING
from gdp.policy.style_scorer import Style, StyleScorer, StyleScores, options_of
from gdp.policy.unit_source import UnitSource
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units

_MOST_SOURCES = 256  # that are kept, of the last problems
_LARGEST_WEIGHT = 1e6  # scores of larger ones could overflow; trained ones are below 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes of the default policy, and its training instances."""

    num_units: tuple[int, ...] = (50, 100, 200)  # drawn from for each instance
    refining: float = 0.6  # share of training instances that refine an incumbent
    style_scorer: int = 0  # numbers of each hidden layer of the style scorer; none: styles are random

    def __post_init__(self) -> None:
        if not self.num_units or min(self.num_units) < 1:
            raise ValueError(f"num_units is {self.num_units}; numbers of at least 1 are expected")
        if self.style_scorer < 0:
            raise ValueError(f"style_scorer is {self.style_scorer}; at least 0 is expected")


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem with a policy's features of it, computed once; each policy has its own subclass."""

    problem: Problem


@dataclass(frozen=True, eq=False)
class UnitInstance(Instance):
    """A problem in units."""

    units: Units
    arrays: RolloutArrays
    incumbent: I64  # [U] device of each unit in the placement to refine, -1 without one

    @property
    def refines(self) -> bool:
        """True if there is an incumbent."""
        return int(self.incumbent[0]) >= 0


def check_weights(tensors: Mapping[str, F32]) -> None:
    """Raises InputError for finite weights that are too large to add up."""
    for name, tensor in tensors.items():
        if np.abs(tensor).max(initial=0.0) > _LARGEST_WEIGHT:
            raise InputError(
                f"tensor {name!r} has weights beyond {_LARGEST_WEIGHT:g}; the file is damaged, train it again"
            )


class Constructor:
    """Draws placements. `weights` returns the weights [2, K] of features as they are now, `style_scorer` the scorer of
    styles, if the policy has learned one."""

    def __init__(
        self, weights: Callable[[], F32], style_scorer: Callable[[], StyleScorer | None] = lambda: None
    ) -> None:
        self.weights, self.style_scorer = weights, style_scorer
        self.source = lru_cache(_MOST_SOURCES)(UnitSource.of)  # makes another grouping of a problem cheap

    @classmethod
    def of(cls, weights: F32, style_scorer: StyleScorer | None = None) -> "Constructor":
        """Returns a constructor with these `weights` [2, K]."""
        return cls(lambda: weights, lambda: style_scorer)

    def scores(self, problem: Problem) -> StyleScores | None:
        """Returns the scores of styles on `problem`, if the policy has learned any."""
        scorer = self.style_scorer()
        return None if scorer is None else scorer.on(self.source(problem))

    def grouped(
        self,
        problem: Problem,
        num_units: int,
        rng: np.random.Generator,
        *,
        following: bool | None = None,
        incumbent: Placement | None = None,
    ) -> UnitInstance:
        """Draws about `num_units` units, to place or, with `incumbent` [N], to refine; see `UnitSource.draw`."""
        source = self.source(problem)
        units = source.draw(num_units, rng, following=following, incumbent=incumbent)
        devices = np.full(units.num_units, -1) if incumbent is None else incumbent[units.first_op]
        return UnitInstance(problem, units, RolloutArrays.of(source, units), devices)

    def place(self, instance: UnitInstance, styles: Sequence[Style], rng: np.random.Generator) -> I64:
        """Returns a placement [S, N] in each of `styles`, in the units of `instance`, without a record for training."""
        return self.roll_out(instance, styles, rng, num_recorded=0)[0]

    def roll_out(
        self, instance: UnitInstance, styles: Sequence[Style], rng: np.random.Generator, *, num_recorded: int
    ) -> tuple[I64, RolloutOptions, RolloutRecord]:
        """Returns (placements [S, N], options, the record of the first `num_recorded` samples)."""
        num_units, num_devices = instance.units.num_units, instance.problem.num_devices
        options = options_of(styles, num_devices, refines=instance.refines)
        num_passes = int(options.passes.max())
        record = RolloutRecord.empty(num_recorded, num_passes, num_units, num_devices)
        devices = np.empty((len(styles), num_units), np.int64)
        fixed, draws = _fixed(instance, len(styles), rng), rng.random((len(styles), num_passes, num_units))
        roll_out(instance.arrays, self.weights(), options, fixed, instance.incumbent, draws, devices, record)
        return devices[:, instance.units.index], options, record


def _fixed(instance: UnitInstance, num_samples: int, rng: np.random.Generator) -> I64:
    """Returns the device of each unit that stays, -1 for a unit that chooses, [S, U]. All units choose, or, to refine
    an incumbent, a drawn part: single units, a stretch of the step, or a unit with its nearest ones."""
    from scipy.sparse import csr_array  # a quarter of a second, which most commands never need

    incumbent, near = instance.incumbent, instance.arrays.near
    num_units = len(incumbent)
    fixed = np.repeat(incumbent[None], num_samples, axis=0)
    if not instance.refines:
        return fixed
    received = csr_array((near.shares, near.units, near.offsets), shape=(num_units, num_units)).T
    for sample in range(num_samples):
        share = np.exp(rng.uniform(*np.log(GROUPING.freed)))
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
