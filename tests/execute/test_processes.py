"""Processes give to the bit what one gives, in whatever way the ops are placed; and whatever ends one ends all."""

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from execute import rank_jobs
from execute.rank_jobs import DEVICES, NUM_STEPS
from execute.rank_processes import PATIENCE_SECONDS, fork_server, start_ranks, statuses_of
from gdp.errors import InputError
from gdp.execute.ranks.messages import Messages
from gdp.execute.ranks.ranks import join


def start(out: Path, count: int, job: str, *args: str) -> list[BaseProcess]:
    """Starts the ranks of a job."""
    return start_ranks(rank_jobs.start, out, count, job, *args)


def run(out: Path, count: int, job: str, *args: str) -> tuple[list[int | None], list[dict[str, Any]]]:
    """The exit status of each rank of a job and what it wrote; no rank is left."""
    return statuses_of(start(out, count, job, *args)), said(out, count)


def said(out: Path, count: int) -> list[dict[str, Any]]:
    files = [out / f"{rank}.json" for rank in range(count)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    """Loss, outputs, gradients and state over three steps, with a window and with none."""
    names = ("unet", "mixture_of_experts", "transformer_xl", "lstm")
    statuses, (first, _) = run(tmp_path, 2, "equal", *names)
    assert statuses == [0, 0]
    assert {name: first[name] for name in names} == dict.fromkeys(names, [True] * NUM_STEPS)


def test_three_processes(tmp_path: Path) -> None:
    """Three processes give the results of one, and record every op."""
    statuses, (first, *_) = run(tmp_path, 3, "equal", "rnnlm")
    assert (statuses, first["rnnlm"]) == ([0, 0, 0], [True] * NUM_STEPS)
    assert first["ops"] == first["order"]
    start_ns, finish_ns = first["times_ns"]
    assert all(start_ns - 1e9 < moment < finish_ns for device in first["ends_ns"] for moment in device)


def test_clocks_of_hosts_are_compared(tmp_path: Path) -> None:
    """One clock taken for two: what messages say of it is right within a step, and the outputs are as ever."""
    statuses, (first, _) = run(tmp_path, 2, "far")
    assert (statuses, first["rnnlm"]) == ([0, 0], [True] * NUM_STEPS)
    start_ns, finish_ns = first["times_ns"]
    slack_ns = 100e6  # of a busy machine
    assert all(start_ns - slack_ns < moment < finish_ns + slack_ns for device in first["ends_ns"] for moment in device)


def test_failing_ops(tmp_path: Path) -> None:
    """An op that fails on one rank is an error on all."""
    statuses, ranks = run(tmp_path, 3, "one_fails", "kernel")
    assert statuses == [1, 1, 1]
    assert {rank["error"] for rank in ranks} == {ranks[1]["error"]}
    assert ranks[1]["error"].startswith("device 'east': op ")
    assert ranks[1]["error"].endswith("no such kernel; pin the op to another device with --pin")
    assert [rank["is_reporter"] for rank in ranks] == [False, True, False]


@pytest.mark.parametrize(
    ("job", "statuses", "error"),
    [
        (("one_fails", "killed"), [1, -signal.SIGKILL, 1], "device 'east': its process, rank 1, is gone"),
        (("one_fails", "stopped"), [1, -signal.SIGKILL, 1], "device 'east': gave no sign of life for 2 s"),
        (("first_dies",), [-signal.SIGKILL, 1, 1], "device 'north': its process, rank 0, is gone"),
    ],
)
def test_ranks_that_die(tmp_path: Path, job: tuple[str, ...], statuses: list[int], error: str) -> None:
    """A rank that dies ends all within seconds."""
    ranks = start(tmp_path, 3, *job)
    dead = statuses.index(-signal.SIGKILL)
    if job[-1] != "stopped":
        ranks[dead].join(PATIENCE_SECONDS)
        began = time.monotonic()
    for number, rank in enumerate(ranks):
        if number != dead:
            rank.join(PATIENCE_SECONDS)
    if job[-1] != "stopped":
        assert time.monotonic() - began < 10
    ranks[dead].kill()
    ranks[dead].join()
    assert [rank.exitcode for rank in ranks] == statuses
    assert {rank["error"] for rank in said(tmp_path, 3) if rank} == {error}


def test_ranks_that_close_early(tmp_path: Path) -> None:
    """A rank that closes while others go on ends them."""
    statuses, ranks = run(tmp_path, 2, "one_leaves")
    assert statuses == [1, 1]
    assert all("does not do what the others do" in rank["error"] for rank in ranks)


def test_a_rank_with_another_plan_is_refused(tmp_path: Path) -> None:
    """Both say why, although the store of ranks ends with the first one's process."""
    statuses, ranks = run(tmp_path, 2, "one_has_another_plan")
    assert statuses == [1, 1]
    assert all("its process has another model or plan than others have" in rank["error"] for rank in ranks)


def test_torchrun_names_the_cause(tmp_path: Path) -> None:
    """Its agent ends the others by SIGTERM as soon as it sees that one is dead: they say why all the same."""
    agent = fork_server().Process(target=rank_jobs.start_as_torchrun, args=(tmp_path, "one_fails", "killed"))
    agent.start()
    assert statuses_of([agent]) == [1]
    assert said(tmp_path, 2)[0]["error"] == "device 'east': its process, rank 1, is gone"
    assert agent.pid is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(agent.pid, 0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "has 3 devices (north, east, south); torchrun started 2 processes; use torchrun --nproc-per-node 3",
        ),
        ({}, "torchrun did not start this process; use torchrun --nproc-per-node 3"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "torchrun started 4 processes; use torchrun with --nnodes times --nproc-per-node = 3",
        ),
    ],
)
def test_a_wrong_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    """A wrong number of processes is refused."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=re.escape(message)):
        join(DEVICES[:3])


def test_ranks_connect_by_messages_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message of a group waits for both ends, so that all ranks send and receive them in the order of pairs;
    a collective of the group would connect other ends."""
    traffic = {(0, 1): [1], (1, 0): [2], (1, 2): [], (2, 0): [3], (0, 2): [4]}
    ends = {pair: threading.Barrier(2) for pair, tensors in traffic.items() if tensors}
    monkeypatch.setattr(dist, "new_group", lambda pair, backend: pair)

    def connect(rank: int) -> None:
        target = SimpleNamespace(device=torch.device("cpu"))
        ranks: Any = SimpleNamespace(names="abc", rank=rank, is_nccl=True, group=None, target=target)
        messages = Messages(ranks, 10)

        def post(function: Any, wire: Tensor, peer: int, tag: int) -> Any:
            ends[(rank, peer) if function is dist.isend else (peer, rank)].wait(10)
            return SimpleNamespace(wait=lambda timeout: None)

        monkeypatch.setattr(messages, "post", post)
        messages.connect(traffic)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(connect, range(3)))
    assert not any(barrier.broken or barrier.n_waiting for barrier in ends.values())
