"""The benchmarks of layouts: tiny runs, statistics by hand, and files that are no measurements."""

from pathlib import Path

import pytest

import benchmarks.parallel
from benchmarks.layout_memory import METHODS, LayoutMemoryBenchmark
from benchmarks.measured import MeasuredBenchmark, MeasuredRun, PredictedRun, read_runs, statistics
from benchmarks.parallel import AUTO, OPS, OTHERS, ParallelBenchmark
from gdp.budget import Budget, Clock
from gdp.errors import InputError
from gdp.search.layouts.choose import choose_layout
from gdp.search.question import BatchQuestion, Solution

HEADER = (
    "gpus,global_batch,micro_batch,hidden,heads,layers,sequence,tensor_parallel,data_parallel,pipeline_parallel,"
    "iteration_ms\n"
)


def predictions(*times_ms: tuple[int, float, float]) -> list[PredictedRun]:
    """(Global batch, predicted, measured) of rows; those with the same batch are a group."""
    return [
        PredictedRun(MeasuredRun(2, batch, 1, 64, 2, 2, 32, 1, 2, 1, measured), predicted, 0)
        for batch, predicted, measured in times_ms
    ]


def test_statistics_are_those_of_the_textbook() -> None:
    # errors 0.5, 0.2, 0.4, 0.1 and 0.0: median 0.2, mean 0.24
    # the group of 4: ranks 1 2 3 predicted, 1 3 2 measured: rho = 1 - 6 * (0 + 1 + 1) / (3 * 8) = 0.5, no regret
    # the group of 8: the prediction prefers 11 ms to 10 ms: a regret of 10 %; ranks 1 2 against 2 1
    # pooled, from the middle: (-1, 0, 1, -0.5, 0.5) and (-1, 1, 0, 0.5, -0.5): (1 - 0.25 - 0.25) / 2.5 = 0.2
    """Statistics are those of the textbook."""
    found = statistics(predictions((4, 10, 20), (4, 32, 40), (4, 42, 30), (8, 9.9, 11), (8, 10, 10)))
    assert found["errors"]["median"] == pytest.approx(0.2)
    assert found["errors"]["mean"] == pytest.approx(0.24)
    assert found["correlation"] == pytest.approx(0.5)
    assert found["pooled_correlation"] == pytest.approx(0.2)
    assert found["regret"]["mean"] == pytest.approx(0.05)
    assert found["regret"]["worst"] == pytest.approx(0.1)


def test_measured_steps_are_predicted_in_their_layouts(tmp_path: Path) -> None:
    """Two micro-batches in two stages wait for each other: longer than two replicas with one each."""
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}2,2,1,64,2,2,32,1,2,1,10.0\n2,2,1,64,2,2,32,1,1,2,12.0\n2,2,1,64,2,2,32,2,1,1,9.0\n")
    figures = MeasuredBenchmark(runs=path).run()
    by_stages = {row["run"]["pipeline_parallel"]: row["predicted_ms"] for row in figures["predictions"]}
    assert by_stages[2] > by_stages[1] > 0
    assert (figures["num_left_out"], figures["num_fitting"]) == (1, 2)
    assert figures["regret"]["worst"] == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpus,layers\n2,4\n", "no column global_batch"),
        (f"{HEADER}2,4,1,64,2,2,32,1,2,1,soon\n", "line 2: whole numbers and a time"),
        (f"{HEADER}2,4,1,64,2,2,32,1,1,1,9.0\n", "line 2: gpus is 2"),
        (f"{HEADER}2,4,4,64,2,2,32,1,2,1,9.0\n", "line 2: the batch has no equal micro-batches"),
        (f"{HEADER}2,4,1,64,2,2,32,1,2,1,-9.0\n", "line 2: has a number that is not above 0"),
    ],
)
def test_files_that_are_no_measurements_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    """Files that are no measurements are refused."""
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_runs(path)


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

    def interrupted(question: BatchQuestion, clock: Clock) -> Solution:
        clock.stop.set()
        return choose_layout(question, clock)

    monkeypatch.setattr(benchmarks.parallel, "choose_layout", interrupted)
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
