"""Sampling of the default policy: how each sample bends the weights, and how coarse and thorough it is.

No weights suit all graphs. A policy that draws several placements and is judged by the best one does better with
samples that differ by design than with samples that differ by chance (population training, N. Grinsztajn et al.,
"Winner takes it all", NeurIPS 2023). The design that did well on a graph can be varied there (search in a latent
space, F. Chalumeau et al., "Combinatorial optimization with policy adaptation using latent space search", NeurIPS
2023). A style is that latent: nothing in it is trained, and the policy is trained under styles drawn here.
K features of a unit on a device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import F32, F64
from gdp.policy.features import FEATURES, NUM_FEATURES, NUMBERS
from gdp.policy.rollout_arrays import RolloutOptions
from gdp.policy.settings import STYLES

_SPECIAL = [number for number, feature in enumerate(FEATURES) if feature.mixed_share is not None]
_MIXED_SHARES = [feature.mixed_share for feature in FEATURES if feature.mixed_share is not None]
_STAGES_SHARES = [FEATURES[number].stages_share for number in _SPECIAL]
# the earliest finish decides, as in list scheduling, perhaps with others: by name, scales to choose from
_FINISH = {"end later than elsewhere": (60.0,), "neighbours here, of all": (0.0, 0.0, 0.2, 0.5), "memory": (0.0, 0.5)}
_FINISH |= {"start later than elsewhere": (0.0, 10.0), "like units here, of those placed": (0.0, 1.0)}


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


def draw_styles(count: int, rng: np.random.Generator) -> list[Style]:
    """Draws styles to construct with: mostly mixtures of all features, else by the earliest finish or by stages."""
    kinds = rng.choice(STYLES.kinds, count, p=STYLES.kind_shares)
    by_finish, by_stages = kinds == "finish", kinds == "stages"
    first = _scales(rng, STYLES.spread, count)
    shares = np.where(by_stages[:, None], _STAGES_SHARES, _MIXED_SHARES)
    first[:, _SPECIAL] *= rng.random((count, len(_SPECIAL))) < shares
    first[by_finish] = 0.0
    for name, scales in _FINISH.items():
        first[by_finish, NUMBERS[name]] = rng.choice(scales, int(by_finish.sum()))
    sees_all = rng.random(count) < 0.5
    later = np.where(sees_all[:, None], _without_special(_scales(rng, STYLES.later_spread, count)), first)
    fine, sizes = rng.choice(STYLES.fine, count), rng.choice(STYLES.sizes, count, p=STYLES.size_shares)
    num_units = np.where(by_finish, fine, sizes)
    columns = (
        np.stack((first, later), axis=1).astype(np.float32),
        sees_all.tolist(),
        num_units.tolist(),
        (rng.random(count) < 0.5).tolist(),
        rng.choice(STYLES.most, count, p=STYLES.most_shares).tolist(),
        rng.choice(STYLES.slacks, count).tolist(),
        rng.choice((0.0, 0.5), count, p=(0.7, 0.3)).tolist(),
        rng.choice(STYLES.passes, count, p=STYLES.pass_shares).tolist(),
    )
    return [Style(*values) for values in zip(*columns, strict=True)]


def draw_style(rng: np.random.Generator) -> Style:
    """Draws one style; see `draw_styles`."""
    return draw_styles(1, rng)[0]


def draw_refinement(rng: np.random.Generator) -> Style:
    """Draws a style to refine an incumbent with, in any units."""
    scale = _without_special(_scales(rng, STYLES.later_spread, 1))[0]
    return Style(
        scale=np.stack((scale, scale)).astype(np.float32),
        sees_all=True,
        num_units=0,
        following=False,
        most=1.0,
        slack=float(rng.choice(STYLES.slacks[1:])),
        temperature=float(rng.choice(STYLES.refining_temperatures)),
        passes=2,
    )


def vary(style: Style, rng: np.random.Generator) -> Style:
    """Draws a style near to `style`."""
    return replace(
        style,
        scale=bent(style, STYLES.variation, rng),
        num_units=int(rng.choice(STYLES.sizes[:-1])) if rng.random() < 0.3 else style.num_units,
        passes=int(rng.choice(STYLES.passes)) if rng.random() < 0.3 else style.passes,
    )


def bent(style: Style, spread: float, rng: np.random.Generator) -> F32:
    """Draws scales [2, K] near to those of `style`; both passes alike where later ones see no more."""
    factors = np.exp(rng.normal(0.0, spread, (2, NUM_FEATURES)))
    if not style.sees_all:
        factors[1] = factors[0]
    return (style.scale * factors).astype(np.float32)


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


def _scales(rng: np.random.Generator, spread: float, count: int) -> F64:
    """Draws scales [S, K] around 1, some 0."""
    shape = count, NUM_FEATURES
    return np.exp(rng.normal(0.0, spread, shape)) * (rng.random(shape) >= STYLES.left_out)


def _without_special(scales: F64) -> F64:
    scales[:, _SPECIAL] = 0.0
    return scales
