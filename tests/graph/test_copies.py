"""Copies: columns that tell what ops of a cut step are for, through rewrites and files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.graph import Graph, Op, Tensor, copies
from gdp.graph.microbatches import microbatch_of
from gdp.parallel.layout import Layout
from gdp.parallel.replicas import joined
from gdp.parallel.rings import Rings
from gdp.parallel.step import Step


def two_layers() -> Graph:
    """Two layers of one product each, with a loss, gradients and updates."""
    ops = [Op(f"w{i}", "parameter", resident_bytes=4000, group=i, module=f"layers.{i}") for i in range(2)]
    ops += [Op("x", "input", phase="forward")]
    ops += [Op(f"f{i}", "mm", 100, 50, phase="forward", module=f"layers.{i}") for i in range(2)]
    ops += [Op("loss", "loss", 1, 1, phase="forward")]
    for i in (1, 0):
        times = {"p100-pcie-16g": 7} if i else {}
        ops.append(Op(f"b{i}", "mm", 100, 50, phase="backward", module=f"layers.{i}", time_ns=times))
        ops.append(Op(f"g{i}", "mm", 100, 50, phase="backward", module=f"layers.{i}"))
    ops += [Op(f"w{i}.update", "update", 10, 10, phase="update", module=f"layers.{i}", group=i) for i in (1, 0)]
    number = {op.name: place for place, op in enumerate(ops)}

    def tensor(producer: str, consumers: str, num_bytes: int, *, resident: bool = False, keep: bool = False) -> Tensor:
        readers = tuple(sorted(number[name] for name in consumers.split()))
        return Tensor(number[producer], readers, num_bytes, resident=resident, keep=keep)

    tensors = [tensor(f"w{i}", f"f{i} b{i} w{i}.update", 1000, resident=True) for i in range(2)]
    tensors += [
        tensor("x", "f0 g0", 2_000_000),
        tensor("f0", "f1 g1 b0", 2_000_000),
        tensor("f1", "loss b1", 2_000_000),
        tensor("loss", "b1 g1", 4, keep=True),
        tensor("b1", "b0 g0", 64),
        tensor("g1", "w1.update", 1000),
        tensor("b0", "", 64),
        tensor("g0", "w0.update", 1000),
    ]
    return Graph.build("net", ops, tensors)


def test_version_1_is_read() -> None:
    """A document of version 1 is a plain step, whatever its ops are called."""
    document = {"format": "gdp-graph", "version": 1, "name": "mail", "ops": [{"name": "a"}, {"name": "a@1"}]}
    assert (microbatch_of(Graph.from_document({**document, "tensors": []})) == -1).all()


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts that suit the two layers."""
    data, zero = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    even = draw(st.integers(1, 3))
    counts = tuple(draw(st.integers(1, 3)) for _ in range(data)) if zero < 3 else (even,) * data
    recompute, offload = draw(st.sampled_from([("none", "none"), ("blocks", "none"), ("none", "blocks")]))
    zero = zero if data > 1 else 0
    return Layout(counts, zero, recompute=recompute, offload=offload if zero < 3 else "none")


@settings(max_examples=40, deadline=None)
@given(layouts(), st.booleans())
def test_columns_survive_every_rewrite(layout: Layout, over_hosts: bool) -> None:
    """Copies have the kind, work and root of their first one; each replica and micro-batch has one of each op."""
    one = two_layers()
    hosts = (0, 0) if over_hosts and layout.data == 2 else None
    step = Step.of(one, layout, hosts=hosts)
    graph, first, root = step.graph, step.graph.first_copy, step.graph.root
    assert (graph.root[first] == root).all()
    for column in (graph.kinds, graph.roles, graph.phases, graph.modules):
        assert [column[op] for op in first.tolist()] == list(column)
    is_work = ~graph.is_collective
    assert (graph.flops[first] == graph.flops)[is_work].all()
    assert (graph.bytes_accessed[first] == graph.bytes_accessed)[is_work].all()
    assert [one.op_names[op] for op in step.origin.tolist()] == [graph.op_names[op] for op in root.tolist()]
    assert np.array_equal(np.sort(root[np.unique(root)]), np.unique(root))
    hops = graph.is_in_role(*copies.HOPS, copies.HOST_RING_END)
    key = np.stack((first, graph.microbatches, graph.replicas))[:, ~hops]
    assert np.unique(key, axis=1).shape == key.shape
    assert np.bincount(graph.replicas).size == layout.data
    repeated = microbatch_of(graph)
    for replica, count in enumerate(layout.microbatches):
        own = graph.replicas == replica
        assert set(graph.microbatches[own].tolist()) == set(range(count))
        of_forward = own & np.array([phase == "forward" for phase in graph.phases]) & ~graph.is_collective
        assert len(set(np.bincount(graph.microbatches[of_forward]).tolist())) == 1
        assert (repeated[of_forward] == graph.microbatches[of_forward]).all() or max(layout.microbatches) == 1


@pytest.mark.parametrize("name", ["graph.json.gz", "graph.safetensors"])
def test_many_copies_survive_files(name: str, tmp_path: Path) -> None:
    """A thousand replicas and twenty thousand micro-batches are kept by both forms."""
    ops = [Op("f", "mm"), Op("g", "mm"), Op("f late", "mm", origin=0, microbatch=20_000)]
    one = Graph.build("two", ops, [Tensor(0, (1,), 1)])
    whole = joined([one] * 1500, (), Rings.of(1500))
    whole.save(tmp_path / name)
    read = Graph.load(tmp_path / name)
    assert read.fingerprint == whole.fingerprint
    assert read.to_document() == whole.to_document()
    assert (int(read.replicas.max()), int(read.microbatches.max())) == (1499, 20_000)
    assert set(read.root.tolist()) == {0, 1}
