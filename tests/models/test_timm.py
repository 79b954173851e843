"""`timm:NAME` captures timm's image models by name, with random weights; torchvision is stood in for."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.torchvision_stand_in import torchvision_stand_in
from gdp.errors import InputError
from gdp.execute.equality import compare, eager_parts
from gdp.models.model import Reading
from gdp.models.source import ModelSource

with torchvision_stand_in():
    timm = pytest.importorskip("timm")

pytestmark = pytest.mark.usefixtures("workplace")


def capture(text: str, **reading: Any) -> Any:
    return ModelSource(text, Reading(**reading)).capture()


@pytest.mark.parametrize(
    ("text", "multiply_adds"),  # of an image, in millions, as timm's model cards say
    [("resnet18", 1_820), ("vit_tiny_patch16_224", 1_260), ("nest_tiny", 5_780)],
)
def test_flops_of_models(text: str, multiply_adds: int) -> None:
    """A product of weights is two FLOPs; norms and activations come on top, and attention, which some do not count."""
    captured = capture(f"timm:{text}{'&' if '?' in text else '?'}batch=2", training=False)
    assert captured.graph.flops.sum() / 2 / 2e6 == pytest.approx(multiply_adds, rel=0.06)
    assert not captured.coverage.unknown


def test_parameters_and_sizes() -> None:
    """ResNet-50 has 25,557,032 parameters; batch, image and type come from the query, or from options."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        module, (images,), inputs = ModelSource("timm:resnet50?batch=4&image=96&dtype=bfloat16").build()
    assert sum(parameter.numel() for parameter in module.parameters()) == 25_557_032
    assert (tuple(images.shape), images.dtype, tuple(inputs["labels"].shape)) == ((4, 3, 96, 96), torch.bfloat16, (4,))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        _, (images,), _ = ModelSource("timm:vit_tiny_patch16_224", Reading(batch=6, dtype="float16")).build()
    assert (tuple(images.shape), images.dtype) == ((6, 3, 224, 224), torch.float16)


def test_training_is_with_cross_entropy() -> None:
    """A step computes what PyTorch computes, with the cross entropy of labels; halves of a batch are parts of it."""
    text = "timm:test_resnet?batch=4&image=64"
    source = ModelSource(text, Reading(optimizer="sgd"))
    captured = source.capture()
    assert {"aten._log_softmax", "aten.nll_loss_forward"} <= set(captured.graph.kinds)
    torch.manual_seed(0)
    module, args, kwargs = source.build()
    replayed = captured.program.replay(module, args, kwargs)
    assert compare(replayed, eager_parts(captured.program, module, [(args, kwargs)])).is_exact
    parts = ModelSource(text, Reading(microbatches=2)).whole().graph
    assert sum(kind == "aten.nll_loss_forward" for kind in parts.kinds) == 2


@pytest.mark.parametrize("name", ["hiera_tiny_224", "regnetz_005", "swin_tiny_patch4_window7_224", "levit_128s"])
def test_builders_that_read_numbers(name: str) -> None:
    """Models whose widths, rates and positions are computed with tensors are built under fake tensors."""
    assert capture(f"timm:{name}?batch=2", training=False).graph.num_ops > 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timm:resnet5", r"has no 'resnet5'; did you mean resnet50"),
        ("timm:resnet50.a9_in1k", r"resnet50 has no weights 'a9_in1k'; did you mean ra_in1k"),
        ("timm:hf-hub:timm/resnet50", r"has no 'hf-hub:timm/resnet50'"),
        ("timm:", "names no model; timm:NAME is expected"),
        ("timm:resnet18?batch=0", "batch is '0'; an integer of at least 1"),
        ("timm:resnet18?images=64", "'images=64' is no size"),
        ("timm:resnet18?sequence=64", "sequence is given, but the model reads images"),
        ("timm:levit_128s?image=100", "leave image out"),
        ("timm:vit_tiny_patch16_224?image=8", "leave image out"),
        ("timm:resnet18?dtype=int8", "dtype is 'int8'"),
    ],
)
def test_errors(text: str, message: str) -> None:
    """Names, tags and sizes that timm does not take are refused in one line with the remedy."""
    with pytest.raises(InputError, match=message) as caught:
        capture(text, training=False)
    assert "\n" not in str(caught.value)


def test_prefill_is_for_transformers() -> None:
    """An image model has no cache."""
    with pytest.raises(InputError, match="--phase: timm:resnet18 is read as it is"):
        ModelSource("timm:resnet18", Reading(serving=SimpleNamespace(has_cache=True))).whole()  # type: ignore[arg-type]


def test_timm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without timm, or without torchvision, the answer is one line with the command that installs it."""
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "timm", None)
        with pytest.raises(InputError, match=r"needs timm; pip install 'gdp-placement\[timm\]'"):
            capture("timm:resnet18")
