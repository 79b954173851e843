"""Benchmark `live` runs all arms on small models, and its figures are those of the runs."""

from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from benchmarks import execution_against, live
from benchmarks.live import ARM_NAMES, EXPERT, LiveBenchmark, mean_ratio, ratio_of, steps_in_turn
from benchmarks.live_arms import LEARNED, NUM_SAMPLES, ORDER, RANDOM, TUNE, TUNED, LiveRun, LiveTrial
from benchmarks.models import families
from benchmarks.own_steps import OwnSteps
from benchmarks.rival_processes import TrainedStep
from benchmarks.rival_steps import DDP, FSDP, RivalSetting
from benchmarks.training_subjects import Subject
from gdp import Cluster, InputError
from gdp.budget import Budget
from gdp.cluster.detect import Detected, host
from gdp.execute.calibrate.calibrate import Calibration
from gdp.execute.plan_executor import ExecutionError
from run_cases import CLUSTER

SIZES = {"num_layers": 1, "hidden": 8, "num_heads": 2, "num_steps": 4, "vocabulary": 11}
SUBJECTS = {
    "tiny-gpt2": Subject("tiny-gpt2", "decoder", families.GPT2, 2, SIZES),
    "tiny-bert": Subject("tiny-bert", "encoder", families.BERT, 2, {**SIZES, "num_masked": 2}),
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices on the first core, and two small subjects."""
    file = tmp_path / "two.yaml"
    file.write_text(CLUSTER)
    cluster, core = Cluster.parse(str(file)), host.available_cores()[0]
    devices = tuple(Detected(name, "core", 2**30, f"cpu:{core}") for name in ("cpu0", "cpu1"))
    monkeypatch.setattr(execution_against, "detect", lambda: SimpleNamespace(devices=devices))
    monkeypatch.setattr(live, "calibrate", lambda *_, **__: Calibration(cluster, ("as given",)))
    monkeypatch.setattr(live, "SUBJECTS", SUBJECTS)
    monkeypatch.setattr(live, "RIVALS", ())  # their processes are tested with `execution-against`
    monkeypatch.setitem(live._QUICK, "budget", Budget(simulations=20))


def test_page(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arms measure as many plans, their answers take steps in turn, and rows are not made again."""
    asked: dict[str, Any] = {"workloads": ("tiny-gpt2",), "quick": True}
    figures = LiveBenchmark(**asked).run(out=tmp_path / "out")
    (row,), most = figures["rows"], live._QUICK["measurements"]
    assert set(row["final"]) == set(ARM_NAMES) - {DDP, FSDP}
    assert {len(steps) for steps in row["final"].values()} == {live._QUICK["repeats"]}
    for arm in LEARNED:
        assert len(row["arms"][arm]["trials"]) == most
    assert row["arms"][TUNED]["num_updates"] == -(-(most - 1) // NUM_SAMPLES)
    of_random, of_order = ({plan: each for plan, *each in row["arms"][arm]["trials"]} for arm in (RANDOM, ORDER))
    assert len(of_random) == len(of_order) <= most
    assert all(of_random[plan] == of_order[plan] for plan in of_random.keys() & of_order.keys())
    assert figures["means"][TUNE] == 1
    assert figures["claims"]["updates"] < 50
    assert "## The paper's claims" in (tmp_path / "out" / "live.md").read_text()

    def measured_again(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(live, "calibrate", measured_again)
    assert LiveBenchmark(**asked).run(out=tmp_path / "out")["rows"] == figures["rows"]


def test_fastest_by_hand() -> None:
    """Steps of 3, none, 1 and 2 ns end after 1, 3, 6 and 10 s: the first two have 3 ns, and so has what ends in 5 s."""
    run = LiveRun([LiveTrial("a", 3, 1), LiveTrial("b", inf, 2), LiveTrial("c", 1, 3), LiveTrial("d", 2, 4)])
    assert [run.fastest(count) for count in (1, 2, 3, 4)] == [run.trials[0]] * 2 + [run.trials[2]] * 2
    assert run.fastest(seconds=5) == run.trials[0]
    assert run.fastest(seconds=0.5) is None
    assert (run.answer, run.seconds) == ("c", 10)
    assert LiveRun([LiveTrial("b", inf, 2)]).answer == ""


def test_ratios_by_hand() -> None:
    """Ratios within turns are 2, 1 and 4, so their median is 2; with a model where it is 0.5 the mean is 1. The expert
    is the faster one of two ways."""
    row = {"final": {TUNE: [1, 2, 1], "place": [2, 2, 4], "one device": [9, 9, 9], "expert's placement": [3, 4, 3]}}
    other = {"final": {TUNE: [2, 2, 2], "place": [1, 1, 1]}}
    assert ratio_of(row, "place", TUNE) == 2
    assert mean_ratio([row, other], "place", TUNE) == pytest.approx(1)
    assert ratio_of(row, EXPERT, TUNE) == np.median([3, 2, 3])
    assert ratio_of(other, EXPERT, TUNE) is None
    assert mean_ratio([other], EXPERT, TUNE) is None


class CountedSteps(OwnSteps):
    """Steps of 1, 2, 3, ... ns, of which the one after `last` fails."""

    def __init__(self, last: int) -> None:
        self.last, self.count = last, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.last = 0

    def step(self) -> TrainedStep:
        self.count += 1
        if self.count > self.last:
            raise ExecutionError("cpu0", "op")
        return TrainedStep(self.count, 0.0)


def test_a_plan_that_fails_is_left_out() -> None:
    """After two steps that warm up, three are kept, and a plan that fails in the last of them has none."""
    own: dict[str, OwnSteps] = {"runs": CountedSteps(5), "fails": CountedSteps(4)}
    setting = RivalSetting(subject=SUBJECTS["tiny-gpt2"], layers=(), cut="")
    assert steps_in_turn(own, setting, (), [()], 3) == {"runs": [3, 4, 5]}


def test_bad_input() -> None:
    """An unknown model is one line."""
    with pytest.raises(InputError, match="live: no workload 'vti'; did you mean vit"):
        LiveBenchmark(workloads=("vti",)).check_workloads()
