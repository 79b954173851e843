"""A user's file of measured candidates, as replay.py documents it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.measured_sources.choices import SPREAD, Choice
from benchmarks.measured_sources.source import read_table
from gdp.arrays import F64
from gdp.errors import InputError

_CHOICE, _TIMES = "choice", ("predicted", "measured")
_FURTHER = "machine", "model"

Row = Mapping[str, str]


def read_choices(path: Path) -> list[Choice]:
    """Reads choices. InputError names the line of a bad time, or what is missing."""
    rows = read_table(path, (_CHOICE, *_TIMES))
    if not rows:
        raise InputError(f"{path}: has no rows; one candidate a line is expected")
    names = [name for name in rows[0] if name and name not in (_CHOICE, *_TIMES, *_FURTHER)]
    if not names:
        raise InputError(
            f"{path}: has no column besides {', '.join(filter(None, rows[0]))}; add one for each trait of candidates"
        )
    times = np.array(
        [[_time(row, name, f"{path}: line {line}") for name in _TIMES] for line, row in enumerate(rows, 2)]
    )
    traits, groups = _traits(rows, names), defaultdict[str, list[int]](list)
    for number, row in enumerate(rows):
        groups[row[_CHOICE]].append(number)
    choices = []
    for name, numbers in groups.items():
        if len(numbers) < 2:
            raise InputError(f"{path}: line {numbers[0] + 2}: choice {name!r} has no other candidate; add one")
        first, size = rows[numbers[0]], len(numbers)
        predicted, measured = times[numbers].T
        choices.append(
            Choice(
                name,
                False,
                measured,
                predicted,
                naive=np.ones(size),
                traits=np.column_stack([column[numbers] for column in traits.values()]),
                preference=[(0,)] * size,
                spreads=np.full(size, SPREAD),
                names=tuple(traits),
                table="file",
                machine=first.get("machine") or "",
                model=first.get("model") or name,
            )
        )
    return choices


def _time(row: Row, name: str, where: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < inf:
        raise InputError(f"{where}: {name} is {row[name]!r}; a time above 0 is expected")
    return value


def _traits(rows: Sequence[Row], names: Sequence[str]) -> dict[str, F64]:
    """Returns columns: numbers as they are, of texts one for each value."""
    columns = dict[str, F64]()
    for name in names:
        texts = [row[name] or "" for row in rows]
        try:
            numbers = np.array([float(text) for text in texts])
        except ValueError:
            numbers = np.full(len(texts), inf)
        if np.isfinite(numbers).all():
            columns[name] = numbers
        else:
            columns |= {f"{name}={value}": np.array([float(text == value) for text in texts]) for value in set(texts)}
    return dict(sorted(columns.items()))
