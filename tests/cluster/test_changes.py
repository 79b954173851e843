"""Clusters that differ from a given one in a single thing."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.cluster import Cluster, changes


def content(cluster: Cluster) -> dict[str, object]:
    return {**cluster.to_document(), "name": ""}


@pytest.mark.parametrize(
    ("fewer", "like", "more"),
    [
        ("p100-pcie-16g", 0, "2xp100-pcie-16g"),
        ("3xp100-pcie-16g", 1, "4xp100-pcie-16g"),
        ("2xv100-sxm-32g", 0, "3xv100-sxm-32g"),
        ("2xa100-sxm-80g", 1, "3xa100-sxm-80g"),
    ],
)
def test_one_more_is_the_larger_preset(fewer: str, like: int, more: str) -> None:
    """A device more, like any of equal ones, makes the preset of one more: names, routes and channels."""
    added = changes.with_another(Cluster.parse(fewer), like)
    assert added is not None
    assert content(added) == content(Cluster.parse(more))


def test_one_more_on_a_host_shares_its_network() -> None:
    """It has the host's network channels, slots of its own, and its neighbours' routes."""
    cluster = Cluster.parse("2x(2xl4-24g)@10gbit")
    added = changes.with_another(cluster, 1)
    assert added is not None
    assert added.devices[4].name == "host0.gpu2"
    assert added.route(4, 2).channels == ("host0.gpu2.pcie.up", "host0.net.out", "host1.gpu0.pcie.down", "host1.net.in")
    assert added.route(4, 1).bytes_per_second == cluster.route(0, 1).bytes_per_second
    assert content(changes.only(added, range(4))) == content(cluster)


def test_factors_and_parts() -> None:
    """Links twice as fast, twice the memory, the first few: nothing else changes."""
    cluster = Cluster.parse("2xl4-24g+cpu-16core")
    faster, larger = changes.with_faster_links(cluster, 2), changes.with_more_memory(cluster, 2)
    assert np.array_equal(faster.bytes_per_second, 2 * cluster.bytes_per_second)
    assert [d.memory_bytes for d in larger.devices] == [2 * d.memory_bytes for d in cluster.devices]
    assert (faster.devices, faster.route_channels) == (cluster.devices, cluster.route_channels)
    group = Cluster.parse("2xl4-24g").grouped(2).devices[0]
    assert group.link is not None
    quicker = changes.with_faster_links(Cluster.parse("2xl4-24g").grouped(2), 2).devices[0]
    assert quicker == replace(group, link=replace(group.link, bytes_per_second=2 * group.link.bytes_per_second))
    assert content(changes.first(cluster, 2)) == content(Cluster.parse("2xl4-24g"))
    assert changes.with_another(Cluster.parse("64xl4-24g"), 0) is None
