"""Modules and layers as chains: what pipelines are cut from, in the order in which the forward pass runs.

A cut can be where a module begins that is called once: what is traced before it belongs to the stages before. Backward
ops, parameters and updates go with the forward ops that they belong to. N ops, P places of the chain.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdp.errors import InputError
from gdp.export.checks import check_modules
from gdp.export.modules import enclosing
from gdp.graph import I64, Bool
from gdp.placers.base import inherit
from gdp.problem import Problem


@dataclass(frozen=True, eq=False)
class Layers:
    """The repeated layers of a decoder, such as `model.layers.0` to `model.layers.31`."""

    path: str  # of the list: `model.layers`
    names: tuple[str, ...]  # in the order of execution
    positions: I64  # [N] 0: before the layers; 1 + number of the layer; len(names) + 1: after them


def begins(problem: Problem) -> tuple[I64, list[str]]:
    """(position of each op [N], module that begins at each position [P]) of a chain that may be cut where any module
    with parameters that is called once begins. The first position begins with no module ("")."""
    graph = problem.graph
    check_modules(graph, "modules")
    executed = _executed(problem)
    runs: dict[str, list[int]] = {}  # of each module: first, last, number of ops
    for place, op in enumerate(executed):
        for path in enclosing(graph.modules[op]):
            run = runs.setdefault(path, [place, place, 0])
            run[1], run[2] = place, run[2] + 1
    held = {path for op in _sources(problem) for path in enclosing(graph.modules[op])}
    repeated = _called_again(problem)
    computing = {graph.modules[op] for op in executed} - {""}  # a list of modules is not called, these are
    starts: dict[int, str] = {}
    for path in sorted(computing, key=lambda path: (path.count("."), path)):
        first, last, count = runs[path]
        if path in held and path not in repeated and count == last - first + 1 and first > 0:
            starts.setdefault(first, path)
    names = ["", *(starts[first] for first in sorted(starts))]
    position = np.searchsorted(sorted(starts), np.arange(len(executed)), side="right")
    return _spread(problem, executed, position), names


def find_layers(problem: Problem) -> Layers:
    """The list of layers with the most work. InputError if there is none, if another one has a large part of the work
    or of the ops too (an encoder beside a decoder, a transformer behind convolutions), or if they are not run one after
    the other."""
    graph = problem.graph
    check_modules(graph, "layers")
    work_ns: dict[str, int] = defaultdict(int)
    num_ops: dict[str, int] = defaultdict(int)
    numbers: dict[str, set[int]] = defaultdict(set)
    executed = _executed(problem)
    for op in executed:
        if match := _LAYER.match(graph.modules[op]):
            work_ns[match[1]] += int(problem.mean_op_time_ns[op])
            num_ops[match[1]] += 1
            numbers[match[1]].add(int(match[2]))
    lists = [path for path, found in numbers.items() if len(found) > 1 and found == set(range(len(found)))]
    if not lists:
        raise InputError(
            f"graph {graph.name!r}: no module path is that of a list of layers, such as model.layers.0; "
            "this target places decoder layers"
        )
    path = max(lists, key=lambda path: work_ns[path])
    for other in lists:
        is_small = work_ns[other] <= _SMALL * work_ns[path] and num_ops[other] <= _SMALL * num_ops[path]
        if other != path and not is_small:
            raise InputError(
                f"graph {graph.name!r}: has layers in {path} and in {other}; this target takes models with one list of "
                "layers, not an encoder with a decoder; try torch-pipelining"
            )
    names = tuple(f"{path}.{number}" for number in range(len(numbers[path])))
    place = np.zeros(len(executed), np.int64)
    latest = 0
    for at, op in enumerate(executed):
        match = _LAYER.match(graph.modules[op])
        if match and match[1] == path:
            number = int(match[2]) + 1
            if number < latest:
                raise InputError(
                    f"graph {graph.name!r}: {path}.{number - 1} runs again after {path}.{latest - 1}; this target runs "
                    "each layer once, in order"
                )
            latest = number
        place[at] = latest
    in_list = np.array([(m := _LAYER.match(graph.modules[op])) is not None and m[1] == path for op in executed])
    after_last = np.arange(len(executed)) > np.flatnonzero(in_list)[-1]
    place[after_last] = len(names) + 1
    return Layers(path, names, _spread(problem, executed, place))


_SMALL = 0.1  # of the work and of the ops of the layers: those of a list beside them which is no part of the pipeline
_LAYER = re.compile(r"((?:.*?\.)?[^.\d][^.]*)\.(\d+)(?=\.|$)")


def _executed(problem: Problem) -> list[int]:
    """The forward ops of the first micro-batch that compute, in the order of execution."""
    graph = problem.graph
    sources = set(_sources(problem))
    return [
        op
        for op in np.flatnonzero(problem.microbatch <= 0).tolist()
        if graph.phases[op] in ("forward", "") and op not in sources and graph.kinds[op] != "input"
    ]


def _sources(problem: Problem) -> list[int]:
    """Parameters and buffers."""
    graph = problem.graph
    has_inputs: Bool = np.zeros(graph.num_ops, np.bool_)
    has_inputs[graph.consumers] = True
    return [
        op
        for op in np.flatnonzero(~has_inputs).tolist()
        if graph.kinds[op] in ("parameter", "buffer", "constant") or graph.resident_bytes[op] > 0
    ]


def _called_again(problem: Problem) -> set[str]:
    """Modules that are called more than once: a parameter in them goes twice into the same kind of op."""
    graph = problem.graph
    sources = set(_sources(problem))
    uses = Counter[tuple[int, str, str]]()
    for tensor, consumer in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        producer = int(graph.producers[tensor])
        if producer in sources and graph.phases[consumer] in ("forward", "") and problem.microbatch[consumer] <= 0:
            uses[tensor, graph.kinds[consumer], graph.modules[consumer]] += 1
    again: set[str] = set()
    for (tensor, _, module), count in uses.items():
        if count > 1:
            owner = graph.modules[int(graph.producers[tensor])]
            again.update(path for path in enclosing(owner) if module == path or module.startswith(f"{path}."))
    return again


def _spread(problem: Problem, executed: Sequence[int], position: I64) -> I64:
    """[N] the positions of all ops from those of executed ones: replicas as the first, sources with their first user,
    backward ops with their module where it has one position, groups as one, others with their inputs."""
    graph = problem.graph
    labels = np.full(graph.num_ops, -1, np.int64)
    labels[executed] = position
    by_name = {graph.op_names[op]: int(labels[op]) for op in executed}
    for op in np.flatnonzero(problem.microbatch > 0).tolist():
        labels[op] = by_name.get(graph.op_names[op].rpartition("@")[0], -1)
    by_module: dict[str, set[int]] = defaultdict(set)
    for op in executed:
        by_module[graph.modules[op]].add(int(labels[op]))
    first_use: dict[int, int] = {}
    for tensor, consumer in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        if labels[consumer] >= 0 and graph.phases[consumer] in ("forward", ""):
            producer = int(graph.producers[tensor])
            first_use[producer] = min(first_use.get(producer, int(labels[consumer])), int(labels[consumer]))
    sources = _sources(problem)
    for op in sources:
        labels[op] = first_use.get(op, min(by_module.get(graph.modules[op], {0})))
    for op in range(graph.num_ops):
        if labels[op] < 0 and len(by_module.get(graph.modules[op], ())) == 1:
            labels[op] = min(by_module[graph.modules[op]])
    leader: dict[int, int] = {}
    for op in (*sources, *range(graph.num_ops)):
        if graph.groups[op] >= 0 and labels[op] >= 0:
            leader.setdefault(int(graph.groups[op]), int(labels[op]))
    for op in np.flatnonzero(graph.groups >= 0).tolist():
        labels[op] = leader.get(int(graph.groups[op]), -1)
    filled = inherit(problem, labels)
    for op in np.flatnonzero(graph.groups >= 0).tolist():
        filled[op] = leader.setdefault(int(graph.groups[op]), int(filled[op]))
    return filled
