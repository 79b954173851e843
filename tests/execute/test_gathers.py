"""Gathered parameters: chunks come in any order, and ops that add parameters are no hops of a ring."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gdp.execute.backends import CPU, Content, CpuBackend, SentTensor, Target, as_tensor
from gdp.execute.host_executor import ThreadExecutor
from gdp.execute.layouts.batch import split_inputs
from gdp.execute.layouts.exchange_routines import ParameterGather, Results
from gdp.execute.layouts.step_program import step_program
from gdp.models.pytorch import Program, capture
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step


class Positions(nn.Module):
    """A model whose first op adds a parameter: `aten.add`, as the last word of a hop is `add`."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def losses(program: Program, order: list[list[int]], model: nn.Module, x: Tensor) -> list[float]:
    """Returns the losses of three steps."""
    content = program.bind_state(model) | program.bind_inputs((x,), {})
    with ThreadExecutor(program, order, [Target("a", CPU), Target("b", CPU)]) as executor:
        executor.load(content)
        found = [executor.loss(executor.step(content)) for _ in range(3)]
    return [float(loss) for loss in found if loss is not None]


@pytest.mark.parametrize("text", ["data=2,zero=1", "data=2,zero=2", "data=2,zero=3"])
def test_chunks_that_come_early(text: str) -> None:
    """A chunk of another replica may come before one's own is ready."""
    torch.manual_seed(0)
    model, x, layout = Positions(), torch.randn(4, 6), Layout.parse(text)
    args, kwargs = next(split_inputs((x,), {}, layout.num_parts))
    captured = capture(model, args, kwargs)
    step = Step.of(captured.graph, layout)
    program, names = step_program(captured.program, step), step.graph.op_names
    order = [np.flatnonzero(step.replica == replica).tolist() for replica in range(2)]
    expected = losses(program, order, model, x)
    ready = next(op for op in order[1] if names[op].endswith(".ready#1") and names[op].startswith("all_gather.0"))
    hop = next(op for op in order[1] if names[op].startswith("all_gather.0.copy"))
    order[1].remove(hop)
    order[1].insert(order[1].index(ready), hop)
    assert losses(program, order, model, x) == expected
    assert expected[2] < expected[0]


def test_gathered_parameters_are_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user is on another device that gets a copy, as processes and GPUs do, the copy has all chunks."""
    pack = CpuBackend.pack

    def copied(backend: CpuBackend, tensor: int, content: Content, to: torch.device) -> SentTensor:
        whole = as_tensor(content)
        return pack(backend, tensor, None if whole is None else whole.clone(), to)

    torch.manual_seed(0)
    model, x, layout = Positions(), torch.randn(4, 6), Layout.parse("data=2,zero=3")
    args, kwargs = next(split_inputs((x,), {}, layout.num_parts))
    captured = capture(model, args, kwargs)
    step = Step.of(captured.graph, layout)
    program = step_program(captured.program, step)
    expected = losses(program, [np.flatnonzero(step.replica == replica).tolist() for replica in range(2)], model, x)
    is_free = (step.graph.groups < 0) & ~step.graph.is_collective
    device = np.where(is_free, 1 - step.replica, step.replica)
    assert is_free.any()
    assert len(program.completed_by) >= 6
    monkeypatch.setattr(CpuBackend, "pack", copied)
    assert losses(program, [np.flatnonzero(device == number).tolist() for number in range(2)], model, x) == expected


def test_gathered_weights_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole parameters begin at multiples of 64 bytes, whatever the sizes of those gathered with them."""
    torch.manual_seed(0)
    model, layout, addresses = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), Layout.parse("data=2,zero=3"), []
    captured = capture(model, (torch.randn(2, 5),))
    step = Step.of(captured.graph, layout)
    views = ParameterGather._views

    def noting(self: ParameterGather, wholes: Sequence[Tensor], results: Results) -> dict[int, Any]:
        addresses.extend(whole.data_ptr() for whole in wholes)
        return views(self, wholes, results)

    monkeypatch.setattr(ParameterGather, "_views", noting)
    order = [np.flatnonzero(step.replica == replica).tolist() for replica in range(2)]
    losses(step_program(captured.program, step), order, model, torch.randn(4, 5))
    assert addresses
    assert all(address % 64 == 0 for address in addresses)
