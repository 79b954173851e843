"""The policy that searches ask is the one that was trained, and asking it needs no PyTorch."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.policy.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from gdp.policy.features import NUM_FEATURES
from gdp.policy.pretrained import read_policy, shipped
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.style_scorer import draw_style, style_numbers
from gdp.simulator.problem import Problem
from policy.test_scheduler import SMALL, layered, policy_of
from policy.tiny_policy import random_graph


@pytest.fixture(params=["plain", "styles"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Of a policy whose weights are all different."""
    size = 8 if request.param == "styles" else 0
    save_checkpoint(tmp_path / "policy.safetensors", policy_of(replace(SMALL, style_scorer=size)), {})
    return tmp_path / "policy.safetensors"


def place(constructor: object, problem: Problem) -> np.ndarray:
    rng = np.random.default_rng(0)
    instance = constructor.grouped(problem, 12, rng)  # type: ignore[attr-defined]
    placements: np.ndarray = constructor.place(instance, [draw_style(rng) for _ in range(8)], rng)  # type: ignore[attr-defined]
    return placements


def test_files_place_as_their_policy(checkpoint: Path) -> None:
    """The constructor that is read without PyTorch gives the placements and scores of the policy in the file."""
    policy = load_checkpoint(checkpoint)
    assert isinstance(policy, SchedulerPolicy)
    problem = layered()
    assert np.array_equal(place(read_policy(checkpoint), problem), place(policy.constructor, problem))


def test_files_score_as_their_policy(checkpoint: Path) -> None:
    """Where a policy has learned none, nor has its file."""
    policy, problem = load_checkpoint(checkpoint), layered()
    assert isinstance(policy, SchedulerPolicy)
    numbers = style_numbers([draw_style(np.random.default_rng(seed)) for seed in range(8)], problem.num_devices)
    in_file, in_policy = (one.scores(problem) for one in (read_policy(checkpoint), policy.constructor))  # type: ignore[union-attr]
    assert (in_file is None) == (in_policy is None) == (policy.styles is None)
    if in_file is not None and in_policy is not None:
        assert np.array_equal(in_file.of(numbers), in_policy.of(numbers))


MIXED = "p100-pcie-16g+v100-sxm-32g+2xp100-pcie-16g"


@pytest.mark.parametrize(
    ("problem", "devices"),
    [
        (layered(), "001110111102221022200220"),
        (Problem.build(random_graph(24, 0), Cluster.parse(MIXED)), "111111111110101111222333"),
    ],
)
def test_shipped_policy_places_as_ever(problem: Problem, devices: str) -> None:
    """The likeliest choices in three passes, recorded when the policy was shipped."""
    constructor, rng = read_policy(), np.random.default_rng(0)
    instance = constructor.grouped(problem, 16, rng, following=False)
    style = replace(
        draw_style(rng),
        scale=np.ones((2, NUM_FEATURES), np.float32),
        sees_all=True,
        most=1.0,
        slack=1.3,
        temperature=0.0,
        passes=3,
    )
    assert "".join(map(str, constructor.place(instance, [style], rng)[0])) == devices


def test_warm_up_compiles_all_kernels_once() -> None:
    """Each kernel is compiled for one combination of types, and PyTorch is not imported."""
    code = """
import sys
from gdp.planning import warm_up
warm_up.warm_up(("gdp-zero-shot", "exact"))
assert "torch" not in sys.modules
modules = (*warm_up._SIMULATION, *warm_up._SEARCH, *warm_up._EXACT, *warm_up._POLICY)
signatures = {kernel.py_func.__name__: kernel.signatures for kernel in warm_up.kernels_of(modules)}
for name in ("run_batch", "anneal", "earliest_first", "in_order", "best_interval", "_relax", "_branch", "roll_out"):
    assert signatures[name], name
assert all(len(types) <= 1 for types in signatures.values()), signatures
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_shipped_policy_holds_out_no_family() -> None:
    """The manifest of the policy that comes with gdp names its training, with no family held out."""
    manifest = read_checkpoint(shipped()).manifest
    assert manifest["held_out"] == []
    assert manifest["updates"] > 0
    assert "gdp train" in manifest["command"]


BASE = torch.ones(2, NUM_FEATURES)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"base": torch.zeros(2, 3)}, "tensor 'base' is torch.float32 (2, 3)"),
        ({"base": BASE.bfloat16()}, "tensor 'base' is torch.bfloat16"),
        ({"base": BASE * torch.nan}, "tensor 'base' holds values that are not finite"),
        ({"base": BASE * 3e38}, "tensor 'base' has weights beyond 1e+06"),
        ({"base": BASE, "other": BASE.clone()}, "tensor 'other' is none of the policy's"),
        ({"other": BASE}, "tensor 'base' is missing"),
    ],
)
def test_damaged_files_are_one_clear_error(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    """Both readers raise the same error, which names the file once."""
    path = tmp_path / "policy.safetensors"
    save_checkpoint(path, policy_of(SMALL), {})
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata)
    for read in (read_policy, load_checkpoint):
        with pytest.raises(InputError) as error:
            read(path)
        assert message in str(error.value)
        assert str(error.value).startswith(str(path))
        assert str(error.value).count(str(path)) == 1
