"""Stages as Megatron cuts them: equal numbers of layers, the embedding with the first, the head with the last one."""

import numpy as np

from gdp.arrays import I64
from gdp.graph.layers import LayerPaths
from gdp.placers.base import inherit
from gdp.placers.settings import EXPERT
from gdp.simulator.problem import Problem


def equal_stages(problem: Problem, num_stages: int) -> I64 | None:
    """Returns the stage [N] of each op of a step; None where the layers are not a multiple of `num_stages`.

    Layers are those of the numbered lists in module paths. Other modules go with the layer in front of them.
    """
    graph = problem.graph
    if num_stages == 1:
        return np.zeros(graph.num_ops, np.int64)
    layers = LayerPaths.of(graph)
    sizes = {path: layers.lists.count(path) for path in layers.lists if path}
    longest = max(sizes.values(), default=0)
    is_layer = [sizes.get(path, 0) >= max(EXPERT.min_share * longest, 2) for path in layers.lists]
    count = sum(is_layer)
    if not count or count % num_stages:
        return None
    position = np.maximum(np.cumsum(is_layer) - 1, 0)  # [L]
    of_part = position * num_stages // count
    labels = [int(of_part[part]) if (part := layers.of_module.get(module, -1)) >= 0 else -1 for module in graph.modules]
    stage = inherit(problem, labels)
    grouped = np.flatnonzero(graph.groups >= 0)
    lowest = np.full(int(graph.groups.max(initial=-1)) + 1, num_stages)
    np.minimum.at(lowest, graph.groups[grouped], stage[grouped])
    stage[grouped] = lowest[graph.groups[grouped]]
    return stage
