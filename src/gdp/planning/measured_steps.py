"""Steps that a user measured: a row names a model, how it is read and run, and the time; each is predicted again."""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gdp import files
from gdp.cluster import Cluster
from gdp.cluster.cluster_file import read_document
from gdp.errors import InputError, prefixed, suggest
from gdp.graph import Graph
from gdp.models.shards import WHOLE
from gdp.models.source import ModelSource
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.planning.options import READING, reading_of, run_by
from gdp.search.batch_parts import Parts
from gdp.search.rivals.rivals import equal_stages, simulate_layout
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate

_OWN = ("model", "ms", "devices", "runtime", "parallel", "note")
_WHOLE, _FLAGS = ("microbatches", "batch", "batch_dim"), ("inference",)


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """A row: `options` are those of `gdp place` by name."""

    where: str
    model: str
    measured_ns: float
    cluster: Cluster
    layout: Layout
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def graph(self) -> Graph:
        """The step, or that of one micro-batch of the layout. InputError names the row."""
        with prefixed(self.where):
            source, shards, layout = self._source, self.layout.shards, self.layout.of_groups
            source = source if shards == WHOLE else source.sharded(shards)
            return source.whole().graph if layout.is_whole else Parts.of_source(source).exact(layout.num_parts)

    @cached_property
    def _source(self) -> ModelSource:
        return ModelSource(self.model, reading_of(self.options))

    def predicted(self, cluster: Cluster) -> Simulation:
        """Returns the step on `cluster`, of this row's devices: on the first one, or in the layout on the first of them
        or of their groups, in the order of the program."""
        with prefixed(self.where):
            shards, layout, stages = self.layout.shards, self.layout.of_groups, self.layout.stages or 1
            cluster = cluster if shards == WHOLE else cluster.grouped(shards.num_ranks, shards.shares)
            problem = Problem.build(self.graph, cluster)
            if layout.is_whole:
                placement = np.zeros(problem.num_ops, np.int64)
                return simulate(problem, placement, priority=problem.program_level)
            if (used := layout.data * stages) > cluster.num_devices:
                raise InputError(f"{layout} takes {used} devices, and there are {cluster.num_devices}; name more")
            if (stage := equal_stages(problem, stages)) is None:
                raise InputError(f"stages={stages}: the layers have no equal stages; leave the row out")
            grid = np.arange(used).reshape(layout.data, stages)
            return simulate_layout(self.graph, layout, cluster, stage, grid, in_program_order=True)[1]


def read_steps(path: Path, devices: str | None = None) -> list[MeasuredStep]:
    """Reads a CSV, YAML or JSON file of rows; `devices` are those of rows that name none. InputError names the row."""
    if path.suffix == ".csv":
        lines = files.read_bytes(path).decode("utf-8-sig", "replace").splitlines()
        try:
            cells = list(csv.DictReader(lines, strict=True))
        except csv.Error as error:
            raise InputError(f"{path}: is no CSV file ({error}); mend it") from None
        rows: object = [_cells(row, f"{path}: row {number}") for number, row in enumerate(cells, 1)]
    else:
        rows = read_document(path, "list of rows")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path}: has no rows; a table with the columns model, ms and devices is expected")
    clusters: dict[str, Cluster] = {}
    return [_read(row, f"{path}: row {number}", devices, clusters) for number, row in enumerate(rows, 1)]


def _cells(row: dict[str, str], where: str) -> dict[str, str]:
    if None in row:
        raise InputError(f"{where}: has more cells than there are columns; put quotes around a value with commas")
    return {key: text.strip() for key, text in row.items() if key and text}


def _read(row: object, where: str, devices: str | None, clusters: dict[str, Cluster]) -> MeasuredStep:
    if not isinstance(row, dict):
        raise InputError(f"{where}: is no row; names of columns with values are expected")
    values = {str(key).strip().lstrip("-").replace("-", "_"): value for key, value in row.items()}
    values = {key: value for key, value in values.items() if value not in (None, "")}
    if unknown := [key for key in values if key not in (*_OWN, *READING)]:
        raise InputError(f"{where}: column {unknown[0]!r} is unknown; {suggest(unknown[0], [*_OWN, *READING])}")
    values.setdefault("devices", devices)
    if missing := [name for name in ("model", "ms", "devices") if not values.get(name)]:
        remedy = "add the column, or --devices for all rows" if missing == ["devices"] else "add the column"
        raise InputError(f"{where}: has no {', '.join(missing)}; {remedy}")
    try:
        measured_ms = float(values["ms"])
    except (TypeError, ValueError):
        measured_ms = math.nan
    if not 0 < measured_ms < 1e9:
        raise InputError(f"{where}: ms is {values['ms']!r}; the time of a step in ms, above 0, is expected")
    with prefixed(where):
        options = {name: _option(name, value) for name, value in values.items() if name in READING}
        runtime = None if "runtime" not in values else str(values["runtime"])
        text = run_by(str(values["devices"]), runtime, reading_of(options).serving)
        if text not in clusters:
            clusters[text] = Cluster.parse(text)
        asked = str(values.get("parallel", NONE))
        layout = Layout() if asked == NONE else Layout.parse(asked)
        if asked == AUTO or AUTO in (layout.recompute, layout.offload) or layout.offload != NONE:
            raise InputError(f"parallel is {asked!r}; the layout as measured is expected, without auto or offload")
        if not layout.of_groups.is_whole and options.get("microbatches", 1) > 1:
            raise InputError(f"microbatches: parallel has a number of its own; write {asked},microbatches=M there")
        if not layout.of_groups.is_whole and not reading_of(options).training:
            raise InputError(f"parallel is {asked!r}, of training steps; leave inference and phase out")
    return MeasuredStep(where, str(values["model"]), measured_ms * 1e6, clusters[text], layout, options)


def _option(name: str, value: object) -> Any:
    if name in _WHOLE:
        if not str(value).isdecimal():
            raise InputError(f"{name} is {value!r}; a whole number is expected")
        return int(str(value))
    if name in _FLAGS:
        if str(value).lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise InputError(f"{name} is {value!r}; yes or no is expected")
        return str(value).lower() in ("true", "yes", "1")
    if name == "dim":
        return [str(item) for item in value] if isinstance(value, list) else str(value).split()
    return str(value)
