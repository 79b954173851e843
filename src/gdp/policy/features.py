"""The features by which the default policy weighs devices for the unit at hand: one row each. The compiled roll-out
(`rollout.py`) computes them in this order, and a checkpoint stores weights in this order: rows may be appended, never
moved. A test holds the roll-out against a plain computation of each row. K features."""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Feature:
    """A number, mostly between 0 and 4, that tells how a device stands to the unit at hand."""

    key: str  # of its column in `AT`
    name: str
    weight: float  # of units that see the units before them
    later_weight: float | None = None  # of units that see all others; None: the same
    mixed_share: float | None = None  # of mixed styles that use it, in their first pass alone; None: all, in all passes
    stages_share: float = 1.0  # of styles by stages that use it, where mixed styles have a share


# the weights are those of a plain list scheduler, in powers of two, set by hand: where training begins
FEATURES = (
    Feature("near", "neighbours here, of all", 4),
    Feature("near_placed", "neighbours here, of those placed", 0),
    Feature("second", "neighbours' neighbours here", 2),
    Feature("like", "like units here, of those placed", 1),
    Feature("start_later", "start later than elsewhere", -1),
    Feature("end_later", "end later than elsewhere", -1),
    Feature("load", "load", -4),
    Feature("load_after", "load after, of the highest", 0),
    Feature("meanwhile", "load meanwhile", -1),
    Feature("meanwhile_above", "load meanwhile above the lowest", -1),
    Feature("memory", "memory", -2),
    Feature("memory_short", "memory short", -4),
    Feature("empty", "empty", 1),
    Feature("empty_others", "empty, by how many are not", -1),
    Feature("before", "unit before is here", 1),
    Feature("recent", "recent units here", -1),
    Feature("slower", "slower than the fastest", -8),
    Feature("sending", "inputs to send", -4),
    Feature("sending_above", "inputs to send above the lowest", -8),
    Feature("like_meanwhile", "like units here, by load meanwhile", -1),
    Feature("old", "was here", 0, later_weight=2),
    Feature("above_fair", "load after, above a fair share", -4, mixed_share=0.25),
    Feature("before_fair", "unit before is here, within a fair share", 4, mixed_share=0.0),
    Feature("most_like", "most of like units are here", 1, mixed_share=0.25, stages_share=0.0),
)
NUM_FEATURES = len(FEATURES)
AT: Any = namedtuple("AT", [feature.key for feature in FEATURES])(*range(NUM_FEATURES))
"""The column of each feature, by its key."""
NUMBERS: Mapping[str, int] = MappingProxyType({feature.name: number for number, feature in enumerate(FEATURES)})
INITIAL_WEIGHTS = (
    tuple(feature.weight for feature in FEATURES),
    tuple(feature.weight if feature.later_weight is None else feature.later_weight for feature in FEATURES),
)  # [2, K] of units that see the units before them, and of units that see all others
