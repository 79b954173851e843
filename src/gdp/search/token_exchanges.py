"""Estimates of steps whose tokens are cut (`context`): activations go among fewer ranks each, but gradients are of more
weights, and keys and values go, too. All of it is known in bytes of a local program without."""

from collections import Counter
from collections.abc import Iterable

from gdp.cluster.cluster import Cluster
from gdp.costs.attention import ATTENTION
from gdp.costs.collectives import ALL_GATHER, ALL_REDUCE, COLLECTIVE, AlikeCards
from gdp.costs.table import class_of
from gdp.graph import Graph
from gdp.graph.accumulation import ELEMENT_BYTES
from gdp.graph.parameter_bytes import gradients_of_updates
from gdp.graph.shapes import parsed_calls
from gdp.models.shards import Shards


def time_with_tokens_cut_ns(
    graph: Graph, step_time_ns: int, base: Shards, shards: Shards, cluster: Cluster, num_samples: int
) -> float:
    """Returns about what a step of `shards` takes on the groups of `cluster`, where the local program `graph` of `base`
    takes `step_time_ns`: the same but for exchanges if `base` has as many ranks, else a part."""
    group = next(device for device in cluster.devices if device.group)
    num_groups = sum(bool(device.group) for device in cluster.devices) * shards.num_ranks // base.tensor
    num_used, scale = min(num_samples, num_groups), base.tensor / shards.tensor
    gradients = graph.tensor_bytes[gradients_of_updates(graph)].tolist()
    sums = [(ALL_REDUCE, int(each * scale)) for each in gradients]
    keys = [(ALL_GATHER, int(each * scale)) for each in _key_bytes(graph)] * 3  # and again, and their gradients
    among = AlikeCards.of_group(group, shards.context)
    added_ns = _total_ns(among, sums) + _total_ns(among, keys) / num_used
    if base.num_ranks < shards.num_ranks:  # on more cards, where ops have no more parts
        return step_time_ns / min(shards.context, num_groups / num_used) + added_ns
    calls = [
        (kind.removeprefix(f"{COLLECTIVE}."), num_bytes)
        for kind, num_bytes in zip(graph.kinds, graph.bytes_accessed.tolist(), strict=True)
        if class_of(kind) == COLLECTIVE
    ]
    spared_ns = _total_ns(AlikeCards.of_group(group), calls)
    if shards.tensor > 1:
        fewer = AlikeCards.of_group(group, shards.tensor)
        spared_ns -= _total_ns(fewer, [(kind, num_bytes // shards.context) for kind, num_bytes in calls])
    return step_time_ns - spared_ns / num_used + added_ns


def _key_bytes(graph: Graph) -> list[int]:
    """Returns the bytes of keys, and those of values, of each attention of a forward pass."""
    return [
        ELEMENT_BYTES.get(array.dtype, 4) * array.num_elements
        for kind, phase, shapes in zip(graph.kinds, graph.phases, graph.shapes, strict=True)
        if kind in ATTENTION and phase == "forward" and shapes
        for array in parsed_calls(shapes)[0].arrays[1:3]
    ]


def _total_ns(cards: AlikeCards, exchanges: Iterable[tuple[str, int]]) -> int:
    return sum(count * cards.time_ns(*each) for each, count in Counter(exchanges).items())
