"""Plans run by forked processes that share memory: the bits of PyTorch, and an end of all when one fails or dies."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from execute.placed_steps import assert_same, cpus, randomly_placed, tower
from execute.rank_processes import fork_server
from gdp.execute.backends import CPU, ExchangedRows, Target
from gdp.execute.forked import forked_executor
from gdp.execute.forked.forked_executor import ForkedExecutor, SharedMemory, await_other_threads, may_fork
from gdp.execute.host_executor import ThreadExecutor, host_executor
from gdp.execute.measurement import one_device_order
from gdp.execute.plan_executor import ExecutionError
from gdp.models.pytorch import Replay
from tiny_models import EXECUTED, REPEATED, captured

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in REPEATED)) for name in EXECUTED]
)
def test_threads_and_processes_give_the_same_bits(name: str) -> None:
    """Three steps of a random placement, by threads and by processes, end alike in all they leave."""
    model, args, kwargs = EXECUTED[name]()
    found = captured(name)
    content, order = found.program.bind(model, args, kwargs), randomly_placed(found, 3, 1).order

    def trained(kind: type[ThreadExecutor | ForkedExecutor]) -> tuple[Replay, dict[int, dict[int, Tensor]]]:
        with kind(found.program, order, cpus()) as executor:
            executor.load(content)
            for retain in (False, False, True):
                record = executor.step(content, retain=retain)
            results = executor.results(record)
            state = {key: tensor.clone() for key, tensor in results.state.items()}
            private = {op: {key: item.clone() for key, item in by.items()} for op, by in executor.private().items()}
            return Replay(results.loss, results.outputs, results.gradients, state), private

    (here, private_here), (there, private_there) = trained(ThreadExecutor), trained(ForkedExecutor)
    assert_same(there, here)
    assert private_here.keys() == private_there.keys()
    for op, values in private_here.items():
        assert all(torch.equal(private_there[op][key], item) for key, item in values.items())


def test_single_cores_are_processes() -> None:
    """Kernels with threads of their own cannot be forked."""
    assert may_fork(cpus())
    assert not may_fork([Target("cpu0", CPU, (0, 1)), *cpus(1)])
    assert not may_fork([Target("cuda0", torch.device("cuda", 0)), *cpus(1)])
    found, _ = tower()
    with host_executor(found.program, one_device_order(found.graph.num_ops, 0, 2), cpus(2)) as executor:
        assert isinstance(executor, ForkedExecutor) == (torch.version.cuda is None)


def test_old_records_are_refused() -> None:
    """Processes keep what the latest step has left."""
    found, content = tower()
    with ForkedExecutor(found.program, randomly_placed(found, 2, 0).order, cpus()) as executor:
        executor.load(content)
        record = executor.step(content, retain=True)
        executor.step(content)
        with pytest.raises(ValueError, match="latest"):
            executor.results(record)


def test_killed_processes_end_the_step() -> None:
    """Whether between steps or within one; the others end within seconds."""
    found, content = tower()
    executor = ForkedExecutor(found.program, randomly_placed(found, 3, 0).order, cpus())
    executor.load(content)
    executor.step(content)
    pids = [child.pid for child in executor._children]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ExecutionError, match=r"device 'cpu1': its process, \d+, was ended by SIGKILL"):
        executor.step(content)
    assert executor.is_closed
    wait_until(lambda: not any(map(is_there, pids)))
    with pytest.raises(ExecutionError, match="closed"):
        executor.step(content)


def train_until_ended(out: Path) -> None:
    """Takes steps in a session of its own until a signal ends it; writes down its processes, then an interrupt."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
    found, content = tower()
    executor = ForkedExecutor(found.program, randomly_placed(found, 3, 0).order, cpus())
    executor.load(content)
    executor.step(content)
    (out / "new").write_text(" ".join(str(child.pid) for child in executor._children))
    (out / "new").rename(out / "processes")
    try:
        while True:
            executor.step(content)
    except KeyboardInterrupt:
        (out / "interrupted").touch()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_processes_end_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    """However that ends, in a step: none is left, and no shared memory has a name that could be left."""
    before = set(os.listdir("/dev/shm"))
    process = fork_server().Process(target=train_until_ended, args=(tmp_path,))
    process.start()
    wait_until((tmp_path / "processes").exists, 60.0)
    pids = [int(word) for word in (tmp_path / "processes").read_text().split()]
    assert len(pids) == 4
    time.sleep(0.3)
    assert process.pid is not None
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # a terminal interrupts all
    process.join(20)
    assert process.exitcode == (0 if number == signal.SIGINT else -number)
    assert (tmp_path / "interrupted").exists() == (number == signal.SIGINT)
    wait_until(lambda: not any(map(is_there, pids)))
    wait_until(lambda: set(os.listdir("/dev/shm")) <= before, 30.0)  # but for names that other tests have just now


def test_no_process_outlives_its_executor() -> None:
    """Not after steps, and not after none."""
    found, content = tower()
    for steps in (0, 2):
        executor = ForkedExecutor(found.program, randomly_placed(found, 2, 0).order, cpus())
        pids = [child.pid for child in executor._children]
        executor.load(content)
        for _ in range(steps):
            executor.step(content)
        executor.close()
        assert not any(map(is_there, pids))


def test_rows_are_copied_as_they_are_joined() -> None:
    """Rows of an exchange go into shared memory without a copy between."""
    rows = [torch.arange(float(length)) + length for length in (4, 1, 2, 1)]
    found = ExchangedRows(((rows[0], rows[1]), (rows[2], rows[3])), 5, torch.float32)
    memory = SharedMemory().like(torch.empty(10))
    found.copy_to(memory)
    assert torch.equal(memory, found.joined())


def test_layouts_of_shared_memory() -> None:
    """Sizes, strides and types are kept, and no two tensors overlap."""
    memory = SharedMemory()
    templates = [
        torch.empty(3, 5).t(),
        torch.empty(0, 4),
        torch.empty((), dtype=torch.int64),
        torch.empty(1000, dtype=torch.bool),
        torch.empty(20 << 20),  # more than a block
        torch.empty(7, dtype=torch.bfloat16),
    ]
    made = [memory.like(template) for template in templates]
    for number, (tensor, template) in enumerate(zip(made, templates, strict=True)):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (template.shape, template.stride(), template.dtype)
        tensor.fill_(number % 2)
    assert [tensor.float().mean().item() for tensor in made if tensor.numel()] == [0.0, 0.0, 1.0, 0.0, 1.0]


def test_forks_wait_for_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It might hold a lock of the kernels' that nobody in the child gives back."""
    monkeypatch.setattr(forked_executor, "_LONGEST_S", 60.0)
    matrix, has_begun, ends = torch.ones(2500, 2500), threading.Event(), []

    def multiply() -> None:
        has_begun.set()
        matrix @ matrix
        ends.append(time.monotonic())

    thread = threading.Thread(target=multiply)
    thread.start()
    has_begun.wait()
    time.sleep(0.01)  # it is in the kernel
    began = time.monotonic()
    await_other_threads()
    returned = time.monotonic()
    thread.join()
    assert returned >= ends[0] - (ends[0] - began) / 4  # in which it awaits its turn in Python
