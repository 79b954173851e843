"""Weights that are stored in fewer bits than the type that they are captured in, by the names of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gdp.errors import InputError

ATTRIBUTE = "gdp_stored_weights"
"""The attribute of a module to capture that has a `StoredWeight` by parameter name."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised parameter: its bytes with scales and zero points, and the type that its products are computed in."""

    num_bytes: int
    arithmetic: str = ""  # "": the captured type; kernels unpack the weights while they read them


def stored_weights(module: Any) -> Mapping[str, StoredWeight]:
    """Returns the quantised parameters of a module, by name; {} if it has none."""
    weights: Mapping[str, StoredWeight] = getattr(module, ATTRIBUTE, {})
    return weights


def refuse_quantised(module: Any, text: str, verb: str) -> None:
    """Raises InputError if the weights of the model `text` are quantised, which the capture's program does not do."""
    if stored_weights(module):
        raise InputError(
            f"{text}: has quantised weights; gdp places it and cannot {verb} it: {verb} the model in its own dtype, "
            "or export the plan"
        )
