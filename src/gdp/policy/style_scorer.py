"""The style scorer: a small network that says, from the features of a problem, which styles will do well on it.

    problem [M] --two layers--> [H] --+
                                      +--> relu --> layer --> relu --> the logarithm of a style's rank, low is good
    style [F] ------one layer-------> [H] --+

The problem's part is computed once, and a few hundred styles are scored in a millisecond, without PyTorch.
M features of a problem, F numbers of a style, K features of a unit on a device, H numbers of a layer, S styles.

A style says how a sample bends the weights, and how coarse and thorough it is. No weights suit all graphs. A policy
that draws several placements and is judged by the best one does better with samples that differ by design than with
samples that differ by chance (population training, N. Grinsztajn et al., "Winner takes it all", NeurIPS 2023). The
design that did well on a graph can be varied there (search in a latent space, F. Chalumeau et al., "Combinatorial
optimization with policy adaptation using latent space search", NeurIPS 2023). A style is that latent: nothing in it is
trained, and the policy is trained under styles drawn here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import F32, F64, I64
from gdp.policy.features import FEATURES, NUM_FEATURES, NUMBERS
from gdp.policy.rollout_arrays import RolloutOptions
from gdp.policy.settings import SCORER, STYLES
from gdp.policy.unit_source import NUM_PROBLEM_FEATURES, UnitSource, problem_features

PREFIX = "styles."  # of the names of tensors in checkpoints
_GROUPING, _FURTHER = 3, 6  # numbers of a style's grouping, which come first, and others beside its scales
NUM_STYLE_NUMBERS = _GROUPING + 4 * NUM_FEATURES + _FURTHER
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


@dataclass(frozen=True, eq=False)
class StyleScorer:
    """The parameters."""

    mean: F32  # [M] of problems trained on
    deviation: F32  # [M]
    problem: F32  # [M, H]
    problem_bias: F32  # [H]
    mixing: F32  # [H, H]
    style: F32  # [F, H]
    bias: F32  # [H]
    hidden: F32  # [H, H]
    hidden_bias: F32  # [H]
    out: F32  # [H]

    @classmethod
    def of(cls, tensors: Mapping[str, F32]) -> "StyleScorer":
        """The parameters among the `tensors` of a checkpoint."""
        return cls(*(tensors[PREFIX + name] for name in _AXES))

    def on(self, source: UnitSource) -> "StyleScores":
        """Returns the scorer of styles on one problem."""
        features = (problem_features(source) - self.mean) / self.deviation
        of_problem = np.maximum(features @ self.problem + self.problem_bias, 0.0) @ self.mixing + self.bias
        return StyleScores(self, of_problem.astype(np.float32), source.problem.num_devices)


@dataclass(frozen=True, eq=False)
class StyleScores:
    """The scores of styles on one problem."""

    scorer: StyleScorer
    of_problem: F32  # [H]
    num_devices: int

    def last_layer(self, numbers: F32) -> F32:
        """Returns [S, H] for styles with these `numbers` [S, F], by `style_numbers`."""
        scorer = self.scorer
        first = np.maximum(numbers @ scorer.style + self.of_problem, 0.0)
        layer: F32 = np.maximum(first @ scorer.hidden + scorer.hidden_bias, 0.0)
        return layer

    def of(self, numbers: F32) -> F32:
        """Returns [S] for styles with these `numbers` [S, F]; low is good."""
        scores: F32 = self.last_layer(numbers) @ self.scorer.out
        return scores

    def for_one_grouping(self, styles: Sequence[Style], numbers: F32) -> tuple[Style, I64]:
        """Returns (the best of `styles`, the positions [S] of all, those first that are best in its grouping).
        `numbers` [S, F] are those of the styles."""
        best = styles[int(np.argmin(self.of(numbers)))]
        in_its_grouping = in_grouping(numbers, best.num_units, best.following)
        return best, np.argsort(self.of(in_its_grouping), kind="stable")

    def learn(self, numbers: F32, ranks: F64) -> "StyleScores":
        """Returns scores that also know how styles with these `numbers` [S, F] ranked on the problem, from 0 to 1. The
        weights of the last layer are moved by ridge regression: a linear model with a prior, as in neural linear
        bandits (C. Riquelme, G. Tucker and J. Snoek, "Deep Bayesian bandits showdown", ICLR 2018)."""
        layer, errors = self.last_layer(numbers), target(ranks) - self.of(numbers)
        layer, errors = layer - layer.mean(axis=0), errors - errors.mean()
        change = np.linalg.solve(layer.T @ layer + SCORER.prior * np.eye(layer.shape[1]), layer.T @ errors)
        return replace(self, scorer=replace(self.scorer, out=(self.scorer.out + change).astype(np.float32)))


def target(ranks: F64) -> F64:
    """Returns the scores that styles with these `ranks`, from 0, the best, to 1, should have."""
    return np.asarray(np.log(ranks + SCORER.first_rank), np.float64)


_AXES = {"mean": "M", "deviation": "M", "problem": "MH", "problem_bias": "H", "mixing": "HH"}
_AXES |= {"style": "FH", "bias": "H", "hidden": "HH", "hidden_bias": "H", "out": "H"}


def shapes(hidden: int) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each parameter in a network of `hidden` numbers a layer."""
    sizes = {"M": NUM_PROBLEM_FEATURES, "F": NUM_STYLE_NUMBERS, "H": hidden}
    return {name: tuple(sizes[axis] for axis in axes) for name, axes in _AXES.items()}


def style_numbers(styles: Sequence[Style], num_devices: int) -> F32:
    """Returns [S, F]: logarithms of the scales, which are used at all, and the other options."""
    scales = np.stack([style.scale.reshape(-1) for style in styles])
    is_used = scales != 0
    most = np.array([style.most for style in styles])
    further = (
        [style.sees_all for style in styles],
        most,
        np.ceil(most * num_devices) <= 1,
        np.minimum(np.log([style.slack for style in styles]), SCORER.ample_log_slack),
        [style.temperature for style in styles],
        np.log([style.passes for style in styles]),
    )
    logs = np.log(np.where(is_used, scales, np.float32(1.0)))
    grouping = [_grouping_numbers(style.num_units, style.following) for style in styles]
    return np.hstack([grouping, logs, is_used, np.stack(further, axis=1)]).astype(np.float32)


def in_grouping(numbers: F32, num_units: int, following: bool) -> F32:
    """Returns `numbers` [S, F] of styles as if all had this grouping."""
    numbers = numbers.copy()
    numbers[:, :_GROUPING] = _grouping_numbers(num_units, following)
    return numbers


def _grouping_numbers(num_units: int, following: bool) -> tuple[float, ...]:
    log_units = float(np.log(num_units)) - SCORER.usual_log_units
    return log_units, log_units**2 - 1.0, float(following)
