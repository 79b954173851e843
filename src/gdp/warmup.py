"""Compile before the clock starts: what Numba takes for it on a new machine is no part of anybody's budget."""

from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.place import place

_NUM_OPS = 40  # enough for `guided` to go through every stage
_MIB = 2**20


def warm_up() -> None:
    """Run `guided` on small steps: all that it calls is compiled, or loaded from the cache.

    One is so small that it is searched exactly, one only just fits; the last has unequal devices, and transfers that
    keep every placement far from the lower bound, which would end the search.
    """
    place(_step(_MIB, num_ops=4), Cluster.parse("2xp100-pcie-16g"), budget=Budget(simulations=20), placer="guided")
    limit = (_NUM_OPS // 2 + 4) * _MIB  # half of what is resident and some tensors
    place(
        _step(_MIB), Cluster.parse("2xp100-pcie-16g"), budget=Budget(simulations=80),
        placer="guided", max_memory_bytes={"gpu0": limit, "gpu1": limit},
    )  # fmt: skip
    place(_step(64 * _MIB), Cluster.parse("2xp100-pcie-16g+l4-24g"), budget=Budget(simulations=80), placer="guided")


def _step(tensor_bytes: int, num_ops: int = _NUM_OPS) -> Graph:
    ops = [Op(f"op{op}", "mm", 10**9, resident_bytes=_MIB, module=f"layers.{op // 4}") for op in range(num_ops)]
    tensors = [
        Tensor(op, tuple(later for later in (op + 2, op + 3) if later < num_ops), tensor_bytes)
        for op in range(num_ops - 2)
    ]
    return Graph.build("warm-up", ops, tensors)
