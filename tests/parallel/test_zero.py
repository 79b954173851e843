"""ZeRO: what is cut over replicas is there once in all, and is moved as often as arithmetic says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import accumulated
from gdp.graph.microbatches import microbatch_of
from gdp.parallel.layout import Layout
from gdp.parallel.replicas import replicated
from gdp.parallel.rings import Rings
from gdp.parallel.step import Step
from gdp.simulator.orders import EXCHANGES_FIRST
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate
from tests.parallel.test_replicas import chain


def hop_bytes(graph: Graph, exchange: str) -> int:
    """Returns the bytes of all hops of an exchange."""
    is_hop = graph.is_resident & np.array([kind.startswith(exchange) for kind in graph.kinds])[graph.producers]
    return int(graph.tensor_bytes[is_hop].sum())


def run(step: Step, *, exchanges_first: bool = False) -> Simulation:
    """Simulates replicas on a device each: 1e12 flop/s, 1 TB/s of memory, links of 1 GB/s with 10 us of latency."""
    figures = {"memory": "1GB", "flops": {"float32": 1e12}, "memory_bandwidth": "1TB/s", "launch": 0}
    links = [{"from": "*", "to": "*", "bandwidth": "1GB/s", "latency": "10us"}]
    devices = [{"name": f"d{number}", "kind": "x", **figures} for number in range(step.layout.data)]
    document = {"format": "gdp-cluster", "version": 1, "name": "equal", "devices": devices, "links": links}
    problem = Problem.build(step.graph, Cluster.from_document(document))
    return simulate(problem.in_order(EXCHANGES_FIRST) if exchanges_first else problem, step.replica)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    st.lists(st.integers(1, 3), min_size=2, max_size=6),
    st.integers(1, 3000),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_state_is_there_once_in_all(
    sizes: list[int], microbatches: list[int], bucket_bytes: int, zero: int, over_hosts: bool
) -> None:
    """Parameters are there once per replica, optimizer state and the work of updates once in all; sums and parameters
    move as often as a ring moves them.
    """
    graph, count = chain(sizes), len(microbatches)
    hosts = [replica % 2 for replica in range(count)] if over_hosts and count % 2 == 0 else None
    layout = Layout(tuple(microbatches), zero)
    whole = Step.of(graph, layout, hosts=hosts, bucket_bytes=bucket_bytes).graph
    for phase in ("forward", "backward"):
        is_pass = [kind == "mm" and own == phase for kind, own in zip(whole.kinds, whole.phases, strict=True)]
        assert whole.flops[is_pass].sum() == layout.num_parts * sum(graph.flops[np.array(graph.phases) == phase])
    state = whole.resident_bytes.sum() - count * sum(sizes)
    assert sum(sizes) <= state < sum(sizes) + count * len(sizes)
    is_update = np.array([kind == "sgd" for kind in whole.kinds])
    assert len(sizes) <= whole.bytes_accessed[is_update].sum() <= len(sizes) * count
    least, num_buckets = (count - 1) * sum(sizes), whole.kinds.count("reduce_scatter.done") // count
    for exchange in ("reduce_scatter.", "all_gather."):
        assert least <= hop_bytes(whole, exchange) < least + 2 * count**2 * num_buckets
    assert whole.replicas.max() == count - 1
    assert microbatch_of(whole).max() == (max(microbatches) - 1 if max(microbatches) > 1 else -1)


def test_zero_1_and_2_by_hand() -> None:
    """One parameter on three devices: the time is that of a ring, and each device holds a third of the state."""
    # 3,000 bytes and as much optimizer state; links of 1 GB/s with 10 us of latency
    #   forward 1 us and backward 2 us at 1e12 flop/s                       3,000 ns
    #   reduce-scatter: 2 hops of 1,000 bytes       2 x (1,000 + 10,000) = 22,000 ns
    #   2 sums of 3,000 bytes at 1 TB/s                             2 x 3 = 6 ns
    #   update of 1 byte, rounded up                                        1 ns
    #   all-gather: 2 hops of 1,000 bytes                              22,000 ns
    #   what came is copied into the weight: 2 x 2,000 bytes at 1 TB/s      4 ns
    #   zero=2: the chunk of the gradient is copied, 2 x 1,000 bytes        2 ns
    # memory: parameter 3,000, a third of the state 1,000, and at the end of the sum
    #   zero=1: the gradient of 3,000 and the chunk of a hop                1,000
    #   zero=2: as much, as sums are made in the gradient; while the update runs it is a chunk of 1,000 alone
    for zero in (1, 2):
        simulation = run(Step.of(chain([3000]), Layout((1, 1, 1), zero)))
        assert simulation.step_time_ns == 3000 + 22_000 + 6 + 1 + 22_000 + 4 + 2 * (zero == 2)
        assert simulation.peak_memory_bytes.tolist() == [3000 + 1000 + 3000 + 1000] * 3


def test_exchanges_of_zero_copy() -> None:
    """The ends of exchanges read and write what they copy, from pieces into weights and the other way."""
    # 3,000 bytes of parameter on three devices
    #   zero=1, 2: two thirds are of others                                     2 x 2,000
    #   zero=2, 3: the piece of the gradient outlives the rest                  2 x 1,000
    #   zero=3: one's own third is copied to be sent, then all that came        2 x 1,000 and 2 x 3,000
    of_zero = {"all_gather.done": 4000}
    gathered = {"all_gather.ready": 2000, "all_gather.done": 6000, "reduce_scatter.done": 2000}
    for zero, expected in enumerate([{}, of_zero, of_zero | {"reduce_scatter.done": 2000}, gathered]):
        step = Step.of(chain([3000]), Layout((1, 1, 1), zero)).graph
        ends = zip(step.kinds, step.bytes_accessed.tolist(), strict=True)
        copied = {(kind, size) for kind, size in ends if kind.endswith((".ready", ".done")) and size}
        assert copied == {*expected.items()}


def test_zero_2_frees_gradients_when_they_are_sent() -> None:
    """The gradient of a large parameter is not there any more when that of another one is made."""
    # w2 and w0 of 30,000 bytes, w1 of 2 bytes between; two devices, a bucket each, exchanges go before other ops
    #   held: zero=0 2 x 60,002 = 120,004; else 60,002 and half of the state 30,001      90,003
    # Backward of w1 takes 30,000 ns, longer than the hop of w2's chunk (25,000), that of w0 2,000. Then w0's chunk is
    # in flight, and the one of w1 (1 byte), and there are
    #   zero=0: all gradients, and the sum of w2 is in flight     30,000 + 2 + 30,000 + 15,000 + 1 + 15,000
    #   zero=1: all gradients                                     30,000 + 2 + 30,000 + 15,000 + 1
    #   zero=2: the chunk of w2 in place of its gradient          15,000 + 2 + 30,000 + 15,000 + 1
    graph = chain([30_000, 2, 30_000])
    flops = graph.flops.copy()
    flops[graph.op_numbers["b1"]] = 3 * 10**7
    graph = Graph.from_columns(graph.to_columns() | {"flops": flops})
    peaks = []
    for zero in (0, 1, 2):
        step = Step.of(graph, Layout((1, 1), zero), bucket_bytes=1)
        peaks.append(run(step, exchanges_first=True).peak_memory_bytes.tolist())
    assert peaks == [[120_004 + 90_003] * 2, [90_003 + 75_003] * 2, [90_003 + 60_003] * 2]


def test_rings_over_hosts_send_little_between_hosts() -> None:
    """Four replicas on two hosts: between hosts only the chunk of one replica moves, in halves, both ways."""
    # 4,000 bytes, hosts 0 0 1 1. Inside: chunks of 2,000, one hop each way on 4 devices: 16,000 bytes in all.
    # Across: each of 2 chunks of 2,000 in halves of 1,000 on a ring of two: 2 x 2 x (1,000 + 1,000) = 8,000 bytes.
    step = Step.of(chain([4000]), Layout((1,) * 4), hosts=[0, 0, 1, 1])
    graph, host = step.graph, step.replica // 2
    is_hop = graph.is_resident & np.array([kind.startswith("all_reduce") for kind in graph.kinds])[graph.producers]
    hops = is_hop[graph.edge_tensors]
    crosses = host[graph.producers[graph.edge_tensors]] != host[graph.consumers]
    sizes = graph.tensor_bytes[graph.edge_tensors]
    assert (sizes[hops & ~crosses].sum(), sizes[hops & crosses].sum()) == (16_000, 8_000)
    assert hop_bytes(graph, "all_reduce.") == 2 * 3 * 4000
    # time: passes 3,000; inside 2 x (2,000 + 10,000), across 2 x (1,000 + 10,000); sums of 6,000 and 3,000 bytes 6 + 3
    assert run(step).step_time_ns == 3000 + 24_000 + 22_000 + 9 + 1


def test_uneven_hosts_are_refused() -> None:
    """Rings over hosts need as many replicas on each."""
    with pytest.raises(InputError, match="2, 1 replicas"):
        Step.of(chain([4000]), Layout((1,) * 3), hosts=[0, 0, 1])
    with pytest.raises(InputError, match="each once"):
        Rings.of(3, [0, 1, 1])


def test_other_gradients_are_refused() -> None:
    """Replicas of graphs with other gradients do not go together."""
    with pytest.raises(InputError, match="not those of the other"):
        replicated([chain([10, 20]), accumulated(chain([10, 30]), 2)])


def test_replicas_are_made_once() -> None:
    """A graph with replicas is not replicated again."""
    whole = Step.of(chain([10]), Layout((1, 1))).graph
    with pytest.raises(InputError, match="has replicas already"):
        Step.of(whole, Layout((1, 1)))
