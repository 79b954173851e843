"""Target: a tool that plans are exported for, by what it can express and the file that says it."""

from collections.abc import Callable
from dataclasses import dataclass

from gdp.errors import InputError
from gdp.export.units import Units, is_cpu
from gdp.graph import I64
from gdp.problem import Problem
from gdp.simulate import Simulation


@dataclass(frozen=True)
class Target:
    """How a tool is written for.

    `read_units` says what it places as one, with InputError for a graph that it cannot run. `write` gives the content
    of a file from the devices [U] of units, and `parse` the devices again from such a content. Where units do not fit,
    `offload` may have other devices, with the step as the tool runs it.
    """

    name: str
    level: str  # what its units are: `module level`
    file_name: str  # by default, beside the plan
    read_units: Callable[[Problem], Units]
    write: Callable[[Problem, Units, I64], str]
    parse: Callable[[str, Problem, Units], I64]
    offload: Callable[[Problem, Units, I64], tuple[I64, Simulation] | None] | None = None


def accelerator_numbers(problem: Problem) -> list[int]:
    """[D] which GPU a device is, counted in the cluster's order; -1 for a CPU."""
    numbers, count = [], 0
    for cpu in is_cpu(problem).tolist():
        numbers.append(-1 if cpu else count)
        count += not cpu
    return numbers


def stage_devices(devices: I64) -> list[int]:
    """The device of each stage, from those [U] of a chain."""
    found = devices.tolist()
    return [device for number, device in enumerate(found) if number == 0 or found[number - 1] != device]


def stage_starts(devices: I64) -> list[int]:
    """The first unit of each stage."""
    found = devices.tolist()
    return [number for number, device in enumerate(found) if number == 0 or found[number - 1] != device]


def wrong_content(target: str, what: str) -> InputError:
    """The error for a file that is not one of this target for this graph."""
    return InputError(f"{target}: {what}; export the plan again")
