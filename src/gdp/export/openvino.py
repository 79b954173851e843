"""`openvino`: affinities for OpenVINO's HETERO plugin, JSON from the names of nodes to devices such as `GPU.0`.

apply_affinities(model, json.load(open("affinities.json")))
compiled = core.compile_model(model, "HETERO:GPU.0,CPU")
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
    from openvino import Model

NAME = "openvino"


def read_units(problem: Problem) -> Units:
    """Nodes."""
    return node_units(problem, NAME)


def write(problem: Problem, units: Units, devices: I64) -> str:
    """The device of each node."""
    nodes = write_nodes(problem, units, devices, lambda gpu: "CPU" if gpu < 0 else f"GPU.{gpu}")
    return json.dumps(nodes, indent=1) + "\n"


def parse(text: str, problem: Problem, units: Units) -> I64:
    """[U] from such a file."""
    placed: Any = read_json(text, NAME)
    return parse_nodes(placed, problem, units, lambda name: -1 if name == "CPU" else int(name.removeprefix("GPU.")))


def apply_affinities(model: "Model", affinities: Mapping[str, str]) -> dict[str, str]:
    """Give every node of `model` an affinity, HETERO asks for all, and return them by friendly name.

    A node that the plan does not name (weights, results, what OpenVINO's reader added or renamed) goes with its inputs.
    InputError if no node has a name of the plan.
    """
    nodes = model.get_ordered_ops()
    placed = fill(
        (
            node.get_friendly_name(),
            [item.get_node().get_friendly_name() for item in node.input_values()],
            affinities.get(node.get_friendly_name()),
        )
        for node in nodes
    )
    for node in nodes:
        node.get_rt_info()["affinity"] = placed[node.get_friendly_name()]
    return placed


TARGET = Target(NAME, "nodes", "affinities.json", read_units, write, parse)
