"""A group of cards: T equal ones that run the local program of one rank each, as one device of a cluster.

    gpu0 --\\             /-- gpu1            gpu0-3     one device: memory and rates of a card, a link for exchanges
    gpu2 --- NVSwitch ---- gpu3

A tensor that goes from group to group is sent T times at once, from each member to the corresponding one:

    gpu0 --> gpu4    gpu1 --> gpu5    gpu2 --> gpu6    gpu3 --> gpu7            one transfer from gpu0-3 to gpu4-7

It takes as long as the slowest of them, and n times as long where n of them take turns on a channel, such as a network
card. A CPU works for all ranks: a rank has a T-th of its memory and rates. D devices, C cards."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from gdp.arrays import I64, unique
from gdp.cluster.catalogue import EXCHANGES, NETWORK
from gdp.cluster.device import Device, Route, host_of
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.cluster.cluster import Cluster

AS_FAST = 0.8  # measured rates of equal links differ by as much
_Members = tuple[int, ...]


def islands(cluster: "Cluster", least: int = 2, *, of_cpus: bool = False, of_any_kind: bool = False) -> list[_Members]:
    """Returns the cards of one kind and one host that its fastest links join: of the links that join `least` of them.
    Links that are slower are left out unless it takes them to join as many; those between hosts always are. `of_cpus`:
    the CPUs in place of cards. `of_any_kind`: of one runtime alone."""
    alike: dict[object, list[int]] = {}
    for number, device in enumerate(cluster.devices):
        if device.is_cpu == of_cpus and not device.group:
            traits = () if of_any_kind else (device.kind, *sorted(device.achieved.items()))
            alike.setdefault((host_of(device.name), device.runtime, *traits), []).append(number)
    return sorted(island for cards in alike.values() for island in _joined(cluster, np.array(cards), least))


def _joined(cluster: "Cluster", cards: I64, least: int) -> list[_Members]:
    """Returns the sets of at least `least` of `cards` [C] that links of the fastest rate join which joins as many."""
    square = np.ix_(cards, cards)
    rates = np.minimum(cluster.bytes_per_second[square], cluster.bytes_per_second[square].T)
    if cluster.exchanges.size:
        rates[cluster.exchanges[square] == NETWORK] = 0
    label, cut = np.arange(len(cards)), np.inf
    while np.bincount(label).max() < least and (rates[rates < cut] > 0).any():
        cut = AS_FAST * rates[rates < cut].max()
        is_near, before = (rates >= cut) | np.eye(len(cards), dtype=np.bool_), None
        while before is None or (before != label).any():  # each card takes the first number among its neighbours
            before, label = label, np.where(is_near, label, len(cards)).min(axis=1)
    found = [tuple(cards[label == number].tolist()) for number in unique(label)]
    return [island for island in found if len(island) >= least]


def group_sizes(cluster: "Cluster") -> tuple[int, ...]:
    """Returns the sizes of groups on the fastest links: the numbers from 2 on that divide an island, and powers of two,
    which divide the heads of most models where cards are left over."""
    lengths = {len(island) for island in islands(cluster)}
    powers = {2**n for most in lengths for n in range(1, most.bit_length()) if 2**n <= most}
    return tuple(sorted({*powers, *(size for length in lengths for size in divisors(length))}))


def divisors(count: int) -> tuple[int, ...]:
    """Returns the numbers from 2 on that divide `count`."""
    return tuple(n for n in range(2, count + 1) if count % n == 0)


def grouped(cluster: "Cluster", num_ranks: int) -> tuple[list[Device], dict[tuple[int, int], Route]]:
    """Returns the devices of `cluster` in groups of `num_ranks` cards, CPUs beside them, and the routes of all pairs.
    Islands are cut in the order of devices; cards that are left over are left out. Without cards CPUs are in groups.
    InputError where there is no group."""
    of_cpus = all(device.is_cpu for device in cluster.devices)
    joined = islands(cluster, num_ranks, of_cpus=of_cpus)
    cut = [[island[n : n + num_ranks] for n in range(0, len(island) - num_ranks + 1, num_ranks)] for island in joined]
    if not cut:
        sizes = ", ".join(map(str, group_sizes(cluster)))
        remedy = f"take {sizes}" if sizes else "name equal cards of one host, such as 8xa100-sxm-80g"
        raise InputError(f"groups of {num_ranks}: {cluster.name!r} has no {num_ranks} equal cards of a host; {remedy}")
    devices: dict[_Members, Device] = {}
    for groups in cut:
        uses = Counter(channel for members in groups for hop in _ring(members) for channel in _channels(cluster, hop))
        num_used = sum(map(len, groups))
        devices |= {members: _device(cluster, members, uses, num_used) for members in groups}
    for number, device in enumerate(cluster.devices):
        if device.is_cpu and not of_cpus:
            devices[(number,) * num_ranks] = _share(device, num_ranks)
    parts = sorted(devices)
    names = {cluster.devices[card].name: devices[members].name for members in parts for card in members}
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)")
    channels = [pattern.sub(lambda match: names[match[1]], channel) for channel in cluster.channels]
    return [devices[members] for members in parts], {
        (a, b): _route(cluster, list(zip(parts[a], parts[b], strict=True)), channels)
        for a, b in permutations(range(len(parts)), 2)
    }


def unequal_group(cluster: "Cluster", shares: Sequence[int]) -> Device:
    """Returns the group of the first cards of a host that are as many as `shares`, with the figures of the one whose
    share fills most of its memory. InputError where there are fewer."""
    count = len(shares)
    members = next((island[:count] for island in islands(cluster, count, of_any_kind=True)), ())
    if not members:
        raise InputError(f"a group of {count}: {cluster.name!r} has no {count} cards of a host; give fewer shares")
    uses = Counter(channel for hop in _ring(members) for channel in _channels(cluster, hop))
    group = _device(cluster, members, uses, count)
    cards = [cluster.devices[card] for card in members]
    lead = fullest(shares, cards)
    return replace(cards[lead], name=group.name, group=group.group, link=group.link, issue_ns=group.issue_ns)


def fullest(shares: Sequence[int], cards: Sequence[Device]) -> int:
    """Returns the place of the card whose share fills most of its memory."""
    return max(range(len(cards)), key=lambda place: shares[place] / max(cards[place].memory_bytes, 1))


def _ring(members: _Members) -> Iterable[tuple[int, int]]:
    return zip(members, members[1:] + members[:1], strict=True) if len(members) > 1 else ()


def _channels(cluster: "Cluster", pair: tuple[int, int]) -> tuple[int, ...]:
    return cluster.route_channels[pair[0]][pair[1]]


def _device(cluster: "Cluster", members: _Members, uses: Mapping[int, int], num_used: int) -> Device:
    """Returns the group of `members`, with the least of their figures; `num_used` cards of the host exchange at once.
    `uses` counts the hops of their rings on each channel."""
    cards = [cluster.devices[card] for card in members]
    if len(cards) == 1:
        return cards[0]
    hops = list(_ring(members))
    rates = [_rate(cluster, hop, uses) for hop in hops]
    exchange = _common([cluster.exchange(*hop) for hop in hops])
    latency_ns, rate = max(int(cluster.latency_ns[hop]) for hop in hops), min(rates)
    if exchange:  # its figures know what cards have that exchange at once
        rate = min(int(cluster.bytes_per_second[hop]) for hop in hops)
        figures = EXCHANGES[exchange]
        rate = figures.over(rate, latency_ns, num_used).rate(num_used) if figures.is_switched else rate
    dtypes = [dtype for dtype in cards[0].flops_per_second if all(dtype in card.flops_per_second for card in cards)]
    return replace(
        cards[0],
        name=group_name([card.name for card in cards]),
        memory_bytes=min(card.memory_bytes for card in cards),
        flops_per_second={dtype: min(card.flops_per_second[dtype] for card in cards) for dtype in dtypes},
        memory_bytes_per_second=min(card.memory_bytes_per_second for card in cards),
        launch_ns=max(card.launch_ns for card in cards),
        issue_ns=max(card.issue_ns for card in cards),
        group=tuple(card.name for card in cards),
        link=Route(latency_ns, rate, (), exchange),
    )


def _share(cpu: Device, num_ranks: int) -> Device:
    """Returns what a rank has of a CPU."""
    return replace(
        cpu,
        memory_bytes=cpu.memory_bytes // num_ranks,
        flops_per_second={dtype: max(rate // num_ranks, 1) for dtype, rate in cpu.flops_per_second.items()},
        memory_bytes_per_second=max(cpu.memory_bytes_per_second // num_ranks, 1),
    )


def _route(cluster: "Cluster", pairs: Sequence[tuple[int, int]], channels: Sequence[str]) -> Route:
    """Returns the route of the transfers of all `pairs` at once; `channels` are the names of those of `cluster`."""
    used = [_channels(cluster, pair) for pair in pairs]
    uses = Counter(channel for route in used for channel in route)
    return Route(
        max(int(cluster.latency_ns[pair]) for pair in pairs),
        min(_rate(cluster, pair, uses) for pair in pairs),
        tuple(dict.fromkeys(channels[channel] for route in used for channel in route)),
        _common([cluster.exchange(*pair) for pair in pairs]),
    )


def _rate(cluster: "Cluster", pair: tuple[int, int], uses: Mapping[int, int]) -> int:
    """Returns the bytes per second of a route whose channels are taken in turn by as many."""
    turns = max((uses[channel] for channel in _channels(cluster, pair)), default=1)
    return max(int(cluster.bytes_per_second[pair]) // turns, 1)


def _common(names: Sequence[str]) -> str:
    """Returns the name that all have; "" where they differ."""
    return names[0] if len(set(names)) == 1 else ""


def members_of(name: str, num_ranks: int) -> tuple[str, ...]:
    """Returns the cards of the group of that name, see `group_name`; a device that is none works for all ranks."""
    if (found := re.fullmatch(r"(.*?)(\d+)-(\d+)", name)) and int(found[3]) - int(found[2]) + 1 == num_ranks:
        return tuple(f"{found[1]}{number}" for number in range(int(found[2]), int(found[3]) + 1))
    members = tuple(name.split("+"))
    return members if len(members) == num_ranks else (name,) * num_ranks


def group_name(names: Sequence[str]) -> str:
    """Returns `gpu0-3` for gpu0 to gpu3, and other names one behind the other: `gpu0+gpu2`."""
    found = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    ends = [match.groups() if match else ("", "") for match in found]
    stem, start = ends[0]
    if start and ends == [(stem, str(int(start) + turn)) for turn in range(len(names))]:
        return f"{names[0]}-{ends[-1][1]}"
    return "+".join(names)
