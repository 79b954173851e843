"""The residual scorer: a small network that corrects the linear scores of devices; its parameters, without PyTorch.

    score = weights . device features  +  out . relu(hidden relu(device W + unit V + row) + bias)

`out` is zero before training, so an untrained policy scores by its weights alone.
U units, F unit features, K features of a unit on a device, H numbers of a hidden layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from gdp.arrays import F32
from gdp.policy.features import NUM_FEATURES
from gdp.policy.rollout_arrays import Residual
from gdp.policy.unit_features import SCORER_FEATURES

PREFIX = "residual."  # of the names of tensors in checkpoints
_LARGEST_FEATURE = 5.0  # few are larger: logarithms of ratios to next to nothing


@dataclass(frozen=True, eq=False)
class ResidualParameters:
    """The parameters of the residual scorer."""

    unit: F32  # [F, H]
    row: F32  # [2, H] bias of the first layer: of units that see those before them, of units that see all others
    device: F32  # [K, H]
    hidden: F32  # [H, H]
    bias: F32  # [H]
    out: F32  # [H]

    @classmethod
    def of(cls, tensors: Mapping[str, F32]) -> "ResidualParameters":
        """The parameters among the `tensors` of a checkpoint."""
        return cls(*(np.ascontiguousarray(tensors[PREFIX + name]) for name in names()))

    def on(self, features: F32) -> Residual:
        """Returns the network for the units with these `features` [U, F]."""
        of_unit = clipped(features) @ self.unit + self.row[:, None]
        return Residual(np.ascontiguousarray(of_unit), self.device, self.hidden, self.bias, self.out)


def names() -> tuple[str, ...]:
    """Returns the names of the parameters."""
    return tuple(field.name for field in fields(ResidualParameters))


def shapes(hidden: int) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each parameter in a network of `hidden` numbers a layer."""
    return {
        "unit": (len(SCORER_FEATURES), hidden),
        "row": (2, hidden),
        "device": (NUM_FEATURES, hidden),
        "hidden": (hidden, hidden),
        "bias": (hidden,),
        "out": (hidden,),
    }


def clipped(features: F32) -> F32:
    """Returns `features` within the range that the network takes."""
    return np.clip(features, -_LARGEST_FEATURE, _LARGEST_FEATURE)
