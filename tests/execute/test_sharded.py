"""Steps whose ops are cut over ranks compute the loss, the gradients and the training of the whole model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gdp
from execute.placed_jobs import eager_training, train_sharded
from gdp import Cluster, InputError
from gdp.execute.equality import eager_parts
from gdp.execute.layouts.sharded_program import ShardedProgram
from gdp.execute.run import RunResult, run
from gdp.models.pytorch import capture
from gdp.models.pytorch.capture_step import StepOptions, capture_step
from gdp.models.shards import Shards
from gdp.parallel.layout import Layout
from tests.models.shard_cases import BATCH, HEADS, INNER, TOKENS, WIDTH, Stack, case
from tests.models.test_shards import NAMES

SIX = ("blocks", "llama", "gpt2", "bert", "vit", "t5")
MORE = ("llama", "gpt2", "bigcode", "phi3-gqa", "gemma")  # whose keys have fewer heads than ranks, fused and not
ROUNDING = 1e-5  # relative: sums in another order
BFLOAT16 = 0.1  # the same, of products of experts: 0.08 is the largest on an AMD EPYC, 0.03 on an Intel Xeon


def check_ranks(name: str, shards: Shards, rounding: float = ROUNDING) -> None:
    model, inputs = case(name)
    expected = eager_parts(capture(model, (), inputs).program, model, [((), inputs)])
    options = [StepOptions(shards=shards, rank=rank) for rank in range(shards.num_ranks)]
    ranks = [capture_step(model, (), inputs, each) for each in options]
    found = ShardedProgram.of([rank.program for rank in ranks], ranks[0].cuts, shards).replay(model, (), inputs)
    assert found.outputs.keys() == expected.outputs.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for key, whole in {**expected.outputs, **expected.gradients}.items():
        here = found.gradients[key] if key in found.gradients else found.outputs[key]
        assert here.shape == whole.shape, key
        # a gradient that is 0 but for rounding, such as that of a bias of keys, is measured by those of other weights
        scale = max(float(whole.abs().max()), largest / 1000)
        assert float((here - whole).abs().max()) < rounding * scale, key


@pytest.mark.parametrize(
    ("name", "tensor", "sequence"),
    [
        *((name, 2, True) for name in (*SIX, "bloom", "given-mlp", "heads")),
        *((name, 4, False) for name in (*MORE, "scaled")),
        *((name, *shards) for name in ("spelled", "tagged") for shards in ((2, True), (4, False))),
    ],
)
def test_ranks_agree_with_whole_model(name: str, tensor: int, sequence: bool) -> None:
    """Ranks with a part of the weights each get the loss, outputs and gradients of the whole model together."""
    check_ranks(name, Shards(tensor, sequence))


@pytest.mark.parametrize(
    ("name", "context"), [("llama", 2), ("gpt2", 4), ("bert", 2), ("diffusion", 2), ("mistral", 2)]
)
def test_ranks_of_a_sequence_agree(name: str, context: int) -> None:
    """As above, of ranks with a part of the tokens each."""
    check_ranks(name, Shards(context=context))


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "diffusion", "checkpointed"])
def test_ranks_with_parts_of_tokens_and_weights_agree(name: str, sequence: bool) -> None:
    """As above, of two times two ranks: two have the same tokens, and two the same parts of the weights."""
    check_ranks(name, Shards(2, sequence, context=2))


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("name", [*NAMES, "given", "checkpointed", "reentrant"])
def test_all_models_agree(name: str, tensor: int, sequence: bool) -> None:
    """As above, of all small models."""
    check_ranks(name, Shards(tensor, sequence))


@pytest.mark.parametrize(
    ("tensor", "sequence"),
    [(2, False), (4, True), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, True), (4, False)))],
)
def test_parts_of_experts_agree(tensor: int, sequence: bool) -> None:
    """As above, of ranks with half of the experts and as many rows each; of four, with half of their columns too."""
    check_ranks("routed", Shards(tensor, sequence, expert=2), rounding=BFLOAT16)


@pytest.mark.parametrize("shards", [Shards(2, True), Shards(4, False), Shards(2, True, expert=2)])
def test_experts_with_biases_agree(shards: Shards) -> None:
    """As above, of experts with biases, whose gates are every second column."""
    check_ranks("gptoss-routed", shards, rounding=BFLOAT16)


def test_ranks_with_samples_and_experts_of_their_own_agree() -> None:
    """As above, of two ranks that have one of two samples each, and half of the experts."""
    check_ranks("routed", Shards(expert=2), rounding=BFLOAT16)


class Drops(nn.Module):
    """Attention with dropout, of values that are linear in a weight, and its mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.query, self.value))
        shares = functional.scaled_dot_product_attention(*heads, dropout_p=0.5)
        return self.out(shares.transpose(1, 2).flatten(2)).square().mean()


def test_ranks_draw_again_for_gradients() -> None:
    """The backward pass of attention has the dropout of the forward pass: a square has twice itself as derivative."""
    model, x, shards = Drops(), torch.randn(BATCH, TOKENS, WIDTH), Shards(context=2)
    ranks = [capture_step(model, (x,), {}, StepOptions(shards=shards, rank=rank)) for rank in range(2)]
    found = ShardedProgram.of([rank.program for rank in ranks], ranks[0].cuts, shards).replay(model, (x,), {})
    slope = (found.gradients["value.weight"] * model.value.weight.detach()).sum()
    assert float(slope) == pytest.approx(2 * float(found.loss))


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_cards_attend_to_the_tokens_of_all_ranks(name: str) -> None:
    """GPUs have the operators of ranks with a part of the tokens, too."""
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"context::{name}", "CUDA")


DROPPED = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Dropout(), nn.Linear(INNER, WIDTH), nn.Dropout())


@pytest.mark.parametrize(
    ("model", "shards", "seeds"),
    [
        (Stack(DROPPED), Shards(2, False), [{0, 1}, {2, 1}]),
        (Stack(DROPPED), Shards(2, True), [{0, 1}, {2, 3}]),
        (Drops(), Shards(context=2), [{0}, {1}]),
        (Drops(), Shards(2), [{0}, {1}]),
        (Drops(), Shards(2, context=2), [{0}, {1}, {2}, {3}]),
    ],
)
def test_parts_have_dropout_of_their_own(model: nn.Module, shards: Shards, seeds: list[set[int]]) -> None:
    """Ranks draw the same numbers for a whole tensor, and others for each part of a cut one."""
    inputs = (torch.randn(BATCH, TOKENS, WIDTH), torch.tensor([1, 2]))[: 2 if isinstance(model, Stack) else 1]
    options = [StepOptions(shards=shards, rank=rank) for rank in range(shards.num_ranks)]
    ranks = [capture_step(model, inputs, {}, each) for each in options]
    program = ShardedProgram.of([rank.program for rank in ranks], ranks[0].cuts, shards)
    assert [{call.seed for calls in rank.calls for call in calls} - {-1} for rank in program.ranks] == seeds


def test_gradient_of_a_key_bias_is_rounding() -> None:
    """Attention does not change with a bias of all keys: its gradient in float64 is 0 but for the last places."""
    model, inputs = case("vit")
    model, inputs = model.double(), inputs | {"pixel_values": inputs["pixel_values"].double()}
    model(**inputs).loss.backward()
    gradients = {name: float(weight.grad.abs().max()) for name, weight in model.named_parameters()}
    assert max(gradients[name] for name in gradients if name.endswith("key.bias") or "k_proj.bias" in name) < 1e-15
    assert max(gradients.values()) > 0.1


def run_plan(name: str, num_cards: int, parallel: str, **options: Any) -> RunResult:
    model, inputs = case(name)
    cluster = Cluster.parse(f"{num_cards}xcpu-16core")
    plan = gdp.place((model, (), inputs), cluster, parallel=parallel, budget="30sims", num_threads=1)
    cluster = cluster.grouped(Layout.parse(parallel).shards.num_ranks)
    return run(model, (), inputs, plan=plan, on=["cpu"] * num_cards, cluster=cluster, steps=2, **options)


@pytest.mark.parametrize(
    ("name", "num_cards", "parallel"),
    [
        ("vit", 2, "tensor=2"),
        ("llama", 4, "data=2,tensor=2,overlap=on,zero=1"),
        ("blocks", 4, "tensor=2,stages=2,microbatches=2"),
        ("gpt2", 4, "tensor=2,context=2"),
    ],
)
def test_processes_run_plans(name: str, num_cards: int, parallel: str) -> None:
    """A process for each card runs its rank, with replicas and stages on top, and ops are compared with the plan."""
    result = run_plan(name, num_cards, parallel)
    assert result.is_equal
    assert result.equality.num_tensors > 10
    assert [target.name for target in result.targets] == [f"cpu{card}" for card in range(num_cards)]
    assert result.whole_batch is None or result.whole_batch.is_close(ROUNDING)
    assert (result.whole_batch is None) == (parallel in ("tensor=2", "tensor=2,context=2"))
    assert result.prediction is not None
    groups = ["cpu0-3"] if "context" in parallel else ["cpu0-1", "cpu2-3"][: num_cards // 2]
    assert [row.name for row in result.prediction.devices] == groups
    assert sum(row.num_ops for row in result.prediction.devices) == len(result.plan.placement)


@pytest.mark.parametrize("name", ["tied", "blocks"])
def test_training_is_that_of_the_whole_model(tmp_path: Path, name: str) -> None:
    """Losses, state and momentum follow PyTorch, and a saved state goes on with other ranks and with none."""
    losses, model = eager_training(name, range(4))
    path = tmp_path / "training.safetensors"
    first = train_sharded(name, 2, "tensor=2", range(2), saves=path)
    assert first["losses"] == pytest.approx(losses[:2], rel=ROUNDING)
    for text in ("tensor=4", "data=2,tensor=2", "data=2"):
        rest = train_sharded(name, 4, text, range(2, 4), resume=path)
        assert rest["losses"] == pytest.approx(losses[2:], rel=ROUNDING)
        assert rest["state"].keys() == model.state_dict().keys()
        for key, weight in model.state_dict().items():
            np.testing.assert_allclose(np.array(rest["state"][key]), weight, rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(rest["weights"][key], rest["state"][key])


def test_what_is_not_run(tmp_path: Path) -> None:
    """Optimizers that need whole parameters, and norms of gradients, are refused in one line."""
    model, inputs = case("blocks")
    plan = gdp.place((model, (), inputs), "2xcpu-16core", parallel="tensor=2", budget="30sims", num_threads=1)
    with (
        gdp.placed(model, plan, on=["cpu", "cpu"], clip_norm=1.0) as trained,
        pytest.raises(InputError, match="clip_norm and scaler read whole gradients"),
    ):
        trained(**inputs)
    ranks = [
        capture_step(model, (), inputs, StepOptions(optimizer="adafactor", shards=Shards(2), rank=r)) for r in range(2)
    ]
    with pytest.raises(InputError, match=r"tensor=2: an optimizer with .* needs whole parameters, and each rank"):
        ShardedProgram.of([rank.program for rank in ranks], ranks[0].cuts, Shards(2))
