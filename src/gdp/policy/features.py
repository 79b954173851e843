"""The features by which the default policy weighs devices for the unit at hand: one row each.

The compiled roll-out (`rollout.py`) computes them in this order, and a checkpoint stores weights in this order: rows
may be appended, never moved. A test holds the roll-out against a plain computation of each row.
K features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Feature:
    """A number, mostly between 0 and 4, that tells how a device stands to the unit at hand."""

    name: str
    weight: float  # of units that see the units before them
    later_weight: float | None = None  # of units that see all others; None: the same
    knows_devices: bool = False  # depends on costs, loads, links or memory, not only on places of units
    mixed_share: float | None = None  # of mixed styles that use it, in their first pass alone; None: all, in all passes
    stages_share: float = 1.0  # of styles by stages that use it, where mixed styles have a share


# the weights are those of a plain list scheduler, in powers of two, set by hand: where training begins
FEATURES = (
    Feature("neighbours here, of all", 4),
    Feature("neighbours here, of those placed", 0),
    Feature("neighbours' neighbours here", 2),
    Feature("like units here, of those placed", 1),
    Feature("start later than elsewhere", -1, knows_devices=True),
    Feature("end later than elsewhere", -1, knows_devices=True),
    Feature("load", -4, knows_devices=True),
    Feature("load after, of the highest", 0, knows_devices=True),
    Feature("load meanwhile", -1, knows_devices=True),
    Feature("load meanwhile above the lowest", -1, knows_devices=True),
    Feature("memory", -2, knows_devices=True),
    Feature("memory short", -4, knows_devices=True),
    Feature("empty", 1),
    Feature("empty, by how many are not", -1),
    Feature("unit before is here", 1),
    Feature("recent units here", -1),
    Feature("slower than the fastest", -8, knows_devices=True),
    Feature("inputs to send", -4, knows_devices=True),
    Feature("inputs to send above the lowest", -8, knows_devices=True),
    Feature("like units here, by load meanwhile", -1, knows_devices=True),
    Feature("was here", 0, later_weight=2),
    Feature("load after, above a fair share", -4, knows_devices=True, mixed_share=0.25),
    Feature("unit before is here, within a fair share", 4, knows_devices=True, mixed_share=0.0),
    Feature("most of like units are here", 1, mixed_share=0.25, stages_share=0.0),
)
NUM_FEATURES = len(FEATURES)
NUMBERS: Mapping[str, int] = MappingProxyType({feature.name: number for number, feature in enumerate(FEATURES)})
INITIAL_WEIGHTS = (
    tuple(feature.weight for feature in FEATURES),
    tuple(feature.weight if feature.later_weight is None else feature.later_weight for feature in FEATURES),
)
"""[2, K] of units that see the units before them, and of units that see all others."""
