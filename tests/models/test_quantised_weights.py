"""Quantised weights: resident bytes, reads and transfers have the bits of the format, with its scales."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdp.cli import main
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.gguf.tensors import Matrix, type_in
from gdp.models.model import Reading
from gdp.models.source import ModelSource, load

GB = 10**9
QWEN32 = {  # Qwen/Qwen2.5-32B
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# weights of linear layers: query and output 256 x 256, key and value 256 x 128; gate, up and down 256 x 512
LINEAR = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
ROWS = 2 * 256 + 2 * 128 + 2 * 512 + 256  # of these matrices
OTHERS = 2 * (2 * 1000 * 256 + 3 * 256)  # embedding, output layer and norms in bfloat16


def graph_of(config: dict[str, Any], directory: Path, query: str = "") -> Graph:
    """Returns a step of one token."""
    (directory / "config.json").write_text(json.dumps(config))
    return load(f"hf:{directory}?batch=1&sequence=1{query}", training=False)


def quantised(**content: Any) -> dict[str, Any]:
    """Returns the small model with that `quantization_config`."""
    return {**LLAMA, "quantization_config": content}


def test_weights_of_a_32b_model_in_4_bits(tmp_path: Path) -> None:
    """AWQ: 31.21 G weights of 4 + 20/128 bits and 1.56 G of 16: 19.3 GB. Q4_K_M: 4.85 bits on average, 19.8 GB."""
    layer = 2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27648
    embeddings = 2 * 152064 * 5120
    small = 64 * (5120 + 2 * 1024 + 2 * 5120) + 5120  # biases and norms
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    graph = graph_of({**QWEN32, "quantization_config": awq}, tmp_path)
    inputs = 2 * 64  # rotary frequencies are float32
    assert graph.resident_bytes.sum() == pytest.approx(
        64 * layer * (4 + 20 / 128) / 8 + 2 * (embeddings + small), abs=1000 * inputs
    )
    assert graph.resident_bytes.sum() == pytest.approx(19.33 * GB, rel=1e-3)
    graph = graph_of(QWEN32, tmp_path, "&weights=q4_k_m")
    assert graph.resident_bytes.sum() == pytest.approx(19.85 * GB, rel=1e-3)  # bartowski/Qwen2.5-32B-Instruct-GGUF
    assert 8 * graph.resident_bytes.sum() / (64 * layer + embeddings) == pytest.approx(4.85, abs=0.01)
    # one row of the embedding is read, of 152,064
    assert graph.bytes_accessed.sum() == pytest.approx(graph.resident_bytes.sum() - 152064 * 5120 * 4.5 / 8, rel=0.01)


FORMATS: dict[str, tuple[dict[str, Any], str, float, str]] = {
    # config, query, bits of LINEAR in all, type of products
    "int4": (LLAMA, "&weights=int4", LINEAR * (4 + 20 / 128), "bfloat16"),
    "int8": (LLAMA, "&weights=int8", LINEAR * 8 + ROWS * 16, "bfloat16"),
    "nf4": (LLAMA, "&weights=nf4", LINEAR * 4.5, "bfloat16"),
    "fp8": (LLAMA, "&weights=fp8", LINEAR * (8 + 32 / 128**2), "float8_e4m3fn"),
    "awq": (quantised(quant_method="awq", bits=4, group_size=64), "", LINEAR * (4 + 20 / 64), "bfloat16"),
    "gptq by channel": (quantised(quant_method="gptq", bits=8, group_size=-1), "", LINEAR * 8 + ROWS * 24, "bfloat16"),
    "bitsandbytes 8": (quantised(load_in_8bit=True), "", LINEAR * 8 + ROWS * 32, "int8"),
    "bitsandbytes 4": (
        quantised(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_use_double_quant=True),
        "",
        LINEAR * (4 + 8 / 64 + 32 / (64 * 256)),
        "bfloat16",
    ),
    "fp8 of DeepSeek": (
        quantised(quant_method="fp8", weight_block_size=[128, 128]),
        "",
        LINEAR * (8 + 32 / 128**2),
        "float8_e4m3fn",
    ),
    "compressed-tensors": (
        quantised(
            quant_method="compressed-tensors",
            ignore=["lm_head"],
            config_groups={
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": {"num_bits": 8},
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
                }
            },
        ),
        "",
        LINEAR * 8 + ROWS * 16,
        "int8",
    ),
    "in its own dtype": (quantised(quant_method="awq", bits=4), "&weights=none", LINEAR * 16, "bfloat16"),
}


@pytest.mark.parametrize("case", FORMATS)
def test_bits_and_arithmetic_of_a_format_by_hand(case: str, tmp_path: Path) -> None:
    """Resident bytes, reads of one token and transfers of the weights agree."""
    config, query, bits, dtype = FORMATS[case]
    graph = graph_of(config, tmp_path, query)
    parameters = np.array([kind == "parameter" for kind in graph.kinds])
    assert graph.resident_bytes[parameters].sum() == pytest.approx(bits / 8 + OTHERS, abs=20)
    sent = graph.tensor_bytes[parameters[graph.producers] & (graph.view_of < 0)].sum()
    assert sent == graph.resident_bytes[parameters].sum()
    assert {graph.dtypes[op] for op, name in enumerate(graph.op_names) if "q_proj.mm" in name} == {dtype}
    assert {graph.dtypes[op] for op, name in enumerate(graph.op_names) if "lm_head.mm" in name} == {"bfloat16"}
    products = [op for op, name in enumerate(graph.op_names) if "_proj.mm" in name]
    activations = 2 * (ROWS + 4 * 256 + 2 * 256 + 512)  # results; inputs of q, k, v, o, gate and up, and of down
    assert graph.bytes_accessed[products].sum() == pytest.approx(bits / 8 + activations, abs=20)


def test_unconverted_modules_keep_their_dtype(tmp_path: Path) -> None:
    """The feed-forward layer of the only layer is named by a pattern."""
    config = quantised(quant_method="awq", bits=4, modules_to_not_convert=["model.layers.*.mlp"])
    attention = 2 * 256 * 256 + 2 * 256 * 128
    expected = attention * (4 + 20 / 128) / 8 + 2 * 3 * 256 * 512 + OTHERS
    assert graph_of(config, tmp_path).resident_bytes.sum() == pytest.approx(expected, abs=1000)


def test_mixtures_have_the_types_of_llama_cpp() -> None:
    """32 layers: the first 4, the last 4 and every third in between have better values and down projections."""
    better = [n for n in range(32) if type_in("q4_k_m", Matrix("down", 4096, n, 32)) == "Q6_K"]
    assert better == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert type_in("q4_k_m", Matrix("output", 4096)) == "Q6_K"
    assert type_in("q4_k_m", Matrix("", 896)) == "Q5_0"  # rows are no multiple of 256
    assert type_in("q4_k_m", Matrix("value", 4096, 5, 32, num_experts=8)) == "Q8_0"
    assert type_in("q8_0", Matrix("output", 4096)) == "Q8_0"


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown name": (LLAMA, "&weights=q4_k_mm", "weights is 'q4_k_mm'; did you mean q4_k_m"),
    "unknown method": (quantised(quant_method="aqlm"), "", "quant_method 'aqlm', which is not modelled"),
    "no bits": (quantised(quant_method="awq", bits="four"), "", "quantization_config of awq cannot be read"),
    "no object": ({**LLAMA, "quantization_config": [4]}, "", "quantization_config is a list; a JSON object"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_format_is_one_line(case: str, tmp_path: Path) -> None:
    """The line has the remedy."""
    config, query, message = BAD[case]
    with pytest.raises(InputError, match=message) as raised:
        graph_of(config, tmp_path, query)
    assert "\n" not in str(raised.value)


def test_training_and_execution_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training is refused with the remedy, execution too."""
    (tmp_path / "config.json").write_text(json.dumps(quantised(quant_method="awq", bits=4)))
    assert main(["place", f"hf:{tmp_path}", "--devices", "2xl4-24g", "--out", str(tmp_path / "out")]) == 2
    assert "quantised weights, which are for inference; give --inference" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"is placed, not executed: add \?weights=none"):
        ModelSource(f"hf:{tmp_path}", Reading(training=False)).capture()
