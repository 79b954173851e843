"""The ablation trains each variant equally long, keeps what is done, and says which parts earn their place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gdp.bench import ablation, graphs
from gdp.bench.ablation import CONTROLS, FULL, AblationConfig, Summary
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.placers.learned import ZeroShotConfig
from gdp.policy.checkpoint import read_manifest
from gdp.policy.pretraining import TrainingConfig
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.scheduler_config import SchedulerConfig
from gdp.policy.tasks import TaskConfig
from gdp.problem import Problem

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
    monkeypatch.setattr(ablation, "warm_up", lambda: None)


def run(out: Path | None, config: AblationConfig = CONFIG, **options: Any) -> dict[str, Any]:
    given = {"budget": Budget(seconds=SECONDS), "seeds": 2, "hold_out": ("dlrm", "bert"), **options}
    return ablation.run(out=out, on_row=lambda line: None, config=config, **given)


@pytest.mark.long
def test_every_variant_is_trained_for_the_budget_and_compared_and_a_rerun_finds_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = run(tmp_path)
    assert list(figures["rows"]) == ["full", "without-attention", "without-network", *CONTROLS]
    for variant, runs in figures["rows"].items():
        for seed, rows in enumerate(runs):
            assert set(rows) == {"bert-large", "dlrm"}
            assert all(row["step_time_ns"] > 0 and row["simulations"] >= 8 for row in rows.values())
            if variant not in CONTROLS:
                manifest = read_manifest(tmp_path / f"{variant}-seed{seed}.safetensors")
                assert manifest["updates"] == rows["dlrm"]["updates"] > 0
                assert 3600 * manifest["cpu_hours"] >= SECONDS  # the last update is a whole one
                assert {"bert", "dlrm"} == set(manifest["held_out"])
    assert not {"bert-large", "dlrm"} & set(figures["trained_on"])
    text = (tmp_path / "ablation.md").read_text()
    command = "gdp bench ablation --budget 0.1s --seeds 2 --hold-out dlrm --hold-out bert"
    for part in (command, "| without network |", "constant: **"):
        assert part in text
    assert "<svg" in (tmp_path / "ablation.svg").read_text()

    monkeypatch.setattr(ablation, "train", None)  # nothing is trained or placed again
    monkeypatch.setattr(ablation, "zero_shot", None)
    assert run(tmp_path)["markdown"] == figures["markdown"]
    with pytest.raises(InputError, match=r"full-seed0-.*was made with another zero_shot"):
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


def rows(*times_ns: int | None) -> dict[str, dict[str, Any]]:
    return {name: {"step_time_ns": time_ns, "updates": 5} for name, time_ns in zip("abc", times_ns, strict=True)}


CLASSICAL = {"a": {"best_ns": 100}, "b": {"best_ns": 100}, "c": {"best_ns": None}}


def test_a_variant_is_compared_over_the_workloads_that_both_place_with_every_seed() -> None:
    # full: 80 and 80 on a (0.8), 90 on b once and nothing once; c has no classical plan: only a counts
    found = {FULL: [rows(80, 90, 1), rows(80, None, 1)], "random": [rows(100, 50, 1), rows(160, 50, 1)]}
    summary = ablation.summarize("random", found, CLASSICAL)
    assert summary.to_classical == pytest.approx((1.0, 1.6))
    assert summary.full_to_classical == pytest.approx((0.8, 0.8))
    assert summary.to_full == {"a": pytest.approx((1.0 * 1.6) ** 0.5 / 0.8)}
    assert summary.ratio == pytest.approx(summary.to_full["a"])
    assert summary.num_full_better == 1
    assert summary.updates == (5, 5)


def test_a_variant_that_never_fits_has_no_ratio() -> None:
    found = {FULL: [rows(80, 90, 1)], "constant": [rows(None, None, 1)]}
    summary = ablation.summarize("constant", found, CLASSICAL)
    assert summary.to_full == {}
    assert summary.to_document()["ratio_to_full"] is None
    assert ablation._sentence(summary, 2) == "constant: nothing fits."


@pytest.mark.parametrize(
    ("without", "verdict"),
    [
        ((0.97, 0.99), "device features: earns its place"),  # full with every seed better than without
        ((0.93, 0.99), "device features: within the spread of the seeds, does not earn its place"),
        ((0.90, 0.91), "device features: does harm, better without it with every seed"),
    ],
)
def test_a_part_earns_its_place_by_more_than_the_spread_of_the_seeds(without: Any, verdict: str) -> None:
    summary = Summary("without-device_features", without, (0.92, 0.95), {"a": 1.0}, (1, 1))
    assert ablation._sentence(summary, 2).endswith(f"; {verdict}.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": Budget(simulations=5)}, "a time such as 10m"),
        ({"seeds": 0}, "0 seeds"),
        ({"hold_out": ("gmnt",)}, "'gmnt'"),
        ({"hold_out": ()}, "hold out at least one"),
    ],
)
def test_bad_input_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(None, **options)


def test_only_switches_that_are_on_can_be_left_out() -> None:
    for part in ("hidden", "attnetion"):
        with pytest.raises(ValueError, match="a switch of SchedulerConfig that is on"):
            AblationConfig(parts=(part,))
