"""Training: it can be killed, resumed and stopped without changing what comes out."""

import json
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.policy.checkpoint import read_checkpoint
from gdp.policy.training.ppo import PPOConfig
from gdp.policy.training.pretrain import TrainingConfig, TrainingProgress, TrainingRun, train
from gdp.policy.training.tasks import TaskConfig, Tasks, TaskSource
from policy.tiny_policy import (
    kill_again_and_again,
    mixed_chain,
    parameters,
    random_graph,
    tiny_policy,
    tiny_tasks,
    tiny_training,
    train_tiny,
)

NUM_KILLS = 6
GOLDEN = [  # (mean reward, entropy)
    (-2.0076, 0.63186),
    (-1.57623, 0.62047),
    (-1.60935, 0.54661),
    (-1.37886, 0.43144),
    (-1.10791, 0.33735),
    (-1.05113, 0.28487),
    (-1.05366, 0.26411),
    (-1.03551, 0.24861),
    (-1.02242, 0.23164),
    (-1.01883, 0.21608),
    (-1.01558, 0.19923),
    (-1.01823, 0.18158),
    (-1.04329, 0.175),
    (-1.01561, 0.17784),
    (-1.02071, 0.1761),
    (-1.01934, 0.17251),
    (-1.02066, 0.16816),
    (-1.0341, 0.16174),
    (-1.0423, 0.15453),
    (-1.04158, 0.15089),
]


def start(target: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseProcess:
    """`target` in a process of its own, forked from a server that has PyTorch loaded and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gdp.policy.training.pretrain"])
    process = context.Process(target=target, args=args, kwargs=kwargs)
    process.start()
    return process


def assert_equal(first: Path, second: Path) -> None:
    torch.testing.assert_close(parameters(first), parameters(second), rtol=0.0, atol=0.0)


TWO_CARDS = Cluster.parse("2xp100-pcie-16g")


def test_the_curve_of_twenty_updates(tmp_path: Path) -> None:
    """Mean reward and entropy of each update, recorded once: what is learnt does not change unnoticed."""
    graphs, document = (mixed_chain(6), mixed_chain(9), random_graph(12, 0)), TWO_CARDS.to_document()
    links = [{"from": "*", "to": "*", "bandwidth": "12GB/s", "latency": "10us"}]  # whatever the catalogue has later
    cluster = Cluster.from_document(document | {"links": links})
    tasks = Tasks([TaskSource(graph, cluster) for graph in graphs], TaskConfig(), 0)
    config = TrainingConfig(
        updates=20, graphs_per_update=3, samples=8, learning_rate=0.05, warmup_updates=0, ppo=PPOConfig()
    )
    curve: list[tuple[float, float]] = []

    def note(progress: TrainingProgress) -> None:
        assert progress.statistics is not None
        curve.append((progress.statistics.reward, progress.statistics.entropy))

    run = TrainingRun(num_threads=1, on_update=note)
    train(tiny_policy(), tasks, config, tmp_path / "tiny.safetensors", run=run)
    assert np.array(curve) == pytest.approx(np.array(GOLDEN), abs=1e-4)


def test_kill_at_any_moment_and_resume(tmp_path: Path) -> None:
    """Killed again and again, with whatever file was there at that moment: the parameters end up bit-equal."""
    out, whole = tmp_path / "killed.safetensors", tmp_path / "whole.safetensors"
    process = start(kill_again_and_again, out, whole, 50, NUM_KILLS, 0)
    process.join(120)
    assert process.exitcode == 0
    deaths = json.loads(out.with_suffix(".json").read_text())
    assert deaths == sorted(set(deaths))  # every child got further than the one before
    assert len(deaths) > 3
    assert_equal(out, whole)


def test_stop_saves_the_last_whole_update(tmp_path: Path) -> None:
    """A run that is stopped resumes from its last whole update."""
    out, whole = tmp_path / "stopped.safetensors", tmp_path / "whole.safetensors"
    stop = threading.Event()

    def interrupt(progress: TrainingProgress) -> None:
        if progress.update == 3:
            stop.set()

    progress = train_tiny(out, 6, save_every=100, stop=stop, on_update=interrupt)
    assert (progress.update, read_checkpoint(out).manifest["updates"]) == (3, 3)
    train_tiny(out, 6, save_every=100)
    train_tiny(whole, 6)
    assert_equal(out, whole)


def test_resume_names_the_difference(tmp_path: Path) -> None:
    """Resuming another run names the first difference and overwrites nothing."""
    out = tmp_path / "tiny.safetensors"
    stop = threading.Event()
    train_tiny(out, 4, stop=stop, on_update=lambda progress: stop.set())
    before = out.read_bytes()
    graph = TaskSource(random_graph(9, 9), Cluster.parse("2xp100-pcie-16g"))
    for tasks, config, difference in (
        (tiny_tasks(), tiny_training(5), "training.updates = 4, not 5"),
        (tiny_tasks(), tiny_training(4, ppo=PPOConfig(clip=0.3, num_epochs=1)), "training.ppo.clip = 0.2, not 0.3"),
        (tiny_tasks(seed=1), tiny_training(4), "tasks.seed = 0, not 1"),
        (tiny_tasks(seed=1), tiny_training(5), "training.updates = 4, not 5"),
        (Tasks([graph], tiny_tasks().config, 0), tiny_training(4), "other graphs or devices"),
    ):
        with pytest.raises(InputError, match=f"{out}: was trained with {difference}.*; resume with the same arguments"):
            train(tiny_policy(), tasks, config, out, run=TrainingRun(resume=True))
    assert out.read_bytes() == before


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    """Its file has no optimizer state any more; resuming it changes nothing, and it cannot be prolonged."""
    out = tmp_path / "tiny.safetensors"
    train_tiny(out, 2)
    before = out.read_bytes()
    assert not read_checkpoint(out).training
    assert train_tiny(out, 2).update == 2
    assert out.read_bytes() == before


def test_learning_rate_rises_and_falls() -> None:
    """The learning rate rises linearly, then falls along a cosine."""
    config = TrainingConfig(updates=100, learning_rate=1.0, warmup_updates=9, final_learning_rate=0.1)
    rates = [config.learning_rate_at(update) for update in range(100)]
    assert rates[0] == pytest.approx(0.1, rel=1e-3)
    assert max(rates) == pytest.approx(rates[9])
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("wrong", [{"updates": 0}, {"samples": 1}, {"learning_rate": 0.0}, {"seed": -1}])
def test_bad_settings_are_refused(wrong: dict[str, object]) -> None:
    """The error names the setting."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        TrainingConfig(**wrong)  # type: ignore[arg-type]
