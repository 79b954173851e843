"""gdp-graph files in columns: the same graphs as JSON, strict readers, one-line errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import load, save

from benchmarks.graphs import lstm_training_graph
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.column_file import COLUMNS
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.policy.pretrained import shipped
from strategies import Instance, instances

Columns = dict[str, Any]


def stored(graph: Graph, directory: Path) -> Graph:
    """Returns `graph` as it is read from a file that it was written to."""
    graph.save(directory / "graph.safetensors")
    return Graph.load(directory / "graph.safetensors")


def with_odd_names() -> Graph:
    """Names that look like those of copies and are none, and of no letters; one copy has a name of its own."""
    names = ["a", "a@1", "a#2@1", "a@1#2", "@1", "#", "a@01", "a@1@2", "ä\n\0", "a@10000", "a#1000"]
    times = {"p100-pcie-16g": 5, "gpu1": -1}
    ops = [Op(name, phase="forward", time_ns=times if number % 2 else {}) for number, name in enumerate(names)]
    ops[3] = replace(ops[3], origin=0, microbatch=1, replica=2)
    ops[4] = replace(ops[4], origin=0, microbatch=3)
    return Graph.build("odd", ops, [Tensor(0, (1, 2), 2**40), Tensor(1, (), 3, keep=True), Tensor(0, (5,), view_of=0)])


def changed(directory: Path, change: Callable[[Columns], None], header: dict[str, str] | None = None) -> Path:
    """Returns a file whose columns were changed."""
    path = directory / "graph.safetensors"
    with_odd_names().save(path)
    columns = load(path.read_bytes())
    change(columns)
    path.write_bytes(save(columns, header or COLUMNS.header(name="odd")))
    return path


def test_columns_of_hosts_may_be_absent(tmp_path: Path) -> None:
    """A file has the columns of hosts that tell something, and is read without the others."""
    graph = Graph.build("two", [Op("a", kernels=3), Op("b", host_waits=True)], [])
    read = stored(graph, tmp_path)
    assert read.fingerprint == graph.fingerprint
    names = {name for name in load((tmp_path / "graph.safetensors").read_bytes()) if name.startswith("op/")}
    assert names >= {"op/kernels", "op/host_waits"}
    assert "op/host_ns" not in names
    assert read.host_ns.tolist() == [0, 0]


@given(instances())
def test_columns_keep_a_graph(instance: Instance) -> None:
    """A graph survives its columns, and keeps its fingerprint."""
    graph = instance.graph
    with TemporaryDirectory() as directory:
        read = stored(graph, Path(directory))
    assert read.to_document() == graph.to_document()
    assert read.fingerprint == graph.fingerprint


@pytest.mark.parametrize("layout", ["data=2,microbatches=3", "microbatches=4", "data=2,zero=3,microbatches=2"])
def test_names_of_copies_survive(layout: str, tmp_path: Path) -> None:
    """Copies whose names are those of their first copies, with ends, are stored without names."""
    graph = Step.of(lstm_training_graph(3), Layout.parse(layout)).graph
    read = stored(graph, tmp_path)
    assert read.to_document() == graph.to_document()
    assert read.fingerprint == graph.fingerprint
    numbers = load((tmp_path / "graph.safetensors").read_bytes())["op/name"]
    assert (numbers == -1).mean() > 0.4


def test_odd_names_and_times_survive(tmp_path: Path) -> None:
    """Names with ends of copies, line breaks and zeros, and times, are as before."""
    graph = with_odd_names()
    assert stored(graph, tmp_path).to_document() == graph.to_document()


def test_columns_are_bit_equal_again(tmp_path: Path) -> None:
    """A file that is read and written again is bit-equal."""
    first, again = tmp_path / "first.safetensors", tmp_path / "again.safetensors"
    with_odd_names().save(first)
    Graph.load(first).save(again)
    assert again.read_bytes() == first.read_bytes()


def _set(name: str, values: Any, dtype: Any = np.int32) -> Callable[[Columns], None]:
    return lambda columns: columns.update({name: np.array(values, dtype)})


def _first(name: str, value: int, op: int = 0) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[name] = columns[name].copy()
        columns[name][op] = value

    return change


def _text(name: str, values: object) -> Callable[[Columns], None]:
    return _set(f"{name}.values", np.frombuffer(json.dumps(values).encode(), np.uint8), np.uint8)


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lambda columns: columns.pop("op/flops"), ["column 'op/flops' is missing"]),
        (_set("op/colour", [1]), ["column 'op/colour' is unknown"]),
        (_set("op/group", [1, 2]), ["column 'op/group' is I32 [2]", "I32 or I64 [11] is expected"]),
        (_set("op/group", [[1], [2]]), ["column 'op/group' is I32 [2, 1]"]),
        (_set("op/flops", [1.5] * 11, np.float32), ["column 'op/flops' is F32"]),
        (_set("tensor/keep", [0, 0, 0]), ["column 'tensor/keep' is I32", "BOOL [3] is expected"]),
        (_first("op/kind", 7), ["column 'op/kind' has numbers beyond 0 to 0"]),
        (_first("op/name", -2), ["column 'op/name' has numbers beyond"]),
        (_first("op/name", -1), ["column 'op/name' has -1 for an op that is no copy"]),
        (_first("op/replica", -1, op=3), ["column 'op/replica' has numbers beyond 0 to"]),
        (_first("op/origin", 11, op=4), ["'op/origin' has numbers beyond -1 to 10"]),
        (_text("op/role", ["sum"]), ["op 0 'a'", "role is 'sum'", "ring sum"]),
        (_text("op/kind", [1]), ["'op/kind.values' is no JSON list of distinct strings"]),
        (_text("op/phase", ["sideways"]), ["op 0 'a'", "phase is 'sideways'"]),
        (_text("op/time_ns", ["{}", '{"gpu0": 1.5}']), ["op/time_ns", "1.5", "is expected"]),
        (_set("op/dtype.values", [91, 34], np.uint8), ["'op/dtype.values' is no JSON list"]),
        (_first("tensor/consumers.offsets", 1), ["does not rise from 0 to 3"]),
        (_set("tensor/consumers.offsets", [0, 2, 1, 3]), ["does not rise from 0 to 3"]),
        (_first("tensor/producer", 11), ["tensor 0", "producer 11 is no op"]),
        (_first("op/flops", -1), ["op 0 'a'", "flops is -1"]),
    ],
)
def test_bad_columns_are_refused(change: Callable[[Columns], None], fragments: list[str], tmp_path: Path) -> None:
    """One line names the file, the column or op, and the fault."""
    path = changed(tmp_path, change)
    with pytest.raises(InputError) as caught:
        Graph.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_truncated_and_foreign_files_are_refused(tmp_path: Path) -> None:
    """One line names the file and says what it is not."""
    path = tmp_path / "graph.safetensors"
    with_odd_names().save(path)
    whole = path.read_bytes()
    for content, fragment in [
        (whole[:-1], "truncated, or no safetensors file"),
        (whole[:100], "truncated, or no safetensors file"),
        (b"", "truncated, or no safetensors file"),
        (b'{"format": "gdp-graph"}', "truncated, or no safetensors file"),
        (save({"weight": np.zeros(3)}), "has no gdp header; name a file that `gdp capture` wrote"),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=fragment) as caught:
            Graph.load(path)
        assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(InputError, match="no such file"):
        Graph.load(tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="format is 'gdp-checkpoint'; 'gdp-graph' is expected"):
        Graph.load(shipped())
