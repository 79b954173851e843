"""Measures a plan with a command under a supervisor, which may fail in any way: that is a result, too."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gdp.cluster.detect.machine import among_visible
from gdp.errors import InputError
from gdp.tune import supervisor

OK, OUT_OF_MEMORY, FAILED, TIMED_OUT, NO_TIME = "ok", "out of memory", "failed", "timed out", "no time"
CANDIDATE = "GDP_CANDIDATE"  # environment variable: the directory of the plan that is measured
_KEY = "step_time_ms"
_MS = {"ms": 1.0, "s": 1e3}  # by the name of a pattern's group
_MEMORY_STATUS = 3  # exit status of `gdp run`
_MEMORY_WORDS = "out of memory", "outofmemory", "cannot allocate memory", "can't allocate memory"
_RAISED = re.compile(r"\w*(?:Error|Exception): \S.*")
_MOST_ENDING_S = 6 * supervisor.GRACE_S
_KILLED = -9, 137  # by SIGKILL; a shell adds 128
_KEPT = 200  # characters of a reason
_TAIL_BYTES = 1 << 20  # of an output that are read
_OUTPUT, _ERRORS = "output.txt", "errors.txt"
_SUPERVISOR = supervisor.__file__


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement; `step_ns` is infinite where there is no time."""

    status: str
    step_ns: float = inf
    noise: float | None = None  # relative deviation of the time; None: not known
    reason: str = ""


@dataclass(frozen=True)
class Measuring:
    """A command, and how the times of steps are read from what it prints."""

    command: Sequence[str]
    read: Callable[[str], tuple[float, float | None] | None]  # from its output to ns and noise; None: no time
    timeout_s: float

    @classmethod
    def by_run(cls, steps: int, timeout_s: float) -> "Measuring":
        """Returns `gdp run` of the plan on this machine."""
        command = [sys.executable, "-m", "gdp", "run", "plan.json", "--steps", str(steps), "--json"]
        return cls(command, _of_run, timeout_s)

    @classmethod
    def by_command(cls, command: str, pattern: str | None, timeout_s: float) -> "Measuring":
        """Returns a command of the user's for a shell, which prints times in ms: a JSON object with `step_time_ms` a
        line, or what the group of `pattern` matches, which may be called `s` or `ms`. The median of the second
        half of them is the time."""
        try:
            compiled = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise InputError(f"--pattern {pattern}: is no regular expression ({error})") from None
        if compiled is not None and compiled.groups != 1:
            raise InputError(f"--pattern {pattern}: has {compiled.groups} groups; one is expected, about a time in ms")
        unit = "ms" if compiled is None else next(iter(compiled.groupindex), "ms")
        if unit not in _MS:
            raise InputError(f"--pattern {pattern}: its group is called {unit!r}; ms or s is expected")

        def read(output: str) -> tuple[float, float | None] | None:
            texts: list[Any] = [item[_KEY] for item in _json_lines(output) if _KEY in item]
            try:
                found = texts if compiled is None else [text.replace(",", "") for text in compiled.findall(output)]
                times_ms = [_MS[unit] * float(text) for text in found]
            except (TypeError, ValueError, OverflowError):
                return None
            if not times_ms or not all(isfinite(time) and time > 0 for time in times_ms):
                return None
            settled = times_ms[len(times_ms) // 2 :]
            low, median, high = np.percentile(settled, (25, 50, 75)).tolist()
            return median * 1e6, noise_of_median(low, median, high, len(settled))

        return cls(["/bin/sh", "-c", command], read, timeout_s)

    def measure(self, directory: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Measured:
        """Runs the command in `directory`, if it is that of `gdp run`, else where gdp runs. What it prints is kept in
        the directory, and all its processes are ended, also where this one is killed."""
        own = self.read is _of_run
        try:
            return self._measured(directory, environment, own)
        except OSError as error:  # the directory is gone, or the disk is full
            return Measured(FAILED, reason=f"{directory}: {error.strerror or error}")

    def _measured(self, directory: Path, environment: Mapping[str, str], own: bool) -> Measured:
        with (
            open(directory / _OUTPUT, "wb") as output,
            open(directory / _ERRORS, "wb") as errors,
            subprocess.Popen(
                [sys.executable, "-IS", _SUPERVISOR, *self.command],
                cwd=directory if own else None,
                env=os.environ | among_visible(environment) | {CANDIDATE: str(directory.absolute())},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            ) as process,
        ):
            try:
                status = process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                left = "" if _end(process) else ", and it cannot be ended"
                return Measured(TIMED_OUT, reason=f"no end within {self.timeout_s:g} s{left}")
            finally:
                _end(process)
        printed, said = _tail(directory / _OUTPUT), _tail(directory / _ERRORS)
        if status:
            raised = [match[0] for match in _RAISED.finditer(said or printed)]  # torchrun says more behind the first
            last = next((line.strip() for line in reversed((said or printed).splitlines()) if line.strip()), "")
            lacks = any(words in f"{printed}{said}".lower() for words in _MEMORY_WORDS)
            lacks |= own and status == _MEMORY_STATUS
            ended = f"signal {-status}" if status < 0 else f"exit status {status}"
            ended += ", as where the host lacks memory" * (status in _KILLED)
            return Measured(OUT_OF_MEMORY if lacks else FAILED, reason=f"{ended}: {[*raised, last][0]}"[:_KEPT])
        found = self.read(printed) or self.read(said)
        if found is None or not (isfinite(found[0]) and found[0] > 0):
            return Measured(NO_TIME, reason=f"no time of a step in {directory / _OUTPUT}")
        return Measured(OK, *found)


def _end(process: "subprocess.Popen[bytes]") -> bool:
    """Ends what runs, by the end of its input, and returns whether it ended; a driver that hangs holds a process."""
    try:
        process.communicate(timeout=_MOST_ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the supervisor, which waits for the others
        return False
    return True


def _of_run(output: str) -> tuple[float, float | None] | None:
    """Returns the time in what `gdp run --json` prints; runs with other results than the model's exit with 1."""
    for document in _json_lines(output):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            (low, high), median = document["step_time_quartiles_ns"], float(document["step_time_ns"])
            return median, noise_of_median(low, median, high, int(document["steps"]))
    return None


def noise_of_median(low: float, median: float, high: float, count: int) -> float | None:
    """Returns the relative deviation of the median of `count` times with these quartiles, as of a normal distribution;
    None of too few."""
    return 1.25 * (high - low) / 1.349 / median / count**0.5 if count > 2 else None


def _json_lines(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        if line.lstrip().startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return found


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - _TAIL_BYTES, 0))
        return file.read().decode("utf-8", "replace")
