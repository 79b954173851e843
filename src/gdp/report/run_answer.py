"""Shows executed plans, measured beside predicted times, and reads them from the output of `gdp run --json`."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gdp import files
from gdp.errors import InputError
from gdp.execute.equality import NOISE_FACTOR, Equality
from gdp.execute.measurement import Measurement
from gdp.execute.prediction import HandOver, OpPrediction, Prediction
from gdp.execute.run import OTHER_SUMS_TOLERANCE, RunResult
from gdp.report.tables import format_ms, new_table
from gdp.simulator.plan import Plan

_ROWS = {
    "devices": {"name": str, "num_ops": int, "predicted_busy_ns": int, "busy_ns": int, "wait_ns": int},
    "kinds": {"name": str, "num_ops": int, "predicted_ns": int, "measured_ns": int},
    "ops": {"name": str, "num_ops": int, "predicted_ns": int, "measured_ns": int},
    "transfers": {"from": str, "to": str, "num_tensors": int, "predicted_ns": int, "measured_ns": int},
}


def read_run(path: Path, plan: Plan) -> Mapping[str, Any]:
    """Returns the parts of the document for a report; raises InputError for other files and other plans."""
    document = files.read_json(path)
    try:
        run: dict[str, Any] = {
            **_step_times(document),
            "steps": _number(document["steps"]),
            "predicted_step_time_ns": _number(document["predicted_step_time_ns"]),
            "equal": bool(document["results"]["equal"]),
            "reference": str(document["results"]["reference"]),
        }
        devices = [str(name) for name in document["devices"]]
        one = document["one_device"]
        run["one_device"] = None if one is None else {"device": str(one["device"]), **_step_times(one)}
        prediction = document.get("prediction")
        run["prediction"] = None if prediction is None else {name: _rows(prediction[name], name) for name in _ROWS}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: is not what `gdp run --json` prints ({type(error).__name__}: {error}); save its output"
        ) from None
    if run["predicted_step_time_ns"] != plan.step_time_ns or devices != list(plan.cards):
        raise InputError(
            f"{path}: is of a plan of {run['predicted_step_time_ns']} ns on {', '.join(devices)}, this one takes "
            f"{plan.step_time_ns} ns on {', '.join(plan.cards)}; give what `gdp run` printed of this one"
        )
    return run


def _rows(listed: Any, name: str) -> list[dict[str, Any]]:
    fields = _ROWS[name]
    return [{key: (str if kind is str else _number)(row[key]) for key, kind in fields.items()} for row in listed]


def _step_times(document: Mapping[str, Any]) -> dict[str, Any]:
    low, high = document["step_time_quartiles_ns"]
    return {"step_time_ns": _number(document["step_time_ns"]), "step_time_quartiles_ns": [_number(low), _number(high)]}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{files.brief(value)} is no number")
    return value


def run_report(run: RunResult) -> Iterator[RenderableType]:
    """Yields the answer of `gdp run`."""
    places = ", ".join(f"{target.name} ({target.place})" for target in run.targets)
    cut = f", {run.layout}" if run.layout else ""
    count = len(run.placed.step_ns)
    yield Text(f"{run.graph_name}{cut}: {count} step{'s' if count > 1 else ''} on {places}")
    yield Text(_headline(run), style="bold")
    yield Text(f"{_equality(run.equality, run.reference)}")
    if (served := run.served) is not None:
        yield Text(
            f"Time per batch {format_ms(served.batch_ns)}, predicted {format_ms(served.predicted_batch_ns)}; a batch "
            f"takes up to {format_ms(served.latency_ns)}, predicted {format_ms(served.predicted_latency_ns)}."
        )
    if run.whole_batch is not None:
        yield Text(_beside_whole_batch(run.whole_batch))
    for note in run.notes:
        yield Text(note)
    yield ""
    rows = new_table("", ">median", ">quartiles", ">predicted", ">error")
    rows.add_row("plan", *_spread(run.placed), format_ms(run.plan.step_time_ns), f"{run.error:+.1%}")
    if run.one_device is not None:
        what = "the whole batch" if run.layout else "all"
        rows.add_row(f"{what} on {run.one_device_name}", *_spread(run.one_device), "-", "-")
    yield rows
    if run.prediction is None:
        yield ""
        is_at_once = "exchanges" in (run.plan.layout or {})
        hops = "Exchanges, each at once in the plan, ran hop by hop: predictions are not compared op by op."
        yield Text(
            hops if is_at_once else "To compare predictions op by op, name the devices of the plan with --devices."
        )
    else:
        yield from _prediction(run.prediction)


def run_document(run: RunResult) -> dict[str, Any]:
    """Returns the answer of `gdp run --json`; times in ns."""
    document: dict[str, Any] = {
        "graph": run.graph_name,
        "devices": [target.name for target in run.targets],
        "places": [target.place for target in run.targets],
        "steps": len(run.placed.step_ns),
        "step_time_ns": run.placed.median_step_ns,
        "step_time_quartiles_ns": list(run.placed.step_quartiles_ns),
        "step_times_ns": run.placed.step_ns,
        "predicted_step_time_ns": run.plan.step_time_ns,
        "error": run.error,
        "notes": list(run.notes),
        "one_device": None,
        "speedup": run.speedup,
        "results": {
            "equal": run.is_equal,
            "reference": run.reference,
            "tensors": run.equality.num_tensors,
            "bit_equal_tensors": run.equality.num_equal,
            "largest_relative_difference": run.equality.largest_difference,
        },
        "layout": run.layout or None,
        "batches": None if run.served is None else asdict(run.served),
        "whole_batch_difference": None if run.whole_batch is None else run.whole_batch.largest_difference,
    }
    if run.one_device is not None:
        document["one_device"] = {
            "device": run.one_device_name,
            "step_time_ns": run.one_device.median_step_ns,
            "step_time_quartiles_ns": list(run.one_device.step_quartiles_ns),
            "step_times_ns": run.one_device.step_ns,
        }
    prediction = run.prediction
    if prediction is not None:
        document["prediction"] = {
            "devices": list(map(asdict, prediction.devices)),
            "kinds": list(map(asdict, prediction.kinds)),
            "ops": list(map(asdict, prediction.ops)),
            "transfers": [
                {"from": row.pop("source"), "to": row.pop("destination"), **row}
                for row in map(asdict, prediction.hand_overs)
            ],
        }
    return document


def _headline(run: RunResult) -> str:
    text = f"Step time {format_ms(run.placed.median_step_ns)}, predicted {format_ms(run.plan.step_time_ns)}"
    if run.served is not None:
        return f"{len(run.placed.step_ns)} streams: {text.lower()} of all its batches"
    if run.speedup is None:
        return text
    return f"{text}; {run.speedup:.2f}x as fast as on {run.one_device_name} alone"


def _beside_whole_batch(equality: Equality) -> str:
    """Tells how far loss and gradients of parts of a batch are from those of the whole."""
    if equality.is_exact:
        return "Loss and gradients are bit for bit those of the whole batch."
    text = f"Loss and gradients differ from those of the whole batch by at most {equality.largest_difference:.1e}"
    if equality.is_close(OTHER_SUMS_TOLERANCE):
        return f"{text} of a tensor's largest element: sums in another order."
    return (
        f"{text} of a tensor's largest element ({equality.where}): batch normalisation and the like see a part of the "
        "batch, as under DDP."
    )


def _equality(equality: Equality, reference: str) -> str:
    num, equal = equality.num_tensors, equality.num_equal
    if equality.is_exact:
        return f"Loss, outputs, gradients and buffers ({num} tensors) are bit for bit those of {reference}."
    return (
        f"{num - equal} of {num} result tensors differ from those of {reference}, "
        f"by at most {equality.largest_difference:.1e} of their largest element, or of {NOISE_FACTOR:,.0f} times their "
        f"noise of rounding where that is more ({equality.where})."
    )


def _spread(measurement: Measurement) -> tuple[str, str]:
    low, high = measurement.step_quartiles_ns
    return format_ms(measurement.median_step_ns), f"{format_ms(low)} to {format_ms(high)}"


def _prediction(prediction: Prediction) -> Iterator[RenderableType]:
    yield ""
    devices = [
        (each.name, f"{each.num_ops:,}", *map(format_ms, (each.predicted_busy_ns, each.busy_ns, each.wait_ns)))
        for each in prediction.devices
    ]
    yield new_table("device", ">ops", ">busy, predicted", ">busy, measured", ">waiting", rows=devices)
    sent = prediction.hand_overs
    ways = [(f"{x.source} to {x.destination}", f"{x.num_tensors:,}", *_times(x), f"{x.median_error:.0%}") for x in sent]
    if ways:
        yield ""
        yield new_table("transfer", ">measured", ">predicted, median", ">measured, median", ">error, median", rows=ways)
    for title, listed in (("kinds of ops", prediction.kinds), ("ops", prediction.ops)):
        yield ""
        yield Text(f"What explains most of the error, {title}:")
        rows = [(op.name, f"{op.num_ops:,}", *_times(op), f"{op.error_ns / 1e6:+.3f} ms") for op in listed]
        yield new_table("", ">ops", ">predicted", ">measured", ">difference", rows=rows)


def _times(row: OpPrediction | HandOver) -> tuple[str, str]:
    return format_ms(row.predicted_ns), format_ms(row.measured_ns)
