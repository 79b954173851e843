"""Outcomes of styles: how well random styles, and styles that a scorer takes, did on the problems of tasks.

Outcomes are kept in a directory, a file for each `PART` problems, so that an interrupted run goes on where it stopped.
S styles tried on a problem, M features of a problem, F numbers of a style, R rows: a style on a problem each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from gdp import files
from gdp.arrays import F32, F64, I64
from gdp.errors import InputError
from gdp.policy.construction import Constructor
from gdp.policy.problem_features import problem_features
from gdp.policy.sampling import draw_styles, widen
from gdp.policy.style_scorer import StyleScores, style_numbers
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many
from gdp.tensor_file import TensorFormat

PART = 50  # problems in a file
_COLUMNS = ("features", "numbers", "ranks", "cpu_seconds")
_POOLS = (8, 1, 3)  # styles drawn for each one that is tried, in turn; of 1 all are tried


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Styles tried on one problem."""

    features: F32  # [M] of the problem
    numbers: F32  # [S, F] of the styles
    ranks: F32  # [S] from 0, the best, to 1
    cpu_seconds: float = 0.0  # spent on them


OUTCOMES = TensorFormat(
    name="gdp-style-outcomes",
    version=1,
    fields={"run": files.is_string},
    writer="`gdp train --styles`",
    remedy="delete the directory, and train again",
)


def try_styles(
    problem: Problem,
    constructor: Constructor,
    scores: StyleScores | None,
    sizes: tuple[int, int],
    rng: np.random.Generator,
) -> Outcomes:
    """Returns the outcomes of styles in groupings of `problem`; `sizes` are (groupings, styles in each).

    Half of the styles are wider than those of searches, so that the scorer knows the surroundings. With `scores` two
    of three groupings have styles that these prefer, where mistakes would cost most.
    """
    numbers, times, excess = [], [], []
    num_groupings, num_styles = sizes
    for number in range(num_groupings):
        pool = 1 if scores is None else _POOLS[number % len(_POOLS)]
        styles = draw_styles(pool * num_styles, rng)
        if number % 2:
            styles = [widen(style, rng) for style in styles]
        first = styles[0]
        if scores is not None and pool > 1:
            first, order = scores.for_one_grouping(styles, style_numbers(styles, problem.num_devices))
            styles = [styles[position] for position in order[:num_styles]]
        styles = [replace(style, num_units=first.num_units, following=first.following) for style in styles]
        instance = constructor.grouped(problem, first.num_units, rng, following=first.following)
        step_time_ns, peaks = evaluate_many(problem, constructor.place(instance, styles, rng), num_threads=1)
        numbers.append(style_numbers(styles, problem.num_devices))
        times.append(step_time_ns)
        excess.append(np.maximum(peaks - problem.memory_limit_bytes, 0).sum(axis=1))
    ranks = _ranks(np.concatenate(times), np.concatenate(excess))
    return Outcomes(problem_features(constructor.source(problem)), np.concatenate(numbers), ranks)


def _ranks(step_time_ns: I64, excess_bytes: I64) -> F32:
    """Returns [S], ranks between 0 and 1; what fits comes first, then what exceeds memory least."""
    order = np.lexsort((step_time_ns, excess_bytes))
    ranks: F64 = np.empty(len(order))
    ranks[order] = (np.arange(len(order)) + 0.5) / len(order)
    return ranks.astype(np.float32)


def write_part(directory: Path, number: int, run: str, outcomes: Sequence[Outcomes]) -> None:
    """Writes part `number` of the outcomes of `run`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.stack([getattr(outcome, name) for outcome in outcomes]) for name in _COLUMNS}
    files.write_bytes(_path(directory, number), save(tensors, OUTCOMES.header(run=run)))


def read_parts(directory: Path, run: str) -> list[Outcomes]:
    """Reads the whole parts of `run` in `directory`, as far as they go. Raises InputError for those of another run."""
    outcomes: list[Outcomes] = []
    for number in range(len(list(directory.glob("*.safetensors"))) if directory.is_dir() else 0):
        path = _path(directory, number)
        with OUTCOMES.opened(path, "numpy") as (header, file):
            if header["run"] != run:
                raise InputError("is of a run with other options; delete the directory, or choose another --out")
            *columns, cpu_seconds = (file.get_tensor(name) for name in _COLUMNS)
        outcomes += [Outcomes(*row) for row in zip(*columns, cpu_seconds.tolist(), strict=True)]
    return outcomes


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:05}.safetensors"
