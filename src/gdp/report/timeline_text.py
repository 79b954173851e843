"""Draws a step in a terminal: a line per device, a column per slice of the step, as high as the device is busy.

gpu0  ██████▆▃ ▂███████
gpu1   ▁▄████████▅▂"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console, ConsoleOptions
from rich.text import Text

from gdp.arrays import F64, I64
from gdp.report.tables import format_ms, short
from gdp.simulator.simulate import Simulation

_SHADES = " ▁▂▃▄▅▆▇█"
_NARROWEST, _WIDEST, _MOST_DEVICES = 20, 110, 16


@dataclass(frozen=True, slots=True, eq=False)
class TimelineText:
    """Prints the lines as wide as the terminal, up to 110 columns."""

    simulation: Simulation

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from timeline_text(self.simulation, min(options.max_width, _WIDEST))


def timeline_text(simulation: Simulation, width: int) -> Iterator[Text]:
    """Yields lines of at most `width` columns."""
    devices = simulation.problem.cluster.devices
    names = [short(device.name, 16) for device in devices]
    margin = max(map(len, names[:_MOST_DEVICES])) + 2
    num_columns = max(width - margin - 1, _NARROWEST)
    for device, shares in enumerate(busy_shares(simulation, num_columns)[:_MOST_DEVICES]):
        levels = np.ceil(shares * (len(_SHADES) - 1) - 1e-9).astype(int)  # any work at all is visible
        yield Text(f"{names[device]:<{margin}}" + "".join(_SHADES[level] for level in levels.tolist()))
    if len(devices) > _MOST_DEVICES:
        yield Text(f"and {len(devices) - _MOST_DEVICES} more devices")
    end = format_ms(simulation.step_time_ns)
    yield Text(f"{'':{margin}}0{end:>{num_columns - 1}}", style="dim")


def busy_shares(simulation: Simulation, num_columns: int, counted: npt.NDArray[np.bool_] | None = None) -> F64:
    """Returns [D, columns] the share of each slice in which a device computes; of `counted` [N] ops alone."""
    step_ns = max(simulation.step_time_ns, 1)
    edges = np.linspace(0, step_ns, num_columns + 1)
    chosen = (ops if counted is None else ops[counted[ops]] for ops in simulation.order)
    worked_ns = np.array([worked_until(simulation, ops, edges) for ops in chosen])
    return np.clip(np.diff(worked_ns) / (step_ns / num_columns), 0.0, 1.0)


def worked_until(simulation: Simulation, ops: I64, times_ns: npt.ArrayLike) -> F64:
    """Returns the time for which `ops` of one device, in the order of their starts, have run by each of `times_ns`."""
    if not len(ops):
        return np.zeros(np.shape(times_ns))
    starts, ends = simulation.op_begin_ns[ops], simulation.op_finish_ns[ops]
    # piecewise linear, its corners at starts and ends
    corners = np.stack((starts, ends), axis=1).ravel()
    worked = np.repeat(np.concatenate(([0], np.cumsum(ends - starts))), 2)[1:-1]
    return np.asarray(np.interp(np.asarray(times_ns), corners, worked), np.float64)
