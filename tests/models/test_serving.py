"""Prefill and decode of Transformers configs: the bits of the model, and the memory of the cache by hand."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gdp
from benchmarks import model_configs
from gdp.cli import main
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.hugging_face import build, kv_cache
from gdp.models.model import Reading
from gdp.models.serving import ServedStep, Serving
from gdp.models.source import ModelSource
from gdp.simulator.problem import Problem

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LATENT = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
MAMBA = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES | GROUPED),
    "mistral": ("MistralForCausalLM", SIZES | GROUPED | {"sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", SIZES | GROUPED | {"sliding_window": 5}),
    "gpt_oss": (
        "GptOssForCausalLM",
        SIZES | GROUPED | {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", SIZES | LATENT),
    "mamba": ("MambaForCausalLM", MAMBA),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 50,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "n_positions": 64,
            "decoder_start_token_id": 0,
            "is_encoder_decoder": True,
        },
    ),
}
CONTEXT = 9

# Qwen/Qwen2.5-32B, config.json
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write(directory: Path, content: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def tiny(name: str, directory: Path, sizes: str) -> str:
    architecture, config = TINY[name]
    return f"hf:{write(directory, {'architectures': [architecture], 'model_type': name, **config})}?batch=2{sizes}"


def built(text: str, phase: str) -> tuple[Any, dict[str, Any]]:
    """The model with parameters drawn, and the inputs of a step with a real cache."""
    torch.manual_seed(1)
    model, _, inputs = build.ServedBuild(text, Serving(phase))()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model, inputs


def captured(text: str, phase: str, cache: Fraction | None = None) -> tuple[Any, ServedStep]:
    capture, model = ModelSource(text, Reading(training=False, serving=Serving(phase, cache)))._capture_served(1)
    assert not capture.coverage.unknown
    return capture, model.served


def logits(model: Any, tokens: Any, others: dict[str, Any]) -> Any:
    """The last token's, by the library alone and without a cache."""
    with torch.no_grad():
        name = "decoder_input_ids" if others else "input_ids"
        return model(**{name: tokens}, **others).logits[:, -1]


@pytest.mark.parametrize("name", TINY)
def test_decoding_after_a_prefill(name: str, tmp_path: Path) -> None:
    """A prefill writes 8 tokens to the cache, a decode step reads them; the model without a cache sees all 9."""
    sequence = f"&sequence={CONTEXT - 1}" if name != "t5" else ""
    prefill, prefilled = built(tiny(name, tmp_path / "prefill", f"&context={CONTEXT}{sequence}"), "prefill")
    text = tiny(name, tmp_path / "decode", f"&context={CONTEXT}")
    decode, inputs = built(text, "decode")
    decode.load_state_dict(prefill.state_dict())
    plain, _, _ = ModelSource(tiny(name, tmp_path / "plain", ""), Reading(training=False)).build()
    plain.load_state_dict(prefill.state_dict())
    capture, _ = captured(text, "decode")
    if name == "t5":  # the encoder's keys, and one decoded token
        _decode_t5(prefill, prefilled, decode, inputs, plain, capture)
        return
    with torch.no_grad():
        first = prefill(**prefilled).logits[:, -1]
    assert torch.allclose(first, logits(plain, prefilled["input_ids"], {}), atol=1e-5)
    _copy_caches(prefill, decode)
    state = {key: value.clone() for key, value in decode.named_buffers()}
    with torch.no_grad():
        found = decode(**inputs).logits[:, -1]
    tokens = torch.cat((prefilled["input_ids"], inputs["input_ids"]), dim=1)
    assert torch.allclose(found, logits(plain, tokens, {}), atol=1e-5)
    replay = capture.program.replay(dict(decode.named_parameters(remove_duplicate=False)) | state, (), inputs)
    assert torch.allclose(replay.outputs["logits"][:, -1], found, atol=1e-6)


@pytest.mark.parametrize(("name", "fused"), [("llama", 0), ("mistral", 2), ("gemma2", 2), ("gpt_oss", 2)])
def test_a_prefill_makes_no_scores_and_no_masks(name: str, fused: int, tmp_path: Path) -> None:
    """Attention with windows, capped scores or sinks is one operator, without tensors of tokens x tokens."""
    graph = captured(tiny(name, tmp_path, "&sequence=33"), "prefill")[0].graph
    assert graph.kinds.count("served.fused_attention") == fused
    assert not any("33,33]" in text for text in graph.shapes)


def test_masks_of_chunks_stay(tmp_path: Path) -> None:
    """Llama 4 attends in chunks, which kernels of windows do not know: its prefill keeps that mask."""
    config = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", **SIZES, **GROUPED}
    more = {"attention_chunk_size": 5, "intermediate_size_mlp": 48, "num_local_experts": 2, "dtype": "bfloat16"}
    text = f"hf:{write(tmp_path, config | more)}?batch=2&sequence=33"
    assert any("bool[2,1,33,33]" in shapes for shapes in captured(text, "prefill")[0].graph.shapes)


def _copy_caches(prefill: Any, decode: Any) -> None:
    """Fills the cache of a decode step: the tokens of the prefill are first, or a window's last without the oldest."""
    source, target = dict(prefill.named_buffers()), dict(decode.named_buffers())
    for name in target:
        if name.endswith("state_cache"):
            target[name].copy_(source[name])
        elif name.endswith("_cache"):
            places = target[name].shape[-2]
            oldest = 0 if places == CONTEXT else 1
            target[name][..., : places - 1, :] = source[name][..., oldest : oldest + places - 1, :]


def _decode_t5(prefill: Any, prefilled: Any, decode: Any, inputs: Any, plain: Any, capture: Any) -> None:
    with torch.no_grad():
        first = prefill(**prefilled).logits
    expected = logits(plain, prefilled["decoder_input_ids"], {"input_ids": prefilled["input_ids"]})
    assert torch.allclose(first[:, -1], expected, atol=1e-5)
    assert inputs.keys() == {"encoder_outputs", "decoder_input_ids", "past_key_values", "use_cache"}
    assert not [
        path
        for path, op in zip(capture.graph.modules, capture.graph.kinds, strict=True)
        if path.startswith("encoder.block") and op not in ("parameter", "buffer")
    ]


def test_decode_step_of_qwen_by_hand(tmp_path: Path) -> None:
    """Qwen2.5-32B in bfloat16, 16 sequences of 8192 tokens.

    Weights of a layer: q, o 2 x 5120 x 5120, k, v 2 x 5120 x 1024, three of 5120 x 27648: 487,587,840; biases 5120 + 2
    x 1024, norms 2 x 5120: 17,408. 64 layers, a norm and two tables of 152064 x 5120: 32,763,876,352 weights,
    65,527,752,704 bytes. Cache: 2 (keys, values) x 64 layers x 8 heads x 128 x 2 bytes = 262,144 bytes for a token,
    x 16 x 8192 = 34,359,738,368. Attention reads all of it; products read all weights but the table of tokens.
    """
    text = f"hf:{write(tmp_path, QWEN)}?batch=16&context=8192"
    capture, served = captured(text, "decode")
    graph: Graph = capture.graph
    sources = {
        kind: int(sum(size for size, of in zip(graph.resident_bytes.tolist(), graph.kinds, strict=True) if of == kind))
        for kind in ("parameter", "buffer")
    }
    assert sources["parameter"] == 65_527_752_704
    assert served == ServedStep("decode", 16, 1, 8192, 34_359_738_368)
    assert sources["buffer"] == 34_359_738_368 + 2 * 64 * 4  # and 64 rotary frequencies, twice
    products = sum(
        size
        for size, kind in zip(graph.bytes_accessed.tolist(), graph.kinds, strict=True)
        if kind in ("aten.mm", "aten.addmm")
    )
    attention = sum(
        size for size, kind in zip(graph.bytes_accessed.tolist(), graph.kinds, strict=True) if "attention" in kind
    )
    assert products == pytest.approx(65_527_752_704 - 2 * 152064 * 5120, rel=0.01)
    assert attention == pytest.approx(34_359_738_368, rel=0.002)
    # each cache is beside its layer, its writer in its group
    writers = [op for op, kind in enumerate(graph.kinds) if kind == "aten.copy_"]
    caches = [op for op, name in enumerate(graph.op_names) if name.endswith(("key_cache", "value_cache"))]
    assert len(caches) == len(writers) == 128
    assert sorted(graph.groups[writers]) == sorted(graph.groups[caches])
    assert {graph.modules[op] for op in caches} == {f"model.layers.{layer}.self_attn" for layer in range(64)}


def test_bytes_of_an_element_of_the_cache(tmp_path: Path) -> None:
    """q8_0 has 34 bytes for 32 elements: 1.0625 in place of the 4 of float32, and nothing else changes."""
    text = tiny("llama", tmp_path, "&context=64")
    (plain, full), (small, scaled) = captured(text, "decode"), captured(text, "decode", Fraction(34, 32))
    # 2 sequences x 64 places x 2 heads x 8 x 4 bytes, keys and values, 2 layers
    assert (full.cache_bytes, scaled.cache_bytes) == (32_768, 32_768 * 17 // 64)
    for op, kind in enumerate(plain.graph.kinds):
        before, after = int(plain.graph.bytes_accessed[op]), int(small.graph.bytes_accessed[op])
        if "attention" in kind:  # keys and values of a layer
            assert before - after == 16_384 * 47 // 64
        elif kind == "aten.copy_":  # one place of keys or values
            assert before - after == 2 * 2 * 8 * 4 * 47 // 64
        else:
            assert before == after
    assert small.graph.num_ops == plain.graph.num_ops


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        # 2 layers x 2 sequences x 2 heads x 8 wide x 4 bytes, keys and values: a window of 5, or all 40 places
        ("mistral", 2 * 5 * 512 // 1 // 2),
        ("gemma2", (5 + 40) * 256),
        # 2 layers x 2 sequences x 40 places x (16 latents + 8 rotary) x 4 bytes
        ("deepseek_v3", 2 * 2 * 40 * 24 * 4),
        # 2 layers x 2 sequences x 32 inner x (4 states + 4 of the convolution) x 4 bytes, however long the context
        ("mamba", 2 * 2 * 32 * 8 * 4),
    ],
)
def test_windows_latents_and_states(name: str, num_bytes: int, tmp_path: Path) -> None:
    """Windows, latents and states take the memory of their kind."""
    _, served = captured(tiny(name, tmp_path, "&context=40"), "decode")
    assert served.cache_bytes == num_bytes


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("name", "architecture", "config"),
    [
        ("afmoe", "AfmoeForCausalLM", {"num_hidden_layers": 2}),  # gives its mask by name
        ("deepseek_v32", "DeepseekV32ForCausalLM", {"num_hidden_layers": 1}),  # chooses places by its mask
    ],
)
def test_attention_that_reads_its_mask(
    name: str, architecture: str, config: dict[str, Any], phase: str, tmp_path: Path
) -> None:
    """Layers get the mask as they ask for it, also the one token of a decode step."""
    text = f"hf:{write(tmp_path, {'architectures': [architecture], 'model_type': name, **config})}?batch=2&context=32"
    capture, _ = captured(text, phase)
    assert capture.graph.num_ops


def test_rates_of_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has the tokens per second, and the time to the first token."""
    monkeypatch.chdir(tmp_path)
    common = ["--devices", "l4-24g", "--threads", "1"]
    answers = {}
    for phase in ("decode", "prefill"):
        step = [tiny("llama", tmp_path / "llama", "&context=32"), "--phase", phase, *common]
        search = ["--budget", "1sims", "--json"]
        assert main(["place", *step, *search, "--no-advice"]) == 0
        answers[phase] = json.loads(capsys.readouterr().out)
        assert main(["simulate", *step[:-2], "--plan", answers[phase]["plan"], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["serving"] == answers[phase]["serving"]
        assert main(["compare", *step, *search, "--seeds", "1", "--placers", "single,accelerate-auto"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert [row["serving"] for row in rows] == [answers[phase]["serving"]] * 2  # one device
    assert main(["place", *step, *search, "--sweep", "devices=1"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["serving"] == answers["prefill"]["serving"]
    decode, prefill = (answers[phase]["serving"] for phase in ("decode", "prefill"))
    assert decode["tokens_per_second"] == pytest.approx(2e9 / answers["decode"]["step_time_ns"])
    assert prefill["time_to_first_token_ns"] == answers["prefill"]["step_time_ns"]
    assert (prefill["num_tokens"], decode["num_tokens"], decode["context"]) == (32, 1, 32)


def test_a_prompt_is_what_the_encoder_reads(tmp_path: Path) -> None:
    """A prefill of encoder and decoder is told by the tokens of its prompt, and a decode step by one."""
    served = [captured(tiny("t5", tmp_path, "&sequence=32"), phase)[1] for phase in ("prefill", "decode")]
    assert [each.num_tokens for each in served] == [32, 1]


def test_the_type_of_the_reading(tmp_path: Path) -> None:
    """A served model is converted to the type that is asked for: its weights and cache are those of a typed text."""
    text = tiny("llama", tmp_path, "&context=32")
    for phase in ("prefill", "decode"):
        reading = Reading(training=False, dtype="bfloat16", serving=Serving(phase))
        typed, _ = captured(f"{text}&dtype=bfloat16", phase)
        assert ModelSource(text, reading)._capture_served(1)[1].graph.fingerprint == typed.graph.fingerprint


def test_the_type_of_a_text_config(tmp_path: Path) -> None:
    """A model of text and images whose text_config alone has a type is served in it, as Qwen3-VL is published."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": SIZES | GROUPED | {"dtype": "bfloat16", "rope_parameters": rope},
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32},
    }
    _, served = captured(f"hf:{write(tmp_path, config)}?batch=2&context=32", "decode")
    assert served.cache_bytes == 2 * 2 * 2 * 32 * 2 * 8 * 2  # keys and values of 2 layers, 2 sequences, 2 heads


def test_a_cache_on_the_cpu(tmp_path: Path) -> None:
    """Offload is a plan: half of the cache, and the attention that reads it, on the second device."""
    capture, served = captured(tiny("llama", tmp_path, "&context=32"), "decode")
    graph = capture.graph
    problem = Problem.build(graph, Cluster.parse("l4-24g+cpu-16core"))
    offloaded = [module == "model.layers.1.self_attn" for module in graph.modules]
    simulation = gdp.simulate(problem, np.array(offloaded, np.int64))
    assert simulation.feasible
    cached = graph.resident_bytes[np.array(offloaded)].sum()
    assert cached == served.cache_bytes // 2
    assert cached <= simulation.peak_memory_bytes[1] < 2 * cached


DECODERS = (
    "whisper-small",
    "t5-base",
    "llama-70b",
    "mixtral-8x7b",
    "mamba-130m",
    "qwen3-30b-a3b",
    "mistral-7b",
    "gemma-3-27b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
    "phi-4",
    "gpt2",
    "qwen2.5-vl-7b",
    "llava-1.5-7b",
    "bart-large",
    "qwen3-next-80b",
    "llama-4-scout",
    "qwen3-8b",
    "smollm3-3b",
)


@pytest.mark.long
@pytest.mark.parametrize("name", DECODERS)
def test_published_decoders(name: str, tmp_path: Path) -> None:
    """Published decoders are captured in both phases with known costs."""
    text = f"hf:{model_configs.write_config(name, tmp_path)}?batch=2"
    assert captured(text, "decode")[1].cache_bytes > 0
    prompt = "" if name in ("whisper-small", "t5-base", "bart-large") else "&context=64"
    assert captured(f"{text}{prompt}", "prefill")[1].cache_bytes > 0


BAD = [
    (["--phase", "decoding"], "", "--phase is 'decoding'; step, prefill, decode are known"),
    (["--kv-cache", "1"], "", "--kv-cache: only prefill and decode have a cache"),
    (["--phase", "decode", "--kv-cache", "0"], "", "--kv-cache is 0; more than 0 and at most 8"),
    (["--phase", "decode", "--kv-cache", "q9"], "", "--kv-cache is 'q9'; bytes per element"),
    (["--phase", "decode", "--sweep", "microbatches=1,2"], "", "--sweep microbatches: .*leave out --phase"),
    (["--phase", "decode", "--microbatches", "2"], "", "--microbatches: .*leave out --phase"),
    (["--phase", "decode"], "&sequence=4", "sequence is given, but a decode step feeds one token"),
    (["--phase", "decode"], "&context=65", "context is 65; the model has 64 positions"),
    (["--phase", "prefill"], "&context=8&sequence=9", "sequence is 9, and context 8; the cache holds the prompt"),
    ([], "&context=8", "context is the size of a cache; add --phase prefill or --phase decode"),
]


@pytest.mark.parametrize(("options", "sizes", "message"), BAD)
def test_bad_options(
    options: list[str],
    sizes: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each exits with status 2."""
    monkeypatch.chdir(tmp_path)
    text = tiny("llama", tmp_path / "llama", sizes)
    assert main(["place", text, "--devices", "l4-24g", *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, error)
    assert not (tmp_path / "plan.json").exists()


def test_models_without_a_cache(tmp_path: Path) -> None:
    """Models of Transformers with a cache have phases, no others."""
    for text, message in (
        ("rnnlm-2", "--phase: rnnlm-2 is read as it is"),
        (f"hf:{write(tmp_path, {'_class_name': 'UNet2DModel'})}", "a model of Diffusers has no cache"),
    ):
        with pytest.raises(InputError, match=message):
            ModelSource(text, Reading(training=False, serving=Serving("decode"))).whole()
    for kind, name, message in (
        ("vit", "ViTForImageClassification", "reads no tokens, so it has no cache"),
        ("clip", "CLIPModel", "CLIPModel takes no cache"),
        ("bert", "BertModel", "its tokens attend to later ones, so it has no cache"),
    ):
        config = {"architectures": [name], "model_type": kind, "hidden_size": 24, "num_hidden_layers": 1}
        with pytest.raises(InputError, match=message):
            build.ServedBuild(f"hf:{write(tmp_path, config)}", Serving("decode"))()


def test_names_of_the_hub() -> None:
    """A name of the hub gets the command that fetches its config."""
    with pytest.raises(InputError, match=r"hf download Qwen/Qwen2\.5-32B config\.json --local-dir Qwen/Qwen2\.5-32B"):
        ModelSource("hf:Qwen/Qwen2.5-32B").whole()


def test_a_room_knows_the_tokens_before_its_step() -> None:
    """A decode step adds the last token of the context; a prefill starts empty."""
    assert (kv_cache.CacheRoom(9, True).past, kv_cache.CacheRoom(9, False).past) == (8, 0)
