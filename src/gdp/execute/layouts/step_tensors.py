"""StepTensors: the value that each tensor of a cut step has, copied from one micro-batch or made by the layout."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gdp.graph import Graph
from gdp.graph.copies import numbers_in
from gdp.models.pytorch import Program
from gdp.models.pytorch.optimizers import contiguous
from gdp.models.pytorch.strides import StridedLayout


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


@dataclass(eq=False)
class StepTensors:
    """The tensors [S] of `step`, whose copies are of `program`."""

    program: Program
    step: Graph
    copies: Origins
    values: list[int]  # [S] of the program, or beyond them; -1: no content
    parts: list[StridedLayout | None]  # [S] None: the whole value
    layouts: dict[int, StridedLayout]  # by value
    made_by: dict[int, list[int]]  # by op
    read_by: dict[int, list[int]]

    @classmethod
    def of(cls, program: Program, step: Graph) -> "StepTensors":
        """Returns the tensors with the values of those that they are copies of."""
        copies = Origins.of(program.graph, step)
        return cls(
            program,
            step,
            copies,
            [-1 if origin < 0 else program.tensor_values[origin] for origin in copies.tensor],
            [None if origin < 0 else program.tensor_layouts[origin] for origin in copies.tensor],
            dict(program.layouts),
            tensors_of(step),
            read_by(step),
        )

    def __post_init__(self) -> None:
        self._rows: dict[tuple[int, torch.dtype], int] = {}  # values that are a row of elements
        self._first_row = max(self.layouts, default=-1) + 1

    def contents(self, op: int) -> list[int]:
        """Returns the tensors with content that an op reads."""
        return [tensor for tensor in self.read_by[op] if self.values[tensor] >= 0]

    def with_bytes(self, tensors: Sequence[int]) -> list[int]:
        """Returns the tensors that are no control dependencies."""
        return [tensor for tensor in tensors if self.step.tensor_bytes[tensor] > 0]

    def copy_value(self, tensor: int, other: int) -> None:
        """Gives a tensor the value of another one."""
        self.values[tensor], self.parts[tensor] = self.values[other], self.parts[other]

    def set_row(self, tensor: int, size: int, dtype: torch.dtype) -> None:
        """Makes a tensor a row of elements."""
        key = size, dtype
        if key not in self._rows:
            value = self._rows[key] = self._first_row + len(self._rows)
            self.layouts[value] = StridedLayout((size,), (1,), 0, dtype)
        self.values[tensor], self.parts[tensor] = self._rows[key], None

    def clear(self, tensor: int) -> None:
        """Takes the content of a tensor away."""
        self.values[tensor], self.parts[tensor] = -1, None

    def memory_of(self, tensor: int) -> StridedLayout:
        """Returns the layout of a tensor's content in memory of its own."""
        part = self.parts[tensor]
        if part is None:
            return self.layouts[self.values[tensor]]
        return contiguous(part.size, part.dtype)

    def layout_of(self, weight: int) -> StridedLayout:
        """Returns the layout of a weight, a tensor of the program."""
        return self.program.layouts[self.program.tensor_values[weight]]

    def base(self, tensor: int) -> int:
        """Returns the tensor of the program that a tensor of it is a view of, or itself."""
        base = int(self.program.graph.view_of[tensor])
        return base if base >= 0 else tensor

    def is_source(self, tensor: int) -> bool:
        """Returns whether a tensor is a parameter, a buffer or an input."""
        return self.copies.op[int(self.step.producers[tensor])] in self.program.sources


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
