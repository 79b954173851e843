"""The benchmark of captures: figures of fresh processes."""

from pathlib import Path

import pytest

from gdp.bench.capture import CaptureBenchmark
from gdp.errors import InputError


def test_a_capture_in_a_fresh_process_gives_the_figures_of_the_model(tmp_path: Path) -> None:
    """Llama with 70 billion parameters: under 4 GB for a training step, and every op has a cost."""
    figures = CaptureBenchmark(models=("llama-70b",)).run(out=tmp_path)
    inference, training = figures["rows"]
    assert inference["num_parameters"] == training["num_parameters"] == 68_976_648_192
    assert training["num_ops"] > 2 * inference["num_ops"]
    for row in (inference, training):
        assert row["peak_memory_bytes"] < 4 * 10**9
        assert not row["unknown"]
    assert "Every op has a known cost." in (tmp_path / "capture.md").read_text()
    with pytest.raises(InputError, match="no model 'bogus'"):
        CaptureBenchmark(models=("bogus",))
