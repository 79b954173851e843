"""Prints a table of plans over numbers of devices or of micro-batches: `gdp place --sweep`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.cli.request import PlaceRequest
from gdp.cli.shared import INTERRUPTED, NOTHING_FITS, OK, check_writable, fail, log, print_json, show, warm_up
from gdp.errors import InputError
from gdp.planning.plan_directory import files_beside

if TYPE_CHECKING:
    from gdp.planning.sweep import Sweep, SweepRow


def sweep_place(request: PlaceRequest, sweep: "Sweep") -> int:
    """Places with each value and prints the table; returns the exit status."""
    from gdp.planning.sweep import DEVICES, MICROBATCHES, sweep_devices, sweep_microbatches
    from gdp.report import advice_answer, progress

    if request.options.placer != "auto" or request.times is not None:
        raise InputError("--sweep: places with auto and modelled op times; leave out --placer and --times")
    if request.options.checkpoint is not None:
        raise InputError("--sweep: places without a policy of your own; leave out --checkpoint")
    if sweep.what == MICROBATCHES and request.reading.microbatching.count > 1:
        count = request.reading.microbatching.count
        raise InputError(f"--sweep {MICROBATCHES}: --microbatches {count} contradicts it; drop one")
    if sweep.what == MICROBATCHES and not request.can_split:
        raise InputError(f"--sweep {MICROBATCHES}: {request.model} has no batch to split; name the model itself")
    if sweep.what == MICROBATCHES and not request.reading.training:
        option = "--phase" if request.reading.serving.has_cache else "--inference"
        raise InputError(f"--sweep {MICROBATCHES}: gradients are accumulated in training; leave out {option}")
    if request.out is not None:
        check_writable(request.out / f"{sweep.what}-{sweep.values[0]}" / "plan.json")
    question = (request.cluster, sweep.values, request.constraints)
    search: dict[str, Any] = {"budget": request.budget, "options": request.options}
    rows: list[SweepRow] = []
    served = None
    with progress.stop_on_interrupt() as stop:
        if sweep.what == DEVICES:
            source = request.read()
            served = source.served
            warm_up()
            answers = sweep_devices(source.graph, *question, **search, stop=stop)
        else:
            warm_up()
            answers = sweep_microbatches(request.source.split, *question, **search, stop=stop)
        try:
            for value in sweep.values:
                line = progress.StatusLine(f"{request.model}, {sweep.what} {value}", request.budget.seconds)
                with progress.live(line):
                    row = next(answers, None)
                if row is None:
                    break
                rows.append(row)
                log(f"gdp: {advice_answer.sweep_line(sweep.what, row)}")
                if request.out is not None and row.plan is not None and row.is_ok:
                    _save(request, request.out / f"{sweep.what}-{row.value}", sweep.what, row)
        except InputError:
            if not stop.is_set():  # if it is: there was no placement yet
                raise
        interrupted = stop.is_set()
    if not interrupted and all(row.plan is None for row in rows):
        raise InputError(f"--sweep: {rows[0].note}")
    if request.json:
        print_json(advice_answer.sweep_document(sweep.what, rows, request.out, served))
    else:
        show(advice_answer.sweep_report(sweep.what, rows, served))
    if interrupted:
        return INTERRUPTED
    if not any(row.is_ok for row in rows):
        return fail("nothing fits in memory for any value; without --sweep gdp says how much is missing", NOTHING_FITS)
    return OK


def _save(request: PlaceRequest, directory: Path, what: str, row: "SweepRow") -> None:
    """Writes the plan of a row, which asks for the devices or the number of micro-batches of the row."""
    from gdp.planning.sweep import MICROBATCHES

    assert row.plan is not None
    assert row.graph is not None
    assert row.cluster is not None
    plan, asked = directory / "plan.json", request.asked
    graph, _, cluster = files_beside(plan)
    names = {name for device in row.cluster.devices for name in (device.name, device.kind)}
    options = {
        name: [text for text in value if text.rpartition("=")[2 if name == "forbid" else 0] in names]
        if name in ("forbid", "max_memory")
        else value
        for name, value in asked.options.items()
    }
    if what == MICROBATCHES:
        asked = replace(asked, options=options | {MICROBATCHES: row.value})
    else:
        asked = replace(asked, options=options, cluster=str(cluster.resolve()))
    replace(row.plan, asked=asked).save(plan)
    row.graph.save(graph)
    row.cluster.save(cluster)
