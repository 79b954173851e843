"""`gdp train`: what it writes and prints, that it goes on where it was stopped, and how it refuses."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gdp.cli import main
from gdp.graph import Graph
from gdp.models import source
from gdp.models.papers import PAPERS
from gdp.policy.checkpoint import load_checkpoint, read_checkpoint
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
    return ["--out", out, "--updates", "4", "--samples", "4", *args]


def test_the_answer_is_a_policy_that_can_be_loaded_and_trained_on(run: Run) -> None:
    """`gdp train` writes a checkpoint that can be loaded, and training can start from it on other graphs."""
    status, out, _ = run(*train("--json", "--randomize"))
    answer = json.loads(out)
    assert (status, answer["updates"], answer["done"], answer["interrupted"]) == (0, 4, True, False)
    assert answer["statistics"]["best_step_time_ratio"] >= 1
    assert load_checkpoint(answer["checkpoint"]).num_parameters() == answer["num_parameters"]
    status, out, err = run(*train("--from", OUT, out="more.safetensors"), graphs=("random.json.gz",))
    assert (status, "Checkpoint written to more.safetensors" in out) == (0, True), err
    manifest = read_checkpoint("more.safetensors").manifest
    assert [graph["name"] for graph in manifest["graphs"]] == ["random-12"]
    assert re.fullmatch("[0-9a-f]{64}", manifest["arguments"]["from"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_resumes(run: Run, number: signal.Signals) -> None:
    """A run that SIGINT or SIGTERM interrupts saves its checkpoint and continues from it with `--resume`."""
    args = train("--updates", "100000")

    def interrupt() -> None:
        while not Path(OUT).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=interrupt)
    killer.start()
    status, out, err = run(*args)
    killer.join()
    assert (status, err.splitlines()[-1]) == (130, "gdp: interrupted")
    assert "Go on with the same command and --resume" in out
    done = read_checkpoint(OUT).manifest["updates"]
    status, out, _ = run(*args, "--resume", "--budget", "300ms", "--json")
    assert status == 0
    assert json.loads(out)["updates"] > done
    assert read_checkpoint(OUT).training


def test_the_seed_alone_decides(run: Run) -> None:
    """Equal seeds give equal parameters whatever PyTorch's own generator has, and another seed different ones."""
    for state, (out, seed) in enumerate((("a.safetensors", "3"), ("b.safetensors", "3"), ("c.safetensors", "4"))):
        torch.manual_seed(state)
        np.random.seed(state)  # noqa: NPY002, the generator that nothing should use
        assert run(*train("--seed", seed, out=out))[0] == 0
    a, b, c = (parameters(Path(name)) for name in ("a.safetensors", "b.safetensors", "c.safetensors"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (train("--budget", "100sims"), "budget is '100sims'; a time such as 30s or 2m is expected"),
        (train("--from", "graph.txt"), "graph.txt: no such file"),
        (train("--from", "random.json.gz"), "random.json.gz: truncated, or no safetensors file"),
        (train(out="."), ".: is a directory; name a file"),
        (train("--learning-rate", "0"), "learning_rate is 0.0; more than 0 is expected"),
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
        (train("--resume", "--seed", "1"), "was trained with training.seed = 0, not 1"),
        (train("--resume", "--updates", "5"), "was trained with training.updates = 4, not 5"),
    ):
        status, _, err = run(*args)
        assert status == 2
        assert message in err
    assert Path(OUT).read_bytes() == before
    status, out, _ = run(*train("--resume", "--json"))
    assert (status, json.loads(out)["statistics"]) == (0, None)  # nothing was left to do
    assert Path(OUT).read_bytes() == before


# The training set and families held out


@pytest.fixture
def _small_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workloads and variants are small graphs of their names."""
    load = source.load

    def load_small(text: str) -> Graph:
        return load(text) if PAPERS.find(text) is None else replace(random_graph(12, 0), name=text)

    monkeypatch.setattr(source, "load", load_small)


@pytest.mark.usefixtures("_small_workloads")
def test_the_training_set_goes_on_its_usual_devices_and_leaves_out_families(run: Run) -> None:
    """`training-set` stands for its workloads on their own clusters, without those of a family held out."""
    status, _, err = run(*train("--hold-out", "amoebanet"), graphs=("training-set",), devices=None)
    assert status == 0, err
    manifest = read_checkpoint(OUT).manifest
    assert manifest["held_out"] == ["amoebanet"]
    sources_used = manifest["arguments"]["tasks"]["sources"]
    expected = PAPERS.training_set(["amoebanet"])
    assert len(sources_used) == len(expected) == len(PAPERS.training_set()) - 4  # 3 variants and a workload
    assert {cluster["name"] for cluster in manifest["clusters"]} == {workload.cluster for workload in expected}
    for devices in (DEVICES, None):
        args = train("--resume", "--hold-out", "amoebanet")
        answer = run(*args, graphs=("training-set",), devices=devices)
        assert answer[0] == (2 if devices else 0)  # other devices, another run


@pytest.mark.usefixtures("_small_workloads")
def test_what_is_held_out_is_neither_trained_on_nor_known_from_before(run: Run) -> None:
    """A held-out family is refused in graphs, and in a checkpoint that did not hold it out."""
    assert run(*train("--hold-out", "wavenet"))[0] == 0
    for args, graphs, message in (
        (["--hold-out", "amoebanet"], ("amoebanet",), "amoebanet: is of family amoebanet, which is held out"),
        (["--hold-out", "wavenet", "--hold-out", "gnmt", "--from", OUT], ("rnnlm-2",), "without holding gnmt out"),
        (["--hold-out", "cubism"], ("rnnlm-2",), "family 'cubism' is unknown; known: rnnlm, gnmt"),
        ([], ("rnnlm-2", "chain.json.gz"), "chain.json.gz: is no built-in workload"),
    ):
        status, out, err = run(*train(*args, out="other.safetensors"), graphs=graphs, devices=None)
        assert (status, out) == (2, "")
        assert message in err
    assert not Path("other.safetensors").exists()
    args = train("--hold-out", "wavenet", "--from", OUT, out="other.safetensors")
    assert run(*args, graphs=("rnnlm-2",), devices=None)[0] == 0
    assert read_checkpoint("other.safetensors").manifest["held_out"] == ["wavenet"]


def test_a_built_in_graph_that_is_held_out_is_refused_before_any_graph_is_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held-out built-in graph is refused before any graph is read."""
    monkeypatch.setattr(source, "load", lambda *_: pytest.fail("read"))
    for args, graphs in ((["--hold-out", "gnmt"], ("rnnlm-2", "gnmt-2")),):
        status, out, err = run(*train(*args), graphs=graphs, devices=None)
        assert (status, out) == (2, "")
        assert "which is held out; leave one of both out" in err
