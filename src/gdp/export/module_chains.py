"""Modules and layers as chains that pipelines are cut from, in the order in which the forward pass runs. A cut can be
where a module begins that is called once; all ops traced before it belong to the stages before. Backward ops,
parameters and updates go with their forward ops. N ops, P places of the chain."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.export.export_target import check_modules, grouped_ops
from gdp.export.modules import is_forward, is_inside, is_source
from gdp.graph.layers import enclosing
from gdp.placers.base import inherit
from gdp.simulator.problem import Problem


@dataclass(frozen=True, eq=False)
class Layers:
    """The repeated layers of a decoder, such as `model.layers.0` to `model.layers.31`."""

    path: str  # of the list: `model.layers`
    names: tuple[str, ...]  # in the order of execution
    positions: I64  # [N] 0: before the layers; 1 + number of the layer; len(names) + 1: after them


def begins(problem: Problem) -> tuple[I64, list[str]]:
    """Returns (position of each op [N], module that begins at each position [P]) of a chain of modules. It may be cut
    where a module begins that has parameters and is called once. The first position begins with no module ("")."""
    graph = problem.graph
    check_modules(graph, "modules")
    executed = _executed(problem)
    runs: dict[str, list[int]] = defaultdict(list)  # of each module: the places of its ops
    for place, op in enumerate(executed):
        for path in enclosing(graph.modules[op]):
            runs[path].append(place)
    holding = {path for op in np.flatnonzero(is_source(graph)) for path in enclosing(graph.modules[op])}
    computing = {graph.modules[op] for op in executed} - {""}  # a list of modules is not called, these are
    starts: dict[int, str] = {}
    for path in sorted(computing & holding - _called_again(problem), key=lambda path: (path.count("."), path)):
        places = runs[path]
        if len(places) == places[-1] - places[0] + 1 and places[0] > 0:
            starts.setdefault(places[0], path)
    names = ["", *(starts[first] for first in sorted(starts))]
    position = np.searchsorted(sorted(starts), np.arange(len(executed)), side="right")
    return _spread(problem, executed, position), names


def find_layers(problem: Problem) -> Layers:
    """Finds the list of layers with the most work. InputError if there is none, or if its layers are not run one after
    the other. InputError also if another list has a large part of the work or of the ops (an encoder beside a decoder,
    a transformer behind convolutions)."""
    graph = problem.graph
    check_modules(graph, "layers")
    executed = _executed(problem)
    layer_of = [_LAYER.match(graph.modules[op]) for op in executed]
    ops_in: dict[str, list[int]] = defaultdict(list)
    numbers: dict[str, set[int]] = defaultdict(set)
    for op, match in zip(executed, layer_of, strict=True):
        if match:
            ops_in[match[1]].append(op)
            numbers[match[1]].add(int(match[2]))
    work_ns = {path: sum(int(problem.mean_op_time_ns[op]) for op in ops) for path, ops in ops_in.items()}
    lists = [
        path
        for path, layer_numbers in numbers.items()
        if len(layer_numbers) > 1 and layer_numbers == set(range(len(layer_numbers)))
    ]
    if not lists:
        raise InputError(
            f"graph {graph.name!r}: no module path is that of a list of layers, such as model.layers.0; "
            "this target places decoder layers"
        )
    path = max(lists, key=lambda path: work_ns[path])
    for other in lists:
        is_small = work_ns[other] <= _SMALL * work_ns[path] and len(ops_in[other]) <= _SMALL * len(ops_in[path])
        if other != path and not is_small:
            raise InputError(
                f"graph {graph.name!r}: has layers in {path} and in {other}; this target takes models with one list of "
                "layers, not an encoder with a decoder; try torch-pipelining"
            )
    num_layers = len(numbers[path])
    position = np.zeros(len(executed), np.int64)
    latest = last_place = 0
    for place, match in enumerate(layer_of):
        if match and match[1] == path:
            number = int(match[2]) + 1
            if number < latest:
                raise InputError(
                    f"graph {graph.name!r}: {path}.{number - 1} runs again after {path}.{latest - 1}; this target runs "
                    "each layer once, in order"
                )
            latest, last_place = number, place
        position[place] = latest
    position[last_place + 1 :] = num_layers + 1
    names = tuple(f"{path}.{number}" for number in range(num_layers))
    return Layers(path, names, _spread(problem, executed, position))


_SMALL = 0.1  # of the work and of the ops of the layers: another list up to that is no part of the pipeline
_LAYER = re.compile(r"((?:.*?\.)?[^.\d][^.]*)\.(\d+)(?=\.|$)")


def _executed(problem: Problem) -> list[int]:
    """Returns the forward ops that compute, of the first micro-batch and replica, in the order of execution."""
    graph = problem.graph
    computes = (problem.microbatch <= 0) & (graph.replicas == 0) & is_forward(graph) & ~is_source(graph)
    return [op for op in np.flatnonzero(computes).tolist() if graph.kinds[op] != "input"]


def _called_again(problem: Problem) -> set[str]:
    """Returns the modules that are called more than once: a parameter in them goes twice into the same kind of op."""
    graph = problem.graph
    sources, first_forward = is_source(graph), is_forward(graph) & (problem.microbatch <= 0)
    uses = Counter[tuple[int, str, str]]()
    for tensor, consumer in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        if sources[graph.producers[tensor]] and first_forward[consumer]:
            uses[tensor, graph.kinds[consumer], graph.modules[consumer]] += 1
    again: set[str] = set()
    for (tensor, _, module), count in uses.items():
        if count > 1:
            owner = graph.modules[int(graph.producers[tensor])]
            again.update(path for path in enclosing(owner) if is_inside(module, path))
    return again


def _spread(problem: Problem, executed: Sequence[int], position: I64) -> I64:
    """[N] Extends the positions of executed ops to all ops. A replica has the position of the first replica, a source
    that of its first user, and a backward op that of its module if all of it has one. All ops of a group have one
    position; other ops take that of their inputs."""
    graph = problem.graph
    labels = np.full(graph.num_ops, -1, np.int64)
    labels[executed] = position
    labels = np.where((problem.microbatch > 0) | (graph.replicas > 0), labels[graph.first_copy], labels)
    by_module: dict[str, set[int]] = defaultdict(set)
    for op in executed:
        by_module[graph.modules[op]].add(int(labels[op]))
    first_use: dict[int, int] = {}
    forward = is_forward(graph)
    for producer, consumer in zip(graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True):
        if labels[consumer] >= 0 and forward[consumer]:
            first_use[producer] = min(first_use.get(producer, int(labels[consumer])), int(labels[consumer]))
    sources = np.flatnonzero(is_source(graph)).tolist()
    for op in sources:
        labels[op] = first_use.get(op, min(by_module.get(graph.modules[op], {0})))
    for op in range(graph.num_ops):
        if labels[op] < 0 and graph.modules[op] and len(by_module.get(graph.modules[op], ())) == 1:
            labels[op] = min(by_module[graph.modules[op]])
    groups = list(grouped_ops(problem))
    is_labelled_source = is_source(graph) & (labels >= 0)
    for ops in groups:
        labelled = sorted((op for op in ops if labels[op] >= 0), key=lambda op: (not is_labelled_source[op], op))
        labels[ops] = labels[labelled[0]] if labelled else -1
    filled = inherit(problem, labels)
    for ops in groups:
        filled[ops] = filled[ops[0]]
    return filled
