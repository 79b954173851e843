"""Forward passes and machines whose throughput is worked out by hand."""

from functools import cache

from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor

LAYERS, WEIGHT_BYTES, HELD_BYTES = 4, 10**7, 10**6


def two_ops() -> Graph:
    """A chain of 2 and 3 ns; the first has 7 bytes of weights, the second a result of 5 bytes."""
    ops = [
        Op("w", "parameter", resident_bytes=7),
        Op("a", "mm", flops=2, phase="forward"),
        Op("b", "mm", flops=3, phase="forward"),
    ]
    return Graph.build("two", ops, [Tensor(0, (1,), 7, resident=True), Tensor(1, (2,), 0), Tensor(2, (), 5, keep=True)])


@cache
def forward_layers(num_layers: int = LAYERS) -> Graph:
    """Four layers of 10 ms at 1 Tflop/s, each with 10 MB of weights; 1 MB goes from one to the next."""
    ops = [Op(f"w{i}", "parameter", resident_bytes=WEIGHT_BYTES) for i in range(num_layers)]
    ops += [Op(f"f{i}", "mm", flops=10**10, phase="forward", module=f"layers.{i}") for i in range(num_layers)]
    tensors = [Tensor(i, (num_layers + i,), WEIGHT_BYTES, resident=True) for i in range(num_layers)]
    tensors += [Tensor(num_layers + i, (num_layers + i + 1,), HELD_BYTES) for i in range(num_layers - 1)]
    return Graph.build("layers", ops, tensors)


def machine(speeds: list[float], memory: str = "1GB") -> Cluster:
    """Devices of these speeds in Tflop/s, without launches, all connected at 10 GB/s."""
    devices = [
        {
            "name": f"d{number}",
            "kind": f"x{speed}",
            "memory": memory,
            "flops": {"float32": speed * 1e12},
            "memory_bandwidth": "1TB/s",
            "launch": 0,
        }
        for number, speed in enumerate(speeds)
    ]
    links = [{"from": "*", "to": "*", "bandwidth": "10GB/s", "latency": "10us"}] if len(speeds) > 1 else []
    return Cluster.from_document(
        {"format": "gdp-cluster", "version": 1, "name": "some", "devices": devices, "links": links}
    )
