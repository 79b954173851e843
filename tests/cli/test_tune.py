"""`gdp tune` from its options to its answer, with commands that stand in for a training."""

import json
import os
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from doc_pages import read_blocks, read_commands
from gdp.cli import main
from gdp.cluster import Cluster

MODEL = "test_tune:net"
QUICK = "--devices", "2xl4-24g", "--search", "30sims", "--threads", "1"
TIMED = """echo $(basename $GDP_CANDIDATE) >> seen; echo "step: 1$(basename $GDP_CANDIDATE).5 ms" """


def net() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a small model whose batch can be split."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]), (torch.ones(4, 8),)


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


def test_measured_by_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Each plan is exported into its directory and measured; the answer is the fastest, a plan that `gdp simulate`
    takes. A run goes on with --resume, and is not overwritten without."""
    words = ["tune", MODEL, "--measure", TIMED, "--pattern", r"step: ([\d.]+) ms", *QUICK, "--to", "torch-fsdp"]
    assert main([*words, "--steps", "1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["candidate"] for row in first["measurements"]] == [0]
    assert len(os.listdir("tune/0")) == 5  # plan, devices, export, and what the command printed
    for name in ("plan.json", "cluster.json", "parallel_step.py"):
        assert Path("tune", name).read_bytes() == Path("tune/0", name).read_bytes()
    assert not Path("tune/output.txt").exists()
    assert main([*words, "--steps", "2"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*words, "--steps", "2", "--resume", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["measurements"][0] == first["measurements"][0]
    assert (
        second["step_time_ns"] == min(row["step_ns"] for row in second["measurements"]) == 10_500_000
    )  # 10.5 and 11.5 ms
    assert Path("seen").read_text().split() == ["0", "1"]
    assert main(["simulate", second["plan"], "--json"]) == 0
    capsys.readouterr()
    assert {row["number"] for row in second["numbers"]} == {"product", "bandwidth", "issue", "rate", "latency"}
    next_model = ("place", MODEL, "--devices", second["machine"], "--inference", "--budget", "9sims", "--json")
    assert main([*next_model, "--threads", "1", "--no-advice", "--no-cache"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "ok"


def test_what_users_run_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer of place, one device, DDP and FSDP are measured before others, as the tool runs them; what cannot be
    is said. Where the answer goes on is said with the environment of its command."""
    words = ["tune", MODEL, "--measure", TIMED, "--pattern", r"step: ([\d.]+) ms", *QUICK, "--to", "torch-fsdp"]
    assert main([*words, "--steps", "4"]) == 0
    printed = capsys.readouterr()
    assert {"single", "ddp", "fsdp"} <= set(printed.out.split())
    assert "GDP_CANDIDATE=tune GDP_RANKS=" in printed.out
    assert main([*words, "--out", "odd", "--steps", "1", "--batch-dim", "1"]) == 0
    assert "ddp is not measured" in capsys.readouterr().err


def test_a_run_goes_on_with_the_same_model_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Measurements of a model, or of devices, whose file has changed are not mixed with new ones."""
    assert main(["capture", MODEL, "--out", "graph.json"]) == 0
    Cluster.parse("2xl4-24g").save("cards.json")
    words = ["tune", "graph.json", "--measure", TIMED, "--pattern", r"step: ([\d.]+) ms", "--devices", "cards.json"]
    words += [*QUICK[2:], "--steps", "1"]
    assert main(words) == 0
    changes = {"cards.json": ('"launch":', '"launch":1'), "graph.json": ('"flops":', '"flops":1')}
    for path, says in (("cards.json", "another content of DEVICES"), ("graph.json", "another content of MODEL")):
        kept = Path(path).read_text()
        Path(path).write_text(kept.replace(*changes[path], 1))
        assert Path(path).read_text() != kept
        capsys.readouterr()
        assert main([*words, "--resume"]) == 2
        assert says in capsys.readouterr().err
        Path(path).write_text(kept)


def test_runtimes(capsys: pytest.CaptureFixture[str]) -> None:
    """With several runtimes each plan is measured in each; names, logs and the environment say which."""
    command = 'echo $GDP_RUNTIME >> seen; test $GDP_RUNTIME = compile && t=3 || t=9; echo "t $t"'
    words = ["tune", MODEL, "--measure", command, "--pattern", r"t (?P<s>\d+)", *QUICK, "--runtime", "eager,compile"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"].endswith(", compile")
    assert answer["step_time_ns"] == 3_000_000_000
    assert set(Path("seen").read_text().split()) == {"eager", "compile"}
    assert json.loads(Path("tune/plan.json").read_text())["asked"]["cluster"] == "2xl4-24g:compile"
    assert main(["simulate", "tune/plan.json", "--json"]) == 0


def test_whatever_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that hang, die, run out of memory or print rubbish end in the table; the best of the others is the
    answer."""
    command = (
        "case $(basename $GDP_CANDIDATE) in 0) sleep 60;; 1) kill -9 $$;; 2) echo CUDA out of memory; exit 1;; "
        "3) head -c 99999 /dev/urandom;; *) echo step: 7 ms;; esac"
    )
    words = ["tune", MODEL, "--measure", command, "--pattern", "step: (.*) ms", *QUICK, "--timeout", "1s"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert all(text in printed.out for text in ("timed out", "failed", "out of memory", "no time", "7.000 ms"))
    assert "signal 9" in printed.err
    assert "gdp place MODEL --devices tune/machine.yaml" in printed.out


STAND_INS = {  # what the tools print, around a time
    "vllm": 'echo "$@" >> options; echo "Avg latency: 0.25 seconds"; echo "10% percentile latency: 0.24 seconds"',
    "llama-completion": 'echo "$@" >> options; '
    'echo "llama_perf_context_print: prompt eval time =  900.00 ms /     2 tokens (  450.00 ms per token,     2.22 '
    'tokens per second)" >&2; echo "llama_perf_context_print:        eval time =   1575.00 ms /    63 runs   (   25.00 '
    'ms per token,    40.00 tokens per second)" >&2',
}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48}
CONFIG |= {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 30, "max_position_embeddings": 4096}


@pytest.mark.parametrize("tool", ["torchrun", *STAND_INS])
def test_commands_of_the_page(tool: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/howto/tune.md run as they are: torchrun trains over gloo, others are stood in for by what
    prints as they do. The page itself measures three plans by torchrun, each of which takes it a dozen seconds.
    """
    blocks = read_blocks(Path(__file__).parents[2] / "docs" / "howto" / "tune.md")
    Path("train.py").write_text(next(block.content for block in blocks if block.title == "train.py"))
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(CONFIG))
    Path("bin").mkdir()
    if tool in STAND_INS:
        Path("bin", tool).write_text(f"#!/bin/sh\n{STAND_INS[tool]}\n")
        Path("bin", tool).chmod(0o755)
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(Path("bin").absolute()), sys.exec_prefix + "/bin", os.environ["PATH"]))
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    commands = [command.text for block in blocks if block.language == "console" for command in read_commands(block)]
    text = next(text for text in commands if tool in text)
    words = shlex.split(text.replace("\\\n    --", "--").replace("\\\n    ", " "))
    assert main([*words[1:], *QUICK[2:], "--steps", "1" if tool == "torchrun" else "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in answer["measurements"]} == {"ok"}
    if tool == "torchrun":
        assert main(["simulate", answer["plan"], "--json"]) == 0
        return
    assert answer["step_time_ns"] == {"vllm": 250_000_000, "llama-completion": 25_000_000}[tool]
    options = Path("options").read_text().splitlines()
    assert len(set(options)) >= min(2, len({row["candidate"] for row in answer["measurements"]}))
    assert all({"vllm": "--pipeline-parallel-size", "llama-completion": "-ngl"}[tool] in line for line in options)


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in a measurement ends it, and answers with the plan that was measured before."""
    command = 'test -e begun && { touch hangs; exec sleep 60; }; touch begun; echo {\\"step_time_ms\\": 3}'

    def interrupt() -> None:
        while not Path("hangs").exists():
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["tune", MODEL, "--measure", command, *QUICK, "--json"]) == 130
    thread.join()
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ended"], answer["step_time_ns"]) == ("interrupted", 3_000_000)
    assert Path(answer["plan"]).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--on local"),
        (("--on", "local", "--measure", "true"), "--on local"),
        (("--measure", "true"), "--devices"),
        (("--measure", " ", *QUICK), "--measure: a command"),
        (("--on", "local", "--devices", "2xl4-24g"), "leave it out"),
        (("--on", "local", "--pattern", "x"), "--pattern"),
        (("--on", "local", "--runtime", "compile"), "--runtime"),
        (("--measure", "true", *QUICK, "--runtime", "eager,fast"), "--runtime"),
        (("--on", "2xl4-24g"), "--measure COMMAND --devices 2xl4-24g"),
        (("--measure", "true", *QUICK, "--pattern", "(?P<h>.*)"), "ms or s"),
        (("--measure", "true", *QUICK, "--budget", "9sims"), "--budget"),
        (("--measure", "true", *QUICK, "--timeout", "5"), "--timeout 5: a time is expected, such as 10m"),
    ],
)
def test_bad_options(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that make no sense together are refused in a line, and nothing is written."""
    assert main(["tune", MODEL, *words]) == 2
    assert says in capsys.readouterr().err
    assert not Path("tune").exists()


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no plan runs, the exit status is 1 and the line has the reason of the first. After five that failed alike
    no other is tried; a run that goes on says so at once."""
    words = ["tune", MODEL, "--measure", "echo >> seen; echo no card >&2; exit 4", *QUICK]
    for more in (), ("--resume",):
        assert main([*words, *more]) == 1
        told = capsys.readouterr().err
        assert "exit status 4: no card" in told
        assert "name another --out" in told
        assert Path("seen").read_text() == "\n" * 5
