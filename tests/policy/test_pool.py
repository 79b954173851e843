"""A pool keeps problems and instances for many updates, and depends on seed, update and index alone."""

from itertools import pairwise

import numpy as np
import pytest

from gdp.errors import InputError
from gdp.policy.training.pool import Pool, PoolConfig
from policy.tiny_policy import TinyInstance, tiny_policy, tiny_tasks

CONFIG = PoolConfig(size=8, problem_uses=6, instance_uses=2)


def drawn(updates: range, config: PoolConfig = CONFIG) -> list[list[tuple[int, bytes, float]]]:
    """Returns (problem, instance, next random number) of each of four tasks of each of `updates`, in numbers."""
    pool = Pool(tiny_tasks(random_share=1.0), tiny_policy(), config, 4)
    seen = []
    for update in updates:
        seen.append([])
        for index in range(4):
            task, instance, rng = pool.draw(update, index)
            assert isinstance(instance, TinyInstance)
            content = instance.features.numpy().tobytes()
            seen[-1].append((hash(task.problem.op_time_ns.tobytes()), content, float(rng.random())))
    return seen


@pytest.mark.parametrize("config", [CONFIG, PoolConfig()])
def test_draws_do_not_depend_on_earlier_ones(config: PoolConfig) -> None:
    """A run that starts at update 30 draws what one from the start draws there."""
    assert drawn(range(30, 40), config) == drawn(range(40), config)[30:]


def test_problems_are_replaced_in_turn() -> None:
    """Problems and instances stay for their numbers of updates, and are replaced in turn."""
    updates = drawn(range(72))
    by_place = [[update[index] for update in updates[half::2]] for half in (0, 1) for index in range(4)]
    replaced = np.zeros(36, np.int64)
    for visits in by_place:
        problems, instances = [row[0] for row in visits], [row[1] for row in visits]
        changes = [at for at, (one, other) in enumerate(pairwise(problems), 1) if one != other]
        assert set(np.diff(changes)) == {6}
        assert len(set(instances)) >= 2 * len(set(problems))
        replaced[changes] += 1
        assert len({row[2] for row in visits}) == len(visits)  # samples always differ
    assert replaced.max() < len(by_place)


def test_bad_settings_are_refused() -> None:
    """The error names the setting."""
    with pytest.raises(InputError, match="pool is 10; a multiple of the 4 graphs of an update is expected"):
        Pool(tiny_tasks(), tiny_policy(), PoolConfig(size=10), 4)
    with pytest.raises(InputError, match="problem_uses is 0"):
        PoolConfig(problem_uses=0)
