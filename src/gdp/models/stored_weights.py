"""Weights that are stored in fewer bits than the type that they are captured in, by the names of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ATTRIBUTE = "gdp_stored_weights"  # the attribute of a module to capture that has a `StoredWeight` by parameter name


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised parameter: its bytes with scales and zero points, and the type that its products are computed in."""

    num_bytes: int
    arithmetic: str = ""  # "": the captured type; kernels unpack the weights while they read them


def stored_weights(module: Any) -> Mapping[str, StoredWeight]:
    """Returns the quantised parameters of a module, by name; {} if it has none."""
    weights: Mapping[str, StoredWeight] = getattr(module, ATTRIBUTE, {})
    return weights
