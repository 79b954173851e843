"""Finds the layers of a graph in its module paths: numbered parts, and the modules before, between and after them.

    embed | blocks.0 | blocks.1 | ... | norm | head

A model may run its layers several times in a step, as a recurrent net does at each time step:

    layers.0   call 0    call 1    call 2      the n-th `aten.mm` of a module belongs to the n-th call, if each has one
    layers.1   call 0    call 1    call 2"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64, Bool, mask
from gdp.graph.fingerprint import numbered
from gdp.graph.graph import Graph

_SOURCES = ("parameter", "buffer", "constant", "input")  # they stand first in a graph, whichever layer reads them
_NUMBERED = re.compile(r"(?:^|(?<=\.))([0-9]{1,9})(?=\.|$)")


@dataclass(frozen=True, eq=False)
class LayerPaths:
    """Holds the parts of a model in the order in which they first run; empty without modules."""

    names: Sequence[str]  # [L] module paths
    lists: Sequence[str]  # [L] the path of the list that a part is a numbered layer of; "" if it is none
    of_module: dict[str, int]  # number of the part of each module path, -1 outside all parts

    @classmethod
    def of(cls, graph: Graph) -> "LayerPaths":
        """Returns the layers of `graph`. A layer is the outermost numbered part of a path (`blocks.3`), if its list has
        more than one. Others belong to the outermost one that holds no layer. Without lists these are the parts."""
        first = _first_ops(graph)
        layer_of = _numbered_parts(first)
        holding = {""}
        for list_path, _ in layer_of.values():
            holding.update(enclosing(list_path))
        if not layer_of:
            holding = _holding_all(first)
        part_of: dict[str, str] = {}
        list_of: dict[str, str] = {}
        for module in first:
            if module in layer_of:
                list_path, number = layer_of[module]
                part_of[module] = f"{list_path}.{number}".lstrip(".")
                list_of[part_of[module]] = list_path or "layers"
            else:
                part_of[module] = next((path for path in enclosing(module) if path not in holding), "")
        entered: dict[tuple[str, str], int] = {}  # of a list, which stays together, or of a part in none
        for module, part in part_of.items():
            key = (list_of[part], "") if part in list_of else ("", part)
            entered[key] = min(first[module], entered.get(key, graph.num_ops))

        def position(part: str) -> tuple[int, int]:
            if part in list_of:
                return entered[list_of[part], ""], int(part.rpartition(".")[2])
            return entered["", part], 0

        names = sorted({part for part in part_of.values() if part}, key=position)
        numbers = {name: number for number, name in enumerate(names)}
        lists = [list_of.get(name, "") for name in names]
        return cls(names, lists, {module: numbers.get(part, -1) for module, part in part_of.items()})


def _first_ops(graph: Graph) -> dict[str, int]:
    """Returns the first op of each module path that computes, else its first op at all."""
    computing: dict[str, int] = {}
    first: dict[str, int] = {}
    for op, (module, kind) in enumerate(zip(graph.modules, graph.kinds, strict=True)):
        first.setdefault(module, op)
        if kind not in _SOURCES:
            computing.setdefault(module, op)
    return {module: computing.get(module, op) for module, op in first.items()}


def _numbered_parts(modules: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Returns (path of the list, number in it) of each module in a list of several layers. Numbers at the root
    (`torch.nn.Sequential`) give way to a longer list inside."""
    found = {x: [(x[: at.start()].rstrip("."), int(at[1])) for at in _NUMBERED.finditer(x)] for x in modules}
    sizes: dict[str, set[int]] = {}
    for parts in found.values():
        for list_path, number in parts:
            sizes.setdefault(list_path, set()).add(number)
    longest_inside = max((len(sizes[parts[1][0]]) for parts in found.values() if len(parts) > 1), default=0)
    if longest_inside > len(sizes.get("", ())):
        found = {module: [part for part in parts if part[0]] for module, parts in found.items()}
    return {module: parts[0] for module, parts in found.items() if parts and len(sizes[parts[0][0]]) > 1}


def enclosing(path: str) -> list[str]:
    """Returns the paths that lead to `path`, outermost first: `a`, `a.b`, `a.b.c` of `a.b.c`; none for the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _holding_all(modules: Iterable[str]) -> set[str]:
    """Returns the root and the modules that hold all others."""
    holding, paths = {""}, [enclosing(module) for module in modules if module]
    for prefixes in zip(*paths, strict=False):
        if len(set(prefixes)) > 1:
            break
        holding.add(prefixes[0])
    return holding


NO_CALL = -1  # of what all calls share, and of what no call tells
_CALLED_SHARE = 0.5  # of the ops of the forward pass: what is called several times must have at least
_FEWEST = 4  # ops of a kind in a module whose calls are not all alike
_SWEEPS = 4  # ops between an op without a call of its own and one that has one


def calls_of(graph: Graph) -> I64 | None:
    """Returns the call [N] that each op belongs to, from 0, or `NO_CALL`; None where layers are called once. A backward
    op belongs to the latest call whose results it uses, or else to that of the op that it follows."""
    is_late = graph.is_in_phase("backward") | graph.is_in_phase("update")
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    has_input = mask(targets, graph.num_ops)
    ops = np.flatnonzero(has_input & ~is_late)
    if not any(graph.modules) or not len(ops):
        return None
    call = np.full(graph.num_ops, NO_CALL)
    call[ops] = _in_turn(numbered(graph.modules)[1][ops], numbered(graph.kinds)[1][ops])
    if (call[ops] != NO_CALL).mean() < _CALLED_SHARE:
        return None
    is_forward = mask(ops, graph.num_ops)
    for _ in range(_SWEEPS):
        _take_over(call, sources, targets, is_forward[sources] & is_forward[targets])
    is_backward = graph.is_in_phase("backward")
    _take_over(call, sources, targets, is_forward[sources] & is_backward[targets])
    for _ in range(_SWEEPS):
        _take_over(call, sources, targets, is_backward[sources] & is_backward[targets])
    return call


def _in_turn(modules: I64, kinds: I64) -> I64:
    """Returns the call of each op, of ops in turn; `NO_CALL` in modules that are called once. Most modules tell how
    often the model calls its layers. Others are called more often, or not at the first step; and of what the model does
    between its layers, kinds of ops that come as often, or a multiple of that, belong to calls."""
    keys, index, counts = np.unique(modules * (kinds.max() + 1) + kinds, return_inverse=True, return_counts=True)
    first = np.flatnonzero(np.diff(keys // (kinds.max() + 1), prepend=-1))  # key of each module
    common, fewest = np.gcd.reduceat(counts, first), np.minimum.reduceat(counts, first)
    of_module = np.where((common == 1) & (fewest >= _FEWEST), fewest, common)
    calls_of_key = np.repeat(of_module, np.diff(np.append(first, len(keys))))
    if not (calls_of_key > 1).any():
        return np.full(len(index), NO_CALL)
    most = int(np.bincount(calls_of_key * (calls_of_key > 1), counts)[1:].argmax()) + 1
    is_called = (calls_of_key > 1) | (counts % most == 0)
    order = np.argsort(index, kind="stable")
    rank = np.empty(len(index), np.int64)
    rank[order] = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.where(is_called[index], rank * most // counts[index], NO_CALL)


def _take_over(call: I64, sources: I64, targets: I64, may: Bool) -> None:
    """Gives ops without a call the latest of what they use, over the edges that `may` [E]."""
    chosen = may & (call[targets] == NO_CALL) & (call[sources] != NO_CALL)
    np.maximum.at(call, targets[chosen], call[sources[chosen]])
