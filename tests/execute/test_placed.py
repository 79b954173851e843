"""Training by `gdp.placed` on cores of this machine: the bits of PyTorch's own loop, and its errors in one line."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gdp
from execute.placed_steps import randomly_placed
from gdp import Cluster, InputError, Plan, Problem, simulate
from gdp.execute.plan_executor import ExecutionError
from gdp.models.pytorch import capture
from gdp.search.question import plan_of


class Net(nn.Module):
    """Two towers with running statistics, and dropout if asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.left(x) - self.right(x)).square().mean()


def plan_of_net(dropout: float = 0.0, seed: int = 0, num_devices: int = 3) -> Plan:
    found = capture(Net(dropout), (torch.zeros(5, 6),), name="net")
    cluster = Cluster.parse(f"{num_devices}xp100-pcie-16g")
    simulation = randomly_placed(found, num_devices, seed)
    return plan_of(simulate(Problem.build(found.graph, cluster), simulation.placement), 0, "random", 0)


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(5, 6) for _ in range(count)]


def eager_losses(model: nn.Module, count: int, learning_rate: float = 1e-3) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True)
    losses = []
    for batch in batches(count):
        optimizer.zero_grad()
        loss = model(batch)
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
    return losses


def test_twenty_steps_have_the_same_bits() -> None:
    """Twenty placed steps have the bits of twenty unplaced ones."""
    torch.manual_seed(0)
    model, alone = Net(), Net()
    alone.load_state_dict(model.state_dict())
    expected = eager_losses(alone, 20, 0.01)
    with gdp.placed(model, plan_of_net(), on=["cpu"] * 3, learning_rate=0.01) as trained:
        losses = [trained(batch) for batch in batches(20)]
        state = trained.state_dict()
    assert [float(loss) for loss in losses] == [float(loss) for loss in expected]
    assert state.keys() == alone.state_dict().keys()
    for name, tensor in alone.state_dict().items():
        assert torch.equal(state[name], tensor), name
        assert torch.equal(model.state_dict()[name], tensor), f"{name} after close"


class HalfNet(nn.Module):
    """Two towers in bfloat16, a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(6, 4, dtype=torch.bfloat16) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        return (self.norm((self.left(x) * self.right(x)).float()) - 1).square().mean()


def placed_anywhere(model: nn.Module, **options: Any) -> gdp.Placed:
    """`model` on three devices, ops at random."""
    found = capture(model, (torch.zeros(5, 6),), name="net", **options)
    simulation = randomly_placed(found, 3, 0)
    problem = Problem.build(found.graph, Cluster.parse("3xp100-pcie-16g"))
    return gdp.placed(
        model, plan_of(simulate(problem, simulation.placement), 0, "random", 0), on=["cpu"] * 3, **options
    )


def adamw_with_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases do not; the learning rates are multiplied by 0.7 after each step."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.02, fused=True)


USERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW of two groups": adamw_with_two_groups,
    "AMSGrad": lambda model: torch.optim.Adam(model.parameters(), 0.02, amsgrad=True, weight_decay=0.1, fused=True),
    "Nesterov": lambda model: torch.optim.SGD(model.parameters(), 0.02, momentum=0.8, nesterov=True, fused=True),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 0.02, weight_decay=0.1),
    "AdamW of one tower": lambda model: torch.optim.AdamW(model.left.parameters(), 0.02, fused=True),
}


@pytest.mark.parametrize("make", USERS.values(), ids=USERS)
def test_schedulers_are_followed(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Six placed steps have the bits of six steps of the optimizer itself, whose learning rate falls all the time."""
    torch.manual_seed(0)
    model, alone = Net(), Net()
    alone.load_state_dict(model.state_dict())
    optimizer, unplaced = make(model), make(alone)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(item, 0.7) for item in (optimizer, unplaced)]
    with placed_anywhere(model, optimizer=optimizer) as trained:
        for batch in batches(6):
            loss, expected = trained(batch), alone(batch)
            assert torch.equal(loss, expected)
            unplaced.zero_grad()
            expected.backward()
            unplaced.step()
            optimizer.step()  # without gradients nothing happens; PyTorch wants it before the scheduler's
            for scheduler in schedulers:
                scheduler.step()
    for name, tensor in alone.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_compiled_model() -> None:
    """The module inside is trained, by an optimizer of the wrapper's parameters too."""
    model = torch.compile(Net(), backend="eager")
    before = model.left[0].weight.detach().clone()
    with placed_anywhere(model, optimizer=torch.optim.Adam(model.parameters(), fused=True)) as trained:
        trained(batches(1)[0])
        state = trained.state_dict()
    assert not torch.equal(model.left[0].weight, before)
    assert torch.equal(model.left[0].weight, state["left.0.weight"])


def test_master_weights() -> None:
    """A float32 copy of each bfloat16 parameter is updated by AdamW with widened gradients; loaded ones replace it."""
    torch.manual_seed(0)
    model, alone = HalfNet(), HalfNet()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    alone.load_state_dict(start)
    with placed_anywhere(model, optimizer="adamw", precision="mixed") as trained:
        trained(batches(1)[0])
        state = trained.optimizer_state_dict()
        trained.load_state_dict(start)
        zeros = {name: {key: tensor * 0 for key, tensor in parts.items()} for name, parts in state.items()}
        for name, parts in zeros.items():
            if "master" in parts:
                parts["master"] = start[name].float()
        assert sorted(name for name in zeros if "master" in zeros[name]) == [
            "left.bias",
            "left.weight",
            "right.bias",
            "right.weight",
        ]
        trained.load_optimizer_state_dict(zeros)
        masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in alone.named_parameters()}
        optimizer = torch.optim.AdamW(masters.values(), fused=True)
        for batch in batches(4):
            expected = alone(batch)
            assert torch.equal(trained(batch), expected)
            alone.zero_grad()
            expected.backward()
            for name, parameter in alone.named_parameters():
                masters[name].grad = parameter.grad.float()
            optimizer.step()
            for name, parameter in alone.named_parameters():
                parameter.data.copy_(masters[name])
        for name, parts in trained.optimizer_state_dict().items():
            assert torch.equal(parts.get("master", masters[name]), masters[name]), name
    for name, tensor in alone.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_loaded_parameters_become_master_weights() -> None:
    """Loading parameters replaces their float32 copies, or the next update would bring the old ones back."""
    torch.manual_seed(0)
    model, (batch,) = HalfNet(), batches(1)
    other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    with placed_anywhere(model, optimizer="sgd", precision="mixed") as trained:
        trained(batch)
        trained.load_state_dict(other)
        trained(batch)
        after = trained.state_dict()
    assert all(float((after[name].float() - other[name].float()).abs().max()) < 0.1 for name in other)


def test_bad_optimizers() -> None:
    """A wrong optimizer is one line before the first step, and nothing has changed."""
    model, plan = Net(), plan_of_net()
    cases = {
        "optimizer is a RMSprop": {"optimizer": torch.optim.RMSprop(model.parameters())},
        "not the model's": {"optimizer": torch.optim.AdamW(Net().parameters())},
        "leave learning_rate out": {"optimizer": torch.optim.AdamW(model.parameters()), "learning_rate": 0.1},
        "optimizer is 'lion'": {"optimizer": "lion"},
        "master weights need the name": {"optimizer": torch.optim.AdamW(model.parameters()), "precision": "mixed"},
    }
    for message, options in cases.items():
        with pytest.raises(InputError, match=message):
            gdp.placed(model, plan, on=["cpu"] * 3, **options)


def test_a_smaller_last_batch() -> None:
    """`DataLoader` without `drop_last` ends an epoch with fewer samples; training goes on afterwards."""
    with gdp.placed(Net(), plan_of_net(), on=["cpu"] * 3) as trained:
        trained(batches(1)[0])
        with pytest.raises(InputError, match=r"'input.0' has 2 samples, and steps of 5 are placed: .* drop_last=True"):
            trained(torch.zeros(2, 6))
        trained(batches(1)[0])
        assert trained.num_steps == 2


def test_training_goes_on_from_saved_state() -> None:
    """Training goes on from a saved state as if it had not stopped."""
    torch.manual_seed(0)
    model, plan = Net(), plan_of_net(seed=1)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with gdp.placed(model, plan, on=["cpu"] * 3) as trained:
        losses = [trained(batch) for batch in batches(8)]
    other = Net()
    other.load_state_dict(first)
    with gdp.placed(other, plan, on=["cpu"] * 3) as trained:
        for batch in batches(4):
            trained(batch)
        saved, optimizer = trained.state_dict(), trained.optimizer_state_dict()
    with gdp.placed(Net(), plan_of_net(seed=2), on=["cpu"] * 3) as trained:
        trained(batches(1)[0])
        trained.load_state_dict(saved)
        trained.load_optimizer_state_dict(optimizer)
        again = [trained(batch) for batch in batches(8)[4:]]
    assert list(map(float, again)) == list(map(float, losses[4:]))


def test_a_loaded_state_is_written_back_without_a_step(tmp_path: Path) -> None:
    """`close` writes what `resume` and `load_state_dict` have loaded."""
    model, path = Net(), tmp_path / "begun.safetensors"
    with gdp.placed(model, plan_of_net(), on=["cpu"] * 3) as trained:
        trained.save(path)
    for resume in (path, None):
        other = Net()
        with gdp.placed(other, plan_of_net(), on=["cpu"] * 3, resume=resume) as trained:
            if resume is None:
                trained.load_state_dict(model.state_dict())
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_dropout() -> None:
    """Dropout differs from step to step, but not from placement to placement."""
    torch.manual_seed(0)
    model = Net(0.5)
    runs = []
    for seed in range(2):
        with gdp.placed(Net(0.5), plan_of_net(0.5, seed), on=["cpu"] * 3) as trained:
            trained.load_state_dict(model.state_dict())
            same = batches(1)[0]
            runs.append([float(trained(same)) for _ in range(4)])
    assert runs[0] == runs[1]
    with gdp.placed(Net(0.5), plan_of_net(0.5), on=["cpu"] * 3, learning_rate=1e-30) as trained:
        losses = {float(trained(batches(1)[0])) for _ in range(4)}
    assert len(losses) == 4


def test_changed_modes() -> None:
    """A step in another mode, or of other trained parameters, is refused until all is as it was."""
    model = Net(0.5)
    frozen = model.left[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in model.parameters() if each is not frozen], fused=True)
    (batch,) = batches(1)
    with placed_anywhere(model, optimizer=optimizer) as trained:
        trained(batch)
        for change in (model.eval, lambda: frozen.requires_grad_(True)):
            change()
            with pytest.raises(InputError, match=r"requires_grad .* evaluate a copy of the model"):
                trained(batch)
            model.train()
        frozen.requires_grad_(False)
        trained(batch)
        optimizer.add_param_group({"params": [frozen]})
        with pytest.raises(InputError, match="the optimizer's parameters have changed"):
            trained(batch)


def test_seeds() -> None:
    """Seeds set runs apart, and steps can be taken up again."""
    plan, batch = plan_of_net(0.5), batches(1)[0]
    torch.manual_seed(0)
    state = Net(0.5).state_dict()

    def losses(seed: int, first: int, count: int) -> list[float]:
        with gdp.placed(Net(0.5), plan, on=["cpu"] * 3, learning_rate=1e-30, seed=seed) as trained:
            trained.load_state_dict(state)
            trained.num_steps = first
            return [float(trained(batch)) for _ in range(count)]

    assert len({*losses(0, 0, 5), *losses(1, 0, 5)}) == 10
    assert losses(0, 3, 2) == losses(0, 0, 5)[3:]
    for seed in (-1, 2**63, 0.5):
        with pytest.raises(InputError, match=r"seed is .*; an integer from 0 to 2\^63 - 1 is expected"):
            losses(seed, 0, 1)  # type: ignore[arg-type]


def test_a_seed_of_numpy_is_saved(tmp_path: Path) -> None:
    """It is an integer as others are."""
    path = tmp_path / "begun.safetensors"
    with gdp.placed(Net(), plan_of_net(), on=["cpu"] * 3, seed=np.int64(3)) as trained:  # type: ignore[arg-type]
        trained.save(path)
    gdp.placed(Net(), plan_of_net(), on=["cpu"] * 3, resume=path).close()


class Cached(nn.Module):
    """With a buffer that is in no state dict, a plain tensor, and an argument that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.plain = torch.zeros(3)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        self.seen.add_(x.sum(0))
        self.plain.add_(1)
        return (scale * self.linear(x)).square().mean()


def test_close_writes_back() -> None:
    """`close` writes back all that a step changes, and other arguments are refused."""
    torch.manual_seed(0)
    model, x = Cached(), torch.randn(4, 3)
    graph = capture(model, (x, 2.0), name="cached").graph
    plan = gdp.place(graph, Cluster.parse("2xp100-pcie-16g"), budget="20sims")
    with gdp.placed(model, plan, on=["cpu"] * 2) as trained:
        for _ in range(3):
            trained(x, 2.0)
        with pytest.raises(InputError, match="no tensors differ from those of the first call"):
            trained(x, 3.0)
        with pytest.raises(InputError, match="no tensors differ"):
            trained(x, 2.0, x)
    torch.testing.assert_close(model.seen, 3 * x.sum(0))
    assert model.plain.tolist() == [3.0] * 3
    with pytest.raises(ExecutionError, match="closed"):
        trained(x, 2.0)


@dataclass
class Masked:
    """The inputs of a step, one of which may be left out."""

    x: Tensor
    mask: Tensor | None = None


class OfMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: Masked) -> Tensor:
        x = inputs.x if inputs.mask is None else inputs.x * inputs.mask
        return self.linear(x).square().mean()


def test_inputs_in_a_dataclass() -> None:
    """Each step takes another dataclass of tensors, and refuses a tensor where the first one had None."""
    model, x = OfMasked(), torch.randn(4, 3)
    plan = gdp.place((model, (Masked(x),)), "2xp100-pcie-16g", parallel="none", budget="20sims")
    with gdp.placed(model, plan, on=["cpu"] * 2, learning_rate=1e-30) as trained:
        for each in (x, x + 1):
            torch.testing.assert_close(trained(Masked(each)), model(Masked(each)).detach())
        with pytest.raises(InputError, match="no tensors differ"):
            trained(Masked(x, torch.zeros(4, 3)))


def test_bad_states() -> None:
    """A state that does not fit changes nothing."""
    with gdp.placed(Net(), plan_of_net(), on=["cpu"] * 3) as trained:
        for _ in range(2):  # before the first step, and after
            before = trained.state_dict()
            for bad in ({}, {**before, "left.0.bias": torch.zeros(2)}, {**before, "more": torch.zeros(2)}):
                with pytest.raises(InputError, match="state '"):
                    trained.load_state_dict(bad)
            assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())
            trained(batches(1)[0])
        moments = trained.optimizer_state_dict()
        name, tensors = next(iter(moments.items()))
        for worse in ({name: {**tensors, "exp_avg": torch.ones(1)}}, {name: {}}, {"other": tensors}):
            with pytest.raises(InputError, match="optimizer state"):
                trained.load_optimizer_state_dict(worse)
        again = trained.optimizer_state_dict()
        assert all(torch.equal(again[key][what], moments[key][what]) for key in moments for what in moments[key])


@torch.library.custom_op("gdp_tests::breaks", mutates_args=())
def breaks(x: Tensor) -> Tensor:
    if x.sum() < 0:
        raise KeyError("breaks")
    return x.clone()


@breaks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(breaks(x)).sum()


def test_failed_steps() -> None:
    """A failed step leaves the model as it was."""
    model = Breaking()
    before = model.linear.weight.detach().clone()
    plan = gdp.place(
        capture(model, (torch.ones(2, 3),), name="b").graph, Cluster.parse("2xp100-pcie-16g"), budget="9sims"
    )
    with gdp.placed(model, plan, on=["cpu"] * 2) as trained:
        trained(torch.ones(2, 3))
        with pytest.raises(ExecutionError, match="breaks"):
            trained(-torch.ones(2, 3))
        for call in (trained.state_dict, lambda: trained(torch.ones(2, 3))):
            with pytest.raises(ExecutionError, match="half a step"):
                call()
    assert torch.equal(model.linear.weight, before)


def test_arguments_of_other_types_are_named() -> None:
    """Before the first step: a path in place of a plan, text for a number, a number for a path."""
    with pytest.raises(InputError, match=r"plan is a str; .* gdp\.Plan\.load"):
        gdp.placed(Net(), "plan.json")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="learning_rate is 'high'"):
        gdp.placed(Net(), plan_of_net(), on=["cpu"] * 3, learning_rate="high")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="resume is a int"):
        gdp.placed(Net(), plan_of_net(), on=["cpu"] * 3, resume=5)  # type: ignore[arg-type]


def test_plans_of_other_steps() -> None:
    """A plan of another step is refused."""
    with gdp.placed(Net(), plan_of_net(), on=["cpu"] * 3) as trained, pytest.raises(InputError, match="place it anew"):
        trained(torch.zeros(4, 6))
    trained = gdp.placed(Net(), plan_of_net(), on=["cpu"] * 3, optimizer="sgd")
    with pytest.raises(InputError, match="the optimizer"):
        trained(torch.zeros(5, 6))
