"""`onnxruntime`: layer annotations of ONNX Runtime, JSON.

Each node has an annotation (`layer_ann` among its metadata), and the session's option
`session.layer_assignment_settings` says which device each annotation goes to: `gpu:0(=gdp.gpu0);cpu(=gdp.cpu)`. The `=`
asks for the annotation itself rather than for all that begin with it. `annotate` writes them into a model:

    settings = annotate(model, json.load(open("layers.json")))
    options.add_session_config_entry("session.layer_assignment_settings", settings)"""

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from gdp.arrays import I64
from gdp.export.export_target import ExportTarget, ExportUnits
from gdp.export.node_units import complete, device_names, node_units
from gdp.simulator.problem import Problem

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

NAME = "onnxruntime"
SETTINGS, ANNOTATION = "session.layer_assignment_settings", "layer_ann"


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes the option and the annotation of each node."""
    nodes = device_names(problem, units, devices, lambda gpu: "gdp.cpu" if gpu < 0 else f"gdp.gpu{gpu}")
    device = {name: name.removeprefix("gdp.").replace("gpu", "gpu:") for name in sorted(set(nodes.values()))}
    settings = ";".join(f"{device[annotation]}(={annotation})" for annotation in device)
    return json.dumps({SETTINGS: settings, "annotations": nodes}, indent=1) + "\n"


def annotate(model: "ModelProto", exported: Mapping[str, Any]) -> str:
    """Annotates all nodes of `model` with the content of an `exported` file, and returns the session's option. A node
    that the plan does not name (it has no name, or was folded) goes with its inputs, a DequantizeLinear with the node
    that reads it, whose kernel it is part of. InputError if no node has a name of the plan."""
    annotations = exported["annotations"]
    producers = {output: str(number) for number, node in enumerate(model.graph.node) for output in node.output}
    placed = complete(
        (str(number), [producers[item] for item in _followed(node) if item in producers], annotations.get(node.name))
        for number, node in enumerate(model.graph.node)
    )
    for number, node in enumerate(model.graph.node):
        entry = next((item for item in node.metadata_props if item.key == ANNOTATION), None)
        entry = node.metadata_props.add() if entry is None else entry
        entry.key, entry.value = ANNOTATION, placed[str(number)]
    return str(exported[SETTINGS])


def _followed(node: "NodeProto") -> list[str]:
    """Returns the inputs of a node that it is placed with."""
    return [] if node.op_type == "DequantizeLinear" else list(node.input)


TARGET = ExportTarget(NAME, "nodes", "layers.json", partial(node_units, target=NAME), write)
