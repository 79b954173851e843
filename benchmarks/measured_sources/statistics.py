"""Figures of predictions: errors, ranks among rows of one group, and what choosing by a prediction costs."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.measured_sources.source import PredictedRow
from gdp.cluster.device import COMPILE, EAGER

PARTS = SET, JUDGED = "set", "judged"
FACTORS: Mapping[str, Callable[[PredictedRow], str]] = {
    "card": lambda each: each.row.card,
    "runtime": lambda each: each.row.runtime,
    "kind": lambda each: each.kind,
}


def figures(predictions: Sequence[PredictedRow]) -> dict[str, Any]:
    """Returns the figures of some rows, by name; ranks and regrets are None where there is nothing to rank or choose.

    Rows of a group are ranked where there are three or more.
    """
    errors = np.array([each.error for each in predictions])
    ratios = np.array([each.ratio for each in predictions])
    ranked = _grouped(predictions, lambda each: each.row.ranked_with)
    ranks = [rank for group in ranked if len(group) > 2 and np.isfinite(rank := _spearman(group))]
    choices = [group for group in _grouped(predictions, lambda each: each.row.chosen_from) if len(group) > 1]
    regrets = [_regret(group) for group in choices]
    return {
        "num_rows": len(predictions),
        "median_error": float(np.median(errors)),
        "ninetieth_error": float(np.percentile(errors, 90)),
        "mean_error": float(ratios.mean() - 1),  # with its sign
        "median_ratio": float(np.median(ratios)),
        "low_ratio": float(np.percentile(ratios, 10)),
        "high_ratio": float(np.percentile(ratios, 90)),
        "num_ranked": len(ranks),
        "rank_correlation": float(np.median(ranks)) if ranks else None,
        "num_choices": len(choices),
        "mean_regret": float(np.mean(regrets)) if regrets else None,
        "worst_regret": max(regrets, default=None),
    }


def by_part(predictions: Sequence[PredictedRow]) -> dict[str, dict[str, Any]]:
    """Returns the figures of set and of judged rows, those that there are."""
    parts = {part: [each for each in predictions if each.is_set == (part == SET)] for part in PARTS}
    return {part: figures(group) for part, group in parts.items() if group}


def by_factor(predictions: Sequence[PredictedRow]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns figures by card, runtime and kind, in this order; factors with one value are left out."""
    tables = {}
    for name, value_of in FACTORS.items():
        values = dict.fromkeys(value_of(each) for each in predictions)
        if len(values) > 1:
            tables[name] = {value: figures([e for e in predictions if value_of(e) == value]) for value in values}
    return tables


def _grouped(predictions: Sequence[PredictedRow], key: Callable[[PredictedRow], str]) -> list[list[PredictedRow]]:
    groups = defaultdict[str, list[PredictedRow]](list)
    for prediction in predictions:
        if key(prediction):
            groups[key(prediction)].append(prediction)
    return list(groups.values())


def speed_ups(predictions: Sequence[PredictedRow]) -> dict[str, float] | None:
    """Returns how well the speed-up of torch.compile is predicted, over rows that were measured eagerly too; None where
    there are fewer than three."""
    eager = {each.row.key: each for each in predictions if each.row.runtime == EAGER}
    pairs = [
        (eager[key], each)
        for each in predictions
        if each.row.runtime == COMPILE and (key := each.row.key.replace(f"-{COMPILE}-", f"-{EAGER}-")) in eager
    ]
    if len(pairs) < 3:
        return None
    predicted = np.array([before.predicted_ms / after.predicted_ms for before, after in pairs])
    measured = np.array([before.row.measured_ms / after.row.measured_ms for before, after in pairs])
    return {
        "count": len(pairs),
        "rank_correlation": float(spearmanr(predicted, measured).statistic),
        "median_error": float(np.median(np.abs(predicted / measured - 1))),
    }


def _spearman(group: Sequence[PredictedRow]) -> float:
    """Returns Spearman's rank correlation of predicted and measured times; NaN where all of one are equal."""
    from scipy.stats import rankdata

    with np.errstate(invalid="ignore"):
        pairs = [(each.predicted_ms / each.row.amount, each.row.measured_ms / each.row.amount) for each in group]
        return float(np.corrcoef(*(rankdata(times) for times in zip(*pairs, strict=True)))[0, 1])


def _regret(group: Sequence[PredictedRow]) -> float:
    """Returns how much slower, as measured, the row of the shortest prediction is than the fastest one."""
    chosen = min(group, key=lambda each: each.predicted_ms / each.row.amount)
    fastest = min(each.row.measured_ms / each.row.amount for each in group)
    return chosen.row.measured_ms / chosen.row.amount / fastest - 1
