"""`gdp run` measures a plan beside one device, checks its results, and fails in one line."""

import json
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gdp
from benchmarks.op_times import measure_in_turn
from gdp import Cluster, Graph, Plan, Problem, simulate
from gdp.cli import main
from gdp.cluster.detect import host
from gdp.execute import measurement
from gdp.execute.backends import CPU, Target
from gdp.execute.equality import compare, eager_parts, full_precision
from gdp.execute.executable import Executable, read_executable
from gdp.execute.measurement import Measurement, PlacedProgram, measure_programs, one_device_order
from gdp.execute.plan_executor import DeviceRecord, ExecutionError, StepRecord
from gdp.execute.prediction import predict
from gdp.execute.run import (
    OTHER_SUMS_TOLERANCE,
    check_kinds,
    check_results,
    drawing_alike,
    first_step,
    machine_notes,
    op_times,
)
from gdp.graph.accumulation import accumulated
from gdp.models.measured_times import MeasuredTimes
from gdp.models.pytorch import Replay, capture
from gdp.models.pytorch.signature import signatures
from gdp.models.source import ModelSource
from gdp.search.batch_parts import Parts
from run_cases import CLUSTER, MODEL
from tiny_models import TINY, captured

CLUSTER_OF_TWO = gdp.Cluster.parse("2xcpu-16core")
ON = ["--on", "cpu,cpu"]  # also where there is one core only


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_models.py").write_text(MODEL)
    (tmp_path / "two.yaml").write_text(CLUSTER)
    return tmp_path


def place(model: str, *options: str) -> int:
    return main(
        ["place", model, "--devices", "two.yaml", "--parallel", "none", "--budget", "50sims", "--out", "p", *options]
    )


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*args, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_programs_on_gpus_are_measured_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs that take turns on a GPU would take each other's memory; on cores they do take turns."""
    steps, alive = list[tuple[str, int]](), set[str]()

    class Executor:
        def __init__(self, _program: Any, order: str, _targets: Any) -> None:
            self.name = order
            alive.add(order)

        def load(self, _content: Any) -> None: ...

        def step(self, _content: Any, *, is_timed: bool) -> None:
            steps.append((self.name, len(alive)))

        def close(self) -> None:
            alive.remove(self.name)

    monkeypatch.setattr(measurement, "host_executor", Executor)
    monkeypatch.setattr(Measurement, "add", lambda *_: None)
    program: Any = SimpleNamespace(graph=SimpleNamespace(num_ops=1))
    orders: Any = ["a", "b"]
    programs = {order: PlacedProgram(program, {}, order) for order in orders}
    for device, expected in (("cuda:0", "aabb"), ("cpu", "abab")):
        steps.clear()
        found = measure_programs(programs, [Target("x", torch.device(device))], steps=2, warm_up_steps=0)
        assert [*found] == ["a", "b"]
        assert "".join(name for name, _ in steps) == expected
        assert {count for _, count in steps} == {1 if device == "cuda:0" else 2}


@pytest.mark.parametrize(("model", "reference"), [("net", "PyTorch's own step"), ("dropping", "one core")])
def test_place_with_measured_times(here: Path, capsys: pytest.CaptureFixture[str], model: str, reference: str) -> None:
    """A plan is run, and the next one is placed with the times that were measured."""
    model = f"run_models:{model}"
    assert place(model) == 0
    plan = ["--plan", "p/plan.json", *ON, "--steps", "3"]
    found = answer(capsys, "run", model, *plan, "--times", "new/times.db")
    assert found["results"]["equal"]
    assert reference in found["results"]["reference"]
    assert found["results"]["bit_equal_tensors"] == found["results"]["tensors"] > 4
    assert found["steps"] == len(found["step_times_ns"]) == len(found["one_device"]["step_times_ns"]) == 3
    assert found["speedup"] == found["one_device"]["step_time_ns"] / found["step_time_ns"]
    assert found["error"] == found["predicted_step_time_ns"] / found["step_time_ns"] - 1
    devices = found["prediction"]["devices"]
    assert sum(device["num_ops"] for device in devices) == len(Plan.load("p/plan.json").placement)

    asked = ("--devices", "two.yaml", "--budget", "50sims", "--parallel", "none", "--out", "p")
    placed = answer(capsys, "place", model, *asked, "--times", "new/times.db")
    assert all(count["measured"] > 0 and not count["roofline"] for count in placed["op_times"].values())
    again = answer(capsys, "run", model, *plan)
    assert again["predicted_step_time_ns"] == placed["step_time_ns"]
    assert main(["run", model, *plan]) == 0
    text = capsys.readouterr().out
    assert "bit for bit" in text
    assert "What explains most of the error" in text
    assert main(["simulate", "p/graph.json.gz", "--devices", "p/cluster.json", "--plan", "p/plan.json"]) == 0


def test_layouts_with_measured_times(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times of the ops of half batches, and of the whole one on one device, are those of whole steps and layouts."""
    asked = ("run_models:net", "--devices", "two.yaml", "--budget", "50sims")
    answer(capsys, "place", *asked, "--out", "p", "--parallel", "data=2,zero=1")
    answer(capsys, "run", "p/plan.json", *ON, "--steps", "2", "--times", "t.db")
    assert MeasuredTimes("t.db").samples("run_models:net") == [4, 8]
    half = answer(capsys, "place", *asked, "--out", "q", "--parallel", "data=2", "--times", "t.db")
    whole = answer(capsys, "place", *asked, "--parallel", "none", "--times", "t.db")
    phases = Counter(Graph.load("q/graph.json.gz").phases)
    for found, num_updates in ((half, phases["update"]), (whole, phases["update"] // 2)):
        counts = found["op_times"].values()
        assert all(count["measured"] > 0 and count["roofline"] <= 3 * num_updates for count in counts), counts
    assert answer(capsys, "simulate", "q/plan.json")["step_time_ns"] == half["step_time_ns"]
    assert answer(capsys, "run", "q/plan.json", *ON, "--steps", "1")["results"]["equal"]
    Path("q/graph.json.gz").unlink()  # MODEL is read anew, with its times
    assert answer(capsys, "simulate", "q/plan.json")["step_time_ns"] == half["step_time_ns"]


def test_each_run_has_its_own_ops(here: Path) -> None:
    """Times of a cut step belong to half batches, and those of one device beside it to the whole batch."""
    assert place("run_models:net", "--parallel", "data=2") == 0
    plan = Plan.load("p/plan.json")
    executable = read_executable(ModelSource("run_models:net"), plan=plan)
    whole, half = executable.capture.program, executable.parts
    assert half is not None

    def lasting(duration_ns: int, num_ops: int) -> Any:
        device = DeviceRecord({}, range(num_ops), [0] * num_ops, [duration_ns] * num_ops, [0] * num_ops)
        return SimpleNamespace(records=[StepRecord((device,), 0, duration_ns)])

    result: Any = SimpleNamespace(placed=lasting(10, half.graph.num_ops), one_device=lasting(30, whole.graph.num_ops))
    stored = {each.signature: each.median_ns for each in op_times(executable, result, ["core"])["core"]}
    of_whole, of_half = (set(signatures(program)) for program in (whole, half.part))
    assert {stored[name] for name in of_whole - of_half} == {30}
    assert {stored[name] for name in of_half - of_whole} == {10}
    assert stored.keys() == of_whole | of_half


def test_a_card_that_waited_for_its_host_tells_no_time(here: Path) -> None:
    """A card comes to a product at 100 us, when its host has issued it, and to a mean at 141 us. A host that has issued
    the mean at 142 us held the card up, so the mean has no time. On CPUs nothing is issued ahead."""
    executable = read_executable(ModelSource("run_models:net"), plan=None)
    names = executable.signatures()
    ops = [names.index(next(name for name in names if name.startswith(kind))) for kind in ("aten.addmm", "aten.mean")]

    def stored(*issued_ns: int) -> dict[str, int]:
        device = DeviceRecord({}, ops, (100_000, 141_000), (130_000, 191_000), (0, 0), issued_ns=issued_ns)
        steps = [StepRecord((device.shifted(by_ns),), 0, 1) for by_ns in (0, 10**6)]
        result: Any = SimpleNamespace(placed=SimpleNamespace(records=steps), one_device=None)
        return {each.signature: each.median_ns for each in op_times(executable, result, ["card"])["card"]}

    product, mean = (names[op] for op in ops)
    assert stored() == {product: 30_000, mean: 50_000}
    assert stored(40_000, 142_000) == {product: 30_000}
    assert stored(60_000, 141_000) == {product: 30_000, mean: 50_000}


def test_times_are_of_the_kind_of_device_that_runs(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core is no P100 and an H100 no L4: their times are not stored under these names."""
    cards = ["--devices", "2xp100-pcie-16g", "--parallel", "none", "--budget", "5sims", "--out", "p"]
    assert main(["place", "run_models:net", *cards]) == 0
    capsys.readouterr()
    assert main(["run", "p/plan.json", *ON, "--steps", "1", "--times", "t.db"]) == 2
    assert "gpu0 of the plan is a p100-pcie-16g, and runs on any core" in capsys.readouterr().err
    assert not Path("t.db").exists()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100 80GB HBM3")
    gpu, core = Target("gpu0", torch.device("cuda", 0)), Target("cpu0", CPU)
    check_kinds([gpu, core], Cluster.parse("h100-sxm-80g+cpu-16core"))
    check_kinds([core, core], Cluster.parse("two.yaml"))
    check_kinds([gpu], Cluster.parse("l4-24g"), is_named=False)
    for target, kind in ((gpu, "l4-24g"), (gpu, "cpu-16core")):
        with pytest.raises(gdp.InputError, match=r"cuda:0 \(h100-sxm-80g\); place it with --devices local"):
            check_kinds([target], Cluster.parse(kind))


def test_plans_without_a_cluster(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The devices are neither beside the plan nor where it was asked, so nothing is predicted."""
    assert place("run_models:net") == 0
    Path("p/cluster.json").unlink()
    Path("two.yaml").unlink()
    found = answer(capsys, "run", "run_models:net", "--plan", "p/plan.json", "--steps", "1", *ON)
    assert "prediction" not in found
    assert main(["run", "run_models:net", "--plan", "p/plan.json", "--times", "t.db", *ON]) == 2
    assert "say them with --devices" in capsys.readouterr().err
    assert not Path("t.db").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "run_models:wide"}, "run_models:wide is not what was placed"),
        ({"model": "p/graph.json.gz"}, "does not say what its ops execute"),
        ({"model": "p/model.onnx"}, "an ONNX file is placed, not executed"),
        ({"--plan": "absent.json"}, "no such file"),
        ({"--on": "cpu"}, "--on names 1 devices; the plan has 2"),
        ({"--on": "cpu,cuda:63"}, "there is no cuda:63 here"),
        ({"--devices": "2xp100-pcie-16g"}, "the plan is for other devices than 2xp100-pcie-16g"),
        ({"--times": "run_models.py"}, "cannot be used as a file of measured times"),
        ({"--optimizer": "lion"}, "one of adam, adamw, sgd, sgd-momentum, adafactor, adam-8bit is expected"),
        ({"--optimizer": "adam-8bit"}, "placed, not executed: adam-8bit is computed by kernels of bitsandbytes"),
        ({"--optimizer": "sgd"}, "asked with no --optimizer, not --optimizer sgd; leave"),
        ({"--steps": "0"}, "--steps"),
    ],
    ids=str,
)
def test_bad_input(here: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], message: str) -> None:
    """Bad input is one line."""
    assert place("run_models:net") == 0
    options = {"--plan": "p/plan.json", "--on": "cpu,cpu"} | change
    model = options.pop("model", "run_models:net")
    capsys.readouterr()
    assert main(["run", model, *(word for pair in options.items() for word in pair)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("gdp: error")]
    assert message in line


def test_differences_are_named() -> None:
    """A difference of results is found, and its tensor named."""

    def replay(value: float, more: torch.Tensor | None = None) -> Replay:
        outputs = {"": torch.tensor([2.0])} | ({} if more is None else {"more": more})
        return Replay(torch.tensor(1.0), outputs, {"w": torch.tensor([1.0, 4.0, value])}, {"ours": torch.ones(1)})

    nan = float("nan")
    assert compare(replay(3.0), replay(3.0)).is_exact
    found = compare(replay(3.5), replay(3.0))
    assert (found.num_tensors, found.num_equal, found.where) == (4, 3, "'w' of the gradients")
    assert found.largest_difference == 0.5 / 4
    assert compare(replay(nan), replay(nan)).is_exact
    assert compare(replay(nan, torch.tensor(1.0)), replay(3.0, torch.tensor(1.1))).largest_difference == float("inf")
    for here, there in (
        (torch.tensor(1 + 1j), torch.tensor(1 + 2j)),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.tensor(3), torch.tensor(4)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.tensor(1.0), None),
    ):
        found = compare(replay(3.0, here), replay(3.0, there))
        assert not found.is_exact
        assert found.where == "'more' of the outputs"
        assert not found.is_close(0.0)
    assert compare(replay(3.0, torch.ones(1)), replay(3.0, torch.zeros(1)), {"more"}).is_exact


@pytest.mark.parametrize("name", ["gpt2", "inception", "dlrm", "t5"])
def test_programs_compute_what_pytorch_does(name: str) -> None:
    """The program computes the results of PyTorch."""
    model, args, kwargs = TINY[name]()
    for part in model.modules():
        if hasattr(part, "fraction"):
            part.fraction = 0.0
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    program = capture(model, args, kwargs, name=name).program
    found = compare(program.replay(model, args, kwargs), eager_parts(program, model, [(args, kwargs)]))
    assert found.is_exact, found
    assert found.num_tensors > len(dict(model.named_parameters()))


def test_random_numbers_of_the_comparison() -> None:
    """Random numbers to compare with are drawn on the same type of device."""
    program = captured("gnmt").program
    num_ops = program.graph.num_ops
    order = [np.arange(0, num_ops, 2), np.arange(1, num_ops, 2)]
    gpu, cpu = Target("cuda0", torch.device("cuda", 0)), Target("cpu0", CPU)
    drawing = [op for op, calls in enumerate(program.calls) if any(call.seed >= 0 for call in calls)]
    on_gpu, on_cpu, on_host = drawing_alike(program, order, (gpu, cpu))
    assert on_gpu.tolist() == [op for op in drawing if not op % 2]
    assert 0 < len(on_gpu) < len(drawing)
    assert not len(on_cpu)
    assert sorted([*on_gpu, *on_host]) == list(range(num_ops))


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("name", ["resnet", "bert", "gnmt", "vit"])
def test_other_kernels_are_as_right(name: str) -> None:
    """oneDNN's kernels and PyTorch's own differ as those of two devices do."""
    torch.manual_seed(0)
    model, args, kwargs = TINY[name]()
    executable = Executable(captured(name), model, args, kwargs)
    program, content, targets = executable.capture.program, executable.content(), [Target("cpus", CPU, (0, 1))]
    order = one_device_order(program.graph.num_ops, 0, 1)
    with torch.backends.mkldnn.flags(enabled=False):
        found = first_step(program, order, targets, content)
    assert check_results(executable, content, found, order, targets)[0].is_close(OTHER_SUMS_TOLERANCE)
    wrong = replace(found, gradients={path: 2.0 * gradient for path, gradient in found.gradients.items()})
    assert not check_results(executable, content, wrong, order, targets)[0].is_close(OTHER_SUMS_TOLERANCE)


def test_full_precision() -> None:
    """Results are compared in full precision."""
    before = torch.backends.cudnn.conv.fp32_precision
    with full_precision():
        assert {torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision} == {"ieee"}
    assert torch.backends.cudnn.conv.fp32_precision == before


def test_predictions_add_up() -> None:
    """The parts of a prediction add up."""
    model, args, kwargs = TINY["gnmt"]()
    found = captured("gnmt")
    cluster = Cluster.parse("2xp100-pcie-16g")
    problem = Problem.build(found.graph, cluster)
    groups = found.graph.groups
    placement = np.arange(found.graph.num_ops) // 40 % 2
    for group in set(groups[groups >= 0].tolist()):
        placement[groups == group] = placement[groups == group][0]
    simulation = simulate(problem, placement)
    targets = [Target("a", CPU), Target("b", CPU)]
    content = found.program.bind(model, args, kwargs)
    measurement = measure_in_turn(found.program, content, {"plan": simulation.order}, targets, steps=4)["plan"]
    made = predict(found.program, simulation, measurement, num_listed=10**6)
    assert made.predicted_step_ns == simulation.step_time_ns
    assert made.measured_step_ns == measurement.median_step_ns
    for listed in (made.kinds, made.ops):
        assert sum(row.predicted_ns for row in listed) == sum(device.predicted_busy_ns for device in made.devices)
        assert sum(row.measured_ns for row in listed) == sum(device.busy_ns for device in made.devices)
        assert sum(row.num_ops for row in listed) == found.graph.num_ops
        errors = [abs(row.error_ns) for row in listed]
        assert errors == sorted(errors, reverse=True)
    assert {(row.source, row.destination) for row in made.hand_overs} <= {
        (a.name, b.name) for a in cluster.devices for b in cluster.devices if a is not b
    }
    assert all(row.measured_ns >= 0 for row in made.hand_overs)


def test_run_in_python(here: Path) -> None:
    """`gdp.run` does what the command does."""
    torch.manual_seed(0)
    model, args = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), (torch.randn(5, 8),)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().sum()

    graph = gdp.capture(model, args, name="net", loss=loss).graph
    cluster = Cluster.parse("two.yaml")
    plan = gdp.place(graph, cluster, budget="50sims")
    made = gdp.run(model, args, plan=plan, on=["cpu", "cpu"], cluster=cluster, steps=2, loss=loss)
    assert made.equality.is_exact
    assert made.prediction is not None
    assert made.prediction.predicted_step_ns == plan.step_time_ns
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_outputs_in_parameters(here: Path) -> None:
    """An output in the memory of a parameter is no difference."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.linear(x).square().sum(), self.linear.bias

    model, args = Net(), (torch.randn(3, 4),)
    model.linear.bias.grad = torch.ones(4)
    plan = gdp.place(gdp.capture(model, args, name="net").graph, Cluster.parse("two.yaml"), budget="20sims")
    made = gdp.run(model, args, plan=plan, on=["cpu", "cpu"], steps=1)
    assert made.equality.is_exact
    assert model.linear.bias.grad.tolist() == [1.0] * 4


def test_a_device_that_is_too_small(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one device is too small for the whole step, the plan is run alone."""
    model, args = nn.Linear(4, 4), (torch.randn(3, 4),)
    plan = gdp.place(gdp.capture(model, args, name="net").graph, Cluster.parse("two.yaml"), budget="20sims")

    def too_small(arms: Any, *rest: Any, **options: Any) -> Any:
        if len(arms) > 1:
            raise ExecutionError("cpu0", "op 'mm'", torch.OutOfMemoryError("no more"))
        return measure_programs(arms, *rest, **options)

    monkeypatch.setattr("gdp.execute.run.measure_programs", too_small)
    made = gdp.run(model, args, plan=plan, on=["cpu", "cpu"], steps=2)
    assert made.one_device is None
    assert made.speedup is None
    assert len(made.placed.step_ns) == 2


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan, or another MODEL with it."""
    assert main(["run", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "A gdp-plan file, which knows its MODEL; or a MODEL, with --plan." in text


def test_what_is_odd_about_the_machine_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two devices on one core, and a core that is not the plan's processor, are each said in one sentence."""
    core = host.available_cores()[0]
    targets = [Target("cpu0", CPU, (core,)), Target("cpu1", CPU, (core,))]
    notes = list(machine_notes(targets, Cluster.parse("2xcpu-16core")))
    assert f"cpu0 and cpu1 share core {core}" in notes[0]
    assert f"cpu1 runs on core {core}" in notes[2]
    assert "is not a cpu-16core" in notes[2]
    own = [note for note in machine_notes([targets[0], Target("cpu1", CPU)], None) if "busy" not in note]
    assert own == []
    assert place("run_models:net") == 0
    arguments = ["run", "run_models:net", "--plan", "p/plan.json", "--steps", "1", "--on", f"cpu:{core},cpu:{core}"]
    assert f"share core {core}" in " ".join(answer(capsys, *arguments)["notes"])


def test_interrupts(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt gives the results of the steps done."""
    assert place("run_models:net") == 0
    add, steps = Measurement.add, []

    def interrupt_after_three(self: Measurement, record: StepRecord) -> None:
        add(self, record)
        steps.append(record)
        if len(steps) == 6:  # three of the plan, and three on one device
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Measurement, "add", interrupt_after_three)
    capsys.readouterr()
    arguments = ["run", "run_models:net", "--plan", "p/plan.json", "--steps", "100000", "--json", *ON]
    assert main(arguments) == 130
    printed = capsys.readouterr()
    assert json.loads(printed.out)["steps"] == 3
    assert "3 of 100,000 steps were run" in printed.err


def test_errors_in_python() -> None:
    """Errors in Python name Python's own arguments."""
    model, args = nn.Linear(8, 4), (torch.zeros(8, 8),)
    graph = gdp.capture(model, args, name="linear").graph
    cluster = gdp.Cluster.parse("2xcpu-16core")
    plan = gdp.place(graph, cluster, budget="5sims")
    with pytest.raises(gdp.InputError, match=r"^on names 1 devices; the plan has 2"):
        gdp.placed(model, plan, on=["cpu"])
    with pytest.raises(gdp.InputError, match=r"^on .tpu.: cpu"):
        gdp.placed(model, plan, on=["cpu", "tpu"])
    with pytest.raises(gdp.InputError, match="inference or training, the optimizer") as error:
        gdp.placed(nn.Linear(4, 4), plan, on=["cpu", "cpu"])(torch.zeros(8, 4))
    assert "--" not in str(error.value)


def test_micro_batches() -> None:
    """A plan of micro-batches is run."""
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(8, 8)
    one = gdp.capture(model, (batch[:2],), name="Sequential").graph
    graph = accumulated(one, 4)
    plan = gdp.place(graph, gdp.Cluster.parse("2xcpu-16core"), budget="20sims")
    made = gdp.run(model, (batch,), plan=plan, on=["cpu", "cpu"], steps=1)
    assert made.layout == "microbatches=4"
    assert made.equality.is_exact
    assert made.whole_batch is not None
    assert made.whole_batch.is_close(1e-5)


LAYOUTS = [
    "data=2",
    "data=2,microbatches=3:1",
    "data=2,microbatches=2,zero=2",
    "data=2,zero=3",
    "microbatches=4,stages=2",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_of_a_layout_is_run(here: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    """Sums of two parts, and of one replica, are bit for bit PyTorch's; others differ by rounding."""
    assert place("run_models:net", "--parallel", layout) == 0
    capsys.readouterr()
    found = answer(capsys, "run", "run_models:net", "--plan", "p/plan.json", "--steps", "2", *ON)
    assert sorted(found["layout"].split(",")) == sorted(layout.split(","))
    assert found["results"]["equal"]
    assert found["whole_batch_difference"] < 1e-5
    is_exact = layout in ("data=2", "data=2,zero=3", "microbatches=4,stages=2")
    assert (found["results"]["bit_equal_tensors"] == found["results"]["tensors"]) >= is_exact


def test_batches_in_flight_are_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each batch has the results of PyTorch's forward pass."""
    options = ["--devices", "two.yaml", "--inference", "--batches", "3", "--budget", "20sims", "--out", "p"]
    assert main(["place", "run_models:net", *options]) == 0
    found = answer(capsys, "run", "run_models:net", "--inference", "--plan", "p/plan.json", "--steps", "2", *ON)
    assert found["results"]["bit_equal_tensors"] == found["results"]["tensors"] >= 12
    assert found["batches"]["batch_ns"] > 0
    assert found["batches"]["latency_ns"] >= found["batches"]["batch_ns"]


class Steps(nn.Module):
    """Reads [steps, batch]: the batch is the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(11, 8), nn.GRU(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.cell(self.embedding(tokens))[0].mean()


def test_layouts_in_python() -> None:
    """Python runs layouts, whatever dimension the batch is."""
    model, tokens = Steps(), torch.randint(11, (5, 8))

    def part(count: int) -> gdp.Graph:
        return gdp.capture(model, (tokens[:, : 8 // count].clone(),), name="Steps").graph

    layout = gdp.Layout.parse("data=2,microbatches=2")
    plan = gdp.place(Parts(part, 8), CLUSTER_OF_TWO, parallel=layout, budget="5sims")
    made = gdp.run(model, (tokens,), plan=plan, on=["cpu", "cpu"], steps=1)
    assert made.is_equal
    assert made.whole_batch is not None
    assert made.whole_batch.is_close(1e-5)


def test_batches_in_flight() -> None:
    """Python runs batches in flight."""
    model, args = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),)
    graph = gdp.capture(model, args, name="Sequential", training=False).graph
    plan = gdp.place(graph, CLUSTER_OF_TWO, batches=3, budget="5sims")
    made = gdp.run(model, args, plan=plan, on=["cpu", "cpu"], steps=1, training=False)
    assert made.equality.is_exact
    assert made.layout.startswith("3 batches in flight")
