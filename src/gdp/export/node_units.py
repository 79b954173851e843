"""Nodes of ONNX files as units: each node by itself, a weight or an input with the first node that reads it."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.export.export_target import (
    ExportUnits,
    check_inference,
    check_nodes,
    check_one_batch,
    check_one_host,
    gpu_numbers,
)
from gdp.export.modules import STATE_KINDS
from gdp.placers.base import inherit
from gdp.simulator.problem import Problem


def node_units(problem: Problem, target: str) -> ExportUnits:
    """Makes a unit of each node. InputError for a graph of no ONNX file, a training step, and micro-batches."""
    graph = problem.graph
    check_nodes(graph, target)
    check_inference(problem, target)
    check_one_batch(problem, target, pipelines=False)
    check_one_host(problem, target)
    is_node = ~graph.is_of_kind(*STATE_KINDS, "input")
    if not is_node.any() or not any(graph.kinds):
        raise InputError(f"{target}: graph {graph.name!r} has no nodes of an ONNX file; place the file itself")
    labels = inherit(problem, np.where(is_node, np.arange(graph.num_ops), -1))
    used, index = np.unique(labels, return_inverse=True)
    return ExportUnits.build(problem, index, [graph.op_names[op] for op in used.tolist()])


def device_names(problem: Problem, units: ExportUnits, devices: I64, name_of: Callable[[int], str]) -> dict[str, str]:
    """Returns the name of each node's device, which `name_of` makes from the number of a GPU (-1: the CPU)."""
    numbers = gpu_numbers(problem)
    return {
        name: name_of(numbers[device])
        for members, device in zip(units.members, devices.tolist(), strict=True)
        for name in members
    }


def complete(nodes: Iterable[tuple[str, Sequence[str], str | None]]) -> dict[str, str]:
    """Returns a device for every node of (name, names of its inputs, device or None), in the order of execution. A node
    without a device goes with the first of its inputs, or else with the first node that reads it."""
    rows = list(nodes)
    devices = {name: device for name, _, device in rows if device is not None}
    if not devices:
        raise InputError("no node of the model has a name of the plan; is it the model that was placed?")
    for name, inputs, _ in rows:
        placed_inputs = [item for item in inputs if item in devices]
        if placed_inputs:
            devices.setdefault(name, devices[placed_inputs[0]])
    for name, inputs, _ in reversed(rows):
        if name in devices:
            for item in inputs:
                devices.setdefault(item, devices[name])
    fallback = next(iter(devices.values()))
    return {name: devices.get(name, fallback) for name, _, _ in rows}
