"""`hf:DIR` captures the models of Diffusers from their configs, with inputs found by their names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.small_models import DIFFUSERS
from gdp.errors import InputError
from gdp.models.model import Reading
from gdp.models.source import ModelSource

# the others are captured by the benchmark `ops`
TESTED = (
    "FluxTransformer2DModel",
    "SD3Transformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
    "PixArtTransformer2DModel",
    "HunyuanDiT2DModel",
    "HunyuanVideoTransformer3DModel",
    "SanaTransformer2DModel",
    "Lumina2Transformer2DModel",
    "CogVideoXTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "AuraFlowTransformer2DModel",
    "MochiTransformer3DModel",
    "AllegroTransformer3DModel",
    "UNetSpatioTemporalConditionModel",
    "AutoencoderKL",
)
QUICK = {  # two streams of images and text, videos, linear attention, convolutions
    "FluxTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "SanaTransformer2DModel",
    "UNetSpatioTemporalConditionModel",
    "AutoencoderKL",
}


def model_of(name: str, directory: Path, sizes: str = "", **other: Any) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"_class_name": name, **DIFFUSERS.get(name, {}), **other}))
    return f"hf:{directory}?batch=2&dtype=float32{sizes}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in TESTED]
)
def test_steps(name: str, tmp_path: Path) -> None:
    """Inference and training are captured, every cost known; backward passes take twice the forward one, or less."""
    text = model_of(name, tmp_path, "&image=16")
    forward = ModelSource(text, Reading(training=False)).capture()
    step = ModelSource(text).capture()
    assert not forward.coverage.unknown
    assert not step.coverage.unknown
    assert 2.0 < step.graph.flops.sum() / forward.graph.flops.sum() < 4.0


@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("FluxTransformer2DModel", "&image=32", (2, 16 * 16, 16)),  # patches of two by two
        ("SD3Transformer2DModel", "", (2, 16, 16, 16)),
        ("WanTransformer3DModel", "&image=24&frames=5", (2, 16, 5, 24, 24)),
        ("CogVideoXTransformer3DModel", "&frames=5", (2, 5, 16, 16, 16)),
        ("LTXVideoTransformer3DModel", "&image=8&frames=3", (2, 3 * 8 * 8, 16)),
        ("AutoencoderKLWan", "&image=32", (2, 3, 9, 32, 32)),
    ],
)
def test_sizes(name: str, sizes: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Images, latents and videos have the shapes that Diffusers' pipelines give them."""
    with FakeTensorMode():
        _, _, inputs = ModelSource(model_of(name, tmp_path, sizes)).build()
    main = inputs["hidden_states"] if "hidden_states" in inputs else inputs["sample"]
    assert tuple(main.shape) == shape


def test_flops_of_flux(tmp_path: Path) -> None:
    """One block of each kind, width 32, 256 patches and 16 tokens: products of weights and of attention by hand."""
    text = model_of("FluxTransformer2DModel", tmp_path, "&image=32&sequence=16")
    graph = ModelSource(text, Reading(training=False)).whole().graph
    products = sum(
        int(flops)
        for kind, flops, name in zip(graph.kinds, graph.flops, graph.op_names, strict=True)
        if kind in ("aten.addmm", "aten.mm") and "transformer_blocks" in name and "norm" not in name
    )
    rows, width = 2 * (256 + 16), 32
    # queries, keys, values, output and two of four times the width, for each stream; the single block has all in two
    double = rows * width * width * (3 + 1 + 8)
    single = rows * width * width * (3 + 4 + 5)
    assert products == pytest.approx(2 * (double + single), rel=0.02)  # and a bias for each output


def test_micro_batches(tmp_path: Path) -> None:
    """Halves of a batch are parts of all inputs that have one."""
    text = model_of("FluxTransformer2DModel", tmp_path, "&image=16")
    whole = ModelSource(text, Reading(training=False)).whole().graph
    half = ModelSource(text, Reading(training=False, microbatches=2)).part(2).graph
    assert half.flops.sum() == pytest.approx(whole.flops.sum() / 2, rel=0.05)


def test_real_models_run(tmp_path: Path) -> None:
    """A captured step computes what Diffusers computes."""
    text = model_of("SD3Transformer2DModel", tmp_path, "&sequence=8")
    source = ModelSource(text, Reading(training=False))
    captured = source.capture()
    torch.manual_seed(0)
    module, args, kwargs = source.build()
    replayed = captured.program.replay(module, args, kwargs)
    with torch.no_grad():
        expected = module(**kwargs).sample
    torch.testing.assert_close(replayed.outputs["sample"], expected)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("FluxTransformer2D", "", "no model of Diffusers .*; did you mean FluxTransformer2DModel"),
        ("FluxPipeline", "", "_class_name is 'FluxPipeline', no model of Diffusers"),
        ("PriorTransformer", "", "needs hidden_states, proj_embedding, which this version cannot make"),
        ("SD3Transformer2DModel", "&context=3", "context is the size of a cache"),
        ("AutoencoderKL", "&frames=3", "frames is given, but the model reads images; leave it out"),
        ("UNet2DConditionModel", "&frames=3", "frames is given, but the model reads images; leave it out"),
        ("FluxTransformer2DModel", "&frames=3", "frames is given, but the model reads images; leave it out"),
        ("AutoencoderKL", "&sequence=3", "sequence is given, but the model reads sample"),
    ],
)
def test_refusals(name: str, sizes: str, message: str, tmp_path: Path) -> None:
    """Unknown classes, inputs and sizes are refused in one line with the remedy."""
    other = {"num_layers": 1} if name == "PriorTransformer" else {}
    with pytest.raises(InputError, match=message) as caught:
        ModelSource(model_of(name, tmp_path, sizes, **other)).capture()
    assert "\n" not in str(caught.value)
