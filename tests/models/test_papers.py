"""The built-in workloads: they train at tiny size, and at full size they are the published models."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gdp.errors import InputError
from gdp.models.papers import PAPERS, amoebanet, gnmt, inception, layer_per_device, rnnlm, transformer_xl
from gdp.models.pytorch import capture_fn
from tiny_models import TINY

PAPER = [
    ("rnnlm-2", 2), ("rnnlm-4", 4), ("rnnlm-8", 8), ("gnmt-2", 2), ("gnmt-4", 4), ("gnmt-8", 8),
    ("transformer-xl-2", 2), ("transformer-xl-4", 4), ("transformer-xl-8", 8), ("inception-v3-b32", 2),
    ("inception-v3-b64", 2), ("amoebanet", 4), ("wavenet-2x9", 2), ("wavenet-4x9", 4),
]  # fmt: skip


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("family", TINY)
def test_every_parameter_of_a_tiny_model_gets_a_gradient_from_a_finite_loss(family: str) -> None:
    """A tiny model of each family has a finite scalar loss that gives each parameter a finite, nonzero gradient."""
    torch.manual_seed(0)
    module, args, kwargs = TINY[family]()
    loss = module(*args, **kwargs)
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_the_registry_holds_the_papers_workloads_on_their_numbers_of_devices() -> None:
    """The registry lists exactly the paper's workloads, each on the paper's number of P100s."""
    assert PAPERS.names() == tuple(name for name, _ in PAPER)
    for name, num_devices in PAPER:
        assert PAPERS.get(name).cluster == f"{num_devices}xp100-pcie-16g"


def test_every_family_has_at_least_three_training_variants_named_after_it_and_their_sizes() -> None:
    """Each family has at least three variants, whose names are unique, start with the family, and are no workload's."""
    variants = PAPERS.variants
    families = [variant.family for variant in variants]
    assert all(families.count(family) >= 3 for family in PAPERS.family_names())
    assert all(variant.name.startswith(f"{variant.family}/") for variant in variants)
    assert len({variant.name for variant in variants}) == len(variants)
    assert variants[0].name == "rnnlm/l1-s30-h1024-b128"
    assert {variant.name for variant in variants}.isdisjoint(PAPERS.names())


def test_a_variant_is_found_by_name_but_is_none_of_the_listed_workloads() -> None:
    """Each variant is found by its name, and an unknown name is not found."""
    assert PAPERS.variant_names() == tuple(variant.name for variant in PAPERS.variants)
    for name in PAPERS.variant_names():
        assert PAPERS.get(name).name == name
    assert PAPERS.find("gnmt-3") is None


def test_the_training_set_is_all_variants_and_small_workloads_but_for_families_held_out() -> None:
    """The training set has all variants and small workloads, except those of families that are held out."""
    names = [workload.name for workload in PAPERS.training_set()]
    assert set(PAPERS.variant_names()) <= set(names)
    assert set(PAPERS.names()) - set(names) == {"rnnlm-4", "rnnlm-8", "gnmt-2", "gnmt-4", "gnmt-8"}
    held_out = PAPERS.hold_out(["wavenet", "rnnlm"])
    assert held_out == ("rnnlm", "wavenet")
    left = PAPERS.training_set(held_out)
    assert {workload.family for workload in left} == set(PAPERS.family_names()) - set(held_out)
    with pytest.raises(InputError, match=r"family 'rnnlm-2' is unknown; did you mean rnnlm"):
        PAPERS.hold_out(["rnnlm-2"])


@pytest.mark.long
@pytest.mark.parametrize("name", PAPERS.names())
def test_a_workload_is_in_the_training_set_if_it_has_at_most_6000_ops(name: str) -> None:
    """A workload is in the training set exactly if it has at most 6000 ops."""
    num_ops = capture_fn(PAPERS.get(name).build, name=name).graph.num_ops
    assert (PAPERS.get(name) in PAPERS.training_set()) == (num_ops <= 6000)


def test_importing_the_registry_and_listing_variants_does_not_import_pytorch() -> None:
    """Importing the registry does not import PyTorch."""
    code = "import sys, gdp.models.papers; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_workload_is_an_input_error_that_lists_the_known_ones() -> None:
    """An unknown workload is an input error that lists the known ones."""
    with pytest.raises(InputError, match=r"'gnmt-3' is not built in; one of rnnlm-2, .* is expected"):
        PAPERS.get("gnmt-3")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rnnlm.RNNLMConfig(0, 4), "num_layers is 0; an integer of at least 1"),
        (lambda: rnnlm.RNNLMConfig(1, 4, dropout=1.0), "dropout is 1.0; a number of at least 0 and below 1"),
        (lambda: transformer_xl.TransformerXLConfig(1, 4, hidden=24), "hidden is 24; a multiple"),
        (lambda: amoebanet.AmoebaNetConfig(1, filters=8), "filters is 8; at least 16"),
    ],
)
def test_a_config_that_makes_no_model_is_an_input_error(make: Callable[[], object], message: str) -> None:
    """A config value from which no model can be built is an input error that says what is expected."""
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("name", PAPERS.names())
def test_a_full_size_model_builds_without_memory_and_its_batch_is_the_stated_one(name: str) -> None:
    """Each full-size model builds with fake tensors in training mode, and its inputs have the stated batch size."""
    workload = PAPERS.get(name)
    with FakeTensorMode():
        module, args, _ = workload.build()
    assert module.training
    assert all(workload.batch_size in argument.shape for argument in args)


def test_parameter_counts_are_the_published_ones() -> None:
    """Inception, AmoebaNet, GNMT and a layer of Transformer-XL have the published numbers of parameters."""
    with FakeTensorMode():
        # torchvision's inception_v3 without its auxiliary classifier
        assert num_parameters(inception.Inception(inception.InceptionConfig(1))) == 23_834_568
        # Real et al. 2019: AmoebaNet-A (N=6, F=190) 86.7M, (N=6, F=448) 469M.
        for filters, millions in ((190, 86.7), (448, 469)):
            count = num_parameters(amoebanet.AmoebaNet(amoebanet.AmoebaNetConfig(1, filters=filters)))
            assert count / 1e6 == pytest.approx(millions, rel=0.003)
        # Shazeer et al. 2017 (arXiv 1701.06538), table 2: GNMT 278M.
        assert num_parameters(gnmt.GNMT(gnmt.GNMTConfig(8, 1))) / 1e6 == pytest.approx(278, rel=0.02)
        # A layer of Transformer-XL large: 5 h^2 + h of attention and its biases (2 h), 8 h^2 + 5 h of feed-forward,
        # 4 h of norms, at h = 1024: query, key, value, position and output are h^2 each, the inner size is 4 h.
        layer = transformer_xl.TransformerXLLayer(transformer_xl.TransformerXLConfig(1, 1))
        assert num_parameters(layer) == 13 * 1024**2 + 11 * 1024


def test_the_expert_gives_a_layer_to_a_device_and_what_is_outside_layers_to_the_first_or_last() -> None:
    """The expert puts one layer on each device, embeddings on the first, and other modules on the last."""
    rule = layer_per_device(4)
    assert [rule(f"encoder.layers.{layer}.cell") for layer in range(4)] == [0, 1, 2, 3]
    assert rule("decoder.layers.2.dropout") == 2
    assert rule("encoder.embedding") == 0
    assert {rule(path) for path in ("", "encoder", "decoder.attention.query", "softmax.projection")} == {3}


def test_relative_shift_gives_each_key_the_score_of_its_distance() -> None:
    """Position j stands for the distance K - 1 - j. Query i, at M + i, is at distance M + i - k from key k <= M + i."""
    num_queries, num_keys = 3, 5
    scores = torch.randn(2, num_queries, num_keys)
    shifted = transformer_xl.relative_shift(scores)
    for query in range(num_queries):
        for key in range(num_keys - num_queries + query + 1):
            distance = num_keys - num_queries + query - key
            assert torch.equal(shifted[:, query, key], scores[:, query, num_keys - 1 - distance])


def test_attention_is_causal_and_the_memory_of_transformer_xl_is_used() -> None:
    """A future token does not change an earlier one's loss; the memory changes it; so does the previous segment."""
    torch.manual_seed(0)
    config = transformer_xl.TransformerXLConfig(
        2, 1, num_segments=2, segment_steps=3, hidden=8, num_heads=2, inner=16, vocabulary=11, dropout=0.0
    )
    module, (tokens, _, memory), _ = transformer_xl.build(config)
    assert isinstance(module, transformer_xl.TransformerXL)
    states: list[torch.Tensor] = []
    module.softmax.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    changed = tokens.clone()
    changed[2] = (tokens[2] + 1) % 11
    for tokens_now, memory_now in ((tokens, memory), (changed, memory), (tokens, 2 * memory)):
        module(tokens_now, tokens, memory_now)
    first, second, later_first, later_second, other_first, _ = states
    assert torch.equal(first[:2], later_first[:2])
    assert not torch.equal(first[2], later_first[2])
    assert not torch.equal(second, later_second)
    assert not torch.equal(first, other_first)
