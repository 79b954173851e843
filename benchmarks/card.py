"""Measures training and inference steps, or single ops, on the CUDA card of this machine.

    python -m benchmarks.card steps DIR [SECONDS]            DIR/steps.csv, and the device time of their ops in
                                                             DIR/step-ops.csv
    python -m benchmarks.card further-steps DIR [SECONDS]    the same of other models
    python -m benchmarks.card ops DIR [SECONDS]              DIR/ops.csv
    python -m benchmarks.card further-ops DIR [SECONDS]      the same of ops that were added later

Each row is saved as it ends; what the time is too short for is left out. It needs a card, and for steps timm and
Transformers. Rows that were made so are in `benchmarks/data/`.
"""

import contextlib
import csv
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.card_ops import OpCase, further_op_cases, op_cases
from benchmarks.card_steps import MODELS, StepCase, further_step_cases, step_cases
from gdp.errors import InputError

WARM_UP = 3  # steps
FLUSHED_BYTES = 128 * 2**20  # more than the second-level cache of any card


def measure_step(case: StepCase) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the figures of a step, and the device time of each of its operators in us.

    Each time is from an idle card to an idle card; `host_ms` ends when the host has issued the step; `kernel_ms` is the
    sum over its kernels, under a profiler; `peak_bytes` is what PyTorch had allocated at most.
    """
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, inputs, loss_of, size = MODELS[case.model](case.batch)
    dtype = torch.bfloat16 if case.precision == "bfloat16" else None
    memory_format = torch.channels_last if case.memory_format == "nhwc" else torch.preserve_format
    model = model.to("cuda", dtype).to(memory_format=memory_format)  # type: ignore[call-overload]
    inputs = tuple(
        value.to(dtype=dtype if value.is_floating_point() else None, memory_format=memory_format) for value in inputs
    )
    model.train(case.phase == "train")
    step = _step(case, model, inputs, loss_of)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    if case.runtime == "cuda-graphs":
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), _autocast(case), torch.cuda.graph(graph):
            model(*inputs)
        step = graph.replay
    torch.cuda.reset_peak_memory_stats()
    times_ms, hosts_ms = _timed(step)
    peak_bytes = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kernels_us = _kernels_us(seen)
    figures = {
        "size": size,
        "step_ms": round(statistics.median(times_ms), 4),
        "step_ms_min": round(times_ms[0], 4),
        "step_ms_p90": round(times_ms[int(0.9 * (len(times_ms) - 1))], 4),
        "host_ms": round(statistics.median(hosts_ms), 4),
        "kernel_ms": round(sum(time_us for _, time_us in kernels_us) / 1e3, 4),
        "num_kernels": len(kernels_us),
        "peak_bytes": peak_bytes,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    ops = [
        {"op": op.key, "count": op.count, "device_us": round(op.self_device_time_total, 1)}
        for op in seen.key_averages()
        if op.self_device_time_total > 0 and op.device_type == DeviceType.CPU
    ]
    return figures, ops


def _step(
    case: StepCase, model: nn.Module, inputs: tuple[Tensor, ...], loss_of: Callable[[Tensor], Tensor]
) -> Callable[[], None]:
    called = torch.compile(model) if case.runtime == "compile" else model
    if case.phase == "infer":

        def infer() -> None:
            with torch.inference_mode(), _autocast(case):
                called(*inputs)

        return infer
    optimizer = _optimizer(case.optimizer, list(model.parameters()))

    def train() -> None:
        with _autocast(case):
            loss = loss_of(called(*inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train


def _autocast(case: StepCase) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if case.precision == "mixed" else contextlib.nullcontext()


def _optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    kind, _, how = name.partition("-")
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    options: dict[str, Any] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[how]
    return torch.optim.AdamW(parameters, lr=1e-5, **options)


def _timed(step: Callable[[], None], seconds: float = 1.0) -> tuple[list[float], list[float]]:
    """Returns 5 to 30 times of `step`, and those of the host in it, both in ms and sorted."""
    times_ms: list[float] = []
    hosts_ms: list[float] = []
    began = time.perf_counter()
    while len(times_ms) < 5 or (time.perf_counter() - began < seconds and len(times_ms) < 30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        hosts_ms.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        times_ms.append(1e3 * (time.perf_counter() - start))
    return sorted(times_ms), sorted(hosts_ms)


def _kernels_us(seen: profile) -> list[tuple[str, float]]:
    """Returns the kernels, fills and copies on the device, in order, with their times in us."""
    all_events: Any = seen.events()  # type: ignore[no-untyped-call]
    events = [e for e in all_events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return [(event.name, event.device_time_total) for event in sorted(events, key=lambda event: event.time_range.start)]


def measure_op(step: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Returns the time of an op on the device with a cold cache, that of the host to issue it, and its kernels."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            flushed.zero_()
            step()
        torch.cuda.synchronize()
    runs: list[list[float]] = []
    for name, time_us in _kernels_us(seen):
        if "Memset" in name or "FillFunctor<signed char>" in name:
            runs.append([])
        elif runs:
            runs[-1].append(time_us)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    host_us = 1e6 * (time.perf_counter() - start) / repeats
    torch.cuda.synchronize()
    return {
        "device_us": round(statistics.median(map(sum, runs)), 2),
        "host_us": round(host_us, 2),
        "num_kernels": len(runs[0]),
    }


class Table:
    """A CSV file that grows row by row."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, columns, restval="")
        self._writer.writeheader()

    def add(self, **row: Any) -> None:
        self._writer.writerow(row)
        self._file.flush()


def measure_steps(cases: Iterable[StepCase], directory: Path, seconds: float) -> None:
    """Writes steps.csv and step-ops.csv."""
    case_columns = [*StepCase.__dataclass_fields__]
    figures = ["step_ms", "step_ms_min", "step_ms_p90", "host_ms", "kernel_ms", "num_kernels", "peak_bytes"]
    columns = ["card", "torch", *case_columns, "size", *figures, "parameters", "error"]
    steps = Table(directory / "steps.csv", columns)
    step_ops = Table(directory / "step-ops.csv", [*case_columns, "op", "count", "device_us"])
    began = time.perf_counter()
    for case in cases:
        if time.perf_counter() - began > seconds:
            print(f"no time for {case}")
            continue
        machine = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        try:
            row, ops = measure_step(case)
        except (RuntimeError, ImportError) as error:  # out of memory, what a compiler refuses
            row, ops = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}, []
        steps.add(**machine, **asdict(case), **row)
        for op in ops:
            step_ops.add(**asdict(case), **op)
        print(f"{time.perf_counter() - began:.0f} s: {case} {row}", flush=True)
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def measure_ops(cases: Iterable[OpCase], directory: Path, seconds: float) -> None:
    """Writes ops.csv."""
    table = Table(directory / "ops.csv", ["card", "torch", "op", "case", "device_us", "host_us", "num_kernels"])
    began = time.perf_counter()
    for op, case, step in cases:
        if time.perf_counter() - began > seconds:
            print(f"no time for {op} {case} and what comes after it")
            return
        figures = measure_op(step, repeats=5 if op.startswith("optimizer") else 50)
        table.add(card=torch.cuda.get_device_name(), torch=torch.__version__, op=op, case=case, **figures)


def main(words: Sequence[str]) -> None:
    """Measures what the words of the command line say. InputError where there is no card."""
    cases_of: dict[str, Any] = {"steps": step_cases, "further-steps": further_step_cases}
    cases_of |= {"ops": op_cases, "further-ops": further_op_cases}
    if len(words) not in (2, 3) or words[0] not in cases_of:
        raise InputError(f"python -m benchmarks.card: {' or '.join(cases_of)} DIR [SECONDS] is expected")
    if not torch.cuda.is_available():
        raise InputError("python -m benchmarks.card: PyTorch sees no CUDA card; run it on a machine with one")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    directory = Path(words[1])
    directory.mkdir(parents=True, exist_ok=True)
    seconds = float(words[2]) if len(words) == 3 else float("inf")
    if words[0].endswith("steps"):
        measure_steps(cases_of[words[0]](), directory, seconds)
    else:
        measure_ops(cases_of[words[0]](_optimizer), directory, seconds)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
