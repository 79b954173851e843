"""Script: the work of one device in a step, op by op; made once from a program, a placement and an order.

    await what other devices send -> run the op -> send what others need of it -> drop what nobody here needs any more

docs/machine-model.md, sections 3 and 4, says what is sent where and when it is freed. Tensors without bytes are control
dependencies; they are sent and awaited like all others, without content."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise, permutations

import numpy as np
import numpy.typing as npt

from gdp.errors import InputError
from gdp.models.pytorch import Program


@dataclass(frozen=True, slots=True)
class Task:
    """One op on its device. Tensors are numbers of the graph's."""

    op: int
    awaited: tuple[int, ...]  # consumed first here, produced elsewhere
    sends: tuple[tuple[int, int], ...]  # (device, tensor), in the order of the machine model
    drops: tuple[int, ...]  # held no longer than this


Script = tuple[Task, ...]

Traffic = Mapping[tuple[int, int], Sequence[int]]
"""The tensors of a step from one device to another, in order, by (source, destination)."""


def scripts(
    program: Program, order: Sequence[npt.ArrayLike], retained: Collection[int] = frozenset()
) -> tuple[Script, ...]:
    """[D] the script of each device, whose ops `order` lists; kept and `retained` tensors stay on their producers'. A
    retained tensor with a keeper stays on that op's device instead. InputError for an order that deadlocks."""
    graph = program.graph
    device_of, position = {}, {}
    lists: list[list[int]] = [np.asarray(ops, np.int64).tolist() for ops in order]
    for device, ops in enumerate(lists):
        for place, op in enumerate(ops):
            device_of[op], position[op] = device, place
    _check_order(program, lists)
    awaited: dict[int, list[int]] = defaultdict(list)
    sends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    drops: dict[int, list[int]] = defaultdict(list)
    for tensor, producer in enumerate(graph.producers.tolist()):
        home = device_of[producer]
        complete = program.completed_by.get(tensor, producer)
        holder = device_of[program.keepers.get(tensor, producer)] if tensor in retained else -1
        consumers: dict[int, list[int]] = defaultdict(list)
        for op in graph.consumers_of(tensor).tolist():
            consumers[device_of[op]].append(op)
        for device, ops in consumers.items():
            ops.sort(key=position.__getitem__)
            if device != home:
                sends[complete].append((device, tensor))
                awaited[ops[0]].append(tensor)
                if device != holder:
                    drops[ops[-1]].append(tensor)
        if not graph.is_kept[tensor] and home != holder:
            drops[consumers[home][-1] if home in consumers else complete].append(tensor)
    return tuple(
        tuple(Task(op, tuple(awaited[op]), tuple(sorted(sends[op])), tuple(drops[op])) for op in ops) for ops in lists
    )


def _check_order(program: Program, lists: Sequence[Sequence[int]]) -> None:
    """InputError if ops would wait for each other for ever."""
    graph, waits = program.graph, TopologicalSorter[int]()
    for before, op in chain.from_iterable(map(pairwise, lists)):
        waits.add(op, before)
    for producer, consumer in zip(graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True):
        waits.add(consumer, producer)
    try:
        waits.prepare()
    except CycleError as error:
        stuck = graph.op_names[error.args[1][0]]
        raise InputError(
            f"order: deadlock, op {stuck!r} waits for one that comes after it; place the graph anew"
        ) from None


def traffic_of(all_scripts: Sequence[Script]) -> Traffic:
    """Returns the traffic of a step of these scripts [D]."""
    traffic: dict[tuple[int, int], list[int]] = {pair: [] for pair in permutations(range(len(all_scripts)), 2)}
    for source, script in enumerate(all_scripts):
        for task in script:
            for device, tensor in task.sends:
                traffic[source, device].append(tensor)
    return traffic
