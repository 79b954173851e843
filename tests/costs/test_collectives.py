"""Exchanges in closed form: hand-worked times, bounds in bytes and cards, hosts, and what plan files keep of them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.cluster.catalogue import EXCHANGES, ExchangeFigures
from gdp.costs.collectives import KINDS, AlikeCards, ExchangeTimes, exchange_times
from gdp.errors import InputError

PLAIN = ExchangeFigures({2: 100e9}, 1.0, 50e9, {"ll": (5000, 1000, 0.25), "simple": (20_000, 2000, 1.0)}, None, {})


def test_a_ring_by_hand() -> None:
    """The quick protocol wins for small buffers, the full rate for large ones."""
    # 4 cards at 100 GB/s, the pass over the own quarter at 50 GB/s
    #   LL      5,000 + 6 x 1,000 + 1.5 B / 25 + B / 4 / 50    = 11,000 + 0.065 B
    #   Simple 20,000 + 6 x 2,000 + 1.5 B / 100 + B / 4 / 50   = 32,000 + 0.020 B     equal at B = 466,667
    cards = AlikeCards(4, PLAIN, 100e9)
    assert cards.time_ns("all_reduce", 1000) == 11_065
    assert cards.time_ns("all_reduce", 10**8) == 2_032_000
    # a gather: half the steps and bytes                Simple 20,000 + 3 x 2,000 + 0.75 B / 100 + B / 4 / 50
    assert cards.time_ns("all_gather", 10**8) == cards.time_ns("reduce_scatter", 10**8) == 26_000 + 1_250_000
    # to one card after the other, and directly
    assert cards.time_ns("broadcast", 10**8) == 26_000 + 1_000_000
    assert cards.time_ns("all_to_all", 10**8) == 22_000 + 1_250_000
    assert cards.time_ns("send", 10**8) == 22_000 + 1_000_000


def test_servers_sum_small_buffers_by_one_kernel() -> None:
    """A card reads all that others wrote, or in two passes its part and then all sums; large buffers take NCCL's."""
    # 4 cards: 5,000 + 3 B / 100 in one pass, 9,000 + 2 x 3 / 4 B / 100 in two; from 8 MiB on Simple, as above
    figures = replace(PLAIN, one_kernel={1: (5000, 100e9), 2: (9000, 100e9)})
    cards = AlikeCards(4, figures, 100e9, is_served=True)
    assert cards.time_ns("all_reduce", 1000) == 5030
    assert cards.time_ns("all_reduce", 10**6) == 24_000
    assert cards.begin_ns("all_reduce", 10**6) == 9000
    assert cards.time_ns("all_reduce", 2**23) == 32_000 + 167_773
    assert cards.time_ns("all_gather", 1000) == AlikeCards(4, PLAIN, 100e9).time_ns("all_gather", 1000)
    # as measured of 8 cards in CUDA graphs, 16 KB and 2 MB
    for kind, times_us in {"a100-sxm-80g": (6.83, 28.3), "h100-sxm-80g": (5.22, 19.3)}.items():
        group = Cluster.parse(f"8x{kind}:cuda-graphs").grouped(8).devices[0]
        found = [AlikeCards.of_group(group).time_ns("all_reduce", size) / 1000 for size in (2**14, 2**21)]
        assert found == pytest.approx(times_us, rel=0.2)


def test_two_hosts_by_hand() -> None:
    """Between hosts the network's protocols begin, and its rate bounds all; a tree has fewer steps than a ring."""
    # 8 cards on each of 2 hosts: ring, LL: 6.6 us + 26 steps of 1 us (LL: the link's) + 4 of 2.7 us = 43.4 us
    # tree, LL: 6.6 us + 2 x (7 x 1 us + log2(2) x 5 us) = 30.6 us
    cards = AlikeCards(16, PLAIN, 100e9, 2, 20e9)
    assert min(begin_ns for begin_ns, _ in cards.lines("all_reduce")) == 30_600
    assert sorted(begin_ns for begin_ns, _ in cards.lines("all_reduce"))[1] == 43_400
    # Simple, ring: 8.4 us + 26 x 2 us + 4 x 14 us, 2 x 15 / 16 of the bytes at 20 GB/s, the own 16th at 50 GB/s
    assert cards.time_ns("all_reduce", 10**9) == 116_400 + 93_750_000 + 1_250_000


def test_times_grow_with_bytes_and_cards() -> None:
    """More bytes or more cards never take less, but for sums in the switch; where each pair has a link, more cards have
    more links."""
    sizes = [2**power for power in range(8, 32)]
    for figures in EXCHANGES.values():
        if figures.rates:
            for kind in KINDS:
                times = [[AlikeCards(r, figures, figures.rate(r)).time_ns(kind, b) for b in sizes] for r in range(2, 8)]
                assert (np.diff(times, axis=0) >= 0).all() == figures.is_switched
                assert (np.diff(times, axis=1) >= 0).all()
    h100 = EXCHANGES["nvlink4"]
    seven, eight = (AlikeCards(r, h100, h100.rate(r)).time_ns("all_reduce", 2**30) for r in (7, 8))
    assert eight < seven


def test_legs_of_hosts_that_share_a_network_card() -> None:
    """A network card of a host has one transfer, and tells the replicas beside it; rings go host by host."""
    cluster = Cluster.parse("2x(4xa100-sxm-80g)@2x100gbit:eager")
    known = exchange_times(cluster, [[device] for device in (0, 4, 1, 5, 2, 6, 3, 7)])
    assert known is not None
    order, times = known
    assert order == (0, 2, 4, 6, 1, 3, 5, 7)
    near, far = cluster.route(0, 1), cluster.route(0, 4)
    assert times.legs[:4] == (
        (4, far.latency_ns, far.bytes_per_second),
        (5, far.latency_ns, far.bytes_per_second),
        (0, near.latency_ns, 0),
        (1, near.latency_ns, 0),
    )
    assert times.legs[4][0] == 0
    assert (times.received_bytes("all_reduce", 10**9)[[2, 3, 6, 7]] == 0).all()


def test_links_that_differ_or_tell_nothing_have_none() -> None:
    """Without figures, between unlike cards, or with unequal hosts, exchanges go in hops."""
    for text, devices in (
        ("2xp100-sxm-16g", [[0], [1]]),
        ("2xa100-sxm-80g+2xh100-sxm-80g", [[0], [1], [2], [3]]),
        ("2x(4xa100-sxm-80g)@100gbit", [[0], [1], [4]]),
        ("2x(2x(2xa100-sxm-80g)@100gbit)@50gbit", [[0], [4]]),
    ):
        assert exchange_times(Cluster.parse(f"{text}:eager"), devices) is None
    document = Cluster.parse("2xa100-sxm-80g").to_document()
    links = [{name: value for name, value in link.items() if name != "exchange"} for link in document["links"]]
    assert exchange_times(Cluster.from_document(document | {"links": links}), [[0], [1]]) is None


def test_peer_to_peer_copies_over_pcie() -> None:
    """Sums of four RTX 4090 whose links reach 12.77 GB/s, reported by others and fitted on by nobody (size and us:
    github.com/tinygrad/open-gpu-kernel-modules, pull request 22)."""
    reported = {2**15: 18.78, 2**17: 42.44, 2**19: 94.11, 2**21: 271.8, 2**25: 3966.7}
    figures = EXCHANGES["pcie4"].over(12_770_000_000, EXCHANGES["pcie4"].latency_ns, 4)
    cards = AlikeCards(4, figures, figures.rate(4))
    errors = [cards.time_ns("all_reduce", size) / us / 1000 - 1 for size, us in reported.items()]
    assert np.abs(errors).max() < 0.15
    assert np.median(np.abs(errors)) < 0.08


def test_links_of_pairs() -> None:
    """A card of eight MI300X sends over one of its seven links to another, and exchanges with all over all."""
    cluster = Cluster.parse("8xmi300x-192g:eager")
    assert cluster.route(0, 1).bytes_per_second == 48e9
    for num_cards, rate in ((8, 336e9), (4, 144e9), (2, 48e9)):  # of two groups of four, each has three links a card
        group = cluster.grouped(num_cards).devices[0]
        known = exchange_times(cluster, [[device] for device in range(num_cards)])
        assert known is not None
        for of_cards in (AlikeCards.of_group(group).time_ns, known[1].time_ns):
            own_ns = 2**30 / num_cards / EXCHANGES["xgmi3"].local_rate * 1e9
            expected_ns = 2 * (1 - 1 / num_cards) * 2**30 / rate * 1e9 + own_ns
            assert of_cards("all_reduce", 2**30) == pytest.approx(expected_ns, rel=0.02)


def test_links_of_pairs_in_parts_and_in_proportion() -> None:
    """Parts of a group have as many links as a group of their size; links of half the rate take twice as long."""
    cluster = Cluster.parse("8xmi300x-192g")
    group = cluster.grouped(8).devices[0]
    for num_ranks in (2, 4):
        own = AlikeCards.of_group(cluster.grouped(num_ranks).devices[0])
        assert AlikeCards.of_group(group, num_ranks).time_ns("all_reduce", 2**30) == own.time_ns("all_reduce", 2**30)
    document = cluster.to_document()
    links = [link | {"bandwidth": 24 * 10**9} if link.get("exchange") else link for link in document["links"]]
    half = Cluster.from_document(document | {"links": links})
    times, of_groups = [], []
    for each in (cluster, half):
        known = exchange_times(each, [[device] for device in range(8)])
        assert known is not None
        times.append(known[1].time_ns("all_gather", 2**32))
        of_groups.append(AlikeCards.of_group(each.grouped(8).devices[0]).time_ns("all_gather", 2**32))
    assert times[1] / times[0] == pytest.approx(2, rel=0.01)
    assert of_groups[1] / of_groups[0] == pytest.approx(2, rel=0.01)


def test_replicas_of_several_places_on_links_of_other_rates() -> None:
    """Exchanges over links with figures in proportion are as alike at every place as those of presets."""
    document = Cluster.parse("4xl4-24g").to_document()
    links = [link | {"bandwidth": 12 * 10**9} for link in document["links"]]
    cluster = Cluster.from_document(document | {"links": links})
    known = exchange_times(cluster, [[0, 1], [2, 3]])
    assert known is not None
    one = exchange_times(cluster, [[0], [2]])
    assert one is not None
    assert known[1].lines["all_gather"] == one[1].lines["all_gather"]


def test_networks_of_another_latency_and_hosts_without_nvlink() -> None:
    """A network of twice the latency takes small sums nearly twice as long; LL128 takes NVLink inside the hosts."""
    document = Cluster.parse("2x(2xl4-24g)@100gbit").to_document()
    far = [link for link in document["links"] if link.get("exchange") == "network"]
    links = [link | {"latency": "18.6us"} if link in far else link for link in document["links"]]
    times = []
    for each in (document, document | {"links": links}):
        known = exchange_times(Cluster.from_document(each), [[0], [1], [2], [3]])
        assert known is not None
        times.append(known[1].time_ns("all_reduce", 8))
    assert 1.5 < times[1] / times[0] <= 2
    shares = [share for _, _, share in EXCHANGES["network"].protocols.values()]
    counts = {}
    for text in ("2x(2xl4-24g)@100gbit", "2x(2xa100-sxm-80g)@100gbit"):
        known = exchange_times(Cluster.parse(text), [[0], [1], [2], [3]])
        assert known is not None
        counts[text] = len(known[1].lines["all_gather"])
    assert list(counts.values()) == [len(shares) - 1, len(shares)]


def test_plan_files_keep_times() -> None:
    """Times come back from JSON as they were; anything else is refused."""
    known = exchange_times(Cluster.parse("4xa100-sxm-80g:eager"), [[0], [1], [2], [3]])
    assert known is not None
    document = json.loads(json.dumps(known[1].document()))
    assert ExchangeTimes.of_document(document, 4) == known[1]
    for wrong in (None, {}, document | {"legs": [[0, 1, 2]]}, document | {"legs": [[9, 1, 2]] * 4}, {"lines": {}}):
        with pytest.raises(InputError, match="place the model anew"):
            ExchangeTimes.of_document(wrong, 4)
