"""Nodes of ONNX files as units: each node by itself, a weight or an input with the first node that reads it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from gdp.errors import InputError
from gdp.export.checks import check_inference, check_nodes, check_one_batch
from gdp.export.target import accelerator_numbers, wrong_content
from gdp.export.units import Units
from gdp.graph import I64
from gdp.placers.base import inherit
from gdp.problem import Problem

_HELD = ("parameter", "buffer", "constant", "input")


def node_units(problem: Problem, target: str) -> Units:
    """A unit for each node, named after it. InputError for a graph that is no ONNX file's, a training step, and
    micro-batches."""
    graph = problem.graph
    check_nodes(graph, target)
    check_inference(problem, target)
    check_one_batch(problem, target, pipelines=False)
    is_node = np.array([kind not in _HELD for kind in graph.kinds], np.bool_)
    if not is_node.any() or not any(graph.kinds):
        raise InputError(f"{target}: graph {graph.name!r} has no nodes of an ONNX file; place the file itself")
    labels = inherit(problem, np.where(is_node, np.arange(graph.num_ops), -1))
    used, index = np.unique(labels, return_inverse=True)
    return Units.build(problem, index, [graph.op_names[op] for op in used.tolist()])


def write_nodes(problem: Problem, units: Units, devices: I64, name_of: Callable[[int], str]) -> dict[str, str]:
    """By node, what `name_of` says of the GPU's number (-1: the CPU) that it is on."""
    numbers = accelerator_numbers(problem)
    return {
        name: name_of(numbers[device])
        for members, device in zip(units.members, devices.tolist(), strict=True)
        for name in members
    }


def parse_nodes(placed: Mapping[str, str], problem: Problem, units: Units, number_of: Callable[[str], int]) -> I64:
    """[U] the inverse."""
    numbers = accelerator_numbers(problem)
    try:
        return np.array([numbers.index(number_of(placed[members[0]])) for members in units.members], np.int64)
    except (KeyError, ValueError) as error:
        raise wrong_content("nodes", f"{error} is no node or device of this plan") from None


def read_json(text: str, target: str) -> dict[str, object]:
    """The object in `text`."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise wrong_content(target, "it is no JSON object")
    return content


def fill(nodes: Iterable[tuple[str, Sequence[str], str | None]]) -> dict[str, str]:
    """A device for every node of (name, names of the nodes that it reads, device or None), in the order of execution: a
    node without one goes with the first of its inputs, or else with the first node that reads it."""
    rows = list(nodes)
    found = {name: device for name, _, device in rows if device is not None}
    if not found:
        raise InputError("no node of the model has a name of the plan; is it the model that was placed?")
    for name, inputs, _ in rows:
        if name not in found:
            known = next((found[one] for one in inputs if one in found), None)
            if known is not None:
                found[name] = known
    for name, inputs, _ in reversed(rows):
        if name in found:
            for one in inputs:
                found.setdefault(one, found[name])
    fallback = next(iter(found.values()))
    return {name: found.get(name, fallback) for name, _, _ in rows}
