"""`onnxruntime`: layer annotations of ONNX Runtime, JSON.

Each node has an annotation (`layer_ann` among its metadata), and the session's option
`session.layer_assignment_settings` says which device each annotation goes to: `gpu:0(=gdp.gpu0);cpu(=gdp.cpu)`, `=`
for the annotation itself rather than what begins with it. `annotate` writes them into a model:

    settings = annotate(model, json.load(open("layers.json")))
    options.add_session_config_entry("session.layer_assignment_settings", settings)
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gdp.export.nodes import fill, node_units, parse_nodes, read_json, write_nodes
from gdp.export.target import Target
from gdp.export.units import Units
from gdp.graph import I64
from gdp.problem import Problem

if TYPE_CHECKING:
    from onnx import ModelProto

NAME = "onnxruntime"
SETTINGS, ANNOTATION = "session.layer_assignment_settings", "layer_ann"


def read_units(problem: Problem) -> Units:
    """Nodes."""
    return node_units(problem, NAME)


def _annotation(gpu: int) -> str:
    return "gdp.cpu" if gpu < 0 else f"gdp.gpu{gpu}"


def _number(annotation: str) -> int:
    return -1 if annotation == "gdp.cpu" else int(annotation.removeprefix("gdp.gpu"))


def _device(annotation: str) -> str:
    """As ONNX Runtime calls it."""
    number = _number(annotation)
    return "cpu" if number < 0 else f"gpu:{number}"


def write(problem: Problem, units: Units, devices: I64) -> str:
    """The option and the annotation of each node."""
    nodes = write_nodes(problem, units, devices, _annotation)
    settings = ";".join(f"{_device(annotation)}(={annotation})" for annotation in sorted(set(nodes.values())))
    return json.dumps({SETTINGS: settings, "annotations": nodes}, indent=1) + "\n"


def parse(text: str, problem: Problem, units: Units) -> I64:
    """[U] from such a file."""
    placed: Any = read_json(text, NAME)["annotations"]
    return parse_nodes(placed, problem, units, _number)


def annotate(model: "ModelProto", exported: Mapping[str, Any]) -> str:
    """Annotate all nodes of `model` with what was `exported`, and return the session's option.

    A node that the plan does not name (it has no name, or was folded) goes with its inputs. InputError if no node has a
    name of the plan.
    """
    annotations = exported["annotations"]
    made_by = {output: str(number) for number, node in enumerate(model.graph.node) for output in node.output}
    placed = fill(
        (str(number), [made_by[item] for item in node.input if item in made_by], annotations.get(node.name))
        for number, node in enumerate(model.graph.node)
    )
    for number, node in enumerate(model.graph.node):
        entry = next((item for item in node.metadata_props if item.key == ANNOTATION), None)
        entry = node.metadata_props.add() if entry is None else entry
        entry.key, entry.value = ANNOTATION, placed[str(number)]
    return str(exported[SETTINGS])


TARGET = Target(NAME, "nodes", "layers.json", read_units, write, parse)
