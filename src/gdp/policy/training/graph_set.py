"""A directory of drawn graphs to train on: made once, in parts if need be, and read graph by graph.

    set.json              seed, version and families; a row for each graph that is there
    graph-000017.json.gz  the row of graph 17, and the graph

Graph files are written whole or not at all, and `set.json` names whole ones only. A graph file that it does not name
yet, after a kill, is taken over by the next call, which draws a deleted one again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp import files
from gdp.errors import InputError, prefixed
from gdp.graph import Graph

if TYPE_CHECKING:
    from gdp.policy.training.architectures.likeness import BuiltIns

SET_FORMAT, GRAPH_FORMAT, VERSION = "gdp-graph-set", "gdp-drawn-graph", 2
INDEX = "set.json"
_AGAIN = "delete it and run gdp architectures again"
_SAVE_EVERY = 50  # graphs


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
        document = _read(self.path)
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
                graphs = tuple(_stored(directory, number, row) for number, row in enumerate(content["graphs"]))
                numbers = int(content["seed"]), int(content["generator"])
                return cls(directory, *numbers, str(content["torch"]), tuple(content["families"]), graphs)
            except (KeyError, TypeError, ValueError):
                raise InputError("is damaged; make the set again, in another directory") from None

    def save(self) -> None:
        """Writes the rows."""
        header = {"format": SET_FORMAT, "version": VERSION, "seed": self.seed, "generator": self.generator}
        rows = [graph.row() for graph in self.graphs]
        content = {"torch": self.torch, "families": self.families, "graphs": rows}
        files.write_json(self.directory / INDEX, header | content)

    def to_document(self) -> dict[str, Any]:
        """Returns the numbers of graphs, structures and rejected draws, and quartiles of the graphs' sizes."""
        rejected: Counter[str] = Counter()
        for graph in self.graphs:
            rejected.update(graph.rejected)
        sizes = ("num_ops", "held_bytes", "forward_bytes", "flops")
        return {
            "directory": str(self.directory),
            "seed": self.seed,
            "generator": self.generator,
            "num_graphs": len(self.graphs),
            "num_structures": len({graph.structure for graph in self.graphs}),
            "num_by_family": dict(Counter(graph.family for graph in self.graphs)),
            "quartiles": {name: _quartiles([getattr(graph, name) for graph in self.graphs]) for name in sizes},
            "rejected": dict(sorted(rejected.items())),
        }


def _quartiles(values: Sequence[int]) -> list[int]:
    """Returns the least value, the three quartiles and the largest value; [] if there are none."""
    ordered = sorted(values)
    return [ordered[round(quarter * (len(ordered) - 1) / 4)] for quarter in range(5)] if ordered else []


def make_set(
    directory: Path,
    count: int,
    *,
    seed: int,
    families: Sequence[str],
    built_ins: "Callable[[], BuiltIns]",
    on_graph: Callable[[int], object] = lambda number: None,
    must_stop: Callable[[], bool] = lambda: False,
) -> GraphSet:
    """Draws graphs 0 to `count` - 1 of `seed` into `directory`, those that are missing; returns what is there.

    `on_graph` is called before each draw. InputError if the directory has a set of another seed, version or families.
    """
    from gdp.policy.training.architectures.draw import VERSION as GENERATOR
    from gdp.policy.training.architectures.draw import draw

    made = GraphSet(directory, seed, GENERATOR, version("torch"), tuple(families))
    before = GraphSet.open(directory) if GraphSet.is_at(directory) else made
    for field in fields(GraphSet)[1:-1]:
        old, new = getattr(before, field.name), getattr(made, field.name)
        if old != new:
            raise InputError(f"{directory}: has graphs of {field.name} {old}, not {new}; name another directory")
    graphs, references = list(takewhile(lambda graph: graph.path.exists(), before.graphs)), None

    def save() -> GraphSet:
        whole = replace(made, graphs=tuple(graphs))
        whole.save()
        return whole

    if not GraphSet.is_at(directory):
        save()
    try:
        for number in range(len(graphs), max(count, len(before.graphs))):
            if must_stop():
                break
            path = _path(directory, number)
            if not path.exists():
                references = references or built_ins()
                on_graph(number)
                _write(path, draw(seed, number, families, references))
            graphs.append(_stored(directory, number, _read(path)["row"]))
            if len(graphs) % _SAVE_EVERY == 0:
                save()
    finally:
        whole = save()
    return whole


def _write(path: Path, drawn: Any) -> None:
    from gdp.policy.training.architectures.draw import forward_bytes
    from gdp.policy.training.architectures.likeness import structure

    graph: Graph = drawn.graph
    row = {
        "name": graph.name,
        "family": drawn.family,
        "num_ops": graph.num_ops,
        "held_bytes": int(graph.resident_bytes.sum()),
        "forward_bytes": forward_bytes(graph),
        "flops": int(graph.flops.sum()),
        "fingerprint": graph.fingerprint,
        "structure": structure(graph),
        "rejected": dict(drawn.rejected),
    }
    files.write_json(path, {"format": GRAPH_FORMAT, "version": VERSION, "row": row, "graph": graph.to_columns()})


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document: Mapping[str, Any] = files.read_json(path)
        with prefixed(path):
            files.require_header(document, GRAPH_FORMAT, VERSION)
            files.require_keys(document, "graph", _FIELDS, set(_FIELDS))
    except InputError as error:
        raise InputError(f"{error}, or {_AGAIN if path.exists() else 'run gdp architectures again'}") from None
    return document


def _stored(directory: Path, number: int, row: Mapping[str, Any]) -> StoredGraph:
    return StoredGraph(_path(directory, number), **row)


def _path(directory: Path, number: int) -> Path:
    return directory / f"graph-{number:06}.json.gz"
