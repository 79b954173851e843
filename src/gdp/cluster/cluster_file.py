"""`gdp-cluster` documents, in YAML or JSON, as devices and routes, by docs/machine-model.md, section 6."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from gdp import files
from gdp.cluster.catalogue import EXCHANGES, KINDS, DeviceKind
from gdp.cluster.device import EAGER, Device, Route, check_devices
from gdp.cluster.quantities import parse_number, parse_rate, parse_size, parse_time
from gdp.errors import InputError, suggest

FORMAT, VERSION = "gdp-cluster", 1


def read_document(path: str | Path, expected_format: str = FORMAT) -> object:
    """Returns the document in `path`: JSON if its name ends in .json or .json.gz, else YAML."""
    return files.read_json(path) if _is_json(path) else read_yaml(path, expected_format)


def write_document(path: str | Path, document: Mapping[str, Any]) -> None:
    """Writes `document` to `path` atomically: JSON or YAML as in `read_document`, gzip for .gz."""
    if _is_json(path):
        files.write_json(path, document)
    else:
        text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
        files.write_bytes(path, text.encode())


def parse_document(document: object) -> tuple[str, list[Device], dict[tuple[int, int], Route]]:
    """Returns (name, devices, route of every ordered pair) of a document; InputError for all that the format lacks."""
    content = files.require_header(document, FORMAT, VERSION)
    files.require_keys(content, "cluster", _DOCUMENT_FIELDS, {"name", "devices"})
    devices = [_read_device(record, number) for number, record in enumerate(content["devices"])]
    check_devices(devices)
    return content["name"], devices, _read_links(content.get("links", []), devices)


def _is_text(value: object) -> bool:
    """text (quote it if it looks like a number)"""
    return type(value) is str


def _is_quantity(value: object) -> bool:
    """a number or a text such as "1.5GiB" """
    return type(value) in (int, float, str)


def _is_rates(value: object) -> bool:
    """a mapping from dtypes to FLOP per second"""
    return type(value) is dict and all(type(key) is str and _is_quantity(item) for key, item in value.items())


def _is_numbers(value: object) -> bool:
    """a mapping from classes of kernels, and other names, to numbers"""
    return type(value) is dict and all(type(key) is str and type(item) in (int, float) for key, item in value.items())


def _is_ratios(value: object) -> bool:
    """a mapping from kinds of steps to lists of measured over predicted times"""
    return type(value) is dict and all(
        type(key) is str and type(item) is list and all(type(ratio) in (int, float) for ratio in item)
        for key, item in value.items()
    )


def _parse_ratios(ratios: Mapping[str, list[float]], where: str) -> Mapping[str, Sequence[float]]:
    return MappingProxyType({step: tuple(of_step) for step, of_step in ratios.items()})


def _parse_rates(rates: Mapping[str, object], where: str) -> Mapping[str, int]:
    return MappingProxyType({dtype: parse_number(rate, f"{where} {dtype}") for dtype, rate in rates.items()})


def _is_figures(value: object) -> bool:
    """a mapping of bandwidth, latency and exchange"""
    return type(value) is dict


def _parse_link(record: Mapping[str, Any], where: str) -> Route:
    files.require_keys(record, where, {key: _LINK_FIELDS[key] for key in _OF_LINK}, set(_OF_LINK[:2]))
    link = _read_route(record, where)
    if link.exchange and not EXCHANGES[link.exchange].rates:
        raise InputError(f"{where}: exchange {link.exchange!r} is between hosts; name the link between cards of one")
    return link


def _is_names(value: object) -> bool:
    """a list of names"""
    return type(value) is list and all(type(item) is str for item in value)


def _is_endpoint(value: object) -> bool:
    """a device, a list of devices or "*" """
    return type(value) is str or (_is_names(value) and value != [])


_DOCUMENT_FIELDS = {"format": _is_text, "version": files.is_size, "name": _is_text}
_DOCUMENT_FIELDS |= {"devices": files.is_list, "links": files.is_list}
_Figure = tuple[str, Callable[[object], bool], Callable[[Any, str], Any]]
"""The attribute of `Device`, the check of a value in a document, and the reader of it."""

_FIGURES: Mapping[str, _Figure] = {
    "memory": ("memory_bytes", _is_quantity, parse_size),
    "flops": ("flops_per_second", _is_rates, _parse_rates),
    "memory_bandwidth": ("memory_bytes_per_second", _is_quantity, parse_rate),
    "launch": ("launch_ns", _is_quantity, parse_time),
    "issue": ("issue_ns", _is_quantity, parse_time),
    "achieved": ("achieved", _is_numbers, lambda numbers, where: MappingProxyType(dict(numbers))),
    "runtime": ("runtime", _is_text, lambda runtime, where: runtime),
    "group": ("group", _is_names, lambda names, where: tuple(names)),
    "link": ("link", _is_figures, _parse_link),
    "measured_steps": ("measured_steps", _is_ratios, _parse_ratios),
}
_TELL_NOTHING: Mapping[str, Any] = {
    "issue": 0,
    "achieved": {},
    "runtime": EAGER,
    "group": (),
    "link": None,
    "measured_steps": {},
}
"""Figures that a document may lack."""
_SHEET = _FIGURES.keys() - _TELL_NOTHING.keys()  # a document that has all of these says what else its device tells
_DEVICE_FIELDS = {"name": _is_text, "kind": _is_text} | {field: check for field, (_, check, _) in _FIGURES.items()}
_LINK_FIELDS = {"from": _is_endpoint, "to": _is_endpoint, "bandwidth": _is_quantity, "latency": _is_quantity}
_LINK_FIELDS |= {"both": files.is_flag, "channels": _is_names, "exchange": _is_text}
_OF_LINK = "bandwidth", "latency", "exchange"  # of the link of a group


def _read_device(record: object, number: int) -> Device:
    name = record.get("name") if isinstance(record, dict) else None
    where = f"device {number} {name!r}" if isinstance(name, str) else f"device {number}"
    files.require_keys(record, where, _DEVICE_FIELDS, {"name", "kind"})
    assert isinstance(record, dict)
    kind = KINDS.get(record["kind"])
    of_kind = {} if kind is None or record.keys() >= _SHEET else figures_of(kind)
    figures = dict(_TELL_NOTHING) | of_kind | record
    if missing := [key for key in _DEVICE_FIELDS if key not in figures]:
        raise InputError(
            f"{where}: kind {record['kind']!r} is not built in, so {', '.join(missing)} must be given; "
            f"add what is missing, or {suggest(record['kind'], list(KINDS))}"
        )
    values = {
        name: figures[field] if figures[field] is None else read(figures[field], f"{where}: {field}")
        for field, (name, _, read) in _FIGURES.items()
    }
    return Device(record["name"], record["kind"], **values)


def figures_of(device: Device | DeviceKind) -> dict[str, Any]:
    """Returns the figures of a device, or of those of a kind, as a document has them, without what tells nothing."""
    empty = _TELL_NOTHING.get
    figures: dict[str, Any] = {key: getattr(device, name, empty(key)) for key, (name, _, _) in _FIGURES.items()}
    told = {field: value for field, value in figures.items() if value != _TELL_NOTHING.get(field)}
    texts: dict[str, Any] = {"achieved": dict(figures["achieved"]), "group": list(figures["group"])}
    texts["measured_steps"] = {step: list(ratios) for step, ratios in figures["measured_steps"].items()}
    if (link := figures["link"]) is not None:
        texts["link"] = dict(zip(_OF_LINK, (link.bytes_per_second, link.latency_ns, link.exchange), strict=True))
    return told | {field: text for field, text in texts.items() if field in told}


def _read_links(records: Sequence[object], devices: Sequence[Device]) -> dict[tuple[int, int], Route]:
    names = [device.name for device in devices]
    number_of = {name: number for number, name in enumerate(names)}
    routes: dict[tuple[int, int], Route] = {}
    entry_of: dict[tuple[int, int], int] = {}
    own: dict[str, int] = {}  # entry of each channel that belongs to one route
    named: dict[str, int] = {}  # first entry that names it
    for number, record in enumerate(records):
        where = f"link {number}"
        files.require_keys(record, where, _LINK_FIELDS, {"from", "to", "bandwidth", "latency"})
        assert isinstance(record, dict)
        sources, targets = (_endpoints(record[key], f"{where}: {key}", number_of) for key in ("from", "to"))
        pairs = [(a, b) for a in sources for b in targets if a != b]
        if not pairs:
            raise InputError(f"{where}: links {names[sources[0]]!r} to itself; name two different devices")
        if record.get("both", False):
            pairs = list(dict.fromkeys([*pairs, *((b, a) for a, b in pairs)]))
        figures = _read_route(record, where)
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
            own_channels = (name,) if channels is None else tuple(channels)
            routes[pair] = replace(figures, channels=own_channels)
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


def _read_route(record: Mapping[str, Any], where: str) -> Route:
    """Returns the figures of a link, without channels."""
    bytes_per_second = parse_rate(record["bandwidth"], f"{where}: bandwidth")
    if bytes_per_second == 0:
        raise InputError(f"{where}: bandwidth is {record['bandwidth']!r}; more than 0 is expected")
    exchange = record.get("exchange", "")
    if exchange and exchange not in EXCHANGES:
        raise InputError(f"{where}: exchange {exchange!r} is unknown; {suggest(exchange, list(EXCHANGES))}")
    return Route(parse_time(record["latency"], f"{where}: latency"), bytes_per_second, (), exchange)


def _endpoints(value: str | list[str], where: str, number_of: Mapping[str, int]) -> list[int]:
    if value == "*":
        return list(range(len(number_of)))
    listed = [value] if isinstance(value, str) else value
    for name in listed:
        if name not in number_of:
            raise InputError(f"{where} {name!r} is no device; {suggest(name, list(number_of))}")
        if listed.count(name) > 1:
            raise InputError(f"{where} {name!r} is listed twice; list it once")
    return [number_of[name] for name in listed]


def _is_json(path: str | Path) -> bool:
    return str(path).endswith((".json", ".json.gz"))


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load`, but a key that is given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice", key.start_mark
                    )
                keys.add(key.value)
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
    except Exception as error:  # constructors of values raise what Python does: ValueError, KeyError, RecursionError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: not valid YAML ({reprlib.repr(reason)}); mend the file") from None
