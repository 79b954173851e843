"""Tells whether the dimension of inputs that is cut is the batch, from two steps of more and of fewer samples. Fewer
samples have the same ops, of smaller sizes. Where the dimension is time, a recurrent model has fewer ops in a row;
where it is a sequence, attention has fewer FLOPs a token; inputs of another length are not cut with it, and where it
counts nodes of a graph, edges still ask for all of them."""

from collections.abc import Sequence

import numpy as np

from gdp.arrays import Bool, combined
from gdp.graph import Graph
from gdp.graph.interpolation import have_same_ops

_PRODUCTS = ("mm", "conv", "attention", "bilinear")  # in kinds of ops, whose FLOPs follow the samples alone
_LOOKUPS = ("index", "gather", "embedding")  # the first part of names of ops that read rows
_MOST_LACKING = 0.05  # of the FLOPs that follow the square of the dimension: a loss over pairs of samples has fewer
_MOST_UNCUT = 0.1  # of the FLOPs that do not follow the dimension: products of weights with weights have fewer
_MOST_IN_A_ROW = 0.5  # of the longest chain of ops: a sum over samples may be part of it
_NUMBER_BYTES = 8  # the largest single number, such as a loss


def other_dimension(
    whole: Graph, part: Graph, num_parts: int, steps: tuple[Sequence[int], Sequence[int]] = ((), ())
) -> str:
    """Returns what says that `part`, of 1/`num_parts` of a dimension of `whole`, is no part of its batch; "": nothing.
    `steps` are the time steps of each call of a recurrent kernel, which is one op, in `whole` and in `part`."""
    share = f"1/{num_parts} as much"
    if steps[0] != steps[1]:
        return f"with {share} a recurrent layer has {max(steps[1], default=0)} time steps, not {max(steps[0])}"
    if part.num_ops < whole.num_ops:
        for only_with_weights, least in ((True, 0.0), (False, _MOST_IN_A_ROW)):
            long, short = (_longest_chain(graph, only_with_weights) for graph in (whole, part))
            if short < long and (1 - short / long) > least * (1 - 1 / num_parts):
                which = "with weights " if only_with_weights else ""
                return f"with {share} {short:,} ops {which}follow one another, not {long:,}: that is time"
    if have_same_ops(whole, part) and (op := _uncut_lookup(whole, part)):
        return f"with {share} {op} looks up as many rows, of fewer, as edges of a graph do"
    flops, flops_of_part = (int(graph.flops[_is_product(graph)].sum()) for graph in (whole, part))
    relative = num_parts * flops_of_part / flops if flops else 1.0
    lacking, uncut = (1 - relative) / (1 - 1 / num_parts), (relative - 1) / (num_parts - 1)
    if lacking > _MOST_LACKING:
        return f"{num_parts} parts of it have {relative:.0%} of the FLOPs, as if a sequence were cut"
    if uncut > _MOST_UNCUT:
        return f"{num_parts} parts of it have {relative:.0%} of the FLOPs, as inputs of other lengths are not cut"
    return ""


def other_count(num_parts: int, size: int) -> int:
    """Returns another number of equal parts of `size`: more of them than `num_parts`, fewer if it has not so many."""
    rest = size // num_parts
    return num_parts * _smallest_factor(rest) if rest > 1 else num_parts // _smallest_factor(num_parts)


def _smallest_factor(number: int) -> int:
    """Returns the smallest factor above 1 of a number above 1."""
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def _is_product(graph: Graph) -> Bool:
    """[N] Returns which ops are products of the passes."""
    is_product = {kind: any(word in kind for word in _PRODUCTS) for kind in set(graph.kinds)}
    is_pass = np.isin(graph.phases, ("forward", "backward"))
    return np.asarray(is_pass & np.array([is_product[kind] for kind in graph.kinds], np.bool_))


def _uncut_lookup(whole: Graph, part: Graph) -> str:
    """Returns the name of a forward op that reads as many rows of a tensor that has fewer; "": there is none."""
    is_cut = part.tensor_bytes < whole.tensor_bytes
    reads_rows = [kind.partition(".")[2].lstrip("_").startswith(_LOOKUPS) for kind in whole.kinds]
    is_lookup = np.array(reads_rows, np.bool_) & whole.is_in_phase("forward")
    is_lookup[whole.producers[is_cut]] = False
    ops = whole.consumers[is_lookup[whole.consumers] & is_cut[whole.edge_tensors]]
    return whole.op_names[ops.min()] if len(ops) else ""


def _longest_chain(graph: Graph, only_with_weights: bool) -> int:
    """Returns how many forward ops of the longest chain make more than a number, or read weights."""
    producers, consumers = graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist()
    inputs: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for producer, consumer in zip(producers, consumers, strict=True):
        inputs[consumer].append(producer)
    largest_bytes = combined(np.maximum, graph.producers, graph.tensor_bytes, graph.num_ops)
    makes_tensor = (largest_bytes > _NUMBER_BYTES).tolist()
    is_weight, length = [kind == "parameter" for kind in graph.kinds], [0] * graph.num_ops
    for op, phase in enumerate(graph.phases):
        if phase != "forward" or not inputs[op]:
            continue
        reads_weights = [is_weight[producer] for producer in inputs[op]]
        is_weight[op] = all(reads_weights)  # made of weights alone, as a cast
        counts = not is_weight[op] and (any(reads_weights) if only_with_weights else makes_tensor[op])
        length[op] = max(length[producer] for producer in inputs[op]) + counts
    return max(length, default=0)
