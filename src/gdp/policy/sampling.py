"""Sampling of the default policy: how each sample bends the weights, and how coarse and thorough it is.

No weights suit all graphs. A policy that draws several placements and is judged by the best one does better with
samples that differ by design than with samples that differ by chance (population training, N. Grinsztajn et al.,
"Winner takes it all", NeurIPS 2023). The design that did well on a graph can be varied there (search in a latent
space, F. Chalumeau et al., "Combinatorial optimization with policy adaptation using latent space search", NeurIPS
2023). A style is that latent: nothing in it is trained, and the policy is trained under styles drawn here.
K features of a unit on a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import F32, F64
from gdp.policy.features import FEATURES, NUM_FEATURES, NUMBERS
from gdp.policy.rollout_arrays import RolloutOptions

SIZES = (50, 100, 200, 400, 800, 1500)  # numbers of units
_SIZE_SHARES = (0.2, 0.25, 0.25, 0.15, 0.1, 0.05)
_FINE = (200, 400, 800, 1500)
_KINDS, _KIND_SHARES = ("mixed", "finish", "stages"), (0.75, 0.1, 0.15)
_PASSES, _PASS_SHARES = (1, 2, 3, 5), (0.35, 0.2, 0.25, 0.2)
_MOST, _MOST_SHARES = (0.25, 0.5, 0.75, 1.0), (0.15, 0.15, 0.15, 0.55)
_SLACKS = (0.6, 0.8, 1.0, 1.3, 1e9)
_SPREAD, _LATER_SPREAD, _VARIATION = 0.7, 0.5, 0.3  # standard deviations of the logarithm of a scale
_LEFT_OUT = 0.1  # probability of each feature to be left out
_SPECIAL = [number for number, feature in enumerate(FEATURES) if feature.mixed_share is not None]
_MIXED_SHARES = [feature.mixed_share for feature in FEATURES if feature.mixed_share is not None]
_STAGES_SHARES = [FEATURES[number].stages_share for number in _SPECIAL]
# the earliest finish decides, as in list scheduling, perhaps with others: by name, scales to choose from
_FINISH = {
    "end later than elsewhere": (60.0,),
    "neighbours here, of all": (0.0, 0.0, 0.2, 0.5),
    "memory": (0.0, 0.5),
    "start later than elsewhere": (0.0, 10.0),
    "like units here, of those placed": (0.0, 1.0),
}


@dataclass(frozen=True, eq=False, slots=True)
class Style:
    """The options of one placement's roll-out."""

    scale: F32  # [2, K] features are multiplied by it, in the first pass and in later ones
    sees_all: bool  # later passes have the weights of units that see all others
    num_units: int
    following: bool  # backward ops go with their forward ops
    most: float  # share of the devices to use
    slack: float  # times the memory that an estimate may fill
    temperature: float
    passes: int


def draw_style(rng: np.random.Generator) -> Style:
    """Draws a style to construct with: mostly a mixture of all features, else by the earliest finish or by stages."""
    kind = str(rng.choice(_KINDS, p=_KIND_SHARES))
    first = _scales(rng, _SPREAD)
    first[_SPECIAL] *= rng.random(len(_SPECIAL)) < (_MIXED_SHARES if kind == "mixed" else _STAGES_SHARES)
    num_units = int(rng.choice(SIZES, p=_SIZE_SHARES))
    if kind == "finish":
        first = np.zeros(NUM_FEATURES)
        for name, scales in _FINISH.items():
            first[NUMBERS[name]] = rng.choice(scales)
        num_units = int(rng.choice(_FINE))
    sees_all = bool(rng.random() < 0.5)
    later = _without_special(_scales(rng, _LATER_SPREAD)) if sees_all else first
    return Style(
        scale=np.stack((first, later)).astype(np.float32),
        sees_all=sees_all,
        num_units=num_units,
        following=bool(rng.random() < 0.5),
        most=float(rng.choice(_MOST, p=_MOST_SHARES)),
        slack=float(rng.choice(_SLACKS)),
        temperature=float(rng.choice((0.0, 0.5), p=(0.7, 0.3))),
        passes=int(rng.choice(_PASSES, p=_PASS_SHARES)),
    )


def draw_refinement(rng: np.random.Generator) -> Style:
    """Draws a style to refine an incumbent with, in any units."""
    scale = _without_special(_scales(rng, _LATER_SPREAD))
    return Style(
        scale=np.stack((scale, scale)).astype(np.float32),
        sees_all=True,
        num_units=0,
        following=False,
        most=1.0,
        slack=float(rng.choice(_SLACKS[1:])),
        temperature=1.0,
        passes=2,
    )


def vary(style: Style, rng: np.random.Generator) -> Style:
    """Draws a style near to `style`."""
    factors = np.exp(rng.normal(0.0, _VARIATION, (2, NUM_FEATURES)))
    if not style.sees_all:
        factors[1] = factors[0]
    return replace(
        style,
        scale=(style.scale * factors).astype(np.float32),
        num_units=int(rng.choice(SIZES[:-1])) if rng.random() < 0.3 else style.num_units,
        passes=int(rng.choice(_PASSES)) if rng.random() < 0.3 else style.passes,
    )


def options_of(styles: Sequence[Style], num_devices: int, *, refines: bool) -> RolloutOptions:
    """Returns `styles` as options of the compiled roll-out; a refinement sees all others from the first pass on."""
    most = [max(int(np.ceil(style.most * num_devices)), 1) for style in styles]
    return RolloutOptions(
        scale=np.stack([style.scale for style in styles]),
        row=np.array([(int(refines), int(refines or style.sees_all)) for style in styles], np.int64),
        temperature=np.array([style.temperature for style in styles]),
        slack=np.array([style.slack for style in styles]),
        most=np.array(most, np.int64),
        passes=np.array([style.passes for style in styles], np.int64),
    )


def _scales(rng: np.random.Generator, spread: float) -> F64:
    """Draws scales [K] around 1, some 0."""
    return np.exp(rng.normal(0.0, spread, NUM_FEATURES)) * (rng.random(NUM_FEATURES) >= _LEFT_OUT)


def _without_special(scales: F64) -> F64:
    scales[_SPECIAL] = 0.0
    return scales
