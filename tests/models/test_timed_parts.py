"""Measured op times go with layouts: parts of a batch have times between those of batches that were measured."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gdp import Cluster, Layout
from gdp.costs.op_times import op_times
from gdp.graph import Graph
from gdp.graph.interpolation import interpolated, time_between
from gdp.models.measured_times import MeasuredTimes, OpTime, OpTimer, with_times
from gdp.models.pytorch import capture
from gdp.models.pytorch.signature import LIBRARY, signatures
from gdp.models.source import ModelSource
from gdp.parallel.step import Step
from gdp.search.place import place

CLUSTER = Cluster.parse("2xcpu-16core")
KIND = CLUSTER.devices[0].kind
BATCH = 16


def net(samples: int = BATCH) -> tuple[nn.Module, tuple[Tensor]]:
    """Returns a model with inputs of so many samples."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), (torch.zeros(samples, 64),)


def step(samples: int, **times_ns: int) -> Graph:
    """Returns a step of the net, all ops of which have these times."""
    graph = capture(*net(samples), name="net").graph
    return with_times(graph, [times_ns] * graph.num_ops)


def measured(path: Path, samples: int, time_ns: int) -> None:
    """Stores a time for each op of the passes of a step of the net, as `gdp run --times` does."""
    program = capture(*net(samples), name="net").program
    times, graph = MeasuredTimes(path, create=True), program.graph
    of_passes = [
        name
        for name, flops, phase in zip(signatures(program), graph.flops, graph.phases, strict=True)
        if flops and phase != "update"
    ]
    times.store(KIND, LIBRARY, [OpTime(name, time_ns, 0, 3) for name in of_passes])
    times.note_samples("measured_net:net", samples)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """The net as a MODEL."""
    (tmp_path / "measured_net.py").write_text("from tests.models.test_timed_parts import net\n")
    monkeypatch.chdir(tmp_path)
    return ModelSource("measured_net:net")


@pytest.fixture
def timer(tmp_path: Path) -> OpTimer:
    """A file of times, without any."""
    return OpTimer(MeasuredTimes(tmp_path / "none.db", create=True), CLUSTER)


def test_one_replica_of_one_batch_keeps_its_times() -> None:
    """A step with measured times that is cut into one part is the step with the same times."""
    graph = step(BATCH, **{KIND: 1234})
    assert Step.of(graph, Layout()).graph.times_ns == graph.times_ns


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (8, 180),  # 100 + (420 - 100) * (8 - 4) / (20 - 4)
        (9, 200),
        (2, 60),  # the line goes on
        (1, 40),
        (40, 820),  # the line: less than in proportion, 840
    ],
)
def test_times_are_on_the_line_through_two(samples: int, expected: int) -> None:
    """The time of an op is on the line through two measured batches."""
    assert time_between((4, 100), (20, 420), samples) == time_between((20, 420), (4, 100), samples) == expected


def test_noise_does_not_extrapolate() -> None:
    """Beyond what was measured an op neither gets faster with more samples nor grows faster than they do."""
    assert time_between((8, 100), (16, 90), 32) == 90
    assert time_between((8, 100), (16, 90), 4) == 100
    assert time_between((8, 10), (16, 100), 4) == 5  # in proportion; the line is below 0
    assert time_between((8, -1), (16, 100), 12) == -1


def test_half_a_batch_is_between_two_measured_ones(timer: OpTimer) -> None:
    """Interpolated steps have exactly the times between those of two batches."""
    quarter, whole = step(4, **{KIND: 1000}), step(16, **{KIND: 3400, "cpu1": 7})
    half = interpolated(quarter, 4, whole, 16, 8)
    assert half.times_ns == tuple({KIND: 1800} for _ in range(half.num_ops))  # 1000 + 2400 / 3
    others = {4: quarter, 16: whole}
    assert timer.between(step(8), 8, others).times_ns == half.times_ns
    own = timer.between(step(8, **{KIND: 5}), 8, others)
    assert own.times_ns == step(8, **{KIND: 5}).times_ns


def test_one_measured_batch_is_scaled_as_the_model_says(timer: OpTimer) -> None:
    """With one measured batch an op takes as much more or less as the cost model says of both."""
    whole, half = step(16), step(8)
    modelled, of_half = op_times(whole, CLUSTER)[:, 0], op_times(half, CLUSTER)[:, 0]
    found = timer.between(half, 8, {16: step(16, **{KIND: 10**6})})
    for op, table in enumerate(found.times_ns):
        expected = -(-(10**6) * int(of_half[op]) // int(modelled[op])) if modelled[op] else 10**6
        assert table[KIND] == expected


def test_parts_of_a_batch_are_timed(source: ModelSource, tmp_path: Path) -> None:
    """A file with times of two batches, neither of them the whole, gives all steps of a MODEL times."""
    measured(tmp_path / "times.db", 4, 1000)
    measured(tmp_path / "times.db", 2, 700)
    known = source.timed(MeasuredTimes(tmp_path / "times.db"), CLUSTER)
    expected = {1: 2800, 2: 1600, 4: 1000, 8: 700, 16: 550}  # 400 ns and 150 ns a sample
    for num_parts, time_ns in expected.items():
        graph = known.part(num_parts).graph
        active = [op for op in range(graph.num_ops) if graph.phases[op] in ("forward", "backward")]
        assert {graph.times_ns[op][KIND] for op in active if graph.flops[op]} == {time_ns}
    assert not any(source.whole().graph.times_ns)


def test_layouts_are_chosen_with_measured_times(source: ModelSource, tmp_path: Path) -> None:
    """Measured times decide about layouts: where an op takes long whatever its batch, the batch is not cut."""
    path = tmp_path / "times.db"
    for samples, time_ns in ((16, 80_000_000), (8, 40_000_000)):
        measured(path, samples, time_ns)
    plan = place(source.timed(MeasuredTimes(path), CLUSTER), CLUSTER, budget="50sims", num_threads=1)
    assert plan.layout is not None
    assert plan.layout["data"] == 2
    measured(path, 8, 79_000_000)
    plan = place(source.timed(MeasuredTimes(path), CLUSTER), CLUSTER, budget="50sims", num_threads=1)
    assert plan.layout is None
