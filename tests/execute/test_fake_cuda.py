"""A placed step on GPUs that are not there: devices, kernels, streams, events and freed memory, for all tiny models."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fake_cuda import FakeCuda, RaceError
from gdp import Cluster, Problem, simulate
from gdp.execute import backends
from gdp.execute.backends import CPU, Target
from gdp.execute.calibrate.measured_routes import routes_between
from gdp.execute.calibrate.work import QUICK, launches
from gdp.execute.host_executor import ThreadExecutor
from gdp.execute.plan_executor import ExecutionError
from gdp.models.pytorch import Capture, capture, routine
from tiny_models import EXECUTED, REPEATED

CLUSTER = Cluster.parse("3xp100-pcie-16g")
# half of the time for four hundred ops each, whose kinds run on these GPUs as those of the other models do
SLOW = {"densenet", "efficientnet", "retinanet", "t5", "transformer_xl", "wavenet"}
TARGETS = (Target("cuda0", torch.device("cuda", 0)), Target("cpu0", CPU), Target("cuda1", torch.device("cuda", 1)))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch)
    return made


@cache
def captured_here(name: str) -> tuple[Capture, dict[int, Tensor]]:
    """A tiny model's step and what it starts from; `tiny_models.captured` is of a machine without these GPUs."""
    model, args, kwargs = EXECUTED[name]()
    found = capture(model, args, kwargs, name=name)
    return found, found.program.bind(model, args, kwargs)


def captured(name: str, world: FakeCuda) -> tuple[Capture, dict[int, Tensor]]:
    """The step with its ops not yet prepared for devices, and what it starts from as fake tensors."""
    found, content = captured_here(name)
    with world.fake:
        return replace(found, program=replace(found.program)), {
            number: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            for number, tensor in content.items()
        }


def run_randomly_placed(name: str, world: FakeCuda) -> None:
    """Two steps with ops on random devices, blocks of eight together, so that streams run ahead."""
    found, content = captured(name, world)
    graph, random = found.graph, np.random.default_rng(0)
    placement = np.repeat(random.integers(0, len(TARGETS), graph.num_ops // 8 + 1), 8)[: graph.num_ops]
    for group in set(graph.groups[graph.groups >= 0].tolist()):
        placement[graph.groups == group] = placement[graph.groups == group][0]
    order = simulate(Problem.build(graph, CLUSTER), placement).order
    with world.watching():
        with ThreadExecutor(found.program, order, TARGETS) as executor:
            executor.load(content)
            executor.step(content)
            record = executor.step(content, retain=True, is_timed=True)
            for tensor in executor.state().values():
                tensor.to("cpu", copy=True)
            for device, target in zip(record.devices, TARGETS, strict=True):
                assert {tensor.device for tensor in device.held.values() if tensor is not None} <= {target.device}
                assert len(device.issued_ns) == (len(device.ops) if target.device.type == "cuda" else 0)
            del record, device, tensor
        world.sweep()
    assert world.num_kernels > graph.num_ops


run_gnmt = partial(run_randomly_placed, "gnmt")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in REPEATED | SLOW)) for name in EXECUTED]
)
def test_steps_on_two_gpus_and_a_cpu(name: str, world: FakeCuda) -> None:
    """Steps on two GPUs and a CPU compute what one CPU computes."""
    run_randomly_placed(name, world)


@pytest.mark.long
def test_repeated_models_have_no_kinds_of_their_own() -> None:
    """All kinds of ops are in the models that each run of the tests executes."""
    kinds = {name: set(captured_here(name)[0].graph.kinds) for name in EXECUTED}
    assert set().union(*kinds.values()) == set().union(*(kinds[name] for name in EXECUTED if name not in REPEATED))


def test_copies_hold_up_nobody(world: FakeCuda) -> None:
    """Copies hold up nobody, but for those of inputs and parameters."""
    run_gnmt(world)
    sources = captured("gnmt", world)[0].program.sources  # each is loaded, or copied in two steps, and read in the end
    assert world.num_hidden_waits <= 2 * len(sources)


def run_on_loaded_state(world: FakeCuda) -> None:
    """A step on parameters and optimizer state that come from the GPU itself."""
    found, content = captured("resnet", world)
    (gpu, *_), num_ops = TARGETS, found.graph.num_ops
    with world.watching(), ThreadExecutor(found.program, [range(num_ops)], [gpu]) as executor:
        executor.load(content)
        executor.step(content)
        executor.load({number: tensor.clone() for number, tensor in executor.state().items()})
        executor.load_private(
            {op: {key: tensor.clone() for key, tensor in values.items()} for op, values in executor.private().items()}
        )
        executor.step(content)


def test_loaded_state_is_complete(world: FakeCuda) -> None:
    """State that is loaded from a GPU is complete before the next step."""
    run_on_loaded_state(world)


@pytest.mark.parametrize(
    ("owner", "name", "run", "message"),
    [
        (lambda: torch.cuda.Stream, "wait_event", run_gnmt, "may still be at"),
        (lambda: torch.cuda.Event, "synchronize", run_gnmt, "may still be at"),
        (lambda: Tensor, "record_stream", run_gnmt, "is freed"),
        (lambda: backends.CudaBackend, "settle", run_gnmt, "may still be at"),
        (lambda: backends.CudaBackend, "settle_caller", run_on_loaded_state, "may still be at"),
        (lambda: routine, "function_for", partial(run_randomly_placed, "vit"), "has no kernel for CUDA"),
    ],
)
def test_missing_synchronisation_is_noticed(
    owner: Callable[[], Any],
    name: str,
    run: Callable[[FakeCuda], None],
    message: str,
    world: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake GPUs notice every synchronisation that is left out."""
    monkeypatch.setattr(owner(), name, lambda *given: given[0])  # does nothing; an operator is itself
    with pytest.raises((RaceError, ExecutionError), match=message):
        run(world)


def test_launches_and_copies_are_measured(world: FakeCuda) -> None:
    """What is measured means nothing here; that all of it can be, on every kind of route, is what counts."""
    with world.watching():
        figures = launches(TARGETS, QUICK, lambda _text: None)
        routes, _ = routes_between(TARGETS, QUICK, lambda _text: None)
    assert len(figures) == len(TARGETS)
    assert len(routes) == len(TARGETS) * (len(TARGETS) - 1)
