"""Unequal groups: shares, the steps of members, and the group's times and memory."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gdp.cluster import Cluster
from gdp.costs.op_times import op_times, ranks_of
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.model import Reading
from gdp.models.shards import Shards, in_shares
from gdp.models.source import ModelSource
from gdp.models.unequal import UnequalStep, shared_out
from gdp.parallel.layout import Layout
from gdp.search.place import place
from tests.models.shard_cases import case

CARDS = Cluster.parse("rtx4090-24g+2xl4-24g+cpu-16core")


@cache
def source(name: str = "heads") -> ModelSource:
    """Two layers of Llama with 8 heads and 128 columns; of "llama" 2 heads of keys, which four ranks repeat."""
    if name == "llama":
        model, inputs = case(name)
        inputs.pop("labels")
        return ModelSource.of_example((model, (), inputs), Reading(training=False))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, vocab_size=256, use_cache=False)
    tokens = torch.arange(16).reshape(2, 8)
    return ModelSource.of_example((LlamaForCausalLM(config), (tokens,)), Reading(training=False))


@cache
def on_equal(degree: int) -> Graph:
    return source().sharded(Shards(degree)).part(1).graph


@cache
def unequal(*shares: int, cluster: Cluster = CARDS) -> UnequalStep:
    return UnequalStep.of(source(), Shards(len(shares), shares=shares), cluster)


def test_shares_are_in_lowest_terms() -> None:
    """Ratios are divided by what they have in common, and equal ones are those of an equal group."""
    assert in_shares(4, 2, 2) == (3, (2, 1, 1))
    assert in_shares(3, 3) == (2, ())
    assert in_shares(4) == (4, ())
    assert str(Layout.parse("tensor=4:2:2")) == "tensor=2:1:1"
    assert Layout.parse("tensor=1:1") == Layout.parse("tensor=2")
    layout = Layout.parse("tp=3:1")
    assert Layout.of_document(layout.document()) == layout


@pytest.mark.parametrize(
    ("shares", "units", "counts"),
    [
        ((2, 1, 1), 8, (4, 2, 2)),
        ((5, 1, 1), 8, (6, 1, 1)),  # 5.7, 1.14 and 1.14: the first lacks most
        ((3, 2), 4, (2, 2)),  # 2.4 and 1.6
        ((100, 1), 4, (3, 1)),  # each has one at least
        ((10, 1, 1), 4, (2, 1, 1)),  # though 3.33 is more than half of the way to 4
        ((1, 2, 1), 1792, (448, 896, 448)),
    ],
)
def test_units_are_shared_out_whole(shares: tuple[int, ...], units: int, counts: tuple[int, ...]) -> None:
    """Counts are within one of the ratios, at least one each, and sum to the whole."""
    assert shared_out(shares, units) == counts
    assert sum(counts) == units


def test_parts_of_members_sum_to_the_whole() -> None:
    """Products, weights and heads of shares 2:1:1 are those of the model that is not cut."""
    whole, step = source().part(1).graph, unequal(2, 1, 1)
    assert (step.heads_of, step.columns_of) == ((4, 2, 2), (64, 32, 32))
    is_product = np.array([kind.endswith(("mm", "for_cpu")) for kind in step.graphs[0].kinds])
    own = [graph.flops[is_product].sum() for graph in step.graphs]
    ends = [kind.endswith(("mm", "for_cpu")) for kind in whole.kinds]
    assert sum(own) == pytest.approx(int(whole.flops[ends].sum()), rel=1e-3)
    assert own[0] == pytest.approx(2 * own[1], rel=1e-3)
    assert own[1] == own[2]
    held = [int(graph.resident_bytes.sum()) for graph in step.graphs]
    half, quarter = (int(on_equal(degree).resident_bytes.sum()) for degree in (2, 4))
    assert held == [half, quarter, quarter]  # half and two quarters, norms whole in each
    assert {int(n) for n in ranks_of(step.model.graph)} == {0, 3}


def test_the_share_of_an_equal_group_is_its_step() -> None:
    """Of shares 2:1:1 the halves and quarters have each size of the groups of two and of four, and nothing else."""
    step = unequal(2, 1, 1)
    for graph, degree in zip(step.graphs, (2, 4, 4), strict=True):
        other = on_equal(degree)
        for name in ("flops", "bytes_accessed", "resident_bytes", "tensor_bytes"):
            assert np.array_equal(getattr(graph, name), getattr(other, name)), name
        texts = zip(graph.shapes, other.shapes, other.kinds, strict=True)
        assert all(own == there for own, there, kind in texts if not kind.startswith("collective."))


def test_the_time_of_an_op_is_the_longest_of_all_members() -> None:
    """On each op the group takes what the slowest takes with its part; on equal cards that is the largest share's."""
    step = unequal(2, 1, 1, cluster=Cluster.parse("3xl4-24g"))
    (group,) = Cluster.parse("3xl4-24g").grouped(3, (2, 1, 1)).devices
    one = Cluster.build("one", [group], {})
    times = op_times(step.model.graph, one)[:, 0]
    largest = op_times(step.graphs[0], one)[:, 0]
    assert np.array_equal(times, largest)
    mixed = unequal(2, 1, 1)
    on_group = op_times(mixed.model.graph, CARDS.grouped(3, (2, 1, 1)))[:, 0]
    is_plain = ranks_of(mixed.model.graph) == 0
    alone = [
        op_times(graph, Cluster.build("card", [card], {}))[:, 0]
        for graph, card in zip(mixed.graphs, mixed.cards, strict=True)
    ]
    assert np.array_equal(on_group[is_plain], np.max(alone, axis=0)[is_plain])


def test_a_plan_on_unequal_cards_has_the_sum_of_the_longest_times() -> None:
    """Ops of one group run one after the other, and `tensor=1:1` is `tensor=2` to the ns."""
    options = {"budget": "20sims", "num_threads": 1}
    plan = place(source(), CARDS, parallel="tensor=2:1:1", **options)
    step = unequal(2, 1, 1)
    assert plan.devices == ("gpu0-2",)
    assert plan.shards.shares == (2, 1, 1)
    assert plan.step_time_ns >= sum(table["gpu0-2"] for table in step.model.graph.times_ns)
    equal = [place(source(), "2xl4-24g", parallel=text, **options) for text in ("tensor=1:1", "tensor=2")]
    assert equal[0].step_time_ns == equal[1].step_time_ns


@pytest.mark.parametrize(
    ("name", "shares", "devices", "problem"),
    [
        ("heads", (2, 1, 1), "2xl4-24g", "a group of 3: '2xl4-24g' has no 3 cards of a host; give fewer shares"),
        ("heads", (2, *[1] * 8), "9xl4-24g", "8 heads or columns are fewer than the 9 shares; take fewer cards"),
        ("llama", (2, 1), "2xl4-24g", "cuts what two sizes of equal groups cut alike, and none do"),  # two KV heads
    ],
)
def test_shares_that_cannot_be_are_refused(name: str, shares: tuple[int, ...], devices: str, problem: str) -> None:
    """One line says what there is too little of."""
    with pytest.raises(InputError, match=problem) as error:
        _ = UnequalStep.of(source(name), Shards(len(shares), shares=shares), Cluster.parse(devices)).model
    assert "\n" not in str(error.value)


def test_each_member_keeps_its_own_limit() -> None:
    """A member whose part is larger than its limit is named, whichever is the fullest."""
    with pytest.raises(InputError, match=r"gpu2 \(l4-24g\) takes .* GiB with its share, of 0.00 GiB; give it"):
        place(source(), CARDS, parallel="tensor=2:1:1", budget="20sims", max_memory={"gpu2": 1000})


@pytest.mark.parametrize("text", ["tensor=2:1,data=2", "tensor=2:1,sequence=on", "tensor=2:1,ep=2", "tensor=2:0"])
def test_shares_go_with_no_other_key(text: str) -> None:
    """Unequal groups run whole steps, without tokens or experts cut."""
    with pytest.raises(InputError, match=r"^--parallel: tensor="):
        Layout.parse(text)


def test_columns_are_multiples_of_eight_and_fit_the_ratios() -> None:
    """5:2:1 of 8 heads and 128 columns; 10:3:3 of them by hand: 80, 24 and 24 columns, and 5, 2 and 1 heads."""
    assert (unequal(5, 2, 1).heads_of, unequal(5, 2, 1).columns_of) == ((5, 2, 1), (80, 32, 16))
    # 8 x 10/16 = 5, 8 x 3/16 = 1.5 twice: the first of equal ones has the head; 16 x 3/16 = 3 eights of columns
    assert (unequal(10, 3, 3).heads_of, unequal(10, 3, 3).columns_of) == ((5, 2, 1), (80, 24, 24))
