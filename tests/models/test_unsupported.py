"""Models that are wrapped, on the meta device, or of tensors that a capture does not take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gdp.errors import InputError
from gdp.models.pytorch import capture, capture_fn
from gdp.models.source import ModelSource

pytestmark = pytest.mark.filterwarnings("ignore")  # prototypes of PyTorch, deprecated modules
FLOPS = 4 * 8 * (2 * 8 + 1)  # of 4 rows through a Linear of 8 x 8, with its bias: 8 products and a bias each
INPUT = torch.ones(4, 8)


class Product(nn.Module):
    """A product with a matrix of any layout."""

    def __init__(self, matrix: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.matrix = matrix

    def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Returns the product."""
        return torch.sparse.mm(self.matrix if matrix is None else matrix, self.linear(x))


def _csr() -> Tensor:
    return torch.sparse_csr_tensor(torch.zeros(5, dtype=torch.long), torch.zeros(0, dtype=torch.long), [], (4, 4))


def _jagged() -> Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.ones(10, 8), torch.tensor([0, 4, 10]))


def _quantised() -> Tensor:
    return torch.quantize_per_tensor(INPUT, 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: (Product(), (INPUT, torch.eye(4).to_sparse())), "sparse tensors"),
        (lambda: (Product(_csr()), (INPUT,)), "sparse tensors"),
        (lambda: (Product(), (INPUT, torch.eye(4).to_sparse_csc())), "sparse tensors"),
        (lambda: (Product(torch.eye(4).to_sparse_bsr((2, 2))), (INPUT,)), "sparse tensors"),
        (lambda: (nn.Linear(8, 8), (_jagged(),)), "nested (jagged) tensors"),
        (lambda: (nn.Linear(8, 8), (torch.nested.nested_tensor([INPUT, INPUT]),)), "nested (jagged) tensors"),
        (lambda: (nn.Linear(8, 8), (_quantised(),)), "quantised tensors"),
        (lambda: (torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8))), (INPUT,)), "quantised"),
        (lambda: (nn.Sequential(torch.jit.script(nn.Linear(8, 8))), (INPUT,)), "modules of torch.jit"),
        (lambda: (torch.jit.trace(nn.Linear(8, 8), INPUT), (INPUT,)), "modules of torch.jit"),
        (lambda: (torch.distributed.fsdp.fully_shard(nn.Linear(8, 8)), (INPUT,)), "cut over processes"),
        (lambda: (nn.Sequential(nn.LazyLinear(8)), (INPUT,)), "lazy modules"),
    ],
)
def test_refused_kinds(build: Callable[[], Any], said: str) -> None:
    """Each kind is refused in one line with its remedy, whether it is built under fake tensors or before."""
    with pytest.raises(InputError, match=r"not supported: .*; give") as refused:
        capture_fn(build, training=False)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: (Product(), (INPUT, torch.eye(4).to_sparse())), "sparse tensors (input.1)"),
        (lambda: (Product(torch.eye(4).to_sparse_csr()), (INPUT,)), "sparse tensors (matrix)"),
        (lambda: (nn.Linear(8, 8), (torch.nested.nested_tensor([INPUT]),)), "nested (jagged) tensors (input.0)"),
        (lambda: (nn.LazyLinear(8), (INPUT,)), "lazy modules, whose sizes"),
        (lambda: (torch.jit.script(nn.Linear(8, 8)), (INPUT,)), "modules of torch.jit"),
    ],
)
def test_refused_kinds_that_are_built(build: Callable[[], Any], said: str) -> None:
    """A module that exists is refused with the name of its tensor, by `capture` and as (module, inputs)."""
    model, inputs = build()
    for read in (lambda: capture(model, inputs, training=False), lambda: ModelSource.of_example((model, inputs))):
        with pytest.raises(InputError) as refused:
            read()
        assert said in str(refused.value)


def _on_meta() -> tuple[Any, ...]:
    with torch.device("meta"):
        net = nn.Linear(8, 8)
    return net, (INPUT,)


def _of_another_mode() -> tuple[Any, ...]:
    with FakeTensorMode():
        net = nn.Linear(8, 8)
    return net, (torch.ones(4, 8),)


@pytest.mark.parametrize(
    "build",
    [
        _on_meta,
        _of_another_mode,
        lambda: (nn.Linear(8, 8, device="meta").to_empty(device="cpu"), (INPUT,)),
        lambda: (nn.Linear(8, 8).to("meta").to_empty(device="cuda"), (INPUT,)),
        lambda: (nn.Linear(8, 8), (torch.ones(4, 8, device="meta"),)),
        lambda: (torch.compile(nn.Linear(8, 8)), (INPUT,)),
        lambda: (nn.DataParallel(nn.Linear(8, 8)), (INPUT,)),
        lambda: (nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), (INPUT,)),
        lambda: (torch.compile(nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda(), device_ids=[0])), (INPUT,)),
    ],
)
def test_meta_and_wrapped_modules(build: Callable[[], Any]) -> None:
    """A module on the meta device or in a wrapper is captured like any: the FLOPs are those of the plain one."""
    assert capture_fn(build, training=False).graph.flops.sum() == FLOPS
