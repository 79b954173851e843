"""`openvino`: affinities for OpenVINO's HETERO plugin, JSON from the names of nodes to devices such as `GPU.0`.
apply_affinities(model, json.load(open("affinities.json"))) compiled = core.compile_model(model, "HETERO:GPU.0,CPU")"""

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from gdp.arrays import I64
from gdp.export.export_target import ExportTarget, ExportUnits
from gdp.export.node_units import complete, device_names, node_units
from gdp.simulator.problem import Problem

if TYPE_CHECKING:
    from openvino import Model

NAME = "openvino"


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes the device of each node."""
    nodes = device_names(problem, units, devices, lambda gpu: "CPU" if gpu < 0 else f"GPU.{gpu}")
    return json.dumps(nodes, indent=1) + "\n"


def apply_affinities(model: "Model", affinities: Mapping[str, str]) -> dict[str, str]:
    """Gives every node of `model` an affinity, since HETERO asks for all, and returns them by friendly name. A node
    that the plan does not name (weights, results, nodes that OpenVINO's reader added or renamed) goes with its inputs.
    InputError if no node has a name of the plan."""
    nodes = [(node.get_friendly_name(), node) for node in model.get_ordered_ops()]
    placed = complete(
        (name, [item.get_node().get_friendly_name() for item in node.input_values()], affinities.get(name))
        for name, node in nodes
    )
    for name, node in nodes:
        node.get_rt_info()["affinity"] = placed[name]
    return placed


TARGET = ExportTarget(NAME, "nodes", "affinities.json", partial(node_units, target=NAME), write)
