"""The expert of the GDP paper: layers on devices, as its authors laid them out by hand.

It never splits the batch, as many would today.

Recurrent and transformer models: one layer per device in turn, embeddings with the first layer, attention and softmax
with the last; other models: contiguous stages of about equal time (Zhou et al., arXiv 1910.01578, section 4.1). For
models that are not built in, it is the faster of those stages and of equal contiguous ranges of the repeated layers
that module paths show."""

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from gdp.arrays import I64
from gdp.budget import Clock
from gdp.models.papers import PAPERS, Workload
from gdp.placers.base import allowed_work, best_of, inherit
from gdp.placers.contiguous import module_chain, stages
from gdp.placers.memory_repair import fit_memory
from gdp.placers.settings import EXPERT
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units, containers


def expert(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Places layers on all devices, repaired if it does not fit in memory. (`single` uses one device.)"""
    units = Units.of(problem)
    work_ns, num_allowed = allowed_work(problem)
    mean_ns = work_ns / np.maximum(num_allowed, 1)
    mean_ns[num_allowed == 0] = np.inf
    devices = np.flatnonzero(mean_ns <= EXPERT.slowest * mean_ns.min())

    def cuts() -> Iterator[Placement]:
        workload = PAPERS.find(problem.graph.name) if any(problem.graph.modules) else None
        ranges = layer_ranges(problem, len(devices)) if workload is None else _by_rule(problem, workload, len(devices))
        if ranges is not None:
            yield units.place_allowed(devices[ranges[units.first_op]])
        if ranges is None or workload is None:
            chain = module_chain(problem, units, whole_layers=True)
            yield units.place_allowed(stages(problem, units, chain, devices))

    candidates = list(cuts())
    return (
        fit_memory(problem, candidates[0], clock) if len(candidates) == 1 else best_of(problem, candidates, clock=clock)
    )


def _by_rule(problem: Problem, workload: Workload, num_devices: int) -> I64 | None:
    """Returns the device number [N] of each op by its layer; None where the expert cuts contiguous stages."""
    rule = workload.expert
    if rule is None:
        return None
    modules = problem.graph.modules
    layers = {module: rule(module) if module else -1 for module in set(modules)}
    return inherit(problem, [layers[module] for module in modules]) % num_devices


def layer_ranges(problem: Problem, num_devices: int) -> I64 | None:
    """Cuts the layers that module paths show (`layers.0`, ...) into equal contiguous ranges, one a device. Returns the
    number of the range [N] of each op; None without layers. Ops before the first layer go with it, ops of a container
    of layers with their inputs, all others with the layer entered last."""
    modules, time_ns = problem.graph.modules, problem.mean_op_time_ns
    first_op: dict[str, int] = {}
    list_time_ns: dict[str, int] = defaultdict(int)
    layers_of: dict[str, set[str]] = defaultdict(set)
    layer_of: dict[str, tuple[str, str]] = {}  # of a module: its outermost list and layer
    for op, module in enumerate(modules):
        if module not in first_op:
            first_op[module] = op
            if match := re.match(r"(.*?(?:^|\.))(\d+)(?:\.|$)", module):
                layer_of[module] = match[1], match[1] + match[2]
        if module in layer_of:
            path, layer = layer_of[module]
            list_time_ns[path] += int(time_ns[op])
            layers_of[path].add(layer)
    repeated = [path for path in layers_of if len(layers_of[path]) > 1]
    if not repeated:
        return None
    longest = max(repeated, key=lambda path: (list_time_ns[path], len(layers_of[path])))
    paths = {longest} | {x for x in repeated if len(layers_of[x]) >= EXPERT.min_share * len(layers_of[longest])}
    entered: dict[str, int] = {}
    for module, (path, layer) in layer_of.items():
        if path in paths:
            entered[layer] = min(first_op[module], entered.get(layer, problem.num_ops))
    in_order = sorted(entered, key=lambda layer: _natural(layer, entered))
    number = {layer: position for position, layer in enumerate(in_order)}
    starts = np.array([entered[layer] for layer in in_order])
    inner = containers(entered)
    labels: dict[str, int] = {}
    for module, op in first_op.items():
        layer = layer_of.get(module, ("", ""))[1]
        if layer in number:
            labels[module] = number[layer]
        elif module in inner:
            labels[module] = -1
        else:
            labels[module] = max(int(np.searchsorted(np.maximum.accumulate(starts), op, side="right")) - 1, 0)
    layers = inherit(problem, [labels[module] for module in modules])
    return layers * num_devices // len(in_order)


def _natural(layer: str, entered: dict[str, int]) -> tuple[int, int]:
    """Orders lists by their first op, layers of a list by number."""
    path, _, number = layer.rpartition(".")
    return min(op for other, op in entered.items() if other.rpartition(".")[0] == path), int(number)
