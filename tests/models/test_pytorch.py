"""A captured step is PyTorch's own: same bits in every order that the graph allows, costs as by hand."""

import contextlib
import random
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.pytorch import Capture, Replay, capture, capture_fn, flops, register_flops


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.first(x).relu_(), 0.3)
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
        out = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += self.norm2(self.down(x))
        out = functional.max_pool2d(functional.relu(out, inplace=True), 2)
        return functional.adaptive_avg_pool2d(out, 1).flatten(1).logsumexp(1).sum()


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.out(self.norm(self.embedding(tokens[:, :-1])))
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


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
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return x + functional.gelu(self.out(mixed.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.block(x), use_reentrant=False)
        return x.softmax(-1)[..., 0].sum()


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    cache: object = None


class Keywords(nn.Module):
    """A cache written slice by slice, an attribute that is no buffer, a constant, keywords, a dataclass result."""

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
        return Result(functional.mse_loss(y, batch["target"]), y)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 6, 2, batch_first=True), nn.GRU(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0].sum()


class Oddities(nn.Module):
    """Conjugates, changes of shape in place, `out=`, lists, scattered writes, memory that no module registers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shared = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 6)
        self.constants = [torch.randn(6)]

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x @ self.weight)
        z = torch.fft.irfft(spectrum.conj() * spectrum, n=6) + self.constants[0]
        z.unsqueeze_(0).squeeze_(0)
        out = torch.empty(0)
        with torch.no_grad():
            torch.add(z.detach(), 1, out=out)
            pair = [z.detach().clone(), out.clone()]
            torch._foreach_mul_(pair, 2.0)
        a = z.clone()
        a[rows] = self.shared(z)[rows] * 2
        b = torch.zeros_like(a).index_add_(0, rows, a[rows])
        c = a.index_put((rows,), b[rows], accumulate=True).masked_fill_(a > 0.5, 0.1)
        windows = functional.pad(self.shared(c), (1, 1)).unfold(1, 3, 1)
        return windows.std() + pair[1].sum() + out.sum() + c.topk(2)[0].sum()


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "mlp with dropout": lambda: (Mlp(), (torch.randn(3, 6),), {}),
    "residual convolutions": lambda: (Residual(), (torch.randn(2, 4, 6, 6),), {}),
    "tied embedding": lambda: (TiedLanguageModel(), (torch.randint(11, (3, 5)),), {}),
    "unrolled LSTM": lambda: (UnrolledLstm(), (torch.randn(4, 3, 4),), {}),
    "checkpointed attention": lambda: (Attention(), (torch.randn(2, 5, 8),), {}),
    "keywords": lambda: (Keywords(), (torch.randn(2, 3, 5),), {"batch": {"target": torch.randn(2, 3, 5)}}),
    "oddities": lambda: (Oddities(), (torch.randn(5, 4), torch.tensor([0, 2, 4])), {}),
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
def test_training_in_every_order(model_name: str, optimizer: str) -> None:
    """Every order that the graph allows gives the bits of eager training."""
    torch.manual_seed(5)
    model, args, kwargs = MODELS[model_name]()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = [item.clone() for item in args]
    found = capture(model, args, kwargs, name=model_name, optimizer=optimizer)
    assert same(model.state_dict(), state)
    assert all(p.grad is None for p in model.parameters())
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
def test_inference_in_every_order(model_name: str) -> None:
    """Every order that the graph allows gives the bits of eager inference."""
    torch.manual_seed(6)
    model, args, kwargs = MODELS[model_name]()
    model.eval()
    found = capture(model, args, kwargs, name=model_name, training=False)
    replays = [found.program.replay(model, args, kwargs, random_order(found.graph, seed)) for seed in range(3)]
    with torch.no_grad(), Seeded():
        output = model(*args, **kwargs)
    expected = {"loss": output.loss, "logits": output.logits} if isinstance(output, Result) else {"": output}
    assert all(same(replay.outputs, expected) for replay in replays)
    assert set(found.graph.phases) == {"forward"}
    assert found.graph.is_kept.sum() == len(expected)


def run_on_two_devices(found: Capture, model: nn.Module, args: Any, kwargs: Any, seed: int) -> Replay:
    """A step with every op on a random one of two devices, groups kept; a tensor is copied when its op is done."""
    graph, program, draw = found.graph, found.program, random.Random(seed)
    of_group = {int(group): draw.randrange(2) for group in graph.groups}
    device = [of_group[group] if group >= 0 else draw.randrange(2) for group in graph.groups.tolist()]
    held: tuple[dict[int, Tensor], ...] = ({}, {})
    private: tuple[dict[int, Tensor], ...] = ({}, {})
    bound = program.bind(model, args, kwargs)
    for op in random_order(graph, seed):
        here = device[op]
        if op in program.sources:
            made = program.parts(op, bound[program.sources[op].tensor])
        else:
            made = program.run(op, {tensor: held[here][tensor] for tensor in program.inputs_of[op]}, private[here])
        held[here].update(made)
        for tensor, content in made.items():
            if any(device[consumer] != here for consumer in graph.consumers_of(tensor)):
                is_part = graph.view_of[tensor] >= 0
                held[1 - here][tensor] = content.contiguous().clone() if is_part else content.clone()
    everything = dict(held[0]) | dict(held[1])
    everything |= {tensor: held[device[op]][tensor] for op in range(graph.num_ops) for tensor in program.outputs_of[op]}
    return program.results(everything)


@pytest.mark.parametrize("model_name", MODELS)
def test_two_devices_exchange_tensors_alone(model_name: str) -> None:
    """Two devices need to exchange the tensors of the graph and nothing else."""
    torch.manual_seed(7)
    model, args, kwargs = MODELS[model_name]()
    found = capture(model, args, kwargs, name=model_name)
    replays = [run_on_two_devices(found, model, args, kwargs, seed) for seed in range(6)]
    loss, gradients = eager_step(model, args, kwargs, "adam")
    for replay in replays:
        # a shipped part is contiguous, and a product of other strides may differ in its last bit
        torch.testing.assert_close(replay.loss, loss, rtol=1e-5, atol=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(replay.gradients[name], gradient, rtol=1e-4, atol=1e-6)
        for name, tensor in model.named_buffers():
            torch.testing.assert_close(replay.state[name], tensor)


def test_write_after_read_tensors_are_needed() -> None:
    """Without write-after-read tensors a step computes something else."""
    torch.manual_seed(8)
    model, args, kwargs = MODELS["keywords"]()
    found = capture(model, args, kwargs, name="keywords")
    graph = found.graph
    assert (graph.tensor_bytes[[value < 0 for value in found.program.tensor_values]] == 0).all()
    data = [graph.tensor(number) for number, value in enumerate(found.program.tensor_values) if value >= 0]
    loose = Graph.build("loose", [graph.op(op) for op in range(graph.num_ops)], data)
    loss, _ = eager_step(model, args, kwargs, "adam")
    losses = [found.program.replay(model, args, kwargs, random_order(loose, seed)).loss for seed in range(20)]
    assert not all(torch.equal(found_loss, loss) for found_loss in losses)


def build_graph(model: nn.Module, *args: Tensor, **options: Any) -> Graph:
    return capture(model, args, name="model", **options).graph


def op_of(graph: Graph, kind: str, phase: str = "forward") -> int:
    found = [op for op in range(graph.num_ops) if graph.kinds[op] == kind and graph.phases[op] == phase]
    assert len(found) == 1, [graph.op_names[op] for op in found]
    return found[0]


def tensors_of(graph: Graph, op: int) -> list[int]:
    return np.flatnonzero(graph.producers == op).tolist()


def test_in_place_operators_take_no_second_memory() -> None:
    """conv [2, 8, 6, 6] float32 = 2304 bytes, relu_ or relu; relu_ is a second call of the convolution."""
    convolution = nn.Conv2d(4, 8, 3, padding=1)
    x = torch.randn(2, 4, 6, 6)
    graph = build_graph(nn.Sequential(convolution, nn.ReLU(inplace=True)).eval(), x, training=False)
    assert graph.kinds == ("parameter", "parameter", "input", "aten.convolution")
    assert graph.tensor_bytes.tolist() == [8 * 4 * 9 * 4, 8 * 4, 2 * 4 * 36 * 4, 2304]
    assert graph.flops[3] == 2 * (2 * 8 * 36) * (4 * 9) + 2 * 8 * 36 + 2 * 8 * 36  # products, bias, relu
    apart = build_graph(nn.Sequential(convolution, nn.ReLU()).eval(), x, training=False)
    assert apart.kinds[3:] == ("aten.convolution", "aten.relu")


class Functions(nn.Module):
    """A model of one function, with a parameter so that it can be trained."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(*shape))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self.weight, *args)


def test_late_writers_wait_for_readers() -> None:
    """A late in-place operator waits for the readers of the memory that it overwrites."""

    def function(weight: Tensor, x: Tensor) -> Tensor:
        y = x * weight
        z = y.sin()
        y += z.exp()  # z reads y: y's memory is written after that
        x.zero_()
        return y

    graph = build_graph(Functions(function, 3), torch.randn(3), training=False)
    names = {graph.kinds[op]: op for op in range(graph.num_ops)}
    assert list(names) == ["parameter", "input", "aten.mul", "aten.sin", "aten.exp", "aten.add_", "aten.zero_"]
    edges = set(zip(graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True))
    mul, zero = names["aten.mul"], names["aten.zero_"]
    assert (mul, zero) in edges
    assert (names["aten.sin"], names["aten.add_"]) not in edges  # exp lies between: an edge of its own would only cost
    assert graph.tensor_bytes[tensors_of(graph, mul)].tolist() == [12, 0]


def test_views_are_parts() -> None:
    """Views are parts of their producer, and equal parts are one tensor."""

    def function(weight: Tensor, x: Tensor) -> Tensor:
        left, right = (x * weight).chunk(2, 1)
        head = left.unflatten(1, (2, 2)).transpose(1, 2)  # the left half once more, in another shape
        return left.sin().sum() + head.cos().sum() + right.t().exp().sum() + x.expand(2, 3, 8).sum()

    graph = build_graph(Functions(function, 8), torch.randn(3, 8), training=False)
    mul = op_of(graph, "aten.mul")
    whole, left, right = tensors_of(graph, mul)
    assert graph.tensor_bytes[[whole, left, right]].tolist() == [96, 48, 48]
    assert graph.view_of[[whole, left, right]].tolist() == [-1, whole, whole]
    readers = [[graph.kinds[op] for op in graph.consumers_of(tensor)] for tensor in (whole, left, right)]
    assert readers == [[], ["aten.sin", "aten.cos"], ["aten.exp"]]
    expanded = next(op for op in range(graph.num_ops) if graph.kinds[op] == "aten.sum" and 1 in find_inputs(graph, op))
    assert graph.bytes_accessed[expanded] == 96 + 4  # what expand repeats is read once


def find_inputs(graph: Graph, op: int) -> list[int]:
    return [int(graph.producers[tensor]) for tensor in np.unique(graph.edge_tensors[graph.consumers == op])]


def test_optimizer_state_is_beside_its_parameter() -> None:
    """A parameter holds its optimizer state, and shares a device with its update."""
    model = TiedLanguageModel()
    tokens = torch.randint(11, (3, 5))
    for optimizer, copies in (("adam", 3), ("sgd", 1)):
        graph = build_graph(model, tokens, optimizer=optimizer)
        sources = [op for op in range(graph.num_ops) if graph.kinds[op] == "parameter"]
        assert [graph.op_names[op] for op in sources] == ["embedding.weight", "norm.weight", "norm.bias"]  # tied: one
        assert graph.resident_bytes[sources].tolist() == [copies * 4 * size for size in (66, 6, 6)]
        assert graph.is_resident.sum() == 3
        assert graph.resident_bytes.sum() == graph.resident_bytes[sources].sum()
        for op in sources:
            update = graph.op_names.index(graph.op_names[op] + ".update")
            assert graph.groups[op] == graph.groups[update] >= 0
            assert graph.phases[update] == "update"
        assert len(set(graph.groups[sources].tolist())) == 3
    inference = build_graph(model, tokens, training=False)
    assert inference.resident_bytes.sum() == 4 * (66 + 6 + 6)
    assert (inference.groups == -1).all()


def test_running_statistics() -> None:
    """Running statistics are updated in their memory."""
    graph = build_graph(nn.BatchNorm1d(4), torch.randn(3, 4))
    norm, count = op_of(graph, "aten.native_batch_norm"), op_of(graph, "aten.add_")
    mean, variance, batches = (
        graph.op_names.index(name) for name in ("running_mean", "running_var", "num_batches_tracked")
    )
    assert graph.groups[norm] == graph.groups[mean] == graph.groups[variance] >= 0
    assert graph.groups[count] == graph.groups[batches] >= 0
    assert graph.resident_bytes[[mean, variance, batches]].tolist() == [16, 16, 8]


# shapes: x [3, 4]; each case is (function of a weight and x, weight's shape, kind, FLOPs, bytes accessed)
COSTS: list[tuple[Callable[..., Tensor], tuple[int, ...], str, int, int]] = [
    (lambda w, x: x @ w, (4, 5), "aten.mm", 2 * 3 * 4 * 5, 4 * (12 + 20 + 15)),
    (lambda w, x: functional.linear(x, w, w[:, 0]), (5, 4), "aten.addmm", 2 * 3 * 4 * 5 + 15, 4 * (12 + 20 + 5 + 15)),
    (lambda w, x: x + w, (4,), "aten.add", 12, 4 * (12 + 4 + 12)),
    (
        lambda w, x: functional.embedding(x.argmax(1), w),
        (9, 2),
        "aten.embedding",
        0,
        8 * 3 + 2 * 4 * 6,
    ),  # rows, not the table
    (lambda w, x: w.softmax(1), (3, 4), "aten._softmax", 5 * 12, 4 * 24),
    (lambda w, x: functional.layer_norm(x, (4,), w), (4,), "aten.native_layer_norm", 8 * 12, 4 * (12 + 4 + 12 + 3 + 3)),
    (lambda w, x: torch.cat((x, w)), (2, 4), "aten.cat", 0, 4 * (12 + 8 + 20)),
    (lambda w, x: w.sum(), (3, 4), "aten.sum", 12, 4 * 13),
    (
        lambda w, x: functional.conv1d(x[None, :2], w, groups=2),
        (4, 1, 3),
        "aten.convolution",
        2 * (4 * 2) * 3,
        4 * (8 + 12 + 8),
    ),
    (
        lambda w, x: functional.max_pool2d(w, 2),
        (1, 1, 4, 4),
        "aten.max_pool2d_with_indices",
        4 * 4,
        4 * (16 + 4) + 8 * 4,
    ),
    # two heads of [3, 2], scores [2, 3, 3]: 18 pairs x (2 * 2 + 2 * 2 + 5)
    (
        lambda w, x: functional.scaled_dot_product_attention(w, w, w),
        (1, 2, 3, 2),
        "aten._scaled_dot_product_flash_attention_for_cpu",
        18 * 13,
        4 * (12 + 12 + 6),
    ),
]


def test_negative_log_likelihood_reads_a_score_of_each_row() -> None:
    """Of scores [3, 5] three are read, as many written into a gradient of 15 zeros; targets have 8 bytes each.

    Forward makes the loss and the sum of weights, backward reads both.
    """
    found = capture(Functions(lambda w, x: functional.nll_loss(w, x[:, 0].long()), 3, 5), (torch.zeros(3, 4),)).graph
    forward, backward = (found.kinds.index(f"aten.nll_loss_{way}") for way in ("forward", "backward"))
    assert found.bytes_accessed[[forward, backward]].tolist() == [12 + 24 + 8, 60 + 12 + 24 + 8]


@pytest.mark.parametrize(("function", "shape", "kind", "flops", "num_bytes"), COSTS, ids=[case[2] for case in COSTS])
def test_costs_by_hand(
    function: Callable[..., Tensor], shape: tuple[int, ...], kind: str, flops: int, num_bytes: int
) -> None:
    """Costs are those of hand arithmetic."""
    found = capture(Functions(function, *shape), (torch.randn(3, 4),), name="cost", training=False)
    op = op_of(found.graph, kind)
    assert (found.graph.flops[op], found.graph.bytes_accessed[op]) == (flops, num_bytes)
    assert not found.coverage.unknown


def test_inference_mode_is_that_of_no_gradients() -> None:
    """In torch.inference_mode a layer on x [1, 3, 4] takes 2 * 3 * 4 * 5 FLOPs, and its copies are read, not held."""

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        y = functional.linear(x[None], weight).transpose(1, 2).reshape(15).double()
        with torch.inference_mode(False):
            return y.sin() if torch.is_grad_enabled() else y

    graph = build_graph(Functions(torch.inference_mode()(layer), 5, 4), torch.randn(3, 4), training=False)
    kinds = "parameter", "input", "aten.mm", "aten.clone", "aten._to_copy", "aten.sin"
    assert graph.kinds == kinds
    assert graph.flops.tolist() == [0, 0, 120, 0, 0, 15]
    assert graph.resident_bytes.sum() == 4 * 20
    assert not torch.is_inference_mode_enabled()
    x, weight, y = (torch.empty(shape) for shape in ((2, 3, 4), (5, 4), (2, 3, 5)))
    assert flops.count_flops(torch.ops.aten.linear.default, (x, weight), {}, [y])[0] == 2 * 6 * 4 * 5


def test_costs_of_grouped_convolutions() -> None:
    """8 channels in 4 groups on [2, 8, 6, 6], filters [8, 2, 3, 3]: 576 pixels x 18 products = 20736 forward."""
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False), nn.Tanh(), nn.Conv2d(8, 8, 1, bias=False)
    )
    graph = build_graph(nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), *model), torch.randn(2, 8, 6, 6))
    backward = [int(graph.flops[op]) for op in range(graph.num_ops) if graph.kinds[op] == "aten.convolution_backward"]
    assert backward[1] == 2 * 2 * 576 * 18
    # Adam on 144 weights: 13 FLOPs an element, 7 passes over 576 bytes
    update = graph.op_names.index("1.weight.update")
    assert (graph.flops[update], graph.bytes_accessed[update]) == (13 * 144, 7 * 576)


def test_unknown_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of unknown cost is named until its cost is registered."""

    @torch.library.custom_op("gdp_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    model, x = Functions(lambda w, x: torch.ops.gdp_test.twice(w), 6), torch.randn(3)
    found = capture(model, (x,), name="custom", training=False)
    assert found.coverage.unknown == {"gdp_test.twice": 1}
    assert found.graph.flops[op_of(found.graph, "gdp_test.twice")] == 6
    monkeypatch.setattr(flops, "_registered", {})
    register_flops("gdp_test.twice")(lambda x, out_val: 1000 * x.numel())
    found = capture(model, (x,), name="custom", training=False)
    assert found.coverage.unknown == {}
    assert found.graph.flops[op_of(found.graph, "gdp_test.twice")] == 6000


def test_phases_and_modules() -> None:
    """Every op has its phase and its module."""
    graph = build_graph(nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2))), torch.randn(5, 3))
    where = {graph.op_names[op]: (graph.phases[op], graph.modules[op]) for op in range(graph.num_ops)}
    assert where["1.1.addmm_0"] == ("forward", "1.1")
    assert where["1.0.tanh_backward_0"] == ("backward", "1.0")
    assert where["1.1.mm_backward_0"] == where["1.1.mm_backward_1"] == ("backward", "1.1")
    assert where["0.mm_backward_0"] == ("backward", "0")
    assert where["1.1.bias.update"] == ("update", "1.1")
    assert where["input.0"] == ("forward", "")
    kept = np.flatnonzero(graph.is_kept)
    assert [graph.kinds[op] for op in graph.producers[kept]] == ["aten.mean"]  # the default loss


def test_large_models_take_no_memory() -> None:
    """The capture of a model of seven billion parameters allocates nothing."""

    def build() -> tuple[nn.Module, tuple[Tensor]]:
        layers = [nn.TransformerEncoderLayer(4096, 32, 4 * 4096, batch_first=True, dropout=0.0) for _ in range(4)]
        return nn.Sequential(nn.Embedding(1500000, 4096), *layers), (torch.randint(0, 32000, (8, 2048)),)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture_fn(build, name="seven billion").graph
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
    assert graph.resident_bytes.sum() > 6.9e9 * 4 * 3


def test_modules_copied_while_built() -> None:
    """Modules that are copied while they are built are captured."""
    layer = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
    known = capture(nn.TransformerEncoder(layer, num_layers=3), (torch.ones(2, 4, 8),), name="encoder").graph

    def build() -> tuple[Any, ...]:
        layer = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, num_layers=3), (torch.ones(2, 4, 8),)

    assert capture_fn(build, name="encoder").graph.fingerprint == known.fingerprint


@pytest.mark.parametrize("where", ["real", "meta", "fake"])
def test_real_meta_and_fake_models(where: str) -> None:
    """Real, meta and fake models give one graph, and their capture leaves no trace."""
    with torch.device("meta") if where == "meta" else FakeTensorMode() if where == "fake" else contextlib.nullcontext():
        model, args, kwargs = MODELS["residual convolutions"]()
    torch.manual_seed(3)
    state, hooks = torch.get_rng_state(), len(model.conv1._forward_hooks)
    with torch.no_grad():
        graph = capture(model, args, kwargs, name="model").graph
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(model.conv1._forward_hooks) == hooks
    assert graph.fingerprint == capture_fn(MODELS["residual convolutions"], name="model").graph.fingerprint


def bad_output(weight: Tensor, x: Tensor) -> Tensor:
    return weight * 2 if (x.sum() > 0).item() else weight


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Functions(bad_output, 3), {}, "depends on a tensor's content"),
        (Functions(lambda w, x: w[x.nonzero()], 3), {}, "depends on a tensor's content"),
        (Functions(lambda w, x: x, 3), {}, "no output requires a gradient"),
        (Functions(lambda w, x: w * x, 3), {"loss": lambda output: output}, "scalar tensor is expected"),
        (Functions(lambda w, x: w * x, 3), {"loss": lambda output: output.detach().sum()}, "requires no gradient"),
        (Functions(lambda w, x: w @ x, 4), {}, "check its arguments"),
        (Functions(lambda w, x: w * x, 3), {"optimizer": "lion"}, "optimizer is 'lion'"),
        (Functions(lambda w, x: x.numpy(), 3), {}, "not their content"),
        (Functions(lambda w, x: functional.embedding(x.long(), w, sparse=True), 3, 2), {}, "sparse=False"),
    ],
)
def test_models_that_cannot_be_captured(model: nn.Module, options: dict[str, Any], message: str) -> None:
    """A model that cannot be captured is one line with the reason."""
    with pytest.raises(InputError, match=message) as caught:
        capture(model, (torch.randn(3),), name="bad", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_waits_for_the_gradient(reentrant: bool) -> None:
    """The first op that runs again for a layer comes after all gradients of the layer above, as in PyTorch.

    Else a device with time to spare would run all layers again at once, and hold their activations.
    """

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.sum()

    graph = capture(Layers(), (torch.randn(2, 4).requires_grad_(),)).graph
    again = graph.op_names.index("layers.0.0.addmm_backward_0")
    (turn,) = [tensor for tensor in graph.edge_tensors[graph.consumers == again] if graph.tensor_bytes[tensor] == 0]
    before = graph.op_names[graph.producers[turn]]
    assert before == "layers.1.0.sum_backward_0"


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_draws_the_same_numbers(reentrant: bool) -> None:
    """Gradients are of the dropout that the loss has: a square has twice itself as derivative."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, functional.dropout(x), use_reentrant=reentrant).square().mean()

    model, x = Dropped(), torch.randn(4, 8).requires_grad_()
    program = capture(model, (x,)).program
    found = program.replay(model, (x,))
    slope = (found.gradients["layer.0.weight"] * model.layer[0].weight.detach()).sum()
    assert found.loss is not None
    assert float(slope) == pytest.approx(2 * float(found.loss))
    assert sorted(call.seed for calls in program.calls for call in calls if call.seed >= 0) == [0, 1, 1]
