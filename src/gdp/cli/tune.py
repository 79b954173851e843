"""Parses, calls and prints: `gdp tune`."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli import options, shared
from gdp.cli.shared import INTERRUPTED, NOTHING_FITS, OK, check_writable, fail, log, print_json, print_text, show
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.cluster import Cluster
    from gdp.models.source import ModelSource
    from gdp.search.place_question import PlaceQuestion
    from gdp.tune.tuning import LoggedMeasurement, Tuning

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
    runtime: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="With --measure: runtimes to be tried; GDP_RUNTIME has that of a plan."),
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
    """Measure plans of MODEL, learn from them what the machine does, and answer with the fastest measured plan."""
    from gdp.report.progress import live

    with live("loading gdp"):
        from gdp.budget import Budget
        from gdp.cluster import Cluster
        from gdp.models.source import ModelSource
        from gdp.planning.options import run_by
        from gdp.simulator.plan import Asked
        from gdp.tune.measuring import Measuring
        from gdp.tune.placing import Placing
        from gdp.tune.tuning import LOG, Tuning, alone

        if (on is None) == (measure is None):
            raise InputError("tune: measure plans here with --on local, or by a command of yours with --measure")
        text = on if measure is None else devices
        if text is None or not (measure is None or measure.strip()):
            raise InputError("--measure: a command, and with --devices the devices that it uses, are expected")
        if on is not None and devices is not None:
            raise InputError("--devices: is for --measure, and --on has its own; leave it out")
        for option, value in {"--to": to, "--pattern": pattern, "--runtime": runtime}.items():
            if measure is None and value is not None:
                raise InputError(f"{option}: is for --measure; leave it out")
        seconds, end_s = _seconds("--budget", budget), _seconds("--timeout", timeout)
        how = Measuring.by_run(_RUN_STEPS, end_s) if measure is None else Measuring.by_command(measure, pattern, end_s)
        source, runtimes = ModelSource(model, model_options.reading()), runtime.split(",") if runtime else []
        texts = [run_by(text, name or None, source.reading.serving) for name in runtimes or [""]]
        text, cluster = texts[0], Cluster.parse(texts[0])
        if measure is None:
            from gdp.execute.backends import find_targets

            source.check_runnable("executed")
            try:
                find_targets([device.name for device in cluster.devices], option="--on")
            except InputError as error:
                remedy = f"measure by a command that runs there, --measure COMMAND --devices {text}"
                raise InputError(f"--on {text}: is not this machine ({error}); {remedy}") from None
        if to is not None:
            from gdp.export.targets_by_name import find_layout_target, find_target

            if find_layout_target(to, is_cut=True) is None and (reserve := find_target(to).reserve):
                limits = replace(limits, reserve=given.setdefault("reserve", f"{reserve:.0%}"))
        path = out / LOG
        check_writable(path)
        kept = {name: value for name, value in given.items() if name not in _NOT_ASKED}
        question = {"model": model, "devices": text, "options": kept | {"search": search, "seed": seed}}
        if path.exists() and not resume:
            raise InputError(f"{path}: has measurements; go on with --resume, or name another --out")
    began_s, ask = time.monotonic(), _asking(source, limits, seed, threads)
    question |= {"graph": ask(cluster).problem.graph.fingerprint, "machine": cluster.fingerprint}
    reads = {name: value for name, value in kept.items() if name not in _OF_TUNING}
    placing = Placing(
        question=ask,
        cluster=cluster,
        source=source,
        asked=Asked(model, reads | {"seed": seed}, text, os.getcwd()),
        directory=out,
        budget=Budget.parse(search),
        target=to or "",
        runtimes=runtimes,
        has_orders=measure is None,
        say=lambda text: log(f"gdp: note: {text}"),
    )
    with alone(out):
        if resume and path.exists():
            tuning = Tuning.resume(out, question, end_s)
            log(f"gdp: {len(tuning.measurements):,} of {len(tuning.candidates):,} plans were measured before")
        else:
            with live(f"looking for plans of {model}"):
                found = placing.candidates({})
            if not found:
                return fail("error: no plan fits in memory; `gdp place` says how much is missing", NOTHING_FITS)
            tuning = Tuning.begin(out, question, found, placing.numbers)
        interrupted, failure = False, None
        try:
            tuning.run(
                lambda directory: how.measure(directory, tuning.candidates[int(directory.name)].environment),
                most=steps,
                ends_s=began_s + seconds,
                on_measured=lambda line: _tell(tuning, line),
                placing=placing,
            )
        except KeyboardInterrupt:
            interrupted, tuning.ended = True, "interrupted"
        except InputError as error:  # a full disk; what was measured is told
            failure, tuning.ended = error, "the log cannot be written"
        status = _answered(tuning, cluster, measure, json=json, interrupted=interrupted)
        if failure is not None:
            raise failure
        return status


_RUN_STEPS = 5
_OF_TUNING = "measure", "to", "pattern", "search", "runtime"  # and not of the question that a plan answers
_LEAST_MOVED = 0.01  # of a number of the machine, to be worth a word


def _seconds(option: str, text: str) -> float:
    from gdp.budget import Budget

    with contextlib.suppress(InputError):
        if seconds := Budget.parse(text).seconds:
            return seconds
    raise InputError(f"{option} {text}: a time is expected, such as 10m")


def _asking(
    source: "ModelSource", limits: options.ConstraintOptions, seed: int, threads: int | None
) -> "Callable[[Cluster], PlaceQuestion]":
    """Returns the question about MODEL on a cluster, which is read once."""
    from functools import cache, lru_cache

    from gdp.cli.inputs import read_graph
    from gdp.cli.shared import warm_up
    from gdp.search.place_question import PlaceQuestion, SearchOptions

    read = cache(lambda: read_graph(source))

    @lru_cache(maxsize=1)
    def ask(cluster: "Cluster") -> PlaceQuestion:
        search = SearchOptions(seed=seed, num_threads=threads)
        question = PlaceQuestion.of(source, cluster, limits.constraints(cluster), None, None, search, read())
        question.prepare()
        warm_up(("auto",), question.problem)
        return question

    return ask


def _tell(tuning: "Tuning", line: "LoggedMeasurement") -> None:
    """Logs a measurement, and copies the best plan so far to where the answer is."""
    from gdp.report.tables import format_ms

    row = tuning.candidates[line.candidate]
    told = f"{line.status} ({line.reason})" if line.step_ns is None else format_ms(line.step_ns)
    log(f"gdp: {len(tuning.measurements)}: {row.name}: {told}, expected {format_ms(line.before_ns)}")
    tuning.copy_answer()


def _answered(tuning: "Tuning", cluster: "Cluster", command: str | None, *, json: bool, interrupted: bool) -> int:
    """Prints the answer, and writes it and what was learned about the machine; returns the exit status."""
    from gdp.report import listings
    from gdp.report.tables import format_ms
    from gdp.tune.measuring import CANDIDATE, OUT_OF_MEMORY

    best, plan, machine = tuning.answer, tuning.directory / "plan.json", tuning.directory / "machine.yaml"
    fit = tuning.machine(cluster)
    if best is not None:
        tuning.copy_answer()
        fit.fitted.save(machine)
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
                "machine": None if best is None else str(machine),
                "numbers": fit.number_rows(),
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
            moved = [
                f"{what} of {kind} {factor:.2f} times what it was"
                for (kind, what), factor in fit.factors.items()
                if abs(factor - 1) >= _LEAST_MOVED
            ]
            print_text(f"Learned of the machine: {', '.join(moved) or 'it is as it was known'}")
            for kind, what in fit.unlikely:
                log(f"gdp: note: {what} of {kind} is far from elsewhere; check that the times are those of steps")
            variables = {CANDIDATE: tuning.directory} | tuning.candidates[best].environment
            settings = " ".join(f"{key}={shlex.quote(str(value))}" for key, value in variables.items())
            again = f"next: gdp run {plan}; " if command is None else ""
            if command is not None:
                print_text(f"To run it: {settings} COMMAND")
            print_text(f"Written to {plan}; {again}another model: gdp place MODEL --devices {machine}")
    if interrupted:
        return INTERRUPTED
    if best is None:
        reason = f"; the first: {lines[0].status}: {lines[0].reason}" if lines else ""
        lack_memory = {line.status for line in lines} == {OUT_OF_MEMORY}
        return fail(f"error: no plan ran: {tuning.ended}{reason}", NOTHING_FITS if lack_memory else shared.FAILED)
    return OK
