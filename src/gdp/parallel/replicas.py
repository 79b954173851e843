"""Replicas: a step on several parts of the batch, with a copy of all parameters each and exchanges between.

    forward, backward    -- gradients --.                   .--> updates
    forward#1, backward#1 -- gradients -+--> rings of buckets +--> updates#1

The replica d of op `x` is called `x#d`, the first one `x`. N ops of a replica, R replicas.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.copy_names import CopyNames
from gdp.graph.microbatches import shared_ops
from gdp.parallel.buckets import bucket_bytes_over, buckets_of, gradients_of
from gdp.parallel.columns import Columns
from gdp.parallel.rings import DONE, READY, Collective, Rings, add_exchange, suffix
from gdp.parallel.sums import Sums


def replicated(
    replicas: Sequence[Graph],
    *,
    zero: int = 0,
    places: I64 | None = None,
    rings: Rings | None = None,
    bucket_bytes: int | None = None,
) -> Graph:
    """Returns the step of all `replicas`: graphs of one model whose numbers of micro-batches may differ.

    With `zero` 1 or 2 optimizer state and updates are cut over replicas. `places` [N] of the first replica are equal
    for ops that are sure to share a device, by default for all of them: a bucket does not cross them, and the
    parameters of a bucket are one group. InputError where the graphs have no gradients, or not the same ones.
    """
    if len(replicas) == 1:
        return replicas[0]
    first = replicas[0]
    gradients = gradients_of(first, shared_ops(first)[1])
    if not gradients:
        raise InputError(f"graph {first.name!r}: has no gradients to sum over replicas; capture a training step")
    of_first = [0] * first.num_ops if places is None else places.tolist()
    rings = rings or Rings.of(len(replicas))
    if bucket_bytes is None:
        num_bytes = sum(gradient.num_bytes for gradient in gradients.values())
        bucket_bytes = bucket_bytes_over(len(replicas), num_bytes, rings.num_hops)
    buckets = buckets_of(gradients, of_first, bucket_bytes)
    sums = Sums(buckets, len(replicas), zero)
    inserted = {id(graph): sums.insert(graph) for graph in {id(graph): graph for graph in replicas}.values()}
    collectives = inserted[id(first)][1]
    return joined([inserted[id(graph)][0] for graph in replicas], collectives, rings)


def joined(
    replicas: Sequence[Graph],
    collectives: Sequence[Collective],
    rings: Rings,
    releases: Sequence[tuple[str, str]] = (),
) -> Graph:
    """Returns the step of `replicas`, each with the first and last ops of `collectives`, and the hops between.

    All replicas have the same exchanges in the same order; those of micro-batch m end in `@m`. `releases` are names
    of ops and of ops which wait for them; a `{}` in them stands for the ends of names of a replica.
    """
    by_label = {collective.label: collective for collective in collectives}
    columns, numbers = Columns(), []
    next_group = 0
    groups, positions, instances = [], [], []
    exchanges = {id(graph): _instances(graph, by_label) for graph in {id(graph): graph for graph in replicas}.values()}
    for replica, graph in enumerate(replicas):
        own_groups = np.where(graph.groups >= 0, graph.groups + next_group, -1)
        next_group = int(own_groups.max()) + 1
        everything = np.arange(graph.num_ops)
        end = suffix(replica)
        names = graph.op_names if not replica else [name + end for name in graph.op_names]
        numbers.append(columns.copy_ops(graph, everything, names, own_groups))
        columns.copy_tensors(graph, numbers[replica])
        own = exchanges[id(graph)]
        ends = np.array([done for _, done in own.values()], np.int64)
        positions.append(2 * np.searchsorted(ends, everything, side="right"))
        groups.append(own_groups)
        instances.append(own)
        if list(own) != list(instances[0]):
            raise InputError(f"graph {graph.name!r}: its replicas differ in what they exchange, or in its order")
    for place, (label, microbatch) in enumerate(instances[0]):
        first, last = np.array([own[label, microbatch] for own in instances], np.int64).T
        before = columns.num_ops
        end_groups = np.array([own[op] for own, op in zip(groups, first.tolist(), strict=True)])
        ready, done = (
            np.array([number[op] for number, op in zip(numbers, ops.tolist(), strict=True)]) for ops in (first, last)
        )
        add_exchange(columns, by_label[label], microbatch, (ready, done), end_groups, rings)
        positions.append(np.full(columns.num_ops - before, 2 * place + 1))
    for replica, graph in enumerate(replicas):
        pairs = [[graph.op_numbers[name] for name in names] for names in releases]
        sources, targets = numbers[replica][np.array(pairs, np.int64).reshape(-1, 2)].T
        columns.control(sources, targets)
    whole = columns.build(replicas[0].name, np.concatenate(positions))
    if not any(graph.copy_names.replica.any() for graph in replicas):
        whole.__dict__["copy_names"] = _copy_names(replicas, whole, np.concatenate(positions))
    return whole


def _copy_names(replicas: Sequence[Graph], whole: Graph, position: I64) -> CopyNames:
    """Returns the parts of the names of `whole`, whose ops of replicas, then those of exchanges, are at `position` [M].

    To split a million names takes more than a second, and those of one replica are known.
    """
    order = np.argsort(position, kind="stable")
    num_own = sum(graph.num_ops for graph in replicas)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    others = CopyNames.of([whole.op_names[op] for op in place[num_own:].tolist()])
    numbers: dict[str, int] = {}
    parts = []
    for replica, names in enumerate([*(graph.copy_names for graph in replicas), others]):
        number = np.array([numbers.setdefault(base, len(numbers)) for base in names.bases], np.int64)
        own = names.replica if names is others else np.full(len(names.base), replica)
        parts.append((number[names.base], names.microbatch, own))
    base, microbatch, replica_of_op = (np.concatenate(column)[order] for column in zip(*parts, strict=True))
    for column in (base, microbatch, replica_of_op):
        column.setflags(write=False)
    return CopyNames(tuple(numbers), base, microbatch, replica_of_op)


def _instances(graph: Graph, by_label: Mapping[str, Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns the first and last op of each exchange and micro-batch ("" or `@m`), in the order of last ops."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    done_kinds = {f"{collective.exchange}.{DONE}" for collective in by_label.values()}
    for op, (name, kind) in enumerate(zip(graph.op_names, graph.kinds, strict=True)):
        if kind in done_kinds:
            stem, _, microbatch = name.partition("@")
            label = stem.removesuffix(f".{DONE}")
            end = f"@{microbatch}" if microbatch else ""
            found[label, end] = graph.op_numbers[f"{label}.{READY}{end}"], op
    return found
