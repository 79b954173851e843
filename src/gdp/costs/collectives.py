"""Exchanges between alike cards in closed form, as NCCL's model of them (`tuning.cc`) has it.

    time = begin + steps * step + bytes on the wire / rate + own part / local rate      the least of all

over protocols (LL, LL128 and Simple: from quick to begin to full rate) and over the algorithms: rings, for sums also
NVLink SHARP inside a host and trees between hosts. Of B bytes and R cards (H hosts), a ring takes

    exchange                     steps        of these, between hosts   bytes on the wire    own part
    all_reduce                   2 (R - 1)    2 H                       2 B (R - 1) / R      B / R
    reduce_scatter, all_gather   R - 1        H - 1                     B (R - 1) / R        B / R
    broadcast                    R - 1        H - 1                     B                    0
    all_to_all                   1            1                         B (R - 1) / R        B / R
    send                         1            1                         B                    0

`gdp.cluster.catalogue.EXCHANGES` has the figures of kinds of links. All costs are lines in B: a time is a few numbers.

Servers, which replay CUDA graphs, sum up to 8 MB by one kernel a card, which reads what others wrote
(vLLM's `custom_all_reduce`; SGLang and TensorRT-LLM have their like): in one pass everything, or in two a part of each
card and then all sums:

    one pass     begin + B (R - 1) / rate          two passes     begin + 2 B (R - 1) / R / rate

Ranks of a group exchange in ops of kinds `collective.all_reduce` and so on. Over links without figures these take the
hops of a ring: the latency of a route for each step, the bytes at its rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from gdp.arrays import I64, unique
from gdp.cluster import Cluster, Device
from gdp.cluster.catalogue import EXCHANGES, NETWORK, ExchangeFigures
from gdp.cluster.device import CUDA_GRAPHS
from gdp.errors import InputError

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
COLLECTIVE = "collective"  # ops of ranks are called collective.all_reduce and so on
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, "broadcast", "all_to_all", "send")
_NVLS_CARDS = 8  # all cards of a switch: of fewer, NCCL 2.27 takes rings
_MOST_ONE_KERNEL_BYTES = 8 * 2**20  # vLLM's and SGLang's: larger buffers are NCCL's
_NETWORK_POST_NS = 1_000  # the least of any step where some are between hosts: getNetOverhead of tuning.cc
_TREE_SHARE, _TREE_LL_SHARE = 0.92, 1 / 3.8  # of the rate: tuning.cc

_Number = TypeVar("_Number", int, float)

Line = tuple[int, float]  # ns to begin, and ns for each byte of the buffer


@dataclass(frozen=True, slots=True)
class AlikeCards:
    """R alike cards: as many on each of H hosts."""

    num_cards: int
    link: ExchangeFigures | None  # inside hosts; None: one card on each
    rate: float = math.inf  # bytes per second of a card, over this link
    num_hosts: int = 1
    network_rate: float = math.inf  # bytes per second out of a host, over all network cards that they use
    is_served: bool = False  # small sums take one kernel
    network: ExchangeFigures = EXCHANGES[NETWORK]  # between hosts

    @classmethod
    def of_group(cls, device: Device, num_ranks: int = 0) -> "AlikeCards":
        """Returns the cards of a group; `num_ranks` of them, where all do so in parts of it (0: all as one)."""
        count, link = num_ranks or device.num_cards, device.link
        assert link is not None
        rate, protocols = link.bytes_per_second, {"hops": (0, link.latency_ns, 1.0)}
        if link.exchange:
            figures = EXCHANGES[link.exchange].over(rate, link.latency_ns, count)
            rate = rate if figures.is_switched else figures.rate(count)
        else:
            figures = ExchangeFigures({count: rate}, 1.0, math.inf, protocols, None, {})
        return cls(count, figures, rate, is_served=device.runtime == CUDA_GRAPHS)

    def lines(self, exchange: str) -> tuple[Line, ...]:
        """Returns what each protocol and algorithm takes; the exchange takes the least."""
        count, hosts = self.num_cards, self.num_hosts
        pieces = 1 / count if exchange in (*KINDS[:3], "all_to_all") else 0.0  # the part of a card
        passes = 2 if exchange == ALL_REDUCE else 1
        steps = 1 if exchange in ("all_to_all", "send") else passes * (count - 1)
        far = 0 if hosts == 1 else min(steps, 2 * hosts if exchange == ALL_REDUCE else max(hosts - 1, 1))
        rate = min(self.rate, self.network_rate)
        local = 0.0 if self.link is None else pieces / self.link.local_rate
        begin = self.network if hosts > 1 or self.link is None else self.link
        lines = []
        for protocol, (begin_ns, step_ns, share) in begin.protocols.items():
            near_ns = _NETWORK_POST_NS if hosts > 1 else step_ns
            if hosts > 1 and self.link is not None:
                if protocol not in self.link.protocols:  # LL128 takes NVLink inside the hosts
                    continue
                near_ns = max(near_ns, self.link.protocols[protocol][1])
            latency_ns = begin_ns + (steps - far) * near_ns + far * step_ns
            lines.append((latency_ns, (passes * (1 - pieces) / (rate * share) + local) * 1e9))
            if hosts > 1 and exchange == ALL_REDUCE:
                hops_ns = (count // hosts - 1) * near_ns + round(math.log2(hosts) * begin.tree_ns[protocol])
                share = _TREE_LL_SHARE if protocol == "ll" else share
                lines.append((begin_ns + 2 * hops_ns, 2e9 / (rate * _TREE_SHARE * share)))
        nvls = None if self.link is None else self.link.nvls
        if nvls is not None and exchange == ALL_REDUCE and hosts == 1 and count >= _NVLS_CARDS:
            lines.append((nvls[0], (2 * (1 - pieces) / nvls[1] + local) * 1e9))
        return tuple(lines)

    def time_ns(self, exchange: str, num_bytes: int) -> int:
        """Returns the time of an exchange of a buffer of `num_bytes`; `all_gather`: of the gathered one."""
        return _least_ns(self._lines_of(exchange, num_bytes), num_bytes)

    def begin_ns(self, exchange: str, num_bytes: int) -> int:
        """Returns what of this time any exchange takes, however few its bytes are."""
        return min(self._lines_of(exchange, num_bytes), key=lambda line: line[0] + num_bytes * line[1])[0]

    def _lines_of(self, exchange: str, num_bytes: int) -> tuple[Line, ...]:
        lines = self.lines(exchange)
        if self.is_served and self.link and exchange == ALL_REDUCE and num_bytes < _MOST_ONE_KERNEL_BYTES:
            others = self.num_cards - 1
            for passes, (begin_ns, rate) in self.link.one_kernel.items():
                lines += ((begin_ns, (others if passes == 1 else 2 * others / self.num_cards) * 1e9 / rate),)
        return lines


def _least_ns(lines: Sequence[Line], num_bytes: int) -> int:
    return min(begin_ns + math.ceil(num_bytes * ns_per_byte) for begin_ns, ns_per_byte in lines)


Leg = tuple[int, int, int]
"""How the exchange ends at a replica: by a transfer from another one (its place in the ring), with the latency and the
bytes per second of the route; 0 of these: by a message from that one when it is done."""


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """The exchanges of R replicas, each as a transfer to every replica. A transfer has the bytes with which it takes
    the exchange's time over its route: it keeps its channels as busy as the exchange does, and the next exchange waits
    for it. Between hosts a network card has one such transfer, and tells other replicas beside it."""

    lines: Mapping[str, tuple[Line, ...]]  # by exchange
    legs: tuple[Leg, ...]  # [R] in the order of the ring
    in_hops: bool = False  # cut for hops all the same: as the step is executed

    def time_ns(self, exchange: str, num_bytes: int) -> int:
        """Returns the time of an exchange alone."""
        return _least_ns(self.lines[exchange], num_bytes)

    def received_bytes(self, exchange: str, num_bytes: int) -> I64:
        """Returns [R] the bytes of the transfer to each replica in the order of the ring; 0: a message."""
        told_ns = max((latency_ns for _, latency_ns, rate in self.legs if not rate), default=0)
        left_ns = self.time_ns(exchange, num_bytes) - told_ns
        sizes = [max((left_ns - latency_ns) * rate // 10**9, rate > 0) for _, latency_ns, rate in self.legs]
        return np.array(sizes, np.int64)

    def document(self) -> dict[str, Any]:
        """Returns the times for a plan file."""
        lines = {kind: list(map(list, lines)) for kind, lines in self.lines.items()}
        return {"lines": lines, "legs": list(map(list, self.legs))}

    @classmethod
    def of_document(cls, document: object, num_replicas: int) -> "ExchangeTimes":
        """Returns the times that a plan file has; InputError for anything else."""
        try:
            of_kind = dict(document)["lines"]  # type: ignore[call-overload]
            lines = {kind: tuple((_within(a), _within(float(b))) for a, b in of_kind[kind]) for kind in KINDS[:3]}
            rows = dict(document)["legs"]  # type: ignore[call-overload]
            legs = tuple((_within(sender, num_replicas), _within(ns), _within(rate)) for sender, ns, rate in rows)
            if len(legs) == num_replicas and all(lines.values()):
                return cls(lines, legs)
        except (KeyError, TypeError, ValueError):
            pass
        raise InputError("layout: exchanges are not those of its replicas; place the model anew")


def _within(number: _Number, end: int = 2**53) -> _Number:
    if type(number) not in (int, float) or not 0 <= number < end:
        raise ValueError
    return number


def exchange_times(
    cluster: Cluster, devices: Sequence[Sequence[int]] | I64
) -> tuple[tuple[int, ...], ExchangeTimes] | None:
    """Returns the order [R] of replicas on `devices` [R, P] in rings, host by host, and what their exchanges take. Of
    replicas on groups, corresponding cards exchange: as many times at once as a group has cards. None where the links
    tell nothing of exchanges, or differ between the replicas or their places."""
    grid = np.array(devices, np.int64)
    if len(grid) < 2 or not cluster.exchanges.size:
        return None
    num_used = sum(cluster.devices[device].num_cards for device in grid.flat)
    found = {_of_place(cluster, place, num_used) for place in grid.T}
    if len(found) != 1 or (alike := found.pop()) is None:
        return None
    order, legs, lines = alike
    return order, ExchangeTimes(dict(zip(KINDS, lines, strict=False)), legs)


def _of_place(
    cluster: Cluster, devices: I64, num_used: int
) -> tuple[tuple[int, ...], tuple[Leg, ...], tuple[tuple[Line, ...], ...]] | None:
    """Returns the order and the legs of one place of replicas, `num_used` of which exchange at once, and the lines of
    all-reduce, reduce-scatter and all-gather. None if not alike."""
    square, is_other = np.ix_(devices, devices), ~np.eye(len(devices), dtype=np.bool_)
    names, latency_ns, rates = (
        array[square] for array in (cluster.exchanges, cluster.latency_ns, cluster.bytes_per_second)
    )
    is_far = names == NETWORK
    host_of = np.argmin(is_far, axis=1)  # the first replica there
    _, first, counts = np.unique(host_of, return_index=True, return_counts=True)
    inside = unique(names[is_other & ~is_far]).tolist()
    is_alike = (is_far == (host_of[:, None] != host_of)).all() and len(set(counts.tolist())) == 1
    if (
        not is_alike
        or len(inside) > 1
        or "" in inside
        or any(len(set(of[is_far].tolist())) > 1 for of in (latency_ns, rates))
    ):
        return None
    order, size = np.argsort(host_of, kind="stable"), int(counts[0])
    link = EXCHANGES[inside[0]] if inside else None
    if link is not None:
        near, num_alike = is_other & ~is_far, int((cluster.exchanges[devices[0]] == inside[0]).sum()) + 1
        num_alike *= cluster.devices[devices[0]].num_cards
        link = link.over(int(rates[near].min()), int(latency_ns[near].max()), num_alike)
        num_used = -(-num_used // len(first)) if link.is_switched else size
    rate, network_rate = math.inf if link is None else link.rate(num_used), math.inf
    leaders = [list(range(size))] * len(first)  # of each replica of a host the one that uses its network card
    if len(first) > 1:
        hosts = order.reshape(len(first), size)
        leaders = [
            _leaders(cluster, devices[own], devices[far])
            for own, far in zip(hosts, np.roll(hosts, 1, 0)[:, 0], strict=True)
        ]
        network_rate = len(set(leaders[0])) * float(rates[first[0], first[1]])
    legs = []
    for place, replica in enumerate(order.tolist()):
        host, rank = divmod(place, size)
        leads, distance = leaders[host][rank] == rank, 1 if len(first) == 1 else size
        sender = (place - distance) % len(order) if leads else host * size + leaders[host][rank]
        pair = order[sender], replica
        legs.append((sender, int(latency_ns[pair]), int(rates[pair]) if leads else 0))
    network = EXCHANGES[NETWORK]
    network = network.with_latency(int(latency_ns[is_far].max())) if is_far.any() else network
    cards = AlikeCards(len(devices), link, rate, len(first), network_rate, network=network)
    lines = tuple(cards.lines(kind) for kind in KINDS[:3])
    return (tuple(order.tolist()), tuple(legs), lines) if len(set(map(tuple, leaders))) == 1 else None


def _leaders(cluster: Cluster, cards: I64, far: int) -> list[int]:
    """Returns the first of `cards` of a host that shares with each its channel to another host, for device `far`."""
    ways = [[name for name in cluster.route(card, far).channels if name.endswith(".out")] for card in cards.tolist()]
    return [ways.index(way) for way in ways]
