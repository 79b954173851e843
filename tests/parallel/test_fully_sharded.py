"""ZeRO 3: chunks are all that replicas hold, and parameters are there when a block runs."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.graph import Graph, Tensor
from gdp.graph.microbatches import microbatch_of
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from tests.parallel.test_replicas import chain
from tests.parallel.test_zero import hop_bytes, run


def with_modules(graph: Graph, modules: dict[str, str]) -> Graph:
    """Returns `graph` with the module of each op that belongs to a parameter."""
    ops = [replace(op, module=modules["w" + op.name.partition(".")[0][1:]]) for op in graph.ops]
    return Graph.build(graph.name, ops, [graph.tensor(tensor) for tensor in range(graph.num_tensors)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=5), st.integers(2, 5), st.integers(1, 3), st.integers(1, 3))
def test_everything_is_there_once_in_all(sizes: list[int], count: int, microbatches: int, num_places: int) -> None:
    """Replicas hold an R-th each of parameters and state; gathers and sums move as often as a ring moves them."""
    graph, num = chain(sizes), len(sizes)
    layers = np.array([*range(num), *range(num), *reversed(range(num)), *range(num)])
    places = layers * num_places // num
    layout = Layout((microbatches,) * count, 3)
    step = Step.of(graph, layout, places=places)
    whole = step.graph
    for phase in ("forward", "backward"):
        is_pass = [kind == "mm" and own == phase for kind, own in zip(whole.kinds, whole.phases, strict=True)]
        assert whole.flops[is_pass].sum() == layout.num_parts * sum(graph.flops[np.array(graph.phases) == phase])
    held = whole.resident_bytes[whole.replicas == 0].sum()
    assert 2 * sum(sizes) <= count * held < 2 * sum(sizes) + 2 * count * num
    least = microbatches * (count - 1) * sum(sizes)  # a gather is needed for both passes
    slack = microbatches * (count - 1) * count * num
    assert least <= hop_bytes(whole, "reduce_scatter.") < least + slack
    assert 2 * least <= hop_bytes(whole, "all_gather.") < 2 * (least + slack)
    assert whole.replicas.max() == count - 1
    assert microbatch_of(whole).max() == (microbatches - 1 if microbatches > 1 else -1)
    devices = np.arange(count * num_places).reshape(count, num_places)
    placement = step.placement(places, devices)
    crosses = (placement[whole.producers[whole.edge_tensors]] % num_places) != placement[whole.consumers] % num_places
    assert not (whole.is_resident[whole.edge_tensors] & crosses).any()  # hops are between equal places


def test_a_chain_by_hand() -> None:
    """Three layers on two devices: gathers follow each other, and two blocks are there at most."""
    # 2,000 bytes each, chunks of 1,000: a hop takes 11,000 ns (1,000 of them on the link). Exchanges go first.
    #   gathers end    w0 11,000, w1 22,000, w2 33,000; for backward w2 44,000, w1 55,000, w0 66,000
    #   a gather waits for the one before, and for the block before the one in use: never longer, here
    #   backward       w2 44,000 to 46,000, w1 55,000 to 57,000, w0 66,000 to 68,000
    #   then the sum of w0: a hop, an addition of 3,000 bytes (3 ns) and the update (1 ns)
    #   copies at 1 TB/s: 1,000 bytes into what is sent (2 ns) and 2,000 out of what came (4 ns) for each of 6 gathers
    #   in a row, 1,000 bytes of the sum (2 ns); and the addition of w1's, 3 ns, comes before the sum of w0 begins
    # Memory is largest from 55,000 to 57,000, when b1 runs:
    #   half of 3 x 4,000 held                                             6,000
    #   gathered w1, w0 and the hop of w0                                  5,000
    #   gradients of w2 (its sum is under way) and w1, the hop of w2       5,000
    #   what b1 reads and writes                                           2,000
    simulation = run(Step.of(chain([2000] * 3), Layout((1, 1), 3)), exchanges_first=True)
    assert simulation.step_time_ns == 68_000 + 11_000 + 3 + 1 + 6 * (2 + 4) + 2 + 3
    assert simulation.peak_memory_bytes.tolist() == [18_000] * 2


def test_what_is_gathered_together() -> None:
    """Two layers of two parameters each, and one outside of them that the last block uses again."""
    modules = {"w0": "embed", "w1": "h.0.a", "w2": "h.0.b", "w3": "h.1.a", "w4": "h.1.b"}
    graph = with_modules(chain([10, 20, 30, 40, 50]), modules)
    number = graph.op_numbers
    tensors = [graph.tensor(tensor) for tensor in range(graph.num_tensors)]
    tensors[0] = Tensor(0, tuple(sorted({*tensors[0].consumers, number["f4"], number["b4"]})), 10, resident=True)
    graph = Graph.build("tied", list(graph.ops), tensors)
    whole = Step.of(graph, Layout((1, 1), 3)).graph
    gathered: dict[str, dict[int, list[str]]] = {}
    for tensor in np.flatnonzero(whole.tensor_bytes).tolist():
        name = whole.op_names[whole.producers[tensor]]
        if name.startswith("all_gather.") and name.endswith(".ready") and not whole.is_resident[tensor]:
            users = [whole.op_names[op] for op in whole.consumers_of(tensor).tolist()]
            gathered.setdefault(name.split(".")[1], {})[int(whole.tensor_bytes[tensor])] = users
    assert list(gathered.values()) == [
        {10: ["f0"]},
        {20: ["f1"], 30: ["f2"]},
        {40: ["f3"], 50: ["f4"]},
        {10: ["f4"]},
        {10: ["b4"]},
        {40: ["b3"], 50: ["b4"]},
        {20: ["b1"], 30: ["b2"]},
        {10: ["b0"]},
    ]
    assert whole.kinds.count("reduce_scatter.done") == 2 * 3
