"""Experts: an op reads the weights of the experts that its tokens are sent to, and no others."""

import json
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gdp
from benchmarks.reported import at_sheets
from gdp.bounds.lower_bound import lower_bound
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.experts import share_hit
from gdp.models.source import load
from gdp.simulator.problem import Problem

GB = 10**9
MIXTRAL = {  # mistralai/Mixtral-8x7B-v0.1
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}
QWEN3 = {  # Qwen/Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "dtype": "bfloat16",
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
# 8 experts, 2 a token, with matrices 32 x 16 (gate, up) and 16 x 32
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV2": {**LATENT, **ROUTED, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "DeepseekV3": {**LATENT, **ROUTED, "n_group": 4, "topk_group": 2},
    "GptOss": {"intermediate_size": 16, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Llama4": {
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
    },
}
TYPES = {
    "Mixtral": "mixtral",
    "Qwen3Moe": "qwen3_moe",
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
    "GptOss": "gpt_oss",
    "Llama4": "llama4_text",
}


def decode_graph(config: dict[str, Any], directory: Path, batch: int = 1) -> Graph:
    """Returns the step of one token of each of `batch` sequences."""
    (directory / "config.json").write_text(json.dumps(config))
    return load(f"hf:{directory}?batch={batch}&sequence=1", training=False)


def grouped_bytes(graph: Graph) -> list[int]:
    """Returns the bytes accessed of each grouped product."""
    return [int(graph.bytes_accessed[op]) for op, kind in enumerate(graph.kinds) if "grouped_mm" in kind]


@pytest.mark.parametrize(("experts", "per_token", "tokens"), [(4, 1, 3), (4, 2, 2), (5, 3, 2), (3, 3, 2)])
def test_share_is_the_mean_over_all_routings(experts: int, per_token: int, tokens: int) -> None:
    """By counting: each token takes any set of distinct experts, all as likely."""
    routings = list(product(combinations(range(experts), per_token), repeat=tokens))
    mean = Fraction(sum(len({one for choice in routing for one in choice}) for routing in routings), len(routings))
    assert share_hit(experts, tokens * per_token, per_token) == pytest.approx(float(mean / experts), abs=1e-9)


def test_shares_by_hand() -> None:
    """8 of 128; and without the experts of a token, 2 rows of 8 groups: 1 - (7/8)^2 = 15/64."""
    assert share_hit(128, 8, 8) == Fraction(8, 128)
    assert share_hit(8, 2) == Fraction(15, 64)
    assert share_hit(8, 10**6, 2) == 1
    assert share_hit(8, 0, 2) == 0


def test_mixtral_reads_two_experts_of_eight(tmp_path: Path) -> None:
    """25.5 GB of 93.4, in bfloat16, 2 bytes a weight."""
    # attention: query and output 4096 x 4096, key and value 4096 x 1024; experts: three matrices 4096 x 14336
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 3 * 4096 * 14336
    expected = 2 * (32 * layer + 4096 * 32000)
    assert expected == pytest.approx(25.50 * GB, rel=1e-3)
    assert decode_graph(MIXTRAL, tmp_path).bytes_accessed.sum() == pytest.approx(expected, rel=0.05)


@pytest.mark.long
def test_qwen3_reads_eight_experts_of_128(tmp_path: Path) -> None:
    """6.1 GB of 61: on an A100 at 2,039 GB/s, 3.0 ms of reading in all."""
    # attention: query and output 2048 x 4096, key and value 2048 x 512; router; experts: three matrices 2048 x 768
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 8 * 3 * 2048 * 768
    expected = 2 * (48 * layer + 2048 * 151936)
    assert pytest.approx(3.62 * GB, rel=2e-3) == 48 * 8 * 3 * 2048 * 768 * 2  # of experts alone
    assert expected == pytest.approx(6.08 * GB, rel=1e-3)
    graph = decode_graph(QWEN3, tmp_path)
    assert graph.bytes_accessed.sum() == pytest.approx(expected, rel=0.05)
    launches = 5001 * int(((graph.flops > 0) | (graph.bytes_accessed > 0)).sum())  # and a ns to round up
    bound = lower_bound(Problem.build(graph, at_sheets(Cluster.parse("a100-sxm-80g"))))
    assert bound <= launches + graph.bytes_accessed.sum() / 2039


@pytest.mark.parametrize(
    ("family", "batch", "share"),
    [
        *((family, 3, 1 - Fraction(6, 8) ** 3) for family in FAMILIES),
        *((family, 1, Fraction(2, 8)) for family in ("Mixtral", "DeepseekV3")),
    ],
)
def test_experts_of_every_family(family: str, batch: int, share: Fraction, tmp_path: Path) -> None:
    """8 experts, 2 a token: a quarter of the weights for one token, 1 - (3/4)^3 = 37/64 for three."""
    config = {**SMALL, **FAMILIES[family], "model_type": TYPES[family], "architectures": [f"{family}ForCausalLM"]}
    rows = 2 * batch
    up, down = 8 * 32 * 32, 8 * 16 * 32  # weights of gate and up together, and of down
    # bfloat16: input, weights, result; the ends of 8 groups are int32
    bias = 3 * 2 * rows * 32 if family == "GptOss" else 0  # added in place to both products: two reads, a write
    expected = [
        2 * (rows * 32 + rows * 32) + 2 * up * share + 4 * 8 + bias,
        2 * (rows * 16 + rows * 32) + 2 * down * share + 4 * 8 + bias,
    ]
    graph = decode_graph(config, tmp_path, batch)
    assert grouped_bytes(graph) == pytest.approx([float(count) for count in expected], abs=2)
    assert sum(flops for flops, kind in zip(graph.flops.tolist(), graph.kinds, strict=True) if "grouped" in kind) == (
        2 * rows * (32 * 32 + 16 * 32) + (2 * rows * 32 if bias else 0)
    )


class Grouped(nn.Module):
    """Rows that are sent to experts by their number, without a `topk` that says how many a token has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, 16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_unknown_tokens(dtype: torch.dtype) -> None:
    """2 rows of 8 experts: 15 of 64 parts of the weights; and a grouped product of float32 is captured too."""
    inputs = torch.randn(2, 32, dtype=dtype), torch.zeros(8, dtype=torch.int32)
    graph = gdp.capture(Grouped().to(dtype), inputs, name="grouped", training=False).graph
    size = dtype.itemsize
    assert grouped_bytes(graph) == [size * (2 * 32 + 2 * 16) + 4 * 8 + size * 8 * 32 * 16 * 15 // 64]


def test_gradients_of_experts_are_dense(tmp_path: Path) -> None:
    """The gradient of a weight is dense: of experts that no token hit it is zeros, which are written."""
    inputs = torch.randn(2, 32, requires_grad=True), torch.zeros(8, dtype=torch.int32)
    graph = gdp.capture(Grouped().bfloat16(), (inputs[0].bfloat16(), inputs[1]), name="grouped").graph
    backward = [op for op, phase in enumerate(graph.phases) if phase == "backward" and "grouped" in graph.kinds[op]]
    assert max(int(graph.bytes_accessed[op]) for op in backward) >= 2 * 8 * 32 * 16


def test_a_loop_over_experts_is_refused() -> None:
    """Transformers' eager experts look at which experts were hit."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(**{**SMALL, **FAMILIES["Mixtral"]})
    model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager")
    with pytest.raises(InputError, match="experts_implementation='grouped_mm'"):
        gdp.capture(model, (torch.zeros(1, 4, dtype=torch.int64),), name="eager", training=False)
