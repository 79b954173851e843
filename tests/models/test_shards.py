"""Local programs: what a rank computes, holds and exchanges, against the whole model."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import accumulated
from gdp.graph.shapes import parsed_calls
from gdp.models.lora import Lora
from gdp.models.model import Model, Reading
from gdp.models.pytorch.capture_step import StepOptions, capture_step
from gdp.models.pytorch.shards import plan
from gdp.models.pytorch.shards.experts import expert_weights
from gdp.models.pytorch.shards.plan import pattern_of
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from tests.models.shard_cases import BATCH, TOKENS, VOCABULARY, WIDTH, Block, case

PAIRED = ("llama", "tied", "qwen3", "phi3", "olmo2", "neox", "gpt2", "bert", "vit", "t5", "encoder", "blocks")
HEADS_ALIKE = ("bloom", "opt", "bigcode", "gemma", "phi3-gqa")  # fused, one of keys, or fewer of keys than ranks
NAMES = (*PAIRED, *HEADS_ALIKE, "diffusion")
LIKE_LLAMA = ("llama", "olmo2", "qwen3", "qwen3moe")  # projections are cut as in one of the others
MIXTURES = ("mixtral", "qwen3moe", "deepseek", "gptoss")
PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward")
ACTIVATION = 4 * BATCH * TOKENS * WIDTH  # bytes of float32 between blocks


@cache
def captured(name: str, tensor: int = 1, training: bool = True, sequence: bool = False, expert: int = 1) -> Model:
    model, inputs = case(name)
    if not training:
        del inputs["labels"]
    source = ModelSource.of_example((model, (), inputs), Reading(training=training))
    return (source if tensor == expert == 1 else source.sharded(Shards(tensor, sequence, expert))).part(1)


def product_flops(graph: Graph) -> int:
    is_product = [kind.rpartition(".")[2] in PRODUCTS or "attention" in kind for kind in graph.kinds]
    return int(graph.flops[is_product].sum())


def exchanges(graph: Graph, least_bytes: int = 0) -> Counter[tuple[str, str]]:
    """Returns the number of exchanges of at least these bytes, by phase and kind."""
    return Counter(
        (phase, kind.removeprefix("collective."))
        for phase, kind, num_bytes in zip(graph.phases, graph.kinds, graph.bytes_accessed, strict=True)
        if kind.startswith("collective.") and num_bytes >= least_bytes
    )


def test_slices_of_a_fused_layer() -> None:
    """Queries, keys and values that are sliced off one product are cut each: a layer has two sums and no gather."""
    assert exchanges(captured("phi3", 2, training=False).graph) == {
        ("forward", "all_reduce"): 5,
        ("forward", "all_gather"): 1,
    }


def test_tokens_that_ranks_do_not_divide_are_told() -> None:
    """A class token beside patches leaves an odd number, whole on both ranks; a decoder has none."""
    assert any("2 ranks do not divide" in note for note in captured("vit", 2, sequence=True).notes)
    assert not any("do not divide" in note for note in captured("llama", 2, sequence=True).notes)


@pytest.mark.parametrize("name", [*NAMES, *MIXTURES, "checkpointed"])
def test_products_are_shared(name: str) -> None:
    """Two ranks together compute the products of the whole model, but for small weights that stay whole."""
    whole, local = captured(name), captured(name, 2)
    repeated = 2 * product_flops(local.graph) / product_flops(whole.graph) - 1
    noted = any("tensor=2 leaves" in note for note in local.notes)
    assert -0.001 < repeated < (0.05 if noted else 0.001)  # biases are added after sums, not in the products
    assert dict(local.unknown_costs) == dict(whole.unknown_costs)


@pytest.mark.parametrize(
    "name",
    ["phi3", "neox", "mixtral", "deepseek", *(pytest.param(name, marks=pytest.mark.long) for name in LIKE_LLAMA)],
)
def test_plan_is_that_of_transformers(name: str) -> None:
    """Each weight that the plan of a configuration cuts is cut here, by columns or by rows as there."""
    model, inputs = case(name)
    cuts = capture_step(model, (), inputs, StepOptions(training=False, shards=Shards(2))).cuts
    dims = {pattern_of(path).removesuffix(".weight"): cut.dim - len(cut.shape) for path, cut in cuts.items()}
    sides = {"colwise": -2, "rowwise": -1}
    styles = [(path, style.removeprefix("packed_")[:7]) for path, style in model.tp_plan.items()]
    present = {pattern_of(path).removesuffix(".weight") for path, _ in model.named_parameters()}
    expected = {path: sides[style] for path, style in styles if style in sides and path in present}
    assert expected.items() <= dims.items()
    assert len(expected) > 3


def test_layer_has_two_exchanges_in_each_direction() -> None:
    """A Llama of two layers sums up activations once for attention and once for the MLP, forward and backward."""
    # forward also the embedding, backward also the head: 2 * 2 + 1
    graph = captured("llama", 2).graph
    assert exchanges(graph, ACTIVATION) == {("forward", "all_reduce"): 5, ("backward", "all_reduce"): 5}
    activations = [graph.shapes[op] for op in np.flatnonzero(graph.bytes_accessed == ACTIVATION)]
    assert "collective.all_reduce float32[2,8,64] 2 > float32[2,8,64]" in activations


def test_spellings_take_no_more_exchanges() -> None:
    """Attention by views of weights, the module of PyTorch with averaged weights that nobody reads, and letters for all
    other dimensions take one sum each, in two layers; scores of [samples, classes, tokens] are not gathered."""
    sums = {("forward", "all_reduce"): 6, ("backward", "all_reduce"): 6}
    assert exchanges(captured("spelled", 2).graph, ACTIVATION) == sums
    assert not exchanges(captured("tagged", 2).graph, 4 * BATCH * TOKENS * VOCABULARY)


def test_tokens_are_cut_between_blocks() -> None:
    """With sequence parallelism each sum is a reduce-scatter, and an all-gather goes before the next layer."""
    graph = captured("llama", 2, sequence=True).graph
    # backward of a gather is a reduce-scatter, that of a reduce-scatter a gather
    pairs = {("forward", "reduce_scatter"): 5, ("forward", "all_gather"): 5}
    pairs |= {("backward", "reduce_scatter"): 5, ("backward", "all_gather"): 5}
    assert exchanges(graph, ACTIVATION) == pairs


def test_gradients_of_whole_weights_are_summed_once() -> None:
    """Micro-batches add up the gradients of norms, which ranks sum then, as Megatron-LM does; all else is in each."""
    one = captured("llama", 2, sequence=True).graph
    is_sum = [
        kind == "collective.all_reduce" and phase == "backward"
        for kind, phase in zip(one.kinds, one.phases, strict=True)
    ]
    is_update = one.is_in_phase("update")
    of_weights = sum(
        is_update[one.consumers_of(int(np.flatnonzero(one.producers == op)[0]))].all() for op in np.flatnonzero(is_sum)
    )
    assert of_weights == 5  # two norms a layer, and the last one
    found, four = exchanges(one), exchanges(accumulated(one, 4))
    assert four == {
        key: 4 * count - 3 * of_weights * (key == ("backward", "all_reduce")) for key, count in found.items()
    }


def test_rows_go_to_their_experts() -> None:
    """With whole experts each rank sends its tokens' rows to the ranks of their experts, and gets as many back."""
    local = captured("qwen3moe", 2, sequence=True, expert=2)
    rows = BATCH * TOKENS * 2 // 2  # two experts of each token, half of the tokens: 16
    num_bytes = 2 * rows * WIDTH  # of bfloat16, there and back in two layers
    assert exchanges(local.graph, num_bytes)["forward", "all_to_all"] == 4
    assert exchanges(local.graph, num_bytes)["backward", "all_to_all"] == 4
    calls = [call for shapes in local.graph.shapes for call in parsed_calls(shapes) if call.kind == "aten._grouped_mm"]
    assert [array.size for array in calls[0].arrays][:2] == [(rows, WIDTH), (2, WIDTH, 64)]
    assert "expert=2: each rank gets equally many rows (balanced routing is assumed)" in local.notes
    repeated = 2 * product_flops(local.graph) / product_flops(captured("qwen3moe").graph) - 1
    assert abs(repeated) < 0.001


def test_rows_go_to_columns_of_their_experts() -> None:
    """Two of four ranks have the same experts: they gather the rows that both got, and scatter sums before these go
    back."""
    local = captured("qwen3moe", 4, sequence=True, expert=2)
    num_bytes = 2 * BATCH * TOKENS * 2 // 4 * WIDTH  # of bfloat16: two experts of each token, a quarter of the tokens
    counts = exchanges(local.graph, num_bytes)
    for phase, calls in (("forward", 4), ("backward", 4)):  # there and back in two layers
        assert counts[phase, "all_to_all"] == calls
    calls = [call for shapes in local.graph.shapes for call in parsed_calls(shapes)]
    products = [call.arrays for call in calls if call.kind == "aten._grouped_mm"]
    rows = 2 * BATCH * TOKENS * 2 // 4  # of both ranks: 16
    assert [array.size for array in products[0]][:2] == [(rows, WIDTH), (2, WIDTH, 64 // 2)]
    sums = [call for call in calls if call.kind == "collective.reduce_scatter" and call.arrays[0].size == (rows, WIDTH)]
    assert len(sums) == 4  # of results, and of gradients of what was gathered, in two layers
    assert {call.arguments[1:] for call in calls if call.kind == "collective.all_to_all"} == {(2, 2)}  # two ranks apart
    whole_experts = captured("qwen3moe", 4, sequence=True, expert=4).graph
    assert product_flops(local.graph) == product_flops(whole_experts)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_ranks_with_samples_of_their_own(name: str) -> None:
    """Each of two ranks has half of all products, its samples' rows go to the ranks of their experts and back, and
    gradients of all weights but experts' are summed up."""
    local, whole = captured(name, expert=2), captured(name)
    assert abs(2 * product_flops(local.graph) / product_flops(whole.graph) - 1) < 0.001
    rows = 2 * BATCH * TOKENS * 2 // 2 * WIDTH  # bytes of bfloat16: two experts of each token, half of the tokens
    num_layers = 1 if name == "deepseek" else 2  # with experts
    for phase in ("forward", "backward"):
        assert exchanges(local.graph, rows)[phase, "all_to_all"] == 2 * num_layers
    model, _ = case(name)
    shared = set(dict(model.named_parameters())) - set(expert_weights(model))
    summed = [op for op, kind in enumerate(local.graph.kinds) if kind == "collective.all_reduce"]
    num_bytes = sum(local.graph.bytes_accessed[op] for op in summed if local.graph.phases[op] == "backward")
    wide = "mlp.gate.weight" if name == "deepseek" else " "  # the router that computes in float32
    assert num_bytes == sum((4 if wide in path else 2) * model.get_parameter(path).numel() for path in shared)


@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (2, 2), (4, 2)])
def test_experts_of_whole_tokens(tensor: int, expert: int) -> None:
    """Without cut tokens a mixture of experts takes one sum of tokens in each direction, as a dense layer does."""
    graph = captured("mixtral", tensor, expert=expert).graph
    num_bytes = ACTIVATION // 2  # in bfloat16; not those of the rows, twice as many
    # four ranks have each head of keys and of values twice, and sum up its gradients [2, 16, 64] in two layers
    repeated = Counter({("backward", "all_reduce"): 4 if tensor == 4 else 0})
    sums = Counter({("forward", "all_reduce"): 5, ("backward", "all_reduce"): 5})
    assert exchanges(graph, num_bytes) == sums + repeated
    assert exchanges(graph, num_bytes + 1) == repeated


def test_biases_of_experts_need_no_exchange() -> None:
    """Rows of biases that are looked up by experts are cut as the columns that they are added to, and those of results
    are a part of each rank's summand; every second column is a gate."""
    graph = captured("gptoss", 2).graph
    sums = Counter({("forward", "all_reduce"): 5, ("backward", "all_reduce"): 5})
    assert exchanges(graph, ACTIVATION // 2) == sums
    assert exchanges(graph, ACTIVATION // 2 + 1) == {}


def test_experts_that_ranks_do_not_divide() -> None:
    """Whole experts need a number of them that the ranks divide."""
    for name, text in (
        ("mixtral", "has 4 experts in a layer, and expert=8"),
        ("llama", "has no experts that gdp finds"),
    ):
        model, inputs = case(name)
        with pytest.raises(InputError, match=text):
            ModelSource.of_example((model, (), inputs)).sharded(Shards(8, expert=8)).part(1)
    with pytest.raises(InputError, match=r"expert=4 would repeat .* of samples that it does not divide"):
        captured("mixtral", expert=4)  # two samples


def test_inference_gathers_logits() -> None:
    """Without a loss the logits are a result, which is whole."""
    graph = captured("llama", 2, training=False).graph
    assert exchanges(graph) == {("forward", "all_reduce"): 5, ("forward", "all_gather"): 1}
    (gather,) = (op for op, kind in enumerate(graph.kinds) if kind == "collective.all_gather")
    assert graph.bytes_accessed[gather] == 4 * BATCH * TOKENS * VOCABULARY
    assert graph.flops[gather] == 0
    assert [array.size for array in parsed_calls(graph.shapes[gather])[0].arrays][:1] == [(2, 8, 128)]


@pytest.mark.parametrize("tensor", [2, 4])
def test_weights_are_shared(tensor: int) -> None:
    """A rank holds its part of all weights but norms; of two key heads on four ranks one each."""
    whole, local = (captured("llama", count, training=False).graph for count in (1, tensor))
    norms = 4 * 5 * WIDTH  # two of each layer and the last one
    keys = 2 * 2 * 4 * 32 * WIDTH  # keys and values of two layers: two heads of 16
    parameters = [int(g.resident_bytes[[kind == "parameter" for kind in g.kinds]].sum()) for g in (whole, local)]
    repeated = keys // 2 - keys // 4 if tensor == 4 else 0
    assert parameters[1] == (parameters[0] - norms) // tensor + norms + repeated


@pytest.mark.parametrize(("vocabulary", "num_parts"), [(16_384, 2), (8_192, 1)])
def test_vocabularies_are_cut_whatever_their_share(
    vocabulary: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and head are cut where they are the least part of a large model, as its tools do; small ones stay."""
    monkeypatch.setattr(plan, "_SMALL", 1.0)  # of all parameters
    model, inputs = case("llama", vocab_size=vocabulary)
    source = ModelSource.of_example((model, (), inputs))
    whole, local = (each.part(1).graph for each in (source, source.sharded(Shards(2))))
    parameters = [int(g.resident_bytes[[kind == "parameter" for kind in g.kinds]].sum()) for g in (whole, local)]
    norms, tables = 3 * 4 * 5 * WIDTH, 3 * 2 * 4 * vocabulary * WIDTH  # with Adam's state
    assert parameters[1] == (parameters[0] - norms - tables) // 2 + norms + tables // num_parts
    logits = 4 * BATCH * TOKENS * vocabulary
    assert bool(exchanges(local, logits // 2)) == (num_parts == 1)  # nor are logits gathered


@pytest.mark.parametrize(("name", "heads"), [("bigcode", 1), ("phi3-gqa", 2)])
def test_few_heads_of_keys_of_a_fused_layer(name: str, heads: int) -> None:
    """Of a fused layer each of four ranks has its heads of queries, and the one head of keys that these read."""
    whole, local = captured(name).graph, captured(name, 4)
    products = [4 * product_flops(local.graph), product_flops(whole)]
    repeated = 6 * BATCH * TOKENS * WIDTH * 2 * 16 * (4 - heads) * 2  # columns of keys and values, in two layers
    assert products[0] - products[1] == pytest.approx(repeated, rel=0.002)  # biases are added after sums
    reason = f"has {heads} key head{'s' * (heads > 1)}"
    assert any("tensor=4 leaves" in note and reason in note for note in local.notes)


def test_heads_that_ranks_do_not_divide() -> None:
    """Attention with fewer heads than ranks is repeated by each rank, and a note says why and how much."""
    (note,) = (note for note in captured("phi3", 8).notes if "tensor=8" in note)
    assert "of the FLOPs whole on each card" in note
    assert "qkv_proj.weight has 4 key heads" in note


def test_adapters_are_not_cut() -> None:
    """Adapters of LoRA on groups are refused in one line."""
    model, inputs = case("llama")
    source = ModelSource.of_example((model, (), inputs), Reading(lora=Lora.parse("rank=4")))
    with pytest.raises(InputError, match="adapters are not cut in this version; leave tensor=2,sequence=on or it out"):
        source.sharded(Shards(2)).part(1)


def test_nothing_to_cut() -> None:
    """A model of convolutions is refused in one line."""
    source = ModelSource.of_example((nn.Conv2d(3, 8, 3), (torch.zeros(2, 3, 8, 8),)))
    with pytest.raises(InputError, match="no linear layers to cut; take a smaller number or tensor=1"):
        source.sharded(Shards(2)).part(1)


class Tagger(nn.Module):
    """A recurrent layer, which no rank has a part of, before a linear one."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = kind(16, 16, batch_first=True), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize("shards", [Shards(2), Shards(context=2)], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_work(kind: type[nn.Module], shards: Shards) -> None:
    """A model most of whose work is a recurrent layer, which each rank repeats, is refused."""
    source = ModelSource.of_example((Tagger(kind), (torch.zeros(2, 8, 16),)))
    with pytest.raises(InputError, match=f"{shards} would repeat .* of the FLOPs on each card"):
        source.sharded(shards).part(1)


class _Doubled(torch.autograd.Function):
    """A product whose backward pass computes it again."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return (x @ weight).relu()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = context.saved_tensors
        gradient = gradients[0] * (x @ weight > 0)
        return gradient @ weight.t(), x.t() @ gradient


class Custom(nn.Module):
    """Two products of the user's own, of a batch of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(16, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(_Doubled.apply(x, self.first), self.second)  # type: ignore[no-any-return]


def test_code_that_fails_on_parts_names_the_degree() -> None:
    """Where the code of a model fails on a rank's parts, the remedy is to leave the degree out."""
    source = ModelSource.of_example((Custom(), (torch.zeros(8, 16),)))
    with pytest.raises(InputError, match="its code takes whole tensors; leave tensor=2,sequence=on out"):
        source.sharded(Shards(2)).part(1)


class Crossed(nn.Module):
    """Twelve blocks, and another one behind each fourth of them, as models of two towers have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.crossed = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place % 4 == 3:
                x = self.crossed[place // 4](x)
        return x


def test_layers_that_few_others_reach_are_cut() -> None:
    """One block stands for twelve that are alike only where all that the model has runs with it."""
    source = ModelSource.of_example((Crossed(), (torch.randn(2, 8, WIDTH),)))
    whole, local = source.part(1).graph, source.sharded(Shards(2, False)).part(1).graph
    assert 2 * product_flops(local) / product_flops(whole) == pytest.approx(1, abs=0.001)


class Routed(nn.Module):
    """A mixture with learned positions [S]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.mixture, _ = case("mixtral")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(torch.arange(TOKENS))
        return self.mixture(inputs_embeds=x.bfloat16(), labels=ids).loss  # type: ignore[no-any-return]


def test_positions_are_those_of_all_samples() -> None:
    """Positions without a batch are whole on each rank: embeddings of samples stay where they are."""
    source = ModelSource.of_example((Routed(), (torch.zeros(BATCH, TOKENS, dtype=torch.int64),)))
    graph = source.sharded(Shards(expert=2)).part(1).graph
    gathers = [phase for phase, kind in zip(graph.phases, graph.kinds, strict=True) if kind == "collective.all_gather"]
    assert "forward" not in gathers


class Router(nn.Module):
    """A router whose `topk` has these options."""

    def __init__(self, options: dict[str, int]) -> None:
        super().__init__()
        self.options, self.weight = options, nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, WIDTH), self.weight)
        weights, index = torch.topk(logits.float().softmax(-1), 2, **self.options)
        return logits, weights.to(hidden.dtype), index


def test_routers_need_no_dimension_of_topk() -> None:
    """The last dimension is that of `topk` by default: rows go to their experts, and tokens are not gathered."""
    counts = []
    for options in ({"dim": -1}, {}):
        model, inputs = case("mixtral")
        for layer in model.model.layers:
            layer.mlp.gate = Router(options).bfloat16()
        source = ModelSource.of_example((model, (), inputs))
        counts.append(exchanges(source.sharded(Shards(expert=2)).part(1).graph))
    assert counts[0] == counts[1]
    assert counts[1]["forward", "all_to_all"] > 0


def test_masks_of_groups_of_experts_are_not_gathered() -> None:
    """A router that marks groups of experts writes along them, and each rank does so for its own tokens."""
    graph = captured("deepseek", 2, sequence=True, expert=2).graph
    integers = [
        call
        for shapes in graph.shapes
        for call in parsed_calls(shapes)
        if call.kind == "collective.all_gather" and call.arrays[0].dtype == "int64"
    ]
    assert integers == []


class Losses(nn.Module):
    """Two losses, of which none is called loss, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.down(self.up(x).relu())
        return {"first": hidden.mean(), "second": hidden.square().mean(), "logits": self.head(hidden)}


def test_outputs_that_a_loss_is_made_of_are_whole() -> None:
    """Where a model has no loss of its own, all outputs are part of it: a rank has whole ones."""
    source = ModelSource.of_example((Losses(), (torch.randn(8, 16),)))
    graph = source.sharded(Shards(2, False)).part(1).graph
    gathered = [call for text in graph.shapes for call in parsed_calls(text) if call.kind == "collective.all_gather"]
    assert (8, 64) in [call.results[0].size for call in gathered]


def test_heads_that_ranks_do_not_divide_stay_whole() -> None:
    """Four sequences of six heads are 24 slices, six for each of four ranks, and still no rank has whole heads."""
    layer = nn.TransformerEncoderLayer(96, nhead=6, dim_feedforward=768, batch_first=True)
    source = ModelSource.of_example((nn.TransformerEncoder(layer, 2), (torch.randn(4, 8, 96),)))
    (note,) = [note for note in source.sharded(Shards(4)).part(1).notes if "leaves" in note]
    assert "has 6 heads or parts, no multiple of 4" in note
