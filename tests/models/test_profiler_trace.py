"""Traces of torch.profiler become measured op times."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from gdp.cli import main
from gdp.models.measured_times import MeasuredTimes
from gdp.models.pytorch import capture
from gdp.models.pytorch.profiler_trace import ProfilerTrace
from gdp.models.pytorch.signature import LIBRARY, signatures

CARD = "rtx4090-24g"
SOURCE = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 10)
    return nn.Sequential(*layers), (torch.randn(32, 64),)

def pooled():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), (torch.randn(2, 3, 8, 8),)

def product():
    return nn.Linear(8, 8), (torch.randn(4, 8),)

class Attention(nn.Module):
    def forward(self, *inputs):
        return nn.functional.scaled_dot_product_attention(*inputs)

def attending():
    return Attention(), tuple(torch.randn(2, 4, 8, 16) for _ in range(3))

def normed():
    return nn.BatchNorm2d(4, track_running_stats=False), (torch.randn(2, 4, 8, 8),)
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """The module `traced` in the current directory."""
    (tmp_path / "traced.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "traced", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def captured():
    """The step of `small`, captured once."""
    names: dict[str, object] = {}
    exec(SOURCE, names)
    return capture(*names["small"](), name="small")


def traced_steps(path: str, *, record_shapes: bool = True, is_scheduled: bool = True) -> None:
    """Writes a trace of three steps of `small`."""
    from traced import small

    module, inputs = small()
    optimizer = torch.optim.Adam(module.parameters())
    plan = schedule(wait=0, warmup=1, active=3, repeat=1) if is_scheduled else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=record_shapes, schedule=plan) as profiler:
        for _ in range(4 if is_scheduled else 3):
            optimizer.zero_grad()
            module(*inputs).mean().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(path)


@pytest.mark.parametrize("options", [{}, {"record_shapes": False}, {"is_scheduled": False}])
def test_a_cpu_trace_has_all_ops_of_a_step(options, captured):
    """With and without shapes and marks of steps, each op has a time of each step."""
    traced_steps("t.json", **options)
    trace = ProfilerTrace("t.json")
    assert len(trace.steps) == (0 if "is_scheduled" in options else 3)
    found = trace.times(captured.program)
    assert (found.num_matched, found.unmatched.total()) == (20, 0)  # 5 forward, 9 backward, 6 parameters
    by_name = {time.signature: time for time in found.op_times}
    (product,) = (time for name, time in by_name.items() if name.startswith("aten.addmm.default(float32[128]"))
    assert product.num_samples == 3
    events = [event for event in json.loads(Path("t.json").read_text())["traceEvents"] if event.get("ph") == "X"]
    wide_us = sorted(event["dur"] for event in events if event["name"] == "aten::addmm")
    assert product.median_ns in {round(us * 1e3) for us in wide_us}
    # an op within an op is counted once: all CPU ops of a thread take no longer than the outermost ones
    outermost_us, end = 0.0, 0.0
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["cat"] == "cpu_op" and event["ts"] >= end:
            outermost_us, end = outermost_us + event["dur"], event["ts"] + event["dur"]
    assert found.total_us == pytest.approx(outermost_us, rel=1e-3)


def test_place_reads_what_import_wrote(capsys):
    """`gdp place --times` has a measured time of every op on such a device."""
    traced_steps("t.json.gz")
    assert main(["times", "import", "t.json.gz", "--for", "traced:small", "--device", "cpu-16core"]) == 0
    printed = capsys.readouterr()
    assert "20 of 20 ops of traced:small have times; steps in the trace: 3" in printed.out
    assert "gdp place --times times.db" in printed.err
    asked = "--devices 2xcpu-16core --times times.db --placer single --parallel none --no-advice --no-cache --json"
    assert main(["place", "traced:small", *asked.split(), "--budget", "1sims", "--threads", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    times = MeasuredTimes("times.db")
    assert times.samples("traced:small") == [32]
    assert answer["status"] == "ok"


def event(category: str, name: str, start: float, duration: float, **args: object) -> dict[str, object]:
    """An event of one thread; a kernel runs on the card."""
    thread = 7 if category == "kernel" else 1
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def read(*sizes: list[int]) -> dict[str, object]:
    return {"Input Dims": list(sizes), "Input type": ["float"] * len(sizes)}


def card_trace() -> list[dict[str, object]]:
    """Two steps of `product` forward: a product in kernels by correlation and External id, a kernel of no op, and one
    of the step before."""
    addmm = read([8], [4, 8], [8, 8])
    return [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("cpu_op", "aten::addmm", 10, 20, **{"External id": 1}, **addmm),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=5),
        event("kernel", "splitk", 50, 30, correlation=5, **{"External id": 99}),
        event("kernel", "reduce", 80, 4, correlation=6, **{"External id": 1}),
        event("user_annotation", "ProfilerStep#2", 200, 100),
        event("cpu_op", "aten::addmm", 210, 20, **{"External id": 2}, **addmm),
        event("cuda_runtime", "cudaLaunchKernel", 212, 2, correlation=7),
        event("kernel", "splitk", 350, 40, correlation=7),
        event("cuda_runtime", "cudaLaunchKernel", 240, 2, correlation=8),
        event("kernel", "ncclKernel", 400, 26, correlation=8),
        event("kernel", "splitk", 5, 30, correlation=3),
    ]


def write(events: object, path: str = "t.json", card: str = "NVIDIA GeForce RTX 4090") -> None:
    Path(path).write_text(json.dumps({"deviceProperties": [{"id": 0, "name": card}], "traceEvents": events}))


def test_kernels_of_a_card_are_the_times_of_ops(capsys):
    """An op's time is the sum of its kernels, also of those that run after its step, and of the 1.5 us that pass
    behind each, the median over steps."""
    write(card_trace())
    assert main(["times", "import", "t.json", "--for", "traced:product", "--inference"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 ops of traced:product have times; steps in the trace: 2" in printed
    # 26 us of the 30 + 4 + 40 + 26 us of kernels
    assert "26.0% of the time of kernels belongs to no op" in printed
    assert "ncclKernel   0.02600 ms" in printed
    name = "aten.addmm.default(float32[8], float32[4, 8], float32[8, 8] strides [1, 8])"
    (time,) = MeasuredTimes("times.db").find(CARD, LIBRARY, [name]).values()
    # two kernels of 34 us and one of 40 us, with a gap for each 37 and 41.5 us: quartiles 38.125 and 40.375 us
    assert (time.median_ns, time.spread_ns, time.num_samples) == (39_250, 1_125, 2)


@pytest.mark.parametrize(
    ("model", "name", "sizes"),
    [
        ("attending", "_scaled_dot_product_efficient_attention", [[2, 4, 8, 16]] * 3 + [[]]),
        ("attending", "_scaled_dot_product_flash_attention", [[2, 4, 8, 16]] * 3 + [[]] * 3),
        ("normed", "cudnn_batch_norm", [[2, 4, 8, 8], [4], [4]]),
    ],
)
def test_ops_with_other_names_on_cards(model, name, sizes, capsys):
    """Attention and batch norm are captured as CPUs call them, and found by the names that cards have for them."""
    write(
        [
            event("cpu_op", f"aten::{name}", 10, 20, **read(*sizes)),
            event("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=5),
            event("kernel", "kernel", 50, 30, correlation=5),
        ]
    )
    assert main(["times", "import", "t.json", "--for", f"traced:{model}", "--inference"]) == 0
    assert f"1 of 1 ops of traced:{model} have times" in capsys.readouterr().out


def test_a_trace_without_sizes_says_so(capsys):
    """Without the sizes of tensors another batch would go unnoticed: a note says so."""
    traced_steps("t.json", record_shapes=False)
    assert main(["times", "import", "t.json", "--for", "traced:small", "--device", "cpu-16core"]) == 0
    assert "profile with record_shapes=True" in capsys.readouterr().err


def changed(number: int, **fields: object) -> list[dict[str, object]]:
    events = card_trace()
    events[number] = events[number] | fields
    return events


@pytest.mark.parametrize(
    ("events", "args", "reason"),
    [
        ({}, "", "t.json: is no trace (traceEvents)"),
        ([], "", "t.json: has no CPU ops"),
        (changed(3, dur=-1), "", "t.json: traceEvents[3]: dur is -1; a number of microseconds"),
        (changed(1, ts="now"), "", "t.json: traceEvents[1]: ts is 'now'"),
        (card_trace(), "--device cpu-16core", "t.json: has 4 kernels, and --device is cpu-16core"),
        (card_trace()[:3], "", "t.json: does not say what it ran on; name it with --device"),
        (card_trace()[:3], "--device l4-24g", "t.json: has 0 kernels, and --device is l4-24g"),
        (card_trace(), "--device l4-24g+cpu-16core", "has devices of 2 kinds"),
        (card_trace(), "--batch 2", "t.json: has times of 0 of 1 ops of traced:product; name the model"),
        (card_trace(), "--microbatches 2", "--microbatches: does not go with --for"),
        (card_trace(), "--out t.json", "t.json: cannot be used as a file of measured times"),
    ],
)
def test_other_traces_are_refused(events, args, reason, capsys):
    """What is no trace of MODEL's steps is refused in a line, and nothing is written."""
    write(events)
    assert main(["times", "import", "t.json", "--for", "traced:product", "--inference", *args.split()]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1
    assert not Path("times.db").exists()


def test_a_trace_of_another_model_is_refused(capsys):
    """A trace that has fewer than half of the ops is another model's."""
    traced_steps("t.json")
    assert main(["times", "import", "t.json", "--for", "traced:pooled", "--device", "cpu-16core"]) == 2
    assert "ops of traced:pooled; name the model" in capsys.readouterr().err


def test_equal_calls_are_told_apart_by_order(tmp_path):
    """Sums over other dimensions read equal tensors; where a step has as many, the first op has the first time."""

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sum(0), x.sum(1)

    found = capture(Sums(), (torch.zeros(4, 4),), name="sums", training=False)
    first, second = (name for name in signatures(found.program) if name.startswith("aten.sum"))
    sums = [event("cpu_op", "aten::sum", 100 * number, 10 + number, **read([4, 4])) for number in range(3)]

    def medians() -> tuple[int, int]:
        times = ProfilerTrace("t.json").times(found.program).op_times
        by_name = {time.signature: time.median_ns for time in times}
        return by_name[first], by_name[second]

    write(sums[:2])
    assert medians() == (10_000, 11_000)
    write(sums)  # three are no multiple of two: both have the median of all
    assert medians() == (11_000, 11_000)
