"""`gdp train`: what it writes and prints, that it goes on where it was stopped, and how it refuses."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gdp.cli import main
from gdp.policy.checkpoint import load_checkpoint, read_manifest
from gdp.policy.features import INITIAL_WEIGHTS
from gdp.policy.training import style_training
from gdp.policy.training.style_outcomes import Outcomes
from policy.tiny_policy import mixed_chain, parameters, random_graph

DEVICES = "2xp100-pcie-16g"
OUT = "tiny.safetensors"

Answer = tuple[int, str, str]
Run = Callable[..., Answer]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`gdp train` on two small graphs: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    random_graph(12, 0).save("random.json.gz")
    mixed_chain().save("chain.json.gz")

    def call(
        *args: str, graphs: tuple[str, ...] = ("random.json.gz", "chain.json.gz"), devices: str | None = DEVICES
    ) -> Answer:
        status = main(["train", *graphs, *(["--devices", devices] if devices else []), *args])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def train(*args: str, out: str = OUT) -> list[str]:
    return ["--styles", "8", "--out", out, "--updates", "2", "--samples", "8", *args]


def test_the_answer_is_a_policy_that_can_be_loaded_and_trained_on(run: Run) -> None:
    """`gdp train` writes a checkpoint that can be loaded, and training can start from it on other graphs."""
    status, out, _ = run(*train("--json", "--validation", "random.json.gz", "--randomize"))
    answer = json.loads(out)
    assert (status, answer["updates"], answer["done"], answer["interrupted"]) == (0, 2, True, False)
    assert -1 <= answer["rank_correlation"] <= 1
    policy = load_checkpoint(answer["checkpoint"])
    assert policy.num_parameters() == answer["num_parameters"]
    more = ["--from", OUT, "--out", "more.safetensors", "--updates", "1", "--samples", "8"]
    status, out, err = run(*more, graphs=("random.json.gz",))
    assert (status, "Checkpoint written to more.safetensors" in out) == (0, True), err
    manifest = read_manifest("more.safetensors")
    assert [graph["name"] for graph in manifest["graphs"]] == ["random-12"]
    assert re.fullmatch("[0-9a-f]{64}", manifest["arguments"]["from"])
    assert policy.styles is not None
    mean = load_checkpoint("more.safetensors").get_parameter("styles.mean")
    assert torch.equal(mean, policy.get_parameter("styles.mean"))  # of the features of the graphs trained on first


def test_a_style_scorer_is_trained_on_outcomes(run: Run) -> None:
    """192 styles are tried on each problem, and nothing but the scorer is trained."""
    status, out, err = run(
        "--styles", "8", "--updates", "2", "--out", OUT, "--randomize", "--validation", "random.json.gz"
    )
    assert (status, f"Checkpoint written to {OUT}" in out) == (0, True), err
    manifest, policy = read_manifest(OUT), load_checkpoint(OUT)
    assert (manifest["updates"], manifest["num_trials"]) == (2, 2 * 192)
    assert -1 <= manifest["rank_correlation"] <= 1
    assert policy.constructor is not None
    assert policy.constructor.style_scorer() is not None
    assert torch.equal(policy.get_parameter("base"), torch.tensor(INITIAL_WEIGHTS))
    status, out, err = run("--styles", "8", "--updates", "3", "--out", OUT, "--randomize", "--resume", "--json")
    assert (status, json.loads(out)["updates"]) == (0, 3), err


def test_samples_are_the_styles_of_a_problem(run: Run) -> None:
    """Each update tries `--samples` styles, and existing outcomes are not overwritten."""
    status, _, err = run("--styles", "8", "--updates", "2", "--samples", "16", "--out", OUT)
    assert (status, read_manifest(OUT)["num_trials"]) == (0, 2 * 16), err
    Path(OUT).unlink()
    status, _, err = run("--styles", "8", "--updates", "2", "--samples", "16", "--out", OUT)
    assert (status, "tiny.outcomes: exists; go on with it by --resume" in err) == (2, True), err


def test_styles_resume_from_their_own_checkpoint_and_outcomes_alone(run: Run) -> None:
    """Neither a checkpoint of another size is overwritten, nor one without outcomes."""
    args = ("--updates", "1", "--samples", "8", "--out", OUT, "--resume")
    assert run("--styles", "8", *args)[0] == 0  # nothing is there yet: it starts anew
    scorer, outcomes = Path(OUT).read_bytes(), Path("tiny.outcomes")
    for styles, content, message in (
        ("16", scorer, "tiny.safetensors: was trained with --styles 8, not 16"),
        ("16", None, "is of a run with other options"),
        ("8", scorer, "tiny.safetensors: its outcomes are not in tiny.outcomes; choose another --out"),
    ):
        if content is None:
            Path(OUT).unlink()
        else:
            Path(OUT).write_bytes(content)
        if "outcomes are not" in message:
            outcomes.rename("moved")
        status, out, err = run("--styles", styles, *args)
        told = [line for line in err.splitlines() if not line.startswith("gdp: [")]  # but what a busy machine is at
        assert (status, out, len(told)) == (2, "", 1), err
        assert message in err
        assert (Path(OUT).read_bytes() if Path(OUT).exists() else None) == content


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_outcomes_and_resumes(
    run: Run, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that SIGINT or SIGTERM interrupts keeps the outcomes of its problems, and goes on with `--resume`."""
    try_styles, calls = style_training.try_styles, list[int]()

    def interrupted(*args: Any) -> Outcomes:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return try_styles(*args)

    monkeypatch.setattr(style_training, "try_styles", interrupted)
    status, out, err = run(*train("--updates", "100000"))
    assert (status, err.splitlines()[-1]) == (130, "gdp: interrupted")
    assert "Outcomes of 3 problems are kept in tiny.outcomes\nGo on with the same command and --resume" in out
    status, out, err = run(*train("--updates", "5", "--resume", "--json"))
    assert (status, json.loads(out)["updates"], len(calls)) == (0, 5, 5), err


def test_the_seed_alone_decides(run: Run) -> None:
    """Equal seeds give equal parameters whatever PyTorch's own generator has, and another seed different ones."""
    for state, (out, seed) in enumerate((("a.safetensors", "3"), ("b.safetensors", "3"), ("c.safetensors", "4"))):
        torch.manual_seed(state)
        np.random.seed(state)  # noqa: NPY002, the generator that nothing should use
        assert run(*train("--seed", seed, out=out))[0] == 0
    a, b, c = (parameters(Path(name)) for name in ("a.safetensors", "b.safetensors", "c.safetensors"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (train("--samples", "12"), "--samples is 12; a multiple of 8 is expected"),
        (train("--budget", "100sims"), "budget is '100sims'; a time such as 30s or 2m is expected"),
        (train("--from", "graph.txt"), "graph.txt: no such file"),
        (train("--from", "random.json.gz"), "random.json.gz: truncated, or no safetensors file"),
        (train(out="."), ".: is a directory; name a file"),
        (train("--validation", "none.json"), "none.json"),
        (train("--samples", "1"), "Invalid value for '--samples'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run: Run, args: list[str], message: str) -> None:
    """Bad input to `gdp train` ends with status 2 and a one-line error, and writes no checkpoint."""
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not Path(OUT).exists()


def test_an_existing_checkpoint_is_neither_overwritten_nor_taken_for_another_run(run: Run) -> None:
    """An existing checkpoint is refused without `--resume` or with other arguments, and stays as it was."""
    assert run(*train())[0] == 0
    before = Path(OUT).read_bytes()
    for args, message in (
        (train(), "exists; go on with it by --resume, or choose another --out"),
        (train("--resume", "--seed", "1"), "is of a run with other options"),
        (train("--resume", "--updates", "1"), "2 updates were made already"),
        (["--from", OUT, "--styles", "16", "--out", "b"], "has 8 numbers a layer; leave --styles out"),
    ):
        status, _, err = run(*args)
        assert status == 2
        assert message in err
    assert Path(OUT).read_bytes() == before


def test_graphs_without_usual_devices_need_devices(run: Run) -> None:
    """A graph that is no built-in workload has no devices of its own."""
    status, out, err = run(*train(), devices=None)
    assert (status, out) == (2, "")
    assert "random.json.gz: is no built-in workload with devices of its own; name them with --devices" in err
