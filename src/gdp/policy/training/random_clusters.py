"""Clusters to train on: any number and mix of built-in kinds, wired in any of the usual ways.

Drawn are the number of devices, their inequality and their links, on which a policy must not rely. Ranges are those of
`gdp.cluster.catalogue`, a little wider. D devices.
"""

from dataclasses import replace
from itertools import permutations

import numpy as np

from gdp.cluster import Cluster, Route
from gdp.cluster.catalogue import KINDS, DeviceKind

_WIRING = ("port", "pair", "bus")
_MAX_KINDS = 3
_MAX_HOSTS = 4
_SPEED = (0.5, 2.0)  # times a kind's own rates: cards between the built-in ones
_LINK_BYTES_PER_SECOND = (6e9, 450e9)  # half of PCIe 3.0 x16 (shared, or 8 lanes) to NVLink 4
_LINK_LATENCY_NS = (1_000, 30_000)  # from that of a socket to three times the assumed 10 us of a copy
_NETWORK_BYTES_PER_SECOND = (1.25e9, 50e9)  # 10 to 400 Gbit/s
_NETWORK_LATENCY_NS = (5_000, 50_000)


def draw_cluster(rng: np.random.Generator, min_devices: int, max_devices: int) -> Cluster:
    """Draws a cluster of `min_devices` to `max_devices` devices, small ones as often as large ones (log-uniform).

    Half of all clusters are of one kind; two in five have several hosts. Within a host devices share nothing but their
    own ports, nothing at all, or one bus.
    """
    num_devices = min(int(_log_uniform(rng, (min_devices, max_devices + 1))), max_devices)
    names = rng.choice(sorted(KINDS), size=min(int(rng.geometric(0.5)), _MAX_KINDS), replace=False).tolist()
    kinds = {name: _vary(KINDS[name], rng) for name in names}
    kind_of = sorted(rng.choice(names, size=num_devices).tolist(), key=names.index)
    devices = [kinds[name].device(f"dev{number}", name) for number, name in enumerate(kind_of)]
    num_hosts = min(int(rng.integers(2, _MAX_HOSTS + 1)), num_devices) if rng.random() < 0.4 else 1
    host_of = np.arange(num_devices) * num_hosts // num_devices
    return Cluster.build(f"random-{num_devices}", devices, _routes(rng, host_of.tolist()))


def _vary(kind: DeviceKind, rng: np.random.Generator) -> DeviceKind:
    compute, bandwidth = _log_uniform(rng, _SPEED), _log_uniform(rng, _SPEED)
    rates = {dtype: round(rate * compute) for dtype, rate in kind.flops_per_second.items()}
    memory_bytes_per_second = round(kind.memory_bytes_per_second * bandwidth)
    return replace(kind, flops_per_second=rates, memory_bytes_per_second=memory_bytes_per_second)


def _routes(rng: np.random.Generator, host_of: list[int]) -> dict[tuple[int, int], Route]:
    """Draws the route of every ordered pair: within a host by its wiring, between hosts also over network cards."""
    wiring = _WIRING[int(rng.integers(len(_WIRING)))]
    local_rate, local_ns = _log_uniform(rng, _LINK_BYTES_PER_SECOND), _log_uniform(rng, _LINK_LATENCY_NS)
    network_rate, network_ns = _log_uniform(rng, _NETWORK_BYTES_PER_SECOND), _log_uniform(rng, _NETWORK_LATENCY_NS)
    routes = {}
    for source, target in permutations(range(len(host_of)), 2):
        a, b = host_of[source], host_of[target]
        rate, latency_ns = local_rate, local_ns
        if a != b:
            rate, latency_ns = min(local_rate, network_rate), local_ns + network_ns
            channels = [f"host{a}.net.out", f"host{b}.net.in"]
        elif wiring == "pair":
            channels = [f"dev{source}->dev{target}"]
        else:
            channels = []
        if wiring == "port":
            channels += [f"dev{source}.out", f"dev{target}.in"]
        elif wiring == "bus":
            channels += sorted({f"host{a}.bus", f"host{b}.bus"})
        routes[source, target] = Route(round(latency_ns), round(rate), tuple(channels))
    return routes


def _log_uniform(rng: np.random.Generator, bounds: tuple[float, float]) -> float:
    return float(np.exp(rng.uniform(np.log(bounds[0]), np.log(bounds[1]))))
