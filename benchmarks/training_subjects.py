"""The models that benchmark `execution-against` trains: at sizes that a processor core steps in about a second."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import families
from gdp.execute.layouts.batch import split_inputs
from gdp.models.papers.base import Example
from gdp.models.papers.workload import Family, Workload
from gdp.models.pytorch.program import named_inputs

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_SEED = 0
_ANY = "2xp100-pcie-16g"  # workloads name the devices that they are usually placed on; here others take their place


@dataclass(frozen=True)
class Subject:
    """A model and its batch. Every process that builds it has the same parameters and inputs.

    It drops nothing out, so that all ways to train it have the same losses. A module may be made for its number of
    samples, such as experts that take a share of them: so there is one for each part of the batch.
    """

    name: str
    kind: str  # in words
    family: Family
    batch_size: int
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        return self.family.workload(self.name, _ANY, self.batch_size, **self.sizes)

    def counts(self) -> list[int]:
        """Returns the numbers of equal parts that the batch has, ascending."""
        return [count for count in range(1, self.batch_size + 1) if not self.batch_size % count]

    def module(self, num_parts: int = 1) -> nn.Module:
        """Builds the model for one of `num_parts` parts of the batch; its parameters are those of the whole."""
        module, _, _ = self._build(num_parts)
        if num_parts > 1:
            module.load_state_dict(self._build()[0].state_dict())
        return module

    def inputs(self, num_parts: int = 1) -> list[Inputs]:
        """Returns the inputs [P] of the parts of the batch."""
        _, args, kwargs = self._build()
        _, part_args, part_kwargs = self._build(num_parts)
        sizes = {name: tuple(tensor.shape) for name, tensor in named_inputs(part_args, part_kwargs)}
        return list(split_inputs(args, kwargs, num_parts, sizes))

    def _build(self, num_parts: int = 1) -> Example:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            module, args, kwargs = self.workload.build(self.batch_size // num_parts)
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return module, args, kwargs


SUBJECTS: Mapping[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("resnet-50", "convolutions", families.RESNET, 8, {"num_layers": 50, "image_size": 64}),
        Subject("vit", "vision transformer", families.VIT, 16, {"num_layers": 4, "hidden": 384, "image_size": 128}),
        Subject(
            "bert",
            "encoder",
            families.BERT,
            8,
            {"num_layers": 4, "hidden": 384, "num_heads": 6, "num_steps": 128, "num_masked": 20, "vocabulary": 8000},
        ),
        Subject(
            "gpt2",
            "decoder",
            families.GPT2,
            8,
            {"num_layers": 4, "hidden": 384, "num_heads": 6, "num_steps": 128, "vocabulary": 8000},
        ),
        Subject("deep-speech", "recurrent layers", families.DEEP_SPEECH, 16, {"hidden": 512}),
        Subject(
            "moe",
            "mixture of experts",
            families.MIXTURE_OF_EXPERTS,
            8,
            {
                "num_layers": 4,
                "hidden": 256,
                "num_heads": 8,
                "num_key_heads": 2,
                "inner": 704,
                "num_experts": 4,
                "num_steps": 128,
                "vocabulary": 8000,
            },
        ),
        Subject("unet", "U-Net", families.UNET, 8, {"num_levels": 4, "channels": 64, "image_size": 32}),
        Subject(
            "clip",
            "two towers",
            families.CLIP,
            16,
            {
                "num_layers": 4,
                "image_hidden": 384,
                "text_hidden": 256,
                "shared": 256,
                "image_size": 128,
                "num_steps": 32,
                "vocabulary": 8000,
            },
        ),
        Subject("depthwise", "depthwise convolutions", families.CONV_MIXER, 8),
        Subject("lstm", "PyTorch's LSTM", families.LSTM, 32),
        Subject("graph", "graph network of gathers", families.GRAPH_NET, 16),
        Subject("cached", "decoder with a cache", families.CACHED_DECODER, 16),
    )
}


def loss_of(module: nn.Module, inputs: Inputs) -> Tensor:
    """Returns the loss of a part of the batch: the modules of workloads return it."""
    args, kwargs = inputs
    loss: Tensor = module(*args, **kwargs)
    return loss
