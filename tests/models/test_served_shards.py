"""Prefill and decode of one rank: its part of products, weights and cache, and what ranks exchange."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from gdp.costs.passes import array_bytes
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.shapes import parsed_calls
from gdp.models.model import Model, Reading
from gdp.models.serving import Serving
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from tests.models.test_serving import LATENT, write
from tests.models.test_shards import exchanges, product_flops

VOCABULARY, WIDTH, LAYERS = 256, 64, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", SIZES),
    "phi3": ("Phi3ForCausalLM", SIZES | {"num_key_value_heads": 4}),
    "mistral": ("MistralForCausalLM", SIZES | {"sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", SIZES | {"sliding_window": 5}),
    "mixtral": ("MixtralForCausalLM", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SIZES | EXPERTS | {"num_experts": 4}),
    "gpt_oss": ("GptOssForCausalLM", SIZES | {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
        | {"initializer_range": 0.2},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", SIZES | LATENT | {"head_dim": 8, "intermediate_size": 512}),
}
PLAIN = ("qwen3", "phi3", "mistral", "gpt2")  # attention and layers as in another one
EXECUTED = ("phi3", "gemma2", "qwen3_moe", "gpt_oss", "gpt2", "deepseek_v3")
CACHED_ONCE = ("deepseek_v3",)  # latents, which all heads read


def text_of(name: str, directory: Path, **options: Any) -> str:
    architecture, config = CONFIGS[name]
    content = {"architectures": [architecture], "model_type": name, "dtype": "float32", **config, **options}
    return f"hf:{write(directory / name, content)}?batch=2&context=9"


def served(text: str, phase: str, tensor: int, cache: Fraction | None = None) -> Model:
    source = ModelSource(text, Reading(training=False, serving=Serving(phase, cache)))
    return (source if tensor == 1 else source.sharded(Shards(tensor))).whole()


def bytes_of(graph: Graph, *ends: str) -> int:
    """Returns the bytes of parameters or buffers whose names end so."""
    ops = [op for op, kind in enumerate(graph.kinds) if kind in ("parameter", "buffer")]
    return sum(int(graph.resident_bytes[op]) for op in ops if graph.op_names[op].endswith(ends))


def test_a_decode_step_has_no_tokens_to_cut(tmp_path: Path) -> None:
    """Tokens of a prompt are cut over ranks, those of a decode step are not: it is refused in one line."""
    text = text_of("llama", tmp_path)
    source = ModelSource(text, Reading(training=False, serving=Serving("decode")))
    with pytest.raises(InputError, match="a decode step has one a sequence; leave context out, or take tensor=2"):
        source.sharded(Shards(context=2)).whole()


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *(pytest.param(name, "decode", marks=[pytest.mark.long] * (name in PLAIN)) for name in CONFIGS),
        ("llama", "prefill"),
        pytest.param("deepseek_v3", "prefill", marks=pytest.mark.long),
    ],
)
def test_two_ranks_do_the_work_of_one_card(name: str, phase: str, tmp_path: Path) -> None:
    """Two ranks together compute the products and hold the cache of the whole model; latents are there twice."""
    text = text_of(name, tmp_path)
    whole, local = served(text, phase, 1), served(text, phase, 2)
    repeated = 2 * product_flops(local.graph) / product_flops(whole.graph) - 1
    noted = any("tensor=2 leaves" in note for note in local.notes)
    assert -0.002 < repeated < (0.25 if noted else 0.001)  # biases are added after sums, not in the products
    caches = [bytes_of(model.graph, "_cache") for model in (whole, local)]
    copies = 2 if name in CACHED_ONCE else 1
    assert caches[1] * 2 == caches[0] * copies
    assert any("holds the cache 2 times" in note for note in local.notes) == (copies == 2)
    assert local.served == whole.served
    assert local.served is not None
    assert local.served.cache_bytes == caches[0]
    assert dict(local.unknown_costs) == dict(whole.unknown_costs)


@pytest.mark.parametrize(("phase", "tokens"), [("prefill", 9), ("decode", 1)])
def test_exchanges_of_a_served_step(phase: str, tokens: int, tmp_path: Path) -> None:
    """A layer sums up activations twice, the table once; the logits of the last tokens are gathered."""
    graph = served(text_of("llama", tmp_path), phase, 2).graph
    sums = [op for op, kind in enumerate(graph.kinds) if kind == "collective.all_reduce"]
    (gather,) = (op for op, kind in enumerate(graph.kinds) if kind == "collective.all_gather")
    assert exchanges(graph) == {("forward", "all_reduce"): 2 * LAYERS + 1, ("forward", "all_gather"): 1}
    assert set(graph.bytes_accessed[sums].tolist()) == {4 * 2 * tokens * WIDTH}
    assert graph.bytes_accessed[gather] % (4 * 2 * VOCABULARY) == 0


def test_experts_with_biases_are_summed_up_once(tmp_path: Path) -> None:
    """Mixtures whose experts have biases, and gates in every second column, take two sums a layer as others do."""
    graph = served(text_of("gpt_oss", tmp_path), "decode", 2).graph
    assert exchanges(graph) == {("forward", "all_reduce"): 2 * LAYERS + 1, ("forward", "all_gather"): 1}


def test_fewer_heads_than_ranks(tmp_path: Path) -> None:
    """Of two heads of keys on four ranks each rank caches one: the cache is there twice, which a note says."""
    text = text_of("llama", tmp_path)
    whole, local = served(text, "decode", 1), served(text, "decode", 4)
    assert 4 * bytes_of(local.graph, "_cache") == 2 * bytes_of(whole.graph, "_cache")
    assert any("tensor=4 holds the cache 2 times" in note for note in local.notes)
    assert local.served == whole.served


def test_stored_bytes_are_cut(tmp_path: Path) -> None:
    """Quantised weights and a cache of one byte an element are cut as those of the model's type."""
    text = text_of("llama", tmp_path, dtype="bfloat16") + "&weights=int4"
    whole, local = (served(text, "decode", tensor, Fraction(1)) for tensor in (1, 2))
    assert 2 * bytes_of(local.graph, "_cache") == bytes_of(whole.graph, "_cache")
    layers = [bytes_of(model.graph, "proj.weight") for model in (whole, local)]
    assert 2 * layers[1] == layers[0]


def test_experts_of_a_rank_are_hit_by_rows_of_their_own(tmp_path: Path) -> None:
    """Two tokens of two experts of four each hit 3/4 of them; two rows on a rank with two hit 3/4 of these, too."""
    source = ModelSource(text_of("mixtral", tmp_path), Reading(training=False, serving=Serving("decode")))
    for shards, rows in ((Shards(), 4), (Shards(2, expert=2), 2)):
        graph = (source if rows == 4 else source.sharded(shards)).part(1).graph
        found = 0
        for text, num_bytes in zip(graph.shapes, graph.bytes_accessed.tolist(), strict=True):
            for call in parsed_calls(text):
                if "grouped" in call.kind and call.arrays[1].num_elements > 1:
                    hidden, weights, ends = call.arrays[:3]
                    assert hidden.size[0] == rows
                    whole = sum(map(array_bytes, (hidden, ends, *call.results)))
                    assert num_bytes == pytest.approx(whole + array_bytes(weights) * 3 / 4, abs=2)
                    found += 1
        assert found == 2 * LAYERS


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    """An embedding that is the head too, quantised as llama.cpp has it, is cut as any other weight."""
    text = text_of("llama", tmp_path, dtype="bfloat16", tie_word_embeddings=True) + "&weights=q4_k_m"
    whole, local = (served(text, "decode", tensor) for tensor in (1, 2))
    layers = [bytes_of(model.graph, "proj.weight") for model in (whole, local)]
    assert 2 * layers[1] == layers[0]


def test_ranks_serve_as_the_whole_model_does(tmp_path: Path) -> None:
    """Two processes with a part of weights and cache each get the logits of the whole models."""
    texts = {name: text_of(name, tmp_path) for name in EXECUTED}
    steps = [f"{phase}={text}" for text in texts.values() for phase in ("prefill", "decode")]
    command = [sys.executable, "-m", "tests.models.served_ranks", "2", *steps]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = dict(line.rsplit(maxsplit=1) for line in result.stdout.splitlines())
    assert set(lines) == set(steps)
    assert {step: difference for step, difference in lines.items() if not float(difference) < 1e-5} == {}
