"""Random layouts and placements by processes over gloo compute what PyTorch does, which each of them checks."""

import json
from pathlib import Path

import pytest

from execute import rank_jobs
from execute.rank_processes import start_ranks, statuses_of
from execute.test_layouts import MODELS, NUM_DEVICES

PATIENCE_SECONDS = 1200  # for four processes on one core


def check_layouts(name: str, seeds: range, out: Path) -> None:
    ranks = start_ranks(rank_jobs.start, out, NUM_DEVICES, "layouts", name, *seeds)
    statuses = statuses_of(ranks, PATIENCE_SECONDS)
    said = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    assert (statuses, said) == ([0] * NUM_DEVICES, [{"seeds": len(seeds)}] * NUM_DEVICES)


def test_random_layouts(tmp_path: Path) -> None:
    """Loss, outputs, gradients and three updates, as in `test_layouts`."""
    check_layouts("rnnlm", range(1), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_many_random_layouts(name: str, tmp_path: Path) -> None:
    """25 layouts of each model."""
    check_layouts(name, range(3, 28), tmp_path)
