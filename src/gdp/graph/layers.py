"""Finds the layers of a graph in its module paths: numbered parts, and the modules before, between and after them.

embed | blocks.0 | blocks.1 | ... | norm | head
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        """Returns the layers of `graph`.

        A layer is the outermost numbered part of a path (`blocks.3`), if its list has more than one. Any other module
        belongs to the outermost module that holds no layer. Without lists the parts are the outermost modules.
        """
        first = _first_ops(graph)
        layer_of = _numbered_parts(first)
        holding = {""}
        for list_path, _ in layer_of.values():
            holding.update(_enclosing(list_path))
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
                part_of[module] = next((path for path in _enclosing(module) if path not in holding), "")
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
    """Returns (path of the list, number in it) of each module in a list of several layers.

    Numbers at the root (`torch.nn.Sequential`) give way to a longer list inside.
    """
    found = {
        module: [(module[: at.start()].rstrip("."), int(at[1])) for at in _NUMBERED.finditer(module)]
        for module in modules
    }
    sizes: dict[str, set[int]] = {}
    for parts in found.values():
        for list_path, number in parts:
            sizes.setdefault(list_path, set()).add(number)
    longest_inside = max((len(sizes[parts[1][0]]) for parts in found.values() if len(parts) > 1), default=0)
    if longest_inside > len(sizes.get("", ())):
        found = {module: [part for part in parts if part[0]] for module, parts in found.items()}
    return {module: parts[0] for module, parts in found.items() if parts and len(sizes[parts[0][0]]) > 1}


def _enclosing(path: str) -> list[str]:
    """Returns the paths that lead to `path`, outermost first, `path` last."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _holding_all(modules: Iterable[str]) -> set[str]:
    """Returns the root and the modules that hold all others."""
    holding, paths = {""}, [_enclosing(module) for module in modules if module]
    for prefixes in zip(*paths, strict=False):
        if len(set(prefixes)) > 1:
            break
        holding.add(prefixes[0])
    return holding
