"""The models beyond the papers': they are the published ones, and each one's own trick works."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import models
from benchmarks.models import (
    bert,
    clip,
    deep_speech,
    densenet,
    dlrm,
    efficientnet,
    elmo,
    gpt2,
    hrnet,
    llama,
    mixture_of_experts,
    nasnet,
    resnet,
    retinanet,
    t5,
    tree_lstm,
    unet,
    vit,
)
from benchmarks.workloads import FURTHER, model_of, with_relatives, workloads
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.models import papers
from gdp.models.papers import PAPERS, Workload
from gdp.models.papers.base import Example
from gdp.models.pytorch import capture_fn
from gdp.models.source import ModelSource
from gdp.placers.contiguous import contiguous
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from tiny_models import TINY


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llama.LlamaConfig(1, num_key_heads=5), "num_key_heads is 5; a divisor"),
        (lambda: mixture_of_experts.MixtureOfExpertsConfig(1, num_experts=1), "at most num_experts"),
        (lambda: nasnet.NASNetConfig(1, filters=8), "NASNetConfig: filters is 8; at least 16"),
        (lambda: resnet.ResNetConfig(1, 34), "num_layers is 34; one of 26, 50"),
        (lambda: densenet.DenseNetConfig(1, 100), "num_layers is 100; one of 21, 41, 121"),
        (lambda: hrnet.HRNetConfig(1, num_branches=5), "num_branches is 5; one of 2, 3, 4"),
        (lambda: hrnet.HRNetConfig(1, image_width=200), "side is 200; a multiple of 32"),
        (lambda: retinanet.RetinaNetConfig(1, image_size=800), "image_size is 800; a multiple of 128"),
        (lambda: unet.UNetConfig(1, num_levels=5), "num_levels is 5; one of 3, 4, 6"),
        (lambda: unet.UNetConfig(1, image_size=100), "image_size is 100"),
        (lambda: unet.UNetConfig(1, channels=100), "channels is 100; a multiple of num_groups"),
        (lambda: bert.BERTConfig(1, num_steps=64), "num_masked is 76; at most num_steps"),
        (lambda: gpt2.GPT2Config(1, num_heads=24), "hidden is 1280; a multiple of num_heads"),
        (lambda: clip.CLIPConfig(1, image_size=100), "image_size is 100; a multiple of patch_size"),
        (lambda: dlrm.DLRMConfig(1, num_tables=27), "num_tables is 27; at most 26"),
        (lambda: deep_speech.DeepSpeechConfig(1, num_steps=20), "text_length is 12; at most half"),
        (lambda: tree_lstm.TreeLSTMConfig(1, num_leaves=12), "num_leaves is 12; a power of two"),
    ],
)
def test_bad_configs(make: Callable[[], object], message: str) -> None:
    """A config that makes no model is an input error."""
    with pytest.raises(InputError, match=message):
        make()


def test_parameter_counts_are_the_published_ones() -> None:
    """Exact counts are those of torchvision and of the authors' checkpoints, rounded ones those of the papers."""
    b0 = efficientnet.EfficientNetConfig(1, width_percent=100, depth_percent=100)
    mobile = nasnet.NASNetConfig(1, cells_per_stack=4, filters=44, stem_filters=32)
    with torch.device("meta"):
        for model, count in (
            (resnet.ResNet(resnet.ResNetConfig(1, 50)), 25_557_032),
            (resnet.ResNet(resnet.ResNetConfig(1, 101)), 44_549_160),
            (densenet.DenseNet(densenet.DenseNetConfig(1)), 7_978_856),
            (efficientnet.EfficientNet(b0), 5_288_548),
            (efficientnet.EfficientNet(efficientnet.EfficientNetConfig(1)), 19_341_616),
            # torchvision's, where P6 comes from P5 (256 channels, not 2048) and normalisations have no parameters
            (
                retinanet.RetinaNet(retinanet.RetinaNetConfig(1, num_classes=91)),
                34_014_999 + 9 * 256 * (2048 - 256) + 53_120,
            ),
            (gpt2.GPT2(gpt2.GPT2Config(1)), 774_030_080),
            (llama.Llama(llama.LlamaConfig(1)), 1_100_048_384),  # Zhang et al. 2024: TinyLlama
            # bert-large-uncased, and the heads of pre-training: h^2 + 3 h, vocabulary, 2 h + 2
            (bert.BERT(bert.BERTConfig(1)), 335_141_888 + 1024**2 + 3 * 1024 + 30522 + 2 * 1024 + 2),
            (t5.T5(t5.T5Config(1)), 222_903_552),
            (vit.ViT(vit.ViTConfig(1)), 304_326_632),
            (clip.CLIP(clip.CLIPConfig(1)), 149_620_737),
        ):
            assert num_parameters(model) == count, type(model).__name__
        for model, millions in (
            (nasnet.NASNet(nasnet.NASNetConfig(1)), 88.9),
            (nasnet.NASNet(mobile), 5.3),
            (hrnet.HRNet(hrnet.HRNetConfig(1)), 28.5),
            (hrnet.HRNet(hrnet.HRNetConfig(1, 48)), 63.6),
            (unet.UNet(unet.UNetConfig(1)), 114),
            (unet.UNet(unet.UNetConfig(1, image_size=32, num_levels=4)), 35.7),
            (deep_speech.DeepSpeech(deep_speech.DeepSpeechConfig(1)), 38),
            # without its softmax
            (elmo.ELMo(elmo.ELMoConfig(1, vocabulary=1)), 93.6),
        ):
            assert num_parameters(model) / 1e6 == pytest.approx(millions, rel=0.05 if millions == 38 else 0.005)


@pytest.mark.parametrize(
    ("build", "billions"),
    [
        (lambda: resnet.build(resnet.ResNetConfig(1)), 4.09),  # torchvision's tables
        (lambda: efficientnet.build(efficientnet.EfficientNetConfig(1)), 4.39),
        (lambda: vit.build(vit.ViTConfig(1)), 61.55),
        (lambda: nasnet.build(nasnet.NASNetConfig(1)), 23.8),  # its paper, table 2
        (lambda: hrnet.build(hrnet.HRNetConfig(1)), 7.10),  # its paper, table 1
        (lambda: unet.build(unet.UNetConfig(1)), 248.7),  # Fang et al. 2023, arXiv 2305.10924, table 2
    ],
)
def test_forward_flops_are_twice_the_published_multiply_adds_and_at_most_a_tenth_more(
    build: Callable[[], Example], billions: float
) -> None:
    """What is more is normalisation, activation, loss and resizing, which the published figures leave out."""
    capture = capture_fn(build, name="model", training=False)
    assert 1 <= capture.graph.flops.sum() / (2e9 * billions) < 1.1
    assert not capture.coverage.unknown


def test_alignments() -> None:
    """The loss of all alignments and its gradient equal PyTorch's."""
    torch.manual_seed(0)
    scores = torch.randn(9, 4, 6, requires_grad=True)
    texts = torch.tensor([[1, 1, 2], [3, 4, 3], [5, 5, 5], [1, 2, 3]])
    log_probabilities = scores.log_softmax(-1)
    losses = deep_speech.alignment_loss(log_probabilities, texts)
    expected = torch.nn.functional.ctc_loss(log_probabilities, texts, [9] * 4, [3] * 4, reduction="none")
    torch.testing.assert_close(losses, expected)
    gradients = [torch.autograd.grad(loss.sum(), scores, retain_graph=True)[0] for loss in (losses, expected)]
    torch.testing.assert_close(*gradients)


def test_relative_positions() -> None:
    """32 buckets: one way 16 exact and 16 for 16 to 128 and beyond; both ways half of that for each side."""
    steps = 200
    for causal in (False, True):
        bias = t5.RelativeBias(1, causal=causal)
        with torch.no_grad():
            bias.biases.weight.copy_(torch.arange(32.0).unsqueeze(1))
        buckets = bias(steps, torch.device("cpu"))[0, 0].detach()
        exact = 16 if causal else 8
        assert buckets[exact - 1, :exact].tolist() == list(range(exact))[::-1]
        assert buckets[128:, 0].tolist() == [float(2 * exact - 1)] * (steps - 128)
        assert (buckets.triu(1)[0, 1:] == -torch.inf).all() if causal else (buckets[0, 1:] > 15).all()


def test_a_tree_lstm_reads_every_word_and_its_root_last() -> None:
    """A tree lstm reads every word and its root last."""
    torch.manual_seed(0)
    module, (words, classes), _ = TINY["tree_lstm"]()
    assert isinstance(module, tree_lstm.TreeLSTM)
    outputs: list[torch.Tensor] = []
    module.eval()
    module.classes.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    changed = words.clone()
    changed[3] = (words[3] + 1) % 9
    for tokens in (words, changed):
        module(tokens, classes)
    differ = [not torch.equal(first, second) for first, second in zip(outputs[:7], outputs[7:], strict=True)]
    assert differ == [False, False, False, True, False, True, True]


@pytest.mark.long
@pytest.mark.parametrize("workload", [*FURTHER, *workloads.variants], ids=lambda workload: workload.name)
def test_stages_and_flops(workload: Workload) -> None:
    """Contiguous stages fit and the backward pass takes twice the flops of the forward pass."""
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


def test_routed_experts() -> None:
    """Routed experts equal a plain loop over tokens when every choice finds a place."""
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


def test_dropped_choices() -> None:
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


def test_relatives() -> None:
    """A family built from another's code is its relative."""
    for family in workloads.family_names():
        package = papers if family in PAPERS.family_names() else models
        code = (Path(package.__file__).parent / f"{family}.py").read_text()
        used = set(re.findall(r"from [\w.]+\.(\w+) import", code)) & set(workloads.family_names())
        assert used <= with_relatives(family)
        assert all(family in with_relatives(relative) for relative in with_relatives(family))


def test_the_registry() -> None:
    """The papers' workloads come first; every family has three variants or more, named after it and their sizes."""
    assert workloads.names()[:14] == PAPERS.names()
    assert set(workloads.family_names()) == set(TINY)
    families = [variant.family for variant in workloads.variants]
    assert all(families.count(family) >= 3 for family in TINY)
    assert all(variant.name.startswith(f"{variant.family}/") for variant in workloads.variants)
    assert len({*workloads.names(), *workloads.variant_names()}) == len(workloads.names()) + len(families)


def test_held_out_families() -> None:
    """Relatives are held out with a family, and leave the training set."""
    held_out = workloads.hold_out(with_relatives("vit") | with_relatives("rnnlm"))
    assert held_out == ("clip", "rnnlm", "vit")
    left = workloads.training_set(held_out)
    assert {workload.family for workload in left} == set(workloads.family_names()) - set(held_out)


def test_a_workload_is_a_model() -> None:
    """gdp reads a workload from its module, split as the workload splits its batch, and under the same names of ops."""
    name = "mixture_of_experts/l2-e4-b8"
    workload = workloads.get(name)
    graph = ModelSource(model_of(name)).part(2).graph
    assert graph.op_names == capture_fn(lambda: workload.build(4), name=name).graph.op_names
    assert ModelSource(model_of("dlrm")).batch_size == 8192
    assert model_of("gnmt-2") == "gnmt-2"
