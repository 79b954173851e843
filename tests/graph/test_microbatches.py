"""Micro-batches: the graph of M of them is what PyTorch executes, and its parts carry over."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.accumulation import accumulated, one_microbatch
from gdp.graph.excerpts import Excerpt
from gdp.graph.microbatches import count_microbatches, microbatch_of
from gdp.models.pytorch.assemble import assemble
from gdp.models.pytorch.capture_step import _isolated, capture_fn
from gdp.models.pytorch.optimizers import OPTIMIZERS
from gdp.models.pytorch.recorder import Recorder
from gdp.simulator.orders import GPIPE, ONE_F_ONE_B, ZERO_BUBBLE
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from gdp.units.reduction import reduce
from tiny_models import TINY, captured

CLUSTER = Cluster.parse("3xp100-pcie-16g:cuda-graphs")


def recorded(family: str, num_microbatches: int) -> Graph:
    """The graph of PyTorch's own accumulation: forward and backward again and again, then one update."""
    with _isolated():
        mode = FakeTensorMode()
        with mode:
            model, args, kwargs = TINY[family]()
            inputs = [tuple(tensor.clone() for tensor in args) for _ in range(num_microbatches)]
        recorder = Recorder(mode)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            recorder.memories.add_source("parameter", name, parameter)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            recorder.memories.add_source("buffer", name, buffer)
        for number, tensors in enumerate(inputs):
            for place, tensor in enumerate(tensors):
                recorder.memories.add_source("input", f"input.{number}.{place}", tensor)
        recorder.running.watch(model)
        losses = {}
        with mode, recorder, torch.enable_grad():
            for number, tensors in enumerate(inputs):
                recorder.phases.current = "forward"
                loss = model(*tensors, **kwargs)
                recorder.phases.current = "backward"
                loss.backward()
                losses[str(number)] = recorder.memories.ref(loss)
            recorder.phases.current = "update"
            gradients = {
                name: recorder.record_update(name, parameter, OPTIMIZERS["adam"])
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        return assemble(recorder, family, losses, None, gradients)[0]


def work_of(graph: Graph) -> Counter[tuple[str, str, int, int, int]]:
    """How often there is each kind of op, with its phase, work and resident bytes."""
    return Counter(
        (kind, phase, int(flops), int(size), int(resident))
        for kind, phase, flops, size, resident in zip(
            graph.kinds, graph.phases, graph.flops, graph.bytes_accessed, graph.resident_bytes, strict=True
        )
    )


@pytest.mark.parametrize("family", ["rnnlm", "bert", "llama", "inception", "transformer_xl", "t5"])
def test_the_step_is_what_pytorch_executes(family: str) -> None:
    """The ops of three accumulated micro-batches, and the memory of the state, are those that PyTorch records."""
    graph = accumulated(captured(family).graph, 3)
    assert work_of(graph) == work_of(recorded(family, 3))
    assert count_microbatches(graph) == 3


@pytest.mark.parametrize("family", ["rnnlm", "inception", "moe", "bert"])
def test_copies_share_devices(family: str, tmp_path: Path) -> None:
    """An op and its copies are one unit, so that a placement of one batch is one of all. A file keeps the
    micro-batches."""
    family = {"moe": "mixture_of_experts"}.get(family, family)
    one = captured(family).graph
    graph = accumulated(one, 4)
    problem, single = Problem.build(graph, CLUSTER), Problem.build(one, CLUSTER)
    number = {name: op for op, name in enumerate(graph.op_names)}
    unit = problem.graph.group_index
    for name in one.op_names:
        units = {unit[number[copy]] for copy in (name, *(f"{name}@{m}" for m in (1, 2, 3))) if copy in number}
        assert len(units) == 1
    assert unit.max() <= single.graph.group_index.max() + 1
    graph.save(tmp_path / "graph.json.gz")
    assert (microbatch_of(Graph.load(tmp_path / "graph.json.gz")) == problem.microbatch).all()


def test_reduction_keeps_times_and_orders_of_micro_batches() -> None:
    """A plan of the reduced problem expands to one of the same step time, in every order; replicas merge alike."""
    graph = accumulated(captured("bert").graph, 4)
    problem = Problem.build(graph, CLUSTER)
    reduction = reduce(problem)
    assert reduction.problem.num_ops < 0.9 * problem.num_ops
    rng = np.random.default_rng(0)
    devices = rng.integers(0, 3, problem.graph.group_index.max() + 1)[problem.graph.group_index]
    placement = reduction.restrict(devices)
    assert reduction.problem.broken_constraints(placement) == []
    for order in problem.orders:
        reduced = simulate(reduction.problem.in_order(order), placement)
        expanded = simulate(problem, reduction.expand(placement), order=reduction.expand_order(reduced.order))
        assert expanded.step_time_ns == reduced.step_time_ns


@pytest.mark.parametrize("family", ["rnnlm", "inception"])
def test_an_excerpt_is_the_step_of_fewer(family: str) -> None:
    """The first two of five micro-batches are the graph of two; their placements are placements of all."""
    one = captured(family).graph
    five, two = accumulated(one, 5), accumulated(one, 2)
    excerpt = Excerpt.of_microbatches(five, microbatch_of(five), 2)
    assert tuple(five.op_names[op] for op in excerpt.ops) == excerpt.graph.op_names
    assert set(excerpt.graph.op_names) == set(two.op_names)

    def edges(graph: Graph) -> Counter[tuple[str, int, frozenset[str]]]:
        names = graph.op_names
        return Counter(
            (names[graph.producers[t]], int(size), frozenset(names[op] for op in graph.consumers_of(t)))
            for t, size in enumerate(graph.tensor_bytes.tolist())
        )

    found, wanted = edges(excerpt.graph), edges(two)
    assert {edge: count for edge, count in found.items() if edge[1]} == {e: c for e, c in wanted.items() if e[1]}
    problem = Problem.build(five, CLUSTER)
    small = Problem.build(excerpt.graph, CLUSTER)
    devices = np.random.default_rng(1).integers(0, 3, small.graph.group_index.max() + 1)[small.graph.group_index]
    assert problem.broken_constraints(devices[excerpt.twin]) == []


def two_stages(num_microbatches: int) -> Problem:
    """Forward f and backward b take 1, the gradient of a weight w takes 1, on each of two devices; 3 micro-batches.

    f0 -> f1 -> b1 -> b0; w1 follows b1, w0 follows b0, and the updates u0, u1 take what w adds up.
    """
    names = ("p0", "p1", "f0", "f1", "b1", "w1", "b0", "w0", "u0", "u1")
    phases = ("", "", "forward", "forward", "backward", "backward", "backward", "backward", "update", "update")
    work = {"f0": 1, "f1": 1, "b1": 1, "w1": 1, "b0": 1, "w0": 1}
    ops = [
        Op(
            name, kind="parameter" if name[0] == "p" else name, phase=phase,
            group=int(name[1]) if name[0] in "pu" else -1, resident_bytes=1 if name[0] == "p" else 0,
        )
        for name, phase in zip(names, phases, strict=True)
    ]  # fmt: skip
    links = [(2, (3,)), (3, (4,)), (4, (5, 6)), (6, (7,)), (7, (8,)), (5, (9,))]
    tensors = [Tensor(0, (2, 8)), Tensor(1, (3, 9)), *(Tensor(a, b, 1) for a, b in links)]
    document = {
        "format": "gdp-cluster", "version": 1, "name": "two",
        "devices": [
            {
                "name": f"d{n}", "kind": "slot", "memory": "1GB", "flops": {"float32": 10**15},
                "memory_bandwidth": 10**15, "launch": 0,
            }
            for n in (0, 1)
        ],
        "links": [{"from": "*", "to": "*", "bandwidth": 10**18, "latency": 0}],
    }  # fmt: skip
    one = Graph.build("two-stages", ops, tensors)
    graph = accumulated(one, num_microbatches)
    times = [[work.get(name.partition("@")[0], 0)] * 2 for name in graph.op_names]
    return Problem.build(graph, Cluster.from_document(document), op_time_ns=np.array(times, np.int64))


def test_orders_of_two_stages() -> None:
    """Three micro-batches on two devices, a transfer of one byte takes 1 ns.

    1F1B: an earlier micro-batch's gradient of a weight goes before a later one's backward op; zero-bubble fills gaps.
    """
    problem = two_stages(3)
    stage = np.array([int(name.partition("@")[0].partition(".")[0][1]) for name in problem.graph.op_names])
    runs = {
        order: simulate(problem, stage, priority=problem.priority(order, problem.b_level_ns))
        for order in (GPIPE, ONE_F_ONE_B, ZERO_BUBBLE)
    }

    def timed(order: str, device: int) -> str:
        ops = [problem.graph.op_names[op] for op in runs[order].order[device] if problem.op_time_ns[op, 0]]
        return " ".join(name[0] + (name.partition("@")[2] or "0") for name in ops)

    # device 1 gets f at 2, 3, 4 (each forward 1 ns and its transfer 1 ns, pipelined)
    assert timed(GPIPE, 1) == "f0 f1 f2 b0 w0 b1 w1 b2 w2"
    assert timed(ONE_F_ONE_B, 1) == "f0 b0 w0 f1 b1 w1 f2 b2 w2"
    assert timed(ZERO_BUBBLE, 1) == "f0 b0 f1 b1 f2 b2 w0 w1 w2"
    assert timed(GPIPE, 0).startswith("f0 f1 f2 b0")
    # device 1 is busy from 2 to 11. Its last b ends at 10 in GPipe and 1F1B; then 1 for the transfer, b and w on device
    # 0: 13. With zero bubbles it ends at 8; device 0 starts that b at 9 and w at 10: 11
    assert {order: run.step_time_ns for order, run in runs.items()} == {GPIPE: 13, ONE_F_ONE_B: 13, ZERO_BUBBLE: 11}


def test_bad_numbers() -> None:
    """Micro-batches are at least one, and are made once."""
    graph = captured("rnnlm").graph
    with pytest.raises(InputError, match="microbatches is 0"):
        accumulated(graph, 0)
    with pytest.raises(InputError, match="has 2 micro-batches already"):
        accumulated(accumulated(graph, 2), 2)


class MovingAverage(nn.Module):
    """Its forward pass overwrites a buffer that its backward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x * self.average).sum()


def test_what_backward_reads_is_not_overwritten() -> None:
    """The next micro-batch overwrites a buffer only after the backward op of this one has read it."""
    graph = accumulated(capture_fn(lambda: (MovingAverage(), (torch.ones(2, 4),)), name="average").graph, 2)
    number = {name: op for op, name in enumerate(graph.op_names)}
    reaches = {op: {op} for op in range(graph.num_ops)}
    for source, target in sorted(zip(graph.producers[graph.edge_tensors], graph.consumers, strict=True), reverse=True):
        reaches[int(source)] |= reaches[int(target)]
    (reader,) = (op for name, op in number.items() if name.startswith("mul_backward") and "@" not in name)
    group = graph.groups[number["average"]]
    writers = [op for name, op in number.items() if name.endswith("@1") and graph.groups[op] == group]
    assert len(writers) == 2
    assert all(writer in reaches[reader] for writer in writers)


def test_ops_that_hold_weights_hold_them_where_they_run() -> None:
    """Layers as single ops: the replicas of each run where its weights are, which are there once; the first, too, runs
    for every micro-batch."""
    ops = [Op(f"layer{n}", kind="layer", flops=10**9, resident_bytes=2**30) for n in range(3)]
    layers = Graph.build("layers", ops, [Tensor(0, (1,), 100), Tensor(1, (2,), 100)])
    graph = accumulated(layers, 4)
    assert graph.num_ops == 12
    assert graph.resident_bytes.sum() == 3 * 2**30
    assert Problem.build(graph, CLUSTER).graph.group_index.max() == 2


@pytest.mark.parametrize("family", ["rnnlm", "resnet", "bert", "mixture_of_experts"])
@pytest.mark.parametrize("count", [2, 4])
def test_one_micro_batch_makes_several_again(family: str, count: int) -> None:
    """`accumulated` of what was taken out is the step that it was taken out of, tied weights and buffers too."""
    several = accumulated(captured(family).graph, count)
    one = one_microbatch(several)
    assert one.num_ops == captured(family).graph.num_ops
    assert count_microbatches(one) == 1
    assert accumulated(one, count).fingerprint == several.fingerprint


def test_nothing_to_take_out() -> None:
    """A graph without alike micro-batches has none to take out."""
    ops = [Op("w", "parameter"), Op("f", flops=1), Op("f@1", flops=2, origin=1, microbatch=1), Op("g", flops=1)]
    for graph in (
        Graph.build("plain", ops[:2], [Tensor(0, (1,), 1)]),
        Graph.build("odd", ops, [Tensor(0, (1, 2), 1), Tensor(2, (3,), 1)]),
    ):
        with pytest.raises(InputError, match=r"--microbatches|are not alike"):
            one_microbatch(graph)
