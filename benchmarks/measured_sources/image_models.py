"""timm's image models on one card: training and inference steps that timm publishes, under autocast to float16.

A step is captured as it was run, at the row's batch and image size, in channels_last where the row says so. Training is
of 2022: attention is computed by products and a softmax. It has cross entropy and SGD with momentum, a loop over
parameters.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measured_sources.source import (
    DATA,
    CapturedGraphs,
    MeasuredRow,
    MeasuredSource,
    PredictedRow,
    on_one_card,
    read_table,
)
from benchmarks.torchvision_stand_in import torchvision_stand_in
from gdp.errors import InputError
from gdp.graph import Graph

if TYPE_CHECKING:
    import torch

CARDS = {"rtx3090": "rtx3090-24g", "rtx4090": "rtx4090-24g"}
_FEW_FLOPS = 30  # of a byte: convolutions of groups, or of few channels
_LARGE_SHARE, _SMALL_SHARE = 0.75, 0.2  # of the FLOPs of a model, or of its convolutions


@dataclass(frozen=True, slots=True)
class ImageStep:
    """A step as it was run."""

    model: str
    batch: int
    image: int  # pixels of a side
    training: bool
    channels_last: bool

    @property
    def name(self) -> str:
        """A name for what is captured."""
        phase, form = "train" if self.training else "infer", "nhwc" if self.channels_last else "nchw"
        return f"timm-{self.model}-b{self.batch}-{self.image}px-{phase}-{form}"


@dataclass(frozen=True)
class ImageModelSteps(MeasuredSource):
    """The rows of all files `timm-PHASE-*`; `most` of each, the same models for all as far as they have them."""

    most: int | None = None  # rows of a file; None: all
    phase = ""

    def rows(self) -> Sequence[MeasuredRow]:
        """Returns the rows, file by file; those of one captured step follow each other."""
        found = [row for path in sorted(DATA.glob(f"timm-{self.phase}-*.csv")) for row in self._of_file(path)]
        return sorted(found, key=lambda row: row.case.name)

    def _of_file(self, path: Path) -> list[MeasuredRow]:
        _, phase, form, runtime, card, *_ = path.stem.split("-")
        run = path.stem.removeprefix(f"timm-{phase}-")
        rows = []
        for line in read_table(path, ("model", "batch", "image", "ms")):
            batch, image = int(line["batch"]), int(line["image"])
            step = ImageStep(line["model"], batch, image, phase == "train", form == "nhwc")
            row = MeasuredRow(
                f"{run}-{step.model}-{image}",
                float(line["ms"]),
                CARDS[card],
                step,
                runtime,
                ranked_with=run,
                chosen_from=f"{card}-{step.model}-{image}" if run.endswith("rtx3090") else "",  # a memory format
                model=step.model,
                amount=batch,
            )
            rows.append(row)
        rows.sort(key=lambda row: _drawn(row.case.model))
        return rows[: self.most]

    def predict(self, row: MeasuredRow, graphs: CapturedGraphs) -> PredictedRow:
        """Simulates the step on one card."""
        step: ImageStep = row.case
        graph = graphs.read(step.name, lambda: capture(step))
        simulation = on_one_card(graph, row.card, row.runtime)
        form = "channels_last" if step.channels_last else "NCHW"
        fits = not simulation.missing_bytes.any()
        return PredictedRow(
            row, simulation.step_time_ns / 1e6, f"{kind_of(graph)}, {form}", fits, step_kind=simulation.step_kind
        )


class ImageTraining(ImageModelSteps):
    """Training on an RTX 3090."""

    name, phase = "timm-training", "train"
    about = "timm's training, PyTorch 1.12"


class ImageInference(ImageModelSteps):
    """Inference on an RTX 3090 and an RTX 4090."""

    name, phase = "timm-inference", "infer"
    about = "timm's inference, PyTorch 2.4 and 2.9"


def _drawn(model: str) -> str:
    """Returns a key in whose order models are drawn."""
    return hashlib.sha256(model.encode()).hexdigest()


def kind_of(graph: Graph) -> str:
    """Returns the kind of an image model, by the work of the ops of its forward pass."""
    is_forward = graph.is_in_phase("forward") if graph.is_in_phase("forward").any() else np.ones(graph.num_ops, bool)
    kinds, flops = np.array(graph.kinds), np.where(is_forward, graph.flops, 0)
    is_convolution = np.char.find(kinds, "convolution") >= 0
    share = flops[is_convolution].sum() / max(flops.sum(), 1)
    if share < _SMALL_SHARE:
        return "transformer"
    if share < _LARGE_SHARE:
        return "hybrid"
    ours = is_convolution & is_forward
    has_few = graph.flops[ours] < _FEW_FLOPS * graph.bytes_accessed[ours]
    return "depthwise convolutions" if has_few.mean() > _SMALL_SHARE else "convolutions"


def capture(step: ImageStep) -> Graph:
    """Captures the step; InputError where timm is missing, or has no such model."""
    import torch

    from gdp.models.model import Reading
    from gdp.models.pytorch import capture_fn
    from gdp.models.source import ModelSource

    try:
        with torchvision_stand_in():
            layers = import_module("timm.layers")
    except ImportError:
        raise InputError(f"{step.model}: needs timm; pip install --no-deps timm") from None

    def build() -> Any:
        text = f"timm:{step.model}?batch={step.batch}&image={step.image}"
        layers.set_fused_attn(not step.training)
        layers.set_fast_norm(not step.training)
        try:
            module, images, labels = ModelSource(text, Reading(training=step.training)).build()
        finally:
            layers.set_fused_attn(True)
            layers.set_fast_norm(False)
        if step.channels_last:
            module = module.to(memory_format=torch.channels_last)
            images = [each.contiguous(memory_format=torch.channels_last) for each in images]
        return _in_halves(module), tuple(images), labels

    optimizer = "sgd-momentum,for-loop" if step.training else "adam"  # of inference none
    return capture_fn(build, name=step.name, training=step.training, optimizer=optimizer).graph


def _in_halves(module: "torch.nn.Module") -> "torch.nn.Module":
    """Returns `module`, whose forward pass is under autocast to float16."""
    import torch

    class UnderAutocast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cuda", torch.float16):
                return self.module(*args, **kwargs)

    return UnderAutocast()
