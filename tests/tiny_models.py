"""A model of each family, small enough to train in a test."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

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
from gdp.models.papers import amoebanet, gnmt, inception, rnnlm, transformer_xl, wavenet
from gdp.models.papers.base import Example
from gdp.models.pytorch import Capture, capture

CONFIGS: dict[str, tuple[Callable[[Any], Example], Any]] = {
    "rnnlm": (rnnlm.build, rnnlm.RNNLMConfig(2, 2, num_steps=3, hidden=8, vocabulary=11)),
    "gnmt": (gnmt.build, gnmt.GNMTConfig(3, 2, num_steps=3, hidden=8, vocabulary=11)),
    "transformer_xl": (
        transformer_xl.build,
        transformer_xl.TransformerXLConfig(
            2, 2, num_segments=2, segment_steps=3, hidden=8, num_heads=2, inner=16, vocabulary=11
        ),
    ),
    "inception": (inception.build, inception.InceptionConfig(2, image_size=299, num_classes=7, width_divisor=16)),
    "amoebanet": (
        amoebanet.build,
        amoebanet.AmoebaNetConfig(2, cells_per_stack=1, filters=16, image_size=32, num_classes=7, stem_filters=4),
    ),
    "wavenet": (
        wavenet.build,
        wavenet.WaveNetConfig(2, 2, layers_per_stack=3, num_samples=20, channels=4, skip_channels=6, quantization=9),
    ),
    "llama": (
        llama.build,
        llama.LlamaConfig(2, 2, num_steps=5, hidden=16, num_heads=4, num_key_heads=2, inner=12, vocabulary=11),
    ),
    "mixture_of_experts": (
        mixture_of_experts.build,
        mixture_of_experts.MixtureOfExpertsConfig(
            2, 2, num_steps=16, hidden=16, num_heads=4, num_key_heads=2, inner=12, num_experts=3, vocabulary=11
        ),
    ),
    "resnet": (resnet.build, resnet.ResNetConfig(2, 26, image_size=32, width=4, num_classes=7)),
    "densenet": (densenet.build, densenet.DenseNetConfig(2, 21, image_size=32, growth=4, num_classes=7)),
    "nasnet": (
        nasnet.build,
        nasnet.NASNetConfig(2, cells_per_stack=1, filters=16, image_size=32, num_classes=7, stem_filters=4),
    ),
    "efficientnet": (
        efficientnet.build,
        efficientnet.EfficientNetConfig(2, width_percent=25, depth_percent=50, image_size=64, num_classes=7),
    ),
    "hrnet": (hrnet.build, hrnet.HRNetConfig(2, 4, num_branches=3, image_height=32, image_width=16)),
    "retinanet": (
        retinanet.build,
        retinanet.RetinaNetConfig(2, 26, image_size=128, width=4, channels=8, num_classes=3),
    ),
    "unet": (
        unet.build,
        unet.UNetConfig(
            2, image_size=16, num_levels=3, blocks_per_level=1, channels=8, attention_size=4, num_groups=4, dropout=0.1
        ),
    ),
    "bert": (bert.build, bert.BERTConfig(2, 2, num_steps=6, num_masked=3, hidden=8, num_heads=2, vocabulary=11)),
    "gpt2": (gpt2.build, gpt2.GPT2Config(2, 2, num_steps=5, hidden=8, num_heads=2, vocabulary=11)),
    "t5": (t5.build, t5.T5Config(2, 2, num_steps=5, hidden=8, num_heads=2, head=4, inner=16, vocabulary=11)),
    "vit": (vit.build, vit.ViTConfig(2, 2, hidden=8, num_heads=2, patch_size=4, image_size=8, num_classes=7)),
    "clip": (
        clip.build,
        clip.CLIPConfig(
            3,
            2,
            image_hidden=8,
            text_hidden=4,
            shared=6,
            patch_size=4,
            image_size=8,
            num_steps=5,
            vocabulary=11,
            head=4,
        ),
    ),
    "dlrm": (dlrm.build, dlrm.DLRMConfig(8, num_tables=6, hidden=4, max_rows=9)),
    "deep_speech": (
        deep_speech.build,
        deep_speech.DeepSpeechConfig(2, 2, num_steps=5, hidden=8, num_letters=4, text_length=2),
    ),
    "elmo": (
        elmo.build,
        elmo.ELMoConfig(2, 2, num_steps=3, hidden=8, projected=4, word_length=9, vocabulary=11, filter_divisor=32),
    ),
    "tree_lstm": (tree_lstm.build, tree_lstm.TreeLSTMConfig(2, num_leaves=4, hidden=8, word_width=6, vocabulary=9)),
}
"""What builds each model, and its sizes."""

TINY: dict[str, Callable[[], Example]] = {name: partial(build, config) for name, (build, config) in CONFIGS.items()}


def tiny(name: str, batch_size: int, **sizes: Any) -> Example:
    """Returns a model of `TINY` with inputs of another batch size; `sizes` are further fields of its configuration."""
    build, config = CONFIGS[name]
    return build(replace(config, batch_size=batch_size, **sizes))


class _Lstm(nn.Module):
    """PyTorch's own LSTM, which on CPUs is an operator for each layer and direction."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, 2, bidirectional=True)
        self.output = nn.Linear(8, 3)

    def forward(self, steps: Tensor) -> Tensor:
        output: Tensor = self.output(self.lstm(steps)[0])
        return output.square().mean()


EXECUTED: dict[str, Callable[[], Example]] = {
    **TINY,
    "hrnet": lambda: tiny("hrnet", 2, num_branches=2),  # a third of the ops, of the same kinds
    "lstm": lambda: (_Lstm(), (torch.randn(5, 2, 6),), {}),
}
"""Those and one more, whose operators keep what no other device can read."""
REPEATED = frozenset(
    ["amoebanet", "bert", "gpt2", "hrnet", "inception", "llama", "nasnet", "resnet", "rnnlm", "tree_lstm", "vit"]
)  # half of all ops, of kinds that are in the other models too


@cache
def captured(name: str) -> Capture:
    """Returns the training step of a model of `EXECUTED`, which many tests run: it is captured once."""
    return capture(*EXECUTED[name](), name=name)
