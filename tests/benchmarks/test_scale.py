"""Benchmark `scale` on a workload that takes seconds: every figure is there, and phases are those of the page."""

from pathlib import Path

import pytest

from benchmarks import capture
from benchmarks.model_configs import asked_model
from benchmarks.page import machine, render
from benchmarks.scale import AS_JSON, CASES, CHOSEN, FIXED, ScaleBenchmark, ScaleRow, measured
from gdp.models.papers import PAPERS
from gdp.parallel.layout import NONE


def test_models_of_benchmarks_can_be_asked(tmp_path: Path) -> None:
    """Each model that a benchmark names is one that gdp reads."""
    for name in (*(case.model for case in CASES), *capture.NAMES):
        model = asked_model(name, tmp_path)
        assert PAPERS.find(model) or model.startswith(("hf:", "benchmarks.workloads:")), name


@pytest.mark.parametrize("layout", [pytest.param(NONE, marks=pytest.mark.long), "microbatches=2", CHOSEN])
def test_a_case_has_all_figures_and_a_page(layout: str) -> None:
    """A case has all figures and a page."""
    case = {"model": "rnnlm-2", "layout": layout, "devices": "2xp100-pcie-16g", "budget": "1s"}
    row = ScaleRow(**measured(case))
    assert row.first_s is not None
    assert 0 < row.first_s <= row.search_s <= row.total_s
    assert 0 < row.bound_ns <= row.step_time_ns
    assert row.num_ops > 1_000
    assert set(row.phases) == ({*FIXED, *AS_JSON} if layout != CHOSEN else {"write"})
    shown = {
        "rows": [row],
        "cut": [row] if layout != CHOSEN else [],
        "chosen": [row] if layout == CHOSEN else [],
        "phases": (*FIXED, *AS_JSON),
        "num_kept": int(row.is_kept),
        "num_early": int(row.is_early),
        "slopes": {row.devices: None},
        "command": ScaleBenchmark().command,
        "machine": machine(),
        "budget": "1s",
    }
    assert "rnnlm-2 | " in render("scale", shown)
