"""The benchmarks of the learned policy at tiny settings: held-out checkpoints, runs that resume, tables that add up."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import comparison, generalization, held_out, paper
from benchmarks.comparison import BEST_CLASSICAL, EXPERT, WorkloadRow
from benchmarks.generalization import GeneralizationBenchmark
from benchmarks.graphs import Inputs
from benchmarks.paper import PaperBenchmark
from benchmarks.rows import Rows
from benchmarks.runs import Method, Run, WorkloadRuns
from gdp.budget import Budget, Clock
from gdp.errors import InputError
from gdp.policy.checkpoint import new_policy, save_checkpoint
from gdp.search.ops.auto import QUICK
from gdp.search.question import Question, Solution
from gdp.search.settings import DEFAULTS
from gdp.simulator.plan import Baseline, Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate, verify

BUDGET = Budget(simulations=700)  # more than zero-shot takes
pytestmark = pytest.mark.usefixtures("small_inputs")
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes an untrained policy that holds `families` out into a directory."""

    def write(name: str, *families: str, graphs: tuple[str, ...] = (), **manifest: Any) -> Path:
        facts = {"held_out": list(families), "graphs": [{"name": graph} for graph in graphs], **manifest}
        path = tmp_path / "checkpoints" / f"{name}.safetensors"
        save_checkpoint(path, new_policy("default"), {"updates": 10, "cpu_hours": 0.25, **facts})
        return path

    return write


def chosen(path: Path, workload: str) -> str:
    return held_out.choose(held_out.checkpoints_in(path.parent), workload, path.parent).path.stem


# Which checkpoint is asked


def test_the_checkpoint_for_a_workload(save: Save) -> None:
    """The checkpoint for a workload holds out its family and relatives and as little else as there is."""
    save("all")
    save("half", "amoebanet", "hrnet", "nasnet", "resnet", "retinanet")
    cells = save("cells", "amoebanet", "nasnet")
    save("backbone", "resnet")  # but neither of those that are built on it
    for workload, name in (("amoebanet", "cells"), ("nasnet-a", "cells"), ("resnet-101", "half")):
        assert chosen(cells, workload) == name
    save("longer", "amoebanet", "nasnet", updates=11)
    assert chosen(cells, "amoebanet") == "longer"


def test_a_missing_checkpoint(save: Save) -> None:
    """A missing checkpoint is an input error with the command that makes it."""
    path = save("rnnlm", "rnnlm")
    with pytest.raises(InputError) as caught:
        chosen(path, "unet-256")
    assert "holds family unet out" in str(caught.value)
    assert f"gdp train training-set --randomize --hold-out unet --out {path.parent / 'unet'}" in str(caught.value)
    with pytest.raises(InputError, match="no such directory"):
        held_out.checkpoints_in(path.parent / "none")


def test_a_wrong_checkpoint(save: Save) -> None:
    """A checkpoint that was trained on what it holds out is refused."""
    path = save("rnnlm", "rnnlm", graphs=("gnmt-2", "rnnlm/l1-s30-h1024-b128"))
    with pytest.raises(InputError, match=r"was trained on rnnlm/l1-.*, of a family that it should hold out"):
        held_out.checkpoints_in(path.parent)


# Runs


def on_one_device(calls: list[int], **settings: int) -> Method:
    """Everything on the first device; notes the seeds that it ran with."""

    def run(question: Question, clock: Clock) -> Solution:
        calls.append(question.seed)
        placement = np.zeros(question.problem.num_ops, np.int64)
        return Solution(question.judge(simulate(question.problem, placement)))

    return Method("one", run, Budget(simulations=1), settings=settings)


def test_a_run(tmp_path: Path, small_inputs: Inputs) -> None:
    """A run is made once and found again with its plan verified."""
    calls: list[int] = []
    workload = WorkloadRuns("rnnlm-2", Rows(tmp_path))
    first = [workload.run(on_one_device(calls, size=1), seed) for seed in (0, 1)]
    assert calls == [0, 1]
    plan = Plan.load(tmp_path / "rnnlm-2-one-seed0.plan.json.gz")
    assert verify(Problem.build(*small_inputs("rnnlm-2")), plan) == []
    assert (first[0].status, first[0].step_time_ns) == ("ok", plan.step_time_ns)
    again = WorkloadRuns("rnnlm-2", Rows(tmp_path))
    assert [again.run(on_one_device(calls, size=1), seed) for seed in (0, 1)] == first
    assert calls == [0, 1]
    with pytest.raises(InputError, match="made with another size"):
        again.run(on_one_device(calls, size=2), 0)
    replace(plan, step_time_ns=plan.step_time_ns - 1).save(tmp_path / "rnnlm-2-one-seed0.plan.json.gz")
    with pytest.raises(RuntimeError, match=r"rnnlm-2-one-seed0.plan.json.gz does not hold: .*the run's is"):
        again.run(on_one_device(calls, size=1), 0)


def test_a_run_that_was_interrupted_is_not_kept(tmp_path: Path) -> None:
    """A run that was interrupted is not kept."""

    def run(question: Question, clock: Clock) -> Solution:
        clock.stop.set()
        return Solution(None)

    with pytest.raises(KeyboardInterrupt):
        WorkloadRuns("rnnlm-2", Rows(tmp_path)).run(Method("stopped", run, BUDGET), 0)
    assert not list(tmp_path.glob("*stopped*"))


# Ratios


def a_run(time_ns: int | None, seconds: float = 1.0) -> Run:
    return Run("failed" if time_ns is None else "ok", time_ns, seconds, seconds, 1, 1, {})


def a_row(workload: str, **times: tuple[int | None, ...]) -> WorkloadRow:
    return WorkloadRow(
        workload=workload,
        cluster="c",
        num_ops=3,
        lower_bound_ns=50,
        baselines={
            "single": Baseline("infeasible", 60, 0.1),
            "expert": Baseline("ok", 200, 0.1),
            "metis": Baseline("ok", 100, 0.1),
        },
        runs={name: tuple(map(a_run, values)) for name, values in times.items()},
    )


def test_ratios_by_seed() -> None:
    """Ratios pair seeds and leave out what does not fit with every seed."""
    row = a_row("w", new=(80, 125), other=(160, 125), partly=(80, None))
    assert (row.times_ns(EXPERT), row.times_ns(BEST_CLASSICAL), row.times_ns("single")) == ((200,), (100,), None)
    assert row.ratio("new", BEST_CLASSICAL) == pytest.approx(1.0)  # sqrt(0.8 * 1.25)
    assert row.ratios("new", "other") == pytest.approx((0.5, 1.0))
    assert row.to_bound("new") == pytest.approx(2.0)
    assert (row.ratio("partly", EXPERT), row.time_cell("partly")) == (None, "OOM")
    mean = comparison.compare([row, a_row("v", new=(40, 50)), a_row("u", new=(None, 1))], "new", BEST_CLASSICAL)
    # over w and v; seeds: sqrt(0.8 * 0.4), sqrt(1.25 * 0.5)
    assert mean.by_seed == pytest.approx((0.32**0.5, 0.625**0.5))
    assert (mean.ratio, mean.num_workloads, mean.num_rows) == (pytest.approx(0.2**0.25), 2, 3)


# The tables


def test_generalization(tmp_path: Path, save: Save) -> None:
    """Generalization compares zero shot fine tuning and search and resumes."""
    directory = save("rnnlm", "rnnlm").parent
    save("unet", "unet")
    lines: list[str] = []

    def run() -> dict[str, Any]:
        benchmark = GeneralizationBenchmark(
            checkpoints=directory, workloads=("rnnlm-2", "unet-256"), seeds=1, fine_tune_budget=BUDGET
        )
        return benchmark.run(out=tmp_path / "out", say=lines.append)

    figures = run()
    assert [line.split(":")[0] for line in lines] == ["rnnlm-2", "unet-256"]
    assert set(figures["means"]) == set(figures["as_good"]) == {"the papers'", "further", "all"}
    for row in figures["rows"]:
        assert {"single", "expert", "metis", "heft"} <= row["baselines"].keys()
        for zero_shot, fine_tuned, search in zip(*(row["runs"][name] for name in row["runs"]), strict=True):
            assert zero_shot["simulations"] <= DEFAULTS.policy.most_simulations + 1
            assert 0 < fine_tuned["updates"] <= generalization.MAX_UPDATES
            assert fine_tuned["step_time_ns"] >= row["lower_bound_ns"]
            quick = [row["baselines"][name] for name in QUICK if row["baselines"][name]["status"] == "ok"]
            assert search["step_time_ns"] <= min(found["step_time_ns"] for found in quick)
    text = (tmp_path / "out/generalization.md").read_text()
    assert text == figures["markdown"]
    for part in ("On the papers' workloads, fine-tuned", "0.862x", "| unet-256 |", "0.25"):
        assert part in text
    assert json.loads((tmp_path / "out/generalization.json").read_bytes())["means"] == figures["means"]
    ElementTree.parse(tmp_path / "out/generalization.svg")
    assert run() == figures  # nothing is made anew: times would differ


def test_the_papers_table(tmp_path: Path, save: Save) -> None:
    """The paper's table compares all methods with the budgets that it states."""
    checkpoint = save("rnnlm", "rnnlm")
    benchmark = PaperBenchmark(
        checkpoints=checkpoint.parent,
        batch=checkpoint,
        seeds=1,
        fine_tune_budget=BUDGET,
        one_budget=BUDGET,
        hdp_factor=0.5,
        workloads=("rnnlm-2",),
    )
    figures = benchmark.run(out=tmp_path / "out")
    (row,) = figures["rows"]
    assert tuple(row["runs"]) == paper.METHODS
    cpu_seconds = {name: found[0]["cpu_seconds"] for name, found in row["runs"].items()}
    assert cpu_seconds["hdp"] >= 0.5 * cpu_seconds["fine-tuned"]
    assert cpu_seconds["search"] >= cpu_seconds["fine-tuned"]
    expert_ns = min(row["baselines"][name]["step_time_ns"] for name in comparison.EXPERTS)
    fine_tuned_ns = row["runs"]["fine-tuned"][0]["step_time_ns"]
    assert figures["fine_tuned_to"]["expert"]["ratio"] == pytest.approx(fine_tuned_ns / expert_ns)
    text = (tmp_path / "out/paper.md").read_text()
    for part in ("0.862x", "0.916x", "0.5 times its processor time", "| gdp-published |"):
        assert part in text
    assert f"--fine-tune-budget {BUDGET} --one-budget {BUDGET} --hdp-factor 0.5 --batch" in figures["command"]
    ElementTree.parse(tmp_path / "out/paper.svg")


def test_bad_input_of_the_papers_table(tmp_path: Path, save: Save) -> None:
    """The paper's table refuses budgets and checkpoints that make no sense."""
    directory = save("rnnlm", "rnnlm").parent
    with pytest.raises(InputError, match=r"hdp_factor is 0.0; a factor above 0"):
        PaperBenchmark(checkpoints=directory, hdp_factor=0.0)
    missing = tmp_path / "none.safetensors"
    with pytest.raises(InputError, match=r"none.safetensors: no such file"):
        PaperBenchmark(checkpoints=directory, batch=missing, workloads=("rnnlm-2",)).run()
