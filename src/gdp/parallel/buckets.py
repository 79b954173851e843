"""Buckets: gradients of a replica, joined in the order in which backward makes them, as PyTorch's DDP does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import Bool
from gdp.graph import Graph

BUCKET_BYTES = 25 * 2**20  # `bucket_cap_mb` of torch.nn.parallel.DistributedDataParallel
FIRST_BUCKET_BYTES = 2**20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: its sum begins soon


MANY_REPLICAS = 64  # of more, buckets are larger: each takes hops in proportion to replicas times hosts
_MOST_HOPS = 250_000  # of all buckets then


def bucket_bytes_over(num_replicas: int, gradient_bytes: int, num_hops: int) -> int:
    """Returns the least size of buckets of `gradient_bytes` in all, which take `num_hops` each."""
    if num_replicas <= MANY_REPLICAS:
        return BUCKET_BYTES
    return max(BUCKET_BYTES, -(-gradient_bytes // max(_MOST_HOPS // num_hops, 1)))


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter, summed over the micro-batches of a replica."""

    tensor: int
    producer: int  # the op whose end makes the gradient complete
    updates: tuple[int, ...]  # the ops that wait for it
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that go round a ring together."""

    names: tuple[str, ...]  # of the first update that reads each gradient: the same in all replicas
    num_bytes: int
    dtype: str

    def updates(self, gradients: Mapping[str, Gradient]) -> list[int]:
        """Returns the ops that wait for the bucket, each once; `gradients` are those of a replica."""
        return list(dict.fromkeys(op for name in self.names for op in gradients[name].updates))


def gradients_of(graph: Graph, is_update: Bool) -> dict[str, Gradient]:
    """Returns the gradients by the name of the first update that reads each, in the order of their producers.
    `is_update` [N] are the updates and what follows them."""
    by_update = is_update[graph.consumers] & ~is_update[graph.producers[graph.edge_tensors]]
    is_source = ~np.isin(np.arange(graph.num_ops), graph.consumers)
    made = by_update & ~is_source[graph.producers[graph.edge_tensors]] & (graph.tensor_bytes[graph.edge_tensors] > 0)
    tensors = np.unique(graph.edge_tensors[made])
    tensors = tensors[np.argsort(graph.producers[tensors], kind="stable")]
    gradients: dict[str, Gradient] = {}
    for tensor in tensors.tolist():
        producer = int(graph.producers[tensor])
        updates = tuple(op for op in graph.consumers_of(tensor).tolist() if is_update[op])
        size = int(graph.tensor_bytes[tensor])
        name = graph.op_names[updates[0]]
        while name in gradients:  # an update that reads several
            name += "'"
        gradients[name] = Gradient(tensor, producer, updates, size, graph.dtypes[producer])
    return gradients


def buckets_of(
    gradients: dict[str, Gradient], places: Sequence[int], bucket_bytes: int, first_bytes: int | None = None
) -> list[Bucket]:
    """Returns the buckets: one is full with `bucket_bytes`, the first of a place and type with `first_bytes`. `places`
    [ops] are equal for ops that are sure to share a device: no bucket crosses them, nor types of numbers."""
    buckets: list[Bucket] = []
    least = dict[tuple[int, str], int]()
    open_buckets: dict[tuple[int, str], tuple[list[str], int]] = {}
    for name, gradient in gradients.items():
        key = places[gradient.updates[0]], gradient.dtype
        names, size = open_buckets.pop(key, ([], 0))
        names.append(name)
        size += gradient.num_bytes
        if size >= least.setdefault(key, first_bytes or bucket_bytes):
            least[key] = bucket_bytes
            buckets.append(Bucket(tuple(names), size, gradient.dtype))
        else:
            open_buckets[key] = names, size
    return buckets + [Bucket(tuple(names), size, dtype) for (_, dtype), (names, size) in open_buckets.items()]
