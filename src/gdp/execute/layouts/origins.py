"""Origins: the op and the tensor of one micro-batch that each op and tensor of a step is a copy of."""

from collections import defaultdict
from dataclasses import dataclass

from gdp.graph import Graph
from gdp.graph.copies import numbers_in


@dataclass(frozen=True, eq=False)
class Origins:
    """The ops and tensors that the M ops and S tensors of a step are copies of; -1: the layout makes them."""

    op: list[int]  # [M]
    tensor: list[int]  # [S]
    microbatch: list[int]  # [M]
    replica: list[int]  # [M]

    @classmethod
    def of(cls, part: Graph, step: Graph) -> "Origins":
        """Finds the ops and tensors of `part`, the graph of one micro-batch.

        A copy makes the tensors of its op first, in their order.
        """
        ops = numbers_in(part, step, step.first_copy).tolist()
        of_part, of_step = tensors_of(part), tensors_of(step)
        tensors = [-1] * step.num_tensors
        for op, origin in enumerate(ops):
            if origin >= 0:
                for own, tensor in zip(of_step[op], of_part[origin], strict=False):
                    tensors[own] = tensor
        return cls(ops, tensors, step.microbatches.tolist(), step.replicas.tolist())


def tensors_of(graph: Graph) -> dict[int, list[int]]:
    """Returns the tensors of each op, ascending."""
    found = defaultdict[int, list[int]](list)
    for tensor, op in enumerate(graph.producers.tolist()):
        found[op].append(tensor)
    return found


def read_by(graph: Graph) -> dict[int, list[int]]:
    """Returns the tensors that each op consumes, ascending."""
    found = defaultdict[int, list[int]](list)
    for tensor, op in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        found[op].append(tensor)
    return found
