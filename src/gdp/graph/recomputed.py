"""Finds the ops of a graph that run once more what another op computed, by their names: `x!` is a copy of `x`."""

import re

import numpy as np

from gdp.arrays import Bool
from gdp.graph.graph import Graph

_COPY = re.compile(r"(.+)!((?:@[1-9][0-9]{0,3})?(?:#[1-9][0-9]{0,2})?)", re.DOTALL)


def is_recomputed(graph: Graph) -> Bool:
    """[N] True for `x!` (of a micro-batch `x!@1`, of a replica `x!@1#2`) where there is an op `x` of the same kind."""
    result = np.zeros(graph.num_ops, np.bool_)
    for op, name in enumerate(graph.op_names):
        if "!" in name and (match := _COPY.fullmatch(name)):
            source = graph.op_numbers.get(match[1] + match[2])
            result[op] = source is not None and graph.kinds[source] == graph.kinds[op]
    return result
