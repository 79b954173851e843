"""Runs commands on files that were changed at random, in processes with limits of time and memory.

python tests/mutation_cases.py [--cases 1000] [KIND ...]      prints a table, and faults
python tests/mutation_cases.py KIND:NUMBER                                 runs one case again, with its traceback

A case is good if the command ends with 0, 2 or 3 in time, raises nothing, prints no character that does something to a
terminal, and says a status of 2 or 3 in a line.
"""

import argparse
import contextlib
import io
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from mutations import (
    change_bytes,
    gzip_file,
    json_file,
    kept_file,
    onnx_file,
    option_text,
    tensor_file,
    times_file,
    yaml_file,
)

CASE_SECONDS = 5.0
MEMORY_BYTES = 2 * 2**30  # of a process
_LOADED_BYTES = 512 * 2**20  # of them, what a command loads; this process has more, of other tests
_STUCK_SECONDS = 60.0  # in compiled code, which no exception ends
_BATCH = 50  # cases of one process
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name in the directory, how it is changed, and commands that read it ({}: the text)."""

    file: str
    change: Callable[[bytes, Random], bytes]
    commands: tuple[str, ...]
    seconds: float = CASE_SECONDS
    needs_model: bool = False  # seconds to make or to read


_ON = "--devices 2xp100-pcie-16g"
_KEPT = "--placer single --budget 1sims --threads 1 --no-advice --out out --json"
_PLACE = f"{_KEPT} --no-cache"
_POLICY = f"{_PLACE.replace('single', 'gdp-zero-shot')} --checkpoint policy.safetensors"
_TRAIN = f"train graph.json {_ON} --out trained.safetensors --updates 2 --samples 2 --threads 1"
_COMPARE = "compare plan.json --placers single --seeds 1 --budget 1sims"
_SWEEP = "place graph.json --devices p100-pcie-16g --sweep devices=1 --budget 1sims --threads 1 --no-cache"
_INFERENCE = "--out g.json --inference"
_GGUF = f"capture m.gguf?batch=1&sequence=4 {_INFERENCE}"
_LAYOUT = tuple(f"export layout/plan.json --to {name} --out o" for name in ("torch-fsdp", "torchtitan", "megatron"))
_SERVED = f"place hf:hf?batch=1&sequence=4 --inference {_ON} {_KEPT}"
KINDS = {
    "graph": Kind("graph.json", json_file, (f"place graph.json {_ON} {_PLACE}",)),
    "graph-gz": Kind("graph.json.gz", gzip_file, (f"place graph.json.gz {_ON} {_PLACE}",)),
    "graph-columns": Kind("graph.safetensors", tensor_file, (f"place graph.safetensors {_ON} {_PLACE}",)),
    "cluster": Kind("c.json", json_file, ("devices show c.json", f"place graph.json --devices c.json {_PLACE}")),
    "cluster-yaml": Kind("c.yaml", yaml_file, ("devices show c.yaml", f"place graph.json --devices c.yaml {_PLACE}")),
    "plan": Kind(
        "plan.json",
        json_file,
        ("simulate plan.json", "simulate plan.json --json", "report plan.json --out r.html", _COMPARE),
    ),
    "placement": Kind("placement.json", json_file, (f"simulate graph.json {_ON} --placement placement.json",)),
    "run": Kind("run.json", json_file, ("report plan.json --run run.json --out r.html",)),
    "op-costs": Kind("costs.json", json_file, (f"place graph.json {_ON} --op-costs costs.json {_PLACE}",)),
    "op-costs-yaml": Kind("costs.yaml", yaml_file, (f"place graph.json {_ON} --op-costs costs.yaml {_PLACE}",)),
    "prices": Kind("prices.yaml", yaml_file, (f"{_SWEEP} --prices prices.yaml",)),
    "devices-text": Kind("devices", option_text, ("devices show {}", f"place graph.json --devices {{}} {_PLACE}")),
    "options-text": Kind("options", option_text, (f"place graph.json {_ON} {_PLACE} {{}}",)),
    "kept-plan": Kind("kept-plans", kept_file, (f"place graph.json {_ON} {_KEPT}",)),
    "checkpoint": Kind("policy.safetensors", tensor_file, (f"place graph.json {_ON} {_POLICY}",)),
    "training": Kind("trained.safetensors", tensor_file, (f"{_TRAIN} --resume",)),
    "layout-plan": Kind(
        "layout/plan.json", json_file, ("simulate layout/plan.json --json", *_LAYOUT), needs_model=True
    ),
    "times": Kind(
        "times.db", times_file, (f"place own:model --devices 2xcpu-16core --times times.db {_PLACE}",), needs_model=True
    ),
    "trace": Kind(
        "trace.json",
        json_file,
        ("times import trace.json --for own:model --device cpu-16core --out imported.db",),
        needs_model=True,
    ),
    "config": Kind(
        "hf/config.json", json_file, (f"capture hf:hf?batch=1&sequence=4 {_INFERENCE}",), 60.0, needs_model=True
    ),
    "onnx": Kind("m.onnx", onnx_file, (f"capture m.onnx {_INFERENCE} --dim batch=2",), needs_model=True),
    "onnx-external": Kind("e.onnx", onnx_file, (f"capture e.onnx {_INFERENCE} --dim batch=2",), needs_model=True),
    "gguf": Kind("m.gguf", change_bytes, (_GGUF,), 60.0, needs_model=True),
    "kept-graph": Kind("kept-graphs", kept_file, (_SERVED,), needs_model=True),
    "dim-text": Kind("dim", option_text, (f"capture m.onnx {_INFERENCE} --dim {{}}",), needs_model=True),
    "model-text": Kind("model", option_text, (f"capture {{}} {_INFERENCE}",), 60.0, needs_model=True),
}
_TEXTS = {
    "devices": ("2x(2xp100-pcie-16g)@100gbit", "4xp100-pcie-16g", "8xh100-sxm-80g", "c.yaml"),
    "dim": ("batch=2",),
    "model": ("hf:hf?batch=1&sequence=4&weights=q4_k_m", "own:model", "rnnlm-2", "m.onnx", "m.gguf?context=8"),
    "options": ("--pin=left.*=gpu1", "--max-memory=gpu0=8GiB", "--reserve=10%", "--robust=2%", "--forbid=mm=gpu0"),
}


# good files


@contextlib.contextmanager
def good_files(*, with_models: bool) -> Iterator[None]:
    """Makes a directory with a good file of each kind the current one, and runs each command on it once."""
    before, environment, path = os.getcwd(), dict(os.environ), list(sys.path)
    with tempfile.TemporaryDirectory(prefix="gdp-mutations-") as directory:
        os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"
        sys.path.insert(0, directory)
        os.chdir(directory)
        try:
            _make_files()
            if with_models:
                _make_models()
            for kind in KINDS.values():
                for command in kind.commands if with_models or not kind.needs_model else ():
                    _run(command.format(_TEXTS[kind.file][0] if kind.file in _TEXTS else ""))
            yield
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = path


def _run(command: str) -> None:
    from gdp.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(command.split())
    assert status == 0, f"{command}: {said.getvalue()}"


def _make_files() -> None:
    from gdp.cluster import Cluster
    from gdp.graph import Graph, Op, Tensor
    from gdp.policy.checkpoint import new_policy, save_checkpoint

    names = [f"{side}.{number}" for number in range(3) for side in ("left", "right")]
    ops = [Op(name, "mm", 10**10, 10**6, resident_bytes=2**20, module=name[:-2]) for name in names]
    edges = [Tensor(op, (op + 2,), 4096) for op in range(4)] + [Tensor(op, (6,), 4096) for op in (4, 5)]
    graph = Graph.build("two", [*ops, Op("join", "add", 10**6)], edges)
    for name in ("graph.json", "graph.json.gz", "graph.safetensors"):
        graph.save(name)
    for name in ("c.json", "c.yaml"):
        Cluster.parse("2x(2xp100-pcie-16g)@100gbit").save(name)
    _run(f"place graph.json {_ON} --budget 20sims --threads 1 --no-advice --no-cache --out .")
    _write("placement.json", {name: f"gpu{op % 2}" for op, name in enumerate(graph.op_names)})
    flops, times = {"kind": "mm", "flops": 4.3e9}, {"match": "left", "time": {"p100-pcie-16g": "120us", "gpu0": 95}}
    costs = {"format": "gdp-op-costs", "version": 1, "ops": [flops, times, {"kind": "add", "flops": 5}]}
    for name in ("costs.json", "costs.yaml"):  # YAML takes JSON
        _write(name, costs)
    _write("prices.yaml", {"p100-pcie-16g": {"dollars_per_hour": 0.69, "watts": 575}, "my-card": {"watts": 300}})
    _write("run.json", _run_document(json.loads(Path("plan.json").read_text())))
    for name, texts in _TEXTS.items():
        Path(name).write_text("\n".join(texts))
    save_checkpoint("policy.safetensors", new_policy("default"), {"command": "train"})
    _run(_TRAIN)
    _run(f"place graph.json {_ON} {_KEPT}")
    _link("plans", "two")


def _make_models() -> None:
    import onnx
    import test_gguf
    import torch

    from gdp.models.measured_times import MeasuredTimes, OpTime
    from gdp.models.pytorch.signature import LIBRARY, signatures
    from gdp.models.source import ModelSource

    layers = "torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])"
    Path("own.py").write_text(f"import torch\n\n\ndef model():\n    return {layers}, torch.zeros(8, 8)\n")
    Path("hf").mkdir()
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "vocab_size": 30, "max_position_embeddings": 64, "tie_word_embeddings": True}
    _write("hf/config.json", names | sizes | more | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    _run(_SERVED)
    _link("graphs", "hf.hf")
    _run(f"place hf:hf?batch=4&sequence=4 --parallel data=2,zero=1 {_ON} --budget 5sims --threads 1 --out layout")
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    held = {"w": torch.zeros(8, 8), "s": torch.tensor([0, 2, 4])}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="product"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Reshape", ["b", "s"], ["c"]),
        helper.make_node("Softmax", ["c"], ["d"], axis=-1),
        helper.make_node("Concat", ["d", "d"], ["y"], axis=1),
    ]
    ends = [value("x", 1, ["batch", 8])], [value("y", 1, ["batch", 4, 4])]
    tensors = [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in held.items()]
    graph = helper.make_graph(nodes, "m", *ends, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    onnx.save(model, "m.onnx")
    onnx.save(model, "e.onnx", save_as_external_data=True, location="e.bin", size_threshold=0)
    test_gguf.write(Path("m.gguf"))
    known = dict.fromkeys(signatures(ModelSource("own:model").capture().program))
    MeasuredTimes("times.db", create=True).store("cpu-16core", LIBRARY, [OpTime(name, 1000, 10, 5) for name in known])
    module, args, *_ = ModelSource("own:model").build()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        module(*args).mean().backward()
        torch.optim.Adam(module.parameters()).step()
    profiler.export_chrome_trace("trace.json")


def _write(path: str, document: Any) -> None:
    Path(path).write_text(json.dumps(document, indent=1))


def _link(kind: str, label: str) -> None:
    """Gives the one entry of the cache a name in the directory."""
    (kept,) = Path(os.environ["XDG_CACHE_HOME"], "gdp", kind).glob(f"{label}*")
    Path(f"kept-{kind}").symlink_to(kept)


def _run_document(plan: Any) -> Any:
    """Returns what `gdp run` prints for the plan, as far as a report reads it."""
    spread = {"step_time_ns": 10.0, "step_time_quartiles_ns": [9.0, 11.0]}
    row = {"num_ops": 1, "predicted_ns": 1.0, "measured_ns": 2.0, "name": "a"}
    device = {"name": "gpu0", "num_ops": 3, "predicted_busy_ns": 1, "busy_ns": 2, "wait_ns": 3}
    ways = [{**row, "from": "gpu0", "to": "gpu1", "num_tensors": 1}]
    return {
        **spread,
        "steps": 3,
        "predicted_step_time_ns": plan["step_time_ns"],
        "devices": plan["devices"],
        "results": {"equal": True, "reference": "one device"},
        "one_device": {"device": "cpu", **spread},
        "prediction": {"devices": [device], "kinds": [row], "ops": [row], "transfers": ways},
    }


# cases


class TooLongError(BaseException):
    """A case takes too long."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooLongError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_case(name: str, number: int, *, is_shown: bool = False) -> str:
    """Runs a case; returns `ok` with the exit status, or its fault."""
    kind, random = KINDS[name], Random(f"{name}:{number}")
    path = Path(kind.file).resolve()
    good = path.read_bytes()
    command = random.choice(kind.commands).split()
    if kind.change is option_text:
        text = kind.change(random.choice(good.splitlines()), random).decode()
        command = [text if word == "{}" else word for word in command]
    else:
        path.write_bytes(kind.change(good, random))
    try:
        return _judged(command, kind.seconds, is_shown=is_shown)
    finally:
        if is_shown:
            sys.stdout.write(f"{' '.join(command)}\n{path.read_bytes()[:2000]!r}\n")
        path.write_bytes(good)


def _judged(command: Sequence[str], seconds: float, *, is_shown: bool) -> str:
    from gdp.cli import main

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _limited(seconds):
                status: Any = main(command)
    except BaseException as error:
        if is_shown:
            traceback.print_exc()
        if isinstance(error, TooLongError):
            return f"takes more than {seconds:g} s"
        frames = traceback.extract_tb(error.__traceback__)
        own = [frames[-1], *(frame for frame in frames if "/gdp/" in frame.filename)][-1]
        text = " ".join(str(error).split())[:100]
        return f"{type(error).__name__}: {text} ({Path(own.filename).name}:{own.lineno})"
    printed, said = out.getvalue(), err.getvalue()
    if is_shown:
        sys.stdout.write(f"{status}\n{printed}\n{said}\n")
    if status not in (0, 2, 3):
        return f"status {status}: {said[-100:]!r}"
    if (odd := _CONTROLS.search(printed + said)) is not None:
        return f"prints {odd[0]!a}: {(printed + said)[max(odd.start() - 50, 0) : odd.end() + 50]!a}"
    if status and not [*said.splitlines(), ""][-1].startswith("gdp: ") and not said.endswith("\n"):
        return f"says no error: {said[-100:]!r}"
    return f"ok {status}"


def run_cases(name: str, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yields (case, result), of processes that are forked from this one, with limits."""
    left = list(numbers)
    while left:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            _be_child(name, left[:_BATCH], writing)
        os.close(writing)
        before = len(left)
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            data = b""
            while True:
                is_ready = bool(select.select([pipe], [], [], KINDS[name].seconds + _STUCK_SECONDS)[0])
                piece = pipe.read(65536) if is_ready else b""
                if not is_ready:
                    os.kill(child, signal.SIGKILL)
                if not piece:
                    break
                *lines, data = (data + piece).split(b"\n")
                for line in lines:
                    yield left.pop(0), line.decode()
        _, status = os.waitpid(child, 0)
        if status or len(left) == before:
            yield left.pop(0), f"the process ended with status {status:#x}"


def _be_child(name: str, numbers: Sequence[int], writing: int) -> None:
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        pages = map(int, Path("/proc/self/statm").read_text().split()[:2])
        used_bytes, resident_bytes = (count * resource.getpagesize() for count in pages)
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in numbers:
            try:
                result = run_case(name, number)
            except Exception as error:
                result = f"the change failed: {error!r}"
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident_bytes + _LOADED_BYTES
            if peak_bytes > MEMORY_BYTES:
                result = f"takes {peak_bytes >> 20} MiB"
            os.write(writing, f"{result}\n".encode())
            if peak_bytes > MEMORY_BYTES:
                break
    finally:
        os._exit(0)


def is_good(result: str) -> bool:
    """Returns whether a case has no fault."""
    return result.startswith("ok ")


def main() -> None:
    """Runs cases of kinds and prints what became of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    options = parser.parse_args()
    with good_files(with_models=any(KINDS[name.partition(":")[0]].needs_model for name in options.kinds)):
        sys.stdout.write("| kind | files | read | refused | faults | seconds |\n|---|--:|--:|--:|--:|--:|\n")
        for name in options.kinds:
            if ":" in name:
                kind, _, number = name.partition(":")
                sys.stdout.write(f"{run_case(kind, int(number), is_shown=True)}\n")
                continue
            began, results, shown = time.monotonic(), list[str](), set[str]()
            for number, result in run_cases(name, range(options.cases)):
                results.append(result)
                if not is_good(result) and (key := re.sub(r"\d+", "0", result)[-60:]) not in shown:
                    shown.add(key)
                    sys.stderr.write(f"{name}:{number}  {result}\n")
            counts = [len(results), results.count("ok 0"), sum(map(results.count, ("ok 2", "ok 3")))]
            counts += [counts[0] - counts[1] - counts[2], round(time.monotonic() - began)]
            sys.stdout.write(f"| {name} | {' | '.join(f'{count:,}' for count in counts)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent / "models")]
    main()
