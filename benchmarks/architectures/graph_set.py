"""A directory of drawn graphs to train on, read graph by graph; `python -m benchmarks.architectures` makes it.

set.json              seed, version and families; a row for each graph that is there
graph-000017.json.gz  the row of graph 17, and the graph
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gdp import files
from gdp.errors import InputError, prefixed
from gdp.graph import Graph

SET_FORMAT, GRAPH_FORMAT, VERSION = "gdp-graph-set", "gdp-drawn-graph", 2
INDEX = "set.json"
DRAWER = "python -m benchmarks.architectures"
_AGAIN = f"delete it and run {DRAWER} again"
_FIELDS = {"format": files.is_string, "version": files.is_size, "row": files.is_mapping, "graph": files.is_mapping}


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """A graph of a set: its row, and `load` for the graph itself."""

    path: Path
    name: str
    family: str
    num_ops: int
    held_bytes: int  # of parameters and optimizer state
    forward_bytes: int  # of the tensors that the forward pass makes
    flops: int
    fingerprint: str
    structure: int  # equal for graphs that differ in sizes alone
    rejected: Mapping[str, int]  # draws before this one, by reason

    def load(self) -> Graph:
        """Reads the graph; InputError if the file is damaged or has another graph."""
        document = read_stored(self.path)
        with prefixed(self.path):
            if document["row"]["fingerprint"] != self.fingerprint:
                raise InputError(f"is not the graph that the set names; {_AGAIN}")
            try:
                return Graph.from_columns(document["graph"])
            except (KeyError, TypeError, ValueError):
                raise InputError(f"is damaged; {_AGAIN}") from None

    def row(self) -> dict[str, Any]:
        """Returns what `set.json` has of the graph."""
        return {key: value for key, value in asdict(self).items() if key != "path"}


@dataclass(frozen=True, slots=True)
class GraphSet:
    """The graphs of a directory, by number, and what they were drawn from."""

    directory: Path
    seed: int
    generator: int  # version
    torch: str
    families: tuple[str, ...]
    graphs: tuple[StoredGraph, ...] = ()

    @classmethod
    def is_at(cls, directory: str | Path) -> bool:
        """Returns whether `directory` has a set of graphs."""
        return (Path(directory) / INDEX).is_file()

    @classmethod
    def open(cls, directory: str | Path) -> "GraphSet":
        """Reads the rows of a set, and no graph. InputError for anything else."""
        directory = Path(directory)
        path = directory / INDEX
        document = files.read_json(path)
        with prefixed(path):
            content = files.require_header(document, SET_FORMAT, VERSION)
            try:
                graphs = tuple(stored(directory, number, row) for number, row in enumerate(content["graphs"]))
                numbers = int(content["seed"]), int(content["generator"])
                return cls(directory, *numbers, str(content["torch"]), tuple(content["families"]), graphs)
            except (KeyError, TypeError, ValueError):
                raise InputError("is damaged; make the set again, in another directory") from None


def read_stored(path: Path) -> Mapping[str, Any]:
    """Returns the row and the graph that a file of a set has. InputError for any other file."""
    try:
        document: Mapping[str, Any] = files.read_json(path)
        with prefixed(path):
            files.require_header(document, GRAPH_FORMAT, VERSION)
            files.require_keys(document, "graph", _FIELDS, set(_FIELDS))
    except InputError as error:
        raise InputError(f"{error}, or {_AGAIN if path.exists() else f'run {DRAWER} again'}") from None
    return document


def stored(directory: Path, number: int, row: Mapping[str, Any]) -> StoredGraph:
    """Returns graph `number` of a directory by its row."""
    return StoredGraph(graph_path(directory, number), **row)


def graph_path(directory: Path, number: int) -> Path:
    """Returns the file of graph `number`."""
    return directory / f"graph-{number:06}.json.gz"
