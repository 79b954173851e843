"""The command line: exit statuses, JSON documents, one-line errors, interruptions."""

import gzip
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gdp
from benchmarks.graphs import lstm_training_graph
from gdp.budget import Clock
from gdp.cli import main
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.models.source import ModelSource
from gdp.planning import plan_cache
from gdp.search import place as search
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import OnProgress, Solution
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate, verify

DEVICES = "2xp100-pcie-16g"
MIB = 2**20

Answer = tuple[int, str, str]
Run = Callable[..., Answer]


def two_chains(num_ops: int = 12) -> Graph:
    """Two chains of `num_ops` ops of 1 ms each, joined at the end: one device takes twice as long as two."""
    names = [f"{side}.{number}" for number in range(num_ops) for side in ("left", "right")]
    ops = [Op(name, "mm", 9_300_000_000, 0, resident_bytes=MIB, module=name.partition(".")[0]) for name in names]
    tensors = [Tensor(op, (op + 2,), 4096) for op in range(2 * num_ops - 2)]
    last = [Tensor(op, (2 * num_ops,), 4096) for op in (2 * num_ops - 2, 2 * num_ops - 1)]
    return Graph.build("two-chains", [*ops, Op("join", flops=1)], [*tensors, *last])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`gdp` in a directory with `graph.json.gz`: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    two_chains().save("graph.json.gz")

    def call(*args: str) -> Answer:
        status = main(args)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def place(*args: str) -> list[str]:
    return ["place", "graph.json.gz", "--devices", DEVICES, "--budget", "100sims", *args]


# place


def test_a_learned_placer_is_shown_beside_a_single_device_and_the_expert(run: Run) -> None:
    """A learned placer has just a single device and the expert as baselines, and is faster than the single device."""
    status, out, _ = run("place", "graph.json.gz", "--devices", DEVICES, "--placer", "gdp-zero-shot", "--json")
    document = json.loads(out)
    assert status == 0
    assert set(document["baselines"]) == {"single", "expert"}
    # 24 ops of 1 ms each on one device, and the last of 1 FLOP; two devices take about half of it
    assert document["baselines"]["single"]["step_time_ns"] > 24_000_000 > document["step_time_ns"]


def test_place_writes_a_plan_that_verifies_and_says_what_to_do_next(run: Run) -> None:
    """`place` writes a plan that verifies, prints its figures and baselines, and names a next command that works."""
    status, out, err = run(*place())
    assert (status, err) == (0, "")
    plan = Plan.load("plan.json")
    assert verify(Problem.build(two_chains(), Cluster.parse(DEVICES)), plan) == []
    for text in (
        "two-chains (25 ops, 24 tensors) on 2xp100-pcie-16g, placer auto",
        "times as fast as the best single device",
        "times the paper's expert",
        "Lower bound",
        "% above the optimum",
        "limits the step",
        "Plan written to plan.json",
        "Next: gdp simulate plan.json",
    ):
        assert text in out
    for name in ("auto", "single", "expert", "contiguous", "metis", "m-topo", "m-etf", "m-sct", "heft", "gpu0", "gpu1"):
        assert re.search(rf"^{name} ", out, re.MULTILINE)
    next_command = out.rpartition("Next: gdp ")[2].split()
    status, out, err = run(*next_command)
    assert (status, err) == (0, "")
    assert "The plan fits." in out


def test_names_in_files_do_not_steer_the_terminal(run: Run) -> None:
    """A name that clears the screen, rings the bell, hides or turns text is shown escaped, in answers and in errors."""
    ops = [Op("a\x1b[2J", "mm", 10**9), Op("b\x07", "mm", 10**9)]
    Graph.build("clear\x1b[2J\x1b[8m[bold]:eyes:\u202e", ops, [Tensor(0, (1,), 8)]).save("graph.json")
    words = ["graph.json", "--devices", DEVICES, "--budget", "20sims"]
    for more in ([], ["--json"], ["--pin", "a\x1b]0;x=nowhere\u2066"]):
        _, out, err = run("place", *words, *more)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out + err)
    assert r"clear\x1b[2J\x1b[8m[bold]:eyes:\u202e" in run("place", *words)[1]


def test_place_json_is_one_object_with_the_documented_keys_and_nothing_else(run: Run) -> None:
    """`place --json` prints one object that has exactly the documented keys and agrees with the files written."""
    status, out, err = run(*place("--json", "--out", "answers"))
    assert (status, err, out.count("\n")) == (0, "", 1)
    answer = json.loads(out)
    assert list(answer) == [
        "graph",
        "cluster",
        "placer",
        "status",
        "step_time_ns",
        "lower_bound_ns",
        "gap",
        "peak_memory_bytes",
        "busy_fraction",
        "host_wait_fraction",
        "step_time_range_ns",
        "range_rests_on",
        "mfu",
        "per_second",
        "baselines",
        "seconds",
        "simulations",
        "plan",
        "microbatches",
        "order",
        "under_noise",
        "advice",
        "held_bytes",
        "would_fit",
        "remedies",
    ]
    graph = two_chains()
    assert answer["graph"] == {
        "name": "two-chains",
        "num_ops": 25,
        "num_tensors": 24,
        "parameter_bytes": 0,
        "optimizer_state_bytes": 0,
        "bytes_per_parameter": None,
        "fingerprint": graph.fingerprint,
    }
    cluster = Cluster.parse(DEVICES)
    assert answer["cluster"] == {"name": DEVICES, "devices": ["gpu0", "gpu1"], "fingerprint": cluster.fingerprint}
    assert (answer["placer"], answer["status"]) == ("auto", "ok")
    assert answer["plan"] == "answers/plan.json"
    assert answer["gap"] == answer["step_time_ns"] / answer["lower_bound_ns"] - 1
    assert all(type(size) is int for size in answer["peak_memory_bytes"])
    assert all(0 <= share <= 1 for share in answer["busy_fraction"])
    for baseline in answer["baselines"].values():
        assert list(baseline) == ["status", "step_time_ns", "seconds"]
        assert baseline["status"] != "ok" or baseline["step_time_ns"] >= answer["step_time_ns"]
    plan = Plan.load("answers/plan.json")
    assert (plan.step_time_ns, plan.lower_bound_ns) == (answer["step_time_ns"], answer["lower_bound_ns"])
    assert Graph.load("answers/graph.json.gz").to_document() == graph.to_document()
    assert not Path("plan.json").exists()


def test_options_of_place_reach_the_search(run: Run) -> None:
    """The pins, seed and noise level that `place` is given take effect in the plan and the printed answer."""
    constraints = ["--pin", "left=gpu1", "--pin", "right|join=gpu1", "--max-memory", "gpu1=1GiB", "--reserve", "5%"]
    status, out, _ = run(*place(*constraints, "--robust", "2%", "--seed", "7", "--threads", "1"))
    assert status == 0
    assert set(Plan.load("plan.json").placement.tolist()) == {1}
    assert Plan.load("plan.json").seed == 7
    assert "Expected with op times that vary by 2.0%" in out
    assert "gpu0 holds no op: the search found no faster plan with it." in out


def test_forbidden_kinds_of_ops_stay_off_devices_and_their_kind(run: Run) -> None:
    """`--forbid` keeps ops off a device or a kind in `place` and `compare`, and `simulate` reports violations of it."""
    devices = ["--devices", "2xp100-pcie-16g+l4-24g"]
    assert run(*place(*devices, "--forbid", "m{2}=p100-pcie-16g", "--json"))[0] == 0
    plan = Plan.load("plan.json")
    assert set(plan.placement[:-1].tolist()) == {2}
    simulate_args = ["simulate", "graph.json.gz", *devices, "--plan", "plan.json", "--json", "--forbid"]
    assert run(*simulate_args, "mm=gpu0")[0] == 0
    status, out, err = run(*simulate_args, "mm=gpu2")
    assert status == 3
    assert json.loads(out)["reasons"] == ["op 0 'left.0' is not allowed on gpu2 (24 such ops)"]
    assert err.count("\n") == 1
    forbid = ["--forbid", "mm=gpu0", "--forbid", "mm=gpu2", "--placers", "single,contiguous", "--seeds", "1"]
    status, out, _ = run("compare", "graph.json.gz", *devices, "--budget", "100sims", "--json", *forbid)
    rows = json.loads(out)["rows"]
    assert (status, rows[0]["step_time_ns"]) == (0, rows[1]["step_time_ns"])  # all on gpu1


def test_when_nothing_fits_place_names_the_device_and_the_bytes_and_writes_nothing(run: Run) -> None:
    """When nothing fits, `place` writes no files and prints one line that names the device and the bytes it lacks."""
    limits = ["--max-memory", "gpu0=20MiB", "--max-memory", "gpu1=1MiB", "--pin", "left.1$=gpu1"]
    for options in ([], ["--json"]):
        status, out, err = run(*place(*limits, "--out", "answers", *options))
        assert status == 3
        assert re.fullmatch(r"gdp: nothing fits in memory: gpu\d lacks \d+ bytes.*; it would fit with .*\n", err)
    answer = json.loads(out)
    assert (answer["status"], answer["plan"]) == ("infeasible", None)
    assert not Path("answers").exists()
    status, _, err = run(*place(*limits, "--placer", "single"))
    assert status == 3
    assert err.startswith("gdp: placer single found nothing that fits in memory: gpu")
    assert err.endswith("; use --placer auto\n")


def test_a_plan_of_another_graph_is_not_overwritten(run: Run) -> None:
    """plan.json of another graph and files that are no plans stay; a plan of the same graph is replaced."""
    assert "Plan written to plan.json" in run(*place())[1]
    first = Path("plan.json").read_bytes()
    two_chains(5).save("other.json.gz")
    Path("plan-2.json").write_text("mine")
    other = ["place", "other.json.gz", "--devices", DEVICES, "--budget", "100sims", "--json"]
    for seed in ("0", "1"):
        status, out, err = run(*other, "--seed", seed)
        assert (status, json.loads(out)["plan"]) == (0, "plan-3.json")
        assert err == "gdp: note: plan.json is not of this graph and stays; this plan will be plan-3.json\n"
    assert (Path("plan.json").read_bytes(), Path("plan-2.json").read_text()) == (first, "mine")
    assert json.loads(run(*place("--json", "--devices", "3xp100-pcie-16g"))[1])["plan"] == "plan.json"
    assert Path("plan.json").read_bytes() != first


def test_a_graph_with_costs_of_the_users_does_not_overwrite_the_one_that_is_read(run: Run) -> None:
    """graph.json.gz stays, its costed graph is graph-2.json.gz; with other costs the pair is replaced."""
    before = Path("graph.json.gz").read_bytes()
    for time in ("1ms", "2ms"):
        Path("costs.yaml").write_text(
            f"{{format: gdp-op-costs, version: 1, ops: [{{kind: mm, time: {{p100-pcie-16g: {time}}}}}]}}"
        )
        status, out, err = run(*place("--op-costs", "costs.yaml", "--json"))
        assert (status, json.loads(out)["plan"]) == (0, "plan-2.json")
        assert err == "gdp: note: graph.json.gz is not of this graph and stays; this plan will be plan-2.json\n"
        assert Graph.load("graph-2.json.gz").fingerprint == Plan.load("plan-2.json").graph
    assert Path("graph.json.gz").read_bytes() == before


def test_figures_are_printed_where_the_report_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after the plan: the answer, and one line with what is whole."""

    def full(path: Path, _: object) -> None:
        raise gdp.InputError(f"{path}: cannot be written (No space left on device); choose another place")

    monkeypatch.setattr("gdp.cli.plan_files.write_page", full)
    status, out, err = run(*place("--out", "answers"))
    assert status == 2
    assert "Step time " in out
    assert "Plan written to answers/plan.json\nNext: gdp simulate answers/plan.json" in out
    assert err.startswith("gdp: error: answers/report.html: cannot be written (No space left on device)")
    assert err.endswith("; whole: answers/plan.json, answers/graph.json.gz, answers/cluster.json\n")


def test_traceback_shows_where_an_error_comes_from(run: Run) -> None:
    """Anywhere on the command line, before the one line of the error."""
    Path("cli_traced.py").write_bytes(FILES["cli_broken.py"])
    for args in (["--traceback", "place", "cli_traced:fails"], ["place", "cli_traced:fails", "--traceback"]):
        status, out, err = run(*args, "--devices", DEVICES)
        assert (status, out) == (2, "")
        assert "raise ValueError('first\\nlast')" in err
        assert err.splitlines()[-1].startswith(
            "gdp: error: cli_traced:fails: the function failed (ValueError: first last"
        )


# the cache of plans


def test_an_identical_question_is_answered_without_searching(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an identical question is answered from the cache, and a damaged cache entry is replaced by a new search."""
    status, first, err = run(*place("--out", "first"))
    assert (status, err) == (0, "")

    def searches(*_: object, **__: object) -> None:
        raise AssertionError("a search")

    with monkeypatch.context() as patched:
        patched.setattr("gdp.cli.answer.answer", searches)
        status, again, err = run(*place("--out", "again"))
        assert (status, err.count("\n")) == (0, 1)
        assert "found before" in err
        assert again.replace("again/", "first/") == first  # advice, baselines, seconds: all as it was
        for file in ("plan.json", "report.html"):  # the report has the course of the search
            assert Path("again", file).read_bytes() == Path("first", file).read_bytes()
        assert json.loads(run(*place("--json"))[1])["status"] == "ok"
        different = (
            ["--seed", "1"],
            ["--budget", "101sims"],
            ["--reserve", "1%"],
            ["--pin", "left=gpu1"],
            ["--no-cache"],
            ["--no-advice"],
            ["--robust", "1%"],
            ["--devices", "3xp100-pcie-16g"],
            ["--threads", "1"],
        )
        for option in different:
            with pytest.raises(AssertionError, match="a search"):
                run(*place("--threads", "2", *option))
    for library in ("gdp-placement", "numba", "pymetis"):
        with monkeypatch.context() as changed:
            changed.setattr(plan_cache, "version", lambda name, new=library: "0" if name == new else version(name))
            changed.setattr("gdp.cli.answer.answer", searches)
            with pytest.raises(AssertionError, match="a search"):
                run(*place())
    (entry,) = Path("cache/gdp/plans").iterdir()
    for damaged in (b"", gzip.compress(b"{}"), gzip.compress(b'{"format":"gdp-found-plan","version":2}')):
        entry.write_bytes(damaged)
        status, _, err = run(*place())
        assert (status, err) == (0, "")
        assert len(entry.read_bytes()) > 100


def test_an_interrupted_search_is_not_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted search writes its plan but leaves nothing in the cache."""
    find = search.answer

    def interrupted(question: PlaceQuestion, clock: Clock, on_progress: OnProgress | None = None) -> Solution:
        solution = find(question, clock, on_progress)
        if on_progress is not None:  # as of a warm-up's placement, if this test is the first of its process
            clock.stop.set()
        return solution

    monkeypatch.setattr("gdp.cli.answer.answer", interrupted)
    assert run(*place())[0] == 130
    assert Path("plan.json").exists()
    assert not Path("cache/gdp/plans").exists()


# compare, simulate, capture, devices, workloads


def test_compare_json_has_a_row_for_each_placer_with_a_time_for_each_seed(run: Run) -> None:
    """`compare --json` has a row per placer with a step time per seed, and the row's step time is the smallest."""
    args = ["compare", "graph.json.gz", "--devices", DEVICES, "--placers", "single,auto", "--budget", "100sims"]
    status, out, err = run(*args, "--seeds", "2", "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert [row["placer"] for row in answer["rows"]] == ["single", "auto"]
    for row in answer["rows"]:
        figures = ["placer", "status", "step_time_ns", "step_time_ns_by_seed", "seconds", "simulations"]
        assert list(row) == [
            *figures,
            "lower_bound_ns",
            "step_time_range_ns",
            "range_rests_on",
            "mfu",
            "layout",
            "reason",
        ]
        assert row["status"] == "ok"
        assert len(row["step_time_ns_by_seed"]) == 2
        assert min(row["step_time_ns_by_seed"]) == row["step_time_ns"] >= row["lower_bound_ns"]
    assert answer["lower_bound_ns"] == min(row["lower_bound_ns"] for row in answer["rows"])
    status, out, _ = run(*args)
    assert status == 0
    assert re.search(r"^single +ok ", out, re.MULTILINE)
    assert run(*args, "--max-memory", "gpu0=1", "--max-memory", "gpu1=1")[0] == 3


TINY = """
import torch
from torch import nn

def training():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (torch.zeros(8, 64),)
"""


def test_compare_has_a_row_with_its_layout_for_each_way_to_train(run: Run) -> None:
    """On two equal cards DDP has a replica a card; of three it leaves one out: 8 samples have no three equal parts."""
    Path("cli_tiny.py").write_text(TINY)
    args = ["compare", "cli_tiny:training", "--placers", "single,ddp,megatron", "--budget", "100sims", "--seeds", "1"]
    status, out, _ = run(*args, "--devices", DEVICES, "--json")
    assert status == 0
    rows = {row["placer"]: row for row in json.loads(out)["rows"]}
    assert rows["ddp"]["layout"]["data"] == 2
    assert rows["megatron"]["layout"]["stages"] in (1, 2)
    assert rows["megatron"]["step_time_ns"] <= rows["ddp"]["step_time_ns"]
    assert rows["single"]["layout"] is None
    status, out, _ = run(*args, "--devices", "3xp100-pcie-16g", "--json")
    assert status == 0
    assert next(row for row in json.loads(out)["rows"] if row["placer"] == "ddp")["layout"]["data"] == 2


def test_simulate_derives_a_plans_figures_anew(run: Run) -> None:
    """`simulate` reproduces the figures of `place` and refuses a plan whose recorded figures are wrong."""
    placed = json.loads(run(*place("--json"))[1])
    args = ["simulate", "graph.json.gz", "--devices", DEVICES, "--plan", "plan.json"]
    status, out, err = run(*args, "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    for key in ("graph", "cluster", "step_time_ns", "lower_bound_ns", "gap", "peak_memory_bytes", "busy_fraction"):
        assert answer[key] == placed[key]
    assert (answer["feasible"], answer["reasons"]) == (True, [])

    document = json.loads(Path("plan.json").read_text())
    for change, fragment in (
        ({"step_time_ns": 1}, "step_time_ns is 1;"),
        ({"peak_memory_bytes": [1, 2]}, "peak_memory_bytes is [1, 2];"),
        ({"lower_bound_ns": document["step_time_ns"] + 1}, "lower_bound_ns is"),
        ({"lower_bound_ns": placed["lower_bound_ns"] + 1}, "lower_bound_ns is"),
    ):
        Path("plan.json").write_text(json.dumps({**document, **change}))
        status, out, err = run(*args, "--json")
        assert (status, out) == (2, "")
        assert err.startswith("gdp: error: plan.json: ")
        assert fragment in err
        assert err.count("\n") == 1


def test_simulate_says_why_a_plan_does_not_fit(run: Run) -> None:
    """`simulate` exits with status 3 and names the device whose peak memory is too high."""
    cluster = Cluster.parse(DEVICES)
    small = replace(cluster, devices=tuple(replace(device, memory_bytes=MIB) for device in cluster.devices))
    small.save("small.yaml")
    step = simulate(Problem.build(two_chains(), small), [0] * 25)
    Plan(
        two_chains().fingerprint,
        small.fingerprint,
        ("gpu0", "gpu1"),
        step.placement,
        step.order,
        step.step_time_ns,
        step.peak_memory_bytes,
        1,
        "hand",
        0,
        "0",
    ).save("plan.json")
    args = ["simulate", "graph.json.gz", "--devices", "small.yaml", "--plan", "plan.json"]
    status, out, err = run(*args, "--json")
    assert status == 3
    assert "gpu0: peak" in err
    answer = json.loads(out)
    assert answer["feasible"] is False
    assert answer["reasons"][0].startswith("gpu0: peak")
    assert run(*args)[0] == 3


def test_capture_writes_the_graph_of_a_function(run: Run) -> None:
    """`capture` writes the graph of a Python function, for inference or with an optimizer, and prints its summary."""
    code = "from torch import nn, ones\ndef f():\n    return nn.Linear(8, 4), ones(2, 8)\n"
    Path("cli_model.py").write_text(code)
    status, out, err = run("capture", "cli_model:f", "--out", "step.json.gz", "--inference", "--json")
    assert (status, err) == (0, "")
    graph = Graph.load("step.json.gz")
    assert json.loads(out) == {
        "name": "cli_model:f",
        "num_ops": graph.num_ops,
        "num_tensors": graph.num_tensors,
        "parameter_bytes": graph.resident_bytes.sum(),
        "optimizer_state_bytes": 0,
        "bytes_per_parameter": None,
        "fingerprint": graph.fingerprint,
        "unknown_costs": {},
        "path": "step.json.gz",
    }
    assert "backward" not in graph.phases
    assert run("capture", "cli_model:f", "--out", "sgd.json", "--optimizer", "sgd")[0] == 0
    assert "update" in Graph.load("sgd.json").phases


def test_a_graph_in_columns_is_placed_as_the_same_in_json(run: Run) -> None:
    """A graph in a safetensors file gives the same plan as in JSON and converts back to the same bytes."""
    assert run("capture", "graph.json.gz", "--out", "graph.safetensors")[0] == 0
    answers = []
    for name in ("graph.json.gz", "graph.safetensors"):
        status, out, _ = run("place", name, *place("--json", "--no-cache")[2:])
        assert status == 0
        answers.append(json.loads(out))
    assert answers[0]["graph"] == answers[1]["graph"]
    assert answers[0]["step_time_ns"] == answers[1]["step_time_ns"]
    assert run("simulate", "graph.safetensors", "--devices", DEVICES, "--plan", "plan.json")[0] == 0
    assert run("capture", "graph.safetensors", "--out", "again.json.gz")[0] == 0
    assert Path("again.json.gz").read_bytes() == Path("graph.json.gz").read_bytes()


def test_a_cluster_that_is_shown_as_json_is_a_cluster_file(run: Run) -> None:
    """The output of `devices show --json` can be used as a cluster file."""
    status, out, _ = run("devices", "show", "2xl4-24g+cpu-16core", "--json")
    assert status == 0
    Path("cluster.json").write_text(out)
    assert Cluster.load("cluster.json").fingerprint == Cluster.parse("2xl4-24g+cpu-16core").fingerprint
    assert "gpu1.pcie.down" in run("devices", "show", "cluster.json")[1]
    shown = run("devices", "show", "2x(4xl4-24g)@25gbit")[1]  # from all to all inside hosts, and from host to host
    assert shown.count("FROM.pcie.up") == 4 == shown.count("TO.pcie.down")
    assert "h200-sxm-141g" in run("devices", "list")[1]


def test_workloads_lists_the_built_in_models(run: Run) -> None:
    """`gdp workloads` lists the built-in models, states the number of variants, and lists those with `--variants`."""
    assert "gnmt-8" in run("workloads")[1]
    assert [row["name"] for row in json.loads(run("workloads", "--json")[1])["workloads"]][:2] == ["rnnlm-2", "rnnlm-4"]
    closing = re.search(r"one of (\d+) smaller and larger variants: gdp workloads --variants", run("workloads")[1])
    assert closing is not None
    rows = json.loads(run("workloads", "--variants", "--json")[1])["workloads"]
    assert len(rows) == int(closing[1])
    assert rows[0]["name"] == "rnnlm/l1-s30-h1024-b128"


def test_nothing_but_a_capture_imports_pytorch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing PyTorch takes longer than placing a small graph: a graph that is kept needs no model."""
    kept = replace(two_chains(), name="rnnlm-2")
    made = SimpleNamespace(graph=kept, coverage=SimpleNamespace(unknown={}), notes=(), seconds=0.0)
    monkeypatch.setattr(ModelSource, "_capture", lambda *_: made)
    ModelSource("rnnlm-2").whole()
    commands = [
        ["workloads"],
        ["devices", "list"],
        ["place", "rnnlm-2", "--devices", DEVICES, "--parallel", "none", "--budget", "100sims"],
        ["simulate", "plan.json"],
        ["compare", "rnnlm-2", "--devices", DEVICES, "--placers", "single,metis", "--budget", "100sims"],  # auto cuts
        ["place", "rnnlm-2", "--devices", "local", "--parallel", "none", "--budget", "100sims", "--out", "here"],
        ["simulate", "here/plan.json"],
    ]
    code = f"import sys; from gdp.cli import main; print(sum(map(main, {commands})), 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.endswith("\n0 False\n")


def test_help_and_version_are_no_errors(run: Run) -> None:
    """Help and `--version` exit with status 0, and help prints nothing on standard error."""
    for args in ([], ["--help"], ["place", "--help"], ["devices", "list", "--help"]):
        status, out, err = run(*args)
        assert (status, err) == (0, "")
        assert "Usage: gdp" in out
    assert re.fullmatch(r"gdp \d+\.\d+\.\d+\n", run("--version")[1])


# Bad input


def changed(**changes: Any) -> bytes:
    return json.dumps({**two_chains().to_document(), **changes}).encode()


FILES = {
    "text.json": b"no json",
    "version.json": changed(version=3),
    "unknown.json": changed(colour="red"),
    "empty.json": b"",
    "zipped.json.gz": b"{}",
    "broken.yaml": b"format: [",
    "kind.yaml": b"{format: gdp-cluster, version: 1, name: x, devices: [{name: a, kind: toaster}]}",
    "cli_broken.py": b"def fails():\n    raise ValueError('first\\nlast')\n",
}

BAD_INPUT: list[tuple[list[str], list[str]]] = [
    (["place", "gnmt-5", "--devices", DEVICES], ["'gnmt-5'", "did you mean gnmt-"]),
    (["place", "missing.json", "--devices", DEVICES], ["missing.json: no such file"]),
    (["place", "directory", "--devices", DEVICES], ["directory: is a directory"]),
    (["place", "truncated.json.gz", "--devices", DEVICES], ["truncated.json.gz: truncated or damaged gzip"]),
    (["place", "zipped.json.gz", "--devices", DEVICES], ["zipped.json.gz", "it is not gzip"]),
    (["place", "text.json", "--devices", DEVICES], ["text.json: line 1", "not valid JSON"]),
    (["place", "empty.json", "--devices", DEVICES], ["empty.json: is empty"]),
    (["place", "version.json", "--devices", DEVICES], ["version.json: version is 3"]),
    (["place", "unknown.json", "--devices", DEVICES], ["unknown.json: graph: unknown key 'colour'"]),
    (["place", "graph.json.gz", "--devices", DEVICES, "--seed", str(2**64)], ["--seed", "9223372036854775807"]),
    (
        ["place", "cli_broken:fails", "--devices", DEVICES],
        ["cli_broken:fails", "(ValueError: first last, cli_broken.py line 2)"],
    ),
    (
        ["place", "cli_broken.py", "--devices", DEVICES],
        ["is a Python file", "such as cli_broken:fails; functions there"],
    ),
    (["place", "cli_broken", "--devices", DEVICES], ["cli_broken: cli_broken.py is a Python file", "cli_broken:fails"]),
    (["place", "m.onnx", "--devices", DEVICES], ["m.onnx: no such file"]),
    (["place", "hf:m", "--devices", DEVICES], ["hf:m", "no such directory"]),
    (["place", "graph.json.gz", "--devices", "4xp1000"], ["devices '4xp1000'", "no kind 'p1000'", "p100-pcie-16g"]),
    (["place", "graph.json.gz", "--devices", "2x(4xl4-24g)"], ["hosts and their network are", "2x(4xl4-24g)@25gbit"]),
    (["place", "graph.json.gz", "--devices", "2x(4xl4-25g)@25gbit"], ["no kind 'l4-25g'"]),
    (
        ["simulate", "graph.json.gz", "--devices", DEVICES, "--placement", "p.json", "--batches", "4"],
        ["--batches: goes with a PLAN"],
    ),
    (["place", "graph.json.gz", "--devices", "1025xl4-24g"], ["1,025 devices", "1 to 1,024"]),
    (["place", "graph.json.gz", "--devices", "missing.yaml"], ["missing.yaml: no such file"]),
    (["place", "graph.json.gz", "--devices", "broken.yaml"], ["broken.yaml: line 1"]),
    (["place", "graph.json.gz", "--devices", "kind.yaml"], ["kind.yaml: device 0 'a'", "toaster"]),
    (place("--budget", "fast"), ["budget is 'fast'", "30s"]),
    (place("--budget", "1.5sims"), ["budget is '1.5sims'", "whole numbers"]),
    (place("--seed", "one"), ["--seed", "a valid integer"]),
    (place("--seed", "-1"), ["--seed", "greater than or equal to 0"]),
    (place("--placer", "magic"), ["placer 'magic' is unknown", "auto"]),
    (place("--placer", "hdp"), ["placer 'hdp' trains a policy of its own", "hours", "python -m benchmarks paper"]),
    (place("--ctx", "4096"), ["--ctx: needs --for llama-cpp"]),
    (
        ["place", "hf:config", "--devices", "2xl4-24g", "--parallel", "tensor=2", "--for", "hf-device-map"],
        ["--parallel tensor=2: hf-device-map takes no ops that are cut over cards", "leave --for or tensor out"],
    ),
    (
        ["place", "graph.json.gz", "--devices", "2xl4-24g", "--runtime", "compile", "--times", "t.db"],
        ["--times: are of ops that run one by one", "--runtime compile"],
    ),
    (
        ["place", "hf:config?prompt=8", "--devices", "l4-24g", "--phase", "decode", "--times", "t.db"],
        ["--runtime cuda-graphs joins them", "add --runtime eager"],
    ),
    (place("--for", "vllm", "--split-layers"), ["--split-layers: is for llama-cpp, not for vllm"]),
    (place("--for", "llama-cpp", "--ctx", "-1"), ["--ctx -1: a number of tokens is expected"]),
    (place("--placer", "gdp-zero-shot", "--checkpoint", "file"), ["file: no such file"]),
    (place("--checkpoint", "file"), ["file: no such file"]),
    (place("--checkpoint", "file", "--for", "vllm"), ["--for: places without a policy", "leave out --checkpoint"]),
    (place("--placer", "metis", "--checkpoint", "file"), ["--checkpoint: metis takes none", "auto", "gdp-finetune"]),
    (place("--microbatches", "0"), ["--microbatches is 0", "from 1 to"]),
    (place("--sweep", "devices"), ["--sweep is 'devices'", "devices=1..8"]),
    (place("--sweep", "devices=4..2"), ["4 is more than 2"]),
    (place("--sweep", "devices=1..3"), ["3 are asked for", "has 2"]),
    (place("--sweep", "devices=0..2"), ["at least 1"]),
    (place("--sweep", "batch=1..2"), ["graph.json.gz has no batch to split"]),
    (place("--sweep", "devices=2,2"), ["a value is there twice"]),
    (place("--sweep", "microbatches=1,2"), ["graph.json.gz has no batch to split"]),
    (place("--sweep", "devices=1..2", "--pin", "nosuch=gpu0"), ["pin nosuch=gpu0", "matches no module path"]),
    (place("--sweep", "microbatches=1..4", "--microbatches", "2"), ["--microbatches 2 contradicts it"]),
    (place("--sweep", "devices=1..2", "--placer", "metis"), ["leave out --placer"]),
    (place("--threads", "0"), ["--threads"]),
    (place("--pin", "left"), ["--pin is 'left'", "REGEX=DEVICE"]),
    (place("--pin", "middle=gpu0"), ["pin middle=gpu0", "matches no module path"]),
    (place("--pin", "left=gpu7"), ["--pin left=gpu7", "gpu0"]),
    (place("--pin", "left(=gpu0"), ["--pin left(=gpu0", "no regular expression"]),
    (place("--pin", "left=gpu0", "--pin", "0$=gpu1"), ["pin 0$=gpu1", "'left.0' is pinned to gpu0"]),
    (
        place("--pin", "left=gpu0", "--max-memory", "gpu0=2MiB"),
        ["pin left=gpu0: gpu0 must hold 12582912 bytes", "12 ops", "limit is 2097152; pin fewer"],
    ),
    (place("--forbid", "mm"), ["--forbid is 'mm'", "REGEX=DEVICE"]),
    (place("--forbid", "=gpu0"), ["--forbid is '=gpu0'", "REGEX=DEVICE"]),
    (place("--forbid", "conv=gpu0"), ["forbid conv=gpu0: matches no op's kind", "mm"]),
    (place("--forbid", "mm=gpu7"), ["--forbid mm=gpu7", "no device and no kind of device", "gpu0"]),
    (place("--forbid", "mm(=gpu0"), ["--forbid mm(=gpu0", "no regular expression"]),
    (place("--forbid", "mm=p100-pcie-16g"), ["op 0 'left.0'", "forbid mm=p100-pcie-16g; relax --forbid"]),
    (
        place("--forbid", "mm=gpu0", "--pin", "left.3=gpu0"),
        ["op 6 'left.3': its pins and forbids leave no device", "forbid mm=gpu0, pin left.3=gpu0"],
    ),
    (place("--max-memory", "gpu0"), ["--max-memory is 'gpu0'", "DEVICE=SIZE"]),
    (place("--max-memory", "gpu0=much"), ["--max-memory gpu0 is 'much'", "GiB"]),
    (place("--max-memory", "gpu2=1GiB"), ["--max-memory gpu2=1GiB", "gpu0"]),
    (place("--max-memory", "gpu0=1GiB", "--max-memory", "gpu0=2GiB"), ["gpu0=2GiB", "a limit already"]),
    (place("--reserve", "100%"), ["--reserve is '100%'", "below 100 %"]),
    (place("--robust", "-2%"), ["--robust is '-2%'"]),
    (place("--robust", "60%"), ["--robust is '60%'", "below 50 %"]),
    (place("--out", "graph.json.gz"), ["graph.json.gz is no directory", "choose another place"]),
    (place("--out", "taken"), ["taken/plan.json: is a directory"]),
    (place("--colour"), ["No such option", "--colour"]),
    (["place", "graph.json.gz"], ["--devices: name the devices to place it on"]),
    (["place"], ["Missing argument 'MODEL'"]),
    (["dance"], ["No such command 'dance'"]),
    (["compare", "graph.json.gz", "--devices", DEVICES, "--placers", "single,magic"], ["placer 'magic' is unknown"]),
    (
        ["compare", "graph.json.gz", "--devices", DEVICES, "--placers", "accelerate-x"],
        ["accelerate-x", "accelerate-auto"],
    ),
    (["compare", "graph.json.gz", "--devices", DEVICES, "--placers", "auto,auto"], ["each once"]),
    (
        ["compare", "graph.json.gz", "--devices", DEVICES, "--placers", "auto,ddp"],
        ["--placers ddp", "graph.json.gz is a file", "name its model"],
    ),
    (
        ["compare", "rnnlm-2", "--devices", DEVICES, "--placers", "ddp", "--inference"],
        ["--placers ddp", "leave out --inference"],
    ),
    (
        ["compare", "rnnlm-2", "--devices", DEVICES, "--placers", "ddp", "--microbatches", "2"],
        ["--placers ddp", "leave out --microbatches"],
    ),
    (["compare", "graph.json.gz", "--devices", DEVICES, "--forbid", "conv=gpu0"], ["matches no op's kind"]),
    (["compare", "graph.json.gz", "--devices", DEVICES, "--seeds", "0"], ["--seeds"]),
    (["capture", "graph.json.gz", "--out", "again.json"], ["is a gdp-graph file already"]),
    (["place", "none.safetensors", "--devices", DEVICES], ["none.safetensors: no such file"]),
    (["capture", "cli_broken:fails", "--out", "graph.yaml"], ["--out graph.yaml", ".json.gz"]),
    (["capture", "cli_broken:fails", "--out", "g.json", "--optimizer", "adagrad"], ["'adagrad'", "adam, adamw, sgd"]),
    (["devices", "show", "toaster"], ["no kind 'toaster'"]),
    (["place", "gnmt/l9", "--devices", DEVICES], ["'gnmt/l9': no variant of that name", "gdp workloads --variants"]),
]


@pytest.mark.parametrize(("args", "fragments"), BAD_INPUT, ids=lambda value: " ".join(value[:6])[-60:])
def test_bad_input_is_one_line_with_status_2_and_leaves_nothing_behind(
    run: Run, args: list[str], fragments: list[str]
) -> None:
    """Bad input ends with status 2 and a one-line error, and leaves no new files."""
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    Path("truncated.json.gz").write_bytes(Path("graph.json.gz").read_bytes()[:-20])
    Path("directory").mkdir()
    Path("taken/plan.json").mkdir(parents=True)
    before = {path for path in Path().rglob("*") if "__pycache__" not in path.parts}
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert err.startswith("gdp: error: ")
    assert err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err
    assert {path for path in Path().rglob("*") if "__pycache__" not in path.parts} == before


def test_a_plan_of_another_graph_or_cluster_or_with_a_deadlock_is_bad_input(run: Run) -> None:
    """`simulate` refuses a plan with a deadlock, a plan for another graph or cluster, and a file that is no plan."""
    assert run(*place("--json"))[0] == 0
    two_chains(5).save("other.json")
    document = json.loads(Path("plan.json").read_text())
    backwards = [ops[::-1] for ops in document["order"]]
    Path("stuck.json").write_text(json.dumps({**document, "order": backwards}))
    for graph, devices, plan, fragment in (
        ("other.json", DEVICES, "plan.json", "other.json is not what was placed: it has 11 ops, not 25"),
        ("graph.json.gz", "2xl4-24g", "plan.json", "the plan is for other devices than 2xl4-24g: its devices"),
        ("graph.json.gz", DEVICES, "stuck.json", "deadlock"),
        ("graph.json.gz", DEVICES, "graph.json.gz", "format is 'gdp-graph'"),
    ):
        status, out, err = run("simulate", graph, "--devices", devices, "--plan", plan, "--json")
        assert (status, out) == (2, "")
        assert err.startswith(f"gdp: error: {plan}: ")
        assert fragment in err
        assert err.count("\n") == 1


# As a process

# `gdp` that says on standard error when its search has something to show
TELLING = """
import sys
from gdp.report import progress
shown = progress.SearchLine.__call__
def tell(line, news):
    print("searching", file=sys.stderr, flush=True)
    shown(line, news)
progress.SearchLine.__call__ = tell
from gdp.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_and_sigterm_end_a_search_and_write_the_best_plan_so_far(run: Run, number: int) -> None:
    """SIGINT and SIGTERM end a search early with status 130, and the best plan so far is written."""
    lstm_training_graph(4).save("lstm.json.gz")  # not solved at once, as `graph.json.gz` is
    command = [
        sys.executable,
        "-c",
        TELLING,
        "place",
        "lstm.json.gz",
        "--devices",
        DEVICES,
        "--budget",
        "300s",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while process.stderr.readline() != "searching\n":
            assert process.poll() is None  # still compiling
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    said = [line for line in err.splitlines() if line != "searching" and not line.startswith("gdp: [")]
    assert said == ["gdp: interrupted"]
    answer = json.loads(out)
    assert answer["status"] == "ok"
    assert answer["seconds"] < 100
    status, out, _ = run("simulate", "lstm.json.gz", "--devices", DEVICES, "--plan", answer["plan"], "--json")
    assert status == 0
    assert json.loads(out)["step_time_ns"] == answer["step_time_ns"]


def test_a_reader_that_goes_away_is_no_error() -> None:
    """The command exits with status 0 and prints no error when the reader of its output closes the pipe."""
    command = [sys.executable, "-m", "gdp", "devices", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_help_imports_neither_pytorch_nor_numba_nor_numpy() -> None:
    """`gdp --help` imports none of PyTorch, Numba, NumPy, SciPy and Rich."""
    code = "import sys, gdp.cli; gdp.cli.main(['--help']); sys.exit(any(name in sys.modules for name in sys.argv[1:]))"
    heavy = ["torch", "numba", "numpy", "scipy", "rich"]
    subprocess.run([sys.executable, "-c", code, *heavy], check=True, stdout=subprocess.DEVNULL, env=os.environ)


def test_lists_import_neither_numba_nor_scipy() -> None:
    """`gdp workloads` imports none of PyTorch, Numba and SciPy."""
    code = (
        "import sys, gdp.cli; gdp.cli.main(['workloads']); sys.exit(any(name in sys.modules for name in sys.argv[1:]))"
    )
    subprocess.run([sys.executable, "-c", code, "torch", "numba", "scipy"], check=True, stdout=subprocess.DEVNULL)


def test_a_full_standard_output_is_one_line() -> None:
    """When standard output is full, the command exits with status 2 and a one-line error."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gdp", "devices", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("gdp: error: standard output cannot be written (No space left on device)")


def test_functions_of_the_package_stay_functions_when_their_modules_are_imported() -> None:
    """Importing a module such as `gdp.search.place` does not replace the function of the same name in `gdp`.

    The fresh process does without `capture`: that takes seconds to load PyTorch.
    """
    code = """
import sys, gdp
assert not {"numpy", "torch"} & set(sys.modules)
import gdp.search.place, gdp.simulator.simulate, gdp.planning.compare
from gdp.search.place import Progress, answer
assert all(callable(getattr(gdp, name)) for name in ("place", "simulate", "compare")), dir(gdp)
assert gdp.Progress is Progress
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    importlib.import_module("gdp.models.pytorch.flops")
    assert callable(gdp.capture)
    assert all(hasattr(gdp, name) for name in gdp.__all__)
