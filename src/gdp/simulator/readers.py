"""Lists of the ops that read memory, as `memory.py` goes through them.

A tensor's memory is freed on its producer's device after the last reader there, and its copies on other devices after
the last readers there: one list of readers tells both. A tensor with views has a list for its own memory, which readers
of the views are in, too, and each of them a list for its copies alone.

Lists come by length, so that loops over one turn equally often from list to list. Most lists are not there at all: if
nobody reads a tensor, its producer frees it; a lone reader frees as much on the producer's device as on another, or
nothing there, and then it frees a copy if the tensor is sent."""

import numpy as np

from gdp.arrays import I64
from gdp.simulator.records import Readers


def readers_of(
    num_ops: int, producers: I64, consumers: I64, counts: I64, owner: I64, owned_bytes: I64, copy_bytes: I64
) -> Readers:
    """Returns the lists. Tensors [T] have `counts` consumers [E] in turn; `owner` [T] is the base of a view."""
    num_tensors = len(owner)
    numbers = np.arange(num_tensors)
    in_family = owner != numbers  # a view, or a tensor with views
    in_family[owner[in_family]] = True
    bases = numbers[in_family & (owner == numbers)]
    edge_tensors = np.repeat(numbers, counts)
    family_edges = np.flatnonzero(in_family[edge_tensors])
    family_edges = family_edges[np.argsort(owner[edge_tensors[family_edges]], kind="stable")]

    edges = np.concatenate((np.arange(len(consumers)), family_edges))
    lengths = np.concatenate((counts, np.bincount(owner[edge_tensors[family_edges]], minlength=num_tensors)[bases]))
    makers = np.concatenate((producers, producers[bases]))
    owners = np.concatenate((np.where(in_family, num_tensors, numbers), bases))  # num_tensors: of copies alone
    owned = np.concatenate((np.where(in_family, 0, owned_bytes), owned_bytes[bases]))
    copied = np.concatenate((copy_bytes, np.zeros(len(bases), np.int64)))
    begins = np.cumsum(lengths) - lengths

    frees_bytes = np.zeros(num_ops, np.int64)
    unread = lengths == 0
    np.add.at(frees_bytes, makers[unread], owned[unread])
    alike = (lengths == 1) & (owned == copied)
    np.add.at(frees_bytes, consumers[edges[begins[alike]]], owned[alike])
    is_lone = (lengths == 1) & (owned == 0) & (copied > 0)  # never the memory of a tensor with views
    lone_reader = np.full(num_tensors, num_ops + len(consumers))
    lone_reader[np.flatnonzero(is_lone)] = consumers[edges[begins[is_lone]]]

    kept = np.flatnonzero(~unread & ~alike & ~is_lone & ((owned > 0) | (copied > 0)))
    kept = kept[np.argsort(lengths[kept], kind="stable")]
    sizes, num_lists = np.unique(lengths[kept], return_counts=True)
    starts = np.cumsum(lengths[kept]) - lengths[kept]
    list_of = np.full(num_tensors + 1, len(kept))
    list_of[owners[kept]] = np.arange(len(kept))
    within = np.arange(lengths[kept].sum()) - np.repeat(starts, lengths[kept])
    return Readers(
        frees_bytes=frees_bytes,
        lengths=sizes.astype(np.uint32),
        offsets=np.concatenate(([0], np.cumsum(num_lists))).astype(np.uint32),
        producers=makers[kept].astype(np.uint32),
        owned_bytes=owned[kept],
        copy_bytes=copied[kept],
        ops=consumers[edges[np.repeat(begins[kept], lengths[kept]) + within]].astype(np.uint32),
        list_of=list_of[:-1].astype(np.uint32),
        lone_reader=lone_reader.astype(np.uint32),
    )
