"""A trained policy beside the untrained one: an untrained checkpoint is even with it, and nothing seen is measured."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import trained
from benchmarks.architectures.style_training import reset
from benchmarks.trained import TRAINED, TrainedBenchmark
from gdp.budget import Budget
from gdp.errors import InputError
from gdp.policy.checkpoint import new_policy, save_checkpoint
from gdp.policy.scheduler import SchedulerPolicy

NAMES = ("rnnlm-2", "unet-256")


@pytest.fixture(autouse=True)
def _compiled(small_inputs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained.methods, "warm_up", lambda: None)


def checkpoint(path: Path, *, change: float = 0.0, seen: tuple[str, ...] = ()) -> Path:
    policy = new_policy("default", style_scorer=16)
    assert isinstance(policy, SchedulerPolicy)
    assert policy.styles is not None
    if change:
        reset(policy.styles, torch.Generator().manual_seed(0))
        torch.nn.init.constant_(policy.styles.out, change)
    rows = [{"name": name, "fingerprint": name} for name in seen]
    save_checkpoint(path, policy, {"command": "gdp train", "updates": 1, "cpu_hours": 0.1, "graphs": rows})
    return path


def test_untrained(tmp_path: Path) -> None:
    """An untrained checkpoint is even and another is not."""
    budget = Budget(seconds=0.1)
    figures = []
    for number, change in enumerate((0.0, 5.0)):
        path = checkpoint(tmp_path / f"{number}.safetensors", change=change)
        bench = TrainedBenchmark(checkpoint=(path,), budget=budget, seeds=1, workloads=NAMES)
        figures.append(bench.run(out=tmp_path / str(number)))
    counted = [
        [mean["ratio"] for mean in one["means"] if mean["arm"] == TRAINED and "simulation" in mean["limit"]]
        for one in figures
    ]
    assert counted[0] == [1.0] * len(trained.SIMULATIONS)
    assert not np.allclose(counted[1], 1.0, atol=1e-3)
    assert "| workloads | 64 simulations | trained | 1.000 |" in figures[0]["markdown"]
    assert (tmp_path / "0" / "trained.svg").exists()


def test_a_workload_that_was_trained_on_is_refused(tmp_path: Path) -> None:
    """A workload that was trained on is refused."""
    path = checkpoint(tmp_path / "seen.safetensors", seen=NAMES[:1])
    with pytest.raises(InputError, match="was trained on rnnlm-2; leave it out of --workloads"):
        TrainedBenchmark(checkpoint=(path,), workloads=NAMES).run()


def test_policies_of_other_seeds_stand_beside_the_first(tmp_path: Path) -> None:
    """The second one is untrained, so it is even with the untrained policy."""
    paths = checkpoint(tmp_path / "first.safetensors", change=5.0), checkpoint(tmp_path / "second.safetensors")
    bench = TrainedBenchmark(checkpoint=paths, budget=Budget(seconds=0.1), seeds=1, workloads=NAMES[:1])
    figures = bench.run(rows=tmp_path / "rows")
    assert list(figures["trainings"]) == ["trained", "trained, second"]
    ratios = {(mean["arm"], mean["limit"]): mean["ratio"] for mean in figures["means"]}
    assert ratios["trained, second", "16 simulations"] == 1.0
    assert any(ratios["trained", limit] != 1.0 for limit in bench.limits[:4])
    assert f"--checkpoint {paths[0]},{paths[1]}" in bench.command
    assert len(list((tmp_path / "rows").iterdir())) == 4


def test_two_policies_of_one_name_are_refused(tmp_path: Path) -> None:
    """Two policies of one name are refused."""
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    paths = tuple(checkpoint(directory / "one.safetensors") for directory in directories)
    with pytest.raises(InputError, match="two files have one name"):
        TrainedBenchmark(checkpoint=paths, workloads=NAMES).run()
