"""Benchmark `short` on workloads that take moments: every figure is there, and the arms differ in the policy alone."""

from pathlib import Path

from benchmarks.short import LARGE, PAPERS, WITH, WITHOUT, ShortBenchmark


def test_both_answers_have_figures_and_a_page(tmp_path: Path) -> None:
    """A workload of the papers and a larger step, each with and without the policy."""
    names = ("wavenet-2x9", "wavenet-2x9:microbatches=2")
    figures = ShortBenchmark(workloads=names, budgets=("0.1s", "0.2s"), seeds=1).run(out=tmp_path)
    assert [(mean["part"], mean["budget"]) for mean in figures["means"]] == [
        (PAPERS, "0.1s"),
        (PAPERS, "0.2s"),
        (LARGE, "0.1s"),
        (LARGE, "0.2s"),
    ]
    for row in figures["rows"]:
        ran = {
            name: {
                placer for placer, found in row["runs"][name][0]["baselines"].items() if found["status"] != "skipped"
            }
            for name in (WITH, WITHOUT)
        }
        assert ran[WITH] <= ran[WITHOUT]
    text = (tmp_path / "short.md").read_text()
    assert "python -m benchmarks short --seeds 1 --workloads wavenet-2x9,wavenet-2x9:microbatches=2" in text
    assert "| wavenet-2x9:microbatches=2 | " in text
