"""The built-in workloads: they train at tiny size, and at full size they are the published models."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.models import workloads
from gdp.models.pytorch import capture_fn
from gdp.models.workloads import amoebanet, gnmt, inception, llama, mixture_of_experts, rnnlm, transformer_xl
from gdp.placers.contiguous import contiguous
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
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


def test_the_registry_holds_the_papers_workloads_on_their_numbers_of_devices_and_further_models() -> None:
    assert workloads.paper_names() == tuple(name for name, _ in PAPER)
    assert workloads.further_names()[:2] == ("llama-1b", "moe")
    assert workloads.names() == workloads.paper_names() + workloads.further_names()
    for name, num_devices in PAPER:
        assert workloads.get(name).cluster == f"{num_devices}xp100-pcie-16g"
    assert {workloads.get(name).family for name in workloads.names()} == set(TINY)


def test_every_family_has_at_least_three_training_variants_named_after_it_and_their_sizes() -> None:
    variants = workloads.training_variants()
    families = [variant.family for variant in variants]
    assert all(families.count(family) >= 3 for family in TINY)
    assert all(variant.name.startswith(f"{variant.family}/") for variant in variants)
    assert len({variant.name for variant in variants}) == len(variants)
    assert variants[0].name == "rnnlm/l1-s30-h1024-b128"
    assert {variant.name for variant in variants}.isdisjoint(workloads.names())


def test_a_variant_is_found_by_name_but_is_none_of_the_listed_workloads() -> None:
    assert workloads.variant_names() == tuple(variant.name for variant in workloads.training_variants())
    for name in workloads.variant_names():
        assert workloads.get(name).name == name
    assert workloads.find("gnmt-3") is None


def test_a_family_built_from_anothers_code_is_its_relative() -> None:
    for family in workloads.family_names():
        code = (Path(workloads.__file__).parent / f"{family}.py").read_text()
        used = set(re.findall(r"from gdp\.models\.workloads\.(\w+) import", code)) & set(workloads.family_names())
        assert used <= workloads.with_relatives(family)
        assert all(family in workloads.with_relatives(relative) for relative in workloads.with_relatives(family))


def test_the_training_set_is_all_variants_and_small_workloads_but_for_families_held_out() -> None:
    names = [workload.name for workload in workloads.training_set()]
    assert set(workloads.variant_names()) <= set(names)
    assert set(workloads.names()) - set(names) == {"rnnlm-4", "rnnlm-8", "gnmt-2", "gnmt-4", "gnmt-8"}
    held_out = workloads.hold_out(["vit", "rnnlm"])
    assert held_out == ("clip", "rnnlm", "vit")
    left = workloads.training_set(held_out)
    assert {workload.family for workload in left} == set(workloads.family_names()) - set(held_out)
    with pytest.raises(InputError, match=r"family 'rnnlm-2' is unknown; did you mean rnnlm"):
        workloads.hold_out(["rnnlm-2"])


@pytest.mark.long
@pytest.mark.parametrize("name", workloads.names())
def test_a_workload_is_in_the_training_set_if_it_has_at_most_6000_ops(name: str) -> None:
    num_ops = capture_fn(workloads.get(name).build, name=name).graph.num_ops
    assert (workloads.get(name) in workloads.training_set()) == (num_ops <= 6000)


def test_importing_the_registry_and_listing_variants_does_not_import_pytorch() -> None:
    code = (
        "import sys; from gdp.models import workloads; workloads.training_variants(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_workload_is_an_input_error_that_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'gnmt-3' is not built in; one of rnnlm-2, .* is expected"):
        workloads.get("gnmt-3")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rnnlm.RNNLMConfig(0, 4), "num_layers is 0; an integer of at least 1"),
        (lambda: rnnlm.RNNLMConfig(1, 4, dropout=1.0), "dropout is 1.0; a number of at least 0 and below 1"),
        (lambda: transformer_xl.TransformerXLConfig(1, 4, hidden=24), "hidden is 24; a multiple"),
        (lambda: amoebanet.AmoebaNetConfig(1, filters=8), "filters is 8; at least 16"),
        (lambda: llama.LlamaConfig(1, num_key_heads=5), "num_key_heads is 5; a divisor"),
        (lambda: mixture_of_experts.MixtureOfExpertsConfig(1, num_experts=1), "at most num_experts"),
    ],
)
def test_a_config_that_makes_no_model_is_an_input_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("name", workloads.names())
def test_a_full_size_model_builds_without_memory_and_its_batch_is_the_stated_one(name: str) -> None:
    workload = workloads.get(name)
    with FakeTensorMode():
        module, args, _ = workload.build()
    assert module.training
    assert all(workload.batch_size in argument.shape for argument in args)


def test_parameter_counts_are_the_published_ones() -> None:
    with FakeTensorMode():
        # torchvision's inception_v3, with and without its auxiliary classifier.
        assert num_parameters(inception.Inception(inception.InceptionConfig(1, auxiliary=True))) == 27_161_264
        assert num_parameters(inception.Inception(inception.InceptionConfig(1))) == 23_834_568
        # Zhang et al. 2024: TinyLlama.
        assert num_parameters(llama.Llama(llama.LlamaConfig(1))) == 1_100_048_384
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


@pytest.mark.long
@pytest.mark.parametrize(
    "workload",
    [*map(workloads.get, workloads.further_names()), *workloads.training_variants()],
    ids=lambda workload: workload.name,
)
def test_contiguous_stages_fit_and_the_backward_pass_takes_twice_the_flops_of_the_forward_pass(
    workload: workloads.Workload,
) -> None:
    capture = capture_fn(workload.build, name=workload.name)
    graph = capture.graph
    assert not capture.coverage.unknown
    forward, backward = (
        sum(flops for flops, its in zip(graph.flops.tolist(), graph.phases, strict=True) if its == phase)
        for phase in ("forward", "backward")
    )
    assert 1.8 < backward / forward < 2.2
    problem = Problem.build(graph, Cluster.parse(workload.cluster))
    placement = contiguous(problem)
    assert placement is not None
    assert simulate(problem, placement).feasible


def test_the_expert_gives_a_layer_to_a_device_and_what_is_outside_layers_to_the_first_or_last() -> None:
    rule = workloads.layer_per_device(4)
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


def test_routed_experts_equal_a_plain_loop_over_tokens_when_every_choice_finds_a_place() -> None:
    torch.manual_seed(0)
    config = mixture_of_experts.MixtureOfExpertsConfig(
        2, num_steps=8, hidden=16, num_heads=4, inner=12, num_experts=4, experts_per_token=2, spare_capacity=0.99
    )
    routed = mixture_of_experts.RoutedFeedForward(config)
    x = torch.randn(2, 8, 16)
    probabilities = routed.router.scores(x).softmax(-1)
    expected = torch.zeros_like(x)
    for place in [(row, step) for row in range(2) for step in range(8)]:
        best = probabilities[place].topk(2)
        for gate, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            expected[place] += gate * routed.experts[expert](x[place])
    slots = routed.router(x.flatten(0, 1))[0]
    assert (slots < 4 * routed.capacity).all()
    torch.testing.assert_close(routed(x)[0], expected)


def test_choices_beyond_an_experts_capacity_are_dropped_in_order_of_choice_then_token() -> None:
    """3 tokens, 2 experts, 1 choice, capacity 1: all prefer expert 1, so only the first token finds a place, slot 1."""
    config = mixture_of_experts.MixtureOfExpertsConfig(
        1, num_steps=3, hidden=4, num_heads=1, num_key_heads=1, num_experts=2, experts_per_token=1
    )
    router = mixture_of_experts.Router(config, capacity=1)
    with torch.no_grad():
        router.scores.weight.copy_(torch.tensor([[0.0] * 4, [1.0] * 4]))
    slots, gates, sources, _ = router(torch.ones(3, 4))
    assert slots.tolist() == [[1, 2, 2]]  # 2 = E * C: no place
    assert sources.tolist() == [3, 0]  # 3 = T: an empty slot
    assert torch.equal(gates, torch.ones(1, 3))
