"""Units in which backward ops follow the forward ops that they belong to. Baechi (SoCC 2020, section 3.1) places the
forward ops alone and gives each backward op its forward op's device. Which op that is the graph does not say; module
paths, phases and what flows between ops tell it. N ops."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gdp.arrays import I64, Bool, by_first, narrow
from gdp.compiled import inner, kernel
from gdp.graph.copies import RECOMPUTED
from gdp.simulator.problem import Problem
from gdp.units.units import roots_of


def forward_units(problem: Problem) -> I64:
    """[N] `Graph.group_index` with ungrouped backward ops joined to other units, numbered from 0 in the order of first
    ops.

    A backward op joins the unit (a parameter with its update) that takes all its results, directly or through other
    such ops, unless these results are much smaller than its inputs; else the latest forward op whose result it uses,
    else the latest backward op that it follows, else a parameter that it uses, each time in its module, one inside or
    around it. Units only join if they may go to the same devices. A copy that recomputes a forward op counts as it."""
    graph, arrays = problem.graph, problem.simulator.arrays
    is_copy = graph.is_in_role(RECOMPUTED)
    is_backward = np.array([phase in ("backward", "update") for phase in graph.phases], np.bool_) & ~is_copy
    numbers = {path: number for number, path in enumerate(dict.fromkeys(graph.modules))}
    module = np.fromiter((numbers[path] for path in graph.modules), np.int64, problem.num_ops)
    inner = containers(graph.modules)
    parent = np.array([_enclosing(path, numbers, inner) for path in numbers], np.int64)
    parts = _Parts(is_backward, is_copy, _has_home(problem), problem.graph.group_index, module, parent)
    takers, follows = np.full((2, problem.num_ops), -1)
    _find_leaders(arrays, parts, takers, follows)
    follows[problem.microbatch > 0] = -1  # replicas go where the first one goes, unless they are free
    followers = np.flatnonzero(follows >= 0)
    allowed = narrow(problem.allowed)
    same = (allowed[followers] == allowed[follows[followers]]).all(axis=1)
    follows[followers[~same]] = -1
    unit = problem.graph.group_index[roots_of(follows)]
    _, first_op = np.unique(problem.graph.group_index, return_index=True)
    unit = unit[first_op[problem.graph.group_index]]
    return by_first(unit)


def _has_home(problem: Problem) -> Bool:
    """[N] what is in a group for more than being replicas of one op: a parameter, its update."""
    groups = problem.graph.groups
    if problem.microbatch.max() < 1:
        return groups >= 0
    return (groups >= 0) & np.isin(groups, groups[problem.microbatch < 0])


def containers(modules: Iterable[str], *, outermost: bool = False) -> set[str]:
    """The paths, the root among them, that hold numbered parts of `modules`: what runs directly in one (a sum of
    layers' results) belongs to no layer. `outermost`: only those that are not themselves inside a numbered part."""
    found = {""}
    for module in set(modules):
        parts = module.split(".")
        numbered = [position for position, part in enumerate(parts) if part.isdecimal()]
        if numbered:
            last = numbered[0] if outermost else numbered[-1]
            found.update(".".join(parts[:end]) for end in range(1, last + 1))
    return found


def _enclosing(path: str, numbers: dict[str, int], inner: set[str]) -> int:
    """The number of the nearest module around `path` that has ops and is no container, -1 if none."""
    while path:
        path = path.rpartition(".")[0]
        if path in numbers and path not in inner:
            return numbers[path]
    return -1


class _Parts(NamedTuple):
    """Phases, groups and modules of ops. M modules."""

    is_backward: Bool  # [N]
    is_copy: Bool  # [N] that wait for backward ops, but take no result of theirs
    is_grouped: Bool  # [N]
    unit: I64  # [N]
    module: I64  # [N]
    parent: I64  # [M] the nearest module around each that has ops and is no container, -1: none


@inner
def _is_inside(parent, module, outer):
    while module >= 0:
        if module == outer:
            return True
        module = parent[module]
    return False


@kernel
def _find_leaders(arrays, parts, takers, leaders):
    """Fills `leaders` [N] with the op that each op follows, and `takers` [N] with an op of the one group that takes all
    results of each ungrouped backward op; -1 stays where there is none."""
    is_backward, is_copy, is_grouped, unit, module, parent = parts
    tensor_offsets, consumer_offsets, consumers = arrays[2:5]
    copy_bytes, _, input_offsets, inputs, input_producers = arrays[11][4:9]
    num_ops = len(module)
    for op in range(num_ops - 1, -1, -1):
        if is_grouped[op] or not is_backward[op]:
            continue
        taker, is_split = -1, False
        input_bytes, output_bytes = 0, 0
        for index in range(input_offsets[op], input_offsets[op + 1]):
            input_bytes += copy_bytes[inputs[index]]
        for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
            output_bytes += copy_bytes[tensor]
            for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
                consumer = np.int64(consumers[index])
                if is_copy[consumer]:
                    continue
                other = consumer if is_grouped[consumer] else takers[consumer]
                is_split |= other < 0 or (taker >= 0 and unit[other] != unit[taker])
                taker = other
        if not is_split and 2 * output_bytes >= input_bytes:  # a sum of two gradients counts as one of them
            takers[op] = taker
    for op in range(num_ops):
        if not is_backward[op] or is_grouped[op] or input_offsets[op] == input_offsets[op + 1]:
            continue
        forward, backward, source = -1, -1, -1
        for index in range(input_offsets[op], input_offsets[op + 1]):
            producer = np.int64(input_producers[index])
            here, there = module[op], module[producer]
            if not _is_inside(parent, here, there) and not _is_inside(parent, there, here):
                continue
            if input_offsets[producer] == input_offsets[producer + 1]:
                source = producer
            elif is_backward[producer]:
                backward = max(backward, producer)
            else:
                forward = max(forward, producer)
        if takers[op] >= 0:
            leaders[op] = takers[op]
        elif forward >= 0:
            leaders[op] = forward
        elif backward >= 0:
            leaders[op] = backward
        else:
            leaders[op] = source
