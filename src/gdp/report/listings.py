"""Shows devices, links and other rows as tables in a terminal; imports nothing that places or simulates."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from gdp.cluster import Cluster, Device
from gdp.cluster.catalogue import KINDS, LINKS, DeviceKind
from gdp.report.tables import digits, format_gib, new_table


def cluster_report(cluster: Cluster) -> Iterator[RenderableType]:
    """Yields the devices of a cluster and its routes."""
    devices = new_table("device", "kind", ">memory", ">float32", ">bandwidth", ">launch")
    for device in cluster.devices:
        devices.add_row(
            device.name,
            device.kind,
            *_figures(device),
        )
    yield devices
    if cluster.num_devices == 1:
        return
    yield ""
    routes = new_table("from", "to", ">bandwidth", ">latency", "channels")
    for source, start in enumerate(cluster.devices):
        for target, end in enumerate(cluster.devices):
            if source != target:
                route = cluster.route(source, target)
                rate, latency = digits(route.bytes_per_second / 1e9, 3), digits(route.latency_ns / 1e3, 3)
                routes.add_row(start.name, end.name, f"{rate} GB/s", f"{latency} us", " ".join(route.channels) or "-")
    yield routes


def _figures(device: Device | DeviceKind) -> tuple[str, str, str, str]:
    return (
        format_gib(device.memory_bytes),
        f"{digits(device.flops_per_second['float32'] / 1e12, 3)} TFLOP/s",
        f"{digits(device.memory_bytes_per_second / 1e9, 3)} GB/s",
        f"{digits(device.launch_ns / 1e3, 3)} us",
    )


def kinds_report() -> Iterator[RenderableType]:
    """Yields the built-in kinds of devices and links."""
    kinds = new_table("kind", ">memory", ">float32", ">bandwidth", ">launch", "links")
    for name, kind in KINDS.items():
        kinds.add_row(
            name,
            *_figures(kind),
            ", ".join(filter(None, (kind.port, kind.nvlink))),
        )
    yield kinds
    yield ""
    links = new_table("link", ">bandwidth", ">latency")
    for link in LINKS.values():
        rate, latency = digits(link.bytes_per_second / 1e9, 3), digits(link.latency_ns / 1e3, 3)
        links.add_row(link.name, f"{rate} GB/s", f"{latency} us")
    yield links
    yield ""
    yield Text(
        "Combine them as in 4xp100-pcie-16g, 2xa100-sxm-80g+cpu-16core, 2x(4xl4-24g)@10gbit; or write a cluster file."
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
