"""Chooses the layers that are recomputed, by arithmetic on what they hold and how long they take."""

import numpy as np

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.blocks import Blocks
from gdp.parallel.layout import BLOCKS


def blocks_to_recompute(graph: Graph, op_time_ns: I64, num_bytes: int) -> tuple[str, ...]:
    """Returns paths of layers whose recomputation saves at least `num_bytes`, those first that save most per ns.

    `op_time_ns` [N] is the time of each op of the step `graph`, on any one device. Blocks of equal merit are taken from
    the beginning of the model: they are recomputed when the others' activations are gone. It is an estimate, by
    arithmetic alone: a plan's order decides what is held at once, so simulate the step, and ask for more bytes if it
    does not fit. If all layers do not save so much, those that save anything are returned; () for a graph without
    layers.
    """
    if num_bytes <= 0:
        return ()
    try:
        blocks = Blocks.of(graph, BLOCKS)
    except InputError:
        return ()
    nothing = np.zeros(len(blocks.paths), np.bool_)
    held, time_ns = blocks.held_bytes(nothing), np.zeros(len(blocks.paths), np.int64)
    np.add.at(time_ns, blocks.of_op[blocks.is_repeated], op_time_ns[blocks.is_repeated])
    saved = np.array([held - blocks.held_bytes(one) for one in np.eye(len(nothing), dtype=np.bool_)], np.int64)
    chosen = nothing.copy()
    for block in np.lexsort((-blocks.first_reader, -saved / np.maximum(time_ns, 1))).tolist():
        if saved[block] <= 0 or _saving(blocks, saved, chosen) >= num_bytes:
            break
        chosen[block] = True
    return tuple(path for path, is_chosen in zip(blocks.paths, chosen, strict=True) if is_chosen)


def _saving(blocks: Blocks, saved: I64, chosen: Bool) -> int:
    """Returns by how much the peak is lower with the blocks `chosen` [B], each of which saves `saved` [B] by itself.

    The peak is at the beginning of the backward pass or where a chosen block is there again, and of those that come
    before it in the backward pass nothing is.
    """
    in_order = np.argsort(blocks.first_reader)
    saved, chosen, copies = saved[in_order], chosen[in_order], blocks.copy_bytes[in_order]
    gone = np.concatenate(([0], np.cumsum(saved)[:-1]))
    still_saved = np.cumsum((saved * chosen)[::-1])[::-1]
    return int(min([still_saved[0], *(gone + still_saved - copies)[chosen].tolist()]))
