"""All that an executor on this host must do, threads and forked processes alike."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from execute.placed_steps import CLUSTER, cpus, randomly_placed, tower
from gdp import Problem, simulate
from gdp.execute.forked.forked_executor import ForkedExecutor
from gdp.execute.host_executor import ThreadExecutor
from gdp.execute.plan_executor import ExecutionError, PlanExecutor
from gdp.execute.script import scripts
from gdp.models.pytorch import capture
from tiny_models import TINY

NOT_FORKED = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
KINDS = [ThreadExecutor, pytest.param(ForkedExecutor, marks=NOT_FORKED)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gnmt", "inception", "dlrm"])
def test_inference_gives_the_bits_of_pytorch(name: str, kind: type[PlanExecutor]) -> None:
    """Outputs that a step retains are PyTorch's, and the times of its ops lie within it."""
    model, args, kwargs = TINY[name]()
    model.eval()
    found = capture(model, args, kwargs, name=name, training=False)
    with torch.no_grad():
        expected = model(*args, **kwargs)
    content = found.program.bind(model, args, kwargs)
    with kind(found.program, randomly_placed(found, 3, 0).order, cpus()) as executor:
        executor.load(content)
        record = executor.step(content, retain=True, is_timed=True)
        (output,) = executor.outputs(record).values()
        (again,) = executor.results(record).outputs.values()
    assert torch.equal(output, expected)
    assert torch.equal(again, expected)
    start, finish, wait = record.op_times_ns(found.graph.num_ops)
    assert (finish > start).all()
    assert (wait >= 0).all()
    awaiting = {task.op for script in scripts(found.program, executor.order) for task in script if task.awaited}
    assert not wait[[op for op in range(found.graph.num_ops) if op not in awaiting]].any()
    assert start.min() >= record.start_ns
    assert finish.max() <= record.finish_ns
    assert np.all(finish - start < 60e9)


def copies(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {key: tensor.clone() for key, tensor in tensors.items()}


def assert_state(executor: PlanExecutor, expected: Mapping[int, Tensor]) -> None:
    state = executor.state()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_changed_arguments_of_updates(kind: type[PlanExecutor]) -> None:
    """A learning rate that falls to zero stops the training."""
    found, content = tower()
    program = found.program
    with kind(program, randomly_placed(found, 2, 0).order, cpus()) as executor:
        executor.load(content)
        executor.step(content)
        before = copies(executor.state())
        executor.step(content)
        assert any(not torch.equal(before[key], tensor) for key, tensor in executor.state().items())
        for op, phase in enumerate(program.graph.phases):
            if phase == "update":
                program.set_keyword(op, "lr", 0.0)
        before = copies(executor.state())
        executor.step(content)
        assert_state(executor, before)


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_goes_in_and_out(kind: type[PlanExecutor]) -> None:
    """A training goes on in another placement from the state of the first one, bit for bit."""
    found, content = tower()
    with kind(found.program, randomly_placed(found, 3, 2).order, cpus()) as executor:
        executor.load(content)
        for _ in range(2):
            executor.step(content)
        state, private = copies(executor.state()), {op: copies(values) for op, values in executor.private().items()}
        expected = executor.loss(executor.step(content))
        after = copies(executor.state())
    with kind(found.program, randomly_placed(found, 2, 5).order, cpus()) as executor:
        executor.load(state)
        executor.load_private(private)
        assert torch.equal(executor.loss(executor.step(content)), expected)
        assert_state(executor, after)


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * torch.ones(2**44, dtype=torch.float64).sum()


@torch.library.custom_op("gdp_tests::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    raise ValueError("the kernel\nfailed")


@fails.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x + 1).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("model", "message", "is_out_of_memory"),
    [
        (Wide(), "device 'cpu1': op 'ones_0': out of memory; place with --max-memory", True),
        (Calls(lambda x: fails(x)), "device 'cpu1': op 'function.fails_0': the kernel failed", False),
        (Calls(lambda x: torch.ops.gdp_tests.has_no_kernel(x)), "pin the op to another device with --pin", False),
    ],
    ids=["memory", "kernel", "no kernel"],
)
def test_failing_ops(model: nn.Module, message: str, is_out_of_memory: bool, kind: type[PlanExecutor]) -> None:
    """An op that fails ends the step on all devices."""
    found = capture(model, (torch.ones(3),), name="bad", training=False)
    simulation = simulate(Problem.build(found.graph, CLUSTER), np.ones(found.graph.num_ops, np.int64))
    content = found.program.bind(model, (torch.ones(3),), {})
    with kind(found.program, simulation.order, cpus()) as executor:
        with pytest.raises(ExecutionError) as raised:
            executor.step(content)
        assert message.replace("function.", "") in str(raised.value).replace("function.", "")
        assert "\n" not in str(raised.value)
        assert raised.value.is_out_of_memory == is_out_of_memory
        with pytest.raises(ExecutionError, match="closed"):
            executor.step(content)
