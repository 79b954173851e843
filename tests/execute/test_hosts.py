"""Two hosts train together: network namespaces on this machine, each with torchrun and a device of the plan."""

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from execute.placed_jobs import LOSSES, SAVED
from execute.rank_processes import PATIENCE_SECONDS
from execute.test_rank_kills import check_like_unbroken, num_lines
from execute.torchrun import error_lines, is_running, is_soon, pids_of, torchrun

END_SECONDS = 10
SILENCE_SECONDS = 30  # a host that is cut off is given up after 10 s without a sign of life

Hosts = list["subprocess.Popen[str]"]


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces with a link between them."""
    names = [f"gdp{os.getpid()}h{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "to1", "netns", names[0], "type", "veth", "peer", "name", "to0", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", link(number))
            for device in ("lo", link(number)):
                ip("-n", name, "link", "set", device, "up")
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        remove(names)
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
    yield names
    remove(names)


def link(number: int) -> str:
    """Returns the name of a host's link."""
    return f"to{1 - number}"


def remove(names: list[str]) -> None:
    """Removes the namespaces, and ends what a test that failed has left in them."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            left = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for pid in map(int, left.stdout.split()):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start(out: Path, names: list[str], num_steps: int) -> Hosts:
    """Starts torchrun on each host."""
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "10.77.0.1", "--master-port", "29500"]
    return [
        torchrun(
            out,
            "saves",
            num_steps,
            options=[*common, "--node-rank", str(number)],
            prefix=["ip", "netns", "exec", name],
            GLOO_SOCKET_IFNAME=link(number),
        )
        for number, name in enumerate(names)
    ]


def errors_of(started: Hosts, seconds: float) -> list[list[str]]:
    """Returns what gdp said on each host; all must end within that time."""
    until = time.monotonic() + seconds
    return [error_lines(host.communicate(timeout=max(until - time.monotonic(), 0.1))[1]) for host in started]


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_killed_hosts(lost: int, hosts: list[str], tmp_path: Path) -> None:
    """All processes of a host are killed; the other one tells of it, and losses are those without a break."""
    out, num_steps = tmp_path / "out", 40
    started = start(out, hosts, num_steps)
    assert is_soon(lambda: num_lines(out) > 2, PATIENCE_SECONDS)
    pids = pids_of(out)
    for pid in (started[lost].pid, pids[lost]):
        os.kill(pid, signal.SIGKILL)
    lines = errors_of(started, END_SECONDS)
    assert is_soon(lambda: not any(map(is_running, pids)), END_SECONDS)
    assert lines[lost] == []
    (line,) = lines[1 - lost]
    reasons = [f"its process, rank {lost}, is gone"]
    if lost == 0:  # which has the store
        reasons.append("torchrun, which started its process, cannot be reached")
    assert line in [f"gdp: error: device 'gpu{lost}': {reason}" for reason in reasons]
    again = start(out, hosts, num_steps)
    assert errors_of(again, PATIENCE_SECONDS) == [[], []]
    assert [host.returncode for host in again] == [0, 0]
    check_like_unbroken(out, tmp_path / "whole", num_steps)


@pytest.mark.long
def test_hosts_that_cannot_reach_each_other(hosts: list[str], tmp_path: Path) -> None:
    """No connection is closed when a link goes down: only silence tells."""
    started = start(tmp_path, hosts, 10**5)
    assert is_soon(lambda: num_lines(tmp_path) > 2, PATIENCE_SECONDS)
    ip("-n", hosts[1], "link", "set", link(1), "down")
    pids = pids_of(tmp_path)
    assert is_soon(lambda: not any(map(is_running, pids)), SILENCE_SECONDS)
    ip("-n", hosts[1], "link", "set", link(1), "up")  # or torchrun waits for its store
    lines = list(itertools.chain(*errors_of(started, PATIENCE_SECONDS)))
    assert lines == [
        "gdp: error: device 'gpu1': gave no sign of life for 10 s",
        "gdp: error: device 'gpu0': torchrun, which started its process, cannot be reached",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {LOSSES, SAVED, "0.pid", "1.pid"}
