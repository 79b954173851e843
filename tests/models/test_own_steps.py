"""A training step of the user's: captured with its own optimizers, as it is written, with the bits that it computes."""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gdp
from gdp import InputError
from gdp.cli import main
from gdp.graph import Graph
from gdp.graph.held_memory import HeldMemory
from gdp.models.pytorch import Capture, capture, capture_fn

Built = tuple[Callable[..., Any], tuple[Any, ...]]


def mlp() -> nn.Sequential:
    """32 x 40 + 40 and 40 x 10 + 10 = 1,730."""
    return nn.Sequential(nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 10))


NUM_PARAMETERS = 32 * 40 + 40 + 40 * 10 + 10


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 32), torch.randint(10, (8,))


def adamw() -> Built:
    """AdamW with weight decay and a schedule; the loss is printed."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"{loss:.3f} {loss.item() / 2 + 1:.3f}")
        return loss

    return step, batch()


def accumulating() -> Built:
    """Four micro-batches, clipping by norm, SGD with momentum on the second layer, the first one frozen."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = functional.cross_entropy(model(part_x), part_y) / 4
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, batch()


def gan() -> Built:
    """Two networks with an optimizer each; the generator is trained against the discriminator that was just updated."""
    generator, discriminator = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizers = {
        "generator": torch.optim.Adam(generator.parameters(), betas=(0.5, 0.9), fused=True),
        "discriminator": torch.optim.Adam(discriminator.parameters(), 0.1, fused=True),
    }
    criterion = nn.BCEWithLogitsLoss()

    def step(real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = generator(noise)
        optimizers["discriminator"].zero_grad()
        good, bad = discriminator(real), discriminator(fake.detach())
        loss = criterion(good, torch.ones_like(good)) + criterion(bad, torch.zeros_like(bad))
        loss.backward()
        optimizers["discriminator"].step()
        optimizers["generator"].zero_grad()
        verdict = discriminator(fake)
        cost = criterion(verdict, torch.ones_like(verdict))
        cost.backward()
        optimizers["generator"].step()
        return {"discriminator": loss, "generator": cost}

    return step, (torch.randn(3, 6), torch.randn(3, 4))


STEPS: dict[str, Callable[[], Built]] = {"adamw": adamw, "accumulating": accumulating, "gan": gan}


def modules_of(step: Any) -> dict[str, nn.Module]:
    """The modules in the closure of `step` that have parameters, under the names of the capture."""
    cells = zip(step.__code__.co_freevars, step.__closure__, strict=True)
    found = {name: cell.cell_contents for name, cell in cells if isinstance(cell.cell_contents, nn.Module)}
    found = {name: module for name, module in found.items() if list(module.parameters())}
    return found if len(found) > 1 else dict(zip([""], found.values(), strict=True))


def state_of(step: Any) -> dict[str, Tensor]:
    """Copies of all parameters, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): tensor.clone()
        for prefix, module in modules_of(step).items()
        for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize("name", STEPS)
def test_captured_steps_have_the_same_bits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded program, replayed, returns and updates what the step does; capturing has changed nothing."""
    torch.manual_seed(0)
    step, args = STEPS[name]()
    before = state_of(step)
    found = capture(step, args, name=name)
    assert all(torch.equal(tensor, before[key]) for key, tensor in state_of(step).items())
    assert all(p.grad is None for module in modules_of(step).values() for p in module.parameters())
    replay = found.program.replay(before, args)
    answer = step(*args)
    expected = answer if isinstance(answer, dict) else {"": answer}
    assert replay.outputs.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(replay.outputs[key], tensor.detach()), key
    for key, tensor in state_of(step).items():
        assert torch.equal(replay.state[key], tensor), key


def test_a_step_costs_what_the_option_costs() -> None:
    """The step by hand, and the module with `--optimizer adamw`, are one graph."""

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(self.model(x), y)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
            return {"loss": self(*batch)}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

    class Plain(Trained):
        configure_optimizers = None

    option = capture(Plain(), batch(), name="model", optimizer="adamw").graph
    assert capture(Trained(), batch(), name="model").graph.fingerprint == option.fingerprint
    assert capture_fn(lambda: (Trained(), batch()), name="model").graph.fingerprint == option.fingerprint
    by_hand = capture_fn(adamw, name="model").graph
    assert (by_hand.num_ops, by_hand.flops.sum()) == (option.num_ops, option.flops.sum())
    assert by_hand.bytes_accessed.sum() == option.bytes_accessed.sum()
    assert HeldMemory.of(by_hand) == HeldMemory.of(option) == HeldMemory(4 * NUM_PARAMETERS, 8 * NUM_PARAMETERS, 0)


def updates(graph: Graph) -> list[int]:
    return [op for op in range(graph.num_ops) if graph.op_names[op].endswith(".update")]


def test_frozen_parts_and_clipping() -> None:
    """Momentum of the second layer alone, 410 x 4 bytes; 3 additions of gradients for each of its two parameters.

    Clipping by norm reads both gradients (1,640 bytes, and a norm of 4 bytes each), and scales them in place.
    """
    graph = capture_fn(accumulating, name="model").graph
    assert HeldMemory.of(graph) == HeldMemory(4 * NUM_PARAMETERS, 4 * 410, 0)
    assert [graph.op_names[op] for op in updates(graph)] == ["2.weight.update", "2.bias.update"]
    sums = [op for op in range(graph.num_ops) if graph.kinds[op] in ("aten.add", "aten.add_")]
    sums = [op for op in sums if graph.phases[op] == "backward"]
    assert sorted(graph.flops[sums].tolist()) == [10, 10, 10, 400, 400, 400]
    norms = [op for op in range(graph.num_ops) if graph.kinds[op] == "aten.linalg_vector_norm"]
    assert sorted(graph.bytes_accessed[norms].tolist()) == [4 + 8, 44, 1604]
    scaled = [op for op in range(graph.num_ops) if graph.kinds[op] == "aten.mul_"]
    assert sorted(graph.bytes_accessed[scaled].tolist()) == [84, 3204]
    assert {graph.phases[op] for op in (*norms, *scaled)} == {"update"}
    assert {graph.modules[op] for op in scaled} == {"2"}


def test_two_networks() -> None:
    """The second pass through the discriminator reads what its update wrote; each network has its own state."""
    graph = capture_fn(gan, name="gan").graph
    assert [graph.modules[op] for op in updates(graph)] == ["discriminator.0"] * 2 + ["discriminator.2"] * 2 + [
        "generator"
    ] * 2
    update = graph.op_names.index("discriminator.0.weight.update")
    readers = {op for tensor in np.flatnonzero(graph.producers == update) for op in graph.consumers_of(tensor).tolist()}
    assert {graph.phases[op] for op in readers} == {"forward", "backward"}
    count = (4 * 6 + 6) + (6 * 5 + 5) + (5 + 1)
    assert HeldMemory.of(graph) == HeldMemory(4 * count, 8 * count, 0)


def test_gradient_scalers() -> None:
    """`GradScaler("cuda")` is enabled in a MODEL function without a GPU; 4 gradients, one product each."""

    def build(is_enabled: bool) -> Built:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=is_enabled)
        assert scaler.is_enabled() == is_enabled

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

        return step, batch()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled, plain = (capture_fn(lambda on=on: build(on), name="model").graph for on in (True, False))
    more = Counter(scaled.kinds) - Counter(plain.kinds)
    assert more == {"aten.mul_": 4, "aten.mul": 2}  # the gradients; the loss and its gradient
    products = [op for op in range(scaled.num_ops) if scaled.kinds[op] == "aten.mul_"]
    assert scaled.bytes_accessed[products].sum() == 8 * NUM_PARAMETERS


@pytest.mark.parametrize(
    ("kind", "moments"), [(torch.optim.RMSprop, 1), (torch.optim.NAdam, 2), (torch.optim.RAdam, 2)]
)
def test_other_optimizers(kind: type[Any], moments: int) -> None:
    """Their state is held beside the parameters, on the device of each; a note says that no kernel is assumed."""

    def build() -> Built:
        model = mlp()
        optimizer = kind(model.parameters())

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step, batch()

    found = capture_fn(build, name="model")
    graph = found.graph
    assert HeldMemory.of(graph) == HeldMemory(4 * NUM_PARAMETERS, 4 * moments * NUM_PARAMETERS, 0)
    assert not found.coverage.unknown
    assert found.notes == (f"{kind.__name__} is counted operator by operator, as its code runs, not as one kernel",)
    for name in ("0.weight", "2.bias"):
        writers = np.flatnonzero(graph.groups == graph.groups[graph.op_names.index(name)])[1:]
        assert {graph.phases[op] for op in writers} == {"update"}
        assert {graph.modules[op] for op in writers} == {name[0]}


class Manual(nn.Module):
    """A module that steps its two optimizers itself, as Lightning's manual optimization."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def training_step(self, batch: Tensor) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        loss = self.second(self.first(batch)).square().mean()
        self.manual_backward(loss)
        first.step()
        second.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.AdamW(self.second.parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of PyTorch's own, when it imports its compiler
def test_trainer_objects() -> None:
    """`torch.compile` is left out; averaging reads what was updated and counts with the updates.

    The average is 1,730 further parameters without optimizer state.
    """

    class Trainer:
        def __init__(self) -> None:
            self.model, self.average = torch.compile(mlp()), mlp().requires_grad_(False)
            self.optimizers = {"all": torch.optim.AdamW(self.model.parameters())}

        def step(self, x: Tensor, y: Tensor) -> None:
            self.optimizers["all"].zero_grad()
            functional.cross_entropy(self.model(x), y).backward()
            self.optimizers["all"].step()
            with torch.no_grad():
                for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)

    graph = capture_fn(lambda: (Trainer().step, batch()), name="trainer").graph
    assert HeldMemory.of(graph) == HeldMemory(2 * 4 * NUM_PARAMETERS, 8 * NUM_PARAMETERS, 0)
    assert {name for name, kind in zip(graph.op_names, graph.kinds, strict=True) if kind == "parameter"} == {
        f"{owner}.{path}" for owner in ("model", "average") for path, _ in mlp().named_parameters()
    }
    averaging = [op for op in range(graph.num_ops) if graph.kinds[op] == "aten.lerp_"]
    assert [graph.phases[op] for op in averaging] == ["update"] * 4


def test_a_module_may_step_its_optimizers_itself() -> None:
    """SGD has no state, AdamW two moments of 4 x 2 + 2 elements."""
    model = Manual()
    graph = capture(model, (torch.randn(5, 3),), name="manual").graph
    assert [graph.kinds[op] for op in updates(graph)] == ["aten._fused_sgd_"] * 2 + ["aten._fused_adamw_"] * 2
    assert HeldMemory.of(graph).optimizer_state_bytes == 8 * 10
    assert not {"optimizers", "manual_backward", "log"} & vars(model).keys()


SCRIPT = """
import torch
from torch import nn

model = nn.Linear(64, 64)
optimizer = torch.optim.Adadelta(model.parameters())

def train(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

def training():
    return train, (torch.randn(16, 64),)

def deciding():
    def step(x):
        if train(x) > 2:
            raise ValueError("diverged")
    return step, (torch.randn(16, 64),)

def forward():
    return lambda x: model(x), torch.randn(16, 64)

def two():
    class Two(nn.Module):
        def training_step(self, batch): ...
        def configure_optimizers(self): return optimizer, optimizer
    return Two(), torch.randn(16, 64)
"""


@pytest.fixture
def _module(workplace: Path) -> None:
    """Writes the script of the tests."""
    (workplace / "own_step_script.py").write_text(SCRIPT)


@pytest.mark.usefixtures("_module")
def test_a_script_whose_model_is_global_is_placed(capsys: pytest.CaptureFixture[str]) -> None:
    """Adadelta keeps two values for each of 64 x 64 + 64 parameters; the model of the script is as it was."""
    command = ["place", "own_step_script:training", "--devices", "2xcpu-16core", "--budget", "9sims", "--no-advice"]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    graph = json.loads(printed.out)["graph"]
    assert (graph["parameter_bytes"], graph["optimizer_state_bytes"]) == (4 * 4160, 8 * 4160)
    assert "gdp: note: Adadelta is counted operator by operator" in printed.err
    script = sys.modules["own_step_script"]
    assert type(script.model.weight) is nn.Parameter
    assert script.model.weight.grad is None
    assert not script.optimizer.state
    assert isinstance(script.train(torch.randn(16, 64)), float)


CASES = {
    "deciding": ([], "the step decides by a number from a tensor"),
    "forward": ([], "the step updates no parameters"),
    "two": ([], "configure_optimizers() returns 2 optimizers; one is expected"),
    "training": (["--optimizer", "adamw"], "is a training step of your own, which has its optimizers in it"),
    "training ": (["--inference"], "is a training step of your own; give its module for inference"),
    "training  ": (["--microbatches", "2"], "is a training step of your own, which is not split"),
}


@pytest.mark.usefixtures("_module")
@pytest.mark.parametrize("name", CASES)
def test_steps_that_cannot_be_captured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, one line that names MODEL, no file."""
    options, message = CASES[name]
    assert main(["capture", f"own_step_script:{name.strip()}", "--out", "graph.json", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("gdp: error")]
    assert message in line
    assert f"own_step_script:{name.strip()}" in line
    assert not Path("graph.json").exists()


@pytest.mark.usefixtures("_module")
def test_an_own_step_is_placed_not_executed(capsys: pytest.CaptureFixture[str]) -> None:
    """`gdp run` and `gdp.placed` say so in one line."""
    assert main(["place", "own_step_script:training", "--devices", "2xcpu-16core", "--budget", "9sims"]) == 0
    capsys.readouterr()
    assert main(["run", "own_step_script:training", "--plan", "plan.json", "--on", "cpu,cpu"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gdp: error")]
    assert "the step is placed, not executed: it is a step of your own" in line
    step, _ = adamw()
    with pytest.raises(InputError, match=r"is a function; gdp\.placed takes a module"):
        gdp.placed(step, gdp.Plan.load("plan.json"), on=["cpu"] * 2)  # type: ignore[arg-type]


def test_execution_is_refused() -> None:
    """The reason is with the program."""
    found: Capture = capture(*adamw(), name="model")
    assert found.program.refusal == "it is a step of your own; give its module with --optimizer to execute it"
