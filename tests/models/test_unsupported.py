"""Models that are wrapped, on the meta device, or of tensors that a capture does not take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from gdp.errors import InputError
from gdp.models.pytorch import capture, capture_fn
from gdp.models.source import ModelSource

pytestmark = pytest.mark.filterwarnings("ignore")  # prototypes of PyTorch, deprecated modules
FLOPS = 4 * 8 * (2 * 8 + 1)  # of 4 rows through a Linear of 8 x 8, with its bias: 8 products and a bias each
INPUT = torch.ones(4, 8)


class Then(nn.Module):
    """A function of a Linear's result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the function's result."""
        return self.function(self.linear(x))


class Product(nn.Module):
    """A product with a matrix of any layout."""

    def __init__(self, matrix: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.matrix = matrix

    def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Returns the product."""
        return torch.sparse.mm(self.matrix if matrix is None else matrix, self.linear(x))


class Packed(Tensor):
    """A weight as libraries quantise it: a tensor of floats outside, 8-bit integers and a scale inside."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> "Packed":
        made: Packed = Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.values_, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Packed":
        return Packed(inner["values_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        floats = [item.values_ * item.scale if isinstance(item, Packed) else item for item in args]
        return func(*floats, **(kwargs or {}))


def _packed() -> nn.Module:
    layer = nn.Linear(8, 8)
    weight = Packed(torch.ones(8, 8, dtype=torch.int8), torch.ones(1))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


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
        (lambda: (Product(), (INPUT, torch.eye(4).to_sparse_bsc((2, 2)))), "sparse tensors"),
        (lambda: (nn.ParameterList([nn.Parameter(torch.eye(4).to_sparse())]), (INPUT,)), "sparse tensors"),
        (lambda: (nn.Linear(8, 8), ([torch.eye(8).to_sparse()],)), "sparse tensors"),
        (lambda: (nn.Linear(8, 8), ({"adjacency": torch.eye(8).to_sparse()},)), "sparse tensors"),
        (lambda: (nn.Linear(8, 8), (_jagged(),)), "nested (jagged) tensors"),
        (lambda: (nn.Linear(8, 8), (torch.nested.nested_tensor([INPUT, INPUT]),)), "nested (jagged) tensors"),
        (lambda: (nn.Linear(8, 8), (_quantised(),)), "quantised tensors"),
        (lambda: (torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8))), (INPUT,)), "quantised"),
        (lambda: (nn.Sequential(torch.jit.script(nn.Linear(8, 8))), (INPUT,)), "modules of torch.jit"),
        (lambda: (torch.jit.trace(nn.Linear(8, 8), INPUT), (INPUT,)), "modules of torch.jit"),
        (lambda: (torch.jit.freeze(torch.jit.script(nn.Linear(8, 8).eval())), (INPUT,)), "modules of torch.jit"),
        (lambda: (Then(torch.jit.trace(torch.relu, INPUT)), (INPUT,)), "modules of torch.jit"),
        (lambda: (torch.distributed.fsdp.fully_shard(nn.Linear(8, 8)), (INPUT,)), "cut over processes"),
        (lambda: (nn.Sequential(nn.LazyLinear(8)), (INPUT,)), "lazy modules"),
        (lambda: (nn.Sequential(_packed()), (INPUT,)), "wrap others (0.weight)"),
    ],
)
def test_refused_kinds(build: Callable[[], Any], said: str) -> None:
    """Each kind is refused in one line with its remedy, whether it is built under fake tensors or before."""
    with pytest.raises(InputError, match=r"not supported: .*; give") as refused:
        capture_fn(build, training=False)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.to_sparse().to_dense(), "sparse tensors, "),
        (
            lambda x: torch.sparse.mm(torch.sparse_coo_tensor(torch.zeros(2, 3).long(), torch.ones(3), (4, 4)), x),
            "sparse",
        ),
        (lambda x: _csr() @ x, "sparse tensors, "),
        (lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 4])), "nested (jagged) tensors, "),
        (lambda x: torch.nested.as_nested_tensor([x, x]), "nested (jagged) tensors, "),
        (lambda x: x.to_mkldnn().to_dense(), "oneDNN's layouts, "),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize(), "quantised tensors of torch.ao, "),
        (
            lambda x: pack_padded_sequence(x[None], torch.tensor([3])).data,
            "packed sequences, whose sizes are content, ",
        ),
        (lambda x: pack_sequence([x[:2], x]).data, "packed sequences, whose sizes are content, "),
    ],
)
def test_refused_kinds_inside(function: Callable[[Tensor], Tensor], said: str) -> None:
    """A kind that the model makes itself is refused with the line that makes it."""
    with pytest.raises(InputError, match=r"not supported: .*test_unsupported.py line \d+; (give|leave)") as refused:
        capture(Then(function), (INPUT,), training=False)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: (Product(), (INPUT, torch.eye(4).to_sparse())), "sparse tensors (input.1)"),
        (lambda: (Product(torch.eye(4).to_sparse_csr()), (INPUT,)), "sparse tensors (matrix)"),
        (lambda: (nn.Linear(8, 8), (torch.nested.nested_tensor([INPUT]),)), "nested (jagged) tensors (input.0)"),
        (lambda: (_packed(), (INPUT,)), "other tensors that wrap others (weight)"),
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


def _with_a_parameter_on_meta() -> tuple[Any, ...]:
    net = nn.Linear(8, 8)
    net.weight = nn.Parameter(torch.empty(8, 8, device="meta"))
    return net, (INPUT,)


def _all_on_meta() -> tuple[Any, ...]:
    with torch.device("meta"):
        return nn.Linear(8, 8), (torch.ones(4, 8),)


def _by_default() -> tuple[Any, ...]:
    torch.set_default_device("meta")
    try:
        return nn.Linear(8, 8), (torch.ones(4, 8),)
    finally:
        torch.set_default_device(None)


def _of_accelerate() -> tuple[Any, ...]:
    from accelerate import init_empty_weights

    with init_empty_weights():
        return nn.Linear(8, 8), (INPUT,)


def _assigned() -> tuple[Any, ...]:
    net, inputs = _on_meta()
    net.load_state_dict({"weight": torch.ones(8, 8), "bias": torch.ones(8)}, assign=True)
    return net, inputs


def _mixed() -> tuple[Any, ...]:
    net = nn.Sequential(nn.Identity(), nn.Linear(8, 8, device="meta"))
    net.register_buffer("scale", torch.ones(8))
    return net, (INPUT,)


@pytest.mark.parametrize(
    "build",
    [
        _on_meta,
        _with_a_parameter_on_meta,
        _all_on_meta,
        _by_default,
        _of_accelerate,
        _assigned,
        _mixed,
        lambda: (nn.utils.skip_init(nn.Linear, 8, 8), (INPUT,)),
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
