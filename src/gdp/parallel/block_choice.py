"""The order in which layers are recomputed, or their activations sent away."""

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.blocks import Blocks
from gdp.parallel.layout import BLOCKS


def longest_held_blocks(graph: Graph) -> list[tuple[str, int]]:
    """Returns the paths of layers, as their activations are held the longest, and an op of each.

    Empty for a graph without layers.
    """
    try:
        blocks = Blocks.of(graph, BLOCKS)
    except InputError:
        return []
    order = np.argsort(-blocks.first_of(blocks.is_read), kind="stable").tolist()
    return [
        (blocks.paths[block], int(np.flatnonzero(blocks.is_forward & (blocks.of_op == block))[0])) for block in order
    ]


def cheapest_blocks(graph: Graph, op_time_ns: I64) -> list[tuple[str, int]]:
    """Returns the paths of layers whose recomputation saves memory, and an op of each.

    Those that save most for each ns come first; `op_time_ns` [N] is the time of each op of the step `graph`, on any one
    device. Layers of equal merit are taken from the beginning of the model: they are recomputed when the others'
    activations are gone. Empty for a graph without layers.
    """
    try:
        blocks = Blocks.of(graph, BLOCKS)
    except InputError:
        return []
    time_ns = np.zeros(len(blocks.paths), np.int64)
    np.add.at(time_ns, blocks.of_op[blocks.is_repeated], op_time_ns[blocks.is_repeated])
    held = blocks.held_bytes(np.zeros(len(blocks.paths), np.bool_))
    saved = np.array([held - blocks.held_bytes(one) for one in np.eye(len(blocks.paths), dtype=np.bool_)], np.int64)
    order = np.lexsort((-blocks.first_reader, -saved / np.maximum(time_ns, 1)))
    return [
        (blocks.paths[block], int(np.flatnonzero(blocks.is_repeated & (blocks.of_op == block))[0]))
        for block in order[saved[order] > 0].tolist()
    ]
