"""The ablation trains each variant equally long, keeps rows and checkpoints, and compares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import ablation, graphs, methods
from benchmarks.ablation import CONTROLS, FULL, AblationBenchmark, AblationConfig, VariantSummary
from benchmarks.comparison import WorkloadRow
from benchmarks.runs import Run
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.policy.checkpoint import read_manifest
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.scheduler_config import SchedulerConfig
from gdp.policy.training.pretrain import TrainingConfig
from gdp.policy.training.tasks import TaskConfig
from gdp.search.ops.zero_shot import ZeroShotConfig
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Problem

CONFIG = AblationConfig(
    parts=("attention", "network"),
    policy=SchedulerConfig(
        hidden=8,
        num_graph_layers=1,
        num_placer_layers=1,
        num_heads=2,
        segment=4,
        num_units=(6,),
        refining=0.0,
        network=True,
    ),
    training=TrainingConfig(updates=2**31 - 1, graphs_per_update=1, samples=2),
    tasks=TaskConfig(),
    zero_shot=ZeroShotConfig(num_simulations=8, num_drawn=4, num_varied=2),
)
SECONDS = 0.1


def small_inputs(name: str) -> tuple[Graph, Cluster]:
    return graphs.lstm_training_graph(2 + len(name) % 2, num_layers=1), Cluster.parse("2xp100-pcie-16g")


@pytest.fixture(autouse=True)
def _small_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "workload_inputs", small_inputs)
    monkeypatch.setattr(methods, "warm_up", lambda: None)


def run(out: Path | None, config: AblationConfig = CONFIG, **options: Any) -> dict[str, Any]:
    given = {"budget": Budget(seconds=SECONDS), "seeds": 2, "hold_out": ("dlrm", "bert"), **options}
    return AblationBenchmark(config=config, **given).run(out=out)


@pytest.mark.long
def test_every_variant_is_trained_for_the_budget_and_compared_and_a_rerun_finds_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = run(tmp_path)
    assert {row["workload"] for row in figures["rows"]} == {"bert-large", "dlrm"}
    for row in figures["rows"]:
        assert list(row["runs"]) == ["full", "without-attention", "without-network", *CONTROLS]
        for variant, runs in row["runs"].items():
            assert all(run["step_time_ns"] > 0 and run["simulations"] >= 8 for run in runs)
            for seed in range(2 if variant not in CONTROLS else 0):
                manifest = read_manifest(tmp_path / f"rows/{variant}-seed{seed}.safetensors")
                assert manifest["updates"] == runs[seed]["updates"] > 0
                assert 3600 * manifest["cpu_hours"] >= SECONDS  # the last update is a whole one
                assert {"bert", "dlrm"} == set(manifest["held_out"])
    assert not {"bert-large", "dlrm"} & set(figures["trained_on"])
    text = (tmp_path / "ablation.md").read_text()
    command = "python -m benchmarks ablation --budget 0.1s --seeds 2 --hold-out dlrm --hold-out bert"
    for part in (command, "| without network |", "| constant |"):
        assert part in text
    assert "<svg" in (tmp_path / "ablation.svg").read_text()

    monkeypatch.setattr(ablation, "train", None)  # nothing is trained or placed again
    monkeypatch.setattr(ablation, "zero_shot", None)
    assert run(tmp_path)["markdown"] == figures["markdown"]
    with pytest.raises(InputError, match=r"bert-large-full-seed0.*was made with another zero_shot"):
        run(tmp_path, replace(CONFIG, zero_shot=replace(CONFIG.zero_shot, per_round=2)))


def test_training_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    def train(seconds: float) -> tuple[int, float]:
        study = ablation._Study(CONFIG, seconds, ("dlrm",), ("rnnlm-2",), tmp_path)
        _, updates = study.policy(FULL, 0)
        return updates, read_manifest(tmp_path / "full-seed0.safetensors")["cpu_hours"]

    updates, hours = train(0.05)
    assert train(0.05) == (updates, hours)  # done
    more, more_hours = train(3600 * hours + 0.05)
    assert more > updates
    assert more_hours > hours


def policies() -> dict[str, SchedulerPolicy]:
    """The full policy, as if training had moved every weight, and the controls made of it."""
    study = ablation._Study(CONFIG, 1.0, ("dlrm",), (), Path())
    made = {}

    def trained(policy: SchedulerPolicy, variant: str, seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn(parameter.shape))
        return 1

    study._train = trained  # type: ignore[method-assign, assignment]
    for variant in (FULL, "random", "constant"):
        policy, _ = study.policy(variant, 0)
        assert isinstance(policy, SchedulerPolicy)
        made[variant] = policy
    return made


def test_the_constant_policy_goes_anywhere_with_equal_probability() -> None:
    problem = Problem.build(graphs.lstm_training_graph(3, num_layers=1), Cluster.parse("p100-pcie-16g+2xl4-24g"))
    policy = policies()["constant"]
    rng = np.random.default_rng(0)
    instance = policy.instance(problem, rng)
    rollouts = policy.sample(instance, 4, rng)
    num_choices = rollouts.record.mask.sum(dim=3).flatten(1)
    assert torch.allclose(rollouts.log_prob, -num_choices.log(), atol=1e-6)
    assert num_choices.max() == 3


def test_the_random_policy_has_the_trained_weights_in_another_order() -> None:
    made = policies()
    for trained, mixed in zip(made[FULL].parameters(), made["random"].parameters(), strict=True):
        assert torch.equal(trained.flatten().sort().values, mixed.flatten().sort().values)
    assert not torch.equal(made[FULL].base, made["random"].base)


def row(workload: str, best_ns: int | None, **times: tuple[int | None, ...]) -> WorkloadRow:
    """A workload with its best classical step time, and those of variants by seed; None does not fit."""
    return WorkloadRow(
        workload=workload,
        cluster="c",
        num_ops=3,
        lower_bound_ns=1,
        baselines={"metis": Baseline("ok" if best_ns else "infeasible", best_ns, 0.1)},
        runs={
            variant: tuple(Run("ok" if ns else "infeasible", ns, 1.0, 1.0, 8, 5, {}) for ns in by_seed)
            for variant, by_seed in times.items()
        },
    )


def test_a_variant_is_compared_over_the_workloads_that_both_place_with_every_seed() -> None:
    # full: 80 and 80 on a (0.8), 90 on b once and nothing once; c has no classical plan: only a counts
    rows = [
        row("a", 100, full=(80, 80), random=(100, 160)),
        row("b", 100, full=(90, None), random=(50, 50)),
        row("c", None, full=(1, 1), random=(1, 1)),
    ]
    summary = VariantSummary.of("random", rows)
    assert summary.to_classical.by_seed == pytest.approx((1.0, 1.6))
    assert summary.to_full.ratio == pytest.approx((1.0 * 1.6) ** 0.5 / 0.8)
    assert (summary.to_full.num_workloads, summary.num_full_better) == (1, 1)
    assert summary.updates == (5, 5)


def test_a_variant_that_never_fits_has_no_ratio() -> None:
    summary = VariantSummary.of("constant", [row("a", 100, full=(80,), constant=(None,))])
    assert (summary.to_full.ratio, summary.to_full.num_workloads) == (None, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": Budget(simulations=5)}, "a time such as 10m"),
        ({"seeds": 0}, "seeds is 0"),
        ({"hold_out": ("gmnt",)}, "'gmnt'"),
        ({"hold_out": ()}, "no hold_out; at least one"),
    ],
)
def test_bad_input_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(None, **options)


def test_only_switches_that_are_on_can_be_left_out() -> None:
    for part in ("hidden", "attnetion"):
        with pytest.raises(ValueError, match="a switch of SchedulerConfig that is on"):
            AblationConfig(parts=(part,))
