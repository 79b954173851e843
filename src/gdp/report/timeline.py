"""The timeline of a plan in Python: text in a terminal, a figure in a notebook, rows for a data frame."""

import base64
import html
from dataclasses import dataclass
from pathlib import Path

from gdp import files
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import GraphSource
from gdp.planning.plan_source import simulation_of
from gdp.report.figure import figure_bytes
from gdp.report.timeline_text import timeline_text
from gdp.simulator.plan import Plan
from gdp.simulator.simulate import Simulation

_COLUMNS = 100
_KINDS = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class OpRun:
    """One op in a step: where and when it runs, in ns from the start of the step."""

    op: str
    device: str
    start_ns: int
    finish_ns: int
    kind: str
    module: str
    phase: str


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A simulated step over time.

    A terminal shows a line for each device, as high as the device is busy, and a notebook the figure of `gdp report
    --figure`, if Matplotlib is installed. `pandas.DataFrame(timeline.rows)` makes a table.
    """

    simulation: Simulation

    @property
    def rows(self) -> list[OpRun]:
        """Returns the ops by device, and on each in the order of their starts."""
        step, graph = self.simulation, self.simulation.problem.graph
        devices = step.problem.cluster.devices
        starts, finishes = step.op_start_ns.tolist(), step.op_finish_ns.tolist()
        return [
            OpRun(
                graph.op_names[op],
                devices[device].name,
                starts[op],
                finishes[op],
                graph.kinds[op],
                graph.modules[op],
                graph.phases[op],
            )
            for device, ops in enumerate(step.order)
            for op in ops.tolist()
        ]

    def save(self, path: str | Path) -> Path:
        """Writes the figure to `path`, which ends in .svg, .png or .pdf, and returns the path.

        Raises InputError for another name, and without Matplotlib.
        """
        path = Path(path)
        if path.suffix not in _KINDS:
            raise InputError(f"{path}: a name that ends in {', '.join(_KINDS)} is expected")
        files.write_bytes(path, figure_bytes(self.simulation, path.suffix[1:]))
        return path

    def __repr__(self) -> str:
        """Returns the lines that a terminal shows."""
        return "\n".join(line.plain.rstrip() for line in timeline_text(self.simulation, _COLUMNS))

    def _repr_html_(self) -> str:
        """Returns Jupyter's view: the figure, or the text where Matplotlib is missing."""
        try:
            picture = base64.b64encode(figure_bytes(self.simulation, "png")).decode()
        except InputError:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return f'<img alt="timeline" width="700" src="data:image/png;base64,{picture}">'


def timeline(plan: Plan, graph: GraphSource | None = None, cluster: Cluster | str | None = None) -> Timeline:
    """Returns the step of a plan over time: a figure in a notebook, text elsewhere, and its rows for a data frame.

    A plan from a file reads its graph and devices again; `graph` and `cluster` are others to be taken in their place.
    """
    return Timeline(simulation_of(plan, graph, cluster))
