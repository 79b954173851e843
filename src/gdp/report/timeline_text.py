"""Draws a step in a terminal: a line per device, a column per slice of the step, as high as the device is busy.

gpu0  ██████▆▃ ▂███████
gpu1   ▁▄████████▅▂
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console, ConsoleOptions
from rich.text import Text

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


def busy_shares(
    simulation: Simulation, num_columns: int, counted: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.float64]:
    """Returns [D, columns] the share of each slice of the step in which a device computes.

    With `counted` [N], only these ops count.
    """
    step_ns = max(simulation.step_time_ns, 1)
    edges = np.linspace(0, step_ns, num_columns + 1)
    shares = np.zeros((simulation.problem.num_devices, num_columns))
    for device, all_ops in enumerate(simulation.order):
        ops = all_ops if counted is None else all_ops[counted[all_ops]]
        starts, ends = simulation.op_start_ns[ops], simulation.op_finish_ns[ops]
        # time computed until each edge: piecewise linear, its corners at starts and ends
        corners = np.stack((starts, ends), axis=1).ravel()
        worked = np.repeat(np.concatenate(([0], np.cumsum(ends - starts))), 2)[1:-1] if len(ops) else np.zeros(0)
        if len(ops):
            shares[device] = np.diff(np.interp(edges, corners, worked)) / (step_ns / num_columns)
    return np.clip(shares, 0.0, 1.0)
