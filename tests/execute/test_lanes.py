"""The streams and events of a CUDA lane, in order, without a GPU: what a copy waits for, and what waits for it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gdp.execute import lanes
from gdp.execute.lanes import CpuLane, CudaLane, Parcel
from gdp.execute.targets import CPU, Target

GPU = torch.device("cuda", 0)
Log = list[tuple[str, ...]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What streams and events are asked to do; streams and events are numbered as they are made."""
    said: Log = []
    names = iter(f"stream{number}" for number in range(9))
    events = iter(f"event{number}" for number in range(99))

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.name = next(events)

        def record(self, stream: Any) -> None:
            said.append(("record", self.name, stream.name))

        def synchronize(self) -> None:
            said.append(("host waits", self.name))

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = next(names)

        def wait_event(self, event: Event) -> None:
            said.append(("wait", event.name, self.name))

        def synchronize(self) -> None:
            said.append(("synchronize", self.name))

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        said.append(("on", chosen.name))
        yield
        said.append(("off", chosen.name))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: said.append(("keep for", stream.name)))
    return said


def memory_for(_tensor: int, _device: torch.device) -> Tensor:
    return torch.zeros(3)


def test_a_copy_from_a_gpu_follows_its_op_and_a_cpu_waits_for_it(log: Log) -> None:
    gpu, cpu = CudaLane(Target("cuda0", GPU), memory_for), CpuLane(Target("cpu0", CPU), memory_for)
    parcel = gpu.pack(7, torch.ones(3), CPU)
    assert log == [
        ("record", "event0", "stream0"),  # the op, on the compute stream
        ("wait", "event0", "stream1"), ("keep for", "stream1"),
        ("on", "stream1"), ("record", "event1", "stream1"), ("off", "stream1"),
    ]  # fmt: skip
    log.clear()
    content = cpu.unpack(parcel)
    assert log == [("host waits", "event1")]
    assert content is not None
    assert content.tolist() == [1.0] * 3


def test_a_copy_to_a_gpu_is_awaited_by_its_compute_stream(log: Log) -> None:
    cpu, gpu = CpuLane(Target("cpu0", CPU), memory_for), CudaLane(Target("cuda0", GPU), memory_for)
    parcel = cpu.pack(7, torch.ones(3), GPU)
    assert log == [("on", "stream1"), ("record", "event0", "stream1"), ("off", "stream1")]
    log.clear()
    gpu.unpack(parcel)
    assert log == [("wait", "event0", "stream0"), ("keep for", "stream0")]


def test_a_control_tensor_of_a_gpu_says_when_its_op_is_done(log: Log) -> None:
    gpu, cpu = CudaLane(Target("cuda0", GPU), memory_for), CpuLane(Target("cpu0", CPU), memory_for)
    parcel = gpu.pack(7, None, CPU)
    assert cpu.unpack(parcel) is None
    assert log == [("record", "event0", "stream0"), ("host waits", "event0")]


def test_a_step_ends_when_all_streams_have(log: Log) -> None:
    gpu = CudaLane(Target("cuda0", GPU), memory_for)
    gpu.pack(7, torch.ones(3), CPU)
    log.clear()
    gpu.settle()
    assert log == [("synchronize", "stream0"), ("synchronize", "stream1")]


def test_cpus_of_one_process_hand_over_the_tensor_itself() -> None:
    lane, content = CpuLane(Target("cpu0", CPU), memory_for), torch.ones(3)
    parcel = lane.pack(7, content, CPU)
    assert parcel == Parcel(7, content)
    assert lane.unpack(parcel) is content
    assert lanes.lane_of(Target("cpu0", CPU), memory_for).target.name == "cpu0"
