"""Benchmark `published-batch` on small workloads: what is held out is not trained on, and the page has every figure."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gdp_batch, graphs, published_batch
from benchmarks.gdp_policy.paper_policy import paper_policy
from benchmarks.published_batch import BATCH, HELD_OUT, MEASURES, RANDOM, TUNED, PublishedBatchBenchmark
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.search.question import Question
from gdp.simulator.problem import Problem

SETTINGS: dict[str, Any] = {"updates": 1, "workloads": ("rnnlm-2", "gnmt-2")}


def test_held_out(tmp_path: Path, small_inputs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rerun finds all rows, and trains nothing again."""
    trained: list[tuple[str, ...]] = []

    def train(policy: Any, questions: Any, **settings: Any) -> dict[str, dict[str, Any]]:
        trained.append(tuple(questions))
        return gdp_batch.train_on_batch(policy, questions, **settings)

    monkeypatch.setattr(published_batch, "train_on_batch", train)
    figures = PublishedBatchBenchmark(**SETTINGS).run(out=tmp_path)
    both = ("rnnlm-2", "gnmt-2")
    assert trained == [both, both, *2 * [("gnmt-2",)], *2 * [("rnnlm-2",)], *4 * [both]]
    by_module = figures["tables"]["a choice for each module, with superposition"]
    assert all(by_module[name][measure]["ns"] > 0 for name in both for measure in MEASURES)
    assert by_module["rnnlm-2"][TUNED]["ns"] <= by_module["rnnlm-2"][HELD_OUT]["ns"]
    by_op = figures["tables"]["a choice for each op, with superposition"]["rnnlm-2"]
    assert by_op[RANDOM] is None
    assert by_op[BATCH]["ns"] > 0
    text = (tmp_path / "published-batch.md").read_text()
    for part in ("python -m benchmarks published-batch --updates 1", "PyTorch's initial weights |", "| gnmt-2 |"):
        assert part in text
    trained.clear()
    again = PublishedBatchBenchmark(**SETTINGS).run(rows=tmp_path / "rows")
    assert trained == []
    assert again["means"] == figures["means"]


def test_training_on_a_batch_improves_what_it_rewards() -> None:
    """After some updates the mean reward of both graphs is higher, and the best step time is that of a placement."""
    cluster = Cluster.parse("2xp100-pcie-16g")
    questions = {
        str(steps): Question.about(Problem.build(graphs.lstm_training_graph(steps, num_layers=1), cluster))
        for steps in (1, 2)
    }
    policy = paper_policy(initial="glorot", superposition=False)
    found = gdp_batch.train_on_batch(policy, questions, num_updates=16, num_samples=16, seed=0)
    for name, question in questions.items():
        rewards = found[name]["rewards"]
        assert sum(rewards[-4:]) > sum(rewards[:4])
        drawn = gdp_batch.judge(policy, question, num_samples=4)
        assert drawn["drawn_ns"] is not None
        assert drawn["likeliest_ns"] is None or drawn["drawn_ns"] <= drawn["likeliest_ns"]


def test_workloads_of_one_family_leave_nothing_to_train_on() -> None:
    """Workloads of one family leave nothing to train on."""
    with pytest.raises(InputError, match="no workload is of another family than rnnlm-2"):
        PublishedBatchBenchmark(workloads=("rnnlm-2", "rnnlm-4"))
