"""Shows devices, links and other rows as tables in a terminal; imports nothing that places or simulates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from rich.console import RenderableType
from rich.text import Text

from gdp.cluster import Cluster, Device, Route
from gdp.cluster.catalogue import KINDS, LINKS, MACHINES, DeviceKind, LinkKind
from gdp.cluster.device import host_of
from gdp.cluster.groups import divisors, group_name, islands
from gdp.cluster.prices import Price, Prices
from gdp.notebook import digits, format_gib
from gdp.report.tables import MOST_DEVICES, SHOWN_OF_MANY, new_table

_FOLDED = 6  # routes that differ in names alone are one line from so many on


def cluster_report(cluster: Cluster) -> Iterator[RenderableType]:
    """Yields the devices of a cluster and its routes."""
    is_many = cluster.num_devices > MOST_DEVICES
    shown = cluster.devices[:SHOWN_OF_MANY] if is_many else cluster.devices
    count = 7 if any(device.issue_ns for device in cluster.devices) else 6
    rows = ((device.name, device.kind, *_figures(device))[:count] for device in shown)
    headings = ("device", "kind", ">memory", ">float32", ">bandwidth", ">launch", ">issue")[:count]
    yield new_table(*headings, rows=rows)
    if is_many:
        yield Text(f"and {cluster.num_devices - len(shown)} more devices; routes from the first one, by rate:")
    costs = zip(_costs(Prices().of(cluster)), ("W", "$ an hour"), strict=True)
    if told := [f"{amount} {unit}" for amount, unit in costs if amount != "-"]:
        yield Text(f"All devices: {', '.join(told)}.")
    yield from _groups(cluster)
    if cluster.num_devices == 1:
        return
    yield ""
    routes = new_table("from", "to", ">bandwidth", ">latency", "channels")
    for start, end, route, channels in _routes_by_rate(cluster) if is_many else _folded_routes(cluster):
        routes.add_row(start, end, *_rates(route), " ".join(channels) or "-")
    yield routes


def _groups(cluster: Cluster) -> Iterator[RenderableType]:
    """Yields the groups of a cluster, and cards on fast links that could be some; those that are alike are one line."""
    names, alike = [device.name for device in cluster.devices], dict[tuple[Route, tuple[int, ...]], list[str]]()
    for device in cluster.devices:
        if device.link is not None:
            alike.setdefault((device.link, (device.num_cards,)), []).append(", ".join(device.group))
    for island in islands(cluster):
        link = replace(cluster.route(*island[:2]), channels=())
        alike.setdefault((link, divisors(len(island))), []).append(group_name([names[card] for card in island]))
    table = new_table("cards", "link", ">bandwidth", ">latency", "groups of")
    for (link, sizes), cards in alike.items():
        more = f" and {len(cards) - 1} more" if len(cards) > 1 else ""
        table.add_row(cards[0] + more, link.exchange or "-", *_rates(link), ", ".join(map(str, sizes)))
    if alike:
        yield ""
        yield table


def _routes_by_rate(cluster: Cluster) -> Iterator[tuple[str, str, Route, tuple[str, ...]]]:
    """Yields a route of each rate, latency and number of channels from the first device, with the number of others."""
    names, alike = [device.name for device in cluster.devices], dict[tuple[int, int, int], list[int]]()
    for target in range(1, cluster.num_devices):
        route = cluster.route(0, target)
        key = route.bytes_per_second, route.latency_ns, len(route.channels)
        alike.setdefault(key, []).append(target)
    for targets in alike.values():
        route, more = cluster.route(0, targets[0]), len(targets) - 1
        yield names[0], names[targets[0]] + (f" and {more} more" if more else ""), route, route.channels


def _folded_routes(cluster: Cluster) -> Iterator[tuple[str, str, Route, tuple[str, ...]]]:
    """Yields routes with the names of their ends; many that differ in names alone, from all to all, are one."""
    names = [device.name for device in cluster.devices]
    alike: dict[tuple[int, int, str, str, tuple[str, ...]], list[tuple[int, int]]] = {}
    for source, target in permutations(range(cluster.num_devices), 2):
        route, ends = cluster.route(source, target), {names[source]: "FROM", names[target]: "TO"}
        channels = tuple(sorted(_renamed(channel, ends) for channel in route.channels))
        hosts = host_of(names[source]), host_of(names[target])
        alike.setdefault((route.bytes_per_second, route.latency_ns, *hosts, channels), []).append((source, target))
    group_of = {pair: (channels, pairs) for (*_, channels), pairs in alike.items() for pair in pairs}
    for source, target in permutations(range(cluster.num_devices), 2):
        route, (channels, pairs) = cluster.route(source, target), group_of[source, target]
        sources, targets = (sorted(set(ends)) for ends in zip(*pairs, strict=True))
        is_product = set(pairs) == {(a, b) for a in sources for b in targets if a != b}
        if len(pairs) < _FOLDED or not is_product:
            yield names[source], names[target], route, route.channels
        elif (source, target) == pairs[0]:
            yield ", ".join(names[a] for a in sources), ", ".join(names[b] for b in targets), route, channels


def _renamed(channel: str, names: Mapping[str, str]) -> str:
    """Returns the channel with other names of devices: `gpu0.pcie.up` is `FROM.pcie.up`, `gpu0->gpu1` `FROM->TO`."""
    if "->" in channel:
        return "->".join(names.get(part, part) for part in channel.split("->"))
    owner = next((name for name in names if channel.startswith(f"{name}.")), None)
    return channel if owner is None else names[owner] + channel.removeprefix(owner)


def _figures(device: Device | DeviceKind) -> tuple[str, ...]:
    return (
        format_gib(device.memory_bytes),
        f"{digits(device.flops_per_second['float32'] / 1e12, 3)} TFLOP/s",
        f"{digits(device.memory_bytes_per_second / 1e9, 3)} GB/s",
        *(f"{digits(time_ns / 1e3, 3)} us" for time_ns in (device.launch_ns, device.issue_ns)),
    )


def _half_rate(kind: DeviceKind) -> int:
    """Returns the FLOPs per second in bfloat16, else float16, else float32."""
    rates = kind.flops_per_second
    return rates.get("bfloat16", rates.get("float16", rates["float32"]))


def _costs(price: Price | DeviceKind) -> tuple[str, str]:
    dollars = price.dollars_per_hour
    return "-" if price.watts is None else f"{price.watts:,.0f}", "-" if dollars is None else f"{dollars:,.2f}"


def _rates(link: Route | LinkKind) -> tuple[str, str]:
    return f"{digits(link.bytes_per_second / 1e9, 3)} GB/s", f"{digits(link.latency_ns / 1e3, 3)} us"


def kinds_report() -> Iterator[RenderableType]:
    """Yields the built-in kinds of devices and links."""
    kinds = [
        (
            name,
            format_gib(kind.memory_bytes),
            *(digits(rate / 1e12, 3) for rate in (kind.flops_per_second["float32"], _half_rate(kind))),
            digits(kind.memory_bytes_per_second / 1e9, 3),
            *_costs(kind),
            ", ".join(filter(None, (kind.port, kind.nvlink))),
        )
        for name, kind in KINDS.items()
    ]
    yield new_table("kind", ">usable", ">TFLOP/s", ">in half", ">GB/s", ">W", ">$/hour", "links", rows=kinds)
    yield ""
    yield new_table("link", ">bandwidth", ">latency", rows=((link.name, *_rates(link)) for link in LINKS.values()))
    yield ""
    machines = [(name, machine.local, machine.network) for name, machine in MACHINES.items()]
    yield new_table("machine", "devices", "network cards", rows=machines)
    yield ""
    yield Text(
        "Combine them as in 4xp100-pcie-16g, 2xa100-sxm-80g+cpu-16core, 2x(4xl4-24g)@10gbit, 4xdgx-h100; or write a "
        "cluster file."
    )


def rows_report(rows: Sequence[Mapping[str, object]]) -> Iterator[RenderableType]:
    """Yields a table of rows that have the same keys."""
    if rows:
        columns = list(rows[0])
        table = new_table(*(f">{name}" if isinstance(rows[0][name], int | float) else name for name in columns))
        for row in rows:
            table.add_row(*(_cell(row.get(name)) for name in columns))
        yield table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return digits(value, 4)
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)
