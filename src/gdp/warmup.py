"""Compile before the clock starts: what Numba takes for it on a new machine is no part of anybody's budget."""

from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.place import place

_NUM_OPS = 40  # enough for `auto` to go through every stage
_MIB = 2**20


def warm_up() -> None:
    """Run `auto` on a small step that only just fits: all that it calls is compiled, or loaded from the cache."""
    ops = [Op(f"op{op}", "mm", 10**9, resident_bytes=_MIB, module=f"layers.{op // 4}") for op in range(_NUM_OPS)]
    tensors = [
        Tensor(op, tuple(later for later in (op + 2, op + 3) if later < _NUM_OPS), _MIB) for op in range(_NUM_OPS - 2)
    ]
    limit = (_NUM_OPS // 2 + 4) * _MIB  # half of what is resident and some tensors
    place(
        Graph.build("warm-up", ops, tensors), Cluster.parse("2xp100-pcie-16g"), budget=Budget(simulations=200),
        max_memory_bytes={"gpu0": limit, "gpu1": limit},
    )  # fmt: skip
