"""Draws graphs into a directory to train on: once, in parts if need be.

Graph files are written whole or not at all, and `set.json` names whole ones only. A graph file that it does not name
yet, after a kill, is taken over by the next call, which draws a deleted one again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.architectures.draw import VERSION as GENERATOR
from benchmarks.architectures.draw import DrawnGraph, draw, forward_bytes
from benchmarks.architectures.graph_set import (
    GRAPH_FORMAT,
    INDEX,
    SET_FORMAT,
    VERSION,
    GraphSet,
    graph_path,
    read_stored,
    stored,
)
from benchmarks.architectures.likeness import BuiltIns, structure
from gdp import files
from gdp.errors import InputError

_SAVE_EVERY = 50  # graphs


def make_set(
    directory: Path,
    count: int,
    *,
    seed: int,
    families: Sequence[str],
    built_ins: Callable[[], BuiltIns],
    on_graph: Callable[[int], object] = lambda number: None,
    must_stop: Callable[[], bool] = lambda: False,
) -> GraphSet:
    """Draws graphs 0 to `count` - 1 of `seed` into `directory`, those that are missing; returns what is there.

    `on_graph` is called before each draw. InputError if the directory has a set of another seed, version or families.
    """
    made = GraphSet(directory, seed, GENERATOR, version("torch"), tuple(families))
    before = GraphSet.open(directory) if GraphSet.is_at(directory) else made
    for field in fields(GraphSet)[1:-1]:
        old, new = getattr(before, field.name), getattr(made, field.name)
        if old != new:
            raise InputError(f"{directory}: has graphs of {field.name} {old}, not {new}; name another directory")
    graphs, references = list(takewhile(lambda graph: graph.path.exists(), before.graphs)), None

    def save() -> GraphSet:
        whole = replace(made, graphs=tuple(graphs))
        _save(whole)
        return whole

    if not GraphSet.is_at(directory):
        save()
    try:
        for number in range(len(graphs), max(count, len(before.graphs))):
            if must_stop():
                break
            path = graph_path(directory, number)
            if not path.exists():
                references = references or built_ins()
                on_graph(number)
                _write(path, draw(seed, number, families, references))
            graphs.append(stored(directory, number, read_stored(path)["row"]))
            if len(graphs) % _SAVE_EVERY == 0:
                save()
    finally:
        whole = save()
    return whole


def summary(graphs: GraphSet) -> dict[str, Any]:
    """Returns the numbers of graphs, structures and rejected draws, and quartiles of the graphs' sizes."""
    rejected: Counter[str] = Counter()
    for graph in graphs.graphs:
        rejected.update(graph.rejected)
    sizes = ("num_ops", "held_bytes", "forward_bytes", "flops")
    return {
        "directory": str(graphs.directory),
        "seed": graphs.seed,
        "generator": graphs.generator,
        "num_graphs": len(graphs.graphs),
        "num_structures": len({graph.structure for graph in graphs.graphs}),
        "num_by_family": dict(Counter(graph.family for graph in graphs.graphs)),
        "quartiles": {name: _quartiles([getattr(graph, name) for graph in graphs.graphs]) for name in sizes},
        "rejected": dict(sorted(rejected.items())),
    }


def _save(graphs: GraphSet) -> None:
    header = {"format": SET_FORMAT, "version": VERSION, "seed": graphs.seed, "generator": graphs.generator}
    rows = [graph.row() for graph in graphs.graphs]
    content = {"torch": graphs.torch, "families": graphs.families, "graphs": rows}
    files.write_json(graphs.directory / INDEX, header | content)


def _write(path: Path, drawn: DrawnGraph) -> None:
    graph = drawn.graph
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


def _quartiles(values: Sequence[int]) -> list[int]:
    """Returns the least value, the three quartiles and the largest value; [] if there are none."""
    ordered = sorted(values)
    return [ordered[round(quarter * (len(ordered) - 1) / 4)] for quarter in range(5)] if ordered else []
