"""Training: it can be killed, resumed, stopped and shared out over processes without changing what comes out."""

import json
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.policy.checkpoint import read_checkpoint, read_manifest
from gdp.policy.ppo import PAPER
from gdp.policy.pretraining import Progress, TrainingConfig, best_path, train
from gdp.policy.tasks import Source, TaskConfig, Tasks
from policy.tiny_policy import (
    mixed_chain,
    parameters,
    random_graph,
    tiny_policy,
    tiny_tasks,
    tiny_training,
    train_tiny,
)

NUM_KILLS = 6
GOLDEN_REWARDS = [
    -2.0076, -1.59399, -1.59035, -1.37927, -1.08387, -1.05148, -1.0183, -1.03514, -1.01717, -1.01877,
    -1.01739, -1.01889, -1.01678, -1.01672, -1.01994, -1.0193, -1.01994, -1.03566, -1.04254, -1.04189,
]  # fmt: skip
GOLDEN_ENTROPIES = [
    0.63263, 0.61774, 0.52346, 0.39679, 0.31238, 0.27514, 0.24805, 0.23059, 0.22526, 0.22411,
    0.21395, 0.20104, 0.1901, 0.18487, 0.18022, 0.17639, 0.16918, 0.16368, 0.15959, 0.15457,
]  # fmt: skip


def start(target: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseProcess:
    """`target` in a process of its own, forked from a server that has PyTorch loaded and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gdp.policy.pretraining"])
    process = context.Process(target=target, args=args, kwargs=kwargs)
    process.start()
    return process


def assert_equal(first: Path, second: Path, tolerance: float = 0.0) -> None:
    ours, theirs = parameters(first), parameters(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0.0, atol=tolerance)


def test_the_curve_of_twenty_updates(tmp_path: Path) -> None:
    """Mean reward and entropy of each update, recorded once: what is learnt does not change unnoticed."""
    graphs, cluster = (mixed_chain(6), mixed_chain(9), random_graph(12, 0)), Cluster.parse("2xp100-pcie-16g")
    tasks = Tasks([Source(graph, cluster) for graph in graphs], TaskConfig(), 0)
    config = TrainingConfig(updates=20, graphs_per_update=3, samples=8, learning_rate=0.05, warmup_updates=0)
    curve: list[tuple[float, float]] = []

    def note(progress: Progress) -> None:
        assert progress.statistics is not None
        curve.append((progress.statistics.reward, progress.statistics.entropy))

    train(tiny_policy(), tasks, config, tmp_path / "tiny.safetensors", num_threads=1, on_update=note)
    rewards, entropies = zip(*curve, strict=True)
    assert rewards == pytest.approx(GOLDEN_REWARDS, abs=1e-4)
    assert entropies == pytest.approx(GOLDEN_ENTROPIES, abs=1e-4)


def kill_again_and_again(out: Path, whole: Path, num_updates: int, num_kills: int, seed: int) -> None:
    """Train `whole` undisturbed, and `out` in children that are killed; writes the updates that each got to."""
    moments, deaths = random.Random(seed), []
    train_tiny(whole, num_updates)  # first: the children inherit what is compiled
    for _ in range(num_kills):
        before = out.stat().st_mtime_ns if out.exists() else None
        child = os.fork()
        if child == 0:
            train_tiny(out, num_updates)
            os._exit(0)
        while (out.stat().st_mtime_ns if out.exists() else None) == before:
            time.sleep(0.001)  # until the child has got somewhere
        time.sleep(moments.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        deaths.append(read_manifest(out)["updates"])
        if deaths[-1] == num_updates:
            break
    train_tiny(out, num_updates)
    out.with_suffix(".json").write_text(json.dumps(deaths))


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


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """Five graphs an update over two gloo processes, three and two: the same parameters up to rounding."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    both = [
        start(train_tiny, tmp_path / "two.safetensors", 4, environment={**shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    train_tiny(tmp_path / "one.safetensors", 4)
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert_equal(tmp_path / "one.safetensors", tmp_path / "two.safetensors", tolerance=1e-5)


def test_stop_saves_the_last_whole_update(tmp_path: Path) -> None:
    out, whole = tmp_path / "stopped.safetensors", tmp_path / "whole.safetensors"
    stop = threading.Event()

    def interrupt(progress: Progress) -> None:
        if progress.update == 3:
            stop.set()

    progress = train_tiny(out, 6, save_every=100, stop=stop, on_update=interrupt)
    assert (progress.update, read_manifest(out)["updates"]) == (3, 3)
    train_tiny(out, 6, save_every=100)
    train_tiny(whole, 6)
    assert_equal(out, whole)


def test_history_and_validation_resume_too(tmp_path: Path) -> None:
    """The paper's baseline, the mean of earlier trials, and the best validation so far are part of the state."""
    config = tiny_training(6, ppo=PAPER, validate_every=2, validation_samples=4)
    validation = [tiny_tasks(random_share=0.0).unvaried(number) for number in range(2)]
    files = [tmp_path / name for name in ("whole.safetensors", "parts.safetensors")]
    for out, ends in zip(files, ((6,), (3, 6)), strict=True):
        for end in ends:
            stop = threading.Event()
            train(
                tiny_policy(), tiny_tasks(), config, out, resume=True, stop=stop, validation=validation, num_threads=1,
                on_update=lambda progress, end=end, stop=stop: stop.set() if progress.update == end else None,
            )  # fmt: skip
    assert_equal(*files)
    assert_equal(*map(best_path, files))
    best = read_manifest(best_path(files[0]))
    assert best["updates"] in (0, 2, 4, 6)
    assert best["validation"]["feasible"] == 1.0


def test_resume_of_another_run_names_the_difference_and_overwrites_nothing(tmp_path: Path) -> None:
    out = tmp_path / "tiny.safetensors"
    stop = threading.Event()
    train_tiny(out, 4, stop=stop, on_update=lambda progress: stop.set())
    before = out.read_bytes()
    graph = Source(random_graph(9, 9), Cluster.parse("2xp100-pcie-16g"))
    for tasks, config, difference in (
        (tiny_tasks(), tiny_training(5), "training.updates = 4, not 5"),
        (tiny_tasks(), tiny_training(4, ppo=PAPER), "training.ppo.reward = 'relative', not 'paper'"),
        (tiny_tasks(seed=1), tiny_training(4), "tasks.seed = 0, not 1"),
        (Tasks([graph], TaskConfig(), 0), tiny_training(4), "tasks.config.random_share = 0.5, not 0.0"),
    ):
        with pytest.raises(InputError, match=f"{out}: was trained with {difference}; resume with the same arguments"):
            train(tiny_policy(), tasks, config, out, resume=True)
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
    config = TrainingConfig(updates=100, learning_rate=1.0, warmup_updates=9, final_learning_rate=0.1)
    rates = [config.learning_rate_at(update) for update in range(100)]
    assert rates[0] == pytest.approx(0.1, rel=1e-3)
    assert max(rates) == pytest.approx(rates[9])
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_tensorboard_gets_the_curve(tmp_path: Path) -> None:
    train(
        tiny_policy(), tiny_tasks(), tiny_training(2), tmp_path / "tiny.safetensors", tensorboard=tmp_path / "board",
        num_threads=1,
    )  # fmt: skip
    (events,) = (tmp_path / "board").iterdir()
    assert b"train/step_time_ratio" in events.read_bytes()


@pytest.mark.parametrize("wrong", [{"updates": 0}, {"samples": 1}, {"learning_rate": 0.0}, {"seed": -1}])
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        TrainingConfig(**wrong)  # type: ignore[arg-type]
