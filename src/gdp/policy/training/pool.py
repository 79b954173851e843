"""A pool of problems and of a policy's views of them, each drawn once and learnt from in many updates.

Drawing a problem takes as long as hundreds of trials of it, and a grouping as long as ten. So `size` problems take
turns; each is replaced after `problem_uses` updates, not all at once, and its grouping after `instance_uses`.

Everything depends on (seed, update, index) alone: a resumed run draws again what the pool held.
"""

from dataclasses import dataclass

import numpy as np

from gdp.errors import InputError, prefixed
from gdp.policy.base import Policy
from gdp.policy.construction import Instance
from gdp.policy.training.tasks import Tasks, TrainingTask

_INSTANCES, _SAMPLES = 3, 4  # spawn keys, apart from those of `tasks`


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The size of a pool, and how long its contents stay."""

    size: int = 0  # problems; 0: each update draws its own
    problem_uses: int = 32  # updates
    instance_uses: int = 8

    def __post_init__(self) -> None:
        if self.size < 0:
            raise InputError(f"pool is {self.size}; a number of problems, or 0, is expected")
        for name in ("problem_uses", "instance_uses"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is expected")


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """The contents of one of a pool's places."""

    generation: int
    task: TrainingTask
    number: int  # of the instance, among those of this task
    instance: Instance


class Pool:
    """Gives the updates of a run, of `num_tasks` tasks each, what they learn from."""

    def __init__(self, tasks: Tasks, policy: Policy, config: PoolConfig, num_tasks: int) -> None:
        if config.size % num_tasks:
            raise InputError(f"pool is {config.size}; a multiple of the {num_tasks} graphs of an update is expected")
        self.tasks, self.policy, self.config, self.num_tasks = tasks, policy, config, num_tasks
        self._places: dict[int, _Place] = {}

    def draw(self, update: int, index: int) -> tuple[TrainingTask, Instance, np.random.Generator]:
        """Returns task number `index` of `update`, the policy's view of it, and a generator for samples."""
        if not self.config.size:
            task, rng = self.tasks.draw(update, index, self.num_tasks)
            return task, instance_of(self.policy, task, rng), rng
        place = self._place(*divmod(update * self.num_tasks + index, self.config.size))
        return place.task, place.instance, self._rng(_SAMPLES, update, index)

    def _place(self, visit: int, number: int) -> _Place:
        """Returns place `number` at its visit number `visit`, from 0."""
        config = self.config
        age = visit + number * config.problem_uses // config.size  # places come into their next generation in turn
        generation, use = divmod(age, config.problem_uses)
        of_instance = use // config.instance_uses
        place = self._places.get(number)
        if place is None or (place.generation, place.number) != (generation, of_instance):
            if place is None or place.generation != generation:
                task, _ = self.tasks.draw(generation, number, config.size)
            else:
                task = place.task
            rng = self._rng(_INSTANCES, generation, number, of_instance)
            place = _Place(generation, task, of_instance, instance_of(self.policy, task, rng))
            self._places[number] = place
        return place

    def _rng(self, purpose: int, *numbers: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self.tasks.seed, *numbers], spawn_key=(purpose,)))


def instance_of(policy: Policy, task: TrainingTask, rng: np.random.Generator) -> Instance:
    """Returns the policy's view of the task; InputError names the task."""
    with prefixed(f"{task.problem.graph.name} on {task.problem.cluster.name}"):
        return policy.instance(task.problem, rng)
