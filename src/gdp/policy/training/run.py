"""A training run: its options, its progress, and the record of it in a checkpoint."""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from gdp.policy.training.tasks import Tasks


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a training run."""

    update: int  # done
    updates: int
    seconds: float  # of this run
    cpu_hours: float  # of the runs before this one, too
    seconds_left: float | None  # None without a limit
    rank_correlation: float | None = None  # on validation problems, of a style scorer


P = TypeVar("P", bound=TrainingProgress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Notes for the manifest on the origin of the parameters."""

    origin: str = ""  # of the initial parameters, for a policy that is not new
    held_out: Sequence[str] = ()  # model families, in this run and in those before it
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(Generic[P]):
    """Options of a training run that leave its parameters the same unless it ends early."""

    resume: bool = False  # from what an earlier run left, if there is something
    seconds: float | None = None  # ends the run early, after the last whole update
    stop: threading.Event | None = None  # likewise
    on_update: Callable[[P], None] | None = None

    def is_over(self, started: float) -> bool:
        """Returns True when the run that began at `started` must end."""
        is_late = self.seconds is not None and time.monotonic() - started >= self.seconds
        return is_late or (self.stop is not None and self.stop.is_set())


def manifest_of(
    tasks: Tasks, provenance: Provenance, arguments: dict[str, Any], *, updates: int, cpu_hours: float
) -> dict[str, Any]:
    """Returns the record of a run, for a checkpoint."""
    return {
        **tasks.inputs(),
        "seed": arguments["training"]["seed"],
        "command": provenance.command,
        "gdp_version": version("gdp-placement"),
        "commit": _commit(),
        "updates": updates,
        "cpu_hours": cpu_hours,
        "arguments": arguments,
        "held_out": list(provenance.held_out),
    }


def _commit() -> str | None:
    """Returns the commit of the checkout that gdp runs from, with "-dirty" if files differ; None without a checkout."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # the checkout may be of a project that gdp is installed in
        return git("describe", "--always", "--dirty", "--abbrev=40")
    except (OSError, subprocess.SubprocessError):
        return None
