"""Cluster: the devices of a machine and the routes between them; `gdp-cluster` files and presets.

docs/machine-model.md, sections 2 and 6, is the definition; docs/devices.md explains presets and the built-in figures.
D devices. A channel is named after what is shared: `gpu0.pcie.up` (a card's slot, towards the host), `gpu1.nvlink.in`
(a port of a switch), `host0.net.out` (a network card), `gpu0->gpu1` (a route's own).
"""

import hashlib
import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import yaml

from gdp import files
from gdp.devices import KINDS, MAX_DEVICES, Device, Route, preset, suggest
from gdp.errors import InputError
from gdp.local import Machine, detect

__all__ = ["MAX_DEVICES", "Cluster", "Device", "Route", "parse_number", "parse_rate", "parse_size", "parse_time"]

I64 = npt.NDArray[np.int64]

FORMAT, VERSION = "gdp-cluster", 1


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices and a route for each ordered pair of them, as read-only arrays; make one with `Cluster.build`.

    Raises InputError (a ValueError) naming the device or pair, its value and the remedy.
    """

    name: str
    devices: tuple[Device, ...]  # [D] at most 64
    channels: tuple[str, ...]  # unique names
    latency_ns: I64  # [D, D] 0 on the diagonal
    bytes_per_second: I64  # [D, D] 0 on the diagonal
    route_channels: tuple[tuple[tuple[int, ...], ...], ...]  # [D][D] ascending channel numbers

    def __post_init__(self) -> None:
        self.latency_ns.setflags(write=False)
        self.bytes_per_second.setflags(write=False)
        _check(self)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @classmethod
    def build(cls, name: str, devices: Sequence[Device], routes: Mapping[tuple[int, int], Route]) -> "Cluster":
        """The cluster of these devices; `routes` has every ordered pair of numbers. Channels are sorted by name."""
        num_devices = len(devices)
        channels = tuple(sorted({channel for route in routes.values() for channel in route.channels}))
        numbers = {channel: number for number, channel in enumerate(channels)}
        latency_ns, bytes_per_second = np.zeros((2, num_devices, num_devices), np.int64)
        route_channels = [[()] * num_devices for _ in devices]  # type: list[list[tuple[int, ...]]]
        for (source, target), route in routes.items():
            latency_ns[source, target] = route.latency_ns
            bytes_per_second[source, target] = route.bytes_per_second
            route_channels[source][target] = tuple(sorted(numbers[channel] for channel in route.channels))
        return cls(name, tuple(devices), channels, latency_ns, bytes_per_second, tuple(map(tuple, route_channels)))

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """The cluster that `text` names: a preset such as `4xp100-pcie-16g`, a `gdp-cluster` file's path, or `local`.

        It is a path if that file exists or the name ends in .yaml, .yml, .json or .gz; docs/devices.md has the grammar.
        `local` is this machine as it is now, see `gdp.local`.
        """
        text = text.strip()
        if text.endswith((".yaml", ".yml", ".json", ".gz")) or os.path.isfile(text):
            return cls.load(text)
        if text == "local":
            return cls.of_machine(detect())
        return cls.build(text, *preset(text))

    @classmethod
    def of_machine(cls, machine: Machine) -> "Cluster":
        """The devices of a machine that was detected, with built-in figures or estimates; it is called `local`."""
        return cls.build("local", *machine.cluster())

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Read a `gdp-cluster` file: JSON if its name ends in .json or .json.gz, else YAML."""
        document = files.read_json(path) if _is_json(path) else read_yaml(path, FORMAT)
        try:
            return cls.from_document(document)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write a `gdp-cluster` file with all figures explicit, atomically: JSON or YAML like `load`, gzip for .gz."""
        if _is_json(path):
            files.write_json(path, self.to_document())
        else:
            text = yaml.safe_dump(
                self.to_document(), sort_keys=False, default_flow_style=None, allow_unicode=True, width=120
            )
            files.write_bytes(path, text.encode())

    @classmethod
    def from_document(cls, document: object) -> "Cluster":
        """The cluster of a `gdp-cluster` document; strict: unknown keys, wrong types and versions are errors."""
        content = files.require_header(document, FORMAT, VERSION)
        files.require_keys(content, "cluster", _DOCUMENT_FIELDS, {"name", "devices"})
        devices = [_read_device(record, number) for number, record in enumerate(content["devices"])]
        _check_devices(devices)
        return cls.build(content["name"], devices, _read_links(content.get("links", []), devices))

    def to_document(self) -> dict[str, Any]:
        """The `gdp-cluster` document with every field explicit: one link for each ordered pair, bare numbers."""
        devices = [
            {
                "name": device.name,
                "kind": device.kind,
                "memory": device.memory_bytes,
                "flops": dict(sorted(device.flops_per_second.items())),
                "memory_bandwidth": device.memory_bytes_per_second,
                "launch": device.launch_ns,
            }
            for device in self.devices
        ]
        links = [
            {
                "from": self.devices[source].name,
                "to": self.devices[target].name,
                "bandwidth": route.bytes_per_second,
                "latency": route.latency_ns,
                "both": False,
                "channels": sorted(route.channels),
            }
            for source, target in permutations(range(self.num_devices), 2)
            for route in [self.route(source, target)]
        ]
        return {"format": FORMAT, "version": VERSION, "name": self.name, "devices": devices, "links": links}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical content: compact sorted JSON, all fields explicit, the cluster's name left out."""
        document = self.to_document()
        del document["name"]
        return hashlib.sha256(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def route(self, source: int, target: int) -> Route:
        """The route from device `source` to device `target` as a record."""
        return Route(
            int(self.latency_ns[source, target]),
            int(self.bytes_per_second[source, target]),
            tuple(self.channels[channel] for channel in self.route_channels[source][target]),
        )

    def device_number(self, name: str) -> int:
        """The number of the device called `name`; InputError lists near matches."""
        names = [device.name for device in self.devices]
        if name not in names:
            raise InputError(f"device {name!r}: is not in cluster {self.name!r}; {suggest(name, names)}")
        return names.index(name)

    def devices_called(self, name: str) -> list[int]:
        """The number of the device called `name`, else those of all devices of this kind; InputError if none is."""
        named = [number for number, device in enumerate(self.devices) if device.name == name]
        found = named or [number for number, device in enumerate(self.devices) if device.kind == name]
        if not found:
            known = list(dict.fromkeys(text for device in self.devices for text in (device.name, device.kind)))
            raise InputError(f"{name!r} is no device and no kind of device in {self.name!r}; {suggest(name, known)}")
        return found


def _check(cluster: Cluster) -> None:
    _check_devices(cluster.devices)
    num_devices, num_channels = cluster.num_devices, len(cluster.channels)
    shape = (num_devices, num_devices)
    for field in ("latency_ns", "bytes_per_second"):
        array = getattr(cluster, field)
        if array.shape != shape or array.dtype != np.int64:
            raise InputError(
                f"cluster {cluster.name!r}: {field} is {array.dtype}{array.shape}; int64{shape} is expected"
            )
        if array.diagonal().any():
            raise InputError(
                f"cluster {cluster.name!r}: {field} of a device to itself is not 0; there is no such route"
            )
    if len(set(cluster.channels)) < num_channels:
        raise InputError(f"cluster {cluster.name!r}: two channels have one name; name each once")
    if [len(row) for row in cluster.route_channels] != [num_devices] * num_devices:
        raise InputError(
            f"cluster {cluster.name!r}: route_channels is not {num_devices} rows of {num_devices}; mend it"
        )
    for source, target in permutations(range(num_devices), 2):
        pair = f"{cluster.devices[source].name} -> {cluster.devices[target].name}"
        bytes_per_second, latency_ns = (
            int(cluster.bytes_per_second[source, target]),
            int(cluster.latency_ns[source, target]),
        )
        if bytes_per_second <= 0:
            raise InputError(
                f"route {pair}: bandwidth is {bytes_per_second}; give every pair a route of at least 1 byte per second"
            )
        if latency_ns < 0:
            raise InputError(f"route {pair}: latency is {latency_ns} ns; at least 0 is expected")
        numbers = cluster.route_channels[source][target]
        if list(numbers) != sorted({number for number in numbers if 0 <= number < num_channels}):
            raise InputError(
                f"route {pair}: channels {numbers} are not ascending numbers below {num_channels}; mend them"
            )


def _check_devices(devices: Sequence[Device]) -> None:
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise InputError(f"devices: there are {len(devices)}; 1 to {MAX_DEVICES} are expected")
    seen: dict[str, int] = {}
    for number, device in enumerate(devices):
        label = f"device {number} {device.name!r}"
        if not device.name or not device.name.isprintable() or device.name == "*" or "->" in device.name:
            raise InputError(
                f"{label}: name is not usable; printable text that is neither '*' nor contains '->' is expected"
            )
        if device.name in seen:
            raise InputError(f"{label}: name is also that of device {seen[device.name]}; names must be unique")
        seen[device.name] = number
        if not device.kind or not device.kind.isprintable():
            raise InputError(f"{label}: kind is {device.kind!r}; printable text is expected")
        if "float32" not in device.flops_per_second:
            raise InputError(f"{label}: flops has no float32; add it, other dtypes fall back to it")
        rates = {f"flops {dtype}": rate for dtype, rate in device.flops_per_second.items()}
        for what, value in {**rates, "memory_bandwidth": device.memory_bytes_per_second}.items():
            if not what.isprintable() or not 1 <= value < 2**63:
                raise InputError(f"{label}: {what!r} is {value}; more than 0 and less than 2^63 is expected")
        for what, value in {"memory": device.memory_bytes, "launch": device.launch_ns}.items():
            if not 0 <= value < 2**63:
                raise InputError(f"{label}: {what} is {value}; an integer from 0 to 2^63 - 1 is expected")


# Quantities

_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*([^\s0-9.+-]*)")
_SIZES = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_RATES = {unit and f"{unit}/s": factor for unit, factor in _SIZES.items()}
_TIMES = {"": 1, "ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


def parse_size(value: object, where: str) -> int:
    """Bytes of `1.5GiB`, `16e9` or a bare number, rounded up exactly; an error names `where`."""
    return _quantity(value, where, _SIZES, "1.5GiB")


def parse_rate(value: object, where: str) -> int:
    """Bytes per second of `12.5GB/s` or a bare number, rounded up exactly."""
    return _quantity(value, where, _RATES, "12.5GB/s")


def parse_time(value: object, where: str) -> int:
    """Nanoseconds of `0.5us` or a bare number, rounded up exactly."""
    return _quantity(value, where, _TIMES, "0.5us")


def parse_number(value: object, where: str) -> int:
    """The integer of `9.3e12`, rounded up exactly, whether it is written as a number or as text."""
    return _quantity(value, where, {"": 1}, "9.3e12")


def _quantity(value: object, where: str, units: Mapping[str, int], example: str) -> int:
    text = str(value).strip() if type(value) in (int, float, str) else ""  # str of a float is its shortest decimal form
    match = _NUMBER.fullmatch(text) if len(text) <= 64 else None
    if match is None or match[2] not in units:
        known = f" with one of {', '.join(unit for unit in units if unit)}" if len(units) > 1 else ""
        raise InputError(f"{where} is {reprlib.repr(value)}; a number{known} is expected, such as {example}")
    exact = Fraction(match[1]) * units[match[2]]
    if not 0 <= exact < 2**63:
        raise InputError(
            f"{where} is {reprlib.repr(value)}; at least 0 and less than 2^63 is expected, such as {example}"
        )
    return math.ceil(exact)


# Files


def _is_text(value: object) -> bool:
    """text (quote it if it looks like a number)"""
    return type(value) is str


def _is_quantity(value: object) -> bool:
    """a number or a text such as "1.5GiB" """
    return type(value) in (int, float, str)


def _is_rates(value: object) -> bool:
    """a mapping from dtypes to FLOP per second"""
    return type(value) is dict and all(type(key) is str and _is_quantity(item) for key, item in value.items())


def _is_names(value: object) -> bool:
    """a list of names"""
    return type(value) is list and all(type(item) is str for item in value)


def _is_endpoint(value: object) -> bool:
    """a device, a list of devices or "*" """
    return type(value) is str or (_is_names(value) and value != [])


_DOCUMENT_FIELDS = {
    "format": _is_text,
    "version": files.is_size,
    "name": _is_text,
    "devices": files.is_list,
    "links": files.is_list,
}
_DEVICE_FIELDS = {
    "name": _is_text,
    "kind": _is_text,
    "memory": _is_quantity,
    "flops": _is_rates,
    "memory_bandwidth": _is_quantity,
    "launch": _is_quantity,
}
_LINK_FIELDS = {
    "from": _is_endpoint,
    "to": _is_endpoint,
    "bandwidth": _is_quantity,
    "latency": _is_quantity,
    "both": files.is_flag,
    "channels": _is_names,
}


def _read_device(record: object, number: int) -> Device:
    name = record.get("name") if isinstance(record, dict) else None
    where = f"device {number} {name!r}" if isinstance(name, str) else f"device {number}"
    files.require_keys(record, where, _DEVICE_FIELDS, {"name", "kind"})
    assert isinstance(record, dict)
    figures = {**_built_in_figures(record["kind"]), **record}
    if missing := [key for key in _DEVICE_FIELDS if key not in figures]:
        raise InputError(
            f"{where}: kind {record['kind']!r} is not built in, so {', '.join(missing)} must be given; "
            f"add what is missing, or {suggest(record['kind'], list(KINDS))}"
        )
    rates = {dtype: parse_number(rate, f"{where}: flops {dtype}") for dtype, rate in figures["flops"].items()}
    return Device(
        name=record["name"],
        kind=record["kind"],
        memory_bytes=parse_size(figures["memory"], f"{where}: memory"),
        flops_per_second=MappingProxyType(rates),
        memory_bytes_per_second=parse_rate(figures["memory_bandwidth"], f"{where}: memory_bandwidth"),
        launch_ns=parse_time(figures["launch"], f"{where}: launch"),
    )


def _built_in_figures(name: str) -> dict[str, Any]:
    if (kind := KINDS.get(name)) is None:
        return {}
    return {
        "memory": kind.memory_bytes,
        "flops": dict(kind.flops_per_second),
        "memory_bandwidth": kind.memory_bytes_per_second,
        "launch": kind.launch_ns,
    }


def _read_links(records: Sequence[object], devices: Sequence[Device]) -> dict[tuple[int, int], Route]:
    names = [device.name for device in devices]
    routes: dict[tuple[int, int], Route] = {}
    entry_of: dict[tuple[int, int], int] = {}
    own: dict[str, int] = {}  # entry of each channel that belongs to one route
    named: dict[str, int] = {}  # first entry that names it
    for number, record in enumerate(records):
        where = f"link {number}"
        files.require_keys(record, where, _LINK_FIELDS, {"from", "to", "bandwidth", "latency"})
        assert isinstance(record, dict)
        sources, targets = (_endpoints(record[key], f"{where}: {key}", names) for key in ("from", "to"))
        pairs = [(a, b) for a in sources for b in targets if a != b]
        if not pairs:
            raise InputError(f"{where}: links {names[sources[0]]!r} to itself; name two different devices")
        if record.get("both", False):
            pairs = list(dict.fromkeys([*pairs, *((b, a) for a, b in pairs)]))
        bytes_per_second = parse_rate(record["bandwidth"], f"{where}: bandwidth")
        if bytes_per_second == 0:
            raise InputError(f"{where}: bandwidth is {record['bandwidth']!r}; more than 0 is expected")
        latency_ns = parse_time(record["latency"], f"{where}: latency")
        channels: list[str] | None = record.get("channels")
        for position, channel in enumerate(channels or ()):
            if not channel or not channel.isprintable() or channel in (channels or ())[:position]:
                raise InputError(f"{where}: channel {channel!r} is empty, unprintable or listed twice; name each once")
            named.setdefault(channel, number)
        for pair in pairs:
            name = f"{names[pair[0]]}->{names[pair[1]]}"
            if pair in entry_of:
                raise InputError(
                    f"{where}: {name} is also in link {entry_of[pair]}; every pair needs exactly one entry"
                )
            entry_of[pair] = number
            if channels is None:
                own[name] = number
            routes[pair] = Route(latency_ns, bytes_per_second, (name,) if channels is None else tuple(channels))
    for channel in own.keys() & named.keys():
        raise InputError(
            f"link {named[channel]}: channel {channel!r} is what link {own[channel]} calls its own; rename it"
        )
    missing = [pair for pair in permutations(range(len(names)), 2) if pair not in routes]
    if missing:
        first, more = "->".join(names[end] for end in missing[0]), len(missing) - 1
        raise InputError(
            f'links: no entry covers {first}{f" and {more} more pairs" if more else ""}; add one, or use "*"'
        )
    return routes


def _endpoints(value: str | list[str], where: str, names: Sequence[str]) -> list[int]:
    if value == "*":
        return list(range(len(names)))
    listed = [value] if isinstance(value, str) else value
    for name in listed:
        if name not in names:
            raise InputError(f"{where} {name!r} is no device; {suggest(name, names)}")
        if listed.count(name) > 1:
            raise InputError(f"{where} {name!r} is listed twice; list it once")
    return [names.index(name) for name in listed]


def _is_json(path: str | Path) -> bool:
    return str(path).endswith((".json", ".json.gz"))


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load`, but a key that is given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, expected_format: str) -> object:
    """The YAML document in `path`, a file of this format. A key that a mapping has twice is an error."""
    content = files.read_bytes(path)
    if not content.strip():
        raise InputError(f"{path}: is empty; a {expected_format} document is expected")
    try:
        return yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise InputError(f"{path}: {where}not valid YAML ({error.problem or error.context}); mend the file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: not valid YAML ({reprlib.repr(reason)}); mend the file") from None
