"""Targets, the real devices that the devices of a plan stand for, and backends: how one worker prepares its thread,
hands tensors over and takes them, on a CPU or a CUDA device.

CPU devices of one process share memory: a tensor is handed over as it is, and the write-after-read tensors of the graph
keep it unchanged until its readers are done. A CUDA device computes on a stream of its own, and copies on one stream
per destination; events order them, so that copies overlap computation:

    compute   op -> event      op       op
    copy               wait event -> copy -> event
    receiver                                 wait event -> op"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gdp.cluster.detect import Detected, host
from gdp.errors import InputError
from gdp.models.pytorch.strides import fill

Chunk = tuple[Tensor, ...]  # ExchangedRows of elements that go round together
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Target:
    """A device of a plan and where it runs: pinned to processor cores, or on a GPU."""

    name: str  # in the plan
    device: torch.device
    cores: tuple[int, ...] = ()  # of a CPU; () is not pinned

    @property
    def place(self) -> str:
        """Returns the place in words: `core 1`, `cores 0-3`, `any core`, `cuda:0`."""
        if self.device.type != "cpu":
            return str(self.device)
        if not self.cores:
            return "any core"
        first, last = self.cores[0], self.cores[-1]
        return f"core {first}" if first == last else f"cores {first}-{last}"

    @property
    def num_threads(self) -> int:
        """Number of intra-op threads."""
        return max(len(self.cores), 1)


def find_targets(
    names: Sequence[str], on: str | Sequence[str] | None = None, *, option: str = "on"
) -> tuple[Target, ...]:
    """[D] Returns the target of each device of a plan. `on` has the place of each device in turn: `cpu` (any core),
    `cpu:1` (that core), `cpu:0-3` (these), `cuda:0`; or is a text of them, with commas between. Without it names are
    places: `cpu1` is core 1, `cuda0` is GPU 0; beside GPUs, a `cpu0` that is the only CPU has all cores. InputError for
    a place that is not there; `option` is what the user calls `on`: `--on` on a command line."""
    on = on.split(",") if isinstance(on, str) else on
    if on is not None and len(on) != len(names):
        raise InputError(f"{option} names {len(on)} devices; the plan has {len(names)}, name each: {', '.join(names)}")
    places = places_of(names, option) if on is None else [text.strip() for text in on]
    return tuple(_target(name, place, option) for name, place in zip(names, places, strict=True))


def places_of(names: Sequence[str], option: str = "on") -> list[str]:
    """[D] Returns the places of devices of these names, as in `find_targets`."""
    places = [_place_of(name, option) for name in names]
    cpus = [number for number, place in enumerate(places) if place.startswith("cpu:")]
    if len(cpus) == 1 < len(places) and places[cpus[0]] == "cpu:0":
        places[cpus[0]] = host.run_place(host.all_cores())  # as gdp devices detect has it beside GPUs
    return places


def _place_of(name: str, option: str) -> str:
    if match := re.fullmatch(r"(cpu|cuda|gpu)[-_:]?(\d+)", name):
        return f"{'cpu' if match[1] == 'cpu' else 'cuda'}:{match[2]}"
    examples = "--on cpu:0,cpu:1 or --on cpu:0,cuda:0" if option == "--on" else 'on=["cpu:0", "cuda:0"]'
    raise InputError(
        f"device {name!r} of the plan: nothing on this machine is called so; say where it runs, as in {examples}"
    )


def _target(name: str, place: str, option: str) -> Target:
    if place == "cpu":
        return Target(name, CPU)
    match = re.fullmatch(r"(cpu|cuda):(\d+)(?:-(\d+))?", place)
    if match is None or (match[1] == "cuda" and match[3]):
        raise InputError(f"{option} {place!r}: cpu, cpu:1, cpu:0-3 or cuda:0 is expected")
    first, last = int(match[2]), int(match[3] or match[2])
    if match[1] == "cuda":
        count = torch.cuda.device_count()
        if first >= count:
            raise InputError(
                f"device {name!r} of the plan: there is no {place} here, but {count} CUDA devices; name what there is "
                f"by {option}, such as cpu for any core"
            )
        return Target(name, torch.device("cuda", first))
    cores, here = tuple(range(first, last + 1)), host.available_cores()
    if not cores or (here and not set(cores) <= set(here)):
        listed = ", ".join(map(str, here))
        raise InputError(f"device {name!r} of the plan: there is no {place} here; cores: {listed}; see {option}")
    return Target(name, CPU, cores)


def target_of(device: Detected) -> Target:
    """Returns the target of a device of this machine. InputError if it has gone away."""
    return find_targets([device.name], [device.place])[0]


@dataclass(frozen=True, slots=True, eq=False)
class ExchangedRows:
    """Elements that replicas exchange, where they lie in memory, in chunks of `chunk_elements` or of fewer.

    Devices that are threads read them there. Shared memory, gloo and GPUs get one tensor of them:

        chunk 0   | a a a a | b |       chunk 1   | b b | c c |
        joined    | a a a a   b   b b   c c . |                     chunks are filled up to the same length"""

    chunks: tuple[Chunk, ...]
    chunk_elements: int
    dtype: torch.dtype
    device: torch.device | None = None  # None: the CPU

    def joined(self) -> Tensor:
        """Returns one tensor of all chunks; a view where they are one row."""
        parts: list[Tensor] = []
        for chunk in self.chunks:
            parts += chunk
            missing = self.chunk_elements - sum(len(row) for row in chunk)
            if missing:
                parts.append(torch.zeros(missing, dtype=self.dtype, device=self.device))
        return parts[0] if len(parts) == 1 else torch.cat(parts or [torch.empty(0, dtype=self.dtype)])

    def copy_to(self, memory: Tensor) -> None:
        """Copies the chunks into `memory`, which is as long as all of them together."""
        targets: list[Tensor] = []
        rows: list[Tensor] = []
        for number, chunk in enumerate(self.chunks):
            first = number * self.chunk_elements
            for row in chunk:
                targets.append(memory[first : first + len(row)])
                rows.append(row)
                first += len(row)
        if rows:
            torch._foreach_copy_(targets, rows)


Content = Tensor | ExchangedRows | None
"""The content of a tensor on its way to another device; None for a control tensor."""


def as_tensor(content: Content) -> Tensor | None:
    """Returns the content as one tensor."""
    return content.joined() if isinstance(content, ExchangedRows) else content


class SentTensor(NamedTuple):
    """A tensor on its way: its number, its content, and the event to wait for."""

    tensor: int
    content: Any  # a tensor, ExchangedRows between devices that share memory, or None for a control tensor
    event: Any = None  # torch.cuda.Event


class MemoryFor(Protocol):
    """Memory for a copy of that tensor on that device."""

    def __call__(self, tensor: int, device: torch.device, *, is_pinned: bool = False) -> Tensor: ...


class _Backend:
    """A target, and a stream for copies to each device."""

    def __init__(self, target: Target, memory_for: MemoryFor) -> None:
        self.target, self._memory_for = target, memory_for
        self._streams: dict[torch.device, Any] = {}
        self._streams_there: dict[torch.device, Any] = {}

    def _copied(
        self, tensor: int, content: Tensor, to: torch.device, on: torch.device, after: Any = None
    ) -> SentTensor:
        """Starts a copy on a stream of the GPU `on`, after an event. PyTorch lets it wait for the current stream of the
        other GPU, and that one for it: a stream there is for these copies alone, or copies from all GPUs would take
        turns."""
        if to not in self._streams:
            self._streams[to] = torch.cuda.Stream(on)  # type: ignore[no-untyped-call]
            if to.type == "cuda" and to != on:
                self._streams_there[to] = torch.cuda.Stream(to)  # type: ignore[no-untyped-call]
        stream = self._streams[to]
        if after is not None:
            stream.wait_event(after)
            content.record_stream(stream)
        there = self._streams_there.get(to)
        with contextlib.nullcontext() if there is None else torch.cuda.stream(there), torch.cuda.stream(stream):
            copy = self._memory_for(tensor, to, is_pinned=to.type == "cpu")  # or the launch would wait for the copy
            fill(copy, content, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return SentTensor(tensor, copy, event)


class CpuBackend(_Backend):
    """A worker thread's own cores, on which kernels run to their end before the next begins."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Pin this thread; kernels use as many threads as the device has cores."""
        if self.target.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(threading.get_native_id(), self.target.cores)
        torch.set_num_threads(self.target.num_threads)
        yield

    def pack(self, tensor: int, content: Content, to: torch.device) -> SentTensor:
        """Packs a tensor for a worker of the device `to`."""
        if content is None or to.type == "cpu":
            return SentTensor(tensor, content)
        whole = content.joined() if isinstance(content, ExchangedRows) else content
        staged = fill(self._memory_for(tensor, CPU, is_pinned=True), whole)  # dense, or the copy would hold this up
        return self._copied(tensor, staged, to, to)

    def unpack(self, sent: SentTensor) -> Content:
        """Returns the content, ready to be read here."""
        if sent.event is not None:
            sent.event.synchronize()
        content: Content = sent.content
        return content

    def settle(self) -> None:
        """Wait until all that was launched is done: kernels are, when they return."""

    def settle_caller(self) -> None:
        """Wait until all that the calling thread launched here is done, whoever's backend it is."""

    def now(self) -> Any:
        """A moment in this device's time, for `times_ns`."""
        return time.perf_counter_ns()

    def times_ns(self, moments: list[Any]) -> list[int]:
        """The moments in ns; the first is where this process's clock stood when the step began."""
        return moments

    def issued_ns(self, _moments: list[Any]) -> list[int]:
        """Nothing is launched ahead of the moments."""
        return []


class CudaBackend(_Backend):
    """A compute stream, and a copy stream for each device that is sent to."""

    def __init__(self, target: Target, memory_for: MemoryFor) -> None:
        super().__init__(target, memory_for)
        self._compute = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Launch this thread's kernels on the compute stream."""
        with torch.cuda.device(self.target.device), torch.cuda.stream(self._compute):
            yield

    def pack(self, tensor: int, content: Content, to: torch.device) -> SentTensor:
        """Packs a tensor for a worker of the device `to`; its copy starts when all work launched so far is done."""
        content = as_tensor(content)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._compute)
        if content is None or to == self.target.device:
            return SentTensor(tensor, content, done)
        return self._copied(tensor, content, to, self.target.device, done)

    def unpack(self, sent: SentTensor) -> Content:
        """Returns the content, to be read on the compute stream."""
        if sent.event is not None:
            self._compute.wait_event(sent.event)
        content: Content = sent.content
        if isinstance(content, Tensor):
            content.record_stream(self._compute)
        return content

    def settle(self) -> None:
        """Wait until all that was launched is done, copies to others too."""
        for stream in (self._compute, *self._streams.values()):
            stream.synchronize()

    def settle_caller(self) -> None:
        """Wait until all that the calling thread launched here is done, on a stream that no other waits for."""
        torch.cuda.current_stream(self.target.device).synchronize()

    def now(self) -> Any:
        """A moment in this device's time, for `times_ns`; kernels run later than they are launched."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._compute)
        return time.perf_counter_ns(), event

    def times_ns(self, moments: list[Any]) -> list[int]:
        """The moments in ns; the first event's moment is when it was recorded, since the stream was idle then."""
        self.settle()
        if not moments:
            return []
        base_ns, base = moments[0]
        return [base_ns + int(1e6 * base.elapsed_time(event)) for _, event in moments]

    def issued_ns(self, moments: list[Any]) -> list[int]:
        """Returns when the host had launched all that came before each of the moments, in ns of its clock."""
        return [host_ns for host_ns, _ in moments]


Backend = CpuBackend | CudaBackend


def backend_of(target: Target, memory_for: MemoryFor) -> Backend:
    """The backend of a target."""
    return CudaBackend(target, memory_for) if target.device.type == "cuda" else CpuBackend(target, memory_for)
