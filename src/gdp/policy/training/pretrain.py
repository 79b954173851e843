"""Training of a policy on many problems: PPO updates from a stream of tasks, and checkpoints.

    update u:   tasks (seed, u, 0..G-1) --> trials of each --> one PPO update --> every k-th: checkpoint

No random state outlives an update. Parameters, optimizer state and the number of updates done, which are one file,
are all that a run needs to go on exactly as if it had never stopped. G tasks an update."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from math import cos, inf, pi
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from gdp.errors import InputError, prefixed
from gdp.files import brief
from gdp.policy.checkpoint import check_tensors, config_document, read_checkpoint, save_checkpoint
from gdp.policy.construction import Instance
from gdp.policy.scheduler import Policy, one_thread
from gdp.policy.training.ppo import CONSTRUCTING, PPOConfig, Statistics, Trials, draw_trials, improve
from gdp.policy.training.tasks import Tasks, TrainingTask

ADAM_EPSILON = 1e-5  # not 1e-8: gradients that are 0 but for rounding would move parameters by whole steps


class TrainingState:
    """The optimizer and everything else that changes while a policy is trained, besides its parameters."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), eps=ADAM_EPSILON)
        names = {parameter: name for name, parameter in policy.named_parameters()}
        self._tensors = {
            "updates": torch.tensor(0),  # done
            "cpu_seconds": torch.tensor(0.0, dtype=torch.float64),
        }
        # Adam makes these in its first step; they are made here, so that there is always the same to store
        for parameter in self.optimizer.param_groups[0]["params"]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
            for name, tensor in self.optimizer.state[parameter].items():
                self._tensors[f"{names[parameter]}/{name}"] = tensor

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns all of it by name; writing to these tensors changes the state."""
        return self._tensors

    @property
    def updates(self) -> int:
        """The number of updates done."""
        return int(self._tensors["updates"])

    @property
    def cpu_hours(self) -> float:
        """CPU hours of all runs."""
        return float(self._tensors["cpu_seconds"]) / 3600

    def count_update(self, cpu_seconds: float) -> None:
        """Counts one more update."""
        self._tensors["updates"] += 1
        self._tensors["cpu_seconds"] += cpu_seconds

    def restore(self, path: Path, arguments: Mapping[str, Any], num_updates: int) -> None:
        """Restores state and parameters from a checkpoint file of a run of `num_updates` with the same `arguments`.
        Raises InputError for other arguments, naming them, and for a file without a state to go on from."""
        checkpoint = read_checkpoint(path)
        with prefixed(path):
            before = {"policy": checkpoint.policy, "config": checkpoint.config}
            now = {"policy": self.policy.name, "config": config_document(self.policy)}
            check_same({**before, **checkpoint.manifest.get("arguments", {})}, {**now, **arguments})
            checkpoint.fill(self.policy)
            if checkpoint.training:
                check_tensors(checkpoint.training, self._tensors)
                for name, tensor in checkpoint.training.items():
                    self._tensors[name].copy_(tensor)
            elif checkpoint.manifest.get("updates") == num_updates:
                hours: Any = checkpoint.manifest.get("cpu_hours")
                if type(hours) not in (int, float) or not 0 <= hours < 1e9:
                    raise InputError(f"cpu_hours is {brief(hours)}; a number from 0 to 1e9 is expected")
                self._tensors["updates"].fill_(num_updates)
                self._tensors["cpu_seconds"].fill_(3600 * hours)
            else:
                raise InputError("holds no state of training to resume; train on from it with --from")


def check_same(arguments_before: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raises InputError naming the first argument in which a checkpoint's run differs from this one."""
    before, now = _flat(arguments_before), _flat(orjson.loads(orjson.dumps(arguments)))
    name = next((name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)), None)
    if name is None:
        return
    values = f"{name} = {brief(before.get(name))}, not {brief(now.get(name))}"
    difference = "other graphs or devices" if name.startswith("tasks.sources") else values
    raise InputError(f"was trained with {difference}; resume with the same arguments, or train on from it with --from")


def _flat(value: object, name: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings and lists by their dotted path."""
    if isinstance(value, Mapping) or (isinstance(value, list) and value):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        parts = [_flat(item, f"{name}.{key}" if name else str(key)) for key, item in items]
        return {path: leaf for part in parts for path, leaf in part.items()}
    return {name: value}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Rates and numbers of a training run: equal ones with equal policy and tasks give equal parameters."""

    seed: int = 0
    updates: int = 500
    graphs_per_update: int = 8
    samples: int = 16  # trials of each problem
    learning_rate: float = 1e-3
    warmup_updates: int = 10  # the learning rate rises linearly
    final_learning_rate: float = 0.1  # times `learning_rate`, reached along a cosine
    ppo: PPOConfig = CONSTRUCTING

    def __post_init__(self) -> None:
        for name in ("updates", "graphs_per_update"):
            if not 1 <= getattr(self, name) < 2**31:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is expected")
        if self.samples < 2:
            raise InputError(f"samples is {self.samples}; at least 2 are expected, they are compared with each other")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}; an integer from 0 to 2^63 - 1 is expected")
        if not 0 < self.learning_rate < inf:
            raise InputError(f"learning_rate is {self.learning_rate}; more than 0 is expected")
        if not 0 <= self.final_learning_rate <= 1:
            raise InputError(f"final_learning_rate is {self.final_learning_rate}; a share from 0 to 1 is expected")
        if self.warmup_updates < 0:
            raise InputError(f"warmup_updates is {self.warmup_updates}; at least 0 is expected")

    def learning_rate_at(self, update: int) -> float:
        """Returns the learning rate of update number `update`, from 0."""
        warmup = min((update + 1) / (self.warmup_updates + 1), 1.0)
        fall = (1 + cos(pi * update / self.updates)) / 2
        return self.learning_rate * warmup * (self.final_learning_rate + (1 - self.final_learning_rate) * fall)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a training run."""

    update: int  # done
    updates: int
    statistics: Statistics | None  # of the last update; None where this run has made none
    seconds: float  # of this run
    cpu_hours: float  # of the runs before this one, too
    seconds_left: float | None  # None without a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Notes for the manifest on the origin of the parameters."""

    origin: str = ""  # of the initial parameters, for a policy that is not new
    held_out: Sequence[str] = ()  # model families, in this run and in those before it
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Options of a training run that leave its parameters the same, up to rounding, unless it ends early."""

    resume: bool = False  # from the output file, if there is one
    save_every: int = 10  # updates
    seconds: float | None = None  # ends the run early, after the last whole update
    stop: threading.Event | None = None  # likewise
    num_threads: int | None = None
    on_update: Callable[[TrainingProgress], None] | None = None

    def is_over(self, started: float) -> bool:
        """Returns True when the run that began at `started` must end."""
        is_late = self.seconds is not None and time.monotonic() - started >= self.seconds
        return is_late or (self.stop is not None and self.stop.is_set())


def train(
    policy: Policy,
    tasks: Tasks,
    config: TrainingConfig,
    out: Path,
    *,
    provenance: Provenance | None = None,
    run: TrainingRun | None = None,
) -> TrainingProgress:
    """Trains `policy` in place; writes the checkpoint `out` every `save_every` updates and at the end. A run that
    resumes must have the policy, tasks, configuration and origin of the run that wrote `out`. Raises InputError:
    another run's file, a bad file, a gradient that is not finite."""
    started = time.monotonic()
    provenance, run = provenance or Provenance(), run or TrainingRun()
    arguments = {"training": asdict(config), "tasks": tasks.to_document(), "from": provenance.origin}
    state = TrainingState(policy)
    saved = -1  # number of updates in the file
    if run.resume and out.exists():
        state.restore(out, arguments, config.updates)
        saved = state.updates

    def save() -> None:
        manifest = manifest_of(tasks, provenance, arguments, updates=state.updates, cpu_hours=state.cpu_hours)
        is_final = state.updates == config.updates
        save_checkpoint(out, policy, manifest, None if is_final else state.tensors())

    def progress(statistics: Statistics | None) -> TrainingProgress:
        elapsed = time.monotonic() - started
        left = None if run.seconds is None else max(run.seconds - elapsed, 0.0)
        return TrainingProgress(state.updates, config.updates, statistics, elapsed, state.cpu_hours, left)

    with one_thread():
        latest = progress(None)
        for update in range(state.updates, config.updates):
            before = time.process_time()
            trials = list[Trials]()
            for index in range(config.graphs_per_update):
                if run.is_over(started):
                    break
                task, rng = tasks.draw(update, index, config.graphs_per_update)
                instance = instance_of(policy, task, rng)
                draw = partial(draw_trials, policy, instance, config.samples, rng, config.ppo, task.reference_ns)
                trials.append(draw(num_threads=run.num_threads))
            if run.is_over(started):
                break
            for group in state.optimizer.param_groups:
                group["lr"] = config.learning_rate_at(update)
            statistics = improve(policy, state.optimizer, trials, config.ppo)
            state.count_update(time.process_time() - before)
            latest = progress(statistics)
            if run.on_update is not None:
                run.on_update(latest)
            if state.updates % run.save_every == 0:
                save()
                saved = state.updates
        if state.updates != saved:
            save()
    return latest


def instance_of(policy: Policy, task: TrainingTask, rng: np.random.Generator) -> Instance:
    """Returns the policy's view of the task; InputError names the task."""
    with prefixed(f"{task.problem.graph.name} on {task.problem.cluster.name}"):
        return policy.instance(task.problem, rng)


def manifest_of(
    tasks: Tasks, provenance: Provenance, arguments: dict[str, Any], *, updates: int, cpu_hours: float
) -> dict[str, Any]:
    """Returns the record of a run, for a checkpoint."""
    return {
        **tasks.inputs(),
        "seed": arguments["training"]["seed"],
        "command": provenance.command,
        "gdp_version": version("gdp-placement"),
        "updates": updates,
        "cpu_hours": cpu_hours,
        "arguments": arguments,
        "held_out": list(provenance.held_out),
    }
