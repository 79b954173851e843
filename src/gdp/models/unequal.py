"""Unequal groups: cards of any kinds that cut the ops of a step, each with a share of heads and columns of its own.

    tensor=5:2:1 of 8 heads of keys and 14,336 columns on a quick card and two slow ones

    heads      5       2       1        whole heads of keys, with the heads of queries that read them
    columns    8,960   3,584   1,792    multiples of 8
    time of an op = the longest of all cards, each with its own part; memory: that of each card against its own

The step of any share lies on the line through those of two equal groups, such as halves and quarters: all sizes of an
op are linear in the share. N ops, M members."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.arrays import I64, Bool
from gdp.cluster import Cluster, Device
from gdp.cluster.groups import fullest
from gdp.costs.op_times import op_times
from gdp.costs.products import PRODUCTS
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.interpolation import have_same_ops, interpolated
from gdp.graph.shapes import parsed_calls
from gdp.models.model import Model
from gdp.models.shards import Shards

if TYPE_CHECKING:
    from gdp.models.source import ModelSource

_DEGREES = (2, 3, 4, 5, 6, 8)  # of equal groups that the line goes through
_COLUMNS = 8  # that a share is a multiple of
_REPEATED = 1 / 64  # of an attention's largest weight: smaller ones, such as norms, are whole on all cards anyway
_ATTENTION = "scaled_dot_product"
_RANKS = re.compile(r"(?<=^collective\.)(\S+ \S+) \d+")


def shared_out(shares: Sequence[int], units: int) -> tuple[int, ...]:
    """Returns how many of `units` each member gets: one at least, and in proportion but for less than one of them.
    InputError where there are fewer than members."""
    if units < len(shares):
        raise InputError(f"{units} heads or columns are fewer than the {len(shares)} shares; take fewer cards")
    counts = [max(units * share // sum(shares), 1) for share in shares]
    while (left := units - sum(counts)) != 0:
        lacks = [units * share / sum(shares) - count for share, count in zip(shares, counts, strict=True)]
        step = 1 if left > 0 else -1
        places = [place for place, count in enumerate(counts) if count + step > 0]
        counts[max(places, key=lambda place: (step * lacks[place], counts[place]))] += step
    return tuple(counts)


@dataclass(frozen=True, eq=False)
class UnequalStep:
    """The step of a model on the cards of a group, from those of one rank of two equal groups."""

    steps: tuple[Model, Model]
    degrees: tuple[int, int]
    num_heads: int  # of keys; 0: no attention
    shards: Shards
    group: Device
    cards: Sequence[Device]  # [M]

    @classmethod
    def of(cls, source: "ModelSource", shards: Shards, cluster: Cluster) -> "UnequalStep":
        """Reads the steps of two equal groups. InputError where the model is not cut alike in any two."""
        group = cluster.grouped(shards.num_ranks, shards.shares).devices[0]
        cards = [cluster.devices[cluster.device_number(name)] for name in group.group]
        known: dict[int, Model | InputError] = {}
        for degrees in combinations(_DEGREES, 2):
            for degree in set(degrees) - set(known):
                try:
                    known[degree] = source.sharded(Shards(degree, sequence=False)).whole()
                except InputError as error:
                    known[degree] = error
            one, other = (known[degree] for degree in degrees)
            if isinstance(one, Model) and isinstance(other, Model) and _are_alike(one.graph, other.graph, degrees):
                heads = [count * degrees[0] for count in _heads(one.graph)] + [source.num_key_heads or 0]
                num_heads = min(filter(None, heads), default=0) if heads[:-1] else 0
                return cls((one, other), degrees, num_heads, shards, group, cards)
        reason = next((each for each in known.values() if isinstance(each, InputError)), "its heads do not divide")
        raise InputError(
            f"{source.text}: {shards} cuts what two sizes of equal groups cut alike, and none do: {reason}"
        )

    @cached_property
    def columns(self) -> int:
        """The columns that are cut: of the layers with the most FLOPs."""
        one, other = (step.graph for step in self.steps)
        counts: Counter[int] = Counter()
        for op in np.flatnonzero(~self._is_by_heads).tolist():
            if one.kinds[op].rpartition(".")[2] in PRODUCTS and one.shapes[op]:
                for a, b in zip(_sizes(one.shapes[op]), _sizes(other.shapes[op]), strict=True):
                    if a != b and a * self.degrees[0] == b * self.degrees[1]:
                        counts[a * self.degrees[0]] += int(one.flops[op])
        return counts.most_common(1)[0][0] if counts else self.num_heads

    @cached_property
    def heads_of(self) -> tuple[int, ...]:
        """The heads of keys [M] of each member; () without attention."""
        return shared_out(self.shards.shares, self.num_heads) if self.num_heads else ()

    @cached_property
    def columns_of(self) -> tuple[int, ...]:
        """The columns [M] of each member."""
        unit = _COLUMNS if self.columns % _COLUMNS == 0 and self.columns >= _COLUMNS * len(self.cards) else 1
        return tuple(unit * count for count in shared_out(self.shards.shares, self.columns // unit))

    @cached_property
    def graphs(self) -> list[Graph]:
        """The step [M] of each member."""
        return [self._graph(member) for member in range(len(self.cards))]

    @cached_property
    def model(self) -> Model:
        """The step of the member whose share fills most of its memory, with the times of the slowest for each op."""
        times_ns = np.max([self._times(*each) for each in zip(self.graphs, self.cards, strict=True)], axis=0)
        tables = tuple(MappingProxyType({self.group.name: time_ns}) for time_ns in times_ns.tolist())
        step = self.steps[0]
        graph = replace(self.graphs[fullest(self.shards.shares, self.cards)], times_ns=tables)
        return replace(step, graph=graph, notes=(*step.notes, self.note))

    @property
    def note(self) -> str:
        """The share that each card has, in a sentence."""
        columns = [f"{count:,}" for count in self.columns_of]
        heads = f"{_listed(self.heads_of)} heads of keys and " if self.num_heads else ""
        held = [f"{graph.resident_bytes.sum() / 2**30:.2f}" for graph in self.graphs]
        names = _listed([f"{card.name} ({card.kind})" for card in self.cards])
        return f"{self.shards}: {names} have {heads}{_listed(columns)} columns, and hold {_listed(held)} GiB"

    @cached_property
    def _is_by_heads(self) -> Bool:
        graph = self.steps[0].graph
        modules = {path for path, kind in zip(graph.modules, graph.kinds, strict=True) if _ATTENTION in kind}
        return np.array([any(f"{path}.".startswith(f"{each}.") for each in modules) for path in graph.modules])

    def _graph(self, member: int) -> Graph:
        whole = [(self.num_heads, self.heads_of), (self.columns, self.columns_of)]
        graphs = [self._of_share(units, counts[member]) for units, counts in whole if units]
        if len(graphs) == 1:
            return graphs[0]
        by_heads, by_columns = graphs
        figures: dict[str, Any] = {
            name: np.where(self._is_by_heads, getattr(by_heads, name), getattr(by_columns, name))
            for name in ("flops", "bytes_accessed", "resident_bytes")
        }
        is_made_by_heads = self._is_by_heads[by_heads.producers]
        figures["tensor_bytes"] = np.where(is_made_by_heads, by_heads.tensor_bytes, by_columns.tensor_bytes)
        texts = zip(self._is_by_heads.tolist(), by_heads.shapes, by_columns.shapes, strict=True)
        return replace(by_columns, **figures, shapes=tuple(a if by_head else b for by_head, a, b in texts))

    def _of_share(self, units: int, count: int) -> Graph:
        """Returns the step of `count` of `units`."""
        (one, other), (low, high) = self.steps, self.degrees
        graph = interpolated(one.graph, units * high, other.graph, units * low, count * low * high)
        ranks = rf"\1 {len(self.cards)}"
        return replace(graph, shapes=tuple(_RANKS.sub(ranks, text) for text in graph.shapes))

    def _times(self, graph: Graph, card: Device) -> I64:
        member = replace(card, name=self.group.name, group=self.group.group, link=self.group.link)
        return np.asarray(op_times(graph, Cluster.build("", [member], {}))[:, 0])


def _are_alike(one: Graph, other: Graph, degrees: tuple[int, int]) -> bool:
    """Returns whether two local programs have the same ops, and the heads of attention in proportion."""
    if not have_same_ops(one, other):
        return False
    heads = [[count * degree for count in _heads(each)] for each, degree in zip((one, other), degrees, strict=True)]
    modules = [path for path, kind in zip(one.modules, one.kinds, strict=True) if _ATTENTION in kind]
    for module in modules[:1]:
        weights = [op for op, path in enumerate(one.modules) if f"{path}.".startswith(f"{module}.")]
        held = one.resident_bytes[weights]
        if (held[held == other.resident_bytes[weights]] > held.max() * _REPEATED).any():
            return False
    return heads[0] == heads[1]


def _heads(graph: Graph) -> list[int]:
    """Returns the heads of keys of each attention."""
    texts = dict.fromkeys(text for text, kind in zip(graph.shapes, graph.kinds, strict=True) if _ATTENTION in kind)
    keys = [parsed_calls(text)[0].arrays[1] for text in texts if text]
    return [key.size[-3] if key.strides[-3] else 1 for key in keys]


def _sizes(text: str) -> list[int]:
    return [size for call in parsed_calls(text) for each in (*call.arrays, *call.results) for size in each.size]


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:-1])) + f" and {items[-1]}"
