"""Training by a plan with a layout follows plain PyTorch, and a state saved in one layout goes on in any other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gdp
from gdp import Cluster, InputError, Plan, Problem, simulate
from gdp.execute.layouts.batch import split_inputs
from gdp.execute.plan_executor import ExecutionError
from gdp.models.pytorch import capture
from gdp.models.pytorch.cards import as_if_on_a_card
from gdp.parallel.layout import Layout
from gdp.parallel.rings import rings_over
from gdp.parallel.step import Step
from gdp.search.question import plan_of

Batch = tuple[Tensor, ...]
Build = Callable[[], nn.Module]


class Mlp(nn.Module):
    """Two hidden layers, one with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 10), nn.Tanh())
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.layers(x)), y)


class Encoder(nn.Module):
    """A transformer encoder that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.layers(self.embedding(x)).mean(1)), y)


class Recurrent(nn.Module):
    """A GRU over time, that predicts the sequence's class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(11, 8), nn.GRUCell(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 8)
        for step in range(x.shape[1]):
            state = self.cell(self.embedding(x[:, step]), state)
        return cross_entropy(self.head(state), y)


class Decoder(nn.Module):
    """A causal transformer whose output weights are those of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, _y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1] - 1)
        hidden = self.layer(self.embedding(x[:, :-1]), src_mask=mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), x[:, 1:].flatten())


def points(size: int) -> Batch:
    """A batch of points with classes."""
    return torch.randn(size, 6), torch.randint(3, (size,))


def wide_mlp() -> nn.Module:
    """Returns an MLP in float64: a batch norm of two samples makes much of little, and float32 rounds too much."""
    return Mlp().double()


def wide_points(size: int) -> Batch:
    x, y = points(size)
    return x.double(), y


def sequences(size: int) -> Batch:
    """A batch of sequences with classes."""
    return torch.randint(11, (size, 5)), torch.randint(3, (size,))


def batches(make: Callable[[int], Batch], number: int, size: int = 8) -> list[Batch]:
    torch.manual_seed(7)
    return [make(size) for _ in range(number)]


def built(build: Build) -> nn.Module:
    torch.manual_seed(0)
    return build()


def planned(model: nn.Module, batch: Batch, text: str, kind: str = "p100-pcie-16g", **options: Any) -> Plan:
    """A plan of the step of `model` in a layout: a replica on each device, or ops of one replica on two at random."""
    layout = Layout.parse(text)
    args, _ = next(split_inputs(batch, {}, layout.num_parts))
    found = capture(model, [tensor.clone() for tensor in args], name="step", **options)
    cluster = Cluster.parse(f"{max(layout.data, 2)}x{kind}")
    step = Step.of(found.graph, layout, **rings_over(cluster, np.arange(layout.data)[:, None], layout))
    groups, random = step.graph.groups, np.random.default_rng(0)
    if layout.data > 1:
        placement = step.placement(np.zeros(found.graph.num_ops, np.int64), np.arange(layout.data)[:, None])
    else:
        placement = random.integers(0, 2, step.graph.num_ops)
        for group in set(groups[groups >= 0].tolist()):
            placement[groups == group] = random.integers(0, 2)
    problem = Problem.build(step.graph, cluster)
    return replace(plan_of(simulate(problem, placement), 0, "given", 0), layout=step.document())


def placed(
    model: nn.Module,
    batch: Batch,
    text: str,
    *,
    optimizer: Any = "adam",
    precision: str = "",
    plan: Plan | None = None,
    **others: Any,
) -> gdp.Placed:
    """`model` on the devices of a plan in a layout, all of them any core; `plan` is what `planned` makes of it."""
    plan = plan or planned(model, batch, text, optimizer=optimizer, precision=precision)
    on = ["cpu"] * len(plan.devices)
    return gdp.placed(model, plan, on=on, optimizer=optimizer, precision=precision, **others)


def eager_step(model: nn.Module, batch: Batch, num_parts: int, clip_norm: float | None = None) -> Tensor:
    """Makes the gradients of the mean loss of the parts of a batch, one part after the other, and clips them."""
    model.zero_grad()
    losses = []
    for args, _ in split_inputs(batch, {}, num_parts):
        with as_if_on_a_card():  # a captured step has the kernels of cards
            loss = model(*args)
            (loss / num_parts).backward()
        losses.append(loss.detach())
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    return torch.stack(losses).mean()


def scheduled(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the learning rate of a step: it rises for ten of them, and falls then."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("top", group["lr"]) * min((step + 1) / 10, 10 / (step + 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.1, fused=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.8, weight_decay=0.01, fused=True)


NUM_STEPS, HALF = 12, 6
LAYOUTS = ("microbatches=4", "data=2,microbatches=1:3,zero=1", "data=4,zero=3")
"""Of four parts each. The first adds gradients as PyTorch does, part after part; the others in other orders."""
ROUNDING = 2e-3  # relative, of a loss after up to 12 updates: float32 sums in another order, passed on by each update

MODELS: dict[str, tuple[Build, Callable[[int], Batch], Callable[[nn.Module], torch.optim.Optimizer], float | None]] = {
    "batch norm": (wide_mlp, wide_points, sgd, None),
    "encoder": (Encoder, sequences, adamw, None),
    "recurrent": (Recurrent, sequences, adam, 0.5),
    "tied decoder": (Decoder, sequences, adam, None),
}


@cache
def plan_of_model(name: str, text: str) -> Plan:
    """Returns the plan of a model of MODELS in a layout, which several trainings run by."""
    build, make, optimizer_of, _ = MODELS[name]
    model = built(build)
    return planned(model, batches(make, 1)[0], text, optimizer=optimizer_of(model))


def trained_on(
    name: str, text: str, path: Path | None = None, resume: Path | None = None, steps: Sequence[int] = range(NUM_STEPS)
) -> list[float]:
    """Trains a model of MODELS in a layout, and saves it when half of the steps are done."""
    build, make, optimizer_of, clip_norm = MODELS[name]
    model, data = built(build), batches(make, NUM_STEPS)
    optimizer = optimizer_of(model)
    losses = []
    options = {"optimizer": optimizer, "clip_norm": clip_norm, "resume": resume}
    with placed(model, data[0], text, plan=plan_of_model(name, text), **options) as trained:
        for step in steps:
            assert trained.num_steps == step
            if path is not None and step == HALF:
                trained.save(path)
            scheduled(optimizer, step)
            losses.append(float(trained(*data[step])))
    return losses


def plain_losses(name: str, num_parts: int, *, trains: bool = True) -> list[float]:
    build, make, optimizer_of, clip_norm = MODELS[name]
    model = built(build)
    optimizer = optimizer_of(model)
    losses = []
    for step, batch in enumerate(batches(make, NUM_STEPS)):
        scheduled(optimizer, step)
        losses.append(float(eager_step(model, batch, num_parts, clip_norm)))
        if trains:
            optimizer.step()
    return losses


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "encoder")) for name in MODELS]
)
def test_trainings_in_three_layouts(name: str, tmp_path: Path) -> None:
    """Losses of the first layout are bit for bit PyTorch's; saved states go on in the same layout to the bit."""
    expected = plain_losses(name, 4)
    assert not np.allclose(expected, plain_losses(name, 4, trains=False), rtol=10 * ROUNDING)
    if name != "batch norm":  # which normalises each part by itself
        np.testing.assert_allclose(expected, plain_losses(name, 1), rtol=ROUNDING)
    for number, text in enumerate(LAYOUTS):
        path = tmp_path / f"{number}.safetensors"
        losses = trained_on(name, text, path)
        if number == 0:
            assert losses == expected
        np.testing.assert_allclose(losses, expected, rtol=ROUNDING, err_msg=text)
        rest = range(HALF, NUM_STEPS)
        assert trained_on(name, text, resume=path, steps=rest) == losses[HALF:], text
        other = LAYOUTS[(number + 1) % len(LAYOUTS)]
        again = trained_on(name, other, resume=path, steps=rest)
        np.testing.assert_allclose(again, expected[HALF:], rtol=ROUNDING, err_msg=f"{text} to {other}")


class Joined(nn.Module):
    """Two weights that are joined into one, so that their gradients are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(2 * x @ torch.cat([self.first, self.second]), y)


class Normed(nn.Module):
    """Layers of a type, and a norm in float32."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).to(dtype)
        self.norm, self.dtype = nn.LayerNorm(3), dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.norm(self.layers(x.to(self.dtype)).float()), y)


def half() -> nn.Module:
    """Layers in bfloat16, a norm in float32."""
    return Normed(torch.bfloat16)


class Autocast(nn.Module):
    """Layers that run in bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.layers(x)
        return cross_entropy(out.float(), y)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases do not."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": others, "lr": 0.05}], fused=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW of two groups": two_groups,
    "AMSGrad": lambda model: torch.optim.Adam(model.parameters(), 0.02, amsgrad=True, weight_decay=0.1, fused=True),
    "Nesterov": lambda model: torch.optim.SGD(model.parameters(), 0.02, momentum=0.8, nesterov=True, fused=True),
    "plain SGD": lambda model: torch.optim.SGD(model.parameters(), 0.02, weight_decay=0.1, fused=True),
}
OF_TWO = ("microbatches=2", "data=2", "data=2,zero=1", "data=2,zero=2", "data=2,zero=3")
"""Of two parts each, of which there is one sum."""
QUICK = ("data=2", "data=2,zero=2")  # whole parameters, and pieces


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, marks=[pytest.mark.long] * (name != "AdamW of two groups" and text not in QUICK))
        for name in OPTIMIZERS
        for text in OF_TWO
    ],
)
def test_schedulers_reach_all_replicas(name: str, text: str) -> None:
    """One cycle of learning rates and momentums: parameters are bit for bit those of the optimizer itself.

    With ZeRO, to rounding: Adam's kernel has other instructions for the last elements of a piece.
    """
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if "zero" in text else {"rtol": 0.0, "atol": 0.0}
    model, alone = built(Autocast), built(Autocast)
    optimizer, unplaced = OPTIMIZERS[name](model), OPTIMIZERS[name](alone)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(item, 0.1, 8, cycle_momentum=name != "plain SGD")
        for item in (optimizer, unplaced)
    ]
    data = batches(points, 6)
    with placed(model, data[0], text, optimizer=optimizer) as trained:
        for batch in data:
            torch.testing.assert_close(trained(*batch), eager_step(alone, batch, 2), **tolerance)
            unplaced.step()
            optimizer.step()  # without gradients nothing happens; PyTorch wants it before the scheduler's
            for scheduler in schedulers:
                scheduler.step()
    for parameter, tensor in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[parameter], tensor, **tolerance)


@pytest.mark.parametrize("text", OF_TWO)
def test_master_weights_in_every_layout(text: str) -> None:
    """Float32 copies follow AdamW; parameters that are loaded replace the copies of all replicas."""
    model, alone = built(half), built(half)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = batches(points, 4)
    with placed(model, data[0], text, optimizer="adamw", precision="mixed") as trained:
        trained(*data[0])
        state = trained.optimizer_state_dict()
        assert {name for name in state if "master" in state[name]} == {n for n in start if n.startswith("layers")}
        trained.load_optimizer_state_dict({n: {k: t * 0 for k, t in parts.items()} for n, parts in state.items()})
        trained.load_state_dict(start)
        masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in alone.named_parameters()}
        optimizer = torch.optim.AdamW(masters.values(), fused=True)
        for batch in data:
            assert torch.equal(trained(*batch), eager_step(alone, batch, 2))
            for name, parameter in alone.named_parameters():
                masters[name].grad = parameter.grad.float()
            optimizer.step()
            for name, parameter in alone.named_parameters():
                parameter.data.copy_(masters[name])
        for name, parts in trained.optimizer_state_dict().items():
            assert torch.equal(parts.get("master", masters[name]), masters[name]), name
            assert torch.equal(parts["exp_avg"], optimizer.state[masters[name]]["exp_avg"]), name


@pytest.mark.parametrize(
    ("text", "build"),
    [
        pytest.param(text, build, marks=[pytest.mark.long] * (build is half and text not in QUICK))
        for text in ("microbatches=1", *OF_TWO)
        for build in (Normed, Joined, half)
    ],
)
def test_clipping(text: str, build: Build) -> None:
    """Bit for bit as PyTorch does; to rounding with ZeRO, where norms of pieces are added, and with two types.

    Some steps are clipped, and some are not.
    """
    model, alone = built(build), built(build)
    optimizer, data, clip_norm, norms = adam(alone), batches(points, 6), 2.0, []
    tolerance = {"rtol": 0.0, "atol": 0.0}
    if "zero" in text or build is half:
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if build is not half else {"rtol": 0.05, "atol": 0.02}
    with placed(model, data[0], text, learning_rate=0.01, clip_norm=clip_norm) as trained:
        for batch in data:
            expected = eager_step(alone, batch, Layout.parse(text).num_parts)
            norms.append(float(nn.utils.clip_grad_norm_(alone.parameters(), clip_norm)))
            optimizer.step()
            torch.testing.assert_close(trained(*batch), expected, **tolerance)
        state = trained.state_dict()
    assert min(norms) < clip_norm < max(norms)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), **tolerance)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.ReLU(), nn.Linear(10, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x), y)


def test_dropout_in_every_layout(tmp_path: Path) -> None:
    """Layouts of as many parts draw the same numbers, and a resumed run draws those of its next step."""
    (batch,), path = batches(points, 1), tmp_path / "half.safetensors"
    curves = []
    for text in OF_TWO:
        with placed(built(Dropping), batch, text, learning_rate=1e-30, seed=3) as trained:
            curves.append([float(trained(*batch)) for _ in range(2)])
            trained.save(path)
            curves[-1] += [float(trained(*batch)) for _ in range(2)]
        with placed(built(Dropping), batch, text, learning_rate=1e-30, resume=path) as trained:
            assert [float(trained(*batch)) for _ in range(2)] == curves[-1][2:]
    assert len(set(curves[0])) == 4
    assert all(curve == curves[0] for curve in curves)


def test_a_saved_file_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the file before, and nothing beside it."""
    path = tmp_path / "training.safetensors"
    (batch,) = batches(points, 1)
    with placed(built(Mlp), batch, "data=2,zero=1") as trained:
        trained(*batch)
        trained.save(path)
        before = path.read_bytes()
        trained(*batch)

        def full(*_args: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
                trained.save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]
        with pytest.raises(InputError, match=r"ends in \.safetensors is expected"):
            trained.save(tmp_path / "training.pt")
    with placed(built(Mlp), batch, "data=2", resume=path) as resumed:
        assert resumed.num_steps == 1
        assert sum(int(state["step"]) for state in resumed.optimizer_state_dict().values()) == 8
        resumed.save(tmp_path / "again.safetensors")  # before its first step
    assert (tmp_path / "again.safetensors").read_bytes() == before


def test_bad_files(tmp_path: Path) -> None:
    """A file that is none, or of another model, is refused."""
    (batch,), path = batches(points, 1), tmp_path / "training.safetensors"
    with placed(built(Mlp), batch, "data=2") as trained:
        trained(*batch)
        trained.save(path)
    plan = planned(built(Dropping), batch, "data=2")
    with pytest.raises(InputError, match=r"training.safetensors: state '.*' is unknown; give the model that was saved"):
        gdp.placed(built(Dropping), plan, on=["cpu"] * 2, resume=path)
    refused = pytest.raises(InputError, match=r"optimizer state of '.*':")
    with placed(built(Mlp), batch, "data=2", optimizer="sgd", resume=path) as trained, refused:
        trained(*batch)
    with placed(built(Mlp), batch, "data=2", optimizer="sgd") as trained:
        trained(*batch)
        trained.save(tmp_path / "plain.safetensors")
    refused = pytest.raises(InputError, match=r"optimizer state of '.*' is missing; go on with the optimizer")
    with placed(built(Mlp), batch, "data=2", resume=tmp_path / "plain.safetensors") as trained, refused:
        trained(*batch)
    content = path.read_bytes()
    for wrong, message in ((content[:99], "truncated"), (b"", "truncated")):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match=message):
            gdp.placed(built(Mlp), plan, on=["cpu"] * 2, resume=path)
    with pytest.raises(InputError, match="no such file"):
        gdp.placed(built(Mlp), plan, on=["cpu"] * 2, resume=tmp_path / "other.safetensors")


def test_losses_that_are_not_finite() -> None:
    """A loss that is not finite ends the training, if asked."""
    ((x, y),) = batches(points, 1)
    for text, is_stopped in (("data=2", True), ("microbatches=2", False)):
        with placed(built(Dropping), (x, y), text, stop_at_nan=is_stopped) as trained:
            trained(x, y)
            if not is_stopped:
                assert not torch.isfinite(trained(x * float("nan"), y))
                continue
            with pytest.raises(ExecutionError, match=r"step 2: the loss is nan; go on from a saved state"):
                trained(x * float("nan"), y)
            with pytest.raises(ExecutionError, match="go on from a saved state"):
                trained(x, y)


def test_batches_that_do_not_fit() -> None:
    """A batch that does not fit the layout is one line."""
    (batch,) = batches(points, 1)
    with placed(built(Mlp), batch, "data=2,microbatches=2") as trained:
        with pytest.raises(InputError, match="the batch of 6 samples has no 4 equal parts"):
            trained(*(tensor[:6] for tensor in batch))
        with pytest.raises(InputError, match=r"the plan is not one of the step of .* place it anew"):
            trained(*(torch.cat([tensor, tensor]) for tensor in batch))
        trained(*batch)
        for size in (2, 4, 6):  # the first is as large as one part
            with pytest.raises(InputError, match=r"give a whole batch .*drop_last=True"):
                trained(*(tensor[:size] for tensor in batch))
        trained(*batch)
        assert trained.num_steps == 2
    refused = pytest.raises(InputError, match=r"zero=1: an optimizer with gdp.adafactor_")
    with placed(built(Mlp), batch, "data=2,zero=1", optimizer="adafactor") as trained, refused:
        trained(*batch)
    for clip_norm in (0.0, float("inf")):
        with pytest.raises(InputError, match=r"clip_norm is .*; a number above 0 is expected"):
            placed(built(Mlp), batch, "data=2", clip_norm=clip_norm)


class TimeFirst(nn.Module):
    """Sequences whose second dimension is the batch, one of them given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, again: Tensor) -> Tensor:
        return (self.layer(x) - again).square().mean()


def test_batches_along_the_second_dimension() -> None:
    """The batch may be the second dimension, if the plan has its size."""
    model, alone, x = built(TimeFirst), built(TimeFirst), torch.randn(3, 8, 6)
    found = capture(model, (x[:, :4].clone(), x[:, :4].clone()), name="step")
    step = Step.of(found.graph, Layout.parse("data=2"))
    problem = Problem.build(step.graph, Cluster.parse("2xp100-pcie-16g"))
    placement = step.placement(np.zeros(found.graph.num_ops, np.int64), np.arange(2)[:, None])
    plan = replace(plan_of(simulate(problem, placement), 0, "given", 0), layout=step.document() | {"batch": 8})
    with gdp.placed(model, plan, on=["cpu"] * 2) as trained:
        torch.testing.assert_close(trained(x, x), alone(x, x).detach())


@pytest.mark.parametrize("piece_bytes", [2**28, 1000])
@pytest.mark.parametrize("text", ["data=3", "data=4,microbatches=2,zero=1", "data=4,zero=2", "data=2,zero=3"])
def test_exchanges_at_once_are_run_in_hops(text: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose replicas exchange at once, or in pieces, computes what PyTorch does, hop by hop, in its order."""
    monkeypatch.setattr("gdp.parallel.rings._PIECE_BYTES", piece_bytes)
    layout = Layout.parse(text)
    model, batch = built(Encoder), batches(sequences, 1, 24)[0]
    plan = planned(model, batch, text, "a100-sxm-80g:eager", optimizer="adam")
    assert plan.layout is not None
    assert "exchanges" in plan.layout
    result = gdp.run(model, batch, plan=plan, on=["cpu"] * layout.data, optimizer="adam", steps=1)
    assert result.is_equal
    assert result.whole_batch is not None
    assert result.whole_batch.is_close(1e-4)
