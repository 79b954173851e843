"""Checkpoint files come back as they were, and bad ones are refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from gdp.errors import InputError
from gdp.policy import checkpoint
from gdp.policy.checkpoint import load_checkpoint, new_policy, read_checkpoint, save_checkpoint
from policy.tiny_policy import TINY, TinyConfig, TinyPolicy, tiny_policy

MANIFEST = {"graphs": [{"name": "a", "num_ops": 3}], "cpu_hours": 0.5}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "POLICIES", {**checkpoint.POLICIES, **TINY})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.safetensors"
    save_checkpoint(file, tiny_policy(3), MANIFEST, {"updates": torch.tensor(7)})
    return file


def edit(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the file with its header and tensors changed."""
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["gdp"])
    tensors = load_file(path)
    change(header, tensors)
    save_file(tensors, path, {"gdp": json.dumps(header)})


def test_contents_come_back(tmp_path: Path) -> None:
    """A file gives back configuration, manifest and parameters."""
    policy = TinyPolicy(TinyConfig(hidden=5, scale=2, sizes=(1, 2)))  # an integer where the default is a float
    save_checkpoint(tmp_path / "a.safetensors", policy, MANIFEST)
    loaded = load_checkpoint(tmp_path / "a.safetensors")
    assert isinstance(loaded, TinyPolicy)
    assert loaded.config == policy.config
    assert read_checkpoint(tmp_path / "a.safetensors").manifest == MANIFEST
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_equal_contents_are_equal_bytes(path: Path, tmp_path: Path) -> None:
    """Files do not depend on their name or time."""
    save_checkpoint(tmp_path / "again", tiny_policy(3), MANIFEST, {"updates": torch.tensor(7)})
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", list(checkpoint.POLICIES))
def test_policies_depend_on_their_seed_alone(name: str, tmp_path: Path) -> None:
    """Each policy survives a file, and its initial parameters are those of its seed."""
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    policy = new_policy(name, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    save_checkpoint(tmp_path / "policy.safetensors", policy, {})
    torch.manual_seed(12)
    loaded, again = load_checkpoint(tmp_path / "policy.safetensors"), new_policy(name, seed=1)
    for key, tensor in policy.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[key])
        assert torch.equal(tensor, again.state_dict()[key])


def set_header(**values: object) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda header, _: header.update(values)


CONFIG: dict[str, Any] = {"hidden": 8, "scale": 1.0, "sizes": [3]}
WEIGHT = "score_device.0.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_header(format="gdp-plan"), "format is 'gdp-plan'; 'gdp-checkpoint' is expected"),
        (set_header(version=1), "version is 1; this gdp reads gdp-checkpoint version 5"),
        (set_header(policy="hdp"), "policy 'hdp' is unknown; one of default, tiny is expected"),
        (set_header(extra=1), "header: unknown key 'extra'"),
        (set_header(manifest=[]), r"header: manifest is \[\]; a mapping is expected"),
        (set_header(config={**CONFIG, "depth": 2}), "config: depth is unknown"),
        (set_header(config={"hidden": 8, "scale": 1.0}), "config: sizes is missing"),
        (set_header(config={**CONFIG, "hidden": "8"}), "config: hidden is '8'; int is expected"),
        (set_header(config={**CONFIG, "hidden": -1}), "config: .* negative dimension"),
        (lambda _, tensors: tensors.pop(WEIGHT), f"tensor '{WEIGHT}' is missing"),
        (lambda _, tensors: tensors.update(more=torch.ones(1)), "tensor 'more' is none of the policy's"),
        (
            lambda _, tensors: tensors.update({WEIGHT: torch.ones(8, 4)}),
            rf"tensor '{WEIGHT}' is torch.float32 \(8, 4\); torch.float32 \(8, 3\) is expected",
        ),
        (lambda _, tensors: tensors.update({WEIGHT: torch.ones(8, 3).double()}), "torch.float64"),
        (lambda _, tensors: tensors[WEIGHT].fill_(torch.nan), f"tensor '{WEIGHT}' holds values that are not finite"),
    ],
)
def test_faults_are_said_in_one_line(path: Path, change: Any, message: str) -> None:
    """A file with a wrong header or tensor is refused in a line that names the file."""
    edit(path, change)
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_truncated_files_are_refused(path: Path) -> None:
    """A file is refused wherever it ends."""
    content = path.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=f"{path}: truncated, or no safetensors file"):
            read_checkpoint(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    """Files that are no checkpoints are refused by what they are."""
    save_file({"a": torch.ones(2)}, tmp_path / "foreign.safetensors", {"format": "pt"})
    (tmp_path / "graph.json").write_text('{"format": "gdp-graph"}')
    (tmp_path / "directory").mkdir()
    for name, message in {
        "foreign.safetensors": "has no gdp header",
        "graph.json": "truncated, or no safetensors file",
        "directory": "is a directory",
        "absent": "no such file",
    }.items():
        with pytest.raises(InputError, match=message) as caught:
            load_checkpoint(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_bad_parameters_keep_the_good_file(path: Path) -> None:
    """Parameters that are not finite are not written over good ones."""
    good, policy = path.read_bytes(), tiny_policy()
    with torch.no_grad():
        policy.score_device[0].weight.fill_(torch.inf)
    with pytest.raises(InputError, match="not written, parameter"):
        save_checkpoint(path, policy, MANIFEST)
    assert path.read_bytes() == good
    assert load(good)[WEIGHT].isfinite().all()
