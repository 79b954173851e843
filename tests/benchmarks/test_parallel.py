"""The benchmarks of layouts: tiny runs."""

from pathlib import Path

import pytest

import benchmarks.parallel
from benchmarks.layout_memory import METHODS, LayoutMemoryBenchmark
from benchmarks.parallel import AUTO, OPS, OTHERS, ParallelBenchmark
from gdp.budget import Budget, Clock
from gdp.errors import InputError
from gdp.search.place import answer
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import Solution


def test_our_choice_stands_beside_what_users_run(tmp_path: Path) -> None:
    """Every method has a plan or says why not; ours is no slower than DDP, which it looks at; a rerun is the same."""

    def run() -> dict[str, object]:
        model, devices = "wavenet/s1-lps10-s8192-b128", "2xa100-sxm-40g"
        return ParallelBenchmark(models=(model,), devices=(devices,), budget=Budget(simulations=100)).run(out=tmp_path)

    figures = run()
    (row,) = figures["rows"]  # type: ignore[misc]
    assert set(row["layouts"]) == {AUTO, *OTHERS}
    assert row["baselines"][OPS]["status"] == row["baselines"]["ddp"]["status"] == "ok"
    assert row["layouts"]["ddp"].startswith("data=2")
    (ours,) = row["runs"][AUTO]
    assert ours["step_time_ns"] <= row["baselines"]["ddp"]["step_time_ns"]
    assert run() == figures
    with pytest.raises(InputError, match="no model 'bogus'"):
        ParallelBenchmark(models=("bogus",))


def test_an_interrupted_search_ends_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a search, which answers with its best so far, leaves no row of it."""

    def interrupted(question: PlaceQuestion, clock: Clock) -> Solution:
        clock.stop.set()
        return answer(question, clock)

    monkeypatch.setattr(benchmarks.parallel, "answer", interrupted)
    rows = tmp_path / "rows"
    with pytest.raises(KeyboardInterrupt):
        ParallelBenchmark(models=("wavenet/s1-lps10-s8192-b128",), devices=("2xa100-sxm-40g",)).run(rows=rows)
    assert not list(rows.glob("*auto*"))


def test_the_largest_model_is_found_for_each_method(tmp_path: Path) -> None:
    """Layers are added as long as they fit; our choice trains as many as any other, and a rerun is the same."""
    # two cards of 11.2 GiB; Adam with float32 master weights holds 14 bytes a parameter, the gradient 2:
    #   embedding and head 0.26e9, 3.9 GiB; a layer 0.20e9, 3.0 GiB
    #   DDP holds all of it on a card: 3.9 + 2 x 3.0 fits, 3.9 + 3 x 3.0 does not
    settings = {"devices": ("2xrtx3060-12g",), "batch": 2, "sequence": 64, "most_layers": 3}

    def run() -> dict[str, object]:
        return LayoutMemoryBenchmark(**settings, budget=Budget(simulations=20)).run(out=tmp_path)  # type: ignore[arg-type]

    figures = run()
    (row,) = figures["rows"]  # type: ignore[misc]
    assert tuple(row["largest"]) == METHODS
    assert (row["largest"]["ddp"]["num_layers"], row["largest"]["ddp"]["larger"]) == (2, 3)
    assert row["largest"]["ddp"]["reason"].startswith("does not fit by")
    assert row["largest"]["fsdp"]["num_layers"] == row["largest"][AUTO]["num_layers"] == 3
    assert figures["num_best"] == 1
    assert run() == figures
