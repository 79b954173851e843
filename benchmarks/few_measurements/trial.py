"""Trials: a choice whose candidates are measured one after the other, and what may be learned from before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from benchmarks.few_measurements.drawn_choices import DrawnQuestion
from benchmarks.measured_sources.choices import Choice
from gdp.arrays import F64

Pick = Callable[[Mapping[int, float]], int]
"""From measured times by candidate to a candidate."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A choice, measured with one sequence of noise. All arms see the same noise of a seed."""

    choice: Choice
    noise: float  # relative deviation of a measurement
    seed: int

    @cached_property
    def seen(self) -> F64:
        """What a measurement of each candidate shows [N]."""
        drawn = np.random.default_rng(self.seed).standard_normal(len(self.choice.measured))
        return self.choice.measured * np.exp(self.noise * drawn)

    @property
    def generator(self) -> np.random.Generator:
        """Returns a generator for what an arm draws."""
        return np.random.default_rng((self.seed, 1))


@dataclass(frozen=True, eq=False)
class Lessons:
    """What may be learned from before a choice is judged."""

    drawn: tuple[DrawnQuestion, ...] = ()  # in simulation
    other_models: tuple[Choice, ...] = ()  # measured choices of its table
    other_machines: tuple[Choice, ...] = ()  # measured choices of all tables
    other_tables: tuple[Choice, ...] = ()


def fastest(measured: Mapping[int, float]) -> int:
    """Returns the candidate with the shortest measured time."""
    return min(measured, key=measured.__getitem__)


class ArmRun(NamedTuple):
    """A run of an arm on a trial."""

    propose: Pick  # what is measured next
    answer: Pick = fastest  # of the measured ones


Run = Callable[[Sequence[Trial], Lessons], list[list[int]]]
"""From trials to the answer of each after 1, 2, ... measurements."""


@dataclass(frozen=True)
class Arm:
    """A way to say what is measured next."""

    run: Run
    needs: str = ""  # of the lessons, or `sheet`: an expert's preference and naive times


def one_by_one(player: Callable[[Trial, Lessons], ArmRun]) -> Run:
    """Returns the run of an arm that takes trials by themselves, and measures each candidate once."""
    return lambda trials, lessons: [play(trial, player(trial, lessons)) for trial in trials]


def play(trial: Trial, run: ArmRun) -> list[int]:
    """Measures all candidates, and returns the answers."""
    measured, answers = dict[int, float](), list[int]()
    while len(measured) < len(trial.seen):
        candidate = run.propose(measured)
        measured[candidate] = float(trial.seen[candidate])
        answers.append(run.answer(measured))
    return answers


def fastest_so_far(trial: Trial, measured: Sequence[int]) -> list[int]:
    """Returns the fastest of the first 1, 2, ... of the `measured` candidates."""
    answers = list[int]()
    for candidate in measured:
        best = answers[-1] if answers else candidate
        answers.append(candidate if trial.seen[candidate] < trial.seen[best] else best)
    return answers
