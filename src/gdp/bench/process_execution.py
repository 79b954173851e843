"""The part of `gdp bench execution` with a process for each device, over gloo: the commands that a user would give.

torchrun gdp devices measure -> gdp place -> torchrun gdp run --times -> gdp place --times -> torchrun gdp run
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gdp.bench.tables import markdown_table, milliseconds, verdict
from gdp.errors import InputError

NUM_PROCESSES = 2
TARGET_TRANSFER_ERROR = 0.2


def measure(model: str, budget: str, steps: int, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Place `model` on two processes of this machine with measured devices, routes and op times, and run it.

    InputError, with its last words, if a command fails.
    """
    cluster, times, plans = out / "processes.json", out / "processes.db", out / "processes"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    gdp = [sys.executable, "-m", "gdp"]
    place = [*gdp, "place", model, "--devices", str(cluster), "--budget", budget, "--out", str(plans), "--json"]
    run = [*torchrun, "-m", "gdp", "run", model, "--plan", str(plans / "plan.json"), "--steps", str(steps), "--json"]
    say("devices and routes of two processes")
    measured = _json([*torchrun, "-m", "gdp", "devices", "measure", "--out", str(cluster), "--json"])
    for more in ([], ["--times", str(times)]):
        say(f"{model} on two processes{' with measured op times' if more else ''}")
        placed = _json([*place, *more])
        found = _json([*run, "--times", str(times)])
    if not found["prediction"]["transfers"]:
        raise InputError(f"bench execution: the plan of {model} for two processes uses one of them; nothing was sent")
    routes = [
        {"from": link["from"], "to": link["to"], "latency_ns": link["latency"], "bytes_per_second": link["bandwidth"]}
        for link in measured["cluster"]["links"]
    ]
    return {
        "model": model,
        "fit_errors": measured["fit_errors"],
        "routes": routes,
        "num_ops": placed["graph"]["num_ops"],
        "results": found["results"],
        "step_time_ns": found["step_time_ns"],
        "predicted_ns": found["predicted_step_time_ns"],
        "transfers": found["prediction"]["transfers"],
    }


def markdown(row: Mapping[str, Any]) -> str:
    """What `measure` found, as text."""
    results, error = row["results"], row["predicted_ns"] / row["step_time_ns"] - 1.0
    equal = f"{results['bit_equal_tensors']} of {results['tensors']}"
    table = [
        (
            f"{item['from']} to {item['to']}", f"{item['num_tensors']:,}", milliseconds(item["predicted_ns"]),
            milliseconds(item["measured_ns"]), f"{item['median_error']:.0%}",
        )
        for item in row["transfers"]
    ]  # fmt: skip
    routes = "; ".join(
        f"{route['from']} to {route['to']} {milliseconds(route['latency_ns'])} ms and "
        f"{route['bytes_per_second'] / 1e9:.2f} GB/s"
        for route in row["routes"]
    )
    alone, within = statistics.median(row["fit_errors"]), max(item["median_error"] for item in row["transfers"])

    def judged(error: float) -> str:
        return f"**{error:.0%}** ({verdict(error, TARGET_TRANSFER_ERROR, text=lambda value: f'{value:.0%}')})"

    parts = (
        "### Two processes",
        f"`{row['model'].rpartition(':')[2]}`, {row['num_ops']:,} ops, with a process for each device, over gloo: "
        f"routes measured by `torchrun -m gdp devices measure` ({routes}), then placed, run, placed again with the op "
        f"times of that run, and run again. {equal} result tensors are bit for bit those of {results['reference']}, in "
        f"one process. Step time {milliseconds(row['step_time_ns'])} ms, predicted "
        f"{milliseconds(row['predicted_ns'])} ms ({error:+.0%}).",
        f"Transfers by themselves, of sizes that the routes were not fitted to: median error {judged(alone)}, largest "
        f"{max(row['fit_errors']):.0%}. Transfers of the steps, from when the route was free to the arrival: median "
        f"error {judged(within)}. In a step each core computes, and what sends and receives has to wait for it: by "
        "milliseconds, as the system's scheduler has it. In ms:",
        markdown_table(("transfer", "measured", "predicted, median", "measured, median", "error, median"), table),
    )
    return "\n\n".join(parts)


def _json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("gdp: error")] or done.stderr.splitlines()
        raise InputError(f"bench execution: {' '.join(command[1:6])} ...: {lines[-1] if lines else done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document
