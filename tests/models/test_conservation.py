"""Local programs of published models: T ranks together do the work of the whole one, and exchange what arithmetic says.

A layer sums up activations twice forward, after attention and after the MLP, and its input's gradients twice backward;
the embedding sums up once forward, the head once backward. Cut tokens: a scatter and a gather in place of each sum.
"""

import re
from functools import cache

import pytest

from gdp.graph import Graph
from gdp.models.model import Model, Reading
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from tests.models.published_models import BATCH, TOKENS
from tests.models.test_shards import exchanges, product_flops

LAYERS = 2
WIDTHS = {"llama_7b": 4096, "llama_8b": 4096, "llama_70b": 8192, "qwen3_8b": 4096, "phi3_mini": 3072}
WIDTHS |= {"mixtral": 4096, "gpt2_medium": 1024}
OTHERS = ("qwen3_30b", "deepseek_v3", "bert_large", "t5_large", "vit_large", "dit_xl")
ALL = [(name, tensor) for name in (*WIDTHS, *OTHERS) for tensor in (2, 4, 8)]
QUICK = ("llama_70b", 8), ("phi3_mini", 2)
CASES = [pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.long]) for each in ALL]


@cache
def source(name: str) -> ModelSource:
    return ModelSource(f"tests.models.published_models:{name}", Reading(training=True))


@cache
def whole(name: str) -> Graph:
    return source(name).part(1).graph


@cache
def local(name: str, tensor: int, *, sequence: bool, expert: int = 1) -> Model:
    return source(name).sharded(Shards(tensor, sequence, expert)).part(1)


def weights(graph: Graph) -> int:
    return int(graph.resident_bytes[[kind == "parameter" for kind in graph.kinds]].sum())


def most_repeated(model: Model, tensor: int) -> float:
    """Returns the part of the products that may be repeated: 0.1 %, and what a note names."""
    named = [re.search(r"leaves ([\d.]+)% of the FLOPs whole on each card", note) for note in model.notes]
    return 0.001 + sum(float(match[1]) for match in named if match) / 100 * (tensor - 1) * 1.01


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_work_is_shared(name: str, tensor: int, sequence: bool) -> None:
    """The products of all ranks are those of the whole model within 0.1 %, but for repetition that is named."""
    model = local(name, tensor, sequence=sequence)
    repeated = tensor * product_flops(model.graph) / product_flops(whole(name)) - 1
    assert -0.001 < repeated < most_repeated(model, tensor) < 0.15


@pytest.mark.parametrize(("name", "tensor"), [each for each in CASES if each.values[0] in WIDTHS])
def test_weights_are_shared(name: str, tensor: int) -> None:
    """A rank holds its part of all weights but norms, biases of rows and routers: 0.2 % more on eight ranks."""
    repeated = tensor * weights(local(name, tensor, sequence=False).graph) / weights(whole(name)) - 1
    assert 0 < repeated < 0.0003 * (tensor - 1)


@pytest.mark.parametrize(("name", "tensor"), [each for each in CASES if each.values[0] in WIDTHS])
def test_sums_of_activations(name: str, tensor: int) -> None:
    """There are two sums for each layer and direction, and one for the embedding or the head; tokens cut, as many
    scatters and gathers."""
    num_bytes = 2 * BATCH * TOKENS * WIDTHS[name]  # of bfloat16
    sums = exchanges(local(name, tensor, sequence=False).graph, num_bytes)
    count = 2 * LAYERS + 1
    assert sums == {("forward", "all_reduce"): count, ("backward", "all_reduce"): count}
    cut = exchanges(local(name, tensor, sequence=True).graph, num_bytes)
    kinds = ("reduce_scatter", "all_gather")
    assert cut == {(phase, kind): count for phase in ("forward", "backward") for kind in kinds}


@pytest.mark.long
@pytest.mark.parametrize(("tensor", "expert"), [(2, 2), (4, 4), (8, 8), (4, 2), (8, 2)])
@pytest.mark.parametrize(
    ("name", "width", "per_token", "layers"),
    [("mixtral", 4096, 2, 2), ("qwen3_30b", 2048, 8, 2), ("deepseek_v3", 7168, 8, 1)],
)
def test_parts_of_experts(name: str, width: int, per_token: int, layers: int, tensor: int, expert: int) -> None:
    """Rows of 1 / T of the tokens go to their experts and back in each direction, and products are shared. Ranks with
    the same experts gather rows, and scatter sums."""
    model = local(name, tensor, sequence=True, expert=expert)
    num_bytes = 2 * BATCH * TOKENS * per_token // tensor * width
    counts = exchanges(model.graph, num_bytes)
    assert counts["forward", "all_to_all"] == counts["backward", "all_to_all"] == 2 * layers
    summed = f"collective.reduce_scatter bfloat16[{num_bytes // 2 // width * tensor // expert},{width}] "
    assert sum(summed in shapes for shapes in model.graph.shapes) == (0 if expert == tensor else 2 * layers)
    is_rows = [kind == "collective.all_to_all" for kind in model.graph.kinds]
    assert max(model.graph.bytes_accessed[is_rows]) == num_bytes
    repeated = tensor * product_flops(model.graph) / product_flops(whole(name)) - 1
    assert -0.001 < repeated < most_repeated(model, tensor) < 0.15
