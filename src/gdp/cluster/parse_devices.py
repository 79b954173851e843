"""Presets: the devices and routes that a text such as `4xp100-pcie-16g` names.

docs/devices.md explains presets.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from gdp.cluster.catalogue import GB, KINDS, LINKS, NETWORK_LATENCY_NS, SOCKET, LinkKind
from gdp.cluster.device import MAX_DEVICES, Device, Route
from gdp.errors import InputError, suggest

_GROUP = re.compile(r"(?:([0-9]+)x)?([^:]*)(?::(.*))?")
_HOSTS = re.compile(r"([0-9]+)x\((.*)\)@([0-9]{1,6})gbit")


@dataclass(frozen=True, slots=True)
class _Part:
    """A device of a preset with its links; `host` is "" or "host0." and so on, `index` its number on the host."""

    device: Device
    host: str
    index: int
    port: LinkKind
    nvlink: LinkKind | None

    @property
    def is_cpu(self) -> bool:
        return self.port.name == SOCKET


def preset(text: str) -> tuple[list[Device], dict[tuple[int, int], Route]]:
    """Returns the devices of a preset such as `4xp100-pcie-16g` and the route of every ordered pair of them.

    preset = local | COUNT "x(" local ")@" RATE "gbit"      hosts, each with a network card of RATE in each direction
    local  = group { "+" group }
    group  = [ COUNT "x" ] KIND [ ":" LINK ]                LINK: pcie3-5 or nvlink1-5 instead of the kind's own

    Upper and lower case are the same.
    """
    hosts = _HOSTS.fullmatch(text)
    if hosts is None:
        parts = _parts(text, text, "")
        return [part.device for part in parts], _routes(parts, None)
    num_hosts, gbit = int(hosts[1][:6]), int(hosts[3])
    if num_hosts == 0 or gbit == 0:
        raise InputError(f"devices {text!r}: hosts and network rate must be at least 1, as in 2x(4xl4-24g)@10gbit")
    num_local = len(_parts(hosts[2], text, ""))
    _check_count(text, num_hosts * num_local)
    parts = [part for number in range(num_hosts) for part in _parts(hosts[2], text, f"host{number}.")]
    return [part.device for part in parts], _routes(parts, LinkKind("network", gbit * GB // 8, NETWORK_LATENCY_NS))


def _check_count(text: str, num_devices: int) -> None:
    if not 1 <= num_devices <= MAX_DEVICES:
        raise InputError(f"devices {text!r}: these are {num_devices} devices; 1 to {MAX_DEVICES} are expected")


def _parts(local: str, text: str, host: str) -> list[_Part]:
    parts: list[_Part] = []
    counts = {"gpu": 0, "cpu": 0}
    for group in local.split("+"):
        match = _GROUP.fullmatch(group.strip().lower())
        if match is None or match[2] not in KINDS:
            name = match[2] if match else group
            raise InputError(f"devices {text!r}: no kind {name!r} is built in; {suggest(name, list(KINDS))}")
        kind, count = KINDS[match[2]], int((match[1] or "1")[:6])
        _check_count(text, count and len(parts) + count)
        override = match[3]
        links = [name for name in LINKS if name.startswith(("pcie", "nvlink"))]
        if override is not None and (override not in links or kind.is_cpu):
            raise InputError(f"devices {text!r}: no link {override!r} for {match[2]}; {suggest(override, links)}")
        is_pcie = override is not None and override.startswith("pcie")
        port = LINKS[override if override and is_pcie else kind.port]
        nvlink = LINKS.get(override or kind.nvlink) if not is_pcie else None
        for _ in range(count):
            family = "cpu" if kind.is_cpu else "gpu"
            device = kind.device(f"{host}{family}{counts[family]}", match[2])
            parts.append(_Part(device, host, counts[family], port, nvlink))
            counts[family] += 1
    return parts


def _routes(parts: Sequence[_Part], network: LinkKind | None) -> dict[tuple[int, int], Route]:
    routes = {}
    for source, target in permutations(range(len(parts)), 2):
        a, b = parts[source], parts[target]
        if a.host != b.host:
            routes[source, target] = _slot_route(a, b, network)
        elif a.is_cpu and b.is_cpu:
            channels = (f"{a.device.name}.{SOCKET}.out", f"{b.device.name}.{SOCKET}.in")
            routes[source, target] = Route(a.port.latency_ns, a.port.bytes_per_second, channels)
        else:
            routes[source, target] = _nvlink_route(a, b) or _slot_route(a, b, None)
    return routes


def _nvlink_route(a: _Part, b: _Part) -> Route | None:
    if a.nvlink is None or a.nvlink != b.nvlink:
        return None
    link, names = a.nvlink, (a.device.name, b.device.name)
    if link.is_switched:
        return Route(link.latency_ns, link.bytes_per_second, (f"{names[0]}.nvlink.out", f"{names[1]}.nvlink.in"))
    if link.name != "nvlink1":
        return Route(link.latency_ns, link.bytes_per_second, ("->".join(names),))
    # The hybrid cube-mesh: two fully connected quads, each card wired to its counterpart in the other quad.
    is_wired = a.index // 4 == b.index // 4 or (a.index // 8 == b.index // 8 and a.index % 4 == b.index % 4)
    return Route(link.latency_ns, link.bytes_per_second, ("->".join(names),)) if is_wired else None


def _slot_route(a: _Part, b: _Part, network: LinkKind | None) -> Route:
    """Returns the route out of a's slot, over the network if any, into b's slot, at the pace of the slowest.

    A CPU has no slot.
    """
    slots = [part.port for part in (a, b) if not part.is_cpu]
    up = () if a.is_cpu else (f"{a.device.name}.pcie.up",)
    between = () if network is None else (f"{a.host}net.out", f"{b.host}net.in")
    down = () if b.is_cpu else (f"{b.device.name}.pcie.down",)
    copy_ns = max((slot.latency_ns for slot in slots), default=0)  # one copy, over any number of links
    network_ns = 0 if network is None else network.latency_ns
    rates = [link.bytes_per_second for link in (*slots, network) if link is not None]
    return Route(copy_ns + network_ns, min(rates), (*up, *between, *down))
