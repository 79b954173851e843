"""Reads the output of `gdp run --json`: measured beside predicted times."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdp import files
from gdp.errors import InputError
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
