"""Cluster: the devices of a machine and the routes between them; `gdp-cluster` files and presets.

docs/machine-model.md, sections 2 and 6, is the definition; docs/devices.md explains presets and the built-in figures.
D devices. A channel is named after the shared hardware: `gpu0.pcie.up` (a card's slot, towards the host),
`gpu1.nvlink.in` (a port of a switch), `host0.net.out` (a network card), `gpu0->gpu1` (a route's own)."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdp import notebook
from gdp.arrays import I64
from gdp.cluster import cluster_file, groups
from gdp.cluster.detect import Machine, detect
from gdp.cluster.device import WORD_DEVICES, Device, Route, check_devices, split_runtime
from gdp.cluster.parse_devices import preset
from gdp.errors import InputError, prefixed, suggest
from gdp.files import fingerprint as fingerprint_of
from gdp.files import without_collection
from gdp.notebook import size


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices and a route for each ordered pair of them, as read-only arrays; make one with `Cluster.build`.

    Raises InputError (a ValueError) naming the device or pair, its value and the remedy."""

    name: str
    devices: tuple[Device, ...]  # [D] at most 1,024
    channels: tuple[str, ...]  # unique names
    latency_ns: I64  # [D, D] 0 on the diagonal
    bytes_per_second: I64  # [D, D] 0 on the diagonal
    route_channels: tuple[tuple[tuple[int, ...], ...], ...]  # [D][D] ascending channel numbers
    # [D, D] names of what is known of exchanges over routes, "" for nothing; [0, 0] where nothing is of any
    exchanges: npt.NDArray[np.str_] = field(default_factory=lambda: np.empty((0, 0), np.str_))

    def __post_init__(self) -> None:
        self.latency_ns.setflags(write=False)
        self.bytes_per_second.setflags(write=False)
        _check(self)

    def __repr__(self) -> str:
        """Returns `Cluster('2xl4-24g': 2 l4-24g, 44.0 GiB in all)`."""
        kinds = Counter(f"({each.num_cards}x{each.kind})" if each.group else each.kind for each in self.devices)
        counts = ", ".join(f"{count} {kind}" for kind, count in list(kinds.items())[:4])
        more = f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else ""
        total = size(sum(device.num_cards * device.memory_bytes for device in self.devices))
        return f"Cluster({self.name!r}: {counts}{more}, {total} in all)"

    def _repr_html_(self) -> str:
        """The devices, as Jupyter shows them."""
        rows = [
            [device.name, device.kind, size(device.memory_bytes), f"{device.memory_bytes_per_second / 1e9:,.0f}"]
            for device in self.devices[: notebook.MOST_ROWS]
        ]
        more = self.num_devices - len(rows)
        headings = ["device", "kind", "memory", "GB/s"]
        return notebook.table(repr(self), headings, rows, f"and {more} more" if more else "")

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def is_large(self) -> bool:
        """True for more devices than a machine word has bits: sets of them are lists then, and tables of ops times
        devices are avoided."""
        return self.num_devices > WORD_DEVICES

    @classmethod
    def build(cls, name: str, devices: Sequence[Device], routes: Mapping[tuple[int, int], Route]) -> "Cluster":
        """Builds the cluster; `routes` has every ordered pair of numbers. Channels are in order of name."""
        num_devices = len(devices)
        channels = tuple(sorted({channel for route in routes.values() for channel in route.channels}))
        numbers = {channel: number for number, channel in enumerate(channels)}
        latency_ns, bytes_per_second = np.zeros((2, num_devices, num_devices), np.int64)
        route_channels = [[()] * num_devices for _ in devices]  # type: list[list[tuple[int, ...]]]
        sources, targets = np.array(list(routes), np.int64).reshape(-1, 2).T
        latency_ns[sources, targets] = [route.latency_ns for route in routes.values()]
        bytes_per_second[sources, targets] = [route.bytes_per_second for route in routes.values()]
        for (source, target), route in routes.items():
            route_channels[source][target] = tuple(sorted([numbers[channel] for channel in route.channels]))
        names = [route.exchange for route in routes.values()]
        exchanges = np.full(
            (num_devices, num_devices) if any(names) else (0, 0), "", f"U{max(map(len, names), default=1)}"
        )
        if exchanges.size:
            exchanges[sources, targets] = names
        of_routes = latency_ns, bytes_per_second, tuple(map(tuple, route_channels))
        return cls(name, tuple(devices), channels, *of_routes, exchanges)

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Returns the cluster that `text` names: a preset such as `4xp100-pcie-16g`, a `gdp-cluster` file, or `local`.

        It is a path if that file exists or the name ends in .yaml, .yml, .json or .gz; docs/devices.md has the grammar.
        `local` is this machine as it is now. Behind a colon, the runtime may follow: `4xa100-sxm-80g:compile`."""
        devices, runtime = split_runtime(text.strip())
        if devices.endswith((".yaml", ".yml", ".json", ".gz")) or os.path.isfile(devices):
            cluster = cls.load(devices)
        elif devices == "local":
            cluster = cls.of_machine(detect())
        else:
            with without_collection():
                cluster = cls.build(devices, *preset(devices))
        return cluster if runtime is None else cluster.run_by(runtime)

    def run_by(self, runtime: str) -> "Cluster":
        """Returns the cluster whose GPUs run a step by "eager", "compile" or "cuda-graphs"; InputError for others."""
        devices = [device if device.is_cpu else replace(device, runtime=runtime) for device in self.devices]
        check_devices(devices)
        return replace(self, name=f"{split_runtime(self.name)[0]}:{runtime}", devices=tuple(devices))

    def grouped(self, num_ranks: int, shares: Sequence[int] = ()) -> "Cluster":
        """Returns the cluster whose cards are groups of `num_ranks` equal ones of a host, see `gdp.cluster.groups`.
        With `shares` it is one group of the first cards of any kinds.

        InputError where there is no such group. One whose cards are in such groups is returned as it is."""
        cards = [device for device in self.devices if not device.is_cpu] or self.devices
        if all(device.num_cards == num_ranks for device in cards):
            return self
        if shares:
            return Cluster.build(self.name, [groups.unequal_group(self, shares)], {})
        return Cluster.build(self.name, *groups.grouped(self, num_ranks))

    def group_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of groups on the fastest links: (2, 4, 8) on eight cards."""
        return groups.group_sizes(self)

    @classmethod
    def of(cls, value: "Cluster | str | Path") -> "Cluster":
        """Returns `value`, parsed if it is text or a path; see `parse`."""
        if isinstance(value, Cluster):
            return value
        if isinstance(value, str | Path):
            return cls.parse(str(value))
        raise InputError(
            f"cluster is a {type(value).__name__}; a Cluster or a text such as '4xp100-pcie-16g' is expected"
        )

    @classmethod
    def of_machine(cls, machine: Machine) -> "Cluster":
        """The devices of a machine that was detected, with built-in figures or estimates; it is called `local`."""
        return cls.build("local", *machine.cluster())

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Reads a `gdp-cluster` file: JSON if its name ends in .json or .json.gz, else YAML."""
        document = cluster_file.read_document(path)
        with prefixed(path):
            return cls.from_document(document)

    def save(self, path: str | Path) -> None:
        """Writes a `gdp-cluster` file with all figures explicit, atomically: JSON or YAML like `load`, gzip for .gz."""
        cluster_file.write_document(path, self.to_document())

    @classmethod
    def from_document(cls, document: object) -> "Cluster":
        """Returns the cluster of a `gdp-cluster` document; unknown keys, wrong types and versions are errors."""
        return cls.build(*cluster_file.parse_document(document))

    def to_document(self) -> dict[str, Any]:
        """The `gdp-cluster` document with every field explicit: one link for each ordered pair, bare numbers."""
        devices = [
            {"name": device.name, "kind": device.kind, **cluster_file.figures_of(device)}
            | {"flops": dict(sorted(device.flops_per_second.items()))}
            for device in self.devices
        ]
        names, channels = [device.name for device in self.devices], self.channels
        rates, latencies = self.bytes_per_second.tolist(), self.latency_ns.tolist()
        links = [
            {
                "from": names[source],
                "to": names[target],
                "bandwidth": rates[source][target],
                "latency": latencies[source][target],
                "both": False,
                "channels": sorted([channels[number] for number in self.route_channels[source][target]]),
            }
            | ({"exchange": name} if (name := self.exchange(source, target)) else {})
            for source, target in permutations(range(self.num_devices), 2)
        ]
        return {
            "format": cluster_file.FORMAT,
            "version": cluster_file.VERSION,
            "name": self.name,
            "devices": devices,
            "links": links,
        }

    @cached_property
    def num_channels(self) -> I64:
        """[D, D] the number of channels of each route."""
        counts = np.fromiter((len(channels) for row in self.route_channels for channels in row), np.int64)
        return counts.reshape(self.num_devices, self.num_devices)

    @cached_property
    def channels_in_turn(self) -> I64:
        """The channels of the route from device 0 to 0, then of that from 0 to 1, and so on."""
        return np.fromiter((each for row in self.route_channels for channels in row for each in channels), np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical content: compact sorted JSON, all fields explicit, the cluster's name left out."""
        with without_collection():
            return fingerprint_of(self.to_document())

    def route(self, source: int, target: int) -> Route:
        """The route from device `source` to device `target` as a record."""
        return Route(
            int(self.latency_ns[source, target]),
            int(self.bytes_per_second[source, target]),
            tuple(self.channels[channel] for channel in self.route_channels[source][target]),
            self.exchange(source, target),
        )

    def exchange(self, source: int, target: int) -> str:
        """Returns the figures of exchanges over a route: a name in `catalogue.EXCHANGES`; "" for nothing."""
        return str(self.exchanges[source, target]) if self.exchanges.size else ""

    def device_number(self, name: str) -> int:
        """The number of the device called `name`, or of the group that has this card; InputError lists near matches."""
        numbers = [number for number, device in enumerate(self.devices) if name in (device.name, *device.group)]
        if not numbers:
            names = [device.name for device in self.devices]
            raise InputError(f"device {name!r}: is not in cluster {self.name!r}; {suggest(name, names)}")
        return numbers[0]

    def devices_called(self, name: str) -> list[int]:
        """Returns the numbers of devices called `name`, else of this kind; InputError if there is none."""
        named = [number for number, device in enumerate(self.devices) if name in (device.name, *device.group)]
        numbers = named or [number for number, device in enumerate(self.devices) if device.kind == name]
        if not numbers:
            candidates = list(dict.fromkeys(text for device in self.devices for text in (device.name, device.kind)))
            raise InputError(
                f"{name!r} is no device and no kind of device in {self.name!r}; {suggest(name, candidates)}"
            )
        return numbers


def _check(cluster: Cluster) -> None:
    check_devices(cluster.devices)
    apart = ~np.eye(cluster.num_devices, dtype=np.bool_)

    def name(pair: I64) -> str:
        return f"route {cluster.devices[pair[0]].name} -> {cluster.devices[pair[1]].name}"

    for pair in np.argwhere((cluster.bytes_per_second <= 0) & apart)[:1]:
        raise InputError(
            f"{name(pair)}: bandwidth is {cluster.bytes_per_second[tuple(pair)]}; give every pair a route of at least "
            "1 byte per second"
        )
    for pair in np.argwhere((cluster.latency_ns < 0) & apart)[:1]:
        raise InputError(f"{name(pair)}: latency is {cluster.latency_ns[tuple(pair)]} ns; at least 0 is expected")
