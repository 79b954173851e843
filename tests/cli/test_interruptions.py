"""Random interruptions of `gdp place`: an answer or a clear refusal each time, in time, and no half-written file."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from benchmarks.graphs import lstm_training_graph
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.graph.accumulation import accumulated
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import verify

DEVICES = "8xp100-pcie-16g"
BUDGET_S = 6.0
LATE_SHARE, LATE_S = 0.1, 2.0  # of a budget, and seconds: what an answer may take longer
STARTED_S = 1.5  # that Python takes to load gdp: before that, a signal ends Python
ANSWERED_S = 2.0  # after a signal
SLOW = 2.0  # times as much on a machine that runs other tests as well
OK, BAD_INPUT, NOTHING_FITS, INTERRUPTED = 0, 2, 3, 130


@dataclass(frozen=True)
class Ending:
    """What became of a command that was interrupted: its status, what it printed, and the seconds after the signal,
    but for those in which other programs had the processors.
    """

    status: int
    out: str
    err: str
    late_s: float


def place(
    model: str | Path, out: Path, number: int | None, delay_s: float, budget_s: float, options: Sequence[str] = ()
) -> Ending:
    """Sends signal `number` to a command after `delay_s`; None: nothing but its budget ends it."""
    command = [sys.executable, "-m", "gdp", "place", str(model), "--devices", DEVICES, "--budget", f"{budget_s:g}s"]
    command += ["--out", str(out), "--json", "--no-cache", *options]
    with (
        tempfile.TemporaryFile("w+") as printed,
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=printed, stderr=said, text=True) as process,
    ):
        end_s, deadline_s = time.monotonic() + delay_s, time.monotonic() + 300  # a model is captured first
        begun = 0.0
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if number is not None and time.monotonic() >= end_s:
                end_s, begun = time.monotonic(), waited_s(process.pid)
                process.send_signal(number)
                number = None
            if time.monotonic() >= deadline_s:
                process.kill()
            time.sleep(0.005)
        late_s = max(time.monotonic() - end_s, 0.0) - (waited_s(process.pid) - begun)
        process.wait()
        texts = [(file.seek(0), file.read())[1] for file in (printed, said)]
    # Python ends itself by SIGINT after an interrupt in an exec of text, as imports have; to a shell that is 130, too
    status = INTERRUPTED if process.returncode == -signal.SIGINT else process.returncode
    return Ending(status, *texts, late_s)


def waited_s(process: int) -> float:
    """Returns the seconds for which the main thread of a process, which may have ended, waited for a processor."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9


def check(ending: Ending, graph: Graph | None, out: Path) -> None:
    """An answer is whole and true, a refusal is a line, and files are whole or absent.

    Without `graph`, the step is that of the layout that is found, which is beside the plan or was not written.
    """
    assert "Traceback" not in ending.err
    assert ending.status in (OK, NOTHING_FITS, INTERRUPTED), ending.err
    left = {path.name for path in out.iterdir()} if out.exists() else set()
    assert left <= {"plan.json", "graph.json.gz", "graph.safetensors", "cluster.json", "report.html"}
    if ending.out:
        assert json.loads(ending.out)["status"] in ("ok", "infeasible")
    else:
        assert "gdp: " in ending.err
    plan = Plan.load(out / "plan.json") if "plan.json" in left else None
    for name in left & {"graph.json.gz", "graph.safetensors"}:
        written = Graph.load(out / name)
        assert plan is not None
        assert written.fingerprint == (plan.graph if graph is None else graph.fingerprint)
        graph = written
    if plan is not None and graph is not None:
        assert verify(Problem.build(graph, Cluster.parse(DEVICES)), plan) == []
    if "report.html" in left:
        assert (out / "report.html").read_text().rstrip().endswith("</html>")


def interrupted(graph: Graph, count: int, seed: int, tmp_path: Path) -> None:
    """Checks `count` random interruptions: signals at any moment, and budgets of any length."""
    source, draw = tmp_path / "step.json.gz", random.Random(seed)
    graph.save(source)
    for number in range(count):
        out = tmp_path / f"out{number}"
        sent = draw.choice((signal.SIGINT, signal.SIGTERM, None))
        if sent is None:
            budget_s = draw.uniform(0.1, BUDGET_S)
            ending = place(source, out, None, budget_s, budget_s)
            limit_s = STARTED_S + LATE_SHARE * budget_s + LATE_S + graph.num_ops * 2e-5  # what half of it does not do
        else:
            delay_s = draw.uniform(STARTED_S, STARTED_S + BUDGET_S)
            ending = place(source, out, sent, delay_s, BUDGET_S)
            limit_s = ANSWERED_S
        check(ending, graph, out)
        assert ending.late_s <= SLOW * limit_s, f"{number}: {sent}, {ending}"


def test_an_interrupt_in_a_callback_is_not_lost() -> None:
    """Ctrl-C in a callback of compiled code, where Python ignores exceptions, ends the program and prints nothing."""
    script = """
import ctypes, os, signal, sys, time
from gdp.cli.app import repeat_interrupt
sys.unraisablehook = repeat_interrupt
try:
    ctypes.CFUNCTYPE(None)(lambda: (os.kill(os.getpid(), signal.SIGINT), None)[1])()
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("interrupted\n", "")


def test_an_interrupt_while_the_command_line_is_imported_is_a_line() -> None:
    """An interrupt during the import of the command line prints only `gdp: interrupted` and exits with status 130."""
    script = """
import signal, sys
from gdp.__main__ import main

class Interrupted:
    def find_spec(self, name, _path, _target=None):
        if name == "gdp.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "", "gdp: interrupted\n")


def test_an_error_that_an_interrupt_causes_is_an_interrupt() -> None:
    """Imports that are cut short may fail with an error of their own; without an interrupt it is shown."""
    script = """
import importlib, signal, sys
module = importlib.import_module("gdp.cli.app")

def failing(*_args, **_keywords):
    try:
        signal.raise_signal({number})
    except KeyboardInterrupt:
        pass
    raise ImportError("half a module")

sys.argv = ["gdp"]
sys.exit(module.main(commands=failing))
"""
    for number in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-c", script.format(number=int(number))]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "", "gdp: interrupted\n")


def test_random_interruptions_leave_an_answer_or_a_refusal_in_time(tmp_path: Path) -> None:
    """Four random signals or short budgets each leave a true answer or a one-line refusal, in time."""
    interrupted(accumulated(lstm_training_graph(20), 4), 4, 0, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [4, 40, 160, 400])
def test_many_random_interruptions_of_steps_of_several_sizes(num_steps: int, tmp_path: Path) -> None:
    """Fifty random interruptions of a step of each size leave a true answer or a one-line refusal, in time."""
    make = partial(accumulated, lstm_training_graph(num_steps), 16)
    interrupted(make(), 50, num_steps, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [40, 160])
def test_many_random_interruptions_of_steps_with_replicas(num_steps: int, tmp_path: Path) -> None:
    """Four replicas on two devices each are placed alike, which has phases of its own."""
    step = Step.of(lstm_training_graph(num_steps), Layout.parse("data=4,microbatches=4"))
    interrupted(step.graph, 25, num_steps, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "parallel", "budget_s"), [("gnmt-4", "auto", 8.0), ("gnmt-8", "data=8,microbatches=2", 14.0)]
)
def test_many_random_interruptions_of_layouts_that_are_cut(
    model: str, parallel: str, budget_s: float, tmp_path: Path
) -> None:
    """Signals while replicas and micro-batches are cut, judged and written: 874,504 ops of the second model."""
    options = [] if parallel == "auto" else ["--parallel", parallel]
    assert place(model, tmp_path / "captured", None, budget_s, budget_s, options).status == OK
    draw = random.Random(model)
    for number in range(25):
        out = tmp_path / f"out{number}"
        sent, delay_s = draw.choice((signal.SIGINT, signal.SIGTERM)), draw.uniform(STARTED_S, STARTED_S + budget_s)
        ending = place(model, out, sent, delay_s, budget_s, options)
        check(ending, None, out)
        assert ending.late_s <= SLOW * ANSWERED_S, f"{number}: {sent}, {ending}"
