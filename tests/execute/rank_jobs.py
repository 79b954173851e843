"""What the ranks of `test_processes` do, each in a process of its own; what came of it is a JSON file for each."""

import heapq
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from execute.test_layouts import check, offload_small_tensors
from gdp.errors import InputError
from gdp.execute.ranks import ranks as ranks_module
from gdp.execute.ranks.rank_executor import ProcessExecutor
from gdp.execute.ranks.ranks import RankError, Ranks, join
from gdp.models.pytorch import Capture, Replay
from gdp.models.pytorch.program import Program
from gdp.models.pytorch.routine import Routine
from tiny_models import EXECUTED, captured

NUM_STEPS = 3
DEVICES = ("north", "east", "south", "west")


def placed(name: str, count: int, seed: int) -> tuple[Capture, dict[int, Tensor], list[list[int]]]:
    """A tiny model, what it starts from, and a random order of its ops on `count` devices, placed at random."""
    torch.manual_seed(0)
    module, args, kwargs = EXECUTED[name]()
    found, random = captured(name), np.random.default_rng(seed)
    graph, placement = found.graph, random.integers(0, count, found.graph.num_ops)
    for group in set(graph.groups.tolist()) - {-1}:
        placement[graph.groups == group] = placement[graph.groups == group][0]
    order: list[list[int]] = [[] for _ in range(count)]
    num_awaited = np.bincount(graph.consumers, minlength=graph.num_ops)
    ready = [(0.0, op) for op in range(graph.num_ops) if not num_awaited[op]]
    while ready:
        _, op = heapq.heappop(ready)
        order[placement[op]].append(op)
        for tensor in np.flatnonzero(graph.producers == op):
            for consumer in graph.consumers_of(tensor).tolist():
                num_awaited[consumer] -= 1
                if not num_awaited[consumer]:
                    heapq.heappush(ready, (random.random(), consumer))
    return found, found.program.bind(module, args, kwargs), order


def one_process(program: Program, bound: dict[int, Tensor], order: list[list[int]]) -> list[Replay]:
    """Steps of the program, op by op as numbered; what each gave.

    A tensor that the order moves is copied too: what was a part of a larger one is dense afterwards, and the vector
    and scalar kernels of some processors, which PyTorch chooses by stride, round differently.
    """
    home = {op: rank for rank, ops in enumerate(order) for op in ops}
    state = {tensor: content.clone() for tensor, content in bound.items()}
    private: dict[int, Tensor] = {}
    replays = []
    for step in range(NUM_STEPS):
        held: dict[int, Tensor] = {}
        moved: dict[tuple[int, int], Tensor] = {}
        for op in range(program.graph.num_ops):
            if op in program.sources:
                held.update(program.parts(op, state[program.sources[op].tensor]))
            else:
                inputs = {tensor: held[tensor] for tensor in program.inputs_of[op]}
                for tensor in inputs:
                    if home[int(program.graph.producers[tensor])] != home[op]:
                        inputs[tensor] = moved.setdefault((tensor, home[op]), held[tensor].clone())
                held.update(program.run(op, inputs, private, seed=step * program.num_draws))
        replay = program.results(held)
        replays.append(Replay(*map(cloned, (replay.loss, replay.outputs, replay.gradients, replay.state))))
    return replays


def cloned(part: Any) -> Any:
    """A copy of a tensor, or of tensors by name; later steps write into the memory."""
    return part.clone() if isinstance(part, Tensor) else {name: tensor.clone() for name, tensor in part.items()}


def is_equal(first: Replay, second: Replay) -> bool:
    """To the bit, NaNs too."""
    parts = [[{"": replay.loss}, replay.outputs, replay.gradients, replay.state] for replay in (first, second)]
    for ours, theirs in zip(*parts, strict=True):
        if ours.keys() != theirs.keys():
            return False
        for name, one in ours.items():
            other = theirs[name]
            if one is None or other is None or not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
                return False
    return True


# Jobs: (ranks, what to write down)


def equal(ranks: Ranks, say: dict[str, Any], *names: str) -> None:
    """Steps of models on random placements, with a wide and a narrow window."""
    for seed, name in enumerate(names):
        found, bound, order = placed(name, len(ranks.names), seed)
        program = found.program
        expected = one_process(program, bound, order) if ranks.is_first else []
        with ProcessExecutor(program, order, ranks, window_bytes=(1 << 28, 0)[seed % 2]) as executor:
            executor.load(bound)
            for step in range(NUM_STEPS):
                record = executor.step(bound, retain=True, is_timed=step == 1)
                replay = executor.results(record)
                if ranks.is_first:
                    assert replay is not None
                    say.setdefault(name, []).append(is_equal(replay, expected[step]))
                    if step == 1:
                        say["ops"] = [list(device.ops) for device in record.devices]
                        say["order"] = order
                        say["times_ns"] = [record.start_ns, record.finish_ns]
                        say["ends_ns"] = [[*device.start_ns, *device.finish_ns] for device in record.devices]


def far(ranks: Ranks, say: dict[str, Any]) -> None:
    """As `equal`, of ranks that do not know that they have one clock."""
    ranks.hosts = tuple(ranks.names)
    equal(ranks, say, "rnnlm")


def layouts(ranks: Ranks, say: dict[str, Any], name: str, *seeds: int) -> None:
    """Steps of a model in random layouts, as PyTorch makes them."""

    def start(program: Program, order: Any, _targets: Any) -> ProcessExecutor:
        return ProcessExecutor(program, order, ranks)

    with pytest.MonkeyPatch.context() as patch:
        offload_small_tensors(patch)
        for seed in seeds:
            check(name, seed, start)
            say["seeds"] = say.get("seeds", 0) + 1


def one_fails(ranks: Ranks, say: dict[str, Any], how: str) -> None:
    """The rank of the second device fails in the middle of its second step."""
    found, bound, order = placed("rnnlm", len(ranks.names), 0)
    count = len(order[1]) * 3 // 2

    def fail() -> None:
        if how == "kernel":
            raise NotImplementedError("no such kernel")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])

    if ranks.rank == 1:
        before_op(count, fail)
    with ProcessExecutor(found.program, order, ranks) as executor:
        executor.load(bound)
        for _ in range(NUM_STEPS):
            executor.step(bound)


def first_dies(ranks: Ranks, say: dict[str, Any]) -> None:
    """The first rank, which has the store, dies between two steps."""
    found, bound, order = placed("rnnlm", len(ranks.names), 0)
    with ProcessExecutor(found.program, order, ranks) as executor:
        executor.load(bound)
        executor.step(bound)
        if ranks.is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        executor.step(bound)


def one_leaves(ranks: Ranks, say: dict[str, Any]) -> None:
    """The second rank closes when others go on."""
    found, bound, order = placed("rnnlm", len(ranks.names), 0)
    with ProcessExecutor(found.program, order, ranks) as executor:
        executor.load(bound)
        for _ in range(NUM_STEPS - 2 * ranks.rank):
            executor.step(bound)


def one_has_another_plan(ranks: Ranks, say: dict[str, Any]) -> None:
    """The second rank has another placement, and sleeps while the first, whose store it is, learns of it."""
    found, bound, order = placed("rnnlm", len(ranks.names), ranks.rank)
    if ranks.rank == 1:
        ranks_module._POLL_SECONDS = 1.5
    ranks.store.set(f"placed/{ranks.rank}", "")
    ranks.store.wait(["placed/0", "placed/1"])
    if ranks.is_first:
        time.sleep(0.5)
    with ProcessExecutor(found.program, order, ranks) as executor:
        executor.step(bound)


JOBS: dict[str, Callable[..., None]] = {
    job.__name__: job for job in (equal, far, layouts, one_fails, first_dies, one_leaves, one_has_another_plan)
}


def before_op(count: int, act: Callable[[], None]) -> None:
    """Do it before the op of that number, counted over steps, runs."""
    left, run = [count], Routine.run

    def counted(self: Routine, *args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            act()
        return run(self, *args)

    Routine.run = counted  # type: ignore[method-assign]


def do(out: Path, job: str, *args: Any) -> NoReturn:
    """Ends with the exit status of a rank's part of the job, as its environment says."""
    say: dict[str, Any] = {}
    rank, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    torch.set_num_threads(1)
    status = 0
    try:
        with join(DEVICES[:count], ["cpu"] * count) as ranks:
            JOBS[job](ranks, say, *args)
    except (RankError, InputError) as error:
        status, say["error"] = 1, str(error)
        say["is_reporter"] = getattr(error, "is_reporter", None)
    (out / f"{rank}.json").write_text(json.dumps(say))
    sys.exit(status)


def start_as_torchrun(out: Path, job: str, *args: Any) -> None:
    """Has the agent of torchrun start two ranks, in a session of their own; they are forks of this process."""
    os.setsid()
    config = LaunchConfig(
        1, 1, 2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork"
    )
    elastic_launch(config, _do_without_handlers)(out, job, *args)


def _do_without_handlers(out: Path, job: str, *args: Any) -> NoReturn:
    """As `do`, without the handlers of the agent's process, which a fork has and a command that is executed has not."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    do(out, job, *args)


def start(out: Path, environment: dict[str, str], job: str, *args: Any) -> None:
    """`do`, in a process that has PyTorch loaded."""
    os.environ.update(environment)
    if "stopped" in args:
        ranks_module.SILENT_SECONDS = 2.0
    do(out, job, *args)
