"""Rings: sums over replicas, in chunks that go round.

A bucket is cut into R chunks, and chunk k starts at position k of the ring. For 3 replicas and chunk 0:

    position 0   ready ----.                    .---> copy ----.
    position 1             '---> add ----.      |              '---> copy
    position 2                           '---> add (the sum)

The other chunks do the same from positions 1 and 2 at the same time. Sums are made in the memory of the gradients: a
hop takes memory where it arrives and nowhere else. P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", JPDC 2009.
"""

from collections.abc import Sequence

import numpy as np

from gdp.arrays import I64
from gdp.graph.microbatches import ELEMENT_BYTES
from gdp.parallel.buckets import Bucket
from gdp.parallel.columns import Columns


def add_ring(
    columns: Columns, bucket: Bucket, label: str, groups: Sequence[int], ring: Sequence[int]
) -> tuple[I64, I64]:
    """Adds the all-reduce of `bucket` over R replicas; returns (ops that begin it [R], ops that end it [R]).

    What makes a replica's gradients complete is to be before its first op, its updates after the other one. `label`
    begins the ops' names, `groups` [R] are those of the replicas' ops, `ring` [R] is the order of replicas.
    """
    count = len(ring)
    chunk_bytes = -(-bucket.num_bytes // count)
    replica_at = np.array(ring, np.int64)
    group_of = np.array(groups, np.int64)
    places = np.arange(count)

    def add(kind: str, replicas: I64, chunks: I64 | None = None, **costs: int) -> I64:
        middle = [""] * len(replicas) if chunks is None else [f".{chunk}" for chunk in chunks.tolist()]
        names = [
            f"{label}.{kind}{chunk}{suffix(replica)}" for chunk, replica in zip(middle, replicas.tolist(), strict=True)
        ]
        figures = {"dtypes": bucket.dtype, "phases": "backward", "modules": "", "groups": group_of[replicas], **costs}
        return columns.add_ops(names, f"all_reduce.{kind}", **figures)

    ready = np.empty(count, np.int64)
    ready[replica_at] = add("ready", replica_at)
    flops = -(-chunk_bytes // ELEMENT_BYTES.get(bucket.dtype, 4))
    last = ready[replica_at]  # [R] of each chunk, the op that has it
    for hop in range(1, count):
        receivers = replica_at[(places + hop) % count]
        sums = add("add", receivers, places, flops=flops, bytes_accessed=3 * chunk_bytes)
        columns.add_edges(columns.add_tensors(last, chunk_bytes, is_resident=True), sums)
        columns.control(ready[receivers], sums)
        last = sums
    final = np.empty((count, count), np.int64)  # [replica, chunk] the op after which the replica has the chunk's sum
    final[replica_at[(places + count - 1) % count], places] = last
    for hop in range(count, 2 * count - 1):
        receivers = replica_at[(places + hop) % count]
        copies = add("copy", receivers, places)
        columns.add_edges(columns.add_tensors(last, chunk_bytes, is_resident=True), copies)
        final[receivers, places] = last = copies
    done = np.empty(count, np.int64)
    done[replica_at] = add("done", replica_at)
    columns.control(final.reshape(-1), np.repeat(done, count))
    return ready, done


def suffix(replica: int) -> str:
    """Returns the end of the names of a replica's ops; the first one's have none."""
    return f"#{replica}" if replica else ""
