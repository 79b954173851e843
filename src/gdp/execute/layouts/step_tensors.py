"""StepTensors: the value that each tensor of a cut step has, copied from one micro-batch or made by the layout."""

from collections.abc import Sequence

import numpy as np
import torch

from gdp.arrays import I64
from gdp.graph import Graph
from gdp.graph.copies import numbers_in
from gdp.models.pytorch import Program
from gdp.models.pytorch.strides import StridedLayout, contiguous


class StepTensors:
    """The M ops and S tensors of `step`, whose copies are of `program`, with the values of their originals. `op_origin`
    [M] and `origin` [S] are the ops and tensors that they are copies of; -1: the layout makes them. `values` [S] are of
    the program, or beyond them (-1: no content), `parts` [S] None for a whole value, `layouts` by value, and `made_by`
    and `read_by` the tensors of each op, ascending."""

    def __init__(self, program: Program, step: Graph) -> None:
        self.program, self.step = program, step
        part = program.graph
        self.op_origin: list[int] = numbers_in(part, step, step.first_copy).tolist()
        self.made_by = _tensors_by(step.producers, np.arange(step.num_tensors), step.num_ops)
        self.read_by = _tensors_by(step.consumers, step.edge_tensors, step.num_ops)
        self.origin = [-1] * step.num_tensors
        of_part = _tensors_by(part.producers, np.arange(part.num_tensors), part.num_ops)
        for op, origin in enumerate(self.op_origin):  # a copy makes the tensors of its op first, in their order
            for own, tensor in zip(self.made_by[op], of_part[origin] if origin >= 0 else (), strict=False):
                self.origin[own] = tensor
        self.values = [-1 if origin < 0 else program.tensor_values[origin] for origin in self.origin]
        self.parts = [None if origin < 0 else program.tensor_layouts[origin] for origin in self.origin]
        self.layouts = dict(program.layouts)
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
        return self.op_origin[self.step.producers[tensor]] in self.program.sources


def _tensors_by(ops: I64, tensors: I64, num_ops: int) -> list[list[int]]:
    """Returns those of `tensors` [E] that go with each op, from the op of each [E]."""
    ends = np.cumsum(np.bincount(ops, minlength=num_ops))
    return [part.tolist() for part in np.split(tensors[np.argsort(ops, kind="stable")], ends[:-1])]
