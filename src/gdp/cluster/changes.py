"""Clusters that differ from a given one: fewer devices, one more, faster links, more memory."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from gdp.cluster.catalogue import KINDS
from gdp.cluster.cluster import Cluster
from gdp.cluster.device import MAX_DEVICES, Device, Route
from gdp.errors import InputError

MOST_CHANGED = 64  # devices: of more, one more or less matters little, and to build the cluster takes seconds


def routes_of(cluster: Cluster) -> dict[tuple[int, int], Route]:
    """The route of every ordered pair of devices, as `Cluster.build` takes them."""
    return {pair: cluster.route(*pair) for pair in permutations(range(cluster.num_devices), 2)}


def only(cluster: Cluster, numbers: Sequence[int]) -> Cluster:
    """The devices with these numbers, in that order, and the routes between them."""
    devices = [cluster.devices[number] for number in numbers]
    pairs = permutations(range(len(numbers)), 2)
    return Cluster.build(cluster.name, devices, {(a, b): cluster.route(numbers[a], numbers[b]) for a, b in pairs})


def with_another(cluster: Cluster, like: int) -> Cluster | None:
    """Returns the cluster with one more device at the end, connected as device `like` is. The new device has channels
    of its own where `like` has, and shares the others. It is connected to `like` as another device of that kind is; if
    there is none, by the links of the kind. None if the links are not known, for a group, and in a large cluster."""
    if cluster.num_devices >= MOST_CHANGED or cluster.devices[like].group:
        return None
    template, new = cluster.devices[like], cluster.num_devices
    device = replace(template, name=_free_name(cluster, template))
    same = [n for n, other in enumerate(cluster.devices) if n != like and other.kind == template.kind]
    twin = max(same, key=lambda number: cluster.bytes_per_second[number, like], default=None)
    routes = routes_of(cluster)
    for other in range(new):
        if other != like:
            routes[new, other] = _renamed(cluster.route(like, other), {template.name: device.name})
            routes[other, new] = _renamed(cluster.route(other, like), {template.name: device.name})
    if twin is not None:
        routes[new, like] = _renamed(cluster.route(twin, like), {cluster.devices[twin].name: device.name})
        routes[like, new] = _renamed(cluster.route(like, twin), {cluster.devices[twin].name: device.name})
    elif template.kind in KINDS:
        pair = Cluster.parse(f"2x{template.kind}")
        names = {pair.devices[0].name: template.name, pair.devices[1].name: device.name}
        routes[new, like], routes[like, new] = _renamed(pair.route(1, 0), names), _renamed(pair.route(0, 1), names)
    else:
        return None
    return Cluster.build(cluster.name, [*cluster.devices, device], routes)


def with_faster_links(cluster: Cluster, factor: int) -> Cluster:
    """Returns the cluster with `factor` times the bandwidth of every route, and of links inside groups."""

    def faster(route: Route) -> Route:
        return replace(route, bytes_per_second=factor * route.bytes_per_second)

    devices = [replace(device, link=device.link and faster(device.link)) for device in cluster.devices]
    return Cluster.build(cluster.name, devices, {pair: faster(route) for pair, route in routes_of(cluster).items()})


def with_more_memory(cluster: Cluster, factor: int) -> Cluster:
    """Returns the cluster with `factor` times the memory of every device."""
    devices = [replace(device, memory_bytes=factor * device.memory_bytes) for device in cluster.devices]
    return Cluster.build(cluster.name, devices, routes_of(cluster))


def first(cluster: Cluster, count: int) -> Cluster:
    """Returns the first `count` devices. InputError if there are fewer."""
    if not 1 <= count <= cluster.num_devices:
        raise InputError(f"{count} devices of {cluster.name!r}: it has {cluster.num_devices}; name a larger cluster")
    return only(cluster, range(count))


def same_devices(cluster: Cluster, other: Cluster) -> list[int] | None:
    """Returns the devices of `other` that are as those of `cluster`, in their order; None where it lacks one."""
    free, numbers = list(range(other.num_devices)), list[int]()
    for device in cluster.devices:
        twin = next((n for n in free if replace(other.devices[n], name=device.name) == device), None)
        if twin is None:
            return None
        free.remove(twin)
        numbers.append(twin)
    return numbers


def _free_name(cluster: Cluster, like: Device) -> str:
    """Returns the next free name: `gpu4` after `gpu0` to `gpu3`."""
    names, stem = {device.name for device in cluster.devices}, re.sub(r"[0-9]+$", "", like.name)
    return next(name for name in (f"{stem}{number}" for number in range(MAX_DEVICES + 1)) if name not in names)


def _renamed(route: Route, names: Mapping[str, str]) -> Route:
    """Returns the route for other devices: channels named after the old devices are named after the new ones."""
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)")
    channels = (pattern.sub(lambda match: names[match[1]], channel) for channel in route.channels)
    return replace(route, channels=tuple(channels))
