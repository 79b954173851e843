"""Ranges of predictions, from judged rows of steps: the figures of src/gdp/costs/ranges.toml, and how they cover rows.

A cell has the rows of one kind of step. Their ratios of measured to predicted time are weighed: rows of one source on
one card err together, so all of them count as `MOST_ROWS` at most. To them comes a prior that counts as `PRIOR_ROWS`: a
log-normal distribution as wide as all ratios, each source and card with the same weight. The range is from the 10th to
the 90th percentile, and has the prediction itself.
"""

import hashlib
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks.measured_sources.source import PredictedRow
from gdp.cluster.achieved import family_of
from gdp.costs.ranges import CARDS, CORES, TIMED, range_on

MOST_ROWS, PRIOR_ROWS = 60, 10
NUM_OWN = 5  # models that a user measured
_NOT_NARROWED: Mapping[str, Any] = {"narrowed": None, "width": None}
_DEVIATIONS = 1.2816  # from the middle of a normal distribution to the ends of 80 % of it
# percentiles 5 to 95 of a normal distribution
_PRIOR = np.array([-1.645, -1.036, -0.674, -0.385, -0.126, 0.126, 0.385, 0.674, 1.036, 1.645])
_NO_ROWS = 2.0  # times the spread, for kinds of steps that have no rows; untuned
_OF_UNKNOWN = (
    0.5  # of the spread of cards of no family, for those of one without rows: its figures are from papers; untuned
)
# of `python -m benchmarks execution-against`, and with `--workloads depthwise,lstm,graph,cached --only-devices`: the
# median error over all models, and where 80 % of the steps of their placements are
CPU_TIE = 0.066
CORE_CELLS: Sequence[Mapping[str, Any]] = [
    {"kind": [True, runtime, CARDS, False, False], "rows": rows, "judged": [], "factors": factors}
    for runtime, rows, factors in ((TIMED, 160, [0.974, 1.152]), (CORES, 80, [1.0, 1.191]))
]

Table = Mapping[str, Any]
Steps = Mapping[str, Sequence[PredictedRow]]  # by source


def table_of(steps: Steps) -> Table:
    """Returns the figures of ranges.toml from rows by source; set rows are left out."""
    groups = _groups(_judged(steps))
    logs = {key: np.array([_log(row) for row in rows]) for key, rows in groups.items()}
    spread = _weighted(list(logs.values()), 0.0)
    prior = max(-spread[0], spread[1]) / _DEVIATIONS
    cells, families = defaultdict[Any, list[Any]](list), defaultdict[Any, set[str]](set)
    for (_, card), rows in groups.items():
        for kind in {row.step_kind for row in rows}:
            cells[kind].append(np.array([_log(row) for row in rows if row.step_kind == kind]))
            families[kind].add(family_of(card))
    of_families = tomllib.loads((files("gdp.cluster") / "achieved.toml").read_text(encoding="utf-8"))["families"]
    shares = np.log([figures["product"] for figures in of_families.values()])  # that of any GPU comes first
    unknown = float(_DEVIATIONS * np.sqrt(np.mean((shares - shares[0]) ** 2)))
    pairs = [abs(_log(a) - _log(b)) for rows in _choices(steps) for a, b in combinations(rows, 2)]
    return {
        "judged": sorted({family_of(card) for _, card in groups}),
        "family": float(np.exp(_OF_UNKNOWN * unknown)),
        "unknown": float(np.exp(unknown)),
        "ties": {"card": float(np.expm1(np.median(pairs))) if pairs else 0.0, "cpu": CPU_TIE},
        "other": {"factors": _factors(np.array(spread) * _NO_ROWS)},
        "cells": [
            {
                "kind": list(kind),
                "rows": sum(map(len, parts)),
                "judged": sorted(families[kind]),
                "factors": _factors(_weighted(parts, prior)),
            }
            for kind, parts in sorted(cells.items())
        ]
        + [*CORE_CELLS],
    }


def text_of(table: Table, command: str) -> str:
    """Returns the file of a table."""
    cells = "".join(
        f"\n[[cells]]\nkind = [{', '.join(_text(value) for value in cell['kind'])}]\nrows = {cell['rows']}\n"
        f"judged = [{', '.join(map(_text, cell['judged']))}]\nfactors = {cell['factors']}\n"
        for cell in table["cells"]
    )
    return f"""# Where 80 % of measured steps are, as factors on the predicted time, by kind of step: is it trained, its
# runtime, what exchanges, is most of its time in products, is much of it in grouped or depthwise
# convolutions. Made from judged rows, as benchmarks/measured_sources/ranges.py says, by
#   {command}
judged = [{", ".join(map(_text, table["judged"]))}] # families of the cards of the rows; each cell has its own
family = {table["family"]:.3f} # more, on other families: half of `unknown`, in logarithms
unknown = {table["unknown"]:.3f} # more, on cards of no family: as products of the families reach of their sheets

# The median error of the ratio of two layouts of one model on one machine; of CPUs of `execution-against`
[ties]
card = {table["ties"]["card"]:.3f}
cpu = {table["ties"]["cpu"]:.3f}

# Kinds of steps without rows: all rows, with twice the spread
[other]
factors = {table["other"]["factors"]}
{cells}"""


def coverage(steps: Steps, table: Table | None = None) -> dict[str, dict[str, Any]]:
    """Returns by source the shares of judged rows in their ranges: those of `table`, or else of ranges.toml; those that
    are made of the rows of the other half of the models; of the rows of other sources; and of these and `NUM_OWN`
    models of the row's card and kind of step, with how wide they are beside the ranges before. None: there are none."""
    judged = _judged(steps)
    halves = [_those(judged, _in_half(1 - side)) for side in (0, 1)]
    tables = [table_of(half) if _groups(half) else None for half in halves]
    shares = {}
    for name, rows in judged.items():
        others = {other: of for other, of in judged.items() if other != name}
        elsewhere = table_of(others) if _groups(others) else None
        shares[name] = {
            "num_rows": len(rows),
            "told": _share(rows, [table] * len(rows)),
            "other_models": _share(rows, [tables[_half(row)] for row in rows]) if all(tables) else None,
            "other_sources": _share(rows, [elsewhere] * len(rows)) if elsewhere else None,
            **(_narrowed(rows, elsewhere) if elsewhere else _NOT_NARROWED),
        }
    return {name: of for name, of in shares.items() if of["num_rows"]}


def _narrowed(rows: Sequence[PredictedRow], table: Table) -> dict[str, Any]:
    """Returns the share of rows in the ranges that models of their own card narrow, and the median width of these over
    that of the ranges of `table`; models that narrow are drawn by their names, and are not judged."""
    groups = defaultdict[Any, dict[str, list[PredictedRow]]](lambda: defaultdict(list))
    for row in rows:
        groups[row.row.card, row.step_kind][row.row.model or row.row.ranked_with].append(row)
    inside, widths = list[bool](), list[float]()
    for (card, kind), models in groups.items():
        drawn = sorted(models, key=lambda model: hashlib.sha256(model.encode()).digest())
        own = [float(np.exp(np.median([_log(row) for row in models[model]]))) for model in drawn[:NUM_OWN]]
        before, of = range_on(kind, [card], table), range_on(kind, [card], table, own)
        for row in (row for model in drawn[NUM_OWN:] for row in models[model]):
            inside.append(of.low <= 1 / row.ratio <= of.high)
            widths.append(float(np.log(of.high / of.low) / np.log(before.high / before.low)))
    return {"narrowed": float(np.mean(inside)), "width": float(np.median(widths))} if inside else {**_NOT_NARROWED}


def _those(steps: Steps, keep: Callable[[PredictedRow], bool]) -> Steps:
    return {name: [row for row in rows if keep(row)] for name, rows in steps.items()}


def _judged(steps: Steps) -> Steps:
    return _those(steps, lambda row: not row.is_set and row.step_kind is not None)


def _groups(steps: Steps) -> dict[tuple[str, str], list[PredictedRow]]:
    groups = defaultdict[tuple[str, str], list[PredictedRow]](list)
    for name, rows in steps.items():
        for row in rows:
            groups[name, row.row.card].append(row)
    return groups


def _choices(steps: Steps) -> list[list[PredictedRow]]:
    """Returns groups of judged rows of steps on several devices between which a user chooses."""
    groups = defaultdict[str, list[PredictedRow]](list)
    for rows in _judged(steps).values():
        for row in rows:
            if row.row.chosen_from and row.step_kind is not None and row.step_kind.exchanges:
                groups[row.row.chosen_from].append(row)
    return list(groups.values())


def _log(row: PredictedRow) -> float:
    return float(-np.log(row.ratio))


def _in_half(half: int) -> Callable[[PredictedRow], bool]:
    return lambda row: _half(row) == half


def _half(row: PredictedRow) -> int:
    """Returns 0 or 1, the same for all rows of a model."""
    return hashlib.sha256((row.row.model or row.row.ranked_with).encode()).digest()[0] % 2


def _weighted(parts: Sequence[Any], prior: float) -> tuple[float, float]:
    """Returns the ends of 80 % of the weighed values of `parts`, with a normal distribution of deviation `prior`."""
    values = [*parts, prior * _PRIOR] if prior else list(parts)
    weights = [min(len(part), MOST_ROWS) for part in parts] + [PRIOR_ROWS] * bool(prior)
    each = np.concatenate(
        [np.full(len(part), weight / len(part)) for part, weight in zip(values, weights, strict=True)]
    )
    merged = np.concatenate(values)
    order = np.argsort(merged)
    middle = np.cumsum(each[order]) - each[order] / 2
    low, high = np.interp(np.array([0.1, 0.9]) * each.sum(), middle, merged[order])
    return float(low), float(high)


def _factors(ends: Any) -> list[float]:
    low, high = np.exp(ends)
    return [round(float(min(low, 1)), 3), round(float(max(high, 1)), 3)]


def _share(rows: Sequence[PredictedRow], tables: Sequence[Table | None]) -> float:
    inside = []
    for row, table in zip(rows, tables, strict=True):
        assert row.step_kind is not None
        of = range_on(row.step_kind, [row.row.card], table)
        inside.append(of.low <= 1 / row.ratio <= of.high)
    return float(np.mean(inside)) if inside else 0.0


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'
