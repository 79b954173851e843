"""Steps whose ops are cut over processes that gloo connects: `gdp run` and `gdp.placed` compute what PyTorch does."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from execute import placed_jobs
from execute.rank_processes import start_ranks, statuses_of
from gdp.cli import main

SIX = ("llama", "bert", "gpt2", "vit", "t5", "diffusion")
ROUNDING = 1e-5  # relative: sums in another order
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("num_cards", "texts", "names"),
    [
        (2, ["tensor=2"], ["blocks"]),
        pytest.param(2, ["tensor=2"], SIX, marks=LONG),
        pytest.param(4, ["tensor=4"], SIX, marks=LONG),
        pytest.param(4, ["data=2,tensor=2,zero=1", "data=2,tensor=2"], ["llama"], marks=LONG),
        pytest.param(4, ["tensor=2,stages=2,microbatches=2"], ["bert"], marks=LONG),
        pytest.param(4, ["tensor=2,context=2"], ["llama", "gpt2", "bert", "diffusion"], marks=LONG),
        pytest.param(2, ["context=2"], ["llama", "gpt2", "bert", "diffusion"], marks=LONG),
    ],
)
def test_processes_compute_the_step_of_pytorch(
    num_cards: int,
    texts: Sequence[str],
    names: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Loss, outputs and gradients of a step, and losses and the state of a training, are those of the whole model.

    All models: `pytest -m long tests/execute/test_sharded_processes.py`
    """
    monkeypatch.chdir(tmp_path)
    models = [f"def {name}():\n    model, inputs = case({name!r})\n    return model, (), inputs" for name in names]
    Path("sharded_models.py").write_text("\n".join(["from tests.models.shard_cases import case", *models]))
    cases = [(name, f"{name}-{number}") for number, _ in enumerate(texts) for name in names]
    for (name, directory), text in zip(cases, [text for text in texts for _ in names], strict=True):
        options = ["--devices", f"{num_cards}xcpu-16core", "--parallel", text, "--optimizer", "sgd-momentum"]
        place = ["place", f"sharded_models:{name}", *options, "--budget", "30sims", "--threads", "1", "--no-advice"]
        assert main([*place, "--out", directory]) == 0
    capsys.readouterr()
    ranks = start_ranks(placed_jobs.start, tmp_path, num_cards, "proves", cases)
    assert statuses_of(ranks, patience_seconds=1500) == [0] * num_cards, (tmp_path / "0.err").read_text()
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_cards)]
    for _, directory in cases:
        found = by_rank[0][directory]
        status, printed = found["run"]
        results = json.loads(printed)["results"]
        print(f"{directory}: {results}, losses {found['losses']}, state {found['state']:.1e}")
        assert (status, results["equal"]) == (0, True)
        assert results["tensors"] > 10
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=ROUNDING)
        assert found["state"] < ROUNDING
        assert all(rank[directory]["run"] == [0, ""] for rank in by_rank[1:])  # one rank reports
        assert all(rank[directory]["state"] == found["state"] for rank in by_rank)
