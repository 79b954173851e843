"""Attention is captured as on cards, and executed on CPUs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from gdp.errors import InputError
from gdp.execute.equality import eager_parts
from gdp.execute.plan_executor import check_dropout
from gdp.models.pytorch import Capture, capture
from gdp.models.pytorch.fused_attention import CAUSAL_NOTE, MASK_NOTE
from gdp.models.pytorch.replacements import ATTENTION, ATTENTION_BACKWARD, function_for

FUSED = "aten._scaled_dot_product_flash_attention_for_cpu"


class Attention(nn.Module):
    """Query [1, 4, 6, 8], trained, `key_heads` of keys and values, the latter `width` wide."""

    def __init__(
        self, dtype: torch.dtype, dropout: float, key_heads: int = 4, width: int = 8, mask: Tensor | None = None
    ) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 4, 6, 8, dtype=dtype))
        self.key = nn.Parameter(torch.randn(1, key_heads, 6, 8, dtype=dtype))
        self.value = nn.Parameter(torch.randn(1, key_heads, 6, width, dtype=dtype))
        self.mask, self.dropout = mask, dropout

    def forward(self, query: Tensor, is_causal: bool = False) -> Tensor:
        grouped = self.key.shape[1] != query.shape[1]
        return functional.scaled_dot_product_attention(
            query + self.shift, self.key, self.value, self.mask, self.dropout, is_causal, enable_gqa=grouped
        ).sum()


def captured(model: nn.Module, dtype: torch.dtype, *args: Any, **options: Any) -> Capture:
    return capture(model, (torch.randn(1, 4, 6, 8, dtype=dtype), *args), optimizer="sgd", **options)


def attention_ops(found: Capture) -> list[tuple[str, str, int]]:
    """(kind, type, FLOPs) of the ops that multiply matrices."""
    graph = found.graph
    rows = zip(graph.kinds, graph.dtypes, graph.flops.tolist(), strict=True)
    return [row for row in rows if row[0] in (FUSED, f"{FUSED}_backward", "aten.bmm")]


# 4 heads x 6 x 6 = 144 pairs of width 8, two products: 144 x (2 x 8 + 2 x 8) and a softmax of 5; dropout is 3 more
# backward five products: 144 x (5 x 2 x 8), softmax 5 and its gradient 4; with dropout 5 more
PLAIN = [(144 * (32 + 5)), (144 * (80 + 9))]
DROPPED = [(144 * (32 + 5 + 3)), (144 * (80 + 9 + 5))]
PRODUCTS = [("aten.bmm", "float32", 144 * 16)] * 6  # as CPUs compute it: two forward, four backward


@pytest.mark.parametrize(
    ("dtype", "dropout", "flops"),
    [
        (torch.float32, 0.0, PLAIN),
        (torch.float32, 0.1, DROPPED),
        (torch.float64, 0.1, None),
        (torch.bfloat16, 0.0, PLAIN),
        (torch.bfloat16, 0.1, DROPPED),
        (torch.float16, 0.1, DROPPED),
    ],
)
def test_attention_costs_what_a_card_computes(dtype: torch.dtype, dropout: float, flops: list[int] | None) -> None:
    """Attention is one op for each pass, in the type of its inputs; cards have no such kernel for float64."""
    name = str(dtype).removeprefix("torch.")
    in_its_type = [(kind, name, flops) for kind, _, flops in PRODUCTS]
    expected = in_its_type if flops is None else [(FUSED, name, flops[0]), (f"{FUSED}_backward", name, flops[1])]
    training = captured(Attention(dtype, dropout), dtype)
    assert attention_ops(training) == expected
    assert (
        attention_ops(captured(Attention(dtype, dropout), dtype, training=False))
        == expected[: 2 if flops is None else 1]
    )
    if flops is not None:
        # query, key, value and output of 192 elements each, 24 sums in float32
        op = training.graph.kinds.index(FUSED)
        assert training.graph.bytes_accessed[op] == 4 * 192 * dtype.itemsize + 24 * 4


MASK = torch.ones(6, 6, dtype=torch.bool).tril()
FUSED_CALLS = {
    "causal": (lambda: Attention(torch.bfloat16, 0.1), (True,)),
    "boolean mask": (lambda: Attention(torch.bfloat16, 0.1, mask=MASK), ()),
    "added mask": (lambda: Attention(torch.bfloat16, 0.1, mask=torch.zeros(6, 6, dtype=torch.bfloat16)), ()),
    "mask of each head": (lambda: Attention(torch.bfloat16, 0.1, mask=MASK.repeat(4, 1, 1)), ()),
    "grouped heads": (lambda: Attention(torch.bfloat16, 0.1, key_heads=2), ()),
    "wide values": (lambda: Attention(torch.bfloat16, 0.1, width=16), ()),
    "wide values without dropout": (lambda: Attention(torch.bfloat16, 0.0, width=16), ()),
    "float32": (lambda: Attention(torch.float32, 0.1, width=12, mask=MASK), ()),
}


@pytest.mark.parametrize("case", FUSED_CALLS)
def test_a_cpu_executes_the_fused_op(case: str) -> None:
    """Loss and gradients of a replay are those of PyTorch with the same seed: both passes drop the same weights."""
    torch.manual_seed(1)
    build, options = FUSED_CALLS[case]
    model = build()
    query = torch.randn(1, 4, 6, 8, dtype=model.shift.dtype)
    found = capture(model, (query, *options), optimizer="sgd")
    assert [row[0] for row in attention_ops(found)] == [FUSED, f"{FUSED}_backward"]
    assert not found.coverage.unknown
    replay = found.program.replay(model, (query, *options))
    torch.manual_seed(0)  # of the first call that draws
    loss = model(query, *options)
    loss.backward()
    torch.testing.assert_close(replay.loss, loss.detach(), rtol=2e-2, atol=2e-2)  # bfloat16 has 8 bits
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(replay.gradients[name], parameter.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("key_heads", "width", "mask"), [(4, 8, "of heads"), (2, 16, None), (2, 8, "trained")])
def test_unplaced_and_placed_steps_are_alike(key_heads: int, width: int, mask: str | None) -> None:
    """Where nothing is drawn, `gdp run` compares with a step on real tensors that computes attention alike."""
    torch.manual_seed(1)
    model = Attention(torch.bfloat16, 0.0, key_heads, width)
    if mask is not None:
        model.mask = MASK.repeat(4, 1, 1)
    if mask == "trained":
        model.mask = nn.Parameter(torch.randn(4, 6, 6, dtype=torch.bfloat16))
    query = torch.randn(1, 4, 6, 8, dtype=torch.bfloat16)
    program = capture(model, (query,), optimizer="sgd").program
    expected = eager_parts(program, model, [((query,), {})])
    replay = program.replay(model, (query,))
    assert torch.equal(replay.loss, expected.loss)  # type: ignore[arg-type]
    assert replay.gradients.keys() == expected.gradients.keys()
    assert all(torch.equal(replay.gradients[name], expected.gradients[name]) for name in expected.gradients)


def test_layers_and_autocast_are_fused() -> None:
    """`nn.TransformerEncoderLayer` in bfloat16, and attention in a region of autocast, are captured as on a card."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.bfloat16)
    found = capture(layer, (torch.randn(2, 5, 8, dtype=torch.bfloat16),), optimizer="sgd")
    # 2 x 2 heads x 5 x 5 = 100 pairs of width 4
    flops = [100 * (2 * 8 + 5 + 3), 100 * (5 * 8 + 9 + 5)]
    assert attention_ops(found) == [(FUSED, "bfloat16", flops[0]), (f"{FUSED}_backward", "bfloat16", flops[1])]

    class Autocast(Attention):
        def forward(self, query: Tensor, is_causal: bool = False) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return super().forward(query, is_causal)

    found = captured(Autocast(torch.float32, 0.1), torch.float32)
    assert attention_ops(found) == [(FUSED, "bfloat16", DROPPED[0]), (f"{FUSED}_backward", "bfloat16", DROPPED[1])]


@pytest.mark.parametrize(("key_heads", "width"), [(2, 8), (4, 6)])
def test_float32_has_one_kernel(key_heads: int, width: int) -> None:
    """In float32 grouped heads, and widths that are no multiple of 4, are products with dropout."""
    found = captured(Attention(torch.float32, 0.1, key_heads, width), torch.float32)
    assert {kind for kind, _, _ in attention_ops(found)} == {"aten.bmm"}


def test_what_no_card_fuses_is_products() -> None:
    """PyTorch's own products are captured where all kernels are off, and, with a note, for masks that are trained."""

    class Products(Attention):
        def forward(self, query: Tensor, is_causal: bool = False) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return super().forward(query, is_causal)

    found = captured(Products(torch.bfloat16, 0.0), torch.bfloat16)
    assert (attention_ops(found), MASK_NOTE in found.notes) == (PRODUCTS, False)
    trained = Attention(torch.bfloat16, 0.0)
    trained.mask = nn.Parameter(torch.zeros(6, 6, dtype=torch.bfloat16))
    found = captured(trained, torch.bfloat16)
    in_bfloat16 = [(kind, "bfloat16", flops) for kind, _, flops in PRODUCTS]
    assert (attention_ops(found), MASK_NOTE in found.notes) == (in_bfloat16, True)


def test_passes_on_a_gpu_and_on_a_cpu_agree() -> None:
    """With dropout, what GPUs compute in both passes has the gradients of one and the same draw."""
    query, key, value, gradient = (torch.randn(1, 2, 6, 8) for _ in range(4))
    gpu = torch.device("cuda", 0)  # it only chooses the function

    def seeded(function: Callable[..., Any], *args: Any) -> Sequence[Tensor]:
        torch.manual_seed(7)
        return function(*args)  # type: ignore[no-any-return]

    results = []
    for device in (None, gpu):
        output, sums = seeded(function_for(ATTENTION, device), query, key, value, 0.5)
        backward = gradient, query, key, value, output, sums, 0.5, False
        results.append((output, *seeded(function_for(ATTENTION_BACKWARD, device), *backward)))
    # the output is linear in the value: the gradient times the value is the gradient times the output
    output, *_, of_value = results[0]
    torch.testing.assert_close((gradient * output).sum(), (of_value * value).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0], results[1])


def test_passes_on_two_kinds_are_refused() -> None:
    """A plan with the passes of an attention with dropout on a CPU and a GPU is not executed; on two CPUs it is."""
    program = captured(Attention(torch.bfloat16, 0.1), torch.bfloat16).program
    backward = program.graph.kinds.index(f"{FUSED}_backward")
    assert list(program.redrawn_attention()) == [(backward, program.graph.kinds.index(FUSED))]
    home = {op: int(op == backward) for op in range(program.graph.num_ops)}
    cpu = torch.device("cpu")
    check_dropout(program, home, [cpu, cpu])
    with pytest.raises(InputError, match="is on cuda and that on cpu, which draws other numbers; pin both"):
        check_dropout(program, home, [cpu, torch.device("cuda", 0)])


def test_square_masks_of_transformers_are_causal() -> None:
    """The mask of `nn.TransformerEncoder`, and of `nn.Transformer`'s decoder, costs what the causal kernel does, with a
    note; one of another shape, or that is said not to be causal, is read."""
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder, decoder = nn.TransformerEncoder(layer, 1), nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    source, target = torch.randn(3, 4, 8), torch.randn(3, 6, 8)
    causal = {"mask": mask, "is_causal": True}
    asked, told = (capture(encoder, (target,), options) for options in ({"mask": mask}, causal))
    assert asked.graph.fingerprint == told.graph.fingerprint
    assert (CAUSAL_NOTE in asked.notes, CAUSAL_NOTE in told.notes) == (True, False)
    assert CAUSAL_NOTE in capture(decoder, (source, target), {"tgt_mask": mask}).notes
    others = {"mask": mask, "is_causal": False}, {"mask": torch.zeros(6, 6, 6)}  # of three samples, two heads
    assert not any(CAUSAL_NOTE in capture(encoder, (target,), options).notes for options in others)


class Packed(nn.Module):
    """Causal attention of packed sequences, or of queries to a cache in pages."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def forward(self, query: Tensor, cache: Tensor, ends: Tensor, table: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": cache.shape[-2] != query.shape[-2]}
        options |= {} if table is None else {"seqused_k": ends[1:], "block_table": table}
        result: Tensor = varlen_attn(query, cache, cache, ends, ends, self.longest, self.longest, **options)
        return result


def test_packed_sequences_are_taken_to_be_even() -> None:
    """12 tokens in 3 sequences, whose longest may have 9, are 12 x 4 pairs, in two heads of width 8.

    Of 3 tokens to a pool of 160 places in pages, each sees as many as the longest sequence has: 40 of 160 / 3.
    """
    query = nn.Parameter(torch.zeros(12, 2, 8, dtype=torch.bfloat16))
    layer, ends = Packed(9), torch.zeros(4, dtype=torch.int32)
    layer.register_parameter("query", query)
    trained = capture(layer, (query.detach().requires_grad_(), query, ends)).graph
    flops = {kind: int(count) for kind, count in zip(trained.kinds, trained.flops, strict=True) if "varlen" in kind}
    assert flops == {"torch_attn._varlen_attn": 96 * (32 + 5), "torch_attn._varlen_attn_backward": 96 * (80 + 9)}
    pages, token = torch.zeros(10, 16, 1, 8, dtype=torch.bfloat16), torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    args = token, pages, ends, torch.zeros(3, 5, dtype=torch.int32)
    (flops_of_pages,) = capture(Packed(40), args, training=False).graph.flops[-1:]
    assert flops_of_pages == 3 * 2 * 40 * (32 + 5)
