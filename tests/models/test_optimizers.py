"""Optimizers cost as hand arithmetic says, compute PyTorch's bits, and say what they hold."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gdp import InputError
from gdp.cli import main
from gdp.graph.held_memory import HeldMemory
from gdp.models.pytorch import capture, capture_fn
from gdp.models.source import ModelSource

# a weight of 64 x 80 = 5,120 elements and a bias of 64; bytes of float32
WEIGHT, BIAS = 5120, 64
SCALES = 4 * 5120 // 256  # bytes of 20 blocks of 256 elements

# state and passes in bytes, and FLOPs, of the weight and of the bias
HAND: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    # two moments; weight and moments are read and written, the gradient is read: 7 x 4 bytes; 13 FLOPs
    "adam": ((8 * WEIGHT, 8 * BIAS), (28 * WEIGHT, 28 * BIAS), (13 * WEIGHT, 13 * BIAS)),
    # weight decay: lr d w, subtracted
    "adamw": ((8 * WEIGHT, 8 * BIAS), (28 * WEIGHT, 28 * BIAS), (15 * WEIGHT, 15 * BIAS)),
    "sgd": ((0, 0), (12 * WEIGHT, 12 * BIAS), (2 * WEIGHT, 2 * BIAS)),
    # one buffer, read and written; m b + g
    "sgd-momentum": ((4 * WEIGHT, 4 * BIAS), (20 * WEIGHT, 20 * BIAS), (4 * WEIGHT, 4 * BIAS)),
    # a row of 80 and a column of 64, for the bias its second moments; 15 and 19 passes
    "adafactor": ((4 * (64 + 80), 4 * BIAS), (60 * WEIGHT, 76 * BIAS), (15 * WEIGHT, 13 * BIAS)),
    # two moments of a byte with scales; below 4,096 elements float32. Weight 8 + gradient 4 + state read and written
    "adam-8bit": (
        (2 * WEIGHT + 2 * SCALES, 8 * BIAS),
        (12 * WEIGHT + 2 * (2 * WEIGHT + 2 * SCALES), 28 * BIAS),
        (19 * WEIGHT, 13 * BIAS),
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_state_and_work_by_hand(name: str) -> None:
    """Each optimizer's resident bytes, bytes accessed and FLOPs, for a matrix and a vector."""
    graph = capture(nn.Linear(80, 64), (torch.randn(2, 80),), name="linear", optimizer=name).graph
    state, passes, flops = HAND[name]
    weight, bias = graph.op_names.index("weight"), graph.op_names.index("bias")
    assert graph.resident_bytes[[weight, bias]].tolist() == [4 * WEIGHT + state[0], 4 * BIAS + state[1]]
    updates = [graph.op_names.index(f"{parameter}.update") for parameter in ("weight", "bias")]
    assert graph.bytes_accessed[updates].tolist() == list(passes)
    assert graph.flops[updates].tolist() == list(flops)
    assert HeldMemory.of(graph) == HeldMemory(4 * (WEIGHT + BIAS), sum(state), 0)


def test_master_weights() -> None:
    """AdamW of a bfloat16 matrix: 2 bytes, and a copy and two moments of 4; its float32 bias has none.

    An update reads a gradient of 2 bytes, reads and writes 12 bytes of state, and writes the 2 bytes: 28 for each
    element; 15 FLOPs and two conversions.
    """
    model = nn.Linear(80, 64, dtype=torch.bfloat16)
    model.bias = nn.Parameter(torch.zeros(64))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.linear.weight.t()).float() + self.linear.bias

    x = torch.randn(2, 80, dtype=torch.bfloat16)
    graph = capture(Mixed(), (x,), name="mixed", optimizer="adamw", precision="mixed").graph
    weight, bias = graph.op_names.index("linear.weight"), graph.op_names.index("linear.bias")
    assert graph.resident_bytes[[weight, bias]].tolist() == [(2 + 4 + 8) * WEIGHT, (4 + 8) * BIAS]
    update = graph.op_names.index("linear.weight.update")
    assert (graph.bytes_accessed[update], graph.flops[update]) == (28 * WEIGHT, 17 * WEIGHT)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, fused=True),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_has_the_bits_of_pytorch(name: str, dtype: torch.dtype) -> None:
    """`--optimizer` names optimizers of torch.optim with their defaults; momentum is 0.9."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Conv1d(5, 2, 3)).to(dtype)
    x = torch.randn(3, 5, 7, dtype=dtype)
    after = capture(model, (x,), name="model", optimizer=name).program.replay(model, (x,)).state
    optimizer = OPTIMIZERS[name](model.parameters())
    model(x).mean().backward()
    optimizer.step()
    assert all(torch.equal(after[key], tensor) for key, tensor in model.state_dict().items())


def llama_7b() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The parameters of Llama-7B: 32 layers, width 4,096, inner width 11,008, 32,000 tokens (arXiv 2302.13971)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(4))
            self.gate, self.up = nn.Linear(4096, 11008, bias=False), nn.Linear(4096, 11008, bias=False)
            self.down = nn.Linear(11008, 4096, bias=False)
            self.norms = nn.ModuleList(nn.RMSNorm(4096) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value, out = self.attention
            y = self.norms[0](x)
            x = x + out(nn.functional.scaled_dot_product_attention(query(y), key(y), value(y)))
            y = self.norms[1](x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    torch.set_default_dtype(torch.bfloat16)
    blocks = (Block() for _ in range(32))
    head = nn.Linear(4096, 32000, bias=False)
    return nn.Sequential(nn.Embedding(32000, 4096), *blocks, nn.RMSNorm(4096), head), (torch.zeros(1, 8).long(),)


def test_memory_of_a_training_step_of_llama_7b() -> None:
    """The table of docs/models.md: 14 bytes held for each of 6.7 billion parameters, and 2 of gradients."""
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096  # attention, feed-forward, norms: 202,383,360
    count = 32 * layer + 2 * 32000 * 4096 + 4096  # embedding and head, last norm
    assert count == 6_738_415_616
    graph = capture_fn(llama_7b, name="llama", optimizer="adamw", precision="mixed").graph
    held = HeldMemory.of(graph)
    assert held.parameter_bytes == 2 * count == 13_476_831_232
    assert held.optimizer_state_bytes == (4 + 4 + 4) * count == 80_860_987_392
    assert graph.resident_bytes.sum() == 14 * count == 94_337_818_624
    update = np.array([phase == "update" for phase in graph.phases])
    read = np.unique(graph.edge_tensors[update[graph.consumers]])
    assert graph.tensor_bytes[read[~graph.is_resident[read]]].sum() == 2 * count  # gradients


MODELS = """
import torch
from torch import nn

def net():
    return nn.Linear(256, 256), (torch.randn(2, 256),)

def half():
    return nn.Linear(256, 256, dtype=torch.bfloat16), (torch.randn(2, 256, dtype=torch.bfloat16),)
"""


@pytest.fixture
def _module(workplace: Path) -> None:
    """Writes the models of the tests."""
    (workplace / "optimized_models.py").write_text(MODELS)


@pytest.mark.usefixtures("_module")
def test_place_names_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    """256 x 256 + 256 parameters of 2 bytes, 131,584; 12 bytes of state for each, 789,504; the next command works."""
    options = ["--devices", "2xcpu-16core", "--optimizer", "adamw", "--precision", "mixed"]
    place = ["place", "optimized_models:half", *options, "--budget", "9sims", "--no-advice"]
    assert main([*place, "--json"]) == 0
    graph = json.loads(capsys.readouterr().out)["graph"]
    assert (graph["parameter_bytes"], graph["optimizer_state_bytes"]) == (131_584, 789_504)
    assert main([*place, "--no-cache"]) == 0
    printed = capsys.readouterr().out
    assert "parameters 0.000123 GiB, optimizer state 0.000735 GiB" in printed
    assert "16 bytes a parameter: bf16 weights and gradients, float32 master weights and moments.\n" in printed
    (command,) = [line for line in printed.splitlines() if line.startswith("Next: ")]
    assert main(command.removeprefix("Next: gdp ").split()) == 0


@pytest.mark.usefixtures("_module")
@pytest.mark.parametrize(("optimizer", "lacks"), [("adam", True), ("adam,fused", False), ("sgd-momentum", False)])
def test_room_for_foreach(optimizer: str, lacks: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """65,792 parameters and their gradients, moments and roots of second moments take 20 bytes each while PyTorch's
    foreach updates, 1,315,840 in all; 1.1 MiB are 1,153,433, which is enough for the 16 bytes of the fused kernel."""
    place = ["place", "optimized_models:net", "--devices", "p100-pcie-16g", "--max-memory", "gpu0=1.1MiB"]
    assert main([*place, "--optimizer", optimizer, "--budget", "9sims", "--threads", "1", "--no-advice"]) == 0
    assert ("gpu0 lacks 0.000151 GiB while torch.optim's foreach" in capsys.readouterr().out) == lacks


@pytest.mark.usefixtures("_module")
def test_a_model_that_is_too_large_in_all(capsys: pytest.CaptureFixture[str]) -> None:
    """65,792 parameters hold 14 bytes each, 921,088 in all: no batch is small enough for 0.5 MiB. In pure
    bfloat16 they hold 526,336, which is too much as well: more memory is what helps."""
    place = ["place", "optimized_models:half", "--devices", "p100-pcie-16g", "--max-memory", "gpu0=0.5MiB"]
    assert main([*place, "--precision", "mixed", "--budget", "9sims", "--threads", "1"]) == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "nothing fits" in line]
    assert "0.000858 GiB are held for the whole step, with 16 bytes a parameter: bf16 weights and gradients, " in line
    assert line.endswith("or with one l4-24g (about, not tried)")


@pytest.mark.usefixtures("_module")
@pytest.mark.parametrize(
    ("options", "memory", "remedy"),
    [
        (["--precision", "mixed"], "0.5MiB", ", or take --optimizer adam-8bit --precision pure-bf16"),
        (["--precision", "mixed", "--optimizer", "sgd"], "0.3MiB", ", or take --precision pure-bf16"),
        (["--precision", "float32", "--optimizer", "adam-8bit"], "0.2MiB", ""),
    ],
)
def test_only_updates_that_hold_less_are_told(
    options: list[str], memory: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """65,792 parameters take 4 bytes with 8-bit Adam in pure bfloat16, 8 in mixed precision; 6 with SGD there, 2 in
    pure bfloat16; 6 with 8-bit Adam in float32, of which SGD leaves 4: 0.25 MiB."""
    place = ["place", "optimized_models:half", "--devices", "p100-pcie-16g", "--max-memory", f"gpu0={memory}", *options]
    assert main([*place, "--budget", "9sims", "--threads", "1", "--no-advice"]) == 3
    assert capsys.readouterr().err.endswith(f"; add devices or memory{remedy}\n")


@pytest.mark.usefixtures("_module")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer", "lion"], "one of adam, adamw, sgd, sgd-momentum, adafactor, adam-8bit is expected"),
        (["--optimizer", "adamw", "--inference"], "--optimizer: inference updates no parameters"),
        (["--precision", "mixed", "--inference"], "--precision: inference updates no parameters"),
        (["--precision", "mixed"], "all is in other types; leave it out, or give the model in bfloat16"),
        (["--precision", "half"], "--precision is 'half'; one of mixed, pure-bf16, float32 is expected"),
        (["--precision", "float32", "--dtype", "bfloat16"], "has weights in float32, and the dtype is bfloat16"),
    ],
    ids=str,
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    """Exit status 2, one line, no file."""
    assert main(["capture", "optimized_models:net", "--out", "graph.json", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("gdp: error")]
    assert message in line
    assert not Path("graph.json").exists()


@pytest.mark.usefixtures("_module")
def test_a_graph_file_has_its_optimizer() -> None:
    """A file is a step as captured, so another optimizer is refused, and so is inference of a training step."""
    assert main(["capture", "optimized_models:net", "--out", "graph.json", "--optimizer", "sgd"]) == 0
    from gdp.models.model import Reading

    with pytest.raises(InputError, match=r"--optimizer: graph\.json is a gdp-graph file, whose updates are in it"):
        ModelSource("graph.json", Reading(optimizer="adamw")).whole()
    with pytest.raises(InputError, match=r"--inference: graph\.json is a training step; capture its model"):
        ModelSource("graph.json", Reading(training=False)).whole()
