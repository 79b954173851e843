"""Prints a table of plans over machines, batches or micro-batches: `gdp place --sweep`."""

import contextlib
from dataclasses import replace
from pathlib import Path

from gdp import files
from gdp.budget import Clock
from gdp.cli.inputs import read_graph
from gdp.cli.options import ConstraintOptions
from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.requests import first_token, on_its_devices, read_prefill
from gdp.cli.shared import (
    BAD_INPUT,
    INTERRUPTED,
    NOTHING_FITS,
    OK,
    check_writable,
    fail,
    log,
    print_json,
    show,
    warm_up,
)
from gdp.cluster import Cluster, changes
from gdp.cluster.prices import Prices
from gdp.errors import InputError, prefixed
from gdp.models.model import Model
from gdp.models.serving import ServedStep
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from gdp.parallel.layout import NONE
from gdp.planning.options import run_by
from gdp.planning.plan_cache import KeptAnswer
from gdp.planning.sweep import BATCH, DEVICES, MICROBATCHES, Sweep, SweepRow, place_row
from gdp.report import progress
from gdp.report.progress import StatusLine, live
from gdp.report.sweep_answer import SweepAnswer, outcome, plan_file
from gdp.search.batch_parts import Parts
from gdp.search.place_question import PlaceQuestion
from gdp.simulator.simulate import replay
from gdp.stop import Stop

_PICTURE = "sweep.svg"


def sweep_place(request: PlaceRequest, sweep: Sweep, limits: ConstraintOptions, prices: Prices) -> int:
    """Places with each value, as `gdp place` does, and prints the table; returns the exit status."""
    _check(request, sweep)
    asked = {value: _of_value(request, sweep, value, limits) for value in sweep.values}
    if request.out is not None:
        check_writable(request.out / _PICTURE)
        _check_plan_files(request.out, sweep)
    for sentence in prices.unknown(of_value.cluster for of_value in asked.values()):
        log(f"gdp: note: --prices: {sentence}")
    table = _SweepTable(request, sweep, prices)
    with progress.stop_on_interrupt() as stop:
        for value, of_value in asked.items():
            try:
                table.add(value, of_value, stop)
            except InputError:
                if not stop.is_set():  # if it is: there was no placement yet
                    raise
            if stop.is_set():
                break
        interrupted = stop.is_set()
    rows = table.rows
    if not interrupted and all(row.plan is None for row in rows):
        raise InputError(f"--sweep: {rows[0].note}")
    answer = SweepAnswer(sweep.what, rows, table.noun, table.served, is_whole=not interrupted)
    if request.out is not None and answer.fitting:
        try:
            files.write_bytes(request.out / _PICTURE, answer.figure())
        except InputError as error:  # an extra that is not installed
            log(f"gdp: note: {request.out / _PICTURE} is not drawn: {error}")
    if request.json:
        print_json(answer.document(request.out))
    else:
        show(answer.report())
    if table.failure is not None:
        return fail(f"error: {table.failure}", BAD_INPUT)
    if interrupted:
        return INTERRUPTED
    if not answer.fitting:
        return fail("nothing fits in memory for any value; without --sweep gdp says how much is missing", NOTHING_FITS)
    return OK


class _SweepTable:
    """The rows so far; the model and the parts of its batch, where all values have the same."""

    def __init__(self, request: PlaceRequest, sweep: Sweep, prices: Prices) -> None:
        self.sweep, self.prices, self.noun = sweep, prices, "samples"
        self.rows: list[SweepRow] = []
        self.served: list[ServedStep | None] = []
        self.failure: InputError | None = None  # of writing a plan
        self._source = request.source
        self._model: Model | None = None
        self._prefills: dict[Shards, Model] = {}
        self._parts: Parts | None = None

    def add(self, value: int | str, request: PlaceRequest, stop: Stop) -> None:
        """Places with `value`; where that cannot be, the row says why. InputError for a model that no row can read."""
        served, line = None, StatusLine(f"{request.model}, {self.sweep.what} {value}", request.budget.seconds)
        try:
            question, served = self._opened(request)
            request, question = request.for_servers(question)
            with live(line):
                row = place_row(value, question, self.rows, Clock(request.budget, stop=stop), request.find)
            if served is not None and served.phase == "decode" and not stop.is_set():
                row = replace(row, first_token_ns=self._first_token_ns(request, question, served, row))
        except InputError as error:
            if stop.is_set() or (self._model is None and request.source is self._source):
                raise
            row = SweepRow(value, note=str(error))
        amounts = request.source.amounts(served)
        if row.plan is not None:
            self.noun = "tokens" if "tokens" in amounts else "samples"
        price, num_devices = self.prices.of(request.cluster), request.cluster.num_devices
        row = replace(row, price=price, work=amounts.get(self.noun, 0), num_devices=num_devices)
        if request.out is not None and row.is_ok:
            try:
                _save(request, self.sweep.what, row)
            except InputError as error:
                self.failure, row = error, replace(row, is_written=False)
        self.rows.append(row)
        self.served.append(served)
        if row.plan is not None:  # else the table says why, or the error does where no row has one
            log(f"gdp: {self.sweep.what} {value}: {outcome(row)}")

    def _first_token_ns(
        self, request: PlaceRequest, question: PlaceQuestion, served: ServedStep, row: SweepRow
    ) -> int | None:
        """Returns the time of the prefill of one prompt; None where the plan of `row` splits layers, or has no fit."""
        if row.plan is None or not row.is_ok:
            return None
        with contextlib.suppress(InputError):  # such as of an encoder, whose input is no prompt
            plan = row.plan
            prefill = self._prefills[plan.shards] = self._prefills.get(plan.shards) or read_prefill(
                request, served, plan
            )
            problem = on_its_devices(plan, question.problem)
            return first_token(request, problem, plan.placement, prefill).step_time_ns
        return None

    def _opened(self, request: PlaceRequest) -> tuple[PlaceQuestion, ServedStep | None]:
        """Returns the question of a value, prepared, and what its step serves."""
        if request.source is not self._source or self._model is None:
            self._source, self._model, self._parts = request.source, read_graph(request.source), None
            request.say_notes(self._model.graph, request.cluster)
        name = f"{self._model.graph.name} on {request.cluster.name}"
        with live(f"preparing {name}"):
            question = PlaceQuestion.of(
                request.source,
                request.cluster,
                request.constraints,
                request.parallel,
                None,
                request.options,
                self._model,
            )
            if question.parts is not None:
                self._parts = self._parts or question.parts
                question = replace(question, parts=self._parts)
            question.prepare()
        warm_up((question.options.placer,), question.problem)
        return question, self._model.served


def _check_plan_files(out: Path, sweep: Sweep) -> None:
    """Raises InputError unless the plan of each value can be written to a file of its own."""
    values: dict[Path, int | str] = {}
    for value in sweep.values:
        file = out / plan_file(sweep.what, value)
        check_writable(file)
        if file in values:
            raise InputError(f"--sweep: {values[file]} and {value} would both be written to {file}; rename one of them")
        values[file] = value


def _check(request: PlaceRequest, sweep: Sweep) -> None:
    reading, option = request.reading, f"--sweep {sweep.what}"
    if request.options.placer != "auto" or request.times is not None:
        raise InputError("--sweep: places with auto and modelled op times; leave out --placer and --times")
    if request.options.checkpoint is not None:
        raise InputError("--sweep: places without a policy of your own; leave out --checkpoint")
    if sweep.what == DEVICES:
        sweep.check(request.cluster)
    if sweep.what == BATCH and reading.batch is not None:
        raise InputError(f"{option}: --batch {reading.batch} contradicts it; drop one")
    if sweep.what == MICROBATCHES and reading.microbatches > 1:
        raise InputError(f"{option}: --microbatches {reading.microbatches} contradicts it; drop one")
    if sweep.what in (BATCH, MICROBATCHES) and request.source.is_file:
        raise InputError(f"{option}: {request.model} has no batch to split; name the model itself")
    if sweep.what != MICROBATCHES:
        return
    if request.parallel not in (None, NONE):
        raise InputError(f"{option}: layouts have micro-batches of their own; leave --parallel out")
    if not reading.training:
        phase = "--phase" if reading.serving.has_cache else "--inference"
        raise InputError(f"{option}: gradients are accumulated in training; leave out {phase}")


def _of_value(request: PlaceRequest, sweep: Sweep, value: int | str, limits: ConstraintOptions) -> PlaceRequest:
    """Returns the request to `gdp place` that asks for one value."""
    asked, reading = request.asked, request.reading
    if isinstance(value, str):
        devices = run_by(value, None, reading.serving)
        cluster = Cluster.parse(devices)
        with prefixed(f"--sweep {sweep.what}={value}"):
            constraints = limits.constraints(cluster)
        return replace(
            request, devices=devices, cluster=cluster, constraints=constraints, asked=replace(asked, cluster=devices)
        )
    if sweep.what == DEVICES:
        part = changes.first(request.cluster, value)
        return replace(request, cluster=part, constraints=request.constraints.within(part))
    parallel = request.parallel
    if sweep.what == MICROBATCHES:
        reading, parallel = replace(reading, microbatches=value), NONE
    else:
        reading = replace(reading, batch=value)
    asked = replace(asked, options={**asked.options, sweep.what: value})
    return replace(request, source=ModelSource(request.model, reading), parallel=parallel, asked=asked)


def _save(request: PlaceRequest, what: str, row: SweepRow) -> None:
    """Writes the plan of a row, with its graph and its devices, which is asked for the value of the row."""
    assert request.out is not None
    assert row.plan is not None
    assert row.plan.problem is not None
    files = replace(PlanFiles.of(replace(request, out=request.out / plan_file(what, row.value).parent)), report=None)
    files = files.suited_to(row.plan.problem)
    asked, names = request.asked, {name for device in request.cluster.devices for name in (device.name, device.kind)}
    if what == DEVICES:
        options = {
            name: [text for text in value if text.rpartition("=")[2 if name == "forbid" else 0] in names]
            if name in ("forbid", "max_memory")
            else value
            for name, value in asked.options.items()
        }
        cluster = asked.cluster if files.cluster is None else str(files.cluster.resolve())
        asked = replace(asked, options=options, cluster=cluster)
    plan = replace(row.plan, asked=asked)
    failure = files.write(KeptAnswer(plan), replay(row.plan.problem, plan))
    if failure is not None:
        raise failure
