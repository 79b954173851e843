"""Benchmark `large-steps` on a small workload: every use has figures, runs are found again, and the page shows them."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.large_steps import STEPS, LargeStep, LargeStepsBenchmark
from benchmarks.policy_uses import SEARCH, TRAINED, USES
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.parallel.layout import NONE, Layout
from gdp.policy.pretrained import shipped

SMALL = LargeStep("rnnlm/l1-s30-h1024-b128", "data=2,microbatches=2", "4xp100-pcie-16g")


def bench(**changes: object) -> LargeStepsBenchmark:
    few = {"budget": Budget(seconds=0.3), "seeds": 1, "checkpoint": Path(shipped())}
    return LargeStepsBenchmark(**{**few, "steps": (SMALL,), **changes})  # type: ignore[arg-type]


def test_every_use_has_figures_and_a_page(tmp_path: Path) -> None:
    """Every use has a plan that fits, the same policy gives the same answers, and a second run makes none anew."""
    figures = bench().run(out=tmp_path)
    assert set(figures["at_end"]) == {*USES, "trained, default"}
    assert all(ratios[0] is not None for ratios in figures["at_end"].values())
    assert figures["at_end"][SEARCH] == [[1.0, 1.0, 1.0]]
    ratios = {(mean["use"], mean["limit"]): mean["ratio"] for mean in figures["means"]}
    for limit in bench().limits[:4]:
        assert np.isclose(ratios[TRAINED, limit], ratios["trained, default", limit])
    assert f"| {SMALL} | " in figures["markdown"]
    assert (tmp_path / "large-steps.svg").exists()
    assert bench().run(out=tmp_path)["means"] == figures["means"]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_steps_can_be_cut(step: LargeStep) -> None:
    """Replicas of each step have equally many devices, so that one of them is placed on its share."""
    cluster = Cluster.parse(step.devices)
    assert step.layout == NONE or cluster.num_devices % Layout.parse(step.layout).data == 0
