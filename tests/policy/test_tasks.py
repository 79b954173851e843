"""Tasks: drawn from (seed, update, index) alone, varied in all that they should be, and always placeable."""

from collections import Counter

import numpy as np
import pytest

from gdp.bounds.lower_bound import lower_bound
from gdp.cluster import Cluster
from gdp.cluster.catalogue import KINDS
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.policy.training.tasks import (
    TaskConfig,
    Tasks,
    TaskSource,
    TrainingTask,
    draw_cluster,
    memory_needs,
    scale_batch,
)
from policy.tiny_policy import random_graph, tiny_tasks

MIB = 2**20


def identity(task: TrainingTask) -> tuple[object, ...]:
    problem = task.problem
    return (
        problem.graph.fingerprint,
        problem.cluster.fingerprint,
        problem.op_time_ns.tobytes(),
        problem.memory_limit_bytes.tobytes(),
        task.reference_ns,
        task.source,
    )


def draws(tasks: Tasks, updates: range, num_tasks: int = 4) -> list[tuple[object, ...]]:
    drawn = [tasks.draw(update, index, num_tasks) for update in updates for index in range(num_tasks)]
    return [(*identity(task), float(rng.random())) for task, rng in drawn]


def test_draws_depend_on_their_numbers_alone() -> None:
    """Not on what was drawn before (another process, a resumed run)."""
    whole = draws(tiny_tasks(), range(4))
    assert draws(tiny_tasks(), range(2, 4)) == whole[8:]
    later = tiny_tasks()
    assert [later.draw(update, 3, 4)[0].source for update in (3, 1)] == [whole[15][5], whole[7][5]]
    assert len(set(whole)) == len(whole)
    assert draws(tiny_tasks(seed=1), range(4)) != whole


def test_sources_take_turns() -> None:
    """Every source has its turn before any comes again."""
    tasks = tiny_tasks(random_share=0.0)
    sources = [tasks.draw(update, index, 5)[0].source for update in range(6) for index in range(5)]
    assert all(sorted(sources[at : at + 3]) == [0, 1, 2] for at in range(0, 30, 3))
    assert len({tuple(sources[at : at + 3]) for at in range(0, 30, 3)}) > 1


def test_sources_come_as_they_are() -> None:
    """A source that is not varied has its own cluster."""
    source = TaskSource(random_graph(20, 0), Cluster.parse("2xp100-pcie-16g"))
    tasks = Tasks([source], TaskConfig(), 0)
    task = tasks.unvaried(0)
    assert task.problem.cluster is source.cluster
    assert task.reference_ns == lower_bound(task.problem)
    assert tasks.unvaried(0) is task  # kept: policies keep what they know of a problem


def test_varied_tasks_are_placeable_and_bounded() -> None:
    """Memory has room for the step and for its largest part; it binds in some tasks; references are bounds."""
    tasks = tiny_tasks(random_share=1.0)
    room = []
    for index in range(60):
        task, _ = tasks.draw(0, index, 60)
        problem = task.problem
        needed, largest = memory_needs(problem)
        assert problem.memory_limit_bytes.sum() >= tasks.config.room[0] * needed
        assert problem.memory_limit_bytes.max() >= tasks.config.room[0] * largest
        assert problem.memory_limit_bytes.tolist() == [device.memory_bytes for device in problem.cluster.devices]
        assert 2 <= problem.num_devices <= 4
        assert task.reference_ns == lower_bound(problem)
        room.append(problem.memory_limit_bytes.min() / needed)
    assert 10 < sum(share < 1 for share in room) < 50  # a device cannot hold it all


def test_clusters_are_of_all_sorts() -> None:
    """Drawn clusters differ in devices, links and hosts."""
    clusters = [draw_cluster(np.random.default_rng(seed), 1, 16) for seed in range(200)]
    sizes = Counter(cluster.num_devices for cluster in clusters)
    assert set(sizes) == set(range(1, 17))
    kinds = Counter(len({device.kind for device in cluster.devices}) for cluster in clusters)
    assert set(kinds) == {1, 2, 3}
    shared = [cluster for cluster in clusters if 0 < len(cluster.channels) < cluster.num_devices]
    own = [cluster for cluster in clusters if len(cluster.channels) == cluster.num_devices * (cluster.num_devices - 1)]
    hosts = [cluster for cluster in clusters if "host1.net.in" in cluster.channels]
    assert min(len(shared), len(own), len(hosts)) > 20
    assert len({cluster.fingerprint for cluster in clusters if cluster.num_devices > 1}) > 150


def test_batches_scale_activations_alone() -> None:
    """weight, input -> forward -> loss; backward makes the weight's gradient; update."""
    ops = [
        Op("weight", "parameter", resident_bytes=3 * MIB),
        Op("input", "input"),
        Op("forward", "mm", 1000, 500, phase="forward", time_ns={"p100-pcie-16g": 7, "cpu-16core": -1}),
        Op("backward", "mm", 2000, 900, phase="backward"),
        Op("accumulate", "add", 10, 3 * MIB, phase="backward"),
        Op("update", "adam", 100, 300, phase="update"),
    ]
    tensors = [
        Tensor(0, (2, 5), MIB, resident=True),
        Tensor(1, (2,), 64),
        Tensor(2, (3,), 128),
        Tensor(2, (3,), 32, view_of=2),
        Tensor(3, (4,), MIB),  # as large as the weight: its gradient
        Tensor(4, (5,), MIB),
        Tensor(5, (), 0),
    ]
    scaled = scale_batch(Graph.build("step", ops, tensors), 4.0)
    assert scaled.flops.tolist() == [0, 0, 4000, 8000, 10, 100]
    assert scaled.bytes_accessed.tolist() == [0, 0, 2000, 3600, 3 * MIB, 300]
    assert scaled.tensor_bytes.tolist() == [MIB, 256, 512, 128, MIB, MIB, 0]
    assert scaled.resident_bytes.tolist() == [3 * MIB, 0, 0, 0, 0, 0]
    assert dict(scaled.times_ns[2]) == {"p100-pcie-16g": 28, "cpu-16core": -1}


def test_rare_kinds_fall_back_on_the_source() -> None:
    """No drawn device has the name that the op has a time for: the source itself is the task."""
    graph = Graph.build("picky", [Op("op", time_ns={**dict.fromkeys(KINDS, -1), "gpu0": 5})], [])
    tasks = Tasks([TaskSource(graph, Cluster.parse("2xp100-pcie-16g"))], TaskConfig(random_share=1.0), 0)
    assert tasks.draw(0, 0, 1)[0].problem.cluster.name == "2xp100-pcie-16g"


def test_large_graphs_are_refused() -> None:
    """A graph whose parameters exceed the cluster's memory is one clear error."""
    graph = Graph.build("large", [Op("op", resident_bytes=33 * 2**30)], [])
    with pytest.raises(InputError, match=r"graph 'large' holds .* train on more or larger devices"):
        Tasks([TaskSource(graph, Cluster.parse("2xp100-pcie-16g"))], TaskConfig(), 0)
    with pytest.raises(InputError, match="there are no graphs"):
        Tasks([], TaskConfig(), 0)


@pytest.mark.parametrize(
    "wrong",
    [{"random_share": 1.5}, {"min_devices": 0}, {"max_devices": 65}, {"batch_factors": ()}, {"room": (2.0, 1.0)}],
)
def test_bad_settings_are_refused(wrong: dict[str, object]) -> None:
    """The error names the setting."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        TaskConfig(**wrong)  # type: ignore[arg-type]
