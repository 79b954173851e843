"""Writes a placed graph in DOT, for Graphviz."""

from gdp.errors import InputError
from gdp.report.figure import device_colour
from gdp.report.tables import short
from gdp.simulator.simulate import Simulation

_LABEL = 60  # characters of a name in a label
MOST_DOT_OPS = 2000  # Graphviz lays out more only in minutes
_ESCAPES = str.maketrans({"\0": "\ufffd", "\\": "\\\\", "&": "&amp;", '"': '\\"', "\r": " ", "\n": "\\n"})


def dot_text(simulation: Simulation) -> str:
    """Returns the graph in DOT, each op in the colour of its device.

    Raises InputError if it is too large for Graphviz to lay out.
    """
    graph, cluster = simulation.problem.graph, simulation.problem.cluster
    if graph.num_ops > MOST_DOT_OPS:
        raise InputError(
            f"--dot: {graph.name} has {graph.num_ops} ops; Graphviz lays out up to {MOST_DOT_OPS}, use the page instead"
        )
    lines = [f"digraph {_quoted(graph.name)} {{", '  node [shape=box, style=filled, fontname="sans-serif"];']
    for op, name in enumerate(graph.op_names):
        device = int(simulation.placement[op])
        colour = device_colour(device)
        label = f"{short(name, _LABEL)}\n{short(graph.kinds[op], _LABEL)}\n{cluster.devices[device].name}"
        lines.append(f'  {op} [label={_quoted(label)}, fillcolor="{colour}", fontcolor="{_ink(colour)}"];')
    producers = graph.producers[graph.edge_tensors]
    for producer, consumer in dict.fromkeys(zip(producers.tolist(), graph.consumers.tolist(), strict=True)):
        moved = simulation.placement[producer] != simulation.placement[consumer]
        lines.append(f"  {producer} -> {consumer}{' [penwidth=2, style=dashed]' if moved else ''};")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    """Returns `text` as a string of the DOT language, which has escapes and no NUL."""
    return f'"{text.translate(_ESCAPES)}"'


def _ink(colour: str) -> str:
    """Returns the colour of a text on `colour`."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "black"
