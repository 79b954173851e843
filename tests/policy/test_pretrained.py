"""The policy that searches ask is the one that was trained, and asking it needs no PyTorch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gdp.errors import InputError
from gdp.policy.checkpoint import load_checkpoint, new_policy, read_manifest, save_checkpoint
from gdp.policy.pretrained import read_constructor, shipped
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.styles import draw_style
from gdp.problem import Problem
from policy.test_scheduler import SMALL, layered, policy_of


@pytest.fixture(params=["plain", "network"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Of a policy whose weights are all different."""
    policy = policy_of(SMALL) if request.param == "network" else new_policy("default")
    with torch.no_grad():
        policy.get_parameter("base").add_(torch.linspace(0, 1, 2 * policy.get_parameter("base").shape[1]).view(2, -1))
    save_checkpoint(tmp_path / "policy.safetensors", policy, {})
    return tmp_path / "policy.safetensors"


def place(constructor: object, problem: Problem) -> np.ndarray:
    rng = np.random.default_rng(0)
    instance = constructor.grouped(problem, 12, rng)  # type: ignore[attr-defined]
    placements: np.ndarray = constructor.place(instance, [draw_style(rng) for _ in range(8)], rng)  # type: ignore[attr-defined]
    return placements


def test_the_constructor_in_a_file_places_as_the_policy_does(checkpoint: Path) -> None:
    policy = load_checkpoint(checkpoint)
    assert isinstance(policy, SchedulerPolicy)
    problem = layered()
    assert np.array_equal(place(read_constructor(checkpoint), problem), place(policy.constructor, problem))


def test_a_search_that_asks_the_policy_does_not_import_pytorch() -> None:
    code = (
        "import sys; from gdp.warmup import warm_up; warm_up(); from gdp.placers.portfolio import read_constructor; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_shipped_policy_was_trained_on_every_family() -> None:
    manifest = read_manifest(shipped())
    assert manifest["held_out"] == []
    assert manifest["updates"] > 0
    assert "gdp train" in manifest["command"]


def test_what_no_search_can_ask_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_checkpoint(path, new_policy("paper"), {})
    with pytest.raises(InputError, match="holds policy 'paper', which no search can ask"):
        read_constructor(path)
    save_checkpoint(path, new_policy("default"), {})
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    for base, message in ((torch.zeros(2, 3), "tensor 'base' is float32"), (None, "tensor 'base' is missing")):
        tensors = {"other": torch.zeros(1)} if base is None else {**load_file(path), "base": base}
        save_file(tensors, tmp_path / "bad.safetensors", metadata)
        with pytest.raises(InputError, match=message):
            read_constructor(tmp_path / "bad.safetensors")
