"""A training by processes of which any is killed at any moment goes on from its file as if nothing had happened."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from execute import placed_jobs
from execute.placed_jobs import LOSSES, SAVED, saves
from execute.rank_processes import PATIENCE_SECONDS, start_ranks, statuses_of
from execute.test_kills import losses_of
from execute.torchrun import STANDALONE, error_lines, is_running, is_soon, pids_of, torchrun

STEPS_A_KILL = 20
END_SECONDS = 10


def num_lines(out: Path) -> int:
    path = out / LOSSES
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_like_unbroken(out: Path, whole: Path, num_steps: int) -> None:
    """Asserts that every loss is that of threads without a break, and so is the file."""
    whole.mkdir()
    saves(whole, {}, num_steps)
    assert losses_of(out) == losses_of(whole)
    assert len(losses_of(whole)) == num_steps
    assert (out / SAVED).read_bytes() == (whole / SAVED).read_bytes()


def test_killed_ranks_lose_nothing(tmp_path: Path) -> None:
    """One rank is killed at a random moment, then the other one."""
    out, chance, num_steps = tmp_path / "killed", random.Random(0), 2 * STEPS_A_KILL
    out.mkdir()
    for number in range(2):
        before = num_lines(out)
        ranks = start_ranks(placed_jobs.start, out, 2, "saves", num_steps)
        assert is_soon(lambda: num_lines(out) > before, PATIENCE_SECONDS)  # noqa: B023, it is called here
        time.sleep(chance.uniform(0.0, 0.1))
        ranks[number].kill()
        began = time.monotonic()
        assert sorted(map(str, statuses_of(ranks))) in (["-9", "1"], ["-9", "0"])
        assert time.monotonic() - began < END_SECONDS
    assert statuses_of(start_ranks(placed_jobs.start, out, 2, "saves", num_steps)) == [0, 0]
    check_like_unbroken(out, tmp_path / "whole", num_steps)


@pytest.mark.long
def test_twenty_kills_under_torchrun(tmp_path: Path) -> None:
    """A rank or torchrun itself is killed; all others end within seconds, and one line has the name of the rank."""
    out, chance, num_kills = tmp_path / "killed", random.Random(0), 20
    num_steps = STEPS_A_KILL * num_kills
    num_done = 0
    for _ in range(num_kills):
        before = num_lines(out)
        started = torchrun(out, "saves", num_steps)
        assert is_soon(lambda: num_lines(out) > before, PATIENCE_SECONDS)  # noqa: B023, it is called here
        time.sleep(chance.uniform(0.0, 0.3))
        first, second = pids_of(out)
        killed = chance.choice((first, second, started.pid))
        is_done = started.poll() is not None
        if not is_done:
            os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        _, errors = started.communicate(timeout=PATIENCE_SECONDS)
        assert is_soon(lambda: not is_running(first) and not is_running(second), END_SECONDS)  # noqa: B023
        if is_done or started.returncode == 0:
            continue
        num_done += 1
        assert time.monotonic() - began < END_SECONDS
        lines = error_lines(errors)
        name = "gpu1" if killed == second else "gpu0"
        assert lines, errors
        assert all(line.startswith(f"gdp: error: device '{name}': ") for line in lines), lines
        assert len(lines) == 1 or killed == started.pid, lines  # without torchrun no rank knows what others say
    assert num_done >= num_kills // 2
    last = torchrun(out, "saves", num_steps)
    assert error_lines(last.communicate(timeout=PATIENCE_SECONDS)[1]) == []
    assert last.returncode == 0
    check_like_unbroken(out, tmp_path / "whole", num_steps)
    rest = {path.name for path in out.iterdir()} - {LOSSES, SAVED, "0.pid", "1.pid"}
    assert len(rest) <= num_kills, "at most what a kill left half written, under another name"


@pytest.mark.long
def test_restarts_by_torchrun(tmp_path: Path) -> None:
    """A rank is killed, and torchrun starts both anew."""
    out, num_steps = tmp_path / "killed", STEPS_A_KILL
    started = torchrun(out, "saves", num_steps, options=[*STANDALONE, "--max-restarts", "1"])
    assert is_soon(lambda: num_lines(out) > 2, PATIENCE_SECONDS)
    os.kill(pids_of(out)[1], signal.SIGKILL)
    _, errors = started.communicate(timeout=PATIENCE_SECONDS)
    assert started.returncode == 0, errors
    assert error_lines(errors) == ["gdp: error: device 'gpu1': its process, rank 1, is gone"]
    check_like_unbroken(out, tmp_path / "whole", num_steps)


@pytest.mark.long
def test_scripts_that_do_not_close(tmp_path: Path) -> None:
    """A script may end without closing its placed model."""
    started = torchrun(tmp_path, "never_closes")
    _, errors = started.communicate(timeout=PATIENCE_SECONDS)
    assert started.returncode == 0, errors
    assert "Traceback" not in errors
    assert error_lines(errors) == []
