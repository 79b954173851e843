"""Layers that module paths show."""

import pytest

from gdp.graph import Graph, Op
from gdp.graph.layers import LayerPaths

_CASES = {
    "two lists": (
        [
            "",
            "embed",
            "encoder.layers.0.mm",
            "encoder.layers.1",
            "encoder.norm",
            "decoder.layers.1.experts.3",
            "decoder.layers.0",
            "head.0",
        ],
        [
            "embed",
            "encoder.layers.0",
            "encoder.layers.1",
            "encoder.norm",
            "decoder.layers.0",
            "decoder.layers.1",
            "head",
        ],
        ["", "encoder.layers", "encoder.layers", "", "decoder.layers", "decoder.layers", ""],
    ),
    "a list in a Sequential": (
        ["0", "1.0", "1.1", "1.2", "1.3.mm", "2"],
        ["0", "1.0", "1.1", "1.2", "1.3", "2"],
        ["", "1", "1", "1", "1", ""],
    ),
    "a Sequential": (["0", "1.0", "2"], ["0", "1", "2"], ["layers"] * 3),
    "no list": (["net", "net.conv", "net.pool.max", "net.head"], ["net.conv", "net.pool", "net.head"], [""] * 3),
    "no modules": (["", ""], [], []),
}


@pytest.mark.parametrize("case", _CASES)
def test_layers(case: str) -> None:
    """Layers are the outermost numbered parts of lists of several, others the outermost modules without layers."""
    modules, names, lists = _CASES[case]
    graph = Graph.build("layers", [Op(f"op{number}", module=module) for number, module in enumerate(modules)], [])
    layers = LayerPaths.of(graph)
    assert (list(layers.names), list(layers.lists)) == (names, lists)
    for module, number in layers.of_module.items():
        assert number == -1 if module in ("", "net") else module.startswith(names[number])


def test_layers_begin_where_they_compute() -> None:
    """Parameters stand first in a graph; the order of layers is that of their first op that computes."""
    kinds = {"late.weight": "parameter", "early.mm": "mm", "late.mm": "mm"}
    graph = Graph.build("order", [Op(name, kind, module=name.split(".")[0]) for name, kind in kinds.items()], [])
    assert list(LayerPaths.of(graph).names) == ["early", "late"]
