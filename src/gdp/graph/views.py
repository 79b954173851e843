"""The ops of a graph as a sequence of records, and the types from which a graph can be had."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Union, overload

from gdp import notebook
from gdp.errors import InputError, suggest

if TYPE_CHECKING:
    from gdp.graph.document import Op
    from gdp.graph.graph import Graph


class HasGraph(Protocol):
    """Something that has the graph of a step: a `Capture`."""

    @property
    def graph(self) -> "Graph": ...


GraphSource = Union["Graph", HasGraph]


class OpView(Sequence["Op"]):
    """The ops of a graph, one record each."""

    def __init__(self, graph: "Graph") -> None:
        self._graph = graph

    def __len__(self) -> int:
        return self._graph.num_ops

    @overload
    def __getitem__(self, key: int | str) -> "Op": ...
    @overload
    def __getitem__(self, key: slice) -> tuple["Op", ...]: ...
    def __getitem__(self, key: int | str | slice) -> "Op | tuple[Op, ...]":
        if isinstance(key, slice):
            return tuple(self._graph.op(number) for number in range(len(self))[key])
        if not isinstance(key, str):
            return self._graph.op(range(len(self))[key])
        if key not in self._graph.op_numbers:
            raise InputError(
                f"graph {self._graph.name!r} has no op {key!r}; {suggest(key, self._graph.op_names, most=8)}"
            )
        return self._graph.op(self._graph.op_numbers[key])

    def __repr__(self) -> str:
        """Returns `<25 ops: 'left.0', 'right.0', 'left.1', ...>`."""
        names = ", ".join(map(repr, self._graph.op_names[:3]))
        return f"<{notebook.count(len(self), 'op')}: {names}{', ...' if len(self) > 3 else ''}>"
