"""A source: rows that somebody measured, and gdp's prediction of each.

Rows are set or judged: costs may be fitted to the rows of `SET_ROWS` and to tables of ops and exchanges, and to no
others. So an error on judged rows is that on a machine or model that nobody has fitted.
"""

import csv
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.measured_sources.ablation import less, term_left_out
from benchmarks.rows import CAPTURE, Rows, code_of
from gdp import files
from gdp.cluster import Cluster
from gdp.cluster.device import EAGER
from gdp.costs.ranges import StepKind
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate

_CODE = partial(code_of, *CAPTURE, "benchmarks/measured_sources")
DATA = Path(__file__).parent.parent / "data" / "measured"
SET_ROWS = DATA / "set-rows.csv"


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A step, an op or an exchange that somebody measured."""

    key: str  # among the rows of its source
    measured_ms: float
    card: str
    case: Any  # what the source predicts it from
    runtime: str = EAGER
    ranked_with: str = ""  # rows of one text are ranked against each other
    chosen_from: str = ""  # rows of one text are what a user chooses between; "": there is no choice
    model: str = ""  # "": rows of one `ranked_with` are of one model
    amount: float = 1.0  # samples or tokens, for times to be ranked; a user chooses the shortest time of each


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A measured row and gdp's prediction."""

    row: MeasuredRow
    predicted_ms: float
    kind: str  # of the model, op or exchange
    fits: bool | None = None  # None: memory is not looked at
    is_set: bool = False
    step_kind: StepKind | None = None  # where kernels are priced

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one."""
        return self.predicted_ms / self.row.measured_ms

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the measured time."""
        return abs(self.ratio - 1)


@dataclass(frozen=True, eq=False)
class CapturedGraphs:
    """Graphs that are captured once: the last one is kept in memory, and all beside the rows, where these are kept.

    Where the code that captures has changed, they are captured anew.
    """

    rows: Rows
    _last: dict[str, Graph] = field(default_factory=dict)

    def read(self, name: str, capture: Callable[[], Graph]) -> Graph:
        """Returns the graph `name`: the kept one, or else that of `capture`."""
        if name in self._last:
            return self._last[name]
        path = self.rows.directory / "graphs" / f"{re.sub(r'[^0-9A-Za-z.-]+', '_', name)}-{_CODE()}.safetensors"
        if self.rows.keep and path.exists():
            graph = Graph.load(path)
        else:
            graph = capture()
            if self.rows.keep:
                path.parent.mkdir(parents=True, exist_ok=True)
                graph.save(path)
        self._last.clear()
        self._last[name] = graph
        return graph


class MeasuredSource(ABC):
    """Rows and how gdp predicts them."""

    name: ClassVar[str]
    about: ClassVar[str]  # a clause for the page
    sets_all: ClassVar[bool] = False  # costs may be fitted to all of its rows

    @abstractmethod
    def rows(self) -> Sequence[MeasuredRow]:
        """Returns the rows; those of one captured graph follow each other."""

    @abstractmethod
    def predict(self, row: MeasuredRow, graphs: CapturedGraphs) -> PredictedRow:
        """Predicts a row. InputError where gdp does not model it, or cannot read its model."""

    def is_set(self, row: MeasuredRow) -> bool:
        """Returns whether costs may be fitted to `row`."""
        return self.sets_all or (self.name, row.key) in _set_rows()


@cache
def _set_rows() -> frozenset[tuple[str, str]]:
    return frozenset((row["source"], row["key"]) for row in read_table(SET_ROWS, ("source", "key")))


def read_table(path: Path, columns: Sequence[str]) -> list[Mapping[str, str]]:
    """Reads a CSV file that has `columns`; InputError names those that are missing."""
    text = files.read_bytes(path).decode("utf-8", "replace")
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"{path}: no column {', '.join(missing)}; a CSV file of measured rows has it")
    return list(reader)


def cluster_of(devices: str, runtime: str = EAGER) -> Cluster:
    """Returns the cluster of DEVICES, built once, as it runs a step, less the term that is left out."""
    return _built(devices, runtime, term_left_out())


@cache
def _built(devices: str, runtime: str, term: str) -> Cluster:
    return less(Cluster.parse(f"{devices}:{runtime}"), term)


def on_one_card(graph: Graph, card: str, runtime: str = EAGER) -> Simulation:
    """Simulates a graph on one card, in the order of its program."""
    problem = Problem.build(graph, cluster_of(card, runtime))
    return simulate(problem, np.zeros(graph.num_ops, np.int64), priority=problem.program_level)
