"""gdp.cluster.groups: which cards make groups, their figures and routes, and files of them."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from gdp.cluster import Cluster, Device, Route
from gdp.cluster.changes import with_another
from gdp.cluster.groups import grouped, islands
from gdp.cluster.prices import Prices
from gdp.errors import InputError
from gdp.simulator.constraints import Constraints
from hand_cases import make_cluster


def names_of(cluster: Cluster) -> list[str]:
    return [device.name for device in cluster.devices]


@pytest.mark.parametrize(
    ("text", "sizes", "names"),
    [
        ("8xa100-sxm-80g", (2, 4, 8), ["gpu0-1", "gpu2-3", "gpu4-5", "gpu6-7"]),
        ("6xl4-24g", (2, 3, 4, 6), ["gpu0-1", "gpu2-3", "gpu4-5"]),  # of four, two are left over
        ("3xl4-24g+cpu-16core", (2, 3), ["gpu0-1", "cpu0"]),  # gpu2 is left over
        ("2xdgx-h100", (2, 4, 8), [f"host{host}.gpu{card}-{card + 1}" for host in (0, 1) for card in (0, 2, 4, 6)]),
        ("2x(2x(2xl4-24g)@10gbit)@5gbit", (2,), [f"pod{p}.host{h}.gpu0-1" for p in (0, 1) for h in (0, 1)]),
        ("2xa100-sxm-80g+2xl4-24g+t4-16g", (2,), ["gpu0-1", "gpu2-3"]),
    ],
)
def test_equal_cards_of_a_host_make_groups(text: str, sizes: tuple[int, ...], names: list[str]) -> None:
    """Groups are cut in the order of devices from equal cards of a host; others but CPUs are left out."""
    cluster = Cluster.parse(text)
    assert cluster.group_sizes() == sizes
    assert names_of(cluster.grouped(2)) == names


def test_where_there_is_no_group_a_size_that_there_is_is_named() -> None:
    """Neither unequal cards nor hosts are joined; the error says what would do."""
    with pytest.raises(InputError, match=r"^groups of 16: '2xdgx-a100' has no 16 equal cards of a host; take 2, 4, 8$"):
        Cluster.parse("2xdgx-a100").grouped(16)
    with pytest.raises(InputError, match="name equal cards of one host, such as"):
        Cluster.parse("a100-sxm-80g+l4-24g+cpu-16core").grouped(2)
    with pytest.raises(InputError, match="no 4 equal cards"):
        Cluster.parse("8xl4-24g").grouped(2).grouped(4)


def test_limits_of_memory_are_of_ranks() -> None:
    """A group has the least of its cards' limits, a rank its part of a CPU's; a card of no group needs none."""
    cluster = Cluster.parse("3xl4-24g+cpu-16core")
    limits = Constraints(max_memory_bytes={"gpu0": 7, "gpu1": 5, "gpu2": 3, "cpu0": 10})
    assert limits.on_groups(cluster.grouped(2), cluster).max_memory_bytes == {"gpu0-1": 5, "cpu0": 5}
    named = Constraints(max_memory_bytes={"gpu0-1": 4, "gpuu0": 3}).on_groups(cluster.grouped(2), cluster)
    assert named.max_memory_bytes == {"gpu0-1": 4, "gpuu0": 3}  # a wrong name is refused where limits are read


def bridged() -> Cluster:
    """Four cards, 0 and 2, 1 and 3 on bridges of about 50 GB/s, the others over PCIe of 12 GB/s."""
    rates = {(0, 2): 50, (2, 0): 50, (1, 3): 48, (3, 1): 49}
    routes = {
        (a, b): Route(1000, rates.get((a, b), 12) * 10**9, (f"d{a}.out", f"d{b}.in"))
        for a in range(4)
        for b in range(4)
        if a != b
    }
    return make_cluster(4, routes)


def test_the_fastest_links_make_groups_and_slower_ones_where_it_takes_them() -> None:
    """Pairs are those of the bridges; four cards are a group over the slowest hop of their ring."""
    cluster = bridged()
    assert islands(cluster) == [(0, 2), (1, 3)]
    assert cluster.group_sizes() == (2,)
    pairs, four = cluster.grouped(2), cluster.grouped(4)
    assert [(device.name, device.group) for device in pairs.devices] == [
        ("d0+d2", ("d0", "d2")),
        ("d1+d3", ("d1", "d3")),
    ]
    assert [device.link for device in pairs.devices] == [Route(1000, 50 * 10**9, ()), Route(1000, 48 * 10**9, ())]
    assert four.devices[0].link == Route(1000, 12 * 10**9, ())


def test_rings_that_share_a_channel_take_turns() -> None:
    """All hops of all rings of a host at once: a channel that four of them share leaves each a quarter."""
    shared = make_cluster(4, {(a, b): Route(0, 8000, ("bus",)) for a in range(4) for b in range(4) if a != b})
    assert [device.link for device in shared.grouped(2).devices] == [Route(0, 2000, ())] * 2
    assert shared.grouped(4).devices[0].link == Route(0, 2000, ())
    # what two members send to the other group takes turns as well
    assert shared.grouped(2).route(0, 1) == Route(0, 4000, ("bus",))


def test_a_group_has_the_least_of_its_cards() -> None:
    """Cards of a kind whose figures differ, as measured ones do, make a group with the worst of each."""
    plain = Cluster.parse("2xl4-24g")
    first, second = plain.devices
    slower = replace(first, memory_bytes=2**30, issue_ns=20_000, flops_per_second={"float32": 10**12})
    group = replace(plain, devices=(slower, second)).grouped(2).devices[0]
    assert (group.memory_bytes, group.issue_ns) == (2**30, 20_000)
    assert group.flops_per_second == {"float32": 10**12}
    assert group.memory_bytes_per_second == second.memory_bytes_per_second


def test_ranks_share_a_cpu_and_the_network_cards() -> None:
    """A rank has a T-th of a CPU and of a network card that T of them share, and a slot of its own."""
    cluster = Cluster.parse("2x(4xa100-sxm-80g+cpu-16core)@2x100gbit")
    halves = cluster.grouped(4)
    assert names_of(halves) == ["host0.gpu0-3", "host0.cpu0", "host1.gpu0-3", "host1.cpu0"]
    cpu, share = cluster.devices[4], halves.devices[1]
    assert share.memory_bytes == cpu.memory_bytes // 4
    assert share.flops_per_second == {name: rate // 4 for name, rate in cpu.flops_per_second.items()}
    slot = cluster.route(0, 4)
    assert halves.route(0, 1) == replace(slot, channels=("host0.gpu0-3.pcie.up",))
    far = cluster.route(0, 5)
    assert halves.route(0, 2).bytes_per_second == far.bytes_per_second // 2  # two network cards for four
    assert halves.route(0, 2).channels == (
        "host0.gpu0-3.pcie.up",
        "host0.net0.out",
        "host0.net1.out",
        "host1.gpu0-3.pcie.down",
        "host1.net0.in",
        "host1.net1.in",
    )


@pytest.mark.parametrize("text", ["4xl4-24g+cpu-16core", "2xdgx-a100", "8xp100-sxm-16g:compile"])
def test_groups_of_one_are_the_cluster(text: str) -> None:
    """Groups of one card have the figures and routes of the devices."""
    cluster = Cluster.parse(text)
    assert Cluster.build(cluster.name, *grouped(cluster, 1)).fingerprint == cluster.fingerprint
    assert cluster.grouped(1) is cluster


@pytest.mark.parametrize("name", ["groups.yaml", "groups.json"])
def test_files_keep_groups(tmp_path: Path, name: str) -> None:
    """A file of groups is read as it was written, and is of other devices than its cards are."""
    groups = Cluster.parse("4xa100-sxm-80g+cpu-16core").grouped(2)
    groups.save(tmp_path / name)
    again = Cluster.load(tmp_path / name)
    assert again.devices == groups.devices
    assert again.fingerprint == groups.fingerprint
    assert again.grouped(2) is again
    plain = [replace(device, group=(), link=None) for device in groups.devices]
    assert replace(groups, devices=tuple(plain)).fingerprint != groups.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link": None}, "two cards or more, and their link"),
        ({"group": ["gpu0"]}, "two cards or more, and their link"),
        ({"group": ["gpu0", "gpu0"]}, "has 'gpu0'; printable names of cards are expected, each once"),
        ({"group": ["gpu2", "gpu5"]}, "each once"),  # gpu2 is in the other group
        ({"link": {"bandwidth": 0, "latency": 0}}, "link: bandwidth is 0"),
        ({"link": {"bandwidth": 1, "latency": 0, "exchange": "nvlink9"}}, "did you mean nvlink"),
        ({"link": {"bandwidth": 1, "latency": 0, "exchange": "network"}}, "'network' is between hosts"),
        ({"link": {"bandwidth": 1}}, "latency"),
        ({"link": 5}, "bandwidth, latency and exchange"),
    ],
)
def test_what_is_no_group_is_refused(change: dict[str, object], message: str) -> None:
    """The device and the field are named."""
    document = Cluster.parse("4xa100-sxm-80g").grouped(2).to_document()
    changed = document["devices"][0] | change
    document["devices"][0] = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(InputError, match=message):
        Cluster.from_document(document)


def test_a_group_costs_what_its_cards_do() -> None:
    """Dollars, watts and memory are those of all cards; one more group is not offered."""
    cluster = Cluster.parse("4xa100-sxm-80g")
    groups = cluster.grouped(4)
    assert Prices().of(groups) == Prices().of(cluster)
    assert repr(groups) == "Cluster('4xa100-sxm-80g': 1 (4xa100-sxm-80g), 314.6 GiB in all)"
    assert with_another(groups, 0) is None


def test_members_that_are_devices_are_refused() -> None:
    """A card is in one group, or a device by itself."""
    figures = 2**30, MappingProxyType({"float32": 10**12}), 10**11, 0
    link, ends = Route(0, 10**9, ()), Route(0, 10**9, ())
    pair = Device("pair", "k", *figures, group=("a", "b"), link=link)
    with pytest.raises(InputError, match="group has 'b'"):
        Cluster.build("c", [pair, Device("b", "k", *figures)], {(0, 1): ends, (1, 0): ends})
