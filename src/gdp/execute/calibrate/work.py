"""Work that a calibration repeats, on all devices at once or on one: kernels, and chains of tiny ops."""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdp.errors import InputError
from gdp.execute.backends import Backend, Target, backend_of
from gdp.execute.host_executor import host_executor
from gdp.execute.plan_executor import StepRecord
from gdp.models.pytorch import Program, capture

MIB = 2**20
_IN_A_ROW_NS = 10_000_000  # a launch takes some 10 us

Log = Callable[[str], None]
Pair = tuple[int, int]
Once = Callable[[], int]  # does some work once and returns the ns that it took
Job = tuple[Backend, Callable[[], Once]]
"""A backend to work on, and a function that prepares the work on the thread that is to do it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The amount of work in a calibration."""

    seconds: float  # for a kind of work
    num_steps: int  # of a chain
    num_ops: int  # of a chain
    matrix_sizes: Mapping[str, Sequence[int]]  # by type of device
    convolution_batches: Mapping[str, Sequence[int]]
    streamed_bytes: int  # at most
    probes: Sequence[tuple[int, int, int]]  # images, channels and side of steps with all classes of kernels


FULL = Extent(
    seconds=0.5,
    num_steps=25,
    num_ops=200,
    matrix_sizes={"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)},
    convolution_batches={"cpu": (8,), "cuda": (256,)},
    streamed_bytes=1024 * MIB,
    probes=((2, 32, 32), (8, 64, 64), (16, 128, 96)),
)
_FEW: Any = {"matrix_sizes": {"cpu": (512,), "cuda": (4096,)}, "convolution_batches": {"cpu": (), "cuda": ()}}
QUICK = Extent(seconds=0.05, num_steps=5, num_ops=100, streamed_bytes=192 * MIB, probes=((8, 64, 64),), **_FEW)


@dataclass(frozen=True, slots=True)
class Work:
    """A kind of work."""

    amount: int  # FLOPs or bytes
    make: Callable[[torch.device, torch.dtype], Callable[[], Tensor]]  # prepares it on a device, for a type of tensors


def together(jobs: Sequence[Job], seconds: float) -> list[float | None]:
    """Repeats all jobs for that time and returns the median ns of each; None: no kernel for the dtype, or no memory."""
    ready, stop = threading.Barrier(len(jobs)), threading.Event()

    def repeat(job: Job) -> float | None:
        backend, prepare = job
        try:
            with backend.active(), torch.no_grad():
                once = _prepared(prepare)
                ready.wait()
                times_ns: list[int] = []
                end = time.perf_counter() + seconds
                while once and not stop.is_set() and (len(times_ns) < 3 or time.perf_counter() < end):
                    times_ns.append(once())
                return statistics.median(times_ns) if times_ns else None
        except BaseException:
            ready.abort()  # or the others would wait for ever
            raise

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(repeat, job) for job in jobs]
        try:
            wait(futures)
        except BaseException:  # an interrupt: threads that still compute when the process ends would abort it
            stop.set()
            ready.abort()
            raise
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))  # the cause first
    return [future.result() for future in futures]


def _prepared(prepare: Callable[[], Once]) -> Once | None:
    """Prepares the work and does it once, so that memory is mapped and kernels are chosen."""
    try:
        once = prepare()
        once()
    except (RuntimeError, MemoryError):
        return None
    return once


def time_alone(job: Job, seconds: float, what: str) -> float:
    """Repeats one job alone, as `together`; InputError if it cannot be done."""
    (time_ns,) = together([job], seconds)
    if time_ns is None:
        raise unable(job[0].target, what)
    return time_ns


def unable(target: Target, what: str) -> InputError:
    """Makes the error for work that a device cannot do."""
    return InputError(f"device {target.name!r}: {what} cannot be done there; leave it out with --devices")


def job_of(target: Target, work: Work, dtype: torch.dtype) -> Job:
    """Makes a job of the work, timed by its device's clock. On a GPU it is launched as often in a row as hides what the
    host takes for the first launch."""
    backend = backend_of(target, copy_memory)

    def prepare() -> Once:
        run, count = work.make(target.device, dtype), 1

        def once() -> int:
            moments = [backend.now()]
            for _ in range(count):
                run()
            moments.append(backend.now())
            start_ns, finish_ns = backend.times_ns(moments)
            return (finish_ns - start_ns) // count

        if target.device.type != "cpu":
            once()  # kernels are chosen
            count = max(_IN_A_ROW_NS // max(once(), 1), 1)
        return once

    return backend, prepare


def copy_memory(tensor: int, device: torch.device, *, is_pinned: bool = False) -> Tensor:
    """Makes memory for a backend, which asks by the number of a tensor: here its size in bytes."""
    return torch.empty(tensor, dtype=torch.uint8, device=device, pin_memory=is_pinned)


def line_through(times_ns: Mapping[int, float]) -> tuple[float, float]:
    """Fits (ns, ns per byte) of a line through times by size: least squares of relative errors."""
    sizes, times = np.array(list(times_ns)), np.array(list(times_ns.values()))
    design = np.stack([np.ones(len(sizes)), sizes], axis=1) / times[:, None]
    latency_ns, ns_per_byte = np.linalg.lstsq(design, np.ones(len(sizes)))[0].tolist()
    return latency_ns, ns_per_byte


def per_second(work: Work, time_ns: float) -> float:
    """Returns the rate of work."""
    return work.amount * 1e9 / time_ns


def whole(figure: float) -> int:
    """Rounds a figure, to 1 at least."""
    return max(round(figure), 1)


def cache_bytes() -> int:
    """Returns the size of the processor's largest cache; 0 where it is not known."""
    texts = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((1024 * int(text[:-1]) for text in texts if text[:-1].isdecimal() and text.endswith("K")), default=0)


class Chains(nn.Module):
    """Chains of additions, one from each input."""

    def __init__(self, num_ops: int) -> None:
        super().__init__()
        self.num_ops = num_ops

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        outputs = []
        for x in inputs:
            for _ in range(self.num_ops):
                x = torch.add(x, x)
            outputs.append(x)
        return outputs


def chain_program(num_chains: int, num_ops: int, num_bytes: int = 4) -> Program:
    """Captures chains of tensors of `num_bytes`; the ops are the inputs, then those of each chain in turn."""
    inputs = [torch.zeros(num_bytes // 4) for _ in range(num_chains)]
    return capture(Chains(num_ops), inputs, name="chains", training=False).program


def timed_steps(
    program: Program, order: Sequence[Sequence[int]], targets: Sequence[Target], num: int
) -> list[StepRecord]:
    """Runs timed steps, after one that does not count."""
    inputs = {source.tensor: program.memory_for(source.tensor).zero_() for source in program.sources.values()}
    with host_executor(program, order, targets) as executor:
        return [executor.step(inputs, is_timed=True) for _ in range(num + 1)][1:]


def _op_ns(records: Sequence[StepRecord], number: int) -> float:
    """Returns the median ns of an op of device `number`, except the first, which is a source."""
    devices = (record.devices[number] for record in records)
    spans = (span for each in devices for span in zip(each.start_ns[1:], each.finish_ns[1:], strict=True))
    return statistics.median(finish - start for start, finish in spans)


def _chain_ns(records: Sequence[StepRecord]) -> float:
    """Returns the median ns from the end of the first device's source to that of the last op on any device."""
    return statistics.median(
        max(device.finish_ns[-1] for device in record.devices) - record.devices[0].finish_ns[0] for record in records
    )


def launches(targets: Sequence[Target], effort: Extent, log: Log) -> list[float]:
    """[D] Measures the ns of a tiny op, with all devices at work."""
    log("launch overhead on all devices at once")
    num_devices, num_ops = len(targets), effort.num_ops
    chains = [range(number * num_ops, (number + 1) * num_ops) for number in range(num_devices)]
    order = [[number, *(num_devices + op for op in chain)] for number, chain in enumerate(chains)]
    steps = timed_steps(chain_program(num_devices, num_ops), order, targets, effort.num_steps)
    return [_op_ns(steps, number) for number in range(num_devices)]


def hop_ns(program: Program, pair: Sequence[Target], num_steps: int) -> float:
    """Measures the ns by which a hand-over lengthens a chain whose ops alternate between two devices."""
    num_ops = program.graph.num_ops
    here, there = (_chain_ns(timed_steps(program, [range(num_ops)], [target], num_steps)) for target in pair)
    both = _chain_ns(timed_steps(program, [range(0, num_ops, 2), range(1, num_ops, 2)], pair, num_steps))
    return (both - (here + there) / 2) / (num_ops - 1)
