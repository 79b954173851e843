"""Predicted and measured step times of a subject under layouts and placements of every quality.

Replicas of one device each, with and without ZeRO and recomputation; micro-batches whose ops are placed by classical
placers or at random; and the plan that was chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.op_times import measure_in_turn
from benchmarks.own_steps import MeasuredSubject
from gdp.arrays import I64
from gdp.budget import Budget
from gdp.errors import InputError
from gdp.execute.measurement import Order
from gdp.models.pytorch import Program
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.search.place import place
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

REPLICAS = (
    "data=2",
    "data=2,microbatches=2",
    "data=2,microbatches=4",
    "microbatches=1:3",
    "data=2,zero=1",
    "data=2,zero=2",
    "data=2,microbatches=2,zero=2",
    "data=2,zero=3",
    "data=2,recompute=blocks",
    "data=2,microbatches=2,zero=3",
)
COUNTS = (1, 2, 4)  # of micro-batches that are placed op by op
PLACERS = ("contiguous", "metis", "heft")
_SEED = 0


@dataclass(frozen=True, eq=False)
class PlacedLayout:
    """A layout that is placed: its program, its order, and its predicted time."""

    name: str
    program: Program
    order: Order
    predicted_ns: int


def predictions(subject: MeasuredSubject, plan: Plan, *, count: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Returns predicted and measured step times of `plan` and of others, `count` in all, and how well they agree.

    They take turns, since the machine's pace drifts; not step by step, since a first step is slow and all need memory.
    """
    trials = list(_trials(subject, plan, count))
    step_ns: dict[str, list[int]] = {trial.name: [] for trial in trials}
    for _ in range(rounds):
        for trial in trials:
            content = subject.content(trial.program)
            measured = measure_in_turn(trial.program, content, {"": trial.order}, subject.targets, steps=repeats)
            step_ns[trial.name] += measured[""].step_ns
    medians = [int(np.median(step_ns[trial.name])) for trial in trials]
    predicted = [trial.predicted_ns for trial in trials]
    errors = np.abs(np.divide(predicted, medians) - 1.0)
    return {
        "items": [
            {"name": trial.name, "predicted_ns": trial.predicted_ns, "measured_ns": median}
            for trial, median in zip(trials, medians, strict=True)
        ],
        "rank_correlation": float(spearmanr(predicted, medians).statistic),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
    }


def _trials(subject: MeasuredSubject, plan: Plan, count: int) -> Iterator[PlacedLayout]:
    """Yields `count` trials, fewer where the model allows no more."""
    number = 1
    yield PlacedLayout("auto", subject.program(subject.step(plan)), plan.order, plan.step_time_ns)
    for name, step, placement in _placed(subject):
        if number == count:
            return
        try:
            program = subject.program(step)
        except InputError:  # placed, not run
            continue
        simulation = simulate(Problem.build(step.graph, subject.cluster), placement)
        yield PlacedLayout(name, program, simulation.order, simulation.step_time_ns)
        number += 1


def _placed(subject: MeasuredSubject) -> Iterator[tuple[str, Step, I64]]:
    """Yields named steps and their placements: kinds take turns, so that the first few have some of each."""
    kinds = [_replicas(subject), _with_placers(subject), _at_random(subject)]
    while kinds:
        for kind in list(kinds):
            found = next(kind, None)
            if found is None:
                kinds.remove(kind)
            else:
                yield found


def _replicas(subject: MeasuredSubject) -> Iterator[tuple[str, Step, I64]]:
    for text in REPLICAS:
        layout = Layout.parse(text)
        if layout.num_parts in subject.parts.read:
            graph = subject.parts.exact(layout.num_parts)
            try:
                step = Step.of(graph, layout)
            except InputError:  # such as blocks of a model that has none
                continue
            yield text, step, step.placement(np.zeros(graph.num_ops, np.int64), [[0], [1]])


def _with_placers(subject: MeasuredSubject) -> Iterator[tuple[str, Step, I64]]:
    for placer in PLACERS:
        for count in COUNTS:
            if count in subject.parts.read:
                graph = subject.parts.exact(count)
                budget = Budget(simulations=50)
                plan = place(graph, subject.cluster, placer=placer, budget=budget, seed=_SEED)
                yield _in_turn(subject, f"{placer}, {_parts(count)}", count, plan.placement)


def _at_random(subject: MeasuredSubject) -> Iterator[tuple[str, Step, I64]]:
    """Yields blocks of neighbouring ops on random devices, of ever finer grain."""
    random, pieces = np.random.default_rng(_SEED), 2
    while pieces <= _MOST_PIECES:
        for count in COUNTS:
            if count in subject.parts.read:
                graph = subject.parts.exact(count)
                devices = random.integers(0, subject.cluster.num_devices, pieces)
                devices[:2] = 0, 1
                places = random.permuted(devices)[np.arange(graph.num_ops) * pieces // graph.num_ops]
                yield _in_turn(subject, f"{pieces} blocks at random, {_parts(count)}", count, places)
        pieces *= 4


_MOST_PIECES = 512


def _in_turn(subject: MeasuredSubject, name: str, count: int, places: I64) -> tuple[str, Step, I64]:
    graph = subject.parts.exact(count)
    groups = graph.groups
    places = places.copy()
    for group in np.unique(groups[groups >= 0]):
        places[groups == group] = places[np.argmax(groups == group)]
    step = Step.of(graph, Layout((count,)), places=places)
    return name, step, step.placement(places, [range(subject.cluster.num_devices)])


def _parts(count: int) -> str:
    return "one batch" if count == 1 else f"{count} micro-batches"
