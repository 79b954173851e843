"""A step in micro-batches and replicas, placed at random, computes what PyTorch computes part by part."""

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from execute.random_layouts import LEARNING_RATE, Drawn, Unplaced
from gdp.execute.backends import CPU, Target
from gdp.execute.host_executor import ThreadExecutor, host_executor
from gdp.execute.plan_executor import DeviceRecord
from gdp.graph import Graph
from gdp.models.papers.base import Example
from gdp.models.pytorch import Capture, Replay, capture
from gdp.parallel.offload import Offload
from tiny_models import CONFIGS, REPEATED, tiny

NORMALISED = ("resnet", "densenet", "deep_speech")  # by batch: two samples are in a part
MODELS = (
    *NORMALISED,
    "rnnlm",  # recurrent
    "gnmt",
    "transformer_xl",
    "elmo",
    "tree_lstm",
    "bert",  # encoders
    "vit",
    "gpt2",  # decoders, with tied weights
    "llama",
    "t5",  # both
    "mixture_of_experts",
    "unet",
    "clip",  # two towers
    "dlrm",
    "wavenet",
)
NO_DROPOUT = {"dropout": 0.0, "skip": 0.0}
NOT_A_MEAN = {  # the loss of the whole batch is no mean of those of its parts
    *NORMALISED,
    "mixture_of_experts",  # experts take a number of tokens each
    "clip",  # samples are told apart from all others of the batch
}


def marked(*values: Any, is_long: bool) -> Any:
    """Returns a case of a test, marked if it is long."""
    return pytest.param(*values, marks=[pytest.mark.long] * is_long)


CASES = [
    marked(name, seed, start, is_long=seed == 2 or (seed == 1 and name in REPEATED))
    for name in MODELS
    for seed, start in enumerate((host_executor, ThreadExecutor, host_executor))
]
EPSILON = float(torch.finfo(torch.float32).eps)
NUM_STEPS, NUM_DEVICES = 3, 4

Start = Callable[..., Any]
"""Makes an executor of a program, in an order, on targets."""


@pytest.fixture(autouse=True)
def offload_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """All activations of a block wait on the host, not only those of a megabyte."""
    offload_small_tensors(monkeypatch)


def offload_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tensors of any size wait on the host."""
    monkeypatch.setitem(Offload.of.__func__.__kwdefaults__, "least_bytes", 64)  # type: ignore[attr-defined]


def example(name: str, num_parts: int) -> Example:
    """A batch of so many parts; the model does not draw."""
    sizes = {key: value for key, value in NO_DROPOUT.items() if hasattr(CONFIGS[name][1], key)}
    return tiny(name, (2 if name in (*NORMALISED, "clip") else 1) * num_parts, **sizes)


@cache
def captured(name: str, optimizer: str) -> Capture:
    """The step of one part."""
    return capture(*example(name, 1), name=name, optimizer=optimizer)


def drawn(name: str, seed: int) -> Drawn:
    return Drawn.of(np.random.default_rng([seed, zlib.crc32(name.encode())]), captured(name, "sgd-momentum").graph)


def cpus(count: int) -> list[Target]:
    return [Target(f"cpu{number}", CPU) for number in range(count)]


def assert_near(here: dict[str, Tensor], there: dict[str, Tensor], tolerance: dict[str, Tensor] | float) -> None:
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        bound = tolerance if isinstance(tolerance, float) else tolerance[name]
        assert bool(((here[name] - tensor).abs() <= bound).all()), name


def assert_equal(here: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        assert torch.equal(here[name], tensor), name


def assert_only_kept(devices: tuple[DeviceRecord, ...], graph: Graph) -> None:
    """Devices hold what the graph keeps, and no buffer."""
    held = [tensor for device in devices for tensor in device.held]
    assert all(tensor >= 0 and graph.is_kept[tensor] for tensor in held)


def check(name: str, seed: int, start: Start) -> None:
    """Three steps of a random layout on random devices, and of PyTorch; where ranks run it, each checks them."""
    case = drawn(name, seed)
    is_exact = case.sums_in_order and not case.layout.zero
    optimizer = "adam" if is_exact else "sgd-momentum"
    program = case.program(captured(name, optimizer))
    torch.manual_seed(seed)
    model, (_, args, kwargs) = example(name, 1)[0], example(name, case.layout.num_parts)
    parts = program.split(args, kwargs)
    unplaced = Unplaced.of(model, case.layout.data, optimizer)
    content = program.bind(model, args, kwargs)
    with start(program, case.order(program.graph), cpus(NUM_DEVICES)) as executor:
        executor.load(content)
        results = executor.results(executor.step(content, retain=True))
        expected = unplaced.step(parts, case.layout.microbatches)
        if results is not None:  # the first rank has them
            # a sum of n numbers in any order is off by (n - 1) / 2 roundings of the sum of their sizes at most
            bounds = {key: len(parts) * EPSILON * size for key, size in unplaced.magnitude.items()}
            check_first_step(results, expected, model, bounds, in_order=case.sums_in_order, is_exact=is_exact)
        for _ in range(NUM_STEPS - 1):
            record = executor.step(content)
            assert_only_kept(record.devices, program.graph)
            expected = unplaced.step(parts, case.layout.microbatches)
        states = program.state_by_name(executor.state()), dict(expected.state)
        if is_exact:
            assert_equal(*states)
        elif name not in NORMALISED:  # two samples are normalised to -1 and 1, which makes much of a rounding
            assert_near(*states, 1e-5)


def check_first_step(
    results: Replay, expected: Replay, model: nn.Module, bounds: dict[str, Tensor], *, in_order: bool, is_exact: bool
) -> None:
    """Loss and outputs are equal, gradients within `bounds`, and equal if `in_order`; states are if `is_exact`."""
    assert results.loss is not None
    assert expected.loss is not None
    assert torch.equal(results.loss, expected.loss)
    assert_equal(dict(results.outputs), dict(expected.outputs))
    gradients = dict(results.gradients), dict(expected.gradients)
    states = dict(results.state), dict(expected.state)
    if in_order:
        assert_equal(*gradients)
    assert_near(*gradients, bounds)
    first_names = {parameter: key for key, parameter in model.named_parameters()}
    aliases = model.named_parameters(remove_duplicate=False)
    bounds = {alias: bounds[key] for alias, tied in aliases if (key := first_names[tied]) in bounds}
    if is_exact:
        assert_equal(*states)
    else:
        assert_near(*states, {key: bounds_of_update(key, tensor, bounds) for key, tensor in states[1].items()})


def bounds_of_update(key: str, weight: Tensor, of_gradients: dict[str, Tensor]) -> Tensor:
    """Returns by how much a weight may differ after a step of SGD; buffers may not."""
    if key not in of_gradients:
        return torch.zeros_like(weight)
    return LEARNING_RATE * of_gradients[key] + 2 * EPSILON * weight.abs()


@pytest.mark.parametrize(("name", "seed", "start"), CASES)
def test_random_layouts_compute_what_pytorch_does(name: str, seed: int, start: Start) -> None:
    """Loss, outputs, gradients and three updates: bit for bit where sums have one order, else to rounding."""
    check(name, seed, start)


@pytest.mark.parametrize(
    "name", [marked(name, is_long=name in REPEATED and name != "gpt2") for name in MODELS if name not in NOT_A_MEAN]
)
def test_gradients_of_the_whole_batch(name: str) -> None:
    """Gradients of a layout are those of the whole batch."""
    case = drawn(name, 1)
    program = case.program(captured(name, "sgd-momentum"))
    model, (_, args, kwargs) = example(name, 1)[0], example(name, case.layout.num_parts)
    content = program.bind(model, args, kwargs)
    with host_executor(program, case.order(program.graph), cpus(NUM_DEVICES)) as executor:
        executor.load(content)
        results = executor.results(executor.step(content, retain=True))
    loss = model(*args, **kwargs)
    loss.backward()
    assert results.loss is not None
    torch.testing.assert_close(results.loss, loss.detach())
    for key, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(results.gradients[key], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "vit", "rnnlm"])
def test_draws_of_parts(name: str) -> None:
    """Each part draws what the step of one part draws with seeds behind those of the parts before."""
    found = capture(*tiny(name, 1), name=name)
    program = found.program
    for seed in range(2):
        case = Drawn.of(np.random.default_rng(seed), found.graph)
        step = case.program(found)
        model, (_, args, kwargs) = tiny(name, 1)[0], tiny(name, case.layout.num_parts)
        content, results = step.bind(model, args, kwargs), []
        for order in (case.order(step.graph), [np.arange(step.graph.num_ops)]):
            with host_executor(step, order, cpus(len(order))) as executor:
                executor.load(content)
                results.append(executor.results(executor.step(content, retain=True)))
        placed, alone = results
        for here, there in ((placed.outputs, alone.outputs), (placed.gradients, alone.gradients)):
            assert_equal(dict(here), dict(there))
        for part, inputs in enumerate(step.split(args, kwargs)):
            held, private = program.bind(model, *inputs), dict[int, Tensor]()
            for op in range(program.graph.num_ops):
                if op in program.sources:
                    held |= program.parts(op, held[program.sources[op].tensor])
                elif program.graph.phases[op] == "forward":
                    held |= program.run(op, held, private, seed=part * program.num_draws)
            loss = program.loss_of(held)
            assert loss is not None
            assert torch.equal(placed.outputs[f"@{part}"], loss)


@pytest.mark.long
@pytest.mark.parametrize("start", [host_executor, ThreadExecutor])
@pytest.mark.parametrize("name", MODELS)
def test_many_random_layouts(name: str, start: Start) -> None:
    """25 layouts of each model, by forked processes and by threads."""
    for seed in range(3, 28):
        check(name, seed, start)
