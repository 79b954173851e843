"""The segment transformer is a Transformer-XL without positions: one segment after the other, but all at once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gdp_policy.placement_network import (
    SegmentAttention,
    SegmentLayer,
    SegmentTransformer,
    SegmentTransformerConfig,
    Superposition,
)

CONFIG = SegmentTransformerConfig(num_layers=3, d_model=12, num_heads=3, feed_forward=20, segment=4)


def network(kind: type[nn.Module] = SegmentTransformer, **changes: object) -> nn.Module:
    torch.manual_seed(0)
    made = kind(replace(CONFIG, **changes))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)  # norms, too, should differ from the identity
    return made


def attend(attention: SegmentAttention, x: Tensor, cache: Tensor) -> Tensor:
    """Attention of `x` [L, H] to `cache` [M, H] and itself, from the definition."""
    key, value = attention.key_value(torch.cat((cache, x))).chunk(2, dim=-1)
    heads = zip(*(part.chunk(attention.num_heads, dim=-1) for part in (attention.query(x), key, value)), strict=True)
    return attention.out(torch.cat([torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v for q, k, v in heads], -1))


def run_layer(layer: SegmentLayer, x: Tensor, cache: Tensor) -> Tensor:
    x = layer.attention_norm(x + attend(layer.attention, x, cache))
    return layer.feed_forward_norm(x + layer.feed_forward(x))


def one_by_one(body: SegmentTransformer, x: Tensor, condition: Tensor) -> Tensor:
    """[N, H] as Transformer-XL does it: a loop over segments that carries each layer's inputs, detached."""
    caches = [x[:0]] * len(body.layers)
    outputs = []
    for hidden, factor in zip(x.split(body.segment), condition.split(body.segment), strict=True):
        for number, layer in enumerate(body.layers):
            hidden = factor * hidden
            cache, caches[number] = caches[number], hidden.detach()
            hidden = run_layer(layer, hidden, cache)
        outputs.append(hidden)
    return torch.cat(outputs)


@pytest.mark.parametrize("num_ops", [3, 4, 5, 12, 14])
def test_segments_at_once_equal_a_loop(num_ops: int) -> None:
    """All segments at once have the values and gradients of a loop over segments."""
    body = network()
    x, condition = torch.randn(num_ops, 12, requires_grad=True), torch.randn(num_ops, 12, requires_grad=True)
    weights, wanted = torch.randn(num_ops, 12), (x, condition, *body.parameters())
    at_once, looped = body(x, condition=condition), one_by_one(body, x, condition)
    torch.testing.assert_close(at_once, looped, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad((at_once * weights).sum(), wanted)
    expected = torch.autograd.grad((looped * weights).sum(), wanted)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(body(x, condition=condition), at_once)


def test_superposition_conditions_every_layer() -> None:
    """Each layer's input is multiplied by a layer of the graph representation."""
    superposed, x = network(Superposition), torch.randn(14, 12)
    condition = one_by_one(superposed.conditioning, x, torch.ones(14, 12))
    torch.testing.assert_close(superposed(x), one_by_one(superposed.placer, x, condition), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [SegmentTransformer, Superposition])
def test_values_cross_a_boundary_without_gradients(kind: type[nn.Module]) -> None:
    """A segment sees the values of the one before, and trains nothing through them."""
    body, x = network(kind), torch.randn(12, 12, requires_grad=True)
    out = body(x)
    (gradient,) = torch.autograd.grad((out[8:] ** 2).sum(), x)
    assert torch.equal(gradient[:8], torch.zeros(8, 12))
    assert (gradient[8:] != 0).all()
    changed = x.detach().clone()
    changed[7] += 1
    difference = (body(changed) - out).abs().amax(dim=1)
    assert (difference[4:] > 0).all()  # its own segment and the next
    assert (difference[:4] == 0).all()  # never an earlier one


@pytest.mark.parametrize("kind", [SegmentTransformer, Superposition])
def test_without_attention_nothing_crosses_ops(kind: type[nn.Module]) -> None:
    """Without attention an op's vector depends on that op alone."""
    body, x = network(kind, attention=False), torch.randn(12, 12, requires_grad=True)
    for op in range(12):
        (gradient,) = torch.autograd.grad((body(x)[op] ** 2).sum(), x)
        assert torch.equal(gradient.abs().amax(dim=1) > 0, torch.arange(12) == op)
    torch.testing.assert_close(body(x.flip(0)), body(x).flip(0))  # nor does the order matter


@pytest.mark.parametrize("wrong", [{"segment": 0}, {"num_heads": 5}])
def test_impossible_sizes_are_refused(wrong: dict[str, object]) -> None:
    """The error names the size."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)
