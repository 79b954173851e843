"""Clusters to train on: any number and mix of built-in kinds, wired in any of the usual ways.

Drawn are the number of devices, their inequality and their links, on which a policy must not rely. Ranges are those of
`gdp.cluster.catalogue`, a little wider. D devices.
"""

from dataclasses import replace
from itertools import permutations

import numpy as np

from gdp.cluster import Cluster, Route
from gdp.cluster.catalogue import KINDS, DeviceKind
from gdp.policy.settings import DRAWN


def draw_cluster(rng: np.random.Generator, min_devices: int, max_devices: int) -> Cluster:
    """Draws a cluster of `min_devices` to `max_devices` devices, small ones as often as large ones (log-uniform).

    Half of all clusters are of one kind; two in five have several hosts. Within a host devices share nothing but their
    own ports, nothing at all, or one bus.
    """
    num_devices = min(int(_log_uniform(rng, (min_devices, max_devices + 1))), max_devices)
    names = rng.choice(sorted(KINDS), size=min(int(rng.geometric(0.5)), DRAWN.most_kinds), replace=False).tolist()
    kinds = {name: _vary(KINDS[name], rng) for name in names}
    kind_of = sorted(rng.choice(names, size=num_devices).tolist(), key=names.index)
    devices = [kinds[name].device(f"dev{number}", name) for number, name in enumerate(kind_of)]
    num_hosts = min(int(rng.integers(2, DRAWN.most_hosts + 1)), num_devices) if rng.random() < DRAWN.hosts_share else 1
    host_of = np.arange(num_devices) * num_hosts // num_devices
    return Cluster.build(f"random-{num_devices}", devices, _routes(rng, host_of.tolist()))


def _vary(kind: DeviceKind, rng: np.random.Generator) -> DeviceKind:
    compute, bandwidth = _log_uniform(rng, DRAWN.speed), _log_uniform(rng, DRAWN.speed)
    rates = {dtype: round(rate * compute) for dtype, rate in kind.flops_per_second.items()}
    memory_bytes_per_second = round(kind.memory_bytes_per_second * bandwidth)
    return replace(kind, flops_per_second=rates, memory_bytes_per_second=memory_bytes_per_second)


def _routes(rng: np.random.Generator, host_of: list[int]) -> dict[tuple[int, int], Route]:
    """Draws the route of every ordered pair: within a host by its wiring, between hosts also over network cards."""
    wiring = DRAWN.wiring[int(rng.integers(len(DRAWN.wiring)))]
    local_rate, local_ns = _log_uniform(rng, DRAWN.link_bytes_per_second), _log_uniform(rng, DRAWN.link_latency_ns)
    rates, latencies_ns = DRAWN.network_bytes_per_second, DRAWN.network_latency_ns
    network_rate, network_ns = _log_uniform(rng, rates), _log_uniform(rng, latencies_ns)
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
