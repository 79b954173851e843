"""Recomputation: activations of a block are made twice, held once, and are the same; the hand case has its arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.parallel.blocks import Blocks
from gdp.parallel.layout import Layout
from gdp.parallel.recompute import Recomputation, recomputed
from gdp.parallel.step import Step
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate


def cluster(count: int = 1) -> Cluster:
    """Returns devices with 1e12 flop/s and links of 1 GB/s without latency."""
    figures = {"memory": "1TB", "flops": {"float32": 1e12}, "memory_bandwidth": "1TB/s", "launch": 0}
    links = [{"from": "*", "to": "*", "bandwidth": "1GB/s", "latency": 0}] if count > 1 else []
    devices = [{"name": f"d{number}", "kind": "x", **figures} for number in range(count)]
    return Cluster.from_document(
        {"format": "gdp-cluster", "version": 1, "name": "test", "devices": devices, "links": links}
    )


def blocks_of_two(count: int) -> Graph:
    """A chain of blocks with two ops each: f makes 100 bytes, g makes 10; both backward ops read the 100 bytes.

    w0 --> f0 --100--> g0 --10--> f1 --100--> g1 --10--> loss --> g1' --> f1' --> g0' --> f0'; every f' has an update.
    """
    ops, tensors, last = [Op("x", "input", phase="forward")], [], 0
    reads: dict[int, list[int]] = {}

    def add(op: Op, *inputs: int) -> int:
        ops.append(op)
        for maker in inputs:
            reads[maker].append(len(ops) - 1)
        return len(ops) - 1

    sizes = {0: 10}
    reads[0] = []
    weights = []
    for index in range(count):
        weights.append(add(Op(f"w{index}", "parameter", phase="forward", resident_bytes=0, group=index)))
        reads[weights[-1]], sizes[weights[-1]] = [], 0
    made = []
    for index in range(count):
        module = f"blocks.{index}"
        f = add(Op(f"f{index}", "mm", 2000, phase="forward", module=module), last, weights[index])
        reads[f], sizes[f] = [], 100
        g = add(Op(f"g{index}", "mm", 1000, phase="forward", module=module), f)
        reads[g], sizes[g] = [], 10
        made.append((last, f))
        last = g
    last = add(Op("loss", "sum", 1000, phase="backward"), last)
    reads[last], sizes[last] = [], 10
    for index in reversed(range(count)):
        module, (source, f) = f"blocks.{index}", made[index]
        g = add(Op(f"g{index}'", "mm", 2000, phase="backward", module=module), last, f)
        reads[g], sizes[g] = [], 10
        last = add(Op(f"f{index}'", "mm", 4000, phase="backward", module=module), g, f, source)
        reads[last], sizes[last] = [], 10
        add(Op(f"w{index}.update", "sgd", phase="update", group=index), last, weights[index])
    for maker, size in sizes.items():
        is_weight = maker in weights
        tensors.append(Tensor(maker, tuple(sorted(reads[maker])), size, resident=is_weight))
    return Graph.build("blocks", ops, tensors)


def step(graph: Graph) -> Simulation:
    return simulate(Problem.build(graph, cluster()), np.zeros(graph.num_ops, np.int64))


def test_a_chain_of_blocks_takes_the_time_of_its_copies_and_holds_one_block() -> None:
    """Three blocks hold 300 bytes of activations, recomputed 100 at a time."""
    # forward 3 x (2 + 1) ns, loss 1 ns, backward 3 x (2 + 4) ns                              = 28 ns
    # peak without: x, f0, g0, f1, g1, f2 and g2 while loss makes its gradient:
    #   3 x 100 + 4 x 10 (x, g0, g1, g2) + 10 = 350 bytes
    # recomputed: f! of each block, 3 x 2 ns; g! is read by nobody
    # peak with: x, g0, g1 are kept. g2' runs with f2!, the gradient of the loss and its own:
    #   3 x 10 + 100 + 2 x 10 = 150 bytes; forward holds no more: x, g0, g1, f2, g2 are 140
    graph = blocks_of_two(3)
    whole = step(graph)
    assert (whole.step_time_ns, whole.peak_memory_bytes[0]) == (28, 350)
    again = recomputed(graph, "blocks")
    assert [name for name in again.op_names if name.endswith("!")] == ["f2!", "f1!", "f0!"]
    less = step(again)
    assert (less.step_time_ns, less.peak_memory_bytes[0]) == (28 + 3 * 2, 150)
    start = dict(zip(again.op_names, less.op_start_ns.tolist(), strict=True))
    finish = dict(zip(again.op_names, less.op_finish_ns.tolist(), strict=True))
    assert [start["f2!"], start["f1!"], start["f0!"]] == [finish["loss"], finish["f2'"], finish["f1'"]]


def test_a_module_by_path_is_recomputed_alone() -> None:
    graph = blocks_of_two(3)
    again = recomputed(graph, ["blocks.1"])
    assert [name for name in again.op_names if name.endswith("!")] == ["f1!"]
    copy, source = again.ops["f1!"], again.ops["f1"]
    assert (copy.kind, copy.flops, copy.module, copy.phase) == (source.kind, source.flops, source.module, "backward")
    assert copy.group == source.group >= 0
    assert step(again).peak_memory_bytes[0] == 250  # f1 less
    # f1! must read w1 before it is overwritten: only f1', which reads f1!, is between the two
    assert again.op_names.index("f1!") < again.op_names.index("g1'")


@pytest.mark.parametrize("modules", ["none", ()])
def test_nothing_recomputed_is_the_same_graph(modules: str | tuple[str, ...]) -> None:
    graph = blocks_of_two(2)
    assert recomputed(graph, modules) is graph


@pytest.mark.parametrize(
    ("modules", "problem"),
    [(["block.1"], "no module 'block.1'; did you mean blocks.1"), (["blocks.1", "x"], "no module 'x'")],
)
def test_a_module_that_is_not_there_is_refused_with_near_names(modules: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        recomputed(blocks_of_two(3), modules)


def test_blocks_of_a_model_without_layers_are_refused() -> None:
    graph = Graph.build("flat", [Op("a", "mm", phase="forward", module="a")], [])
    with pytest.raises(InputError, match="no list of layers; name modules"):
        recomputed(graph, "blocks")


def test_copies_are_in_every_microbatch_of_every_replica() -> None:
    """Unequal replicas recompute as often as they have micro-batches, on the devices of what they copy."""
    graph = blocks_of_two(3)
    cut = Step.of(graph, Layout((2, 1), recompute="blocks"))
    copies = [name for name in cut.graph.op_names if "!" in name]
    assert sorted(copies) == sorted(f"f{block}!{part}" for block in range(3) for part in ("", "@1", "#1"))
    by_name = dict(zip(cut.graph.op_names, cut.placement(np.arange(graph.num_ops) % 2, [[0, 1], [2, 3]]), strict=True))
    for name in copies:
        assert by_name[name] == by_name[name.replace("!", "")]
    simulation = simulate(Problem.build(cut.graph, cluster(2)), cut.placement(np.zeros(graph.num_ops, int), [[0], [1]]))
    assert simulation.feasible
    without = Step.of(graph, Layout((2, 1))).graph
    assert cut.graph.flops.sum() == without.flops.sum() + 3 * 3 * 2000
    peaks = simulate(Problem.build(without, cluster(2)), Step.of(graph, Layout((2, 1))).replica).peak_memory_bytes
    assert (simulation.peak_memory_bytes < peaks).all()


@st.composite
def training_steps(draw: st.DrawFn, *, reads_all: bool = False) -> Graph:
    """Draws steps of 1 to 4 blocks; backward ops read all, or some, of what their forward ops read and made."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    modules = [f"blocks.{block}" for block, count in enumerate([*counts, 1]) for _ in range(count)]
    modules[-1] = "head"
    num_forward = len(modules)
    ops = [Op("input", "input", phase="forward")]
    ops += [Op(f"f{i}", "op", int(rng.integers(9)), phase="forward", module=m) for i, m in enumerate(modules)]
    read: list[set[int]] = []  # tensors that each op reads; op i makes tensors 2 i and 2 i + 1, a view of it
    for op in range(1, num_forward):
        earlier = rng.integers(max(0, op - 3), op, size=rng.integers(1, 3))
        read.append({2 * int(maker) + int(rng.random() < 0.2) for maker in earlier})
    used = {tensor // 2 for tensors in read for tensor in tensors}
    read.append({2 * op for op in range(1, num_forward) if op not in used} or {2 * (num_forward - 1)})
    read.insert(0, set())
    for op in range(num_forward, 0, -1):
        readers = [other for other in range(1, num_forward + 1) if any(tensor // 2 == op for tensor in read[other])]
        gradients = {2 * (2 * num_forward + 1 - reader) for reader in readers}
        saved = read[op] | {2 * op}
        if not reads_all:
            saved = {tensor for tensor in saved if rng.random() < 0.5}
        ops.append(Op(f"f{op - 1}'", "op", int(rng.integers(9)), phase="backward", module=modules[op - 1]))
        read.append(gradients | saved)
    tensors = []
    for tensor in range(2 * len(ops)):
        consumers = tuple(op for op, inputs in enumerate(read) if tensor in inputs)
        tensors.append(
            Tensor(tensor // 2, consumers, int(rng.integers(1, 9)), view_of=tensor - 1 if tensor % 2 else -1)
        )
    return Graph.build("random", ops, tensors)


def inputs_of(graph: Graph) -> list[set[int]]:
    """Returns by op the tensors that it reads."""
    inputs: list[set[int]] = [set() for _ in range(graph.num_ops)]
    for tensor, op in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        inputs[op].add(tensor)
    return inputs


@settings(max_examples=150, deadline=None)
@given(training_steps())
def test_every_op_reads_what_it_read_before_or_a_copy_of_it(graph: Graph) -> None:
    """Copies come on top: other ops, their flops and results stay, and copies wait for a gradient."""
    paths = list(dict.fromkeys(module for module in graph.modules if module.startswith("blocks")))
    blocks = Blocks.of(graph, paths)
    step = Recomputation.of(blocks)
    again, before, after = step.graph, inputs_of(graph), inputs_of(step.graph)
    is_copy = np.array([name.endswith("!") for name in again.op_names])
    assert [name for name, copy in zip(again.op_names, is_copy, strict=True) if not copy] == list(graph.op_names)
    assert again.flops[~is_copy].tolist() == graph.flops.tolist()
    for op, origin in enumerate(step.op_origin.tolist()):
        assert again.op_names[op].removesuffix("!") == graph.op_names[origin]
        assert {int(step.tensor_origin[tensor]) for tensor in after[op]} - {-1} == before[origin]
    # no backward op of a block reads an activation of it that is held since the forward pass
    makers = again.producers[again.edge_tensors]
    module = np.array(again.modules)
    inside = module[makers] == module[again.consumers]
    is_old = np.array([phase == "forward" for phase in again.phases])[makers]
    is_late = (np.array(again.phases) == "backward")[again.consumers] & ~is_copy[again.consumers]
    assert not (inside & is_old & is_late & np.char.startswith(module[makers], "blocks")).any()
    simulation = simulate(Problem.build(again, cluster()), np.zeros(again.num_ops, int))
    if is_copy.any():
        gradient = [op for op, phase in enumerate(again.phases) if phase == "backward" and not is_copy[op]][0]
        assert simulation.op_start_ns[is_copy].min() >= simulation.op_finish_ns[gradient]


@settings(max_examples=150, deadline=None)
@given(training_steps(reads_all=True))
def test_memory_is_not_above_that_without_where_the_backward_pass_reads_all(graph: Graph) -> None:
    """Each copy stands for a tensor that would be held: in the order of ops the peak cannot rise."""
    paths = list(dict.fromkeys(module for module in graph.modules if module.startswith("blocks")))
    again = recomputed(graph, paths)
    peaks = [
        simulate(Problem.build(g, cluster()), np.zeros(g.num_ops, int), order=[np.arange(g.num_ops)]).peak_memory_bytes[
            0
        ]
        for g in (graph, again)
    ]
    assert peaks[1] <= peaks[0]
