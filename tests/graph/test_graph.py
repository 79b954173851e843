"""gdp-graph files: strict readers, bit-equal round trips, fingerprints."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.builder import write_after_read
from strategies import Instance, instances


def document(**changes: Any) -> dict[str, Any]:
    """Three ops: `a` feeds `b` through tensor 0 and `c` through tensor 1, a view of tensor 0."""
    ops = [{"name": "a"}, {"name": "b", "flops": 7}, {"name": "c"}]
    tensors = [
        {"producer": 0, "consumers": [1], "bytes": 8},
        {"producer": 0, "consumers": [2], "bytes": 4, "view_of": 0},
    ]
    return {"format": "gdp-graph", "version": 2, "name": "three", "ops": ops, "tensors": tensors, **changes}


def with_op(**fields: Any) -> dict[str, Any]:
    """Returns the document with other fields of op `b`."""
    return document(ops=[{"name": "a"}, {"name": "b", **fields}, {"name": "c"}])


def with_tensor(**fields: Any) -> dict[str, Any]:
    """Returns the document with one tensor, of these fields."""
    return document(tensors=[{"producer": 0, "consumers": [1], **fields}])


BAD_DOCUMENTS: list[tuple[object, list[str]]] = [
    ([], ["list", "gdp-graph"]),
    ({}, ["format is None", "gdp-graph"]),
    (document(format="gdp-plan"), ["format is 'gdp-plan'"]),
    (document(version=3), ["version is 3", "reads gdp-graph versions 1 to 2"]),
    (document(version=True), ["version is True"]),
    (document(colour="red"), ["unknown key 'colour'", "known keys"]),
    ({key: value for key, value in document().items() if key != "ops"}, ["ops is missing", "add it"]),
    (document(ops={}), ["ops is {}", "a list is expected"]),
    (document(ops=[]), ["has no ops"]),
    (document(ops=[3]), ["op 0", "int", "a mapping is expected"]),
    (document(ops=[{}]), ["op 0", "name is missing"]),
    (with_op(name=5), ["op 1", "name is 5", "a string"]),
    (with_op(name=""), ["op 1", "name is empty"]),
    (with_op(name="a"), ["op 1", "'a'", "op 0", "unique"]),
    (with_op(colour=1), ["op 1 'b'", "unknown key 'colour'"]),
    (with_op(flops=-1), ["op 1 'b'", "flops is -1", "0 to 2^63 - 1"]),
    (with_op(flops=1.5), ["op 1 'b'", "flops is 1.5"]),
    (with_op(flops=True), ["op 1 'b'", "flops is True"]),
    (with_op(bytes_accessed=2**63), ["op 1 'b'", "bytes_accessed"]),
    (with_op(resident_bytes="1GiB"), ["op 1 'b'", "resident_bytes is '1GiB'"]),
    (with_op(phase="sideways"), ["op 1 'b'", "phase is 'sideways'", "forward"]),
    (with_op(group=-2), ["op 1 'b'", "group is -2"]),
    (with_op(time_ns={"gpu0": -2}), ["op 1 'b'", "time_ns", "-1"]),
    (with_op(time_ns=[1]), ["op 1 'b'", "time_ns is [1]"]),
    (with_op(origin=1), ["op 1 'b'", "origin 1 is no other op", "0 to 2"]),
    (with_op(origin=3), ["op 1 'b'", "origin 3 is no other op"]),
    (with_op(microbatch=-1), ["op 1 'b'", "microbatch is -1"]),
    (with_op(role="ring"), ["op 1 'b'", "role is 'ring'", "did you mean"]),
    (with_op(origin=0, kind="mm"), ["op 1 'b'", "is 'mm', and the op 0 that it is a copy of ''"]),
    (with_tensor(producer=3), ["tensor 0", "producer 3 is no op", "0 to 2"]),
    (with_tensor(producer=-1), ["tensor 0", "producer is -1"]),
    (with_tensor(consumers=[3]), ["tensor 0", "consumer 3 is no op", "0 to 2"]),
    (with_tensor(consumers=[-1]), ["tensor 0", "consumer -1 is no op"]),
    (with_tensor(consumers=[1, 2, 1]), ["tensor 0", "consumer 1 is listed twice"]),
    (with_tensor(consumers=["b"]), ["tensor 0", "consumers", "a list of integers"]),
    (with_tensor(bytes=-4), ["tensor 0", "bytes is -4"]),
    (with_tensor(bytes=0.5), ["tensor 0", "bytes is 0.5"]),
    (with_tensor(resident=1), ["tensor 0", "resident is 1", "true or false"]),
    (with_tensor(producer=2, consumers=[1]), ["tensor 0", "'c'", "earlier", "'b'", "topological order"]),
    (with_tensor(consumers=[0]), ["cycle", "'a' -> 'a'"]),
    (
        document(tensors=[{"producer": 0, "consumers": [1]}, {"producer": 1, "consumers": [0]}]),
        ["cycle", "'a'", "'b'", "unroll"],
    ),
    (with_tensor(view_of=0), ["tensor 0", "view_of 0 is no other tensor"]),
    (with_tensor(view_of=9), ["tensor 0", "view_of 9 is no other tensor"]),
    (
        document(tensors=[{"producer": 0, "consumers": [1]}, {"producer": 1, "consumers": [2], "view_of": 0}]),
        ["tensor 1", "view_of 0", "another producer"],
    ),
    (
        document(tensors=[{"producer": 0, "consumers": [], "view_of": at} for at in (-1, 0, 1)]),
        ["tensor 2", "view_of 1", "itself a view"],
    ),
    (
        document(tensors=[{"producer": 0, "consumers": [], **more} for more in ({}, {"view_of": 0, "resident": True})]),
        ["tensor 1", "view and resident"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "fragments"), BAD_DOCUMENTS)
def test_bad_documents_are_refused(tmp_path: Path, content: object, fragments: list[str]) -> None:
    """One line names the file, the place and the remedy."""
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        Graph.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("graph.json", b"", "is empty"),
        ("graph.json", b'{"format": ', "line 1 column"),
        ("graph.json", gzip.compress(b"{}", mtime=0), "rename it to graph.json.gz"),
        ("graph.json.gz", b"{}", "it is not gzip"),
        ("graph.json.gz", gzip.compress(json.dumps(document()).encode())[:-9], "truncated or damaged gzip"),
        ("graph.json.gz", gzip.compress(b" " * 2**20) * 513, "is more than 512 MiB unzipped"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes, fragment: str) -> None:
    """The error names the file and the damage."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=fragment) as caught:
        Graph.load(tmp_path / name)
    assert name in str(caught.value)


@given(instances())
def test_documents_keep_a_graph(instance: Instance) -> None:
    """A graph survives its document, and keeps its fingerprint."""
    graph = instance.graph
    read = Graph.from_document(json.loads(json.dumps(graph.to_document())))
    assert read.to_document() == graph.to_document()
    assert read.fingerprint == graph.fingerprint


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_files_are_bit_equal_again(tmp_path: Path, name: str) -> None:
    """A file that is read and written again is bit-equal, and nothing else is left."""
    Graph.from_document(document()).save(tmp_path / name)
    Graph.load(tmp_path / name).save(tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == (tmp_path / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"again-{name}", name]


def _by_the_definition(graph: Graph) -> str:
    """Returns the fingerprint as docs/machine-model.md, section 6, defines it."""
    parts = [b"gdp-graph 2\n"]

    def add_texts(texts: list[str]) -> None:
        parts.append(json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")

    def add_numbers(values: list[int]) -> None:
        parts.append(
            f"{len(values)}\n".encode() + b"".join(value.to_bytes(8, "little", signed=True) for value in values)
        )

    document = graph.to_document()
    ops, tensors = document["ops"], document["tensors"]
    add_texts([op["name"] for op in ops])
    times = [{**op, "time_ns": json.dumps(op["time_ns"], sort_keys=True, separators=(",", ":"))} for op in ops]
    for field in ("kind", "dtype", "phase", "module", "role", "time_ns"):
        texts = [op[field] for op in times]
        values = list(dict.fromkeys(texts))
        add_texts(values)
        add_numbers([values.index(text) for text in texts])
    for field in ("flops", "bytes_accessed", "resident_bytes", "group", "origin", "microbatch", "replica"):
        add_numbers([op[field] for op in ops])
    for field in ("producer", "bytes", "resident", "keep", "view_of"):
        add_numbers([int(tensor[field]) for tensor in tensors])
    add_numbers([sum(len(tensor["consumers"]) for tensor in tensors[:end]) for end in range(len(tensors) + 1)])
    add_numbers([op for tensor in tensors for op in tensor["consumers"]])
    for field in ("kernels", "host_ns", "host_waits"):
        if field in ops[0]:
            add_texts([field])
            add_numbers([int(op[field]) for op in ops])
    return hashlib.sha256(b"".join(parts)).hexdigest()


@given(instances())
def test_a_fingerprint_is_as_defined(instance: Instance) -> None:
    """The SHA-256 of all columns, as the document defines it, is the fingerprint."""
    assert instance.graph.fingerprint == _by_the_definition(instance.graph)


def test_fingerprints_without_hosts_stay() -> None:
    """Plans that were made before ops told of hosts are still of their graphs, and files are as they were."""
    ops = [Op("a", "mm", 7, 3), Op("b", time_ns={"gpu0": 2})]
    graph = Graph.build("two", ops, [Tensor(0, (1,), 4)])
    assert graph.fingerprint == "c474828a1edcd18286bcab1e980f8869ebe45e16681d2064fc20ef919c10e9dc"
    assert not {"kernels", "host_ns", "host_waits"} & graph.to_document()["ops"][0].keys()


def test_what_a_fingerprint_leaves_out() -> None:
    """The graph's name and whether defaults are spelled out make no difference, all else does."""
    graph = Graph.from_document(document())
    hosts = {"kernels": 1, "host_ns": 0, "host_waits": False}
    explicit = with_op(flops=7, kind="", dtype="float32", group=-1, time_ns={}, **hosts)
    assert Graph.from_document(document(name="other")).fingerprint == graph.fingerprint
    assert Graph.from_document({**explicit, "tensors": document()["tensors"]}).fingerprint == graph.fingerprint
    others = [
        with_op(flops=8),
        with_op(flops=7, module="m"),
        with_op(flops=7, time_ns={"gpu0": 1}),
        with_op(flops=7, group=0),
        with_op(flops=7, origin=0),
        with_op(flops=7, microbatch=1),
        with_op(flops=7, replica=1),
        with_op(flops=7, role="recomputed"),
        with_op(flops=7, kernels=0),
        with_op(flops=7, host_ns=2),
        with_op(flops=7, host_waits=True),
    ]
    prints = {Graph.from_document({**other, "tensors": document()["tensors"]}).fingerprint for other in others}
    assert len(prints | {graph.fingerprint}) == len(others) + 1


def test_records_are_kept() -> None:
    """A graph has the records that it was built of."""
    ops = (
        Op("a", "mm", 3, 5, "bfloat16", 7, "forward", "layer", 2, {"gpu0": 11}),
        Op("b", group=2, origin=0, microbatch=3, replica=4, role="recomputed", kind="mm"),
    )
    tensors = (Tensor(0, (1,), 13, resident=True), Tensor(1, (), 17, keep=True))
    graph = Graph.build("two", ops, tensors)
    assert (graph.op(0), graph.op(1)) == ops
    assert (graph.tensor(0), graph.tensor(1)) == tensors


def test_arrays_are_read_only() -> None:
    """Arrays of a graph cannot be written."""
    graph = Graph.from_document(document())
    with pytest.raises(ValueError, match="read-only"):
        graph.flops[0] = 1
    assert graph.flops.dtype == np.int64


@pytest.mark.parametrize(
    "text", ['{"name": "a", "name": "b"}', '{"name" : "a", "name": "b"}', '{"x\\":": 1, "x\\":": 2}']
)
def test_a_key_that_stands_twice_is_an_error(tmp_path: Path, text: str) -> None:
    """JSON readers keep the last of two equal keys; silently dropping the first would be a repair."""
    path = tmp_path / "twice.json"
    path.write_text(text)
    with pytest.raises(InputError, match="stands twice"):
        Graph.load(path)


def test_write_after_read() -> None:
    """A reader gets a tensor to a writer unless it is the writer, or a path leads there anyway (0 -> 1 -> 3)."""
    tensors = [Tensor(0, (1, 2)), Tensor(1, (3,))]
    pairs = [(2, 3), (0, 3), (3, 3), (2, 4), (1, 4)]
    assert write_after_read(5, tensors, pairs) == [Tensor(1, (4,)), Tensor(2, (3, 4))]
