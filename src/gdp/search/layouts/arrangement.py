"""Arrangements: layouts on devices. Which ones a batch and a machine allow.

a card alone     microbatches=2, recompute=auto; the others are slower or missing
4 equal cards    data=4   [0] [1] [2] [3]        a replica a card
                 data=2   [0 1] [2 3]            each replica in two places: a pipeline, or ops side by side
                 data=1   [0 1 2 3]
unequal cards    data=3, microbatches=3:1:1      in proportion to speed"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from gdp.arrays import F64, I64
from gdp.errors import InputError
from gdp.graph.microbatches import MAX_MICROBATCHES
from gdp.parallel.layout import AUTO, Layout
from gdp.search.candidate import Arrangement
from gdp.search.settings import DEFAULTS, LayoutSettings

MOST_PLACES = 64  # of a replica: the engine's word
_SLOWEST = 0.02  # of the fastest device's speed: slower ones, such as CPUs beside cards, hold no replicas
_MOST_MICROBATCHES = 64  # of all replicas, if these suffice; more pay for their launches


@dataclass(frozen=True, eq=False)
class DeviceSpeeds:
    """Speeds, kinds and hosts of devices, all that a choice of layouts asks of them. D devices."""

    time_ns: F64  # [D] of the whole step on the device alone
    kinds: I64  # [D] equal for devices that are alike, whose memory is too
    hosts: I64 | None = None  # [D] equal for devices with quick links between them; None: all links are alike
    settings: LayoutSettings = DEFAULTS.layouts

    @property
    def usable(self) -> list[int]:
        """The devices that are fast enough to hold replicas, the faster ones first, else by number."""
        order = np.lexsort((np.arange(len(self.time_ns)), self.time_ns))
        return [int(d) for d in order if self.time_ns[d] * _SLOWEST <= self.time_ns.min()]

    def hosts_of(self, arrangement: "Arrangement") -> tuple[int, ...] | None:
        """Returns the host [R] of each replica, for rings inside hosts and over them; None where these are no use. Each
        host has as many replicas, more than one, and each replica is on one host."""
        if self.hosts is None:
            return None
        found = [{int(self.hosts[device]) for device in devices} for devices in arrangement.devices]
        if any(len(hosts) > 1 for hosts in found):
            return None
        hosts = tuple(min(own) for own in found)
        counts = {hosts.count(host) for host in hosts}
        return hosts if len(set(hosts)) > 1 and len(counts) == 1 and min(counts) > 1 else None

    def alike(self, devices: list[int]) -> bool:
        """Returns whether all of `devices` are of one kind."""
        return len({int(self.kinds[device]) for device in devices}) == 1


def arrangements(machine: DeviceSpeeds, batch_size: int, *, is_fixed: bool = False) -> list[Arrangement]:
    """Returns what the devices and a batch of `batch_size` samples allow, without ZeRO and recomputation. The whole
    step in one replica without micro-batches is none: op placement. `is_fixed`: each sample is a micro-batch."""
    usable = machine.usable
    found: dict[Arrangement, None] = {}
    if len(usable) == 1 or not machine.alike(usable):
        found |= dict.fromkeys(_alone(machine, usable[0], batch_size, is_fixed))
    counts = _counts(len(usable), MOST_PLACES)
    if 2 < len(usable) <= MOST_PLACES and not machine.alike(usable):
        counts.insert(1, len(usable) - 1)  # the slowest one may only be waited for
    for count in dict.fromkeys(counts):
        devices = sorted(usable[:count])
        ways = _even(machine, devices, batch_size, is_fixed) if count > 1 else iter(())
        if count > 1 and (not machine.alike(devices) or batch_size % count):
            ways = chain(ways, _in_proportion(machine, devices, batch_size, is_fixed))
        found |= dict.fromkeys(ways)
    return list(found)


def replicated_ways(machine: DeviceSpeeds, batch_size: int, *, is_fixed: bool = False) -> list[Arrangement]:
    """Returns `arrangements`, those with replicas also with ZeRO 1, and those of one device each with ZeRO 3."""
    ways = arrangements(machine, batch_size, is_fixed=is_fixed)
    replicas = [way for way in ways if way.layout.data > 1]
    cut = [way for way in replicas if way.num_places == 1 and way.layout.is_even]
    ways += [replace(way, layout=replace(way.layout, zero=1)) for way in replicas]
    ways += [replace(way, layout=replace(way.layout, zero=3)) for way in cut]  # sums overlap the passes of each block
    return ways


def forced(machine: DeviceSpeeds, layout: Layout, batch_size: int) -> list[Arrangement]:
    """Returns the ways to put `layout` on the devices; InputError where there is none. A layout with unequal
    micro-batches gives the most to the fastest device, whatever the order of its numbers is. Replicas of one device
    each may be on unlike devices; of several, the groups are alike."""
    usable = machine.usable
    places = layout.stages
    if places is not None and places > MOST_PLACES:
        raise InputError(f"--parallel: stages is {places}; a replica has up to {MOST_PLACES}")
    if layout.data * (places or 1) > len(usable):
        what = f"{layout.data} replicas" + ("" if places is None else f" of {places} stages each")
        raise InputError(f"--parallel: {what} on {len(usable)} devices; take fewer, or give more devices")
    if not layout.is_even:
        if places not in (None, 1):
            raise InputError("--parallel: unequal micro-batches are for replicas of one device each; leave stages out")
        by_count = np.argsort(-np.array(layout.microbatches), kind="stable").argsort()
        return [Arrangement(layout, tuple((usable[turn],) for turn in by_count.tolist()))]
    found = [
        Arrangement(layout, groups)
        for size in ([places] if places else range(min(len(usable) // layout.data, MOST_PLACES), 0, -1))
        for groups in _groups(machine, sorted(usable[: size * layout.data]), layout.data)
    ]
    if not found and places in (None, 1):
        found = [Arrangement(layout, tuple((device,) for device in sorted(usable[: layout.data])))]
    if not found:
        raise InputError(
            f"--parallel: {len(usable)} devices have no {layout.data} groups of {places} that are alike; "
            "take another data=, or stages=1"
        )
    return found


def _counts(num_devices: int, most_places: int) -> list[int]:
    """Returns numbers of devices to use: all, a half and a quarter; of many, halves down to `most_places`."""
    counts = [num_devices, num_devices // 2, num_devices // 4]
    while counts[-1] > most_places:
        counts.append(counts[-1] // 2)
    return [count for count in dict.fromkeys(counts) if count > 0]


def _alone(machine: DeviceSpeeds, device: int, batch_size: int, is_fixed: bool) -> Iterator[Arrangement]:
    """Yields what lets a step fit on one device: micro-batches and recomputed blocks, more of them as needed."""
    whole = Arrangement(Layout(), ((device,),))
    if is_fixed:
        if batch_size > 1:
            yield replace(whole, layout=Layout((batch_size,)))
        return
    if (more := more_microbatches(whole, batch_size)) is not None:
        yield more
    yield replace(whole, layout=Layout(recompute=AUTO))


def _even(machine: DeviceSpeeds, devices: list[int], batch_size: int, is_fixed: bool) -> Iterator[Arrangement]:
    """Yields replicas that are alike, with as many micro-batches each."""
    for data in (count for count in range(1, len(devices) + 1) if len(devices) % count == 0):
        if batch_size % data or len(devices) // data > MOST_PLACES:
            continue
        alone = _by_number(devices, data) if data == len(devices) else ()  # unlike ones may have equal shares
        for groups in [*_groups(machine, devices, data)] or alone:
            samples = batch_size // data
            for microbatches in [samples] if is_fixed else _microbatches(len(groups[0]), samples, machine.settings):
                if data * microbatches > 1:
                    yield Arrangement(Layout((microbatches,) * data), groups)
                elif batch_size == 1 and not is_fixed:  # otherwise the whole step, which is op placement
                    yield Arrangement(Layout(recompute=AUTO), groups)


def _groups(machine: DeviceSpeeds, devices: list[int], data: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields ways to cut `devices` into `data` groups of the same kinds: neighbours together, or far apart."""
    if data == 1 or machine.alike(devices):
        yield from _by_number(devices, data)
        return
    by_kind: dict[int, list[int]] = {}
    for device in devices:
        by_kind.setdefault(int(machine.kinds[device]), []).append(device)
    if any(len(same) % data for same in by_kind.values()):
        return
    parts = {kind: len(same) // data for kind, same in by_kind.items()}
    yield tuple(
        tuple(chain.from_iterable(same[d * parts[kind] : (d + 1) * parts[kind]] for kind, same in by_kind.items()))
        for d in range(data)
    )


def _by_number(devices: list[int], data: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields `data` groups of as many devices: neighbours together, and far apart."""
    size = len(devices) // data
    yield tuple(tuple(devices[start : start + size]) for start in range(0, data * size, size))
    if size > 1 and data > 1:
        yield tuple(tuple(devices[start::data]) for start in range(data))


def _microbatches(num_places: int, samples: int, settings: LayoutSettings) -> list[int]:
    """Returns numbers of micro-batches that divide the `samples` of a replica. In one place a few may be faster: their
    activations fit into the cache of a card."""
    if num_places == 1:
        wanted = {*settings.microbatches_alone}
    else:
        most = max(_MOST_MICROBATCHES, 16 * num_places)
        wanted = {1, *(min(factor * num_places, most) for factor in settings.microbatches_a_place)}
    divisors = [count for count in range(1, min(samples, MAX_MICROBATCHES) + 1) if samples % count == 0]
    return sorted({min(divisors, key=lambda count: abs(count - want)) for want in wanted})


def more_microbatches(arrangement: Arrangement, batch_size: int) -> Arrangement | None:
    """Returns the arrangement with the next number of micro-batches that is a third larger or more, which takes less
    memory; None: no more. Unequal ones keep their shares."""
    layout = arrangement.layout
    counts, data = layout.microbatches, layout.data
    if layout.is_even:
        several = ((count,) * data for count in range(-(-4 * counts[0] // 3), MAX_MICROBATCHES // data + 1))
    else:
        factors = range(2, MAX_MICROBATCHES // layout.num_parts + 1)
        several = (tuple(factor * count for count in counts) for factor in factors)
    more = next((many for many in several if batch_size % sum(many) == 0), None)
    return None if more is None else replace(arrangement, layout=replace(layout, microbatches=more))


def _in_proportion(machine: DeviceSpeeds, devices: list[int], batch_size: int, is_fixed: bool) -> Iterator[Arrangement]:
    """Yields replicas of one device each, with micro-batches in proportion to speed: the best few of all numbers."""
    ways: dict[Arrangement, float] = {}
    by_speed = sorted(devices, key=lambda device: machine.time_ns[device])
    splits = [count for count in range(2, min(batch_size, MAX_MICROBATCHES) + 1) if batch_size % count == 0]
    enough = next((count for count in splits if count >= len(devices)), 0)  # to use all of them
    most = max(enough, _MOST_MICROBATCHES)
    for parts in [batch_size] if is_fixed else [count for count in splits if count <= most]:
        shares = shared_out(machine.time_ns[by_speed], parts)
        used = [(device, count) for device, count in zip(by_speed, shares, strict=True) if count]
        if len(used) < 2:
            continue
        slowest_ns = max(machine.time_ns[device] * count / parts for device, count in used)
        layout = Layout(tuple(count for _, count in used))
        ways.setdefault(Arrangement(layout, tuple((device,) for device, _ in used)), float(slowest_ns))
    best = sorted(ways, key=lambda way: (ways[way], way.layout.num_parts))
    yield from best[:6]  # more ways to share a batch out move no plan


def shared_out(time_ns: F64, parts: int, least: int = 0) -> list[int]:
    """Returns how many of `parts` each device takes, at least `least`: so many that the slowest is done soonest."""
    counts = np.full(len(time_ns), least)
    for _ in range(parts - least * len(time_ns)):  # the next one to whoever is done with it first
        counts[int(np.argmin((counts + 1) * time_ns))] += 1
    return [int(count) for count in counts]
