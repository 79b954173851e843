"""Context parallelism: tokens of one sequence over ranks that have whole weights each."""

from functools import cache

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.costs.collectives import AlikeCards
from gdp.costs.op_times import op_times
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.model import Model, Reading
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from tests.models.shard_cases import TOKENS, VOCABULARY, case
from tests.models.test_conservation import weights
from tests.models.test_shards import ACTIVATION, captured, exchanges, product_flops

NAMES = ("llama", "gpt2", "bert", "qwen3moe", "deepseek", "diffusion", "checkpointed")
QUICK = ("gpt2", "qwen3moe")  # plain heads and tied weights; heads of keys fewer than ranks, and experts
CASES = [(name, Shards(context=2)) for name in NAMES]
CASES += [
    pytest.param(name, shards, marks=[] if name in QUICK else [pytest.mark.long])
    for name in NAMES
    for shards in (Shards(context=4), Shards(2, context=2))
]


@cache
def on_ranks(name: str, shards: Shards, training: bool = True) -> Model:
    model, inputs = case(name)
    if not training:
        del inputs["labels"]
    return ModelSource.of_example((model, (), inputs), Reading(training=training)).sharded(shards).part(1)


def gathered_bytes(graph: Graph, phase: str, kind: str) -> int:
    is_kind = [key == (phase, f"collective.{kind}") for key in zip(graph.phases, graph.kinds, strict=True)]
    return int(graph.bytes_accessed[is_kind].sum())


@pytest.mark.parametrize(("name", "shards"), CASES, ids=str)
def test_products_are_shared(name: str, shards: Shards) -> None:
    """All ranks together compute the products of the whole model, also where tensor ranks cut parts of tokens again."""
    whole, local = captured(name), on_ranks(name, shards)
    repeated = shards.num_ranks * product_flops(local.graph) / product_flops(whole.graph) - 1
    noted = any("of the FLOPs whole on each card" in note for note in local.notes)
    assert -0.001 < repeated < (0.25 if noted else 0.001)
    assert dict(local.unknown_costs) == dict(whole.unknown_costs)


def test_keys_and_values_are_exchanged() -> None:
    """Keys and values are gathered in each direction, their gradients scattered, those of weights summed up once."""
    graph = on_ranks("gpt2", Shards(context=2)).graph
    num_bytes = 2 * 2 * ACTIVATION  # keys and values of two layers
    assert gathered_bytes(graph, "forward", "all_gather") == num_bytes
    assert gathered_bytes(graph, "backward", "all_gather") == num_bytes
    assert gathered_bytes(graph, "backward", "reduce_scatter") == num_bytes
    assert gathered_bytes(graph, "forward", "all_reduce") == 4  # the loss
    # a gradient each, one for the table that is embedding and head; a parameter lies beside two of Adam's
    assert 3 * gathered_bytes(graph, "backward", "all_reduce") == weights(graph)
    assert weights(graph) == weights(captured("gpt2").graph)


def test_keys_are_exchanged_before_they_are_repeated() -> None:
    """Behind a mask as well, the two heads of keys that four heads of queries read are gathered once each."""
    graph = on_ranks("mistral", Shards(context=2)).graph
    assert not any("fused_attention" in kind for kind in graph.kinds)
    assert gathered_bytes(graph, "forward", "all_gather") == 2 * 2 * ACTIVATION // 2  # of two layers


def test_causal_attention_is_shared() -> None:
    """Ranks have equal parts of causal attention: its FLOPs and time are those of half of all pairs, by a half each."""
    whole, local = captured("gpt2").graph, on_ranks("gpt2", Shards(context=2)).graph
    flops = [int(graph.flops[["attention" in kind for kind in graph.kinds]].sum()) for graph in (whole, local)]
    assert flops[0] == 2 * flops[1]


def test_results_stay_cut() -> None:
    """Without a loss each rank has the scores of its tokens; nothing else is exchanged than keys and values."""
    graph = on_ranks("gpt2", Shards(context=2), training=False).graph
    assert exchanges(graph) == {("forward", "all_gather"): 4}
    results = graph.tensor_bytes[graph.is_kept & ~graph.is_resident]
    assert 4 * 2 * TOKENS // 2 * (VOCABULARY + 2) in results.tolist()


def test_parts_of_groups_exchange() -> None:
    """On a group of four cards two tensor ranks exchange, and two ranks of the sequence: as two cards each do."""
    graph = on_ranks("gpt2", Shards(2, context=2)).graph
    group = Cluster.parse("4xa100-sxm-80g").grouped(4)
    is_exchange = np.array([kind.startswith("collective.") for kind in graph.kinds])
    times_ns = op_times(graph, group)[is_exchange, 0]
    pair = AlikeCards.of_group(group.devices[0], 2)
    expected = [
        pair.time_ns(kind.removeprefix("collective."), int(num_bytes))
        for kind, num_bytes in zip(graph.kinds, graph.bytes_accessed, strict=True)
        if kind.startswith("collective.")
    ]
    assert times_ns.tolist() == expected


def test_tokens_that_ranks_do_not_divide() -> None:
    """What reads all tokens is repeated by each rank: models that mostly do so are refused in one line."""
    with pytest.raises(InputError, match=r"context=3 would repeat 100\.0% of the FLOPs on each card"):
        on_ranks("llama", Shards(context=3))
