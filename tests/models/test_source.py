"""MODEL: workloads and their cache, files, functions of the user's."""

import gzip
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gdp import register_flops
from gdp.cli.shared import check_writable
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.models import graph_cache
from gdp.models.model import Reading
from gdp.models.pytorch import flops
from gdp.models.source import ModelSource, load

pytestmark = pytest.mark.usefixtures("workplace")

WORKLOAD = "inception-v3-b32"  # the one that is captured fastest

USER_MODULE = """
import torch
from torch import nn

answer = 42

def pair():
    print("a word on standard output")
    return nn.Linear(8, 4), torch.ones(2, 8)

def triple():
    return nn.Linear(8, 4), (), {"input": torch.ones(2, 8)}

def keywords():
    return nn.Linear(8, 4), {"input": torch.ones(2, 8)}

def raises():
    raise RuntimeError("first line\\nlast line")

def exits():
    raise SystemExit("out")

def number():
    return 3

def strings():
    return nn.Linear(8, 4), "input"

def wrong_shape():
    return nn.Linear(8, 4), torch.ones(2, 7)

async def later():
    return nn.Linear(8, 4), torch.ones(2, 8)

def looks():
    return nn.Linear(8, 4), torch.ones(2, 8 if torch.ones(3).sum() > 0 else 7)
"""


COUNTED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.cache = None

    def forward(self, x):
        if self.cache is None:  # the first pass leaves something behind
            self.cache = torch.ones(16)
        return self.second(self.first(x) * self.cache)

"""
COUNTED_FUNCTION = """
def net():
    with open("calls", "a") as file:
        file.write(".")
    return Net(), torch.ones(8, 16)
"""


def tiny() -> Graph:
    return Graph.build("tiny", [Op("a", flops=1), Op("b", flops=1)], [Tensor(0, (1,), 4)])


def test_graph_files() -> None:
    """A graph file is read as it is."""
    tiny().save("graph.json.gz")
    model = ModelSource("graph.json.gz").whole()
    assert model.graph.fingerprint == tiny().fingerprint
    assert not model.is_captured
    assert load("graph.json.gz").name == "tiny"


def test_the_cache_needs_no_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run reads the cache without importing PyTorch."""
    capture, captured = ModelSource._capture, []

    def captured_once(*args: Any) -> Any:
        captured.append(captured[0] if captured else capture(*args))
        return captured[0]

    monkeypatch.setattr(ModelSource, "_capture", captured_once)
    first = ModelSource(WORKLOAD).whole()
    (entry,) = Path("cache/gdp/graphs").iterdir()
    code = (
        "import sys; from gdp.models.source import load; "
        f"print(load({WORKLOAD!r}).fingerprint); "
        "sys.exit('torch' in sys.modules)"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert again.stdout.strip() == first.graph.fingerprint
    assert list(Path("cache/gdp/graphs").iterdir()) == [entry]

    # damaged or of another shape: captured anew, and the entry is whole again
    whole = entry.read_bytes()
    for damaged in (whole[:-100], b"", gzip.compress(b"{}"), gzip.compress(b"[1")):
        entry.write_bytes(damaged)
        assert ModelSource(WORKLOAD).whole().graph.fingerprint == first.graph.fingerprint
        assert entry.read_bytes() == whole
    assert len(captured) == 5


def test_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant is found by name, and kept like any workload."""
    name = "rnnlm/l1-s30-h1024-b128"
    captured: list[str] = []

    def capture(source: ModelSource, _: int) -> SimpleNamespace:
        captured.append(source.text)
        return SimpleNamespace(graph=tiny(), coverage=SimpleNamespace(unknown={}), notes=(), seconds=0.0)

    monkeypatch.setattr(ModelSource, "_capture", capture)
    for _ in range(2):
        assert ModelSource(name).whole().graph.fingerprint == tiny().fingerprint
    assert captured == [name]
    (entry,) = Path("cache/gdp/graphs").iterdir()
    assert entry.name.startswith("rnnlm.l1-s30-h1024-b128-")


def test_keys_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and code have entries of their own in the cache."""
    entry, usual = graph_cache.model_entry, Reading()
    entries = {entry(WORKLOAD, usual, 1), entry(WORKLOAD, Reading(False), 1), entry(WORKLOAD, Reading(True, "sgd"), 1)}
    entries |= {entry("gnmt-2", usual, 1), entry(WORKLOAD, usual, 2)}
    monkeypatch.setattr(graph_cache, "version", lambda _: "2.12.0")
    assert len(entries | {entry(WORKLOAD, usual, 1)}) == 6
    assert entry("package.module:function", usual, 1) is None  # nobody knows what it depends on


def test_registered_formulas_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept where FLOPs are counted by functions of the caller."""
    assert graph_cache.model_entry(WORKLOAD, Reading(), 1) is not None
    monkeypatch.setattr(flops, "_registered", {})
    register_flops("aten.mm")(lambda *_, out_val: 1)
    assert graph_cache.model_entry(WORKLOAD, Reading(), 1) is None


def test_shapes_beside_an_onnx_file() -> None:
    """The shape in `r` lies beside the model, so the graph is read anew when that file changes."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [2, 3]), ("y", ["a", "b"])))
    r = onnx.numpy_helper.from_array(np.array([1, 1]), "r")
    graph = helper.make_graph([helper.make_node("Tile", ["x", "r"], ["y"])], "g", [x], [y], [r])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(proto, "alone.onnx")
    ModelSource("alone.onnx").whole()
    assert len(list(Path("cache/gdp/graphs").iterdir())) == 1
    onnx.save(proto, "m.onnx", save_as_external_data=True, location="r.bin", size_threshold=0)
    assert ModelSource("m.onnx").whole().graph.tensor_bytes.max() == 4 * 2 * 3
    Path("r.bin").write_bytes(np.array([4, 5]).tobytes())
    assert ModelSource("m.onnx").whole().graph.tensor_bytes.max() == 4 * 8 * 15


def test_an_unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache that cannot be written does no harm."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / ("a" * 300)):  # the system refuses to look at the second one
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        assert ModelSource(WORKLOAD, Reading(training=False)).whole().graph.num_ops > 0


def test_names_the_system_refuses() -> None:
    """A name that the system refuses to look at is one line."""
    with pytest.raises(InputError, match="no such directory"):
        ModelSource(f"hf:{'a' * 300}").whole()
    with pytest.raises(InputError, match="cannot be written"):
        check_writable(Path("a" * 300) / "plan.json")


@pytest.mark.parametrize("refuses_copies", [False, True])
def test_a_function_is_called_once(refuses_copies: bool) -> None:
    """The batch size and all parts come from one call, unless the module cannot be copied."""
    refusal = "    def __deepcopy__(self, memo): raise TypeError('no copies')\n" if refuses_copies else ""
    Path("user_model.py").write_text(COUNTED + refusal + COUNTED_FUNCTION)
    source = ModelSource("user_model:net")
    whole = source.whole().graph
    assert source.batch_size == 8
    parts = {count: source.part(count).graph for count in (2, 4)}
    assert Path("calls").read_text() == ("." if not refuses_copies else "....")
    sys.modules.pop("user_model")
    for count, graph in ({1: whole} | parts).items():
        assert ModelSource("user_model:net").part(count).graph.fingerprint == graph.fingerprint


@pytest.mark.parametrize("function", ["pair", "triple", "keywords"])
def test_functions_that_print(function: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A user's function is captured, and its output is kept apart from the answer."""
    Path("user_model.py").write_text(USER_MODULE)
    model = ModelSource(f"user_model:{function}").whole()
    assert model.is_captured
    assert model.graph.name == f"user_model:{function}"
    assert {"forward", "backward", "update"} <= set(model.graph.phases)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("a word" in printed.err) == (function == "pair")


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("user_model:raises", ["user_model:raises", "RuntimeError: first line last line"]),
        ("user_model:exits", ["user_model:exits", "SystemExit: out"]),
        ("user_model:number", ["returned int", "(module, example_inputs) or (module, args, kwargs)"]),
        ("user_model:strings", ["inputs are str", "a tensor, a tuple or a dict"]),
        ("user_model:wrong_shape", ["user_model:wrong_shape", "RuntimeError"]),
        ("user_model:looks", ["user_model:looks", "content"]),
        ("user_model:answer", ["is no function but int"]),
        ("user_model:later", ["user_model:later: is async", "a plain function"]),
        ("user_model:missing", ["module user_model has no missing"]),
        ("no_such_module:f", ["no_such_module cannot be imported", "ModuleNotFoundError"]),
        ("broken:f", ["module broken cannot be imported", "SyntaxError"]),
        ("model.onnx", ["model.onnx: no such file"]),
        ("hf:directory", ["has no config.json", "name a directory"]),
        ("hf:elsewhere", ["no such directory"]),
        ("gnmt-5", ["'gnmt-5'", "did you mean gnmt-"]),
        ("some/where", ["some/where: no such file"]),
        ("rnnlm/l9", ["'rnnlm/l9': no variant of that name", "gdp workloads --variants"]),
        ("directory", ["directory: is a directory"]),
        ("none.json", ["none.json: no such file"]),
    ],
)
def test_bad_models(text: str, fragments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A MODEL that is none is refused in one line."""
    Path("user_model.py").write_text(USER_MODULE)
    Path("broken.py").write_text("def f(:")
    Path("directory").mkdir()
    with pytest.raises(InputError) as caught:
        ModelSource(text).whole()
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "Traceback" not in capsys.readouterr().err


def test_unknown_optimizers() -> None:
    """An unknown optimizer is refused."""
    with pytest.raises(InputError, match="optimizer is 'adagrad'; one of adam, adamw, sgd"):
        ModelSource(WORKLOAD, Reading(optimizer="adagrad")).whole()
