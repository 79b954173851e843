"""Parses, calls and prints: `gdp tune`."""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdp.cli import options
from gdp.cli.shared import INTERRUPTED, NOTHING_FITS, OK, check_writable, fail, log, print_json, print_text, show
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.export.export_target import ExportTarget
    from gdp.export.layouts.target import LayoutTarget
    from gdp.models.source import ModelSource
    from gdp.tune.candidates import PlannedCandidate
    from gdp.tune.tuning import LoggedCandidate, LoggedMeasurement, Tuning

# a run that goes on may have others
_NOT_ASKED = "on", "devices", "steps", "budget", "timeout", "resume", "out", "json"


@options.with_options
def tune(
    model: options.ModelArgument,
    on: Annotated[
        str | None,
        typer.Option(metavar="DEVICES", help="Measure here, by `gdp run`: local, or a file of `gdp devices measure`."),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Measure by COMMAND; GDP_CANDIDATE is the directory with plan.json."),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="With --measure: the devices that COMMAND uses.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TARGET", help="With --measure: export each plan there, as `gdp export --to`."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help='Its group is a time in ms that COMMAND prints. Default: {"step_time_ms": 12.3}.'
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Plans measured at most.")] = 50,
    budget: Annotated[str, typer.Option(metavar="TIME", help="No measurement begins after it.")] = "10m",
    search: Annotated[str, typer.Option(metavar="BUDGET", help="Of the search for plans.")] = "20s",
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Of a measurement, which is ended then.")] = "5m",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the search.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the measurements in DIR.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Of the log, all plans, and plan.json.")] = Path("tune"),
    *,
    limits: options.ConstraintOptions,
    model_options: options.ReadingOptions,
    given: options.Given,
    threads: options.ThreadsOption = None,
    json: options.JsonOption = False,
) -> int:
    """Measure plans of MODEL, learn how far predictions are off, and answer with the fastest measured plan."""
    from gdp.report.progress import live

    with live("loading gdp"):
        from gdp.budget import Budget
        from gdp.cluster import Cluster
        from gdp.models.source import ModelSource
        from gdp.simulator.plan import Asked
        from gdp.tune.measuring import Measuring
        from gdp.tune.tuning import LOG, Tuning

        if (on is None) == (measure is None):
            raise InputError("tune: measure plans here with --on local, or by a command of yours with --measure")
        text = on if measure is None else devices
        if text is None or (on is not None and devices is not None):
            raise InputError("--devices: goes with --measure, and says which devices COMMAND uses; --on has its own")
        if measure is None and (to is not None or pattern is not None):
            raise InputError(f"{'--pattern' if to is None else '--to'}: is for --measure; leave it out")
        seconds, limit_s, clock_budget = (
            _seconds("--budget", budget),
            _seconds("--timeout", timeout),
            Budget.parse(search),
        )
        how = (
            Measuring.by_run(_RUN_STEPS, limit_s)
            if measure is None
            else Measuring.by_command(measure, pattern, limit_s)
        )
        source, cluster = ModelSource(model, model_options.reading()), Cluster.parse(text)
        if measure is None:
            from gdp.execute.backends import find_targets

            source.check_runnable("executed")
            find_targets([device.name for device in cluster.devices], option="--on")
        path = out / LOG
        check_writable(path)
        kept = {name: value for name, value in given.items() if name not in _NOT_ASKED}
        question = {"model": model, "devices": text, "options": kept | {"search": search, "seed": seed}}
        if path.exists() and not resume:
            raise InputError(f"{path}: has measurements; go on with --resume, or name another --out")
    began_s = time.monotonic()
    if resume and path.exists():
        tuning = Tuning.resume(out, question)
        log(f"gdp: {len(tuning.measurements):,} of {len(tuning.candidates):,} plans were measured before")
    else:
        reads = {name: value for name, value in kept.items() if name not in ("measure", "to", "pattern", "search")}
        asked = Asked(model, reads | {"seed": seed}, text, os.getcwd())
        found = _found(source, cluster, limits.constraints(cluster), seed, threads, clock_budget)
        if not found:
            return fail("error: no plan fits in memory; `gdp place` says how much is missing", NOTHING_FITS)
        tuning = Tuning.begin(out, question, _written(found, out, to, source, asked))
    interrupted = False
    try:
        tuning.run(how.measure, most=steps, ends_s=began_s + seconds, on_measured=lambda line: _tell(tuning, line))
    except KeyboardInterrupt:
        interrupted, tuning.ended = True, "interrupted"
    return _answered(tuning, json=json, interrupted=interrupted)


_RUN_STEPS = 5
_MOST_CANDIDATES = 100


def _seconds(option: str, text: str) -> float:
    from gdp.budget import Budget

    seconds = Budget.parse(text).seconds
    if not seconds:
        raise InputError(f"{option} {text}: a time is expected, such as 10m")
    return seconds


def _found(
    source: "ModelSource", cluster: Any, constraints: Any, seed: int, threads: int | None, budget: Any
) -> "list[PlannedCandidate]":
    """Returns the plans to be measured."""
    from gdp.budget import Clock
    from gdp.cli.inputs import read_graph
    from gdp.cli.shared import warm_up
    from gdp.report.progress import live
    from gdp.search.place_question import PlaceQuestion, SearchOptions
    from gdp.tune.candidates import find_candidates

    read = read_graph(source)
    search = SearchOptions(seed=seed, num_threads=threads)
    with live(f"preparing {read.graph.name} on {cluster.name}"):
        question = PlaceQuestion.of(source, cluster, constraints, None, None, search, read)
        question.prepare()
    warm_up(("auto",), question.problem)
    with live(f"looking for plans of {read.graph.name}"):
        return find_candidates(question, Clock(budget), _MOST_CANDIDATES)


def _written(
    found: "list[PlannedCandidate]", out: Path, to: str | None, source: "ModelSource", asked: Any
) -> "list[LoggedCandidate]":
    """Writes each plan, with its devices and its export, into a directory of its number. Plans that TARGET cannot
    express are left out; InputError where it can express none."""
    from dataclasses import replace

    from gdp import files
    from gdp.export.exported_plan import check_takes_layout, exported
    from gdp.export.targets_by_name import find_layout_target, find_target
    from gdp.planning.plan_directory import files_beside
    from gdp.tune.tuning import LoggedCandidate

    logged, reason = list[LoggedCandidate](), ""
    for each in found:
        plan, path = replace(each.plan, asked=asked), out / str(len(logged)) / "plan.json"
        problem = plan.problem
        assert problem is not None
        if to is not None:
            try:
                target: ExportTarget | LayoutTarget | None = find_layout_target(to, is_cut=plan.layout is not None)
                if target is None:
                    target = find_target(to)
                    check_takes_layout(plan, target)
                content = exported(problem, plan, target, source).content
            except InputError as error:
                reason = str(error)
                log(f"gdp: note: {each.name} is left out: {reason}")
                continue
            files.write_bytes(path.with_name(target.file_name), content.encode())
        plan.save(path)
        problem.cluster.save(files_beside(path)[2])
        logged.append(LoggedCandidate(each.name, plan.step_time_ns, each.spread, each.comes_first, each.traits))
    if not logged:
        raise InputError(f"--to {to}: expresses none of {len(found)} plans; the last: {reason}")
    return logged


def _tell(tuning: "Tuning", line: "LoggedMeasurement") -> None:
    """Logs a measurement, and copies the best plan so far to where the answer is."""
    from gdp import files
    from gdp.report.tables import format_ms

    row = tuning.candidates[line.candidate]
    told = f"{line.status} ({line.reason})" if line.step_ns is None else format_ms(line.step_ns)
    log(f"gdp: {len(tuning.measurements)}: {row.name}: {told}, expected {format_ms(line.before_ns)}")
    if (best := tuning.answer) is not None:
        for name in ("plan.json", "cluster.json"):
            files.write_bytes(tuning.directory / name, files.read_bytes(tuning.directory / str(best) / name))


def _answered(tuning: "Tuning", *, json: bool, interrupted: bool) -> int:
    """Prints the answer; returns the exit status."""
    from gdp.report import listings
    from gdp.report.tables import format_ms

    best, plan = tuning.answer, tuning.directory / "plan.json"
    lines = sorted(tuning.measurements, key=lambda line: (line.step_ns is None, line.step_ns or 0))
    if json:
        rows = []
        for line in tuning.measurements:
            row = tuning.candidates[line.candidate]
            rows.append({"name": row.name, "predicted_ns": row.predicted_ns, **asdict(line)})
        print_json(
            {
                "num_candidates": len(tuning.candidates),
                "measurements": rows,
                "best": None if best is None else tuning.candidates[best].name,
                "step_time_ns": None if best is None else round(tuning.measured_ns[best]),
                "plan": None if best is None else str(plan),
                "ended": tuning.ended,
            }
        )
    else:
        shown = []
        for line in lines:
            row = tuning.candidates[line.candidate]
            time_ns = None if line.step_ns is None else format_ms(line.step_ns)
            times = {"predicted": format_ms(row.predicted_ns), "expected": format_ms(line.before_ns)}
            shown.append({"plan": row.name, "measured": time_ns, **times, "status": line.status})
        show(listings.rows_report(shown))
        if best is not None:
            name, time = tuning.candidates[best].name, format_ms(round(tuning.measured_ns[best]))
            num, num_all = len(tuning.measured_ns), len(tuning.candidates)
            print_text(f"\n{name} is the fastest of {num} measured plans, of {num_all}: {time} ({tuning.ended})")
            print_text(f"Written to {plan}; next: gdp run {plan}")
    if interrupted:
        return INTERRUPTED
    if best is None:
        reason = f"{lines[0].status}: {lines[0].reason}" if lines else tuning.ended
        return fail(f"error: no plan ran; the first: {reason}", NOTHING_FITS)
    return OK
