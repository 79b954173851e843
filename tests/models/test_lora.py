"""LoRA and QLoRA: frozen weights in the model's type or in NF4, trained adapters, and what they hold and read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gdp
from gdp.cli import main
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.held_memory import HeldMemory
from gdp.graph.parameter_bytes import ParameterBytes
from gdp.models.lora import Lora
from gdp.models.model import Reading
from gdp.models.pytorch import Capture, capture
from gdp.models.source import ModelSource
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from tests.models.test_huggingface import same
from tests.models.test_quantised_weights import LLAMA

LINEAR = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512  # weights of a layer of LLAMA
INNER = 2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512)  # sides of these matrices
EMBEDDINGS, NORMS, LAYERS = 2 * 1000 * 256, 2 * 256, 2
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
FUNCTION = """
import torch
from torch import nn

def stack():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), (torch.randn(4, 64),)

def jax_step():
    import jax.numpy as jnp
    return (lambda x: (x * x).sum()), (jnp.ones((4, 4)),)
"""


def source(directory: Path, lora: str, query: str = "", config: dict[str, Any] | None = None) -> ModelSource:
    (directory / "config.json").write_text(json.dumps(config or LLAMA | {"num_hidden_layers": LAYERS}))
    return ModelSource(f"hf:{directory}?batch=2&sequence=16{query}", Reading(lora=Lora.parse(lora)))


def count(graph: Graph, kind: str, phase: str) -> int:
    return sum(pair == (kind, phase) for pair in zip(graph.kinds, graph.phases, strict=True))


def test_only_adapters_are_trained(tmp_path: Path) -> None:
    """Frozen bf16 weights have no gradient and no state; adapters of 4 bytes of weight and copy have 8 of moments.

    A product with a weight has one backward product, that of its input; q, k and v of the first layer have none, since
    nothing before them is trained. An adapter has two products and three backward ones, four where its input has a
    gradient.
    """
    graph = source(tmp_path, "rank=4").whole().graph
    held = HeldMemory.of(graph)
    adapters = 4 * INNER * LAYERS
    assert held.parameter_bytes == 2 * (LAYERS * (LINEAR + NORMS) + 256 + EMBEDDINGS + adapters)
    assert held.optimizer_state_bytes == (4 + 8) * adapters
    layers = 7 * LAYERS
    assert graph.phases.count("update") == 2 * layers
    assert count(graph, "aten.mm", "forward") == 3 * layers + 1
    assert count(graph, "aten.mm", "backward") == (layers - 3) + 4 * layers - 3 + 1


def test_weights_in_nf4(tmp_path: Path) -> None:
    """4 bits, 8 for 64 weights and 32 for 16,384, with an offset: 4.127 bits; both passes dequantise to bf16."""
    graph = source(tmp_path, "rank=4,weights=nf4").whole().graph
    same_graph = source(tmp_path, "rank=4", "&weights=nf4").whole().graph
    assert graph.fingerprint == same_graph.fingerprint
    held = HeldMemory.of(graph)
    blocks = 7 * LAYERS  # outer blocks are full or one a matrix: 256 x 128 are 512 constants, two outer blocks
    constants = LAYERS * (LINEAR // 64 + 4 * LINEAR // (64 * 256)) + 4 * blocks
    frozen = LAYERS * (LINEAR // 2 + 2 * NORMS) + 2 * (256 + EMBEDDINGS)
    assert held.parameter_bytes == frozen + 2 * 4 * INNER * LAYERS
    assert held.other_bytes - constants == source(tmp_path, "rank=4").whole().graph.resident_bytes.sum() - (
        HeldMemory.of(source(tmp_path, "rank=4").whole().graph).parameter_bytes + held.optimizer_state_bytes
    )
    kernels = {"gdp.dequantize_4bit", "gdp.dequantize_blockwise"}
    assert {count(graph, kind, "forward") for kind in kernels} == {blocks}
    assert {count(graph, kind, "backward") for kind in kernels} == {blocks - 3}
    first = next(op for op, kind in enumerate(graph.kinds) if kind == "gdp.dequantize_4bit")
    assert graph.modules[first].endswith("q_proj")
    assert graph.bytes_accessed[first] == 256 * 256 * (2 + 0.5) + 4 * 256 * 256 // 64
    assert int(graph.tensor_bytes[graph.producers == first].sum()) == 2 * 256 * 256
    assert not source(tmp_path, "rank=4,weights=nf4").whole().unknown_costs


def test_an_adapted_step_has_pytorchs_bits() -> None:
    """Loss, gradients and new adapters equal those of the same products and sums written out in PyTorch."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)), torch.randn(5, 8)
    captured: Capture = capture(model, (x,), lora="rank=2,alpha=4,targets=^0", optimizer="sgd")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert list(captured.program.gradients) == ["0.lora_A", "0.lora_B"]
    a, b = torch.randn(2, 8, requires_grad=True), torch.randn(6, 2, requires_grad=True)
    state = dict(model.state_dict()) | {"0.lora_A": a.detach().clone(), "0.lora_B": b.detach().clone()}
    replay = captured.program.replay(state, (x,))
    loss = model[2](torch.tanh(model[0](x) + (x @ a.T) @ b.T * 2.0)).mean()
    loss.backward()
    assert torch.equal(replay.loss, loss.detach())
    assert a.grad is not None
    assert b.grad is not None
    assert same(replay.gradients, {"0.lora_A": a.grad, "0.lora_B": b.grad})


def test_zero_3_shards_packed_weights(tmp_path: Path) -> None:
    """Two replicas hold half of the packed weights, embeddings and adapters each, and the constants of NF4 whole."""
    graph = source(tmp_path, "rank=4,weights=nf4").part(2).graph
    step = Step.of(graph, Layout.parse("data=2,zero=3,recompute=blocks")).graph
    held, whole = HeldMemory.of(graph), int(step.resident_bytes[step.replicas == 0].sum())
    half = (held.parameter_bytes + held.optimizer_state_bytes) / 2
    assert whole == pytest.approx(half + held.other_bytes, abs=graph.num_ops)
    sums = [op for op, kind in enumerate(step.kinds) if kind.startswith("reduce_scatter")]
    assert {step.dtypes[op] for op in sums} == {"bfloat16"}


def test_a_function_is_adapted_in_bfloat16(workplace: Path) -> None:
    """A float32 module of a user is frozen in bf16 with float32 copies of adapters, or stays as it is if asked."""
    (workplace / "tuned.py").write_text(FUNCTION)
    adapters = 4 * (64 + 64) + 4 * (64 + 8)
    graph = ModelSource("tuned:stack", Reading(lora=Lora.parse("rank=4"))).whole().graph
    assert graph.resident_bytes.sum() == 2 * (64 * 65 + 8 * 65) + 14 * adapters
    graph = ModelSource("tuned:stack", Reading(lora=Lora.parse("rank=4"), precision="float32")).whole().graph
    assert graph.resident_bytes.sum() == 4 * (64 * 65 + 8 * 65) + 12 * adapters
    plan = gdp.place("tuned:stack", "l4-24g", lora="rank=4", batch=8, budget="50sims")
    assert plan.problem is not None
    assert plan.problem.graph.resident_bytes.sum() == 2 * (64 * 65 + 8 * 65) + 14 * adapters
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    plan = gdp.place((module, (torch.randn(4, 64),)), "l4-24g", lora="rank=4,weights=nf4", budget="50sims")
    assert plan.problem is not None
    assert "gdp.dequantize_4bit" in plan.problem.graph.kinds


REFUSED = {
    "rank=0": "rank is 0; 1 to 65,536 is expected, such as rank=16",
    "weights=nf4": "rank is missing; 1 to 65,536 is expected",
    "rank=2,rnk=4": "'rnk' is unknown; did you mean rank?; known: rank, weights, alpha, targets",
    "rank=2,rank=4": "'rank' is given twice; known: rank",
    "rank=2,weights=int4": "weights is 'int4'; bf16 or nf4 is expected",
    "rank=2,alpha=x": "alpha is 'x'; a number is expected, such as alpha=16",
    "rank=2,targets=(": "targets is no regular expression",
    "rank": "'rank' is no KEY=VALUE; rank=16[,weights=nf4] is expected",
}


@pytest.mark.parametrize("text", REFUSED)
def test_options_that_make_no_sense(text: str) -> None:
    """Each is refused with the reason and what is known."""
    with pytest.raises(InputError) as error:
        Lora.parse(text)
    assert str(error.value).startswith(f"--lora: {REFUSED[text]}")


def test_models_without_adapters(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inference, files, JAX functions, quantised configs and names of no layer are refused in one line each."""
    (workplace / "tuned.py").write_text(FUNCTION)
    (workplace / "config.json").write_text(json.dumps(LLAMA))
    ModelSource("tuned:stack").whole().graph.save(workplace / "graph.json")
    directory = f"hf:{workplace}?batch=1&sequence=8"
    tries = {
        (f"{directory}", "--inference"): "--lora: inference updates no parameters; leave it or --inference out",
        (f"{directory}&weights=int4",): "has quantised weights, which are for inference; give --inference, or add",
        ("graph.json",): "--lora: graph.json is a gdp-graph file, whose updates are in it; leave it out",
        ("tuned:jax_step",): "--lora: tuned:jax_step is a JAX function",
        ("tuned:stack", "--lora", "rank=2,targets=q_proj"): "targets=q_proj matches no linear layer of tuned:stack; kn",
    }
    for words, reason in tries.items():
        assert main(["place", "--devices", "l4-24g", "--lora", "rank=2", *words]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("gdp: error: ") == 1
    assert main(["place", f"{directory}&weights=nf4", "--devices", "l4-24g"]) == 2
    assert "--lora rank=16,weights=nf4 to train adapters" in capsys.readouterr().err
    assert not (workplace / "plan.json").exists()
    with pytest.raises(InputError, match="--lora: NF4 weights are placed, not executed; leave weights=nf4 out"):
        ModelSource("tuned:stack", Reading(lora=Lora.parse("rank=2,weights=nf4"))).check_runnable("executed")


@pytest.mark.long
def test_qlora_of_8b_parameters_on_a_card_of_24_gib(tmp_path: Path) -> None:
    """Four samples of 2,048 tokens fit on an RTX 4090 with all layers recomputed, as by hand within 10 %.

    A layer has 2 x 4,096 x 4,096 + 2 x 4,096 x 1,024 + 3 x 4,096 x 14,336 = 218.1 million weights: 32 of 4.127 bits
    are 3.60 GB. Embedding, head and norms are 1.05 billion of 2 bytes: 2.10 GB. Adapters are 16 x (2 x 8,192 + 2 x
    5,120 + 3 x 18,432) x 32 = 41.9 million of 14 bytes, 0.59 GB, with 0.08 GB of gradients. Held: 6.29 GB.
    8,192 tokens keep the inputs of 32 layers, 4,096 x 2 bytes each: 2.15 GB. Their logits are 1.05 billion: log
    probabilities, and the gradients of loss and softmax, in float32, are 3 x 4.20 GB = 12.6 GB. Together 21.0 GB.
    """
    directory = source(tmp_path, "rank=16", config=LLAMA_8B).text.partition("?")[0]
    reading = Reading(lora=Lora.parse("rank=16,weights=nf4"))
    graph = ModelSource(f"{directory}?batch=4&sequence=2048", reading).whole().graph
    held = HeldMemory.of(graph)
    assert held.parameter_bytes + held.other_bytes == pytest.approx(3.60e9 + 2.10e9 + 2 * 41.9e6, rel=2e-3)
    assert graph.resident_bytes.sum() == pytest.approx(6.29e9, rel=1e-3)
    step = Step.of(graph, Layout.parse("recompute=blocks"))
    found = simulate(Problem.build(step.graph, "rtx4090-24g"), np.zeros(step.graph.num_ops, np.int64))
    assert found.feasible
    assert found.peak_memory_bytes[0] == pytest.approx(21.0e9, rel=0.1)
    assert not simulate(Problem.build(graph, "rtx4090-24g"), np.zeros(graph.num_ops, np.int64)).feasible


def test_bytes_are_those_of_trained_parameters(tmp_path: Path) -> None:
    """Adapters take 16 bytes each; the frozen weights beside them are none of these."""
    assert str(ParameterBytes.of(source(tmp_path, "rank=4").whole().graph)) == (
        "16 bytes a trained parameter: bf16 weights and gradients, float32 master weights and moments"
    )
