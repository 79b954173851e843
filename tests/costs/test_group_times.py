"""Collectives as ops: their times on groups, their hosts and kernels, and bounds with them."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound
from gdp.cluster import Cluster, Route
from gdp.cluster.catalogue import EXCHANGES
from gdp.costs.breakdown import Breakdown
from gdp.costs.collectives import KINDS, AlikeCards, exchange_times
from gdp.costs.fusion import fused
from gdp.costs.hosts import EXCHANGE_KERNELS, host_times
from gdp.costs.op_times import count_time_sources, op_times
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from hand_cases import make_cluster

ROWS, WIDTH = 4096, 8192


def tensor_text(rows: int = ROWS) -> str:
    return f"bfloat16[{rows},{WIDTH}]"


def shaped(name: str, shapes: str, num_bytes: int, flops: int = 0) -> Op:
    return Op(name, shapes.split()[0], flops, num_bytes, "bfloat16", shapes=shapes)


def program(num_ranks: int = 4, samples: int = 1) -> Graph:
    """A product, its sum over ranks, an addition, and a gather."""
    rows = ROWS * samples
    size, one = 2 * rows * WIDTH, tensor_text(rows)
    whole, matrix = tensor_text(num_ranks * rows), f"bfloat16[{WIDTH},{WIDTH}]"
    ops = [
        Op("x", "input"),
        shaped("mm", f"aten.mm {one} {matrix} > {one}", 2 * size + 2 * WIDTH**2, 2 * rows * WIDTH**2),
        shaped("sum", f"collective.all_reduce {one} {num_ranks} > {one}", size),
        shaped("add", f"aten.add {one} {one} > {one}", 3 * size, rows * WIDTH),
        shaped("gather", f"collective.all_gather {one} {num_ranks} 0 > {whole}", num_ranks * size),
    ]
    tensors = [Tensor(0, (1, 3), size), Tensor(1, (2,), size), Tensor(2, (3,), size), Tensor(3, (4,), size)]
    return Graph.build("program", ops, [*tensors, Tensor(4, (), num_ranks * size)])


def test_times_over_plain_links_by_hand() -> None:
    """Without figures of the link, exchanges take the hops of a ring: 4 ranks, 1 byte per ns, 100 ns a hop."""
    routes = {(a, b): Route(100, 10**9, (f"d{a}->d{b}",)) for a in range(4) for b in range(4) if a != b}
    ops = [Op(kind, f"collective.{kind}", bytes_accessed=4000) for kind in KINDS]
    times = op_times(Graph.build("ops", ops, []), make_cluster(4, routes).grouped(4))
    by_hand = {
        "all_reduce": 6 * (1000 + 100),
        "all_gather": 3 * (1000 + 100),
        "reduce_scatter": 3 * (1000 + 100),
        "broadcast": 3 * 100 + 4000,  # in pieces from card to card
        "all_to_all": 100 + 3 * 1000,
        "send": 100 + 4000,
    }
    assert times[:, 0].tolist() == [by_hand[kind] for kind in KINDS]


def test_groups_of_as_many_cards_alone_run_a_collective() -> None:
    """The time is NCCL's between the ranks that its shapes tell; cards, CPUs and other groups cannot run it."""
    graph, cluster = program(), Cluster.parse("8xa100-sxm-80g+cpu-16core")
    times = op_times(graph, cluster.grouped(4))
    link = EXCHANGES["nvlink3"]
    cards = AlikeCards(4, link, link.rate(8))
    assert times[2, 0] == times[2, 1] == cards.time_ns("all_reduce", 2 * ROWS * WIDTH)
    assert times[4, 0] == cards.time_ns("all_gather", 8 * ROWS * WIDTH)
    assert times[[2, 4], 2].tolist() == [-1, -1]
    assert (op_times(graph, cluster)[[2, 4]] == -1).all()
    assert (op_times(graph, cluster.grouped(2))[[2, 4]] == -1).all()
    assert count_time_sources(graph, cluster)["gpu0"]["cannot_run"] == 2
    with pytest.raises(InputError, match=r"op 2 'sum': .* it takes a group of 4 equal cards$"):
        Problem.build(graph, cluster)


def test_groups_of_a_slow_host_exchange_at_once() -> None:
    """Where the host bounds all cards together, two groups of two leave each other what four cards have."""
    cluster = Cluster.parse("4xl40s-48g:pcie4-host")
    link = EXCHANGES["pcie4-host"]
    expected = AlikeCards(2, link, link.rate(4)).time_ns("all_reduce", 2 * ROWS * WIDTH)
    assert op_times(program(2), cluster.grouped(2))[2, 0] == expected
    alone = AlikeCards(2, link, link.rate(2)).time_ns("all_reduce", 2 * ROWS * WIDTH)
    assert op_times(program(2), Cluster.parse("2xl40s-48g:pcie4-host").grouped(2))[2, 0] == alone < expected


def test_without_shapes_an_exchange_has_the_bytes_that_it_accesses() -> None:
    """It runs on groups of any size."""
    graph = Graph.build("plain", [Op("sum", "collective.all_reduce", bytes_accessed=10**8)], [])
    for num_ranks in (2, 4):
        group = Cluster.parse("4xa100-sxm-80g").grouped(num_ranks)
        assert op_times(graph, group)[0, 0] == AlikeCards.of_group(group.devices[0]).time_ns("all_reduce", 10**8)


@pytest.mark.parametrize(
    ("kind", "shapes", "message"),
    [
        ("all_redux", "", "'all_redux' is no kind of collective; did you mean all_reduce"),
        ("send", "collective.send float32[4] > float32[4]", "has None ranks"),
        ("send", "collective.send float32[4] 1 > float32[4]", "has 1 ranks; a number of 2 or more is expected"),
    ],
)
def test_what_is_no_exchange_is_refused(kind: str, shapes: str, message: str) -> None:
    """The op and what is expected are named."""
    graph = Graph.build("wrong", [Op("it", f"collective.{kind}", bytes_accessed=8, shapes=shapes)], [])
    with pytest.raises(InputError, match=f"op 0 'it': {message}"):
        op_times(graph, Cluster.parse("2xl4-24g").grouped(2))


def test_measured_times_do_not_make_a_card_a_group() -> None:
    """A time on a kind of device counts on groups of it, and not on the devices themselves."""
    one = program()
    table = {"a100-sxm-80g": 5}
    graph = replace(one, times_ns=tuple(table if kind.startswith("collective") else {} for kind in one.kinds))
    cluster = Cluster.parse("4xa100-sxm-80g")
    assert op_times(graph, cluster.grouped(4))[2, 0] == 5
    assert op_times(graph, cluster)[2, 0] == -1


def test_hosts_start_exchanges_and_compilers_fuse_nothing_over_it() -> None:
    """A collective takes an eager host as long as some kernels, one in a compiled step, none in a CUDA graph; what
    surrounds it stays apart."""
    graph, cluster = program(), Cluster.parse("4xa100-sxm-80g")
    for runtime, kernels in (("eager", EXCHANGE_KERNELS), ("compile", 1), ("cuda-graphs", 0)):
        group = cluster.run_by(runtime).grouped(4)
        issue_ns = group.devices[0].issue_ns
        assert host_times(graph, group, op_times(graph, group))[2, 0] == kernels * issue_ns
    regions = fused(graph)
    assert not regions.is_fused[[2, 4]].any()
    assert op_times(graph, cluster.run_by("compile").grouped(4))[2, 0] == op_times(graph, cluster.grouped(4))[2, 0]


def test_costs_have_a_class_of_collectives() -> None:
    """Large exchanges are bound by the link, small ones by the time of their steps."""
    group = Cluster.parse("4xa100-sxm-80g").grouped(4)
    small = Graph.build("small", [shaped("s", "collective.send uint8[64] 4 > uint8[64]", 64)], [])
    for graph, ops, limit in ((program(), [2, 4], "link"), (small, [0], "latency")):
        found = Breakdown(graph, group.devices[0])
        row = next(row for row in found.by_class() if row.name == "collective")
        assert (row.count, row.time_ns) == (len(ops), op_times(graph, group)[ops, 0].sum())
        assert row.limit == limit


def test_replicas_on_groups_exchange_card_by_card() -> None:
    """Corresponding cards of two groups exchange, all at once: over NVLink as any two do, over a shared host slower."""
    fast, slow = (Cluster.parse(text) for text in ("8xa100-sxm-80g", "4xl40s-48g:pcie4-host"))
    pair = exchange_times(fast, [[0], [1]])
    groups = exchange_times(fast.grouped(4), [[0], [1]])
    assert pair is not None
    assert groups == pair
    link = EXCHANGES["pcie4-host"]
    found = exchange_times(slow.grouped(2), [[0], [1]])
    assert found is not None
    assert found[1].time_ns("all_reduce", 10**8) == AlikeCards(2, link, link.rate(4)).time_ns("all_reduce", 10**8)
    # one group on each host: each rank's ring has a network card, or half of one
    for cards, rate in ((8, 1.0), (4, 0.5)):
        hosts = Cluster.parse(f"2x(8xa100-sxm-80g)@{cards}x100gbit").grouped(8)
        found = exchange_times(hosts, [[0], [1]])
        assert found is not None
        network = AlikeCards(2, None, num_hosts=2, network_rate=12.5e9 * 0.92 * rate)
        assert found[1].time_ns("all_reduce", 10**8) == network.time_ns("all_reduce", 10**8)


def test_bounds_hold_on_groups() -> None:
    """No step beats the bounds, with ops that a CPU cannot run among them."""
    cluster = Cluster.parse("8xa100-sxm-80g+cpu-16core").grouped(4)
    problem = Problem.build(program(), cluster)
    step_ns = simulate(problem, np.zeros(5, np.int64)).step_time_ns
    assert 0 < lower_bound(problem) <= step_ns
    parts = {1: program(samples=2), 2: program()}
    bound = layout_bound(parts, cluster)
    both = [simulate(Problem.build(parts[1], cluster), np.zeros(5, np.int64)).step_time_ns, 2 * step_ns]
    assert 0 < bound <= min(min(both) // 2 + 1, step_ns)
