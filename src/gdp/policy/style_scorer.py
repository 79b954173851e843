"""The style scorer: a small network that says, from the features of a problem, which styles will do well on it.

    problem [M] --two layers--> [H] --+
                                      +--> relu --> layer --> relu --> the logarithm of a style's rank, low is good
    style [F] ------one layer-------> [H] --+

The problem's part is computed once, and a few hundred styles are scored in a millisecond, without PyTorch.
M features of a problem, F numbers of a style, K features of a unit on a device, H numbers of a layer, S styles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import F32, F64, I64
from gdp.policy.features import NUM_FEATURES
from gdp.policy.sampling import Style
from gdp.policy.settings import SCORER
from gdp.policy.unit_source import NUM_PROBLEM_FEATURES, UnitSource, problem_features

PREFIX = "styles."  # of the names of tensors in checkpoints
_GROUPING, _FURTHER = 3, 6  # numbers of a style's grouping, which come first, and others beside its scales
NUM_STYLE_NUMBERS = _GROUPING + 4 * NUM_FEATURES + _FURTHER


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
