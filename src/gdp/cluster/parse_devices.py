"""Presets: the devices and routes that a text such as `4xp100-pcie-16g` names. docs/devices.md explains presets."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from gdp.cluster.catalogue import EXCHANGES, GB, KINDS, LINKS, MACHINES, NETWORK, NETWORK_LATENCY_NS, SOCKET, LinkKind
from gdp.cluster.device import MAX_DEVICES, RUNTIMES, Device, Route
from gdp.errors import InputError, suggest

_GROUP = re.compile(r"(?:([0-9]+)x)?([^:]*)(?::(.*))?")
_TOGETHER = re.compile(r"([0-9]+)x\((.*)\)@(?:([0-9]{1,3})x)?([0-9]{1,6})gbit")
_MACHINES = re.compile(rf"([0-9]+)x({'|'.join(map(re.escape, MACHINES))})")
_HOSTS = re.compile(r"([0-9]+)x([0-9]+x([^():+@]+))(?:@([0-9x]+gbit))?")
_NUM_SHOWN = 100_000  # numbers from here on may be cut off by `_count`; messages do not show them


@dataclass(frozen=True, slots=True)
class _Network:
    """The network cards of a host."""

    link: LinkKind  # of one card
    num_cards: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A device of a preset with its links; `host` is "", "host0." or "pod0.host0.", `index` its number there."""

    device: Device
    host: str
    index: int
    port: LinkKind
    nvlink: LinkKind | None
    to_peers: LinkKind  # to cards of the host: over the port, or over the memory of the host
    card: str = ""  # of the network: "host0.net" and so on
    pod: str = ""  # "pod0." and so on
    uplink: str = ""  # of the pod, which the network card takes: "pod0.up3"; "": it has one of its own

    @property
    def is_cpu(self) -> bool:
        return self.port.name == SOCKET


def preset(text: str) -> tuple[list[Device], dict[tuple[int, int], Route]]:
    """Returns the devices of a preset such as `4xp100-pcie-16g` and the route of every ordered pair of them.

    preset = local | hosts | pods
    pods   = COUNT "x(" hosts ")@" RATE "gbit"       each with uplinks of RATE in each direction, which its hosts share
    hosts  = COUNT "x" MACHINE | COUNT "x" COUNT "x" KIND [ "@" ... ] | COUNT "x(" local ")@" [ COUNT "x" ] RATE "gbit"
                                                      RATE: of one of its network cards
    local  = group { "+" group }
    group  = [ COUNT "x" ] KIND [ ":" LINK ]         LINK: pcie3-5, pcie4-host or nvlink1-5 instead of the kind's own

    Upper and lower case are the same. Links of like cards are as NCCL uses them, see `EXCHANGES`."""
    lower = text.lower()
    outer = _TOGETHER.fullmatch(_spelled(lower))
    if outer is None:
        parts = _parts(text, text, "")
        return [part.device for part in parts], _routes(parts, None)
    inner = _TOGETHER.fullmatch(_spelled(outer[2]))
    num_pods, uplink_gbit = (1, 0) if inner is None else (_count(outer[1]), int(outer[4]))
    hosts = outer if inner is None else inner
    num_hosts, num_cards, gbit = _count(hosts[1]), _count(hosts[3] or "1"), int(hosts[4])
    if 0 in (num_pods, num_hosts, num_cards, gbit) or (inner is not None and uplink_gbit == 0):
        raise InputError(f"devices {text!r}: hosts and network rate must be at least 1, as in 2x(4xl4-24g)@10gbit")
    if inner is not None and outer[3] is not None:
        raise InputError(f"devices {text!r}: a pod has one uplink rate, as in 2x(4x(8xl4-24g)@10gbit)@20gbit")
    num_local = len(_parts(hosts[2], text, ""))
    _check_count(text, num_pods * num_hosts * num_local)
    network = _Network(LinkKind(NETWORK, gbit * GB // 8, NETWORK_LATENCY_NS), num_cards)
    uplinks = _Uplinks(num_hosts * num_cards, gbit, uplink_gbit) if inner is not None else None
    parts = [
        part
        for pod in range(num_pods)
        for host in range(num_hosts)
        for part in _on_host(hosts[2], text, network, "" if uplinks is None else f"pod{pod}.", host, uplinks)
    ]
    rate = network.link.bytes_per_second
    between_pods = (
        None if uplinks is None else LinkKind("uplink", min(rate, uplinks.bytes_per_second), NETWORK_LATENCY_NS)
    )
    return [part.device for part in parts], _routes(parts, network.link, between_pods)


@dataclass(frozen=True, slots=True)
class _Uplinks:
    """The uplinks of a pod. A transfer takes a channel for itself, so what carries several at once is several: as many
    as have the rate of a network card each. Cards take one of them each in turn."""

    num_cards: int  # of the pod
    card_gbit: int
    gbit: int

    @property
    def count(self) -> int:
        return min(max(self.gbit // self.card_gbit, 1), self.num_cards)

    @property
    def bytes_per_second(self) -> int:
        """The rate of one of them."""
        return self.gbit * GB // 8 // self.count

    def of_card(self, number: int) -> str:
        """Returns the uplink of a network card of the pod; "" where each card has one for itself."""
        if self.count == self.num_cards and self.gbit >= self.card_gbit * self.num_cards:
            return ""
        return "up" if self.count == 1 else f"up{number % self.count}"


def _on_host(local: str, text: str, network: _Network, pod: str, number: int, uplinks: _Uplinks | None) -> list[_Part]:
    """Returns the devices of a host; each one takes a network card in turn."""
    host = f"{pod}host{number}."
    parts = []
    for turn, part in enumerate(_parts(local, text, host)):
        card = turn % network.num_cards
        uplink = "" if uplinks is None else uplinks.of_card(number * network.num_cards + card)
        name = f"{host}net" if network.num_cards == 1 else f"{host}net{card}"
        parts.append(replace(part, card=name, pod=pod, uplink=uplink and f"{pod}{uplink}"))
    return parts


def _spelled(text: str) -> str:
    """Returns `2xdgx-a100` as hosts with network cards, `2x8xa100-sxm-80g` as the first machine with these cards."""
    name = text.strip()
    if (match := _MACHINES.fullmatch(name)) is not None:
        return f"{match[1]}x({MACHINES[match[2]].local})@{MACHINES[match[2]].network}"
    if (match := _HOSTS.fullmatch(name)) is None or match[3] not in KINDS:
        return text
    known = (machine.network for machine in MACHINES.values() if machine.local == match[2])
    network = match[4] or next(known, None)
    hosts = f"{match[1]}x({match[2]})"
    if network is None:
        raise InputError(f"devices {text!r}: add the rate of a network card between the hosts: {hosts}@100gbit")
    return f"{hosts}@{network}"


def _count(text: str) -> int:
    """Returns the number that the first six digits are: more would be too many devices anyway."""
    return int(text[:6])


def _check_count(text: str, num_devices: int) -> None:
    if not 1 <= num_devices <= MAX_DEVICES:
        number = f"{num_devices:,}" if num_devices < _NUM_SHOWN else f"more than {MAX_DEVICES:,}"
        raise InputError(f"devices {text!r}: these are {number} devices; 1 to {MAX_DEVICES:,} are expected")


def _parts(local: str, text: str, host: str) -> list[_Part]:
    parts: list[_Part] = []
    counts = {"gpu": 0, "cpu": 0}
    for group in local.split("+"):
        match = _GROUP.fullmatch(group.strip().lower())
        if match is None or match[2] not in KINDS:
            name = match[2] if match else group
            if "(" in local:
                raise InputError(f"devices {text!r}: hosts and their network are expected as 2x(4xl4-24g)@25gbit")
            raise InputError(f"devices {text!r}: no kind {name!r} is built in; {suggest(name, list(KINDS))}")
        kind, count = KINDS[match[2]], _count(match[1] or "1")
        _check_count(text, count and len(parts) + count)
        override = match[3]
        links = [name for name in LINKS if name.startswith(("pcie", "nvlink"))]
        if override in RUNTIMES:
            rest = re.sub(rf":{override}\b", "", text.lower())
            raise InputError(f"devices {text!r}: all devices have one runtime, at the end: {rest}:{override}")
        if override is not None and (override not in links or kind.is_cpu):
            raise InputError(
                f"devices {text!r}: no link {override!r} for {match[2]}; {suggest(override, [*links, *RUNTIMES])}"
            )
        is_pcie = override is not None and override.startswith("pcie")
        to_peers = LINKS[override if override and is_pcie else kind.port]
        port = LINKS[to_peers.name.removesuffix("-host")]
        nvlink = LINKS.get(override or kind.nvlink) if not is_pcie else None
        for _ in range(count):
            family = "cpu" if kind.is_cpu else "gpu"
            device = kind.device(f"{host}{family}{counts[family]}", match[2])
            parts.append(_Part(device, host, counts[family], port, nvlink, to_peers))
            counts[family] += 1
    return parts


def _routes(
    parts: Sequence[_Part], network: LinkKind | None, uplink: LinkKind | None = None
) -> dict[tuple[int, int], Route]:
    """Returns all routes; `network` is the link between hosts, `uplink` that between pods."""
    routes = {}
    num_cards = Counter(part.host for part in parts if not part.is_cpu)
    ways = [_ways(part) for part in parts]
    figures: dict[tuple[str, str, bool], tuple[int, int]] = {}  # between hosts, where most routes are
    for source, target in permutations(range(len(parts)), 2):
        a, b = parts[source], parts[target]
        if a.host != b.host:
            is_far = a.pod != b.pod
            key = a.port.name, b.port.name, is_far
            if key not in figures:
                figures[key] = _slot_figures(a, b, uplink if is_far else network)
            routes[source, target] = Route(*figures[key], ways[source][is_far] + ways[target][2 + is_far])
        elif a.is_cpu and b.is_cpu:
            channels = (f"{a.device.name}.{SOCKET}.out", f"{b.device.name}.{SOCKET}.in")
            routes[source, target] = Route(a.port.latency_ns, a.port.bytes_per_second, channels)
        else:
            routes[source, target] = _nvlink_route(a, b) or Route(*_slot_figures(a, b, None), _slot(a)[0] + _slot(b)[1])
        if a.device.kind == b.device.kind and not a.is_cpu:
            route, is_far = routes[source, target], a.host != b.host
            link = NETWORK if is_far else a.nvlink.name if a.nvlink and _nvlink_route(a, b) else a.to_peers.name
            if (known := EXCHANGES.get(link)) is not None and (not is_far or uplink is None):
                at_once = num_cards[a.host] if known.is_switched else 2
                rate = round(route.bytes_per_second * known.share) if is_far else known.rate(at_once)
                routes[source, target] = Route(known.latency_ns, rate, route.channels, link)
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


def _slot(part: _Part) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the channels out of a device's slot and into it; a CPU has no slot."""
    return ((), ()) if part.is_cpu else ((f"{part.device.name}.pcie.up",), (f"{part.device.name}.pcie.down",))


def _ways(part: _Part) -> tuple[tuple[str, ...], ...]:
    """Returns the channels out of a host, out of its pod, and those into them, by the slot of a device."""
    up, down = _slot(part)
    out, into = (*up, f"{part.card}.out"), (f"{part.card}.in", *down)
    if not part.uplink:
        return out, out, into, into
    return out, (*out, f"{part.uplink}.out"), into, (f"{part.uplink}.in", *into)


def _slot_figures(a: _Part, b: _Part, network: LinkKind | None) -> tuple[int, int]:
    """Returns the latency and the rate from a's slot, over the network if any, to b's: that of the slowest of them."""
    are_peers = network is None and not (a.is_cpu or b.is_cpu)
    slots = [part.to_peers if are_peers else part.port for part in (a, b) if not part.is_cpu]
    copy_ns = max((slot.latency_ns for slot in slots), default=0)  # one copy, over any number of links
    network_ns = 0 if network is None else network.latency_ns
    return copy_ns + network_ns, min(link.bytes_per_second for link in (*slots, network) if link is not None)
