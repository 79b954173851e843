"""What Python takes of the host for a layer as Megatron-LM writes it, forward and backward, on one core: tensors have a
few numbers, so that only calls count. `python -m benchmarks.host_of_layers` prints processor time a layer.

`gdp.costs.hosts` takes the share of the forward pass, and what exchanges add, from it. The layer has reentrant
checkpoints that keep states of generators, autograd functions around exchanges, a generator of its own for dropout, and
hooks that add up gradients; the group of ranks sends nothing (PyTorch's `fake` backend).
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, TOKENS, LAYERS = 4, 2, 2, 8
Run = Callable[[nn.Module, Tensor], Tensor]


class _Group:
    """What ranks share: whether they exchange, and the state of the generator for dropout."""

    exchanges = False
    state = torch.get_rng_state()

    @classmethod
    def sum(cls, x: Tensor) -> Tensor:
        if cls.exchanges:
            dist.all_reduce(x)
        return x

    @classmethod
    @contextlib.contextmanager
    def generator(cls) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(cls.state)
        yield
        cls.state = torch.get_rng_state()
        torch.set_rng_state(before)


class _GradientsSummed(torch.autograd.Function):
    """The input of a layer that is cut by columns."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return _Group.sum(gradient)


class _Summed(torch.autograd.Function):
    """The result of a layer that is cut by rows."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return _Group.sum(x)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Checkpoint(torch.autograd.Function):
    """A layer that runs again in the backward pass, with the generators as they were."""

    @staticmethod
    def forward(context: Any, layer: nn.Module, x: Tensor) -> Tensor:
        context.layer, context.states = layer, (torch.get_rng_state(), torch.get_rng_state(), _Group.state.clone())
        context.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        now = torch.get_rng_state(), torch.get_rng_state(), _Group.state.clone()
        _set_states(*context.states)
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = context.layer(x)
        _set_states(*now)
        torch.autograd.backward(result, gradient)
        return None, x.grad


def _set_states(host: Tensor, device: Tensor, of_ranks: Tensor) -> None:
    torch.set_rng_state(host)
    torch.set_rng_state(device)
    _Group.state = of_ranks


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output, self.reduce = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.expand = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(HIDDEN)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(_GradientsSummed.apply(self.norms[0](x))).view(TOKENS, HEADS, -1)
        query, key, value = (part.contiguous().transpose(0, 1) for part in heads.chunk(3, dim=-1))
        scores = torch.baddbmm(torch.empty(HEADS, TOKENS, TOKENS), query, key.transpose(1, 2), beta=0, alpha=0.5)
        shares = torch.softmax(scores, dim=-1)
        with _Group.generator():
            shares = functional.dropout(shares, 0.1)
        mixed = torch.bmm(shares, value).transpose(0, 1).contiguous().view(TOKENS, 1, HIDDEN)
        x = x + functional.dropout(_Summed.apply(self.output(mixed)) + self.biases[0], 0.1)
        wide = functional.gelu(self.expand(_GradientsSummed.apply(self.norms[1](x))))
        return x + functional.dropout(_Summed.apply(self.reduce(wide)) + self.biases[1], 0.1)


def _add_hooks(parameter: nn.Parameter) -> None:
    total = torch.zeros_like(parameter)

    def add(own: Tensor) -> None:
        assert own.grad is not None
        total.add_(own.grad)
        own.grad = None

    parameter.register_post_accumulate_grad_hook(add)


def microseconds(layers: nn.ModuleList, run: Run, repeats: int = 200) -> tuple[float, float]:
    """Returns the microseconds of a layer in the forward and in the backward pass, the lower quartile of `repeats`."""
    times = list[tuple[float, float]]()
    for _ in range(repeats):
        x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
        begin = time.process_time()
        result = x
        for layer in layers:
            result = run(layer, result)
        between = time.process_time()
        result.sum().backward()
        times.append((between - begin, time.process_time() - between))
    forward, backward = (sorted(column)[repeats // 4] for column in zip(*times, strict=True))
    return 1e6 * forward / len(layers), 1e6 * backward / len(layers)


def main() -> None:
    """Prints the times of plain and of checkpointed layers, without exchanges and with six or four a layer."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
    for parameter in layers.parameters():
        _add_hooks(parameter)
    ways: dict[str, Run] = {"plain": lambda layer, x: layer(x), "checkpointed": _Checkpoint.apply}
    for name, run in ways.items():
        for _Group.exchanges in (False, True):
            microseconds(layers, run, 20)
            forward, backward = microseconds(layers, run)
            beside = ", with exchanges" * _Group.exchanges
            total = forward + backward
            print(
                f"{name}{beside}: {forward:.0f} us forward, {backward:.0f} us backward; {forward / total:.0%} forward"
            )


if __name__ == "__main__":
    main()
