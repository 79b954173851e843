"""Control flow of PyTorch: the operators of one run are captured, with their gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.pytorch import capture
from gdp.models.pytorch.control_flow import COND_NOTE, LOOP_NOTE

ROWS, WIDTH = 6, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # FLOPs of one product of all rows


class Controlled(nn.Module):
    """A product whose use is up to `control`."""

    def __init__(self, control: Callable[["Controlled", Tensor], Tensor]) -> None:
        super().__init__()
        self.control = control
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the result of the control flow."""
        return self.control(self, x)


def _product_flops(graph: Graph) -> int:
    return sum(flops for kind, flops in zip(graph.kinds, graph.flops.tolist(), strict=True) if kind == "aten.mm")


def _is_below(count: int) -> Callable[..., Tensor]:
    return lambda turn, _x: turn.sum() < count


def _turn(net: Controlled) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda turn, x: (turn + 1, net.linear(x))


def _cell(net: Controlled) -> Callable[..., tuple[Tensor, Tensor]]:
    def cell(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = net.linear(state + row)
        return state, state.clone()

    return cell


def _nested(net: Controlled, x: Tensor) -> Tensor:
    inner = lambda y: torch.cond(y.min() > 0, net.linear, torch.sin, (y,))  # noqa: E731
    return torch.cond(x.sum() > 0, torch.cos, inner, (x,))


def _chained(net: Controlled, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.cond(x.sum() > 0, net.linear, torch.sin, (x,))
    return x


def _branch_of_scan(net: Controlled, x: Tensor) -> Tensor:
    scanned = lambda y: scan(_cell(net), torch.zeros(1, WIDTH), y.unsqueeze(1))[1]  # noqa: E731
    return torch.cond(x.sum() > 0, scanned, lambda y: y.unsqueeze(1).clone(), (x,))


@pytest.mark.parametrize(
    ("control", "num_products", "note"),
    [
        (lambda net, x: torch.cond(x.sum() > 0, net.linear, torch.sin, (x,)), 1, COND_NOTE),
        (lambda net, x: torch.cond(x.sum() > 0, torch.sin, lambda y: net.linear(net.linear(y)), (x,)), 2, COND_NOTE),
        (lambda net, x: torch.ops.higher_order.cond(x.sum() > 0, net.linear, torch.sin, (x,)), 1, COND_NOTE),
        (_nested, 1, COND_NOTE),
        (lambda net, x: torch.cond(torch.tensor(1) > 2, torch.sin, net.linear, (x,)), 1, None),
        (lambda net, x: while_loop(lambda turn, _x: turn < 5, _turn(net), (0, x))[1], 5, None),
        (lambda net, x: while_loop(_is_below(4), _turn(net), (torch.zeros(1), x))[1], 4, None),
        (lambda net, x: while_loop(_is_below(4), _turn(net), (torch.tensor(2), x))[1], 2, None),
        (lambda net, x: while_loop(lambda _turn, x: x.sum() < 1, _turn(net), (0, x))[1], 1, LOOP_NOTE),
        (lambda net, x: scan(_cell(net), torch.zeros(1, WIDTH), x.unsqueeze(1))[1], 1, None),  # six rows
        (lambda net, x: scan(_cell(net), torch.zeros(1, WIDTH), x.unsqueeze(0), dim=1, reverse=True)[1], 1, None),
        (_chained, 3, COND_NOTE),
        (_branch_of_scan, 1, COND_NOTE),
        (lambda net, x: torch.vmap(net.linear)(x), 1, None),
        (lambda net, x: net.linear(associative_scan(torch.mul, x, dim=1, combine_mode="generic")), 1, None),
        (lambda net, x: mapped(net.linear, x.unsqueeze(1)), 1, None),
        (lambda net, x: net.linear(associative_scan(torch.add, x, dim=0)), 1, None),
    ],
)
def test_work_of_control_flow(control: Callable[..., Tensor], num_products: int, note: str | None) -> None:
    """The products of a branch, or of all turns, are there: in training three times."""
    net, x = Controlled(control), torch.ones(ROWS, WIDTH)
    captured = capture(net, (x,), training=False)
    assert _product_flops(captured.graph) == num_products * PRODUCT
    assert note is None or note in captured.notes
    assert _product_flops(capture(net, (x.requires_grad_(),)).graph) == 3 * num_products * PRODUCT


def test_unknown_control_flow() -> None:
    """An operator of functions that is not known is refused by its name."""
    net = Controlled(lambda net, x: torch.ops.higher_order.strict_mode(net.linear, (x,)))
    with pytest.raises(InputError, match=r"not supported: torch.ops.higher_order.strict_mode, .*; call the function"):
        capture(net, (torch.ones(ROWS, WIDTH),), training=False)
