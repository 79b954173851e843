"""A policy small enough to train in milliseconds, and problems to train it on."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.graph import Graph, Op
from gdp.graph import Tensor as GraphTensor
from gdp.policy import checkpoint
from gdp.policy.construction import Instance
from gdp.policy.scheduler import Policy, Rollouts
from gdp.policy.training.pretrain import TrainingConfig, TrainingProgress, TrainingRun, train
from gdp.policy.training.tasks import TaskConfig, Tasks, TaskSource
from gdp.simulator.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    hidden: int = 8
    scale: float = 1.0
    sizes: tuple[int, ...] = (3,)


@dataclass(frozen=True, eq=False)
class TinyInstance(Instance):
    features: Tensor  # [C, D, 3]
    choosers: I64  # [C] the first op of each unit
    allowed: Tensor  # [C, D]


class TinyPolicy(Policy):
    """Each unit draws a device by itself: a small network scores its time there, its position and the device's."""

    name = "tiny"

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.score_device = nn.Sequential(nn.Linear(3, config.hidden), nn.Tanh(), nn.Linear(config.hidden, 1))

    def instance(self, problem: Problem, rng: np.random.Generator) -> TinyInstance:
        _, choosers = np.unique(problem.graph.group_index, return_index=True)
        times = np.maximum(problem.op_time_ns[choosers], 1).astype(np.float64)
        position = 2 * choosers / problem.num_ops - 1 + 0.01 * rng.standard_normal(len(choosers))
        device = np.linspace(-1, 1, problem.num_devices)
        features = np.stack(
            (
                np.log(times / times.min(axis=1, keepdims=True)),
                position[:, None] * device,
                np.broadcast_to(device, times.shape),
            ),
            axis=2,
        )
        tensor = torch.from_numpy(features).to(self.device, torch.float32)
        return TinyInstance(problem, tensor, choosers, torch.from_numpy(problem.allowed[choosers]).to(self.device))

    def sample(
        self, instance: Instance, num_samples: int, rng: np.random.Generator, *, temperature: float = 1.0
    ) -> Rollouts:
        assert isinstance(instance, TinyInstance)
        with torch.no_grad():
            log_probs = self._log_probs(instance)
            noise = torch.from_numpy(rng.gumbel(size=(num_samples, *log_probs.shape))).to(log_probs)
            choices = (log_probs + temperature * noise).argmax(dim=2)
            log_prob = log_probs.expand(num_samples, -1, -1).gather(2, choices[:, :, None])[:, :, 0]
        placements = choices.cpu().numpy()[:, instance.problem.graph.group_index]
        return Rollouts(placements, log_prob, choices)

    def score(self, instance: Instance, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        assert isinstance(instance, TinyInstance)
        log_probs = self._log_probs(instance)
        entropy = -(log_probs.exp() * log_probs.masked_fill(~instance.allowed, 0.0)).sum(dim=1).mean()
        chosen = log_probs.expand(len(rollouts.placements), -1, -1).gather(2, rollouts.record[:, :, None])
        return chosen[:, :, 0], entropy

    def _log_probs(self, instance: TinyInstance) -> Tensor:
        logits: Tensor = self.config.scale * self.score_device(instance.features)[:, :, 0]
        return torch.log_softmax(logits.masked_fill(~instance.allowed, -torch.inf), dim=1)


TINY = MappingProxyType({"tiny": (TinyPolicy, TinyConfig)})


def tiny_policy(seed: int = 0) -> TinyPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyPolicy(TinyConfig())


def random_graph(num_ops: int, seed: int) -> Graph:
    """Ops of 0.1 to 1 ms on a P100, each fed by one or two of the four before it."""
    rng = np.random.default_rng(seed)
    ops = [
        Op(f"op{op}", "mm", int(rng.integers(1, 11)) * 930_000_000, resident_bytes=2**20, phase="forward")
        for op in range(num_ops)
    ]
    consumers: list[set[int]] = [set() for _ in ops]
    for op in range(1, num_ops):
        for before in rng.integers(max(op - 4, 0), op, size=2).tolist():
            consumers[before].add(op)
    tensors = [GraphTensor(op, tuple(sorted(users)), 2**20) for op, users in enumerate(consumers)]
    return Graph.build(f"random-{num_ops}", ops, tensors)


def mixed_chain(num_ops: int = 6) -> Graph:
    """Ops in a chain; even ones are ten times as fast on the first device, odd ones on the second.

    What each holds keeps the chain from being merged into one op.
    """
    ops = [
        Op(f"op{op}", resident_bytes=1, time_ns={f"gpu{op % 2}": 10**6, f"gpu{1 - op % 2}": 10**7})
        for op in range(num_ops)
    ]
    return Graph.build("mixed-chain", ops, [GraphTensor(op, (op + 1,), 1000) for op in range(num_ops - 1)])


def tiny_tasks(seed: int = 0, random_share: float = 0.5) -> Tasks:
    sources = [
        TaskSource(random_graph(num_ops, num_ops), Cluster.parse(cluster))
        for num_ops, cluster in ((16, "2xp100-pcie-16g"), (24, "p100-pcie-16g+v100-sxm-32g"), (20, "3xp100-pcie-16g"))
    ]
    return Tasks(sources, TaskConfig(random_share=random_share, max_devices=4), seed)


def tiny_training(updates: int, **others: object) -> TrainingConfig:
    return TrainingConfig(updates=updates, graphs_per_update=5, samples=8, learning_rate=1e-2, **others)  # type: ignore[arg-type]


def train_tiny(
    out: Path,
    updates: int,
    *,
    resume: bool = True,
    save_every: int = 1,
    stop: threading.Event | None = None,
    on_update: Callable[[TrainingProgress], None] | None = None,
) -> TrainingProgress:
    """Train a tiny policy into `out`; also what tests run in processes of their own."""
    torch.use_deterministic_algorithms(True)
    try:
        run = TrainingRun(resume=resume, save_every=save_every, stop=stop, num_threads=1, on_update=on_update)
        return train(tiny_policy(), tiny_tasks(), tiny_training(updates), out, run=run)
    finally:
        torch.use_deterministic_algorithms(False)


def parameters(path: Path) -> dict[str, Tensor]:
    return dict(checkpoint.read_checkpoint(path).parameters)


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
        deaths.append(checkpoint.read_checkpoint(out).manifest["updates"])
        if deaths[-1] == num_updates:
            break
    train_tiny(out, num_updates)
    out.with_suffix(".json").write_text(json.dumps(deaths))
