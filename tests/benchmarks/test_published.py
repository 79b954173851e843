"""Benchmark `published` on small workloads: runs end by evaluations or patience, and the page has every figure."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import HDP, METHODS, PUBLISHED, PatientClock, PublishedBenchmark
from gdp.budget import Budget
from gdp.errors import InputError
from gdp.search.candidate import Candidate, Figures


def candidate(step_time_ns: int, excess_bytes: int = 0) -> Candidate:
    return Candidate(None, Figures(excess_bytes, step_time_ns))  # type: ignore[arg-type]


def test_a_patient_clock_ends_when_nothing_comes_any_more() -> None:
    """A patient clock ends when nothing comes any more."""
    clock = PatientClock(Budget(simulations=100), patience=10)
    clock.spend(9)
    clock.note(candidate(7))
    clock.spend(9)
    clock.note(candidate(8))  # slower
    clock.note(candidate(5, excess_bytes=1))  # does not fit
    assert not clock.is_up
    clock.spend(1)
    assert clock.is_up
    assert [(count, step_ns) for count, _, step_ns in clock.improvements.points] == [(9, 7)]


def test_runs(tmp_path: Path, small_inputs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have curves and a rerun finds them all."""
    settings: dict[str, Any] = {"evaluations": 300, "patience": 200, "seeds": 1, "workloads": ("rnnlm-2", "gnmt-2")}
    figures = PublishedBenchmark(**settings).run(out=tmp_path)
    assert [run["method"] for run in figures["runs"]] == 2 * list(METHODS)
    for run in figures["runs"]:
        counts, _, times_ns = zip(*run["curve"], strict=True)
        assert list(counts) == sorted(counts)
        assert list(times_ns) == sorted(set(times_ns), reverse=True)
        expected = min(300, counts[-1] + 200)  # searches end a few moves earlier, learned placers after an update
        assert 0.9 * expected <= run["evaluations"] < expected + 84
    means = {mean["method"]: mean for mean in figures["means"]}
    assert means[HDP]["to_hdp"] == 1.0
    assert means[PUBLISHED]["num_workloads"] == 2
    text = (tmp_path / "published.md").read_text()
    for part in ("published --evaluations 300 --patience 200", "| without attention |", "| rnnlm-2 |"):
        assert part in text

    def followed_again(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(PublishedBenchmark, "_follow", followed_again)
    again = PublishedBenchmark(**settings).run(rows=tmp_path / "rows")
    assert again["means"] == figures["means"]


def test_unknown_methods_are_named() -> None:
    """Unknown methods are named."""
    with pytest.raises(InputError, match="'gdp'; one of published, "):
        PublishedBenchmark(methods=("gdp",))
