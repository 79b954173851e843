"""The part of benchmark `execution` with a process for each device, over gloo: the commands that a user would give.

torchrun gdp devices measure -> gdp place -> torchrun gdp run --times -> gdp place --times -> torchrun gdp run
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdp.errors import InputError

NUM_PROCESSES = 2


def measure(model: str, budget: str, steps: int, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Places `model` on two processes of this machine with measured devices, routes and op times, and runs it.

    InputError, with its last words, if a command fails.
    """
    cluster, times, plans = out / "processes.json", out / "processes.db", out / "processes"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    gdp = [sys.executable, "-m", "gdp"]
    place = [*gdp, "place", model, "--devices", str(cluster), "--budget", budget, "--out", str(plans), "--json"]
    run = [*torchrun, "-m", "gdp", "run", model, "--plan", str(plans / "plan.json"), "--steps", str(steps), "--json"]
    say("measuring devices and routes of two processes")
    measured = _json([*torchrun, "-m", "gdp", "devices", "measure", "--out", str(cluster), "--json"])
    for more in ([], ["--times", str(times)]):
        say(f"measuring {model} on two processes{' with measured op times' if more else ''}")
        placed = _json([*place, *more])
        found = _json([*run, "--times", str(times)])
    if not found["prediction"]["transfers"]:
        raise InputError(f"execution: the plan of {model} for two processes uses one of them; nothing was sent")
    routes = [
        {"from": link["from"], "to": link["to"], "latency_ns": link["latency"], "bytes_per_second": link["bandwidth"]}
        for link in measured["cluster"]["links"]
    ]
    return {
        "model": model,
        "routes": routes,
        "num_ops": placed["graph"]["num_ops"],
        "results": found["results"],
        "step_time_ns": found["step_time_ns"],
        "predicted_ns": found["predicted_step_time_ns"],
        "transfers": found["prediction"]["transfers"],
    }


def _json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("gdp: error")] or done.stderr.splitlines()
        raise InputError(f"execution: {' '.join(command[1:6])} ...: {lines[-1] if lines else done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document
