"""The routes that the links of a machine make.

cuda0 --cuda0->cuda1--> cuda1                                   NVLink from card to card
cuda0 --cuda0.nvlink.out--> switch --cuda1.nvlink.in--> cuda1   NVLink through a switch
cuda0 --cuda0.pcie.up--> cuda1.pcie.down--> cuda1               below one PCIe switch, or over the host
cuda0 --cuda0.pcie.up--> switch0.pcie.up--> cpu0                all below a PCIe switch share its way to the host
cuda0 --cuda0.pcie.up--> node0.upi.out--> node1.upi.in--> cuda2.pcie.down--> cuda2      to another NUMA node

Like cards exchange at what NCCL reaches over links of their generation, in proportion to their number and lanes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import permutations

from gdp.cluster.catalogue import COPY_LATENCY_NS, EXCHANGES, GB, KINDS, LINKS, SOCKET
from gdp.cluster.detect import nvml
from gdp.cluster.detect.gpu_figures import kind_of, slot_of
from gdp.cluster.device import Route

_WORDS = {nvml.BOARD: "one board", nvml.ONE_SWITCH: "one PCIe switch", nvml.SWITCHES: "PCIe switches"}
_WORDS |= {nvml.HOST_BRIDGE: "one host bridge", nvml.NODE: "one NUMA node", nvml.SYSTEM: "different NUMA nodes"}

# From one core's process to another's in gdp run, and the copy into memory that both share (docs/notes/execution.md).
_HAND_OVER_NS, _HAND_OVER_BYTES_PER_SECOND = 2_700, 12 * GB


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of two cards."""

    ancestor: str  # in words, "" where the driver does not tell
    num_nvlinks: int
    is_switched: bool
    bytes_per_second: int  # of NVLink if there is any, else of PCIe
    has_peer_copies: bool = True  # else all goes through the host's memory
    kind: str = ""  # of a link that is neither NVLink nor PCIe

    def __str__(self) -> str:
        links = f"{self.num_nvlinks} NVLink{'' if self.num_nvlinks == 1 else 's'}"
        wires = f"{links}{' to a switch' if self.is_switched else ''}" if self.num_nvlinks else self.kind or "PCIe"
        wires += "" if self.has_peer_copies else " without peer-to-peer copies"
        return f"{wires}, {self.bytes_per_second / 1e9:g} GB/s" + (f"; {self.ancestor}" if self.ancestor else "")


class Links:
    """Links and routes between cards and the host, by the cards' names. `refused`: without peer-to-peer copies."""

    def __init__(
        self,
        gpus: Mapping[str, nvml.Gpu],
        ancestors: Mapping[tuple[int, int], int],
        refused: Collection[tuple[int, int]] = (),
    ) -> None:
        self._gpus, self._ancestors, self._refused, cards = gpus, ancestors, refused, list(gpus.values())
        groups = nvml.groups_below(cards, ancestors, nvml.SWITCHES)
        shared = sorted({group for group in groups if groups.count(group) > 1})
        pairs = zip(gpus, groups, strict=True)
        self._switches = {name: f"switch{shared.index(group)}" for name, group in pairs if group in shared}
        self._nodes = dict(zip(gpus, nvml.groups_below(cards, ancestors, nvml.NODE), strict=True))

    def link(self, a: str, b: str) -> Link:
        """Returns the connection of two cards."""
        ancestor = _WORDS.get(-1 if (level := self._level(a, b)) is None else level, "")
        if kind := self._untold(a, b):
            return Link(ancestor, 0, False, LINKS[kind].bytes_per_second, kind=kind)
        num_links, is_switched = self._nvlinks(a, b)
        rate = num_links * min(self._gpus[name].nvlink_bytes_per_second for name in (a, b))
        rate = rate or self._over_pcie(a, b).bytes_per_second
        return Link(ancestor, num_links, is_switched, rate, bool(num_links) or self._has_peer_copies(a, b))

    def routes(self, names: list[str]) -> dict[tuple[int, int], Route]:
        """Returns the route of each ordered pair of devices; devices that are not cards are cores of the host."""
        return {(a, b): self._route(names[a], names[b]) for a, b in permutations(range(len(names)), 2)}

    def _route(self, a: str, b: str) -> Route:
        if a not in self._gpus and b not in self._gpus:
            return Route(_HAND_OVER_NS, _HAND_OVER_BYTES_PER_SECOND, ())
        if a not in self._gpus or b not in self._gpus:
            card, way = (a, "up") if a in self._gpus else (b, "down")
            passed = [card, self._switches[card]] if card in self._switches else [card]
            return Route(COPY_LATENCY_NS, self._slot_rate(card), tuple(f"{name}.pcie.{way}" for name in passed))
        num_links, is_switched = self._nvlinks(a, b)
        if link := self._untold(a, b):
            route = Route(COPY_LATENCY_NS, LINKS[link].bytes_per_second, (f"{a}->{b}",))
            return self._exchanging(a, b, route, link)
        if not num_links:
            kind = f"pcie{slot_of(self._gpus[a])[0]}" if self._has_peer_copies(a, b) else "pcie4-host"
            return self._exchanging(a, b, self._over_pcie(a, b), kind)
        channels = (f"{a}.nvlink.out", f"{b}.nvlink.in") if is_switched else (f"{a}->{b}",)
        route = Route(COPY_LATENCY_NS, self.link(a, b).bytes_per_second, channels)
        return self._exchanging(a, b, route, f"nvlink{self._gpus[a].nvlink_generation}")

    def _exchanging(self, a: str, b: str, route: Route, link: str) -> Route:
        """Returns the route over that kind of link with what exchanges of like cards reach on it."""
        kind, figures = kind_of(self._gpus[a]), EXCHANGES.get(link)
        num_alike = sum(kind_of(gpu) == kind for gpu in self._gpus.values())
        is_mesh = link.startswith("nvlink") and route.channels == (f"{a}->{b}",)  # rings use the links to all others
        if figures is None or kind != kind_of(self._gpus[b]) or (is_mesh and num_alike > 2):
            return route
        num_alike = num_alike if figures.is_switched else 2
        share = min(route.bytes_per_second / LINKS[link.removesuffix("-host")].bytes_per_second, 1.0)
        return Route(figures.latency_ns, round(figures.rate(num_alike) * share), route.channels, link)

    def _over_pcie(self, a: str, b: str) -> Route:
        up, down, rates = [f"{a}.pcie.up"], [f"{b}.pcie.down"], [self._slot_rate(a), self._slot_rate(b)]
        if self._switches.get(a, a) != self._switches.get(b, b):  # up to the host and down again
            up += [f"{self._switches[a]}.pcie.up"] if a in self._switches else []
            down += [f"{self._switches[b]}.pcie.down"] if b in self._switches else []
            if self._level(a, b) == nvml.SYSTEM:
                up.append(f"node{self._nodes[a]}.{SOCKET}.out")
                down.append(f"node{self._nodes[b]}.{SOCKET}.in")
                rates.append(LINKS[SOCKET].bytes_per_second)  # the number of links is unknown: as in presets
        return Route(COPY_LATENCY_NS, min(rates), (*up, *down))

    def _untold(self, a: str, b: str) -> str:
        """Returns the kind of link between cards of a built-in kind that NVML does not know, such as AMD's; else ""."""
        kinds = {kind_of(gpu) if gpu.number == nvml.UNKNOWN else "" for gpu in (self._gpus[a], self._gpus[b])}
        kind = KINDS.get(kinds.pop()) if len(kinds) == 1 else None
        return kind.nvlink if kind is not None and not LINKS[kind.nvlink or kind.port].is_switched else ""

    def _nvlinks(self, a: str, b: str) -> tuple[int, bool]:
        """Returns the number of links between two cards, and whether these pass a switch."""
        first, second = self._gpus[a], self._gpus[b]
        direct = max(first.nvlinks.get(second.number, 0), second.nvlinks.get(first.number, 0))
        if direct:  # both see it, unless one does not answer
            return direct, False
        switched = min(first.nvlinks.get(nvml.SWITCH, 0), second.nvlinks.get(nvml.SWITCH, 0))
        return switched, switched > 0

    def _has_peer_copies(self, a: str, b: str) -> bool:
        first, second = sorted(self._gpus[name].number for name in (a, b))
        return (first, second) not in self._refused

    def _level(self, a: str, b: str) -> int | None:
        return nvml.ancestor_of(self._ancestors, self._gpus[a], self._gpus[b])

    def _slot_rate(self, name: str) -> int:
        return pcie_bytes_per_second(*slot_of(self._gpus[name]))


def pcie_bytes_per_second(generation: int, width: int) -> int:
    """Returns the rate of large copies in one direction: `catalogue.LINKS` for 16 lanes, in proportion for fewer. A
    generation that is not in the table has twice the rate of the one before (PCI Express Base Specification)."""
    if (link := LINKS.get(f"pcie{generation}")) is not None:
        rate = link.bytes_per_second
    elif generation < 3:
        rate = LINKS["pcie3"].bytes_per_second >> (3 - generation)
    else:
        rate = LINKS["pcie5"].bytes_per_second << min(generation - 5, 8)
    return rate * min(width, 16) // 16
