"""A captured step is PyTorch's own step: same bits in every order the graph allows, and costs that hand arithmetic gives."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gdp.capture import capture
from gdp.graph import Graph


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x).relu_(), 0.3)
        hidden.mul_(2)
        y = self.second(hidden)
        z = torch.native_dropout(y, 0.5, True)[0] + torch.rand_like(y) * torch.zeros_like(y)
        y += z.tanh()
        return y[:, :3].square().mean() + y.new_full((2,), 3.0).sum()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += self.norm2(self.down(x))
        out = F.max_pool2d(F.relu(out, inplace=True), 2)
        return F.adaptive_avg_pool2d(out, 1).flatten(1).logsumexp(1).sum()


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.out(self.norm(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


class UnrolledLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(4 + 5, 20)

    def forward(self, steps: Tensor) -> Tensor:
        output = cell = steps.new_zeros(steps.shape[1], 5)
        outputs = torch.zeros(len(steps), *output.shape)
        for time, x in enumerate(steps):
            write, forget, candidate, read = self.gates(torch.cat((x, output), 1)).chunk(4, 1)
            cell = forget.sigmoid() * cell + write.sigmoid() * candidate.tanh()
            output = read.sigmoid() * cell.tanh()
            outputs[time] = output
        return outputs.pow(2).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def block(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return x + F.gelu(self.out(mixed.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.block(x), use_reentrant=False)
        return x.softmax(-1)[..., 0].sum()


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    cache: object = None


class Keywords(nn.Module):
    """A cache written slice by slice, an attribute that is no buffer, a constant, keyword inputs, a dataclass result."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.scale = nn.Linear(5, 5), torch.arange(5.0)
        self.register_buffer("cache", torch.zeros(3, 5))
        self.head = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x: Tensor, *, batch: dict[str, Tensor]) -> Result:
        with torch.no_grad():
            before = self.cache.sum()
            self.cache[1] = x[0, 0]
            self.cache.mul_(0.5)
        y = self.project(x * self.scale) + self.cache * before + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        y = self.head(y, y, y, need_weights=False)[0]
        return Result(F.mse_loss(y, batch["target"]), y)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 6, 2, batch_first=True), nn.GRU(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0].sum()


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "mlp with dropout": lambda: (Mlp(), (torch.randn(3, 6),), {}),
    "residual convolutions": lambda: (Residual(), (torch.randn(2, 4, 6, 6),), {}),
    "tied embedding": lambda: (TiedLanguageModel(), (torch.randint(11, (3, 5)),), {}),
    "unrolled LSTM": lambda: (UnrolledLstm(), (torch.randn(4, 3, 4),), {}),
    "checkpointed attention": lambda: (Attention(), (torch.randn(2, 5, 8),), {}),
    "keywords": lambda: (Keywords(), (torch.randn(2, 3, 5),), {"batch": {"target": torch.randn(2, 3, 5)}}),
    "fused recurrent": lambda: (Recurrent(), (torch.randn(2, 5, 4),), {}),
}


class Seeded(TorchDispatchMode):
    """Seeds the n-th operator that draws with n, as a program does."""

    num_draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(func):
            torch.manual_seed(self.num_draws)
            self.num_draws += 1
        return func(*args, **(kwargs or {}))


def eager_step(model: nn.Module, args: Any, kwargs: Any, optimizer: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients) of a step that PyTorch takes itself; parameters and buffers of `model` are updated."""
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    update = kind(model.parameters(), lr=1e-3, fused=True)
    with Seeded():
        output = model(*args, **kwargs)
        loss = output.loss if isinstance(output, Result) else output
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    update.step()
    return loss.detach(), gradients


def random_order(graph: Graph, seed: int) -> list[int]:
    """A random topological order; the graph's tensors are the only constraint."""
    draw = random.Random(seed)
    waiting = np.bincount(graph.consumers, minlength=graph.num_ops).tolist()
    after: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for tensor, consumer in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        after[graph.producers[tensor]].append(consumer)
    ready, order = [op for op in range(graph.num_ops) if not waiting[op]], []
    while ready:
        op = ready.pop(draw.randrange(len(ready)))
        order.append(op)
        for consumer in after[op]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                ready.append(consumer)
    return order


def same(found: Any, expected: Any) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("model_name", MODELS)
def test_every_order_gives_the_bits_of_eager_training(model_name: str, optimizer: str) -> None:
    torch.manual_seed(5)
    model, args, kwargs = MODELS[model_name]()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = [item.clone() for item in args]
    found = capture(model, args, kwargs, name=model_name, optimizer=optimizer)
    assert same(model.state_dict(), state) and all(p.grad is None for p in model.parameters())
    natural = found.program.replay(model, args, kwargs)
    shuffled = [found.program.replay(model, args, kwargs, random_order(found.graph, seed)) for seed in range(5)]
    loss, gradients = eager_step(model, args, kwargs, optimizer)
    for replay in (natural, *shuffled):
        assert torch.equal(replay.loss, loss)
        assert same(replay.gradients, gradients)
        after = {name: replay.state[name] for name in state}
        assert same(after, model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(inputs, args, strict=True))


@pytest.mark.parametrize("model_name", MODELS)
def test_inference_in_every_order_gives_the_bits_of_eager_inference(model_name: str) -> None:
    torch.manual_seed(6)
    model, args, kwargs = MODELS[model_name]()
    model.eval()
    found = capture(model, args, kwargs, name=model_name, training=False)
    replays = [found.program.replay(model, args, kwargs, random_order(found.graph, seed)) for seed in range(3)]
    with torch.no_grad(), Seeded():
        output = model(*args, **kwargs)
    expected = {"loss": output.loss, "logits": output.logits} if isinstance(output, Result) else {"": output}
    assert all(same(replay.outputs, expected) for replay in replays)
    assert set(found.graph.phases) == {"forward"} and found.graph.is_kept.sum() == len(expected)
