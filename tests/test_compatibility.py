"""Files of released versions are read, and those of newer versions are refused; docs/json.md is the promise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.measured_times import MeasuredTimes
from gdp.models.op_costs import OpCosts
from gdp.simulator.plan import Plan

GOLDEN = Path(__file__).parent / "golden"  # `KIND-VERSION.*`, as a gdp of that version wrote them
READERS: dict[str, Callable[[Path], Any]] = {
    "graph": Graph.load,
    "cluster": Cluster.load,
    "plan": Plan.load,
    "op-costs": OpCosts.load,
    "times": MeasuredTimes,
}
NEWER = "is 99; this gdp reads .* versions? .*; a newer gdp wrote it: upgrade this one"


def kind_of(path: Path) -> str:
    return path.name.rpartition("-")[0]


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_files_of_released_versions_are_read(path: Path) -> None:
    """Each is read without a word."""
    READERS[kind_of(path)](path)


def test_graphs_of_all_versions_are_one_graph() -> None:
    """Version 1 has no copies, and columns are another form of version 2."""
    graphs = [Graph.load(path) for path in sorted(GOLDEN.glob("graph-*"))]
    assert len(graphs) == 3
    assert len({graph.fingerprint for graph in graphs}) == 1
    plan = Plan.load(GOLDEN / "plan-2.json")
    plan.check_belongs(graphs[0], Cluster.load(GOLDEN / "cluster-1.json"))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.name)
def test_newer_files_are_refused_in_a_line(path: Path, tmp_path: Path) -> None:
    """The line names both versions and says that an upgrade helps."""
    newer = tmp_path / path.name
    newer.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(InputError, match=f"{path.name}: version {NEWER}"):
        READERS[kind_of(path)](newer)


def test_newer_files_of_tensors_and_of_times_are_refused_in_a_line(tmp_path: Path) -> None:
    """Their versions are in a header, and in SQLite's own field for it."""
    path, tensors = GOLDEN / "graph-2.safetensors", tmp_path / "graph.safetensors"
    with safe_open(path, "numpy") as file:
        header = orjson.loads(file.metadata()["gdp"]) | {"version": 99}
    save_file(load_file(path), tensors, {"gdp": orjson.dumps(header).decode()})
    with pytest.raises(InputError, match=NEWER):
        Graph.load(tensors)
    times = tmp_path / "times.db"
    content = bytearray((GOLDEN / "times-1.db").read_bytes())
    content[60:64] = (99).to_bytes(4, "big")  # `user_version` in the header of SQLite's file format
    times.write_bytes(content)
    with pytest.raises(InputError, match=NEWER):
        MeasuredTimes(times)


def test_unknown_keys_in_files_are_refused(tmp_path: Path) -> None:
    """A misspelt key changes nothing silently."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads((GOLDEN / "plan-2.json").read_text()) | {"oder": []}))
    with pytest.raises(InputError, match="unknown key 'oder'; known keys: format, version"):
        Plan.load(path)
