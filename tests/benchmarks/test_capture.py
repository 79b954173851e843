"""The benchmark of captures: figures of fresh processes."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import capture
from benchmarks.capture import STEPS, CaptureBenchmark, measure, share_of_time
from benchmarks.workloads import model_of
from gdp.errors import InputError
from gdp.graph import Graph, Op


def test_a_capture_in_a_fresh_process_gives_the_figures_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BERT, which has no cache: a training step and plain inference with every cost known, and why it has no others.

    Only a step of plain PyTorch has a process of its own here: each takes seconds to load Transformers.
    """
    in_a_fresh_process = capture._in_a_fresh_process

    def in_a_process(name: str, text: str, step: str) -> dict[str, Any]:
        is_fresh = (name, step) == ("dlrm", "inference")
        return in_a_fresh_process(name, text, step) if is_fresh else measure(text, step)

    monkeypatch.setattr(capture, "_in_a_fresh_process", in_a_process)
    figures = CaptureBenchmark(models=("bert-base", "dlrm")).run(out=tmp_path)
    rows, plain = (
        {row["step"]: row for row in figures["rows"] if row["model"] == name} for name in ("bert-base", "dlrm")
    )
    assert tuple(rows) == tuple(plain) == STEPS
    here = measure(model_of("dlrm"), "inference")
    for key in ("num_parameters", "num_ops", "num_tensors", "flops", "unknown"):
        assert plain["inference"][key] == here[key]
    assert plain["inference"]["import_seconds"] > here["import_seconds"]
    training, inference = rows["training"], rows["inference"]
    assert inference["num_parameters"] == training["num_parameters"] == 109_514_298
    assert training["num_ops"] > 2 * inference["num_ops"]
    for row in (inference, training, plain["inference"]):
        assert row["peak_memory_bytes"] < 4 * 10**9
        assert (row["unknown"], row["unknown_share"]) == ({}, 0)
    assert rows["prefill"]["reason"] == rows["decode"]["reason"] == "no cache"
    page = (tmp_path / "capture.md").read_text()
    assert "Every op has a known cost." in page
    assert "| bert-base | - | decode | - | - | - | - | no cache |" in page
    with pytest.raises(InputError, match="no model 'bogus'"):
        CaptureBenchmark(models=("bogus",))


@pytest.mark.long
def test_a_decoder_of_70_billion_parameters_is_captured_in_4_gb() -> None:
    """Training, prefill and decode; with a cache there is no plain inference."""
    rows = CaptureBenchmark(models=("llama-70b",)).run()["rows"]
    assert [row["step"] for row in rows] == ["training", "prefill", "decode"]
    assert {row["num_parameters"] for row in rows} == {68_976_648_192}
    assert all(row["peak_memory_bytes"] < 4 * 10**9 and not row["unknown"] for row in rows)


def test_the_share_of_unknown_costs_is_one_of_time() -> None:
    """Three equal ops, one of an unknown kind."""
    ops = [Op(name, kind, flops=10**12) for name, kind in (("a", "aten.mm"), ("b", "aten.mm"), ("c", "my.op"))]
    graph = Graph.build("three", ops, [])
    assert share_of_time(graph, {"my.op": 1}) == pytest.approx(1 / 3)
    assert share_of_time(graph, {}) == 0
