"""Contiguous stages of about equal time, one a device, along an order of the units. Cutting a chain for a bottleneck by
binary search, each device taking as much as fits in turn: A. Pinar, C. Aykanat, "Fast optimal load balancing algorithms
for 1D partitioning", Journal of Parallel and Distributed Computing 64 (2004), for devices of unequal speed in a given
order. U units, D devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, scattered
from gdp.budget import Clock
from gdp.placers.base import TriedPlacements, columns_of, device_subsets, inherit, unit_choices
from gdp.placers.settings import CONTIGUOUS, STAGES
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units, containers


def contiguous(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Returns the best stages over 1 to D devices along several chains: topological, folded, by module and by layer.
    Each backward op is a unit by itself, or follows its forward op."""
    chains: list[tuple[Units, Chain]] = []
    subsets = device_subsets(problem, smallest=1)
    tried = TriedPlacements(problem, clock)

    def on_all() -> Iterator[Placement]:
        for units, chain in each_chain(problem):
            chains.append((units, chain))
            yield units.place_allowed(stages(problem, units, chain, subsets[0]))

    def balanced(share: float, subsets: Sequence[I64]) -> Iterator[Placement]:
        for units, chain in chains:
            for devices in subsets:
                yield units.place_allowed(stages(problem, units, chain, devices, share))

    times = [time_ns for _, time_ns in tried.run(on_all())]
    if problem.num_ops * len(times) * len(subsets) > CONTIGUOUS.work:
        chains = [chains[number] for number in np.sort(np.argsort(times, kind="stable")[: CONTIGUOUS.num_chains])]
    tried.run(balanced(0.0, subsets[1:]))
    if not tried.fits:
        for share in CONTIGUOUS.memory_shares:
            tried.run(balanced(share, subsets))
    return tried.best()


def each_chain(problem: Problem) -> "Iterator[tuple[Units, Chain]]":
    """Yields chains of units: topological, folded, by module and by layer."""
    for units in unit_choices(problem):
        yield units, topological_chain(problem, units)
        yield units, folded_chain(problem, units)
        yield units, module_chain(problem, units, whole_layers=False)
        yield units, module_chain(problem, units, whole_layers=True)


@dataclass(frozen=True, eq=False)
class Chain:
    """An order of units, and blocks of units to keep together."""

    order: I64  # [U]
    block: I64 | None = None  # [U] non-decreasing along `order`; units of a block stay together


def stages(problem: Problem, units: Units, chain: Chain, devices: I64, memory_share: float = 0.0) -> I64:
    """Cuts `chain` into one stage for each of `devices`, so that the largest load is least; returns devices [U]. A
    unit's load on a device is its share of all time there, or with `memory_share` a mix with its share of the memory.
    The chain may be of some of the units; others go to the first device."""
    order = chain.order
    total_ns = max(int(units.mean_time_ns[order].sum()), 1)
    columns, column_of = columns_of(problem, devices) if memory_share == 0 else (devices, np.arange(len(devices)))
    load = units.time_ns[np.ix_(order, columns)] / total_ns
    if memory_share > 0:
        held = (units.resident_bytes + units.tensor_bytes)[order].astype(np.float64)
        limits = np.maximum(problem.memory_limit_bytes[devices], 1).astype(np.float64)
        held_share = held[:, None] / max(held.sum(), 1.0) * (limits.mean() / limits)
        load = (1 - memory_share) * load + memory_share * held_share
    sums = np.concatenate((np.zeros((1, len(columns))), np.cumsum(load, axis=0)))
    cuts = np.arange(len(order) + 1)  # where a stage may end
    if chain.block is not None:
        blocks = chain.block[order]
        cuts = np.concatenate(([0], np.flatnonzero(blocks[1:] != blocks[:-1]) + 1, [len(order)]))
    sums = np.ascontiguousarray(sums[cuts].T)
    low, high = 0.0, float(sums[:, -1].max())
    ends = _cut(sums, column_of, high)
    for _ in range(STAGES.num_halvings):
        middle = (low + high) / 2
        found = _cut(sums, column_of, middle)
        if found[-1] == len(cuts) - 1:
            high, ends = middle, found
        else:
            low = middle
    chosen = devices[np.searchsorted(cuts[ends], np.arange(len(order)), side="right")]
    return scattered(order, chosen, units.num_units, int(devices[0]))


def _cut(sums: npt.NDArray[np.float64], column_of: I64, bottleneck: float) -> I64:
    """Returns [stages] the column of `sums` [C, cuts] after which each stage ends if it takes all that fits."""
    ends = np.empty(len(column_of), np.int64)
    start = 0
    for stage, column in enumerate(column_of.tolist()):
        most = sums[column, start] + bottleneck * (1 + 1e-12)
        start = max(start, int(np.searchsorted(sums[column], most, side="right")) - 1)
        ends[stage] = start
    return ends


def module_chain(problem: Problem, units: Units, *, whole_layers: bool) -> Chain:
    """Orders units by the op at which the forward pass enters their module. Backward ops join the forward ops of their
    layer, and ops of a container its inputs. With `whole_layers` each layer (`layers.3`, or a part without numbers) is
    a block. The folded chain if the graph has no module paths."""
    modules = problem.graph.modules
    if not any(modules):
        return folded_chain(problem, units)
    entered = _entries(problem)
    if whole_layers:
        outer = containers(modules, outermost=True)
        layer_of = {module: _layer(module, outer) for module in entered}
        first: dict[str, int] = {}
        for module, layer in layer_of.items():
            first[layer] = min(entered[module], first.get(layer, problem.num_ops))
        entered = {module: first[layer] for module, layer in layer_of.items()}
    position = inherit(problem, [entered.get(module, -1) for module in modules])[units.first_op]
    order = np.lexsort((_fold_ns(problem)[units.first_op], position))
    return Chain(order, position if whole_layers else None)


def _layer(module: str, outer: set[str]) -> str:
    """Returns the shortest path that leads to `module` and is not in `outer`."""
    parts = module.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((path for path in paths if path not in outer), module)


def _entries(problem: Problem) -> dict[str, int]:
    """Returns the op at which the forward pass enters each module; containers have none. It is the first op there, else
    the first that uses a parameter of the module, else that of the enclosing module."""
    graph, memory = problem.graph, problem.simulator.arrays.memory
    inner = containers(graph.modules)
    is_forward = np.array([phase in ("forward", "") for phase in graph.phases], np.bool_)
    num_inputs = np.diff(memory.input_offsets.astype(np.int64))
    entered: dict[str, int] = {}
    for op in np.flatnonzero(is_forward & (num_inputs > 0)).tolist():
        entered.setdefault(graph.modules[op], op)
    users = np.repeat(np.arange(problem.num_ops), num_inputs)
    is_use = is_forward[users] & (num_inputs[memory.input_producers] == 0)
    used: dict[str, int] = {}
    for source, user in zip(memory.input_producers[is_use].tolist(), users[is_use].tolist(), strict=True):
        used.setdefault(graph.modules[source], user)
    for module in dict.fromkeys(graph.modules):
        found = module
        while found and found not in entered and found not in used:
            found = found.rpartition(".")[0]
        if module not in entered and found:
            entered[module] = entered[found] if found in entered else used[found]
    return {module: op for module, op in entered.items() if module not in inner}


def topological_chain(problem: Problem, units: Units) -> Chain:
    """Orders units as in the step; a parameter comes where it is first used."""
    position = np.where(problem.simulator.arrays.num_inputs > 0, np.arange(problem.num_ops), -1)
    return Chain(np.argsort(inherit(problem, position)[units.first_op], kind="stable"))


def folded_chain(problem: Problem, units: Units) -> Chain:
    """Orders units by the distance in time from the nearer end of the step: forward ops pair with backward ops."""
    return Chain(np.argsort(_fold_ns(problem)[units.first_op], kind="stable"))


def _fold_ns(problem: Problem) -> I64:
    head_ns = longest_paths(problem.graph, problem.mean_op_time_ns, from_sources=True)
    distance = np.minimum(head_ns, problem.b_level_ns)
    # a source has no place of its own: it joins its earliest consumer
    distance[np.diff(problem.simulator.arrays.memory.input_offsets.astype(np.int64)) == 0] = -1
    return inherit(problem, distance)
