"""Benchmark `execution-against` trains one model in all ways at once, with the losses of one process."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from benchmarks import execution_against
from benchmarks.execution_against import RIVALS, ExecutionAgainstBenchmark, train_in_turn
from benchmarks.models import families
from benchmarks.own_steps import OwnSteps
from benchmarks.rival_processes import RivalError, RivalProcesses
from benchmarks.rival_stages import balanced_cut
from benchmarks.rival_steps import EAGER, PIPELINING, RivalSetting
from benchmarks.training_subjects import Subject
from gdp import Cluster, InputError
from gdp.budget import Budget
from gdp.cluster.detect import Detected, host
from gdp.execute.backends import CPU, Target
from gdp.execute.calibrate.calibrate import Calibration
from gdp.execute.layouts.step_program import step_program
from gdp.models.papers.families import RNNLM as RNNLM_FAMILY
from gdp.models.pytorch import capture
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from run_cases import CLUSTER

GPT2 = Subject(
    "tiny-gpt2",
    "decoder",
    families.GPT2,
    8,
    {"num_layers": 2, "hidden": 16, "num_heads": 2, "num_steps": 6, "vocabulary": 23},
)
RNNLM = Subject("tiny-rnnlm", "recurrent", RNNLM_FAMILY, 4, {"num_steps": 3, "hidden": 8, "vocabulary": 11})
SETTING = RivalSetting(subject=GPT2, layers=("layers.0", "layers.1"), cut="layers.1")
SMALL: dict[str, Any] = {
    "against": RIVALS,
    "workloads": ("tiny-gpt2",),
    "repeats": 2,
    "placements": 4,
    "placement_rounds": 1,
    "placement_repeats": 1,
    "calibration_steps": 1,
    "budget": Budget(simulations=50),
    "quick": True,
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices on the first core, and one small subject."""
    file = tmp_path / "two.yaml"
    file.write_text(CLUSTER)
    cluster = Cluster.parse(str(file))
    monkeypatch.setattr(execution_against, "SUBJECTS", {"tiny-gpt2": GPT2})
    core = host.available_cores()[0]
    devices = tuple(Detected(name, "core", 2**30, f"cpu:{core}") for name in ("cpu0", "cpu1"))
    monkeypatch.setattr(execution_against, "detect", lambda: SimpleNamespace(devices=devices))
    monkeypatch.setattr(execution_against, "calibrate", lambda *_, **__: Calibration(cluster, ("as given",)))


def test_all_arms_train_alike(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arms train alike."""
    figures = ExecutionAgainstBenchmark(**SMALL).run(out=tmp_path / "out")
    (row,) = figures["rows"]
    for name in ("gdp", EAGER, *RIVALS):
        arm = row["arms"][name]
        assert arm["failed"] == {}, name
        assert len(arm["step_ns"]) == 2
        assert arm["loss_difference"] < 1e-5
    assert len(row["arms"][PIPELINING]["variants"]) == 6
    medians = {name: np.median(row["arms"][name]["step_ns"]) for name in RIVALS}
    assert row["best"] == min(medians, key=lambda name: medians[name])
    of_turns = np.divide(row["arms"][row["best"]]["step_ns"], row["arms"]["gdp"]["step_ns"])
    assert row["speedup"] == np.median(of_turns)
    assert len(row["predictions"]["items"]) == 4
    assert "python -m benchmarks execution-against" in figures["markdown"]

    def measured_again(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(execution_against, "_measure", measured_again)
    again = ExecutionAgainstBenchmark(**SMALL).run(out=tmp_path / "out")
    assert again["rows"] == figures["rows"]


@pytest.mark.parametrize("text", ["data=2,zero=1", "data=2,microbatches=2"])
def test_a_layout_has_the_losses_of_its_parts(text: str) -> None:
    """A layout has the losses of its parts."""
    layout = Layout.parse(text)
    captured = capture(GPT2.module(layout.num_parts), *GPT2.inputs(layout.num_parts)[0], name="tiny-gpt2")
    step = Step.of(captured.graph, layout)
    program = step_program(captured.program, step)
    (whole,) = GPT2.inputs()
    content = program.bind_state(GPT2.module()) | program.bind_inputs(*whole)
    order = [np.flatnonzero(step.replica == replica) for replica in range(2)]
    own = OwnSteps(program, order, content, [Target("a", CPU), Target("b", CPU)])
    arms = train_in_turn(SETTING, (), own, layout.num_parts, [()], 1)
    assert arms["gdp"]["loss_difference"] < 1e-5
    with pytest.raises(RuntimeError, match=r"losses .* in one process"):
        train_in_turn(SETTING, (), replace(own, content=content | _doubled(content)), layout.num_parts, [()], 1)


def _doubled(content: dict[int, Tensor]) -> dict[int, Tensor]:
    return {tensor: 2 * value for tensor, value in content.items() if value.is_floating_point()}


def test_a_layer_that_takes_turns_is_no_stage() -> None:
    """The layers of an unrolled model run once a time step."""
    setting = RivalSetting(subject=RNNLM, layers=(), cut="layers.1")
    with RivalProcesses(PIPELINING, setting, [(), ()]) as processes:
        with pytest.raises(RivalError, match=r"enters layers.1 3 times, so it has no two stages"):
            processes.step("GPipe, 2 micro-batches")
        with pytest.raises(RivalError, match="no two stages"):  # it failed in both, which are still there
            processes.step("1F1B, 4 micro-batches")


def test_the_cut_halves_the_forward_pass() -> None:
    """The cut halves the forward pass."""
    (inputs,) = GPT2.inputs()
    graph = capture(GPT2.module(), *inputs, name="tiny-gpt2").graph
    is_in_layer = np.array([module.startswith("layers") for module in graph.modules])
    assert balanced_cut(graph, is_in_layer.astype(np.int64)) == "layers.1"


def test_processes_that_are_gone_are_a_reason() -> None:
    """Processes that are gone are a reason."""
    with RivalProcesses(EAGER, SETTING, [()]) as processes:
        assert processes.step("2").loss > 0
        processes._ranks[0][0].kill()
        with pytest.raises(RivalError, match=r"eager: (a process|process 0) has ended"):
            processes.step("2")
        with pytest.raises(RivalError, match="its processes have ended"):
            processes.step("2")


def test_what_cannot_be_measured_is_said(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine or model that cannot be measured is an error with the reason."""
    with pytest.raises(InputError, match="no arm 'dpd'; did you mean ddp"):
        ExecutionAgainstBenchmark(**SMALL | {"against": ("dpd",)})
    with pytest.raises(InputError, match="no against; at least one is expected"):
        ExecutionAgainstBenchmark(**SMALL | {"against": ()})
    monkeypatch.setattr(
        execution_against, "detect", lambda: SimpleNamespace(devices=(Detected("cpu0", "core", 2**30, "cpu"),))
    )
    with pytest.raises(InputError, match="two processor cores are needed"):
        ExecutionAgainstBenchmark(**SMALL).run()
