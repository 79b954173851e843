"""Training by processes is to the bit that by threads; what ends one rank ends all, and one line says why."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import gdp
from execute import placed_jobs
from execute.placed_jobs import SAVED, train
from execute.rank_processes import start_ranks, statuses_of
from execute.test_placed_layouts import MODELS, Dropping, batches, built, placed, points


def said(out: Path, count: int) -> list[dict[str, Any]]:
    """Returns what each rank wrote down, and the lines of its errors."""
    found = []
    for rank in range(count):
        file = out / f"{rank}.json"
        lines = [line for line in (out / f"{rank}.err").read_text().splitlines() if "Warning" not in line]
        found.append((json.loads(file.read_text()) if file.exists() else {}) | {"lines": lines})
    return found


def run(out: Path, count: int, job: str, *args: Any) -> tuple[list[int | None], list[dict[str, Any]]]:
    """Returns the exit status of each rank of a job and what it said; no rank is left."""
    out.mkdir(exist_ok=True)
    statuses = statuses_of(start_ranks(placed_jobs.start, out, count, job, *args))
    return statuses, said(out, count)


def told(ranks: list[dict[str, Any]]) -> list[str]:
    """Returns the lines that any rank printed."""
    return [line for rank in ranks for line in rank["lines"]]


def test_processes_train_as_threads(tmp_path: Path) -> None:
    """Losses, states and files are alike to the bit: schedules, momentum, clipping and ZeRO's pieces included."""
    by_threads, by_ranks = tmp_path / "threads.safetensors", tmp_path / "ranks.safetensors"
    cases = [
        {"name": "recurrent", "text": "data=2,microbatches=1:3,zero=1", "steps": range(3)},
        {"name": "recurrent", "text": "microbatches=4", "steps": range(3, 5)},
        {"name": "batch norm", "text": "data=2,zero=3", "steps": range(2)},
        {"name": "float16", "text": "data=2,zero=1", "steps": range(4), "scale": 2.0**22},  # overflows at first
    ]
    expected = [
        train(**cases[0], saves=by_threads),
        train(**cases[1], resume=by_threads),
        train(**cases[2]),
        train(**cases[3]),
    ]
    on_ranks = [cases[0] | {"saves": by_ranks}, cases[1] | {"resume": by_threads}, *cases[2:]]
    statuses, ranks = run(tmp_path / "2", 2, "trains", on_ranks)
    assert (statuses, told(ranks)) == ([0, 0], [])
    assert expected[3]["scale"] < 2.0**22
    for rank in ranks:
        assert rank["done"] == expected
    assert by_ranks.read_bytes() == by_threads.read_bytes()


@pytest.mark.long
def test_another_number_of_processes(tmp_path: Path) -> None:
    """A training goes on with another number of processes."""
    path = tmp_path / SAVED
    case = {"name": "tied decoder", "text": "data=4,zero=2", "steps": range(2, 4), "resume": path}
    train("tied decoder", "microbatches=2", range(2), saves=path)
    expected = train(**case)
    statuses, ranks = run(tmp_path / "4", 4, "trains", [case])
    assert (statuses, told(ranks)) == ([0] * 4, [])
    assert [rank["done"] for rank in ranks] == [[expected]] * 4


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_fifty_steps_of_each_model(name: str, tmp_path: Path) -> None:
    """In three layouts, with as many processes, each resumed in the next layout after 25 steps."""
    texts = (("microbatches=4", 2), ("data=2,microbatches=1:3,zero=1", 2), ("data=4,zero=3", 4))
    for number, (text, count) in enumerate(texts):
        path, other = tmp_path / f"{number}.safetensors", texts[(number + 1) % len(texts)]
        first = {"name": name, "text": text, "steps": range(25), "saves": path}
        rest = {"name": name, "text": other[0], "steps": range(25, 50), "resume": path}
        statuses, ranks = run(tmp_path / f"{number} first", count, "trains", [first])
        assert (statuses, told(ranks)) == ([0] * count, [])
        again, others = run(tmp_path / f"{number} rest", other[1], "trains", [rest])
        assert (again, told(others)) == ([0] * other[1], [])
        content = path.read_bytes()
        assert [rank["done"] for rank in ranks] == [[train(**first)]] * count
        assert path.read_bytes() == content
        assert [rank["done"] for rank in others] == [[train(**rest)]] * other[1]


@pytest.mark.long
def test_groups_of_the_script(tmp_path: Path) -> None:
    """A group of processes of the script stays as it is."""
    case = {"name": "batch norm", "text": "data=2", "steps": range(2)}
    statuses, ranks = run(tmp_path, 2, "in_a_group", case)
    assert (statuses, told(ranks)) == ([0, 0], [])
    assert [(rank["done"], rank["sum"]) for rank in ranks] == [(train(**case), [4.0] * 3)] * 2


@pytest.mark.long
def test_outputs_on_all_ranks(tmp_path: Path) -> None:
    """Outputs of a forward pass are on all ranks."""
    statuses, ranks = run(tmp_path, 2, "serves")
    assert (statuses, told(ranks)) == ([0, 0], [])
    assert ranks[0]["outputs"] == ranks[1]["outputs"]
    (output,) = ranks[0]["outputs"].values()
    assert len(output) == 8


DEFAULT = ("data", "dies in op")  # others are marked long
GONE = "gdp: error: device 'gpu1': its process, rank 1, is gone"
FAILURES: dict[str, tuple[list[int], str, int]] = {  # by job: statuses, the last line that is told, and finished steps
    "data": ([1, 1], r"gdp: error: device 'gpu1': left the run: ValueError: sample 7 has no label", 2),
    "early": ([1, 1], r"gdp: error: device 'gpu1': left the run: no such sample", 0),
    "op": ([1, 1], r"gdp: error: device 'gpu1': op '.*': no such kernel; pin the op to another device with --pin", 2),
    "dies": ([1, -signal.SIGKILL], GONE, 2),
    "dies in op": ([1, -signal.SIGKILL], GONE, 2),
    "interrupted": ([1, 1], "gdp: error: device 'gpu1': was interrupted", 2),
    "nan": ([1, 1], r"gdp: error: device 'all': step 3: the loss is nan; go on from a saved state .*", 2),
}


@pytest.mark.parametrize(
    "how", [how if how in DEFAULT else pytest.param(how, marks=pytest.mark.long) for how in FAILURES]
)
def test_a_failure_ends_all(how: str, tmp_path: Path) -> None:
    """A failure on a rank ends all with one line, and the file stays."""
    statuses, line, num_steps = FAILURES[how]
    ranks = start_ranks(placed_jobs.start, tmp_path, 2, "fails", how)
    while any(rank.is_alive() for rank in ranks) and all(rank.is_alive() for rank in ranks):
        time.sleep(0.02)
    began = time.monotonic()
    assert statuses_of(ranks) == statuses
    assert time.monotonic() - began < 5
    reports = said(tmp_path, 2)
    lines = told(reports)
    assert [item for item in lines if item.startswith("gdp: error")] == lines[-1:], lines
    assert re.fullmatch(line, lines[-1])
    assert (len(lines) > 1) == (how in ("data", "early")), "the script's own error has a traceback"
    assert reports[0].get("steps", 0) == num_steps
    assert {path.name for path in tmp_path.iterdir()} - {"0.json", "1.json", "0.err", "1.err"} == (
        {SAVED} if num_steps else set()
    )
    if how == "dies in op":
        (batch,) = batches(points, 1)
        with placed(built(Dropping), batch, "data=2", resume=tmp_path / SAVED) as trained:
            trained(*batch)
            assert trained.num_steps == 3


@pytest.mark.parametrize("how", ["weights", *(pytest.param(how, marks=pytest.mark.long) for how in ("batch", "rate"))])
def test_unequal_starts(how: str, tmp_path: Path) -> None:
    """Ranks that start with other weights, data or options are refused."""
    statuses, ranks = run(tmp_path, 2, "differs", how)
    assert statuses == [1, 1]
    (line,) = told(ranks)
    assert re.fullmatch(r"gdp: error: device 'gpu.': its process has other parameters, options or .* whole batch", line)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    """A file that cannot be written is an error on all ranks, which go on."""
    statuses, ranks = run(tmp_path, 2, "cannot_write")
    assert (statuses, told(ranks)) == ([0, 0], [])
    for rank in ranks:
        assert rank["error"].endswith("cannot be written (No space left on device); choose another place")
        assert (rank["files"], rank["is_there"]) == ([], True)


def test_a_wrong_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number of processes is one line."""
    (batch,) = batches(points, 1)
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(gdp.InputError, match=r"the plan has 2 devices .*; torchrun started 3 processes; use torchrun"):
        placed(built(Dropping), batch, "data=2")
