"""Measures training and inference steps, or single ops, on the CUDA card of this machine.

    python -m benchmarks.card steps DIR [SECONDS]    DIR/steps.csv, and the device time of their ops in DIR/step-ops.csv
    python -m benchmarks.card ops DIR [SECONDS]      DIR/ops.csv

Each row is saved as it ends; what the time is too short for is left out. It needs a card, and for steps timm and
Transformers. Rows that were made so are in `benchmarks/data/`.
"""

import contextlib
import csv
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from gdp.errors import InputError

WARM_UP = 3  # steps
FLUSHED_BYTES = 128 * 2**20  # more than the second-level cache of any card
EXAMPLE = tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor], int]  # module, inputs, loss, size
Make = Callable[[int], EXAMPLE]  # of a number of samples


@dataclass(frozen=True, slots=True)
class StepCase:
    """A step as it is measured: how many samples, in which numbers and memory format, and how it is run."""

    model: str
    phase: str  # train, infer
    batch: int  # samples
    precision: str  # mixed (autocast to bfloat16), bfloat16, float32 (with TF32)
    memory_format: str  # nchw, nhwc; "" for text
    runtime: str  # eager, compile, cuda-graphs
    optimizer: str = ""  # sgd (with momentum), adamw-loop, adamw-foreach, adamw-fused


def image_model(name: str, size: int = 224) -> Make:
    """Returns a maker of timm's model of that name, with images of `size`."""

    def make(batch: int) -> EXAMPLE:
        import timm

        images = torch.randn(batch, 3, size, size, device="cuda")
        classes = torch.randint(0, 1000, (batch,), device="cuda")
        return timm.create_model(name), (images,), lambda out: functional.cross_entropy(out.float(), classes), size

    return make


class Logits(nn.Module):
    """A Transformers model that takes token ids and returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


def text_model(config: str, num_tokens: int, head: str, **sizes: Any) -> Make:
    """Returns a maker of the Transformers model of a config class with these sizes, with fused attention."""

    def make(batch: int) -> EXAMPLE:
        import transformers

        described = getattr(transformers, config)(**sizes)
        model = getattr(transformers, head).from_config(described, attn_implementation="sdpa")
        model.config.use_cache = False
        ids = torch.randint(0, model.config.vocab_size, (batch, num_tokens), device="cuda")
        return Logits(model), (ids,), partial(_token_loss, ids), num_tokens

    return make


class Lstm(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 1024)
        self.lstm = nn.LSTM(1024, 1024, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(1024, 10_000)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.lstm(self.embedding(ids))[0])
        return logits


def lstm(batch: int) -> EXAMPLE:
    """Makes `Lstm` with 64 tokens a sample."""
    ids = torch.randint(0, 10_000, (batch, 64), device="cuda")
    return Lstm(), (ids,), partial(_token_loss, ids), 64


def mlp(batch: int) -> EXAMPLE:
    """Makes 16 linear layers of 4,096 with ReLU."""
    model = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(4096, 4096), nn.ReLU())])
    return model, (torch.randn(batch, 4096, device="cuda"),), lambda out: out.float().square().mean(), 4096


def _token_loss(ids: Tensor, logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


_CAUSAL = "AutoModelForCausalLM"
_BERT_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
}
_QWEN: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
_QWEN |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
TEXTS = {
    "hf:gpt2": text_model("GPT2Config", 1024, _CAUSAL),
    "hf:llama-1.1b": text_model("LlamaConfig", 2048, _CAUSAL, num_key_value_heads=4, vocab_size=32_000, **_LLAMA),
    "hf:bert-large": text_model("BertConfig", 512, "AutoModelForMaskedLM", **_BERT_LARGE),
    "hf:qwen3-0.6b": text_model("Qwen3Config", 1024, _CAUSAL, tie_word_embeddings=True, **_QWEN),
}
IMAGES = {
    f"timm:{name}": image_model(name)
    for name in (
        *("resnet50", "vit_base_patch16_224", "convnext_tiny", "efficientnet_b0", "mobilenetv3_large_100"),
        *("swin_tiny_patch4_window7_224", "resnext50_32x4d", "densenet121", "regnety_032", "mixer_b16_224"),
    )
} | {"timm:inception_v3": image_model("inception_v3", 299)}
MODELS: Mapping[str, Make] = {**TEXTS, **IMAGES, "lstm": lstm, "mlp": mlp}


def step_cases() -> Iterator[StepCase]:
    """Yields the steps to measure, the most telling first."""
    images = list(IMAGES)
    for name in TEXTS:
        for batch in (1, 8):
            yield StepCase(name, "train", batch, "mixed", "", "eager", "adamw-fused")
        yield StepCase(name, "infer", 8, "bfloat16", "", "eager")
    for name in images[:6]:
        yield from _image_steps(name, "eager")
    yield StepCase("lstm", "train", 64, "mixed", "", "eager", "adamw-fused")
    yield StepCase("mlp", "train", 256, "bfloat16", "", "eager", "adamw-foreach")
    for name in images[:2]:
        yield StepCase(name, "train", 16, "mixed", "nhwc", "eager", "sgd")
        yield StepCase(name, "train", 128, "mixed", "nchw", "eager", "sgd")
        yield StepCase(name, "train", 128, "float32", "nchw", "eager", "sgd")
        yield StepCase(name, "infer", 8, "mixed", "nhwc", "cuda-graphs")
        yield StepCase(name, "infer", 256, "mixed", "nchw", "eager")
    for optimizer in ("adamw-foreach", "adamw-loop"):
        yield StepCase("hf:gpt2", "train", 8, "mixed", "", "eager", optimizer)
    for precision in ("bfloat16", "float32"):
        yield StepCase("hf:gpt2", "train", 8, precision, "", "eager", "adamw-fused")
    for runtime in ("cuda-graphs", "eager"):
        yield StepCase("hf:gpt2", "infer", 1, "bfloat16", "", runtime)
    for name in images[6:]:
        yield from _image_steps(name, "eager")
    for name in ("hf:gpt2", "timm:resnet50", "timm:vit_base_patch16_224", "timm:convnext_tiny", "hf:llama-1.1b"):
        if name in TEXTS:
            yield StepCase(name, "train", 8, "mixed", "", "compile", "adamw-fused")
            yield StepCase(name, "infer", 8, "bfloat16", "", "compile")
        else:
            yield from _image_steps(name, "compile")
    for name in images[2:6]:
        yield StepCase(name, "train", 128, "mixed", "nchw", "eager", "sgd")
    for name in ("hf:gpt2", "hf:llama-1.1b"):
        for batch in (2, 4):
            yield StepCase(name, "train", batch, "mixed", "", "eager", "adamw-fused")


def _image_steps(name: str, runtime: str) -> Iterator[StepCase]:
    yield StepCase(name, "train", 128, "mixed", "nhwc", runtime, "sgd")
    yield StepCase(name, "infer", 256, "mixed", "nhwc", runtime)


def measure_step(case: StepCase) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the figures of a step, and the device time of each of its operators in us.

    Each time is from an idle card to an idle card; `host_ms` ends when the host has issued the step; `kernel_ms` is the
    sum over its kernels, under a profiler; `peak_bytes` is what PyTorch had allocated at most.
    """
    torch.manual_seed(0)
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
    events = [event for event in all_events if event.device_type == DeviceType.CUDA]
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


def measure_steps(directory: Path, seconds: float) -> None:
    """Writes steps.csv and step-ops.csv."""
    case_columns = [*StepCase.__dataclass_fields__]
    figures = ["step_ms", "step_ms_min", "step_ms_p90", "host_ms", "kernel_ms", "num_kernels", "peak_bytes"]
    columns = ["card", "torch", *case_columns, "size", *figures, "parameters", "error"]
    steps = Table(directory / "steps.csv", columns)
    step_ops = Table(directory / "step-ops.csv", [*case_columns, "op", "count", "device_us"])
    began = time.perf_counter()
    for case in step_cases():
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


def measure_ops(directory: Path, seconds: float) -> None:
    """Writes ops.csv."""
    from benchmarks.card_ops import op_cases

    table = Table(directory / "ops.csv", ["card", "torch", "op", "case", "device_us", "host_us", "num_kernels"])
    began = time.perf_counter()
    for op, case, step in op_cases(_optimizer):
        if time.perf_counter() - began > seconds:
            print(f"no time for {op} {case} and what comes after it")
            return
        figures = measure_op(step, repeats=5 if op.startswith("optimizer") else 50)
        table.add(card=torch.cuda.get_device_name(), torch=torch.__version__, op=op, case=case, **figures)


def main(words: Sequence[str]) -> None:
    """Measures what the words of the command line say. InputError where there is no card."""
    if len(words) not in (2, 3) or words[0] not in ("steps", "ops"):
        raise InputError("python -m benchmarks.card: steps DIR [SECONDS] or ops DIR [SECONDS] is expected")
    if not torch.cuda.is_available():
        raise InputError("python -m benchmarks.card: PyTorch sees no CUDA card; run it on a machine with one")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    directory = Path(words[1])
    directory.mkdir(parents=True, exist_ok=True)
    measure = measure_steps if words[0] == "steps" else measure_ops
    measure(directory, float(words[2]) if len(words) == 3 else float("inf"))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
