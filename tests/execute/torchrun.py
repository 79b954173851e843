"""Jobs of `placed_jobs` under torchrun."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from execute import placed_jobs

TESTS = str(Path(__file__).parents[1])
STANDALONE = ("--standalone", "--nproc-per-node", "2")


def torchrun(
    out: Path, job: str, *args: Any, options: Sequence[str] = STANDALONE, prefix: Sequence[str] = (), **environment: str
) -> "subprocess.Popen[str]":
    """Starts the ranks of a job, in a session of their own; `prefix` is a command that runs torchrun."""
    out.mkdir(exist_ok=True)
    path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    own = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **environment}
    command = [
        *prefix,
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        str(placed_jobs.__file__),
        str(out),
        job,
    ]
    return subprocess.Popen(
        [*command, *map(json.dumps, args)], env=own, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def error_lines(standard_error: str) -> list[str]:
    """Returns the lines that gdp wrote."""
    return [line for line in standard_error.splitlines() if line.startswith("gdp: ")]


def is_soon(condition: Callable[[], bool], seconds: float) -> bool:
    """Returns whether the condition holds within that time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def pids_of(out: Path) -> list[int]:
    """Returns the processes of the ranks of the job `saves`."""
    return [int(file.read_text() or 0) for file in sorted(out.glob("*.pid"))]


def is_running(pid: int) -> bool:
    """Returns whether there is a process of that number that has not ended."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
