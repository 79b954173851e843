"""Exchanges at once: as long as the ring's hops, with as much memory as the textbook, in transfers by replica."""

from dataclasses import replace

import numpy as np
import pytest

import reference_simulator as reference
from gdp.cluster import Cluster
from gdp.cluster.catalogue import ExchangeFigures
from gdp.costs.collectives import KINDS, AlikeCards, ExchangeTimes
from gdp.graph import Graph
from gdp.parallel.layout import Layout
from gdp.parallel.rings import rings_over
from gdp.parallel.step import Step
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate
from parallel.test_replicas import chain

LATENCY_NS, RATE = 3_000, 10**10


def cards(count: int, memory: str = "1GB") -> Cluster:
    """Equal cards with a link each to each, which take no time to launch or to add."""
    figures = {"memory": memory, "flops": {"float32": 1e18}, "memory_bandwidth": "100000TB/s", "launch": 0}
    links = [{"from": "*", "to": "*", "bandwidth": RATE, "latency": LATENCY_NS}]
    devices = [{"name": f"d{number}", "kind": "x", **figures} for number in range(count)]
    return Cluster.from_document(
        {"format": "gdp-cluster", "version": 1, "name": "x", "devices": devices, "links": links}
    )


def textbook(count: int) -> ExchangeTimes:
    """Exchanges that take what the hops of a ring do: nothing to begin, a latency a step, the rate of the link."""
    link = ExchangeFigures({2: RATE}, 1.0, float("inf"), {"simple": (0, LATENCY_NS, 1.0)}, None, {})
    lines = {kind: AlikeCards(count, link, RATE).lines(kind) for kind in KINDS[:3]}
    return ExchangeTimes(lines, tuple(((place - 1) % count, LATENCY_NS, RATE) for place in range(count)))


def simulated(graph: Graph, layout: Layout, times: ExchangeTimes | None) -> Simulation:
    """The step with replica r on device r."""
    step = Step.of(graph, layout, times=times)
    return simulate(Problem.build(step.graph, cards(layout.data)), step.replica)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_hops_and_one_transfer_take_the_same(count: int, zero: int) -> None:
    """For alike cards a bucket alone takes as long at once as hop by hop, within 1 %."""
    layout, graph = Layout((1,) * count, zero), chain([24 * 10**5])
    hops, at_once = (simulated(graph, layout, times).step_time_ns for times in (None, textbook(count)))
    assert at_once == pytest.approx(hops, rel=0.01)


def test_the_reference_runs_it() -> None:
    """The reference simulator, which knows nothing of exchanges, finds the same times and peaks."""
    step = Step.of(chain([3_000, 5_000_000]), Layout((1,) * 4, 3), times=textbook(4))
    problem = Problem.build(step.graph, cards(4))
    simulation = simulate(problem, step.replica)
    expected = reference.run(step.graph, problem.cluster, problem.op_time_ns, step.replica)
    assert simulation.step_time_ns == expected.step_time_ns
    assert simulation.peak_memory_bytes.tolist() == expected.peak_memory_bytes


def test_transfers_grow_with_replicas_not_their_square() -> None:
    """A bucket has one transfer and two ops a replica, whose bytes fill the time of the exchange."""
    count, times = 8, textbook(8)
    step = Step.of(chain([10**6]), Layout((1,) * count), times=times)
    ops = np.flatnonzero(step.graph.is_collective)
    sent = np.isin(step.graph.producers, ops) & (step.graph.tensor_bytes > 0)
    assert (len(ops), sent.sum()) == (2 * count, count)
    # 2 x 7 / 8 of the bucket and, at 10 bytes a ns, the latency of 14 hops but for that of the transfer itself
    assert step.graph.tensor_bytes[sent].tolist() == [1_750_000 + 13 * LATENCY_NS * 10] * count


def test_gathered_parameters_take_their_memory_once() -> None:
    """With zero=3 the parameters of a block are in memory once from the start of their gather, as they are in hops."""
    # 4 replicas: a quarter of parameters and gradients, 4 MB each, is 2 MB; in backward 4 MB are gathered, there are
    # 4 MB of gradients and an activation of 1,000 bytes. When the gradients are summed, the gathered 4 MB are gone, and
    # up to 3 MB on their way are less.
    layout, graph = Layout((1,) * 4, 3), chain([4_000_000])
    hops, at_once = (simulated(graph, layout, times).peak_memory_bytes.max() for times in (None, textbook(4)))
    # a nanosecond of copying later, there is a chunk of 1 MB more in hops, or one on its way at once
    assert (at_once, hops) == pytest.approx((10_001_000, 10_001_000), abs=1_000_000)
    gathering = Step.of(graph, layout, times=textbook(4)).graph
    first, last = (gathering.op_numbers[f"all_gather.0.{end}"] for end in ("ready", "done"))
    made = [gathering.tensor_bytes[gathering.producers == op].tolist() for op in (first, last)]
    # 3 MB and, at 10 bytes a ns, the latency of 2 more hops go on; the rest of 4 MB is held; then the block has them
    assert sorted(filter(None, made[0])) == [1_000_000 - 60_000, 3_060_000]
    assert sum(made[1]) == 4_000_000


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_large_exchanges_arrive_in_pieces(zero: int) -> None:
    """Of 1 GB that is exchanged at once, two pieces are in memory at most beside what the hops of a ring hold, even
    where the route is faster than the exchange; it takes as long."""
    graph, layout, count = chain([10**9]), Layout((1,) * 4, zero), 4
    hops = simulated(graph, layout, None)
    faster = replace(textbook(count), legs=tuple((sender, ns, 3 * rate) for sender, ns, rate in textbook(count).legs))
    for times in (textbook(count), faster):
        step = Step.of(graph, layout, times=times)
        links = [{"from": "*", "to": "*", "bandwidth": times.legs[0][2], "latency": LATENCY_NS}]
        cluster = Cluster.from_document(cards(count).to_document() | {"links": links})
        at_once = simulate(Problem.build(step.graph, cluster), step.replica)
        assert at_once.step_time_ns == pytest.approx(hops.step_time_ns, rel=0.01)
        assert at_once.peak_memory_bytes.max() <= hops.peak_memory_bytes.max() + 2 * 2**28


def test_many_replicas_gather_small_blocks() -> None:
    """Among more replicas than rings are ordered for, the steps of a small gather take longer than its bytes."""
    count, graph = 70, chain([7_000])
    step = Step.of(graph, Layout((1,) * count, 3), times=textbook(count))
    assert textbook(count).received_bytes("all_gather", 7_000).min() > 7_000
    assert (step.graph.tensor_bytes >= 0).all()
    assert simulated(graph, Layout((1,) * count, 3), textbook(count)).step_time_ns > 0


def test_the_first_bucket_is_small() -> None:
    """As PyTorch's DDP does, the first bucket closes at 1 MB, so that its sum begins soon; with ZeRO none does."""
    graph = chain([2**20] * 4)
    for layout, expected in ((Layout((1, 1)), 2), (Layout((1, 1), 1), 1)):
        kinds = Step.of(graph, layout, times=textbook(2)).graph.kinds
        assert sum(kind.endswith(".ready") and "gather" not in kind for kind in kinds) == 2 * expected


def test_steps_come_back_from_their_documents() -> None:
    """A plan file has the times, so its step is the same whatever links have become since; unequal replicas hop."""
    cluster = Cluster.parse("2x(2xa100-sxm-80g)@100gbit:eager")
    graph, layout = chain([1000, 2000]), Layout((1,) * 4, 2)
    step = Step.of(graph, layout, **rings_over(cluster, [[0], [2], [1], [3]], layout))
    assert step.ring == (0, 2, 1, 3)
    assert Step.of_document(lambda _parts: graph, step.document()).graph.fingerprint == step.graph.fingerprint
    unequal = replace(layout, microbatches=(2, 1, 1, 1), zero=0)
    assert set(rings_over(cluster, [[0], [2], [1], [3]], unequal)) == {"ring", "hosts"}
    assert Step.of(graph, unequal, times=step.times).times is None
