"""Training in float16 with a GradScaler: the losses, weights and scales of PyTorch's own loop, in every layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from execute.test_placed_layouts import Batch, Mlp, batches, built, eager_step, placed, points
from gdp import InputError
from gdp.execute.layouts.batch import split_inputs

NUM_STEPS, HALF = 12, 5
LAYOUTS = ("microbatches=2", "data=2", "data=2,microbatches=1:3", "data=2,zero=1", "data=2,zero=2", "data=2,zero=3")


class Autocast(nn.Module):
    """An MLP in float16 autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.layers(x)
        return cross_entropy(logits.float(), y)


def scaler_of() -> torch.amp.GradScaler:
    """Returns a scaler that grows until it overflows.

    Not in the first step: PyTorch's fused SGD leaves its momentum uninitialised then, and its losses become NaN.
    """
    return torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.8, fused=True)
    return torch.optim.AdamW(model.parameters(), 0.01, fused=True)


def plain(data: list[Batch], name: str, num_parts: int, clip_norm: float | None) -> tuple[list[float], list[float]]:
    """Returns losses and scales of PyTorch's own loop."""
    model, scaler = built(Autocast), scaler_of()
    optimizer = optimizer_of(model, name)
    losses, scales = [], []
    for batch in data:
        optimizer.zero_grad()
        parts = []
        for args, _ in split_inputs(batch, {}, num_parts):
            loss = model(*args)
            scaler.scale(loss / num_parts).backward()
            parts.append(loss.detach())
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(torch.stack(parts).mean()))
        scales.append(scaler.get_scale())
    return losses, scales


def trained(
    data: list[Batch], text: str, name: str, clip_norm: float | None, path: Path, *, is_resumed: bool = False
) -> tuple[list[float], list[float]]:
    model, scaler = built(Autocast), scaler_of()
    options = {"optimizer": optimizer_of(model, name), "clip_norm": clip_norm, "scaler": scaler}
    losses, scales = [], []
    with placed(model, data[0], text, **options, resume=path if is_resumed else None) as model_there:
        for batch in data[model_there.num_steps :]:
            if model_there.num_steps == HALF and not is_resumed:
                model_there.save(path)
            losses.append(float(model_there(*batch)))
            scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize(("name", "clip_norm"), [("sgd", None), ("adamw", 0.3)])
@pytest.mark.parametrize("text", LAYOUTS)
def test_losses_and_scales(text: str, name: str, clip_norm: float | None, tmp_path: Path) -> None:
    """Steps that overflow are left out, and the scale grows again; to the bit where sums have one order."""
    data, path = batches(points, NUM_STEPS), tmp_path / "half.safetensors"
    num_parts = 4 if "1:3" in text else 2
    expected, expected_scales = plain(data, name, num_parts, clip_norm)
    losses, scales = trained(data, text, name, clip_norm, path)
    assert scales == expected_scales
    assert min(np.diff(scales)) < 0 < max(np.diff(scales))
    assert np.isfinite(losses).all()
    if text in ("microbatches=2", "data=2"):
        assert losses == expected
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert trained(data, text, name, clip_norm, path, is_resumed=True) == (losses[HALF:], scales[HALF:])


def test_steps_that_cannot_be_scaled(tmp_path: Path) -> None:
    """A step that cannot be scaled is one line."""
    (batch,), path = batches(points, 1), tmp_path / "scaled.safetensors"
    with placed(built(Autocast), batch, "data=2", scaler=scaler_of()) as scaled:
        scaled(*batch)
        scaled.save(path)
    with pytest.raises(InputError, match=r"scaled.safetensors: the training scales its loss; give scaler="):
        placed(built(Autocast), batch, "data=2", resume=path)
    with pytest.raises(InputError, match=r"scaler is a float; a torch.amp.GradScaler is expected"):
        placed(built(Autocast), batch, "data=2", scaler=2.0)
    with (
        placed(built(Autocast), batch, "data=2", optimizer="adafactor", scaler=scaler_of()) as other,
        pytest.raises(InputError, match=r"scaler: an optimizer with gdp.adafactor_.default cannot leave a step out"),
    ):
        other(*batch)
    half = Mlp().half()
    parts = batch[0].half(), batch[1]
    with (
        placed(half, parts, "data=2", scaler=scaler_of()) as other,
        pytest.raises(InputError, match="scaler: gradients of float16 parameters cannot be unscaled"),
    ):
        other(*parts)


def test_disabled_scalers() -> None:
    """A scaler that is off changes nothing."""
    data = batches(points, 3)
    model, off = built(Mlp), torch.amp.GradScaler("cpu", enabled=False)
    with placed(model, data[0], "data=2", scaler=off) as trained_model:
        losses = [float(trained_model(*batch)) for batch in data]
    alone = built(Mlp)
    optimizer = torch.optim.Adam(alone.parameters(), fused=True)
    for batch, loss in zip(data, losses, strict=True):
        assert float(eager_step(alone, batch, 2)) == loss
        optimizer.step()
