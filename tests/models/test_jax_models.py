"""JAX functions as MODEL: `module:function` returns one with its arguments, or what `capture_jax` makes of it."""

import json
from pathlib import Path

import pytest

import gdp
from gdp.cli import main
from gdp.errors import InputError
from gdp.execute.executable import read_executable
from gdp.models.measured_times import MeasuredTimes
from gdp.models.model import Reading
from gdp.models.shards import Shards
from gdp.models.source import ModelSource

MODELS = """
import jax, numpy as np, torch
from jax import numpy as jnp
from torch import nn
import gdp

S = jax.ShapeDtypeStruct
PARAMS = {"first": S((6, 8), "float32"), "second": S((8, 5), "float32")}

def forward(params, x):
    print("tracing")
    return jnp.tanh(x @ params["first"]) @ params["second"]

def step(params, momentum, x):
    loss, gradients = jax.value_and_grad(lambda p: (forward(p, x) ** 2).mean())(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss

def net(): return forward, (PARAMS, S((3, 6), "float32"))
def jitted(): return jax.jit(forward), [PARAMS, jnp.ones((3, 6))]
def keywords(): return forward, {"params": PARAMS, "x": S((3, 6), "float32")}
def both(): return forward, (PARAMS,), {"x": S((3, 6), "float32")}
def alone(): return lambda x: x * 2, S((3, 6), "float32")
def arrays(): return forward, ({"first": np.ones((6, 8), "f"), "second": np.ones((8, 5), "f")}, np.ones((3, 6), "f"))
def training():
    args = PARAMS, PARAMS, S((3, 6), "float32")
    return gdp.capture_jax(step, *args, name="net", parameters=("params", "momentum"))

def torch_function(): return torch.relu, (torch.ones(3),)
def shapes(): return forward, (PARAMS, S((3, 7), "float32"))
def content(): return lambda x: x if x.sum() > 0 else -x, S((3,), "float32")
def text(): return lambda x: x, "S"
def called_name(): return (lambda name: name * 2), {"name": S((3,), "float32")}
"""


@pytest.fixture(autouse=True)
def _module(workplace: Path) -> None:
    """Writes the functions of the tests."""
    (workplace / "jax_nets.py").write_text(MODELS)


@pytest.mark.parametrize("function", ["net", "jitted", "keywords", "both", "arrays"])
def test_forms_of_arguments(function: str) -> None:
    """A forward pass is captured however its arguments are given."""
    model = ModelSource(f"jax_nets:{function}", Reading(training=False)).whole()
    graph = model.graph
    assert graph.name == f"jax_nets:{function}"
    assert {"params.first", "params.second", "x"} < set(graph.op_names)
    assert graph.flops.sum() == 2 * 3 * 6 * 8 + 3 * 8 + 2 * 3 * 8 * 5
    assert graph.resident_bytes.sum() == 4 * (48 + 40)
    assert (model.is_captured, model.notes, model.unknown_costs) == (True, (), {})


def test_training_steps() -> None:
    """A training step of MODEL is the graph that `capture_jax` makes of it."""
    graph = gdp.load("jax_nets:training")
    assert set(graph.phases) == {"forward", "backward", "update"}
    assert sum(kind == "parameter" for kind in graph.kinds) == 4  # weights and momentum
    assert sorted(graph.groups.tolist())[-8:] == [0, 0, 1, 1, 2, 2, 3, 3]  # each is updated in place


def test_the_command_places_a_function(capfd: pytest.CaptureFixture[str]) -> None:
    """The command places a JAX function, and says that it is one."""
    options = ["--devices", "2xp100-pcie-16g", "--budget", "50sims", "--no-advice", "--json"]
    assert main(["place", "jax_nets:net", *options]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["graph"]["name"] == "jax_nets:net"
    assert "tracing" in err
    assert "gdp: note: jax_nets:net is a JAX function without gradients, captured as it is: a forward pass" in err
    # the way to micro-batches that the error names
    assert main(["capture", "jax_nets:training", "--out", "step.json.gz"]) == 0
    assert main(["place", "step.json.gz", "--microbatches", "4", *options]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["status"] == "ok"


BAD = {
    "inference": ("training", Reading(training=False), "--inference: .* takes gradients, captured as it is"),
    "micro-batches": ("net", Reading(microbatches=3), "--microbatches: .* gdp capture the step of one micro-batch"),
    "optimizer": ("training", Reading(optimizer="sgd"), "--optimizer: .* has its optimizer in it or none"),
    "tensor ranks": (
        "training",
        Reading(shards=Shards(tensor=2)),
        "is not cut over groups of cards; leave tensor=2 out",
    ),
    "context ranks": ("net", Reading(shards=Shards(context=2)), "is not cut over groups of cards; leave context=2 out"),
    "of PyTorch": ("torch_function", Reading(), r"the step updates no parameters; .* JAX arrays"),
    "wrong shape": ("shapes", Reading(), "the function failed .TypeError: dot_general requires"),
    "content": ("content", Reading(), "depends on an array's content"),
    "text": ("text", Reading(), "inputs are str and dict; a tensor, a tuple or a dict"),
    "an option's name": ("called_name", Reading(), "input 'name' is called as an option of capture_jax"),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_do_not_apply(case: str) -> None:
    """An option that does not apply to a JAX function is refused in one line."""
    function, reading, message = BAD[case]
    with pytest.raises(InputError, match=message) as caught:
        ModelSource(f"jax_nets:{function}", reading).whole()
    assert f"jax_nets:{function}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_execution_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A JAX function is neither executed nor measured."""
    message = "jax_nets:net: is a JAX function, which is placed, not executed or measured; name a PyTorch model"
    with pytest.raises(InputError, match=message):
        read_executable(ModelSource("jax_nets:net"))
    MeasuredTimes("times.db", create=True)
    assert main(["place", "jax_nets:net", "--devices", "2xp100-pcie-16g", "--times", "times.db"]) == 2
    assert message in capsys.readouterr().err
    assert main(["capture", "jax_nets:net", "--out", "g.json", "--microbatches", "2"]) == 2
    assert "gdp: error: --microbatches: jax_nets:net" in capsys.readouterr().err
    assert not Path("g.json").exists()
